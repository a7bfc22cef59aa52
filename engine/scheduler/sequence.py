"""A sequence group: one request with its branches, and the arithmetic of what it has and what it still lacks.

Everything is catching up.  A group's *deficit* counts the tokens whose KV is missing before its branches can sample;
at a step boundary it is at least 1.  A decode lacks one token a live branch; a prompt, or a rebuild after recompute,
lacks more and is served in pieces.  Live branches always have equal length (law Q5), so one set of counts serves all.

    first run         |---- prompt: computed once ----|                       then fork into n branches
    rebuild           |-- full prompt blocks: once --|-- tail of branch 0 --|
                                                     |-- tail of branch 1 --|  each live branch computes its own tail
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from engine.scheduler.plan import PreemptionMode
from spec.logic import Bool, Int, conj, least, most, pick


class Status(Enum):
    """The queue a group is in, or the way it left."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finish"
    ABORTED = "abort"
    FAILED = "fail"

    @property
    def verb(self) -> str:
        """How the log names the way a group left."""
        return self.value


class SequenceGroup:
    """One request as the scheduler sees it: counts, never tokens.

    request_id: unique among unfinished groups.
    prompt_len: tokens of the prompt, at least 1.
    n: branches that run, max(n, best_of) of the request.
    max_tokens: most tokens a branch generates; None for as many as max_model_len and the pool allow this group alone.

    The scheduler sets the rest.  arrival: seniority, smaller is more senior.  known: tokens of each live branch (of the
    prompt before the fork).  live: unfinished branches; all n before the fork, so that limits count them from the
    start.  deficit: tokens still to compute.  branches: the numbers of the live branches; [0] before the fork.
    tables: block ids of each branch, on the device where the group lives.  held: distinct blocks it has there.
    tail_shared: its branches share the partly filled last prompt block, which none has written to yet.
    tokens: what it was given in the step under way, 0 outside.
    """

    __slots__ = (
        "arrival",
        "branches",
        "deficit",
        "forked",
        "held",
        "known",
        "live",
        "max_tokens",
        "n",
        "num_preemptions",
        "prompt_len",
        "request_id",
        "shared_blocks",
        "shared_tokens",
        "status",
        "tables",
        "tail_shared",
        "tokens",
    )

    def __init__(self, request_id: str, prompt_len: int, n: int = 1, max_tokens: int | None = None) -> None:
        self.request_id = request_id
        self.prompt_len: Int = prompt_len
        self.n = n
        self.max_tokens: Int = max_tokens
        self.arrival = -1
        self.shared_blocks: Int = 0  # full prompt blocks, p // block_size
        self.shared_tokens: Int = 0  # tokens in them
        self.live = n
        self.known: Int = prompt_len
        self.deficit: Int = prompt_len
        self.forked = False
        self.tail_shared: Bool = False
        self.held: Int = 0
        self.tokens: Int = 0
        self.branches: list[int] = [0]
        self.tables: list[list[int]] = [[]]
        self.status = Status.WAITING
        self.num_preemptions = 0

    def __repr__(self) -> str:
        kind = "decode" if self.is_decode else "prefill"
        return (
            f"<SequenceGroup {self.request_id!r} {kind} known={self.known} deficit={self.deficit} live={self.live} "
            f"held={self.held}>"
        )

    @property
    def generated(self) -> Int:
        """Tokens that each live branch has generated."""
        return self.known - self.prompt_len

    @property
    def is_decode(self) -> Bool:
        """It has generated a token and every live branch lacks exactly one."""
        return conj(self.forked, self.deficit == self.live)

    @property
    def whole(self) -> Int:
        """Tokens to compute from nothing: the prompt, or the shared blocks once and the tail of each live branch."""
        if not self.forked:
            return self.known
        return self.shared_tokens + self.live * (self.known - self.shared_tokens)

    def piece(self, budget: Int) -> Int:
        """Tokens it can be given out of `budget`: all it lacks, or a piece that leaves every branch at least one.

        Branches sample only together, so a piece that does not finish the group stops before the last token of each.
        """
        keep = pick(self.forked, self.live, 0)
        return pick(budget >= self.deficit, self.deficit, least(budget, self.deficit - keep))

    def forget(self) -> None:
        """Its KV is gone: it lacks everything it knows."""
        self.deficit = self.whole
        self.tail_shared = False

    def computed(self) -> list[Int]:
        """For each live branch, in order, the tokens whose KV exists where the group lives."""
        done = self.whole - self.deficit
        if not self.forked:
            return [done]
        tail = self.known - self.shared_tokens - 1  # of one branch, less the token it keeps for the common sample
        beyond = done - self.shared_tokens
        return [
            pick(beyond <= 0, done, self.shared_tokens + most(least(beyond - i * tail, tail), 0))
            for i in range(self.live)
        ]

    def rows(self, tokens: int) -> Iterator[tuple[int, int, int]]:
        """(index among the live branches, start, end) of the pieces that `tokens` of its deficit are spent on.

        The shared prompt blocks come first, in the row of the first live branch; then each branch's tail in order.
        """
        done = self.computed()
        if tokens == self.deficit:
            for i, start in enumerate(done):
                if i > 0:
                    start = max(start, self.shared_tokens)
                yield i, start, self.known
            return
        for i, start in enumerate(done):
            if i > 0:
                start = max(start, self.shared_tokens)
            taken = min(tokens, self.known - 1 - start)
            if taken > 0:
                yield i, start, start + taken
            tokens -= taken

    def prefers(self, mode: PreemptionMode | None) -> PreemptionMode:
        """The preferred way to preempt it: the configured one, else recompute one live branch and swap several."""
        if mode is not None:
            return mode
        return PreemptionMode.RECOMPUTE if self.live == 1 else PreemptionMode.SWAP
