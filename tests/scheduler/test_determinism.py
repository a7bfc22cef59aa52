"""Equal inputs give equal plans, in this process and in any other."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys

import pytest

from engine.scheduler import Plan, RefusedError, SequenceGroup
from tests.plainly import plainly
from tests.worlds import Run, random_world


def trace(seed: int) -> list[dict]:
    """The plans of a random run with early stops and aborts, as they were when they were made and at their end."""
    rng = random.Random(seed)
    run = Run(random_world(rng), stop=lambda group, branch: rng.random() < 0.05)
    plans: list[dict] = []

    def note(plan: Plan) -> None:
        plans.append(plan.to_dict())

    for i in range(12):
        p, n, m = rng.randint(1, 30), rng.choice([1, 2, 3]), rng.randint(1, 20)
        try:
            run.add(SequenceGroup(f"r{i}", prompt_len=p, n=n, max_tokens=m))
        except RefusedError:
            continue
        plans.append(run.step(note).to_dict())
        if rng.random() < 0.2 and run.s.groups:
            run.s.abort(rng.choice(list(run.s.groups)))
    while run.s.has_unfinished():
        plans.append(run.step(note).to_dict())
    return plans


def digest(seeds: range) -> str:
    return hashlib.sha256(repr([trace(seed) for seed in seeds]).encode()).hexdigest()


def test_the_same_run_twice_gives_the_same_plans() -> None:
    plans = 0
    for seed in range(12):
        first, second = trace(seed), trace(seed)
        assert first == second
        plans += len(first)
    assert plans > 300


def test_a_copy_of_a_plan_is_not_changed_by_later_steps() -> None:
    for seed in range(6):
        kept = trace(seed)
        texts = [repr(plan) for plan in kept]
        trace(seed)
        assert [repr(plan) for plan in kept] == texts


@pytest.mark.parametrize("hash_seed", ["1", "77777"])
def test_plans_do_not_depend_on_the_hash_seed_of_the_process(hash_seed: str) -> None:
    digests = [
        plainly("tests.scheduler.test_determinism", "digest(range(60))", PYTHONHASHSEED=value)
        for value in ("0", hash_seed)
    ]
    assert digests[0] == digests[1]


def test_the_scheduler_runs_without_torch_clock_or_randomness() -> None:
    code = """
import sys, time, random
from engine.scheduler import Scheduler, SchedulerConfig, SequenceGroup
def forbidden(*_, **__): raise AssertionError("no clock, no randomness")
for module in (time, random):
    for name in ("time", "monotonic", "perf_counter", "time_ns", "random", "randint", "choice", "shuffle"):
        if hasattr(module, name): setattr(module, name, forbidden)
s = Scheduler(SchedulerConfig(num_gpu_blocks=12, num_cpu_blocks=4, block_size=4, max_model_len=64))
for i in range(6):
    s.add(SequenceGroup(str(i), prompt_len=9, n=2, max_tokens=9))
while s.has_unfinished():
    s.update(s.schedule())
print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "numpy", "transformers", "z3"}))
"""
    env = {**os.environ, "LAWFUL_CONTRACTS": "off"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"
