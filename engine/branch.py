"""The output of one branch as a user sees it: tokens, settled text, logprobs, and why it ended."""

from __future__ import annotations

from collections.abc import Iterable

from engine.detokenizer import Detokenizer
from engine.outputs import CompletionOutput, Logprob
from engine.request import RequestState, Sampled
from engine.sampling import SamplingParams
from engine.stopping import FinishReason, Stop, StopChecker
from engine.tokenizer import Tokenizer


class BranchOutput:
    """Takes the draws of one branch in order and tells when it is finished.

    request, branch: `token_ids` is the very list `request.outputs[branch]`, which must exist; `append` extends it, so
        that tokens are kept once.
    tokenizer: None for requests without text (or detokenize=False).
    max_tokens: the limit for this request; defaults to the request's own, and one of the two must be given.

    The token that ends a branch counts among its tokens; its text is left out unless include_stop_str_in_output (end
    and stop tokens), and so is a stop string.
    """

    def __init__(
        self,
        request: RequestState,
        branch: int,
        tokenizer: Tokenizer | None,
        eos_token_ids: Iterable[int],
        max_tokens: int | None = None,
    ) -> None:
        params: SamplingParams = request.params
        limit = max_tokens if max_tokens is not None else params.max_tokens
        if limit is None:
            raise ValueError("max_tokens is not given: neither by the request nor by the engine")
        self.index = branch
        self.token_ids = request.outputs[branch]
        self.cumulative_logprob = 0.0
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self._tokenizer = tokenizer
        self._checker = StopChecker(params, eos_token_ids, limit)
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer, request.prompt_token_ids, skip_special_tokens=params.skip_special_tokens
            )
        self._include_stop = params.include_stop_str_in_output
        self._pieces: list[str] = []  # the text, held back characters included
        self._length = 0  # of the text in characters; less than all pieces once a stop string has cut it
        self._untaken: list[str] = []  # what `delta` has not returned yet
        self._taken = 0

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        """The settled text: what may still become a stop string, and unfinished characters, are not in it."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0][: self._settled] if self._pieces else ""

    @property
    def _settled(self) -> int:
        return self._length if self.finished else self._length - self._checker.held

    def append(self, sampled: Sampled) -> bool:
        """Add one draw.  True when the branch is finished with it."""
        if self.finished:
            raise RuntimeError(f"branch {self.index} is finished: it takes no more tokens")
        token_id = sampled.token_id
        self.token_ids.append(token_id)
        self.cumulative_logprob += sampled.logprob
        if self.logprobs is not None:
            self.logprobs.append(self._logprobs_of(sampled))
        count = len(self.token_ids)
        stop = self._checker.check_token(token_id, count)
        length = self._checker.check_length(count)
        if self._detokenizer is not None:
            shown = stop is None or self._include_stop
            piece = self._detokenizer.append(token_id) if shown else ""
            if stop or length:
                piece += self._detokenizer.flush()
            self._add(piece)
            stop = stop or self._checker.check_text(piece, self._length, count)
        stop = stop or length
        if stop is not None:
            self._finish(stop)
        return self.finished

    def delta(self) -> str:
        """The settled text that no call before has returned: all of them joined are `text`."""
        untaken = "".join(self._untaken)
        new = self._settled - self._taken
        self._taken += new
        self._untaken = [untaken[new:]]
        return untaken[:new]

    def finish(self, reason: FinishReason) -> None:
        """End the branch from outside (abort, error): the text that was held back is released."""
        if not self.finished:
            if self._detokenizer is not None:
                self._add(self._detokenizer.flush())
            self._finish(Stop(reason))

    def to_completion(self, index: int | None = None) -> CompletionOutput:
        """A copy of the present state.  index: the place in the answer; the branch's own by default."""
        return CompletionOutput(
            index=self.index if index is None else index,
            text=self.text,
            token_ids=list(self.token_ids),
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _add(self, piece: str) -> None:
        if piece:
            self._pieces.append(piece)
            self._untaken.append(piece)
            self._length += len(piece)

    def _finish(self, stop: Stop) -> None:
        self.finish_reason = stop.finish_reason
        self.stop_reason = stop.reason
        if stop.keep is not None:
            self._length = stop.keep

    def _logprobs_of(self, sampled: Sampled) -> dict[int, Logprob]:
        """The most likely tokens, most likely first, and the one drawn, which may be one of them."""
        ranked = {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(sampled.top or (), start=1)}
        ranked.setdefault(sampled.token_id, (sampled.logprob, sampled.rank))
        return {
            token_id: Logprob(logprob, rank, self._decoded(token_id)) for token_id, (logprob, rank) in ranked.items()
        }

    def _decoded(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.decode([token_id], skip_special_tokens=False)
