"""The list of laws itself: complete, readable, and the same rule whichever way it is read."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

from engine.scheduler import RefusedError
from spec import plain, views
from spec.__main__ import README, written
from spec.laws import BY_ID, IDS_STATE, IDS_STEP, LAWS, MID, ROUND, STATE, STATE_IN_MID, STEP, Kind, Tier, steps_bound
from spec.words import Measure, remaining_work, whole
from tests.worlds import R, random_request, random_world, world

DESIGNED = {
    *(f"B{i}" for i in range(1, 8)),
    *(f"Q{i}" for i in range(1, 6)),
    *(f"S{i}" for i in range(1, 17)),
    *("N1", "L1", "L2", "L3", "L4", "E1"),
}


def test_every_designed_law_is_declared() -> None:
    assert set(BY_ID) >= DESIGNED


def test_two_statements_are_exact() -> None:
    assert BY_ID["S1"].statement == "no new prefill while any swapped group remains"
    assert BY_ID["B2"].statement == "CPU blocks never exceed capacity"


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.id)
def test_a_law_reads_as_a_sentence(law) -> None:
    assert law.statement
    assert not law.statement.endswith(".")
    assert law.origin
    assert law.name.isidentifier()
    assert (law.predicate is None) == (law.kind is Kind.TEMPORAL)


def test_the_lists_are_a_partition() -> None:
    parts = [*STATE, *MID, *STEP, *ROUND, *IDS_STATE, *IDS_STEP]
    assert len(parts) == len(set(parts)) == sum(law.predicate is not None for law in LAWS)
    assert set(STATE_IN_MID) <= set(STATE)
    assert all(law.tier is Tier.COUNTS for law in [*STATE, *MID, *STEP, *ROUND])


def steps(seed: int, count: int):
    """Random steps with their views."""
    rng = random.Random(seed)
    s = random_world(rng)
    for _ in range(count):
        for _ in range(rng.choice([0, 0, 1, 2])):
            with suppress(RefusedError):
                s.add(random_request(rng, s))
        before = views.snapshot(s)
        plan = s.schedule()
        mid = views.snapshot(s)
        step = views.observe(before, plan, mid)
        stopped = {(row.group.request_id, b) for row in plan.scheduled for b in row.draws if rng.random() < 0.1}
        yield s, step, stopped, plan


@pytest.mark.parametrize("seed", range(20))
def test_the_three_readings_of_a_law_agree(seed: int) -> None:
    """The connectives, the same text with Python's operators, and the fused loop, on states good and spoilt."""
    rng = random.Random(seed)
    for s, step, stopped, plan in steps(seed, 25):
        for laws, check, view in (
            (STATE, plain.check_state, spoilt(rng, step.before)),
            (MID, plain.check_mid, step._replace(mid=spoilt(rng, step.mid))),
            (STEP, plain.check_step, step._replace(mid=spoilt(rng, step.mid))),
        ):
            broken = []
            for law in laws:
                try:
                    holds = law(view)
                except Exception:
                    holds = False
                if not holds:
                    broken.append(law)
            assert check(view) == broken
        s.update(plan, stopped)
        turn = views.conclude(step, spoilt(rng, views.snapshot(s)))
        assert plain.check_round(turn) == [law for law in ROUND if not law(turn)]


def spoilt(rng: random.Random, state: views.State) -> views.State:
    """The state, often with one number of one group changed."""
    queue = rng.choice(["running", "swapped", "waiting"])
    groups = list(getattr(state, queue))
    if not groups or rng.random() < 0.3:
        return state
    at = rng.randrange(len(groups))
    field = rng.choice(["known", "deficit", "held", "arrival", "live", "forked", "tail_shared", "tokens", "max_tokens"])
    value = getattr(groups[at], field)
    groups[at] = groups[at]._replace(**{field: not value if isinstance(value, bool) else value + rng.choice([-1, 1])})
    return state._replace(**{queue: tuple(groups)})


def test_a_live_scheduler_can_be_read_like_a_snapshot() -> None:
    for s, _, stopped, plan in steps(3, 30):
        s.update(plan, stopped)
        assert plain.check_state(s) == plain.check_state(views.snapshot(s)) == []


def test_the_measure_counts_what_the_words_say() -> None:
    """Block by block, without a formula: which positions a table must have, and which blocks siblings share."""
    for size in (1, 2, 3, 4, 16):
        m = Measure(size)
        for p in range(1, 9):
            for n in (1, 2, 3):
                group = R(p=p, n=n, m=9)
                world(1000, bs=size).add(group)
                assert m.cover(group) == len({t // size for t in range(p)})
                for known in range(p + 1, p + 6):
                    group.forked, group.live, group.known = True, n, known
                    group.deficit = n
                    named = {
                        ("shared", b) if (b + 1) * size <= p else (branch, b)
                        for branch in range(n)
                        for b in range(-(-known // size))
                    }
                    assert m.cover(group) == len(named)
                    filled = {
                        ("shared", b) if (b + 1) * size <= p else (branch, b)
                        for branch in range(n)
                        for b in range(-(-(known - 1) // size))
                    }
                    assert m.filled(group) == len(filled)
                    assert whole(group) == p // size * size + n * (known - p // size * size)


def test_remaining_work_counts_all_branches_from_the_start() -> None:
    group = R(p=5, n=3, m=4)
    world(1000).add(group)
    assert remaining_work(group) == 5 + 3 * 3


def test_the_bound_on_steps_sums_over_the_seniors() -> None:
    s = world(1000, bs=4)
    a, b = s.add(R(p=5, n=2, m=3)), s.add(R(p=4, n=1, m=2))
    assert steps_bound(a, []) == 5 + 2 * 2 + 1
    assert steps_bound(b, [a]) == 10 + 4 + 1
    assert steps_bound(b, [a], chunked=False) == 2 * 15


def test_the_table_of_laws_in_the_readme_is_up_to_date() -> None:
    text = README.read_text()
    assert written(text) == text, "run python -m spec"
