"""The transition system that the scheduler refines: what each action may do to the counts, and when it is allowed.

An action is a guard and an effect, side by side.  Neither says which group to choose among those allowed, or when to
stop: that is policy, and the laws are about it.  A state knows queues, lengths, deficits and block counts, no ids.
All values may be symbols; which group, queue and verb is always concrete.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from spec.logic import Bool, Int, conj, disj, every, pick, total
from spec.words import is_decode, measure, sequences, whole


class Row(NamedTuple):
    """A sequence group's counts.  tokens: what the step under way gives it."""

    request_id: str
    prompt_len: Int
    n: int
    max_tokens: Int
    shared_blocks: Int
    shared_tokens: Int
    live: int
    known: Int
    deficit: Int
    forked: bool
    tail_shared: Any
    held: Int
    tokens: Int = 0


class Counts(NamedTuple):
    """The abstract state; `config` and `measure` are its constants."""

    config: Any
    running: tuple[Row, ...]
    swapped: tuple[Row, ...]
    waiting: tuple[Row, ...]
    gpu_free: Int
    cpu_free: Int
    measure: Any = None


def row(g: Any) -> Row:
    """The counts of a group."""
    return Row(
        g.request_id,
        g.prompt_len,
        g.n,
        g.max_tokens,
        g.shared_blocks,
        g.shared_tokens,
        g.live,
        g.known,
        g.deficit,
        g.forked,
        g.tail_shared,
        g.held,
        g.tokens,
    )


def abstract(s: Any) -> Counts:
    """The abstract state that a scheduler, or a snapshot of one, stands for."""
    return Counts(
        s.config,
        tuple(map(row, s.running)),
        tuple(map(row, s.swapped)),
        tuple(map(row, s.waiting)),
        s.blocks.gpu_free,
        s.blocks.cpu_free,
        getattr(s, "measure", None),
    )


Guard = Callable[..., Bool]
Effect = Callable[..., Counts]


class Action(NamedTuple):
    """guard(state, row, value) and effect(state, row, value); the value is an entry's blocks, or a number of tokens."""

    name: str
    guard: Guard
    effect: Effect
    text: str


ACTIONS: dict[str, Action] = {}


def action(guard: Guard) -> Callable[[Effect], Effect]:
    """Declare the decorated effect, with its guard, as an action of that name."""

    def declare(effect: Effect) -> Effect:
        ACTIONS[effect.__name__] = Action(effect.__name__, guard, effect, effect.__doc__ or "")
        return effect

    return declare


# helpers that only move rows about


def _is_first(queue: tuple[Row, ...], g: Row) -> bool:
    return bool(queue) and queue[0].request_id == g.request_id


def _is_last(queue: tuple[Row, ...], g: Row) -> bool:
    return bool(queue) and queue[-1].request_id == g.request_id


def _is_in(queue: tuple[Row, ...], g: Row) -> bool:
    return any(one.request_id == g.request_id for one in queue)


def _put(queue: tuple[Row, ...], g: Row) -> tuple[Row, ...]:
    return tuple(g if one.request_id == g.request_id else one for one in queue)


def _without(queue: tuple[Row, ...], g: Row) -> tuple[Row, ...]:
    return tuple(one for one in queue if one.request_id != g.request_id)


def find(s: Counts, request_id: str) -> Row | None:
    """The group of this id, wherever it is."""
    return next((g for g in (*s.running, *s.swapped, *s.waiting) if g.request_id == request_id), None)


def _forgotten(g: Row) -> Row:
    return g._replace(deficit=whole(g), tail_shared=False, held=0, tokens=0)


# the step


@action(
    lambda s, g, blocks: conj(
        _is_first(s.waiting, g),
        not s.swapped,
        blocks == measure(s).cover(g),
        blocks + (s.config.watermark_blocks if s.running else 0) <= s.gpu_free,
        sequences(s.running) + g.live <= s.config.seqs,
    )
)
def admit(s: Counts, g: Row, blocks: Int) -> Counts:
    """The head of waiting gets blocks for all it knows and runs; with nothing swapped, the watermark kept."""
    return s._replace(
        waiting=_without(s.waiting, g), running=(*s.running, g._replace(held=blocks)), gpu_free=s.gpu_free - blocks
    )


@action(
    lambda s, g, blocks: conj(
        _is_first(s.swapped, g),
        blocks == measure(s).cover(g),
        blocks <= s.gpu_free,
        sequences(s.running) + g.live <= s.config.seqs,
    )
)
def swap_in(s: Counts, g: Row, blocks: Int) -> Counts:
    """The head of swapped returns, with blocks for all it knows and private copies made."""
    return s._replace(
        swapped=_without(s.swapped, g),
        running=(*s.running, g._replace(held=blocks, tail_shared=False)),
        gpu_free=s.gpu_free - blocks,
        cpu_free=s.cpu_free + g.held,
    )


@action(
    lambda s, g, blocks: conj(
        _is_in(s.running, g), is_decode(g), blocks >= 1, blocks == measure(s).cover(g) - g.held, blocks <= s.gpu_free
    )
)
def grow(s: Counts, g: Row, blocks: Int) -> Counts:
    """A running decode gets what it lacks, its private copies included, whole or not at all."""
    grown = g._replace(held=g.held + blocks, tail_shared=False)
    return s._replace(running=_put(s.running, grown), gpu_free=s.gpu_free - blocks)


@action(lambda s, g, blocks: conj(_is_last(s.running, g), not s.swapped, g.tokens == 0, blocks == g.held))
def recompute(s: Counts, g: Row, blocks: Int) -> Counts:
    """The most junior running group loses its KV and waits in front; open only while nothing is swapped."""
    return s._replace(running=s.running[:-1], waiting=(_forgotten(g), *s.waiting), gpu_free=s.gpu_free + blocks)


@action(
    lambda s, g, blocks: conj(
        _is_last(s.running, g), g.tokens == 0, blocks == measure(s).filled(g), blocks <= s.cpu_free
    )
)
def swap_out(s: Counts, g: Row, blocks: Int) -> Counts:
    """The most junior running group moves its computed blocks to the CPU, each once, and is first of the swapped."""
    return s._replace(
        running=s.running[:-1],
        swapped=(g._replace(held=blocks), *s.swapped),
        gpu_free=s.gpu_free + g.held,
        cpu_free=s.cpu_free - blocks,
    )


@action(lambda s, g, blocks: conj(_is_last(s.swapped, g), blocks == g.held))
def demote(s: Counts, g: Row, blocks: Int) -> Counts:
    """The most junior swapped group loses its KV and waits in front."""
    return s._replace(swapped=s.swapped[:-1], waiting=(_forgotten(g), *s.waiting), cpu_free=s.cpu_free + blocks)


@action(
    lambda s, g, tokens: conj(
        _is_in(s.running, g),
        g.tokens == 0,
        g.held == measure(s).cover(g),
        tokens >= 1,
        g.known - g.prompt_len < g.max_tokens,
        disj(tokens == g.deficit, tokens <= g.deficit - (g.live if g.forked else 1)),
        total(one.tokens for one in s.running) + tokens <= s.config.tokens,
    )
)
def serve(s: Counts, g: Row, tokens: Int) -> Counts:
    """A running group that holds blocks for all it knows is given tokens of the budget."""
    return s._replace(running=_put(s.running, g._replace(tokens=tokens)))


# what comes of it


@action(lambda s, g, tokens: conj(_is_in(s.running, g), tokens == g.tokens, tokens >= 1))
def compute(s: Counts, g: Row, tokens: Int) -> Counts:
    """The tokens of a step are computed."""
    return s._replace(running=_put(s.running, g._replace(deficit=g.deficit - tokens, tokens=0)))


@action(lambda s, g, blocks: conj(_is_in(s.running, g), not g.forked, g.deficit == 0))
def fork(s: Counts, g: Row, blocks: Int) -> Counts:
    """After the first run of its prompt a group has n branches that share all prompt blocks."""
    shared = conj(g.n > 1, g.shared_tokens < g.prompt_len)
    return s._replace(running=_put(s.running, g._replace(forked=True, tail_shared=shared)))


@action(
    lambda s, g, blocks: conj(_is_in(s.running, g), g.forked, g.deficit == 0, g.known - g.prompt_len < g.max_tokens)
)
def sample(s: Counts, g: Row, blocks: Int) -> Counts:
    """Every live branch draws a token, which it lacks from then on."""
    return s._replace(running=_put(s.running, g._replace(known=g.known + 1, deficit=g.live)))


@action(lambda s, g, blocks: conj(_is_in(s.running, g), g.forked, g.live > 1, g.deficit == g.live))
def finish_branch(s: Counts, g: Row, blocks: Int) -> Counts:
    """One branch ends after its draw and gives back the blocks that no sibling names."""
    own = pick(g.tail_shared, 0, measure(s).tail(g))
    less = g._replace(
        live=g.live - 1, deficit=g.deficit - 1, held=g.held - own, tail_shared=conj(g.tail_shared, g.live > 2)
    )
    return s._replace(running=_put(s.running, less), gpu_free=s.gpu_free + own)


@action(lambda s, g, blocks: conj(_is_in(s.running, g), blocks == g.held, g.forked, g.deficit == g.live))
def finish(s: Counts, g: Row, blocks: Int) -> Counts:
    """A group whose last branches end leaves with its blocks."""
    return _gone(s, g)


@action(lambda s, g, blocks: blocks == g.held)
def abort(s: Counts, g: Row, blocks: Int) -> Counts:
    """A group is ended by its user, wherever it is."""
    return _gone(s, g)


@action(lambda s, g, blocks: blocks == g.held)
def fail(s: Counts, g: Row, blocks: Int) -> Counts:
    """A group ends with an error."""
    return _gone(s, g)


def _gone(s: Counts, g: Row) -> Counts:
    on_gpu, on_cpu = _is_in(s.running, g), _is_in(s.swapped, g)
    return s._replace(
        running=_without(s.running, g),
        swapped=_without(s.swapped, g),
        waiting=_without(s.waiting, g),
        gpu_free=s.gpu_free + (g.held if on_gpu else 0),
        cpu_free=s.cpu_free + (g.held if on_cpu else 0),
    )


def may_add(s: Counts, g: Row) -> Bool:
    """The guard of arrival: the group could run to its end alone."""
    return conj(
        measure(s).peak(g) <= s.config.num_gpu_blocks,
        g.prompt_len + g.max_tokens <= s.config.max_model_len,
        g.n <= s.config.seqs,
        every((g.prompt_len >= 1, g.max_tokens >= 1, g.n >= 1)),
    )


def add(s: Counts, g: Row) -> Counts:
    """A new group waits behind everyone."""
    return s._replace(waiting=(*s.waiting, g))


__all__ = ["ACTIONS", "Action", "Counts", "Row", "abstract", "add", "find", "may_add", "row"]
