"""The aggregate model: any number of groups as sums, and what each action may do to them.

An action touches one arbitrary group, whose numbers are its arguments; all others stay in the sums.  Guard and effect
stand side by side.  The invariant is inductive for every action, so the sums of every reachable state satisfy it,
whatever the number of groups; no bound on anything is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from spec.logic import Bool, Int, conj, disj, implies


class Sums(NamedTuple):
    """Constants: gpu, cpu (capacities), seqs.  The rest are sums over a queue, or the ends of one.

    runs, swaps, waits: how many groups.  gpu_held, cpu_held: their blocks.  live_runs, live_swaps: their live branches.
    youngest_run, oldest_swap: arrivals; they mean nothing where there is no such group.
    """

    gpu: Int
    cpu: Int
    seqs: Int
    gpu_free: Int
    cpu_free: Int
    gpu_held: Int
    cpu_held: Int
    runs: Int
    swaps: Int
    waits: Int
    live_runs: Int
    live_swaps: Int
    youngest_run: Int
    oldest_swap: Int


class Group(NamedTuple):
    """The group an action touches: blocks it holds, covers and would fill on the CPU, live branches, arrival."""

    held: Int
    cover: Int
    filled: Int
    live: Int
    arrival: Int


Guard = Callable[[Sums, Group], Bool]
Effect = Callable[[Sums, Group], Sums]
ACTIONS: dict[str, tuple[Guard, Effect]] = {}


def action(guard: Guard) -> Callable[[Effect], Effect]:
    """Declare an action: when it is allowed, and the decorated effect."""

    def declare(effect: Effect) -> Effect:
        ACTIONS[effect.__name__] = guard, effect
        return effect

    return declare


def invariant(s: Sums) -> Bool:
    """Books, capacities, each group holds something, sequences; nobody runs who is junior to a swapped group."""
    return conj(
        s.gpu_free + s.gpu_held == s.gpu,
        s.cpu_free + s.cpu_held == s.cpu,
        s.gpu_free >= 0,
        s.cpu_free >= 0,
        row(s.runs, s.gpu_held, s.live_runs),
        row(s.swaps, s.cpu_held, s.live_swaps),
        s.waits >= 0,
        s.live_runs + s.live_swaps <= s.seqs,
        implies(conj(s.runs >= 1, s.swaps >= 1), s.youngest_run < s.oldest_swap),
    )


def row(count: Int, held: Int, live: Int) -> Bool:
    """So many groups can hold so much: each at least a block and a branch, none nothing."""
    return conj(count >= 0, held >= count, live >= count, disj(count >= 1, conj(held == 0, live == 0)))


def fits_alone(s: Sums, g: Group) -> Bool:
    """What admission into the engine made sure of (law Q3), and the count protocol."""
    return conj(
        g.cover >= 1, g.cover <= s.gpu, g.filled >= 1, g.filled <= g.cover, g.live >= 1, g.live <= s.seqs, g.held >= 0
    )


def one_of(g: Group, count: Int, held: Int, live: Int) -> Bool:
    """The group is one of these: the others can be so many and hold what is left."""
    return conj(count >= 1, g.held >= 1, row(count - 1, held - g.held, live - g.live))


def runs(s: Sums, g: Group) -> Bool:
    """The group runs."""
    return conj(one_of(g, s.runs, s.gpu_held, s.live_runs), g.held <= g.cover, g.filled <= g.held)


def runs_last(s: Sums, g: Group) -> Bool:
    """The group is the most junior that runs."""
    return conj(runs(s, g), g.arrival == s.youngest_run)


def is_swapped(s: Sums, g: Group) -> Bool:
    """The group is swapped."""
    return conj(one_of(g, s.swaps, s.cpu_held, s.live_swaps), g.held <= g.cover)


@action(lambda s, g: s.waits >= 0)
def add(s: Sums, g: Group) -> Sums:
    """A group arrives."""
    return s._replace(waits=s.waits + 1)


@action(
    lambda s, g: conj(s.waits >= 1, s.swaps == 0, g.held == 0, g.cover <= s.gpu_free, s.live_runs + g.live <= s.seqs)
)
def admit(s: Sums, g: Group) -> Sums:
    """With nothing swapped, a waiting group gets blocks for all it knows."""
    return s._replace(
        waits=s.waits - 1,
        runs=s.runs + 1,
        gpu_free=s.gpu_free - g.cover,
        gpu_held=s.gpu_held + g.cover,
        live_runs=s.live_runs + g.live,
        youngest_run=g.arrival,
    )


@action(lambda s, g: conj(runs(s, g), g.cover - g.held <= s.gpu_free))
def grow(s: Sums, g: Group) -> Sums:
    """A running group gets what it lacks."""
    need = g.cover - g.held
    return s._replace(gpu_free=s.gpu_free - need, gpu_held=s.gpu_held + need)


@action(lambda s, g: conj(runs_last(s, g), g.filled <= s.cpu_free))
def swap_out(s: Sums, g: Group) -> Sums:
    """The most junior running group moves to the CPU; who runs after it is senior to it."""
    return s._replace(
        runs=s.runs - 1,
        swaps=s.swaps + 1,
        gpu_free=s.gpu_free + g.held,
        gpu_held=s.gpu_held - g.held,
        cpu_free=s.cpu_free - g.filled,
        cpu_held=s.cpu_held + g.filled,
        live_runs=s.live_runs - g.live,
        live_swaps=s.live_swaps + g.live,
        youngest_run=g.arrival - 1,
        oldest_swap=g.arrival,
    )


@action(lambda s, g: conj(runs_last(s, g), s.swaps == 0))
def recompute(s: Sums, g: Group) -> Sums:
    """With nothing swapped, the most junior running group drops its KV and waits."""
    return s._replace(
        runs=s.runs - 1,
        waits=s.waits + 1,
        gpu_free=s.gpu_free + g.held,
        gpu_held=s.gpu_held - g.held,
        live_runs=s.live_runs - g.live,
        youngest_run=g.arrival - 1,
    )


@action(is_swapped)
def demote(s: Sums, g: Group) -> Sums:
    """The most junior swapped group drops its KV and waits."""
    return s._replace(
        swaps=s.swaps - 1,
        waits=s.waits + 1,
        cpu_free=s.cpu_free + g.held,
        cpu_held=s.cpu_held - g.held,
        live_swaps=s.live_swaps - g.live,
    )


@action(
    lambda s, g: conj(
        is_swapped(s, g), g.arrival == s.oldest_swap, g.cover <= s.gpu_free, s.live_runs + g.live <= s.seqs
    )
)
def swap_in(s: Sums, g: Group) -> Sums:
    """The most senior swapped group gets blocks for all it knows; who is swapped after it is junior to it."""
    return s._replace(
        swaps=s.swaps - 1,
        runs=s.runs + 1,
        cpu_free=s.cpu_free + g.held,
        cpu_held=s.cpu_held - g.held,
        gpu_free=s.gpu_free - g.cover,
        gpu_held=s.gpu_held + g.cover,
        live_swaps=s.live_swaps - g.live,
        live_runs=s.live_runs + g.live,
        youngest_run=g.arrival,
        oldest_swap=g.arrival + 1,
    )


@action(runs)
def finish(s: Sums, g: Group) -> Sums:
    """A running group leaves, by finish, abort or fail; who is the most junior afterwards is no younger."""
    return s._replace(
        runs=s.runs - 1, gpu_free=s.gpu_free + g.held, gpu_held=s.gpu_held - g.held, live_runs=s.live_runs - g.live
    )


@action(lambda s, g: conj(runs(s, g), g.held >= 2, g.live >= 2))
def finish_branch(s: Sums, g: Group) -> Sums:
    """A branch of a running group ends and frees a block, or none or more: the group keeps one at least."""
    return s._replace(gpu_free=s.gpu_free + 1, gpu_held=s.gpu_held - 1, live_runs=s.live_runs - 1)


def can_go_on(s: Sums, g: Group) -> Bool:
    """With nothing running, the head `g` of swapped, or else of waiting, can come in."""
    guard = {name: ACTIONS[name][0](s, g) for name in ("swap_in", "admit")}
    return disj(guard["swap_in"], guard["admit"])


def can_preempt(s: Sums, g: Group) -> Bool:
    """The most junior running group can give its blocks back, or a demotion makes progress towards it."""
    return disj(ACTIONS["swap_out"][0](s, g), ACTIONS["recompute"][0](s, g), s.swaps >= 1)


def symbols(source: Any) -> tuple[Sums, Group]:
    """Sums and a group of symbols."""
    return (
        Sums(*(source.integer(name) for name in Sums._fields)),
        Group(*(source.integer(f"group.{name}") for name in Group._fields)),
    )
