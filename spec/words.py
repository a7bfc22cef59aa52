"""The words of the laws, each from its meaning: what a group lacks, covers and holds.

Written independently of the scheduler's own arithmetic, so that a fault there shows as a law broken.  Groups are read
by the scheduler's attribute names; every result may be a symbol.
"""

from __future__ import annotations

from typing import Any

from spec.logic import Bool, Int, cdiv, conj, disj, least, most, neg, pick, total


def is_decode(g: Any) -> Bool:
    """It has generated a token and every live branch lacks exactly one."""
    return conj(g.forked, g.deficit == g.live)


def behind(g: Any) -> Bool:
    """It is in mid-prompt or mid-rebuild: some branch lacks more than its next token."""
    return neg(is_decode(g))


def generated(g: Any) -> Int:
    """Tokens each live branch has generated."""
    return g.known - g.prompt_len


def whole(g: Any) -> Int:
    """Tokens to compute from nothing: the prompt before the fork; after it the full prompt blocks once, tails each."""
    if not g.forked:
        return g.known
    return g.shared_tokens + g.live * (g.known - g.shared_tokens)


def lacks_at_least(g: Any) -> Int:
    """What a piece that does not finish the group must leave: a token for each branch that samples in common."""
    return g.live if g.forked else 0


def grant(g: Any, budget: Int) -> Int:
    """The most tokens of `budget` it can be given."""
    return pick(budget >= g.deficit, g.deficit, least(budget, g.deficit - lacks_at_least(g)))


def remaining_work(g: Any) -> Int:
    """Tokens still to compute until its end if no branch stops early: all n branches counted from the start."""
    return g.deficit + g.live * (g.max_tokens - 1 - generated(g))


class Measure:
    """Block counts of a group for one block size.  A symbolic run may put symbols in its place."""

    __slots__ = ("size",)

    def __init__(self, block_size: int) -> None:
        self.size = block_size

    def cover(self, g: Any) -> Int:
        """GPU blocks for all tokens it knows: full prompt blocks once, then a private tail for each live branch."""
        if not g.forked:
            return cdiv(g.known, self.size)
        return g.shared_blocks + g.live * cdiv(g.known - g.shared_tokens, self.size)

    def filled(self, g: Any) -> Int:
        """Blocks that its computed tokens fill, each distinct one once: what it takes on the CPU."""
        done = whole(g) - g.deficit
        if not g.forked:
            return cdiv(done, self.size)
        tail = g.known - 1 - g.shared_tokens  # of one branch, without the token all branches compute together
        beyond = done - g.shared_tokens
        tails = total(cdiv(most(least(beyond - i * tail, tail), 0), self.size) for i in range(g.live))
        parted = pick(beyond <= 0, cdiv(done, self.size), g.shared_blocks + tails)
        return pick(g.tail_shared, cdiv(g.prompt_len, self.size), parted)

    def tail(self, g: Any) -> Int:
        """Blocks that one branch owns beyond the shared ones once all but its newest token are computed."""
        return cdiv(g.known - 1 - g.shared_tokens, self.size)

    def peak(self, g: Any) -> Int:
        """Most GPU blocks it covers before its end: nobody computes the last token."""
        last = g.prompt_len + g.max_tokens - 1
        branching = g.shared_blocks + g.n * cdiv(last - g.shared_tokens, self.size)
        return pick(g.max_tokens <= 1, cdiv(g.prompt_len, self.size), branching)


_MEASURES: dict[int, Measure] = {}


def measure(s: Any) -> Any:
    """The measure of a state: its own if it carries one, else the exact one of its block size."""
    own = getattr(s, "measure", None)
    if own is not None:
        return own
    size = s.config.block_size
    if size not in _MEASURES:
        _MEASURES[size] = Measure(size)
    return _MEASURES[size]


def queued(s: Any) -> list[Any]:
    """All unfinished groups in the order of the queues."""
    return [*s.running, *s.swapped, *s.waiting]


def sequences(groups: Any) -> Int:
    """Live branches, all n of a group that has not forked."""
    return total(g.live for g in groups)


def lexically_less(new: list[Int], old: list[Int]) -> Bool:
    """The vector `new` is below `old`: at the first place where they differ, it is smaller."""
    verdict: Bool = False
    for a, b in zip(reversed(new), reversed(old), strict=True):
        verdict = disj(a < b, conj(a == b, verdict))
    return verdict


def cover(s: Any, g: Any) -> Int:
    """GPU blocks for all tokens the group knows, as the state `s` measures them."""
    return measure(s).cover(g)


def filled(s: Any, g: Any) -> Int:
    """Blocks that the group's computed tokens fill, as the state `s` measures them."""
    return measure(s).filled(g)
