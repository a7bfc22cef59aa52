"""What a user gets back.  Field names are vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.branch import BranchOutput


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability (natural log) at one position.

    rank: 1 for the most likely token of the vocabulary.
    decoded_token: its text alone; None without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt.

    index: its place among the completions of the request.
    text: generated text; stop strings and the text of stop tokens only with include_stop_str_in_output.
    token_ids: all generated tokens, the one that ended the output included.
    cumulative_logprob: sum of the logprobs of token_ids under the model's own distribution.
    logprobs: for each token, token id -> Logprob of the most likely tokens and the one drawn; None if not asked for.
    finish_reason: "stop", "length", "abort", "error"; None while it goes on.
    stop_reason: the stop string or stop token id that ended it; None for end of sequence and for "length".
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of one monotonic clock; None before they have."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival to the first step that gave the request tokens."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """The state of a request, or its result once `finished`.

    prompt: the text, None if token ids were given.
    prompt_logprobs: always None: not supported.
    outputs: `n` completions (see `completions`).
    error: what went wrong for this request alone; None otherwise.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestMetrics | None = None
    error: str | None = None
    prompt_logprobs: None = None


def completions(branches: Sequence[BranchOutput], n: int) -> list[CompletionOutput]:
    """The `n` completions of a request with these branches.

    With more branches than `n` (best_of): the `n` with the highest cumulative logprob, best first, among equals the
    lower branch first, numbered from 0 in this order.  They are final only when all branches are finished.
    """
    if len(branches) <= n:
        return [branch.to_completion() for branch in branches]
    best = sorted(branches, key=lambda branch: -branch.cumulative_logprob)[:n]  # the sort is stable
    return [branch.to_completion(index) for index, branch in enumerate(best)]
