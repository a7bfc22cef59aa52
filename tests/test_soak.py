"""A soak without a model: random groups through every configuration, with aborts and failures at any moment.

After every step all invariants and the contents of every block are checked by formulas of the tests' own; every
accepted group leaves exactly once, by one of the ways there are; at the end no block is left.  The long runs are made
with contracts off, as in production, a short one with the contracts that the tests turn on.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from engine.scheduler import RefusedError, Scheduler, SequenceGroup, Status
from tests.plainly import plainly
from tests.worlds import R, Run, assert_empty, random_request, random_world

PARTS = 8
GROUPS = 20_000


def soak(seed: int, groups: int) -> Counter[str]:
    """Random worlds until `groups` were accepted; how often everything happened."""
    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    while seen["accepted"] < groups:
        seen += soak_world(rng, rng.randint(1, 60))
    return seen


def soak_world(rng: random.Random, arrivals: int) -> Counter[str]:
    s = random_world(rng)
    rate = rng.choice([0.0, 0.0, 0.01, 0.1])
    run = Run(s, stop=lambda group, branch: rng.random() < rate)
    seen: Counter[str] = Counter(worlds=1)
    trouble = rng.choice([0.0, 0.0, 0.02, 0.2])
    burst = rng.choice([1, 4, 16, arrivals])
    accepted: set[str] = set()
    for _ in range(arrivals):
        group = random_request(rng, s) if rng.random() < 0.2 else large_request(rng, s)
        try:
            s.add(group)
        except RefusedError:
            seen["refused"] += 1
            continue
        accepted.add(group.request_id)
        if len(accepted) % burst == 0:
            step(run, rng, trouble, seen)
    while s.has_unfinished():
        step(run, rng, trouble, seen)
    assert_empty(s)
    seen["accepted"] = len(accepted)
    assert set(run.ended) == accepted, "nothing is lost"
    for group in run.ended.values():
        assert group.status in (Status.FINISHED, Status.ABORTED, Status.FAILED)
        seen[group.status.value] += 1
    seen += run.verbs
    seen["steps"] += run.steps
    return seen


def large_request(rng: random.Random, s: Scheduler) -> SequenceGroup:
    """One that takes a good part of the pool, so that groups drive each other out."""
    tokens = min(s.config.num_gpu_blocks * s.config.block_size, s.config.max_model_len)
    n = rng.choice([1, 1, 2, 3])
    return R(p=rng.randint(1, max(1, tokens // 6)), n=n, m=rng.randint(1, max(1, tokens // (2 * n))))


def step(run: Run, rng: random.Random, trouble: float, seen: Counter[str]) -> None:
    s = run.s
    if rng.random() < trouble and s.groups:
        victim = s.groups[rng.choice(list(s.groups))]
        assert s.abort(victim.request_id)
        assert victim.request_id not in s.groups, "at a boundary it is gone at once"
        run.left([victim])
        seen["aborted at a boundary"] += 1
        run.check()
    if rng.random() < trouble * 0.3 and s.has_unfinished():
        fail(run, rng, seen)
        return
    if not s.has_unfinished():
        return

    def between(plan: object) -> None:
        if rng.random() < trouble and s.groups:
            victim = rng.choice(list(s.groups))
            assert s.abort(victim)
            assert not s.abort(victim), "a second time is nothing"
            seen["aborted in a step"] += 1

    run.step(between)


def fail(run: Run, rng: random.Random, seen: Counter[str]) -> None:
    """A step that could not be carried out, wholly or for some groups."""
    plan = run.s.schedule()
    scheduled = [group.request_id for group, _ in plan.groups]
    named = rng.choice([None, [rng.choice(scheduled)], []])
    departed = run.s.fail(plan, named)
    run.left(departed)
    assert {g.request_id for g in departed} == set(scheduled if named is None else named)
    assert not run.s.running
    assert not run.s.swapped
    assert run.s.blocks.gpu_free == run.s.config.num_gpu_blocks
    seen["failed steps"] += 1
    run.check()


@pytest.mark.parametrize("seed", range(PARTS))
def test_nothing_is_lost_and_no_block_is_left(seed: int) -> None:
    seen = Counter(plainly("tests.test_soak", f"soak({seed}, {GROUPS // PARTS})"))
    assert seen["accepted"] >= GROUPS // PARTS
    happened = (
        "refused",
        "finish",
        "abort",
        "fail",
        "preempt:swap",
        "preempt:recompute",
        "demote",
        "swap_in",
        "fork",
        "finish_branch",
        "failed steps",
        "aborted at a boundary",
        "aborted in a step",
    )
    assert all(seen[name] for name in happened), seen


@pytest.mark.parametrize("seed", [100, 101])
def test_the_contracts_hold_as_well(seed: int) -> None:
    seen = soak(seed, 75)
    assert seen["steps"] > 100


def test_every_configuration_is_met() -> None:
    """The soak draws both orders, all modes, no swap and ample swap, and pools from 4 to 64 blocks."""
    rng = random.Random(0)
    met = [random_world(rng).config for _ in range(500)]
    assert {(c.enable_chunked_prefill, c.mode) for c in met} == {
        (chunked, mode) for chunked in (True, False) for mode in {c.mode for c in met}
    }
    assert {c.num_gpu_blocks for c in met} == set(range(4, 65))
    assert {c.num_cpu_blocks for c in met} >= {0, 1, 4, 256}
