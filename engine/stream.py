"""One request between the engine's thread and an event loop.

Guarantees: the engine never waits for a reader.  What a reader has not taken yet is kept as one growing piece for each
branch, so it is bounded by the request's own output, and a slow reader gets fewer and larger pieces.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from threading import Lock

from engine.branch import BranchOutput
from engine.errors import RequestFailedError
from engine.outputs import CompletionOutput, Logprob, RequestOutput


@dataclass(slots=True)
class Delta:
    """What a branch has gained since the delta before.  The last one has a finish_reason."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def __bool__(self) -> bool:
        return bool(self.token_ids) or bool(self.text) or self.finish_reason is not None


class _Gathered:
    """What a branch has that its reader has not taken, and how much was handed over so far."""

    __slots__ = ("characters", "delta", "ended", "tokens")

    def __init__(self, index: int) -> None:
        self.delta = Delta(index)
        self.characters = 0
        self.tokens = 0
        self.ended = False

    def add(self, branch: BranchOutput | CompletionOutput, text: str) -> None:
        delta = self.delta
        delta.text += text
        self.characters += len(text)
        delta.token_ids += branch.token_ids[self.tokens :]
        if branch.logprobs is not None:
            delta.logprobs += branch.logprobs[self.tokens :]
        self.tokens = len(branch.token_ids)
        if branch.finish_reason is not None and not self.ended:
            delta.finish_reason, delta.stop_reason = branch.finish_reason, branch.stop_reason
            self.ended = True


class RequestStream:
    """The output of one request, as it comes.

    prompt_token_ids: what the engine made of the prompt.  width: its branches, max(n, best_of).
    deltas: whether somebody reads it piece by piece; else only the result is handed over.
    ready: set when there is something to take; several streams may share one.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        width: int,
        *,
        deltas: bool,
        ready: asyncio.Event,
        lock: Lock,
        abort: Callable[[RequestStream], None],
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.width = width
        self.deltas = deltas
        self.ready = ready
        self.output: RequestOutput | None = None  # the last one
        self.error: Exception | None = None
        self.dirty = False  # waits to be woken
        self._lock = lock
        self._abort = abort
        self._gathered = [_Gathered(index) for index in range(width)] if deltas else []

    # the engine's side, under the lock

    def gather(self, branches: list[BranchOutput]) -> bool:
        """Take what the branches have gained; whether there was anything."""
        if not self.deltas:
            return False
        gained = False
        for branch, gathered in zip(branches, self._gathered, strict=True):
            if not gathered.ended:
                gathered.add(branch, branch.delta())
                gained = gained or bool(gathered.delta)
        return gained

    def end(self, output: RequestOutput | None, error: Exception | None = None) -> None:
        """The last output, or why there is none."""
        if self.ended:
            return
        self.output, self.error = output, error
        if output is None:
            return
        if output.error is not None:
            self.error = RequestFailedError(output.error)
            return
        for gathered, completion in zip(self._gathered, output.outputs, strict=False):
            if not gathered.ended:
                gathered.add(completion, completion.text[gathered.characters :])

    # the reader's side

    @property
    def ended(self) -> bool:
        return self.output is not None or self.error is not None

    def take(self) -> list[Delta]:
        """What has come since the last call, at most one delta for each branch.  Raises the request's error."""
        with self._lock:
            taken = [gathered.delta for gathered in self._gathered if gathered.delta]
            for delta in taken:
                self._gathered[delta.index].delta = Delta(delta.index)
            if not taken and self.error is not None:
                raise self.error
            return taken

    async def __aiter__(self) -> AsyncIterator[list[Delta]]:
        """Deltas until the end.  Leaving the loop early does not abort the request: call `abort`."""
        while True:
            ended = self.ended  # before taking: what comes in between is taken then or in the next round
            deltas = self.take()
            if deltas:
                yield deltas
            elif ended:
                return
            else:
                await self.ready.wait()
                self.ready.clear()

    async def result(self) -> RequestOutput:
        """The last output.  Raises the request's error."""
        while not self.ended:
            await self.ready.wait()
            self.ready.clear()
        if self.error is not None:
            raise self.error
        assert self.output is not None
        return self.output

    def abort(self) -> None:
        """End the request wherever it is; nothing happens if it has ended."""
        if not self.ended:
            self._abort(self)
