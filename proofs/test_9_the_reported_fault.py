"""The reported fault, found and not remembered: the old admission rule, and the hang that the strict rule alone leaves.

The policies are those of examples/policies, searched in small worlds for the shortest run; each run is printed as a
timeline and carried out again on the faulty scheduler.  The production scheduler is searched whole in the same worlds.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from engine.check import new_group
from engine.scheduler import Scheduler, SchedulerConfig
from examples.policies.old_rule import OldRule
from examples.policies.pull_request import PullRequest
from spec import views
from spec.check.codec import Codec
from spec.check.explore import Event, Found, Violation, World, explore
from spec.check.liveness import analyse
from spec.check.report import Replayed, timeline
from spec.check.worlds import Sketch
from spec.laws import BY_ID, STATE

FULL_SWAP = Sketch(7, 4, 1, 4, 4, ((1, 2, 3), (1, 1, 4)), 3).world(SchedulerConfig)
ORDER = Sketch(7, 4, 2, 4, 4, ((1, 2, 4), (3, 1, 4), (3, 2, 3)), 3).world(SchedulerConfig)
HALF_A_PROMPT = Sketch(8, 8, 1, 3, 3, ((6, 2, 2), (1, 1, 5)), 3, mode="swap").world(SchedulerConfig)
WORLDS = {"full-swap": FULL_SWAP, "order": ORDER, "half-a-prompt": HALF_A_PROMPT}
LACK = "Aborted due to the lack of CPU swap space"


def search(policy: type[Scheduler], world: World, **more: Any) -> Found:
    return explore(world, lambda: policy(world.config), new_group, **more)


def steps(violation: Violation) -> int:
    return sum(event.kind == "step" for event in violation.run)


def shown(violation: Violation, policy: type[Scheduler], world: World) -> str:
    """The timeline, printed (pytest -s, or with a failure)."""
    text = timeline(violation, lambda: policy(world.config), new_group)
    print(f"\n{text}")
    return text


def carried_out(run: tuple[Event, ...], policy: type[Scheduler], world: World) -> Replayed:
    """The run on a fresh scheduler, up to its last event."""
    again = Replayed(lambda: policy(world.config), new_group)
    for event in run:
        again.carry_out(event)
    return again


@functools.cache
def broken(policy: type[Scheduler], law: str, name: str) -> Violation:
    """The shortest run of the policy that breaks this law in this world."""
    violation = search(policy, WORLDS[name], laws={law}).violation
    assert violation is not None
    assert violation.law is BY_ID[law]
    return violation


@functools.cache
def production(name: str) -> Found:
    return search(Scheduler, WORLDS[name], graph=True)


# the old rule


def test_with_the_old_rule_newcomers_are_admitted_while_groups_are_swapped() -> None:
    violation = broken(OldRule, "S1", "order")
    assert ">> step" in shown(violation, OldRule, ORDER)


def test_with_the_old_rule_the_swap_area_fills_and_the_engine_aborts() -> None:
    """The shortest run to a full swap area that kills the engine, replayed: the same words as in the report."""
    violation = broken(OldRule, "S8", "full-swap")
    assert LACK in violation.detail
    text = shown(violation, OldRule, FULL_SWAP)
    assert LACK in text
    before = carried_out(violation.run[:-1], OldRule, FULL_SWAP).s
    assert before.swapped, "somebody is in the swap area"
    assert before.blocks.cpu_free < FULL_SWAP.config.num_cpu_blocks
    with pytest.raises(RuntimeError, match=LACK):
        before.schedule()


def test_with_the_old_rule_an_admission_while_swapped_leads_to_the_abort() -> None:
    """In the run to the abort that the report describes: somebody was admitted past the swapped, then swap is full."""
    world = Sketch(6, 3, 1, 5, 5, ((1, 2, 3), (1, 1, 5)), 4).world(SchedulerConfig)

    class Watched(OldRule):
        """Remembers that newcomers went past a swapped group."""

        passed = False

        def __init__(self, config: SchedulerConfig) -> None:
            super().__init__(config)
            self.passed = False

        def _admit_head(self, step: Any) -> bool:
            outside = bool(self.swapped)
            went = super()._admit_head(step)
            self.passed = self.passed or (outside and went)
            return went

        def _make_room(self, size: int, step: Any) -> bool:
            if self.passed:
                return super()._make_room(size, step)
            return Scheduler._make_room(self, size, step)

    violation = search(Watched, world, laws={"S8"}).violation
    assert violation is not None
    shown(violation, Watched, world)
    admitted_past = False
    again = Replayed(lambda: OldRule(world.config), new_group)
    for event in violation.run[:-1]:
        swapped = [g.request_id for g in again.s.swapped]
        again.carry_out(event)
        admitted_past |= bool(swapped) and any(action.startswith("admit") for action in again.rows[-1].actions)
    assert admitted_past
    with pytest.raises(RuntimeError, match=LACK):
        again.s.schedule()


def test_with_the_old_rule_a_later_arrival_runs_while_an_earlier_one_sits_outside() -> None:
    """The shortest run to a reordering (Q2), replayed: the queues are no longer in order of arrival."""
    violation = broken(OldRule, "Q2", "order")
    shown(violation, OldRule, ORDER)
    before = carried_out(violation.run[:-1], OldRule, ORDER).s
    assert BY_ID["Q2"](views.snapshot(before))
    before.schedule()
    ages = [g.arrival for g in (*before.running, *before.swapped, *before.waiting)]
    assert ages != sorted(ages)


def test_no_shorter_run_shows_the_old_rules_faults() -> None:
    """Breadth-first search: these are the fewest events, pinned."""
    found = {id: broken(OldRule, id, name) for id, name in (("S1", "order"), ("Q2", "order"), ("S8", "full-swap"))}
    assert {id: (len(one.run), steps(one)) for id, one in found.items()} == {"S1": (7, 4), "Q2": (7, 4), "S8": (7, 4)}


# strict admission, and nothing else


def test_strict_admission_alone_still_aborts_for_lack_of_swap() -> None:
    violation = broken(PullRequest, "S8", "full-swap")
    assert LACK in shown(violation, PullRequest, FULL_SWAP)
    with pytest.raises(RuntimeError, match=LACK):
        carried_out(violation.run[:-1], PullRequest, FULL_SWAP).s.schedule()


def test_strict_admission_alone_hangs_behind_half_a_prompt() -> None:
    """The shortest run to a step that serves nobody, replayed: the same for ever, whoever arrives."""
    violation = broken(PullRequest, "S18", "half-a-prompt")
    assert "run nobody" in shown(violation, PullRequest, HALF_A_PROMPT)
    s = carried_out(violation.run[:-1], PullRequest, HALF_A_PROMPT).s
    (stuck,) = s.swapped
    assert not stuck.forked, "it was swapped out in the middle of its prompt"
    assert 0 < stuck.known - stuck.deficit < stuck.known
    assert stuck.deficit > s.config.tokens, "what it lacks exceeds the budget of a step"
    s.add(new_group("late", 1, 1, 5))
    for _ in range(50):
        plan = s.schedule()
        assert plan.is_empty
        s.update(plan)
    assert [g.request_id for g in s.waiting] == ["late"], "everyone behind waits for ever"


def test_that_hang_is_a_lasso_in_the_graph_of_all_runs() -> None:
    """Liveness says it too, without the law on idle steps: a run goes round for ever while a group stays."""
    found = search(PullRequest, HALF_A_PROMPT, graph=True, laws=set(BY_ID) - {"S18", "L1", "L2", "S11s"})
    assert found.complete
    assert found.graph is not None
    lasso = analyse(found.graph).lasso
    assert lasso is not None
    s = Codec(lambda: PullRequest(HALF_A_PROMPT.config), new_group).restore(found.graph.keys[lasso[0]])
    plan = s.schedule()
    assert plan.is_empty
    assert s.has_unfinished()


# and here


@pytest.mark.parametrize("name", WORLDS)
def test_the_production_scheduler_has_no_such_run(name: str) -> None:
    """Every state of the same worlds: no law breaks, nobody waits for ever, and swap does fill up on the way."""
    found = production(name)
    assert found.violation is None
    assert found.complete
    assert found.graph is not None
    assert analyse(found.graph).lasso is None
    assert found.sometimes["swap_out"]


def test_the_production_scheduler_meets_the_full_swap_area_and_demotes() -> None:
    assert production("full-swap").sometimes["demote"]


def test_the_production_scheduler_brings_half_a_prompt_back_in_pieces() -> None:
    seen = []

    def look(step: Any, turn: Any, event: Event) -> None:
        seen.extend(g for g in step.swapped_in if not g.forked and g.deficit > step.config.tokens)

    search(Scheduler, HALF_A_PROMPT, step_hook=look)
    assert seen


REPLAYS: dict[str, tuple[type[Scheduler], str, str]] = {
    "abort": (OldRule, "S8", "full-swap"),
    "reordering": (OldRule, "Q2", "order"),
    "hang": (PullRequest, "S18", "half-a-prompt"),
}


@pytest.mark.parametrize("name", REPLAYS)
def test_the_production_scheduler_goes_through_the_same_events_lawfully(name: str) -> None:
    """The very runs that break the others: here every law holds at every event, and all groups finish."""
    policy, law, world = REPLAYS[name]
    again = carried_out(broken(policy, law, world).run, Scheduler, WORLDS[world])
    assert not any("Error" in action for row in again.rows for action in row.actions)
    s = again.s
    for _ in range(100):
        assert all(law(views.snapshot(s)) for law in STATE)
        if not s.has_unfinished():
            break
        s.update(s.schedule())
    assert not s.has_unfinished()
