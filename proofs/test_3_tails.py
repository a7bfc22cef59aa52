"""Why the explorer may leave the tail of waiting groups out of what it compares: the laws say the same without it.

The tail of a step is what waits behind the most senior group that the step left waiting and never named.
"""

from __future__ import annotations

from typing import Any

import pytest

from engine.scheduler import Scheduler
from proofs.mutants import MUTANTS, Mutant
from proofs.scopes import QUIET, SMALL, explored, new_group, scope
from spec import plain, views
from spec.check.codec import GROUP_FIELDS
from spec.check.explore import Event, explore
from spec.check.image import Image, frozen
from spec.law import Kind, Tier

# long queues of a small menu: most steps have a tail
CROWDED = {
    "chunked": scope(-1, -1, gpu=6, cpu=3, size=1, tokens=4, seqs=4, menu=((1, 2, 3), (2, 1, 3)), groups=6, **QUIET),
    "prefill-first": scope(
        -1, -1, gpu=6, cpu=2, size=2, tokens=6, seqs=4, menu=((1, 2, 3), (3, 1, 4)), groups=6, chunked=False, **QUIET
    ),
    "chunked-stops": scope(
        -1, -1, gpu=5, cpu=2, size=2, tokens=4, seqs=3, menu=((1, 2, 3), (3, 1, 4)), groups=5, fails=True
    ),
}


@pytest.mark.parametrize("name", CROWDED)
def test_the_short_way_finds_the_same_graph(name: str) -> None:
    """Every state, in the same order, every transition, and everything that happened, as when all is evaluated."""
    world = CROWDED[name].world
    short = explored(world, graph=True, limit=2500)
    full = explored(world, graph=True, limit=2500, in_full=True)
    assert (short.states, short.edges, short.violation) == (full.states, full.edges, None)
    assert short.sometimes == full.sometimes
    assert short.graph == full.graph


@pytest.mark.parametrize("name", ["chunked-n1-watermark", "prefill-first-n1-watermark", "chunked-one-token-a-step"])
def test_the_short_way_finds_the_same_graph_with_aborts(name: str) -> None:
    assert explored(SMALL[name].world, graph=True).graph == explored(SMALL[name].world, graph=True, in_full=True).graph


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_the_short_way_finds_the_same_violation(mutant: Mutant) -> None:
    """The same law, by the same shortest run."""
    for one in CROWDED.values():
        world = one.world
        both = [
            explore(world, lambda w=world: mutant.build(w.config), mutant.new_group, limit=400, in_full=in_full)
            for in_full in (False, True)
        ]
        assert both[0].violation == both[1].violation
        assert (both[0].states, both[0].edges) == (both[1].states, both[1].edges)


def without(s: views.State, tail: frozenset[str]) -> views.State:
    return s._replace(
        waiting=tuple(g for g in s.waiting if g.request_id not in tail),
        groups=tuple(name for name in s.groups if name not in tail),
    )


def tail_of(turn: views.Round) -> frozenset[str]:
    """Who waits behind the most senior group that was left alone, if these groups were left as they were."""
    step = turn.step
    named = {entry[1] for entry in step.plan.log} | set(step.given)
    place = max((i + 1 for i, g in enumerate(step.before.waiting) if g.request_id in named), default=0)
    tail = step.before.waiting[place + 1 :]
    if any(s.waiting[len(s.waiting) - len(tail) :] != tail for s in (step.mid, turn.after)):
        return frozenset()
    return frozenset(g.request_id for g in tail)


@pytest.mark.parametrize("name", CROWDED)
@pytest.mark.parametrize("mutant", [None, *MUTANTS[::4]], ids=lambda mutant: getattr(mutant, "id", "production"))
def test_every_law_says_the_same_without_the_tail(name: str, mutant: Mutant | None) -> None:
    """One by one, of lawful and of unlawful steps: only the state before must be lawful, as every explored state is."""
    compared = 0
    laws = [
        one
        for kind in (Kind.STATE, Kind.MID, Kind.STEP, Kind.ROUND)
        for tier in (Tier.COUNTS, Tier.IDS)
        for one in plain.of(kind, tier)
        if not (kind is Kind.STATE and tier is Tier.IDS)  # they read pools, where the tail has nothing
    ]

    def compare(step: views.Step, turn: views.Round, event: Event) -> None:
        nonlocal compared
        tail = tail_of(turn)
        if not tail or plain.check_state(step.before):
            return
        cut_step = step._replace(
            before=without(step.before, tail),
            mid=without(step.mid, tail),
            was={name: g for name, g in step.was.items() if name not in tail},
            now={name: g for name, g in step.now.items() if name not in tail},
        )
        cut = views.Round(cut_step, without(turn.after, tail), turn.departed)
        compared += 1
        for law in laws:
            whole: Any = turn.after if law.kind is Kind.STATE else turn if law.kind is Kind.ROUND else step
            part: Any = cut.after if law.kind is Kind.STATE else cut if law.kind is Kind.ROUND else cut_step
            assert holds(law.id, whole) == holds(law.id, part), f"{law} {event}"

    world = CROWDED[name].world
    fault = mutant
    make = (lambda: Scheduler(world.config)) if fault is None else (lambda: fault.build(world.config))
    try:
        explore(world, make, fault.new_group if fault else new_group, laws=["L3"], step_hook=compare, limit=300)
    except (IndexError, KeyError, ValueError):
        assert mutant is not None  # a fault that no view can show
        return
    assert compared > 20 or mutant is not None


def holds(id: str, view: Any) -> bool:
    try:
        return bool(plain.PLAIN[id](view))
    except Exception:
        return False


# what is compared


def busy() -> tuple[Any, list[Any]]:
    """A scheduler between schedule() and update(), with somebody in every queue."""
    s = Scheduler(SMALL["chunked-n2-swap"].world.config)
    for name in "abcdef":
        s.add(new_group(name, 1, 1, 4))
    for _ in range(20):
        if s.running and s.swapped and s.waiting:
            break
        s.update(s.schedule())
    s.schedule()
    return s, [*s.running, *s.swapped, *s.waiting]


@pytest.mark.parametrize("field", sorted(GROUP_FIELDS))
def test_an_image_tells_every_field_of_a_group(field: str) -> None:
    s, groups = busy()
    for g in groups:
        image = Image(s, groups, ("decodes_owed",))
        assert image.same(s, [])
        old = getattr(g, field)
        other = [*old, [9]] if isinstance(old, list) else "z" if isinstance(old, str) else not old
        setattr(g, field, other if isinstance(old, list | str | bool) else 77)
        assert not image.same(s, [])
        image.load(s, [])
        assert getattr(g, field) == old
        assert image.same(s, [])


@pytest.mark.parametrize("field", ["running", "swapped", "waiting", "decodes_owed"])
def test_an_image_tells_the_queues(field: str) -> None:
    s, groups = busy()
    image = Image(s, groups, ("decodes_owed",))
    old = getattr(s, field)
    setattr(s, field, not old if isinstance(old, bool) else type(old)([*old][1:]))
    assert not image.same(s, [])
    image.load(s, [])
    assert getattr(s, field) == old


@pytest.mark.parametrize("pool", ["gpu", "cpu"])
@pytest.mark.parametrize("field", ["free", "refs"])
def test_an_image_tells_the_pools(pool: str, field: str) -> None:
    s, groups = busy()
    image = Image(s, groups, ("decodes_owed",))
    getattr(getattr(s.blocks, pool), field).append(0)
    assert not image.same(s, [])
    image.load(s, [])
    assert image.same(s, [])


def test_plans_that_differ_in_one_place_are_told_apart() -> None:
    s, _ = busy()
    plan = s._plan
    twin = frozen(plan)
    assert plan == twin
    for field in (
        "scheduled",
        "blocks_to_swap_out",
        "blocks_to_swap_in",
        "blocks_to_copy",
        "log",
        "groups",
        "preempted",
    ):
        getattr(plan, field).append(None)
        assert plan != twin
        getattr(plan, field).pop()
    plan.scheduled[0].block_table.append(5)
    assert plan != twin
    plan.scheduled[0].block_table.pop()
    plan.scheduled[-1].slots[0] += 1
    assert plan != twin
