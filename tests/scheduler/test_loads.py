"""The two reported loads, without a model: they end, with any swap size, in about as few steps as memory allows.

Block 16, all requests queued at once, every branch runs to max_tokens, watermark 1 % of the pool.  A lower bound on the
steps, the KV that the work occupies over the pool, is 13,550 for *full* and 1,815 for *small*.

They run with contracts off; *small* is checked by the tests' own formulas after every step.
"""

from __future__ import annotations

from collections import Counter

import pytest

from engine.scheduler import Scheduler, SchedulerConfig, SequenceGroup
from tests.plainly import plainly
from tests.worlds import Shadow, assert_empty, check, check_plan, computed


def load(gpu: int, cpu: int, requests: int, m: int, **more: object) -> Scheduler:
    config = SchedulerConfig(num_gpu_blocks=gpu, num_cpu_blocks=cpu, watermark_blocks=gpu // 100, **more)  # type: ignore[arg-type]
    scheduler = Scheduler(config)
    for i in range(requests):
        scheduler.add(SequenceGroup(str(i), prompt_len=300, n=8, max_tokens=m))
    return scheduler


def small(cpu: int, chunked: bool = True, mode: str | None = None) -> Scheduler:
    return load(
        512,
        cpu,
        60,
        200,
        max_num_batched_tokens=512,
        max_model_len=512,
        enable_chunked_prefill=chunked,
        preemption_mode=mode,
    )


def full(cpu: int) -> Scheduler:
    return load(8192, cpu, 400, 1000, max_num_batched_tokens=4096, max_num_seqs=256)


def drive(scheduler: Scheduler, checked: bool) -> Counter[str]:
    """Run to the end; how often each verb of the log happened, and the steps."""
    verbs: Counter[str] = Counter()
    shadow = Shadow(scheduler.config.block_size)
    ended = 0
    while scheduler.has_unfinished():
        plan = scheduler.schedule()
        if checked:
            check_plan(scheduler, plan)
            shadow.execute(plan)
        ended += len(scheduler.update(plan))
        verbs["steps"] += 1
        verbs.update(action.verb for action in plan.log)
        if checked:
            check(scheduler)
            if verbs["steps"] % 50 == 0:
                for group in [*scheduler.running, *scheduler.swapped]:
                    shadow.check(group, computed(group))
    assert_empty(scheduler)
    assert ended == scheduler.num_arrivals == verbs["finish"]
    return verbs


def run(load: str, checked: bool = False) -> Counter[str]:
    return Counter(plainly("tests.scheduler.test_loads", f"drive({load}, {checked})"))


@pytest.mark.parametrize("cpu", [455, 200, 50, 7, 0])
def test_the_small_load_ends_within_2200_steps(cpu: int) -> None:
    verbs = run(f"small({cpu})", checked=True)
    assert verbs["steps"] <= 2200
    assert verbs["preempt"] > 0
    assert bool(verbs["swap_in"]) is (cpu > 7), "a group takes more blocks than that"
    assert (verbs["demote"] > 0) is (cpu > 0)


@pytest.mark.parametrize("cpu", [7281, 1000, 0])
def test_the_full_load_ends_within_16500_steps(cpu: int) -> None:
    verbs = run(f"full({cpu})")
    assert verbs["steps"] <= 16_500
    assert verbs["preempt"] > 300


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_the_small_load_ends_in_every_mode(mode: str) -> None:
    verbs = run(f"small(455, mode={mode!r})")
    assert verbs["steps"] <= 2200
    assert bool(verbs["swap_out"]) is (mode == "swap")


@pytest.mark.parametrize("cpu", [455, 100, 0])
def test_the_small_load_ends_with_whole_prompts_first_in_a_few_steps_more(cpu: int) -> None:
    """A prompt of 300 tokens fills most of a step by itself, in which no stream moves: 60 steps or more go to them,
    and as many again to rebuilds."""
    verbs = run(f"small({cpu}, chunked=False)")
    assert verbs["steps"] <= 2400
