"""What a law may see of a state, a plan and a step.

The attribute names are the scheduler's, so a law on one state reads a snapshot and the live scheduler alike.  A
snapshot is immutable and stays what it was while the scheduler moves on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from spec.logic import Int


class Group(NamedTuple):
    """A sequence group as it was."""

    request_id: str
    arrival: Int
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
    tokens: Int
    branches: tuple[int, ...]
    tables: tuple[tuple[int, ...], ...]
    status: Any


class Blocks(NamedTuple):
    """The free blocks of both devices."""

    gpu_free: Int
    cpu_free: Int


class State(NamedTuple):
    """A scheduler as it was.  measure: how blocks are counted; None for the exact formula of its block size."""

    config: Any
    running: tuple[Group, ...]
    swapped: tuple[Group, ...]
    waiting: tuple[Group, ...]
    groups: tuple[str, ...]  # ids of all unfinished groups
    blocks: Blocks
    decodes_owed: Any
    measure: Any = None


def group(g: Any) -> Group:
    """The group as it is now."""
    return Group(
        g.request_id,
        g.arrival,
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
        tuple(g.branches),
        tuple(map(tuple, g.tables)),
        g.status,
    )


def snapshot(s: Any, measure: Any = None) -> State:
    """The scheduler as it is now."""
    return State(
        s.config,
        tuple(map(group, s.running)),
        tuple(map(group, s.swapped)),
        tuple(map(group, s.waiting)),
        tuple(s.groups),
        Blocks(s.blocks.gpu_free, s.blocks.cpu_free),
        s.decodes_owed,
        measure,
    )


class Served(NamedTuple):
    """A group that the plan gives tokens; `was` before the step, `group` between schedule() and update()."""

    was: Group
    group: Group
    tokens: Int


class Victim(NamedTuple):
    """A group preempted in a step, as it was before; mode as logged; whether others were swapped at that moment."""

    group: Group
    mode: str
    others_swapped: bool


class Step(NamedTuple):
    """One call of schedule(): the state before, the plan, the state `mid` step, and the log sorted by verb.

    served is in the plan's order, the others in the log's.  admitted, swapped_in and demoted show groups before it.
    """

    before: State
    plan: Any
    mid: State
    served: tuple[Served, ...]
    admitted: tuple[Group, ...]
    swapped_in: tuple[Group, ...]
    victims: tuple[Victim, ...]
    demoted: tuple[Group, ...]
    verbs: tuple[str, ...]  # of the step, in order
    given: Mapping[str, Int]  # tokens of each served group, by id
    was: Mapping[str, Group]  # every group before the step, by id
    now: Mapping[str, Group]  # every group between schedule() and update(), by id

    @property
    def config(self) -> Any:
        return self.before.config


class Round(NamedTuple):
    """A step and what update() made of it.  departed: ids of the groups that left by finish, abort or fail."""

    step: Step
    after: State
    departed: frozenset[str]

    @property
    def config(self) -> Any:
        return self.step.before.config


STEP_VERBS = frozenset(("admit", "grow", "preempt", "swap_out", "swap_in", "demote"))
LEAVING = frozenset(("finish", "abort", "fail"))


def observe(before: State, plan: Any, mid: State) -> Step:
    """Sort what the plan says.  An entry about a group that the state before does not know is left to law S9."""
    old = {g.request_id: g for queue in (before.running, before.swapped, before.waiting) for g in queue}
    new = {g.request_id: g for queue in (mid.running, mid.swapped, mid.waiting) for g in queue}
    served = [Served(old[g.request_id], new[g.request_id], tokens) for g, tokens in plan.groups]
    admitted: list[Group] = []
    swapped_in: list[Group] = []
    demoted: list[Group] = []
    victims: list[Victim] = []
    verbs: list[str] = []
    outside = len(before.swapped)
    at_hand = outside > 0  # something was swapped when the room for the next victim was begun
    for verb, request_id, _, detail in plan.log:
        if verb not in STEP_VERBS:
            continue
        verbs.append(verb)
        was = old[request_id]
        if verb == "admit":
            admitted.append(was)
        elif verb == "swap_in":
            swapped_in.append(was)
        elif verb == "demote":
            demoted.append(was)
            outside -= 1
        elif verb == "preempt":
            victims.append(Victim(was, detail, at_hand))
            outside += detail == "swap"
            at_hand = outside > 0
    return Step(
        before,
        plan,
        mid,
        tuple(served),
        tuple(admitted),
        tuple(swapped_in),
        tuple(victims),
        tuple(demoted),
        tuple(verbs),
        {one.was.request_id: one.tokens for one in served},
        old,
        new,
    )


def conclude(step: Step, after: State) -> Round:
    """Add what update() made of the step; read it while the plan's log ends with that update."""
    departed: set[str] = set()
    for verb, request_id, _, _ in step.plan.log:
        if verb in LEAVING:
            departed.add(request_id)
        elif verb == "add":
            departed.discard(request_id)
    return Round(step, after, frozenset(departed))
