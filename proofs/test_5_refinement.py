"""Refinement: every plan's log, replayed in the spec guard by guard, lands in the state that the scheduler is in.

Replay shows that the code does only what an action allows, and all that it logs; whom it chooses is for the laws.
"""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

from engine.scheduler import RefusedError
from proofs.mutants import MUTANTS
from proofs.scopes import SMALL, explored
from spec import views
from spec.abstract import ACTIONS, abstract, may_add
from spec.check.explore import Event, explore
from spec.check.refine import Mismatch, replay, replay_step
from tests.worlds import R, random_request, random_world, world

# what replay cannot see: the order of phases, choices among what is allowed, and block ids
CHOICES = {
    *("ReturnsAfterPreemption", "PrefillsFirstInChunked", "NoCatchUp", "NeverSwapsIn", "NeverAdmitsTwo"),
    *("DecodesNeverOwed", "PreemptsOneBlockEarly", "NoDemotion", "DemotesOneTooMany", "AlwaysRecomputes"),
    *("AdmitsNobody", "ChunkIsHalved", "RefusesNothing"),
}
IDS = {
    "DueOneBeatLate",
    "KeepsDemotedSwapOut",
    "RowsBeginAtZero",
    "DrawsEveryChunk",
    "CountsDecodesAsPrefill",
    "FinishedStay",
} | {
    *("FinishedBranchReturns", "SharesAllOfThePrompt", "ForgetsCopies", "TablesReversed", "StoppedStayListed"),
}


LIMIT = 1200  # states: replay is a second opinion on what the laws say of all of them


class DiffersError(Exception):
    pass


def compare(step: views.Step, turn: views.Round, event: Event) -> None:
    mismatch = replay(turn)
    if mismatch is not None:
        raise DiffersError(f"{event}\n{mismatch}")


@pytest.mark.parametrize("name", SMALL)
def test_every_step_from_the_first_states_replays_in_the_spec(name: str) -> None:
    explored(SMALL[name].world, step_hook=compare, limit=LIMIT)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_every_reachable_step_replays_in_the_spec(name: str) -> None:
    assert explored(SMALL[name].world, step_hook=compare).complete


@pytest.mark.parametrize("seed", range(30))
def test_every_step_of_a_random_run_replays_in_the_spec(seed: int) -> None:
    rng = random.Random(seed)
    s = random_world(rng)
    for _ in range(80):
        for _ in range(rng.choice([0, 0, 1, 2])):
            with suppress(RefusedError):
                s.add(random_request(rng, s))
        before = views.snapshot(s)
        plan = s.schedule()
        step = views.observe(before, plan, views.snapshot(s))
        assert replay_step(step) is None
        stopped = {(row.group.request_id, b) for row in plan.scheduled for b in row.draws if rng.random() < 0.1}
        failed = {group.request_id for group, _ in plan.groups if rng.random() < 0.02}
        if rng.random() < 0.1 and s.groups:
            s.abort(rng.choice(list(s.groups)))
        if rng.random() < 0.2:
            with suppress(RefusedError):
                s.add(random_request(rng, s))
        s.update(plan, stopped, failed)
        assert replay(views.conclude(step, views.snapshot(s))) is None


def differs(mutant: str) -> bool:
    fault = next(one for one in MUTANTS if one.id == mutant)
    for scope in SMALL.values():
        w = scope.world
        try:
            explore(w, lambda w=w: fault.build(w.config), fault.new_group, limit=700, laws=["L3"], step_hook=compare)
        except (DiffersError, IndexError):
            return True
    return False


@pytest.mark.parametrize("mutant", [one.id for one in MUTANTS if one.id not in CHOICES | IDS])
def test_a_planted_fault_in_the_counts_does_not_replay(mutant: str) -> None:
    assert differs(mutant)


def test_a_changed_entry_of_the_log_does_not_replay() -> None:
    s = world(8, 4, 2, 8, 8, 32)
    s.add(R(p=3, n=2, m=4, id="a"))
    before = views.snapshot(s)
    plan = s.schedule()
    step = views.observe(before, plan, views.snapshot(s))
    assert replay_step(step) is None
    at = next(i for i, entry in enumerate(plan.log) if entry.verb == "admit")
    plan.log[at] = plan.log[at]._replace(blocks=plan.log[at].blocks + 1)
    mismatch = replay_step(step)
    assert isinstance(mismatch, Mismatch)
    assert mismatch.at == "admit"
    assert "not allowed" in str(mismatch)


def test_every_action_has_a_guard_that_can_refuse() -> None:
    s = world(8, 4, 2, 8, 8, 32)
    s.add(R(p=3, n=2, m=4, id="a"))
    state = abstract(s)
    (waiting,) = state.waiting
    assert may_add(state, waiting) is True
    for name, action in ACTIONS.items():
        assert action.text
        if name not in ("abort", "fail"):
            assert action.guard(state, waiting, 7) is not True
    assert ACTIONS["admit"].guard(state, waiting, 2) is True
