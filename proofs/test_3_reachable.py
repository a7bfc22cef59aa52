"""Every reachable state of the production scheduler with its allocator, at small scope, obeys every law.

The environment does all that it may: any arrivals from a menu, any branches stopping, any group aborted at a boundary
or in mid-step, groups and steps failing.  Runs have no end: what is bounded is the number of unfinished groups.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from engine.scheduler import Scheduler, SequenceGroup
from proofs.mutants import MUTANTS, Mutant
from proofs.scopes import DEEP, LARGE, SMALL, Scope, explored, new_group
from spec import views
from spec.check.codec import Codec, fields_of
from spec.check.explore import Event, explore
from spec.check.report import timeline
from spec.laws import BY_ID, LAWS, Kind


def holds_everywhere(scope: Scope) -> Counter[str]:
    """Explore, and show the shortest run if a law breaks."""
    found = explored(scope.world)
    if found.violation is not None:
        pytest.fail(timeline(found.violation, lambda: Scheduler(scope.world.config), new_group), pytrace=False)
    assert found.complete
    if scope.states >= 0:
        assert (found.states, found.edges) == (scope.states, scope.edges)
    return found.sometimes


@pytest.mark.parametrize("name", LARGE | SMALL)
def test_every_reachable_state_obeys_every_law(name: str) -> None:
    holds_everywhere((LARGE | SMALL)[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", DEEP)
def test_every_reachable_state_obeys_every_law_deep(name: str) -> None:
    holds_everywhere(DEEP[name])


def test_half_a_million_states_are_reached() -> None:
    assert sum(scope.states for scope in (LARGE | SMALL).values()) >= 500_000


def test_ten_million_states_are_reached_by_the_deep_runs() -> None:
    assert sum(scope.states for scope in DEEP.values()) >= 10_000_000


@functools.cache
def surveyed(name: str) -> tuple[Counter[str], frozenset[str]]:
    """How often each thing happens in a scope, and which rarer situations are met."""
    seen: set[str] = set()

    def look(step: views.Step, turn: views.Round, event: Event) -> None:
        for served in step.served:
            was = served.was
            if was.forked and was.deficit > was.live:
                seen.add("rebuild" if was.live == 1 else "rebuild of several branches")
            if not was.forked and was.deficit < was.known:
                seen.add("prompt in pieces")
        if any(not was.forked for was in step.swapped_in):
            seen.add("half a prompt swapped in")

    return explored(SMALL[name].world, step_hook=look).sometimes, frozenset(seen)


@pytest.mark.parametrize("order", ["chunked", "prefill-first"])
def test_sometimes_everything_happens(order: str) -> None:
    """No theorem here is empty: every phase, every way to preempt and every way to leave is reached in both orders."""
    verbs: Counter[str] = Counter()
    situations: set[str] = set()
    for name in SMALL:
        if name.startswith(order):
            seen, met = surveyed(name)
            verbs += seen
            situations |= met
    for verb in (
        *("admit", "grow", "swap_in", "swap_out", "demote", "fork", "finish_branch", "finish", "abort", "fail"),
        *("preempt by swap", "preempt by recompute"),
    ):
        assert verbs[verb], f"{verb} never happens"
    assert situations >= {"rebuild", "rebuild of several branches"}
    if order == "chunked":
        assert situations >= {"prompt in pieces", "half a prompt swapped in"}


# every law can fail


def cheapest_first() -> list[Scope]:
    return sorted(SMALL.values(), key=lambda scope: scope.edges)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_a_planted_fault_breaks_the_laws_it_should(mutant: Mutant) -> None:
    for law in mutant.breaks:
        assert any(
            explore(
                scope.world, lambda w=scope.world: mutant.build(w.config), mutant.new_group, limit=6000, laws=[law]
            ).violation
            for scope in cheapest_first()
        ), f"{law} holds in spite of {mutant.id}: {mutant.text}"


def test_every_law_with_a_predicate_is_broken_by_some_planted_fault() -> None:
    broken = {law for mutant in MUTANTS for law in mutant.breaks}
    assert {law.id for law in LAWS if law.kind is not Kind.TEMPORAL} <= broken


def test_what_a_planted_fault_is_said_to_break_is_a_law() -> None:
    assert {law for mutant in MUTANTS for law in mutant.breaks} <= set(BY_ID)


def test_the_old_admission_rule_is_refuted_by_a_run_that_a_person_can_follow() -> None:
    mutant = next(one for one in MUTANTS if one.id == "AdmitsWhileSwapped")
    world = SMALL["chunked-n2-cpu4"].world
    found = explore(world, lambda: mutant.build(world.config), mutant.new_group)
    assert found.violation is not None
    assert found.violation.law.id == "S1"
    text = timeline(found.violation, lambda: mutant.build(world.config), mutant.new_group)
    marked = [line for line in text.splitlines() if line.startswith(">> ")]
    assert len(marked) == 1
    assert "admit c" in marked[0]
    assert "S1 no_prefill_while_swapped: no new prefill while any swapped group remains" in text


# the key of a state keeps all that matters


def boundaries(name: str, limit: int = 60) -> Iterator[tuple[Codec, bytes]]:
    """Some states of a scope, by their keys."""
    world = SMALL[name].world
    codec = Codec(lambda: Scheduler(world.config), new_group)
    found = explored(world, graph=True, limit=limit * 12)
    assert found.graph is not None
    for key in found.graph.keys[:: max(1, len(found.graph.keys) // limit)]:
        yield codec, key


@pytest.mark.parametrize("name", SMALL)
def test_encoding_and_restoring_lose_nothing(name: str) -> None:
    """A restored state has the same key, and goes on exactly as a deep copy of it does."""
    for codec, key in boundaries(name):
        s = codec.restore(key)
        assert codec.encode(s) == key
        t = copy.deepcopy(s)
        assert everything(t) == everything(s)
        if s.has_unfinished():
            one, two = s.schedule(), t.schedule()
            assert one.to_dict() == two.to_dict()
            assert everything(t) == everything(s)
            s.update(one)
            t.update(two)
            assert everything(t) == everything(s)
            again = codec.restore(codec.encode(s))
            if s.has_unfinished():
                assert renamed(again.schedule()) == renamed(s.schedule())


def everything(thing: Any, depth: int = 0) -> Any:
    """All fields of an object, and of what they hold, as plain values."""
    assert depth < 12
    if isinstance(thing, str | int | bool | None):
        return thing
    if isinstance(thing, dict):
        return {str(key): everything(value, depth + 1) for key, value in thing.items()}
    if isinstance(thing, list | tuple) or type(thing).__name__ == "deque":
        return [everything(value, depth + 1) for value in thing]
    if hasattr(thing, "value") and hasattr(thing, "name"):
        return str(thing)
    return {name: everything(getattr(thing, name), depth + 1) for name in sorted(fields_of(thing))}


def renamed(plan: Any) -> Any:
    """A plan up to names: what is scheduled, how many blocks move, what is logged; groups by order of mention."""
    names: dict[str, int] = {}
    rows = [
        (names.setdefault(row.group.request_id, len(names)), row.branch, row.start, row.end, row.draws)
        for row in plan.scheduled
    ]
    verbs = [(verb, blocks, detail) for verb, _, blocks, detail in plan.log if verb not in ("add", "finish", "abort")]
    moved = (len(plan.blocks_to_swap_out), len(plan.blocks_to_swap_in), len(plan.blocks_to_copy))
    return rows, [one for one in verbs if one[0] not in ("fork", "finish_branch", "fail")], moved


def test_a_field_that_the_key_does_not_know_is_refused() -> None:
    class Taller(SequenceGroup):
        __slots__ = ("height",)

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.height = 3

    class Remembers(Scheduler):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.past: list[int] = []

    config = SMALL["chunked-n2-cpu4"].world.config
    with pytest.raises(TypeError, match="height"):
        Codec(lambda: Scheduler(config), Taller)
    with pytest.raises(TypeError, match="past"):
        Codec(lambda: Remembers(config), new_group)


class Counts(Scheduler):
    """A policy with a field of its own."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.turn = 0


def test_a_counter_of_a_policy_of_ones_own_is_kept_in_the_key() -> None:
    config = SMALL["chunked-n2-cpu4"].world.config
    codec = Codec(lambda: Counts(config), new_group)
    s = Counts(config)
    empty = codec.encode(s)
    s.turn = 5
    assert codec.encode(s) != empty
    assert codec.restore(codec.encode(s)).turn == 5


def test_the_shortest_run_to_a_state_can_be_asked_for() -> None:
    """A goal instead of a law: the shortest way to a full swap area."""
    world = SMALL["chunked-n2-cpu3-failures"].world
    found = explored(world, goal=lambda s: s.blocks.cpu_free == 0)
    assert found.violation is not None
    assert found.violation.detail == "goal"
    assert len(found.violation.run) == 5


def test_a_field_of_a_policy_that_grows_too_large_is_named() -> None:
    config = SMALL["chunked-n2-cpu4"].world.config
    codec = Codec(lambda: Counts(config), new_group)
    for value in (256, -1, None):
        s = Counts(config)
        s.turn: Any = value
        with pytest.raises(TypeError, match=rf"Counts.turn is {value}; .* an int from 0 to 255"):
            codec.encode(s)
