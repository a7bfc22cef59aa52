"""What is told about the next step is what the next step does."""

from __future__ import annotations

import random

import pytest

from engine.scheduler import Scheduler, SchedulerConfig, SequenceGroup
from engine.why import taken_next


@pytest.mark.parametrize("chunked", [True, False])
def test_as_many_are_taken_as_was_said(chunked: bool) -> None:
    """At every boundary of random runs, unless the step preempts, swaps in first or owes decodes their turn."""
    told: set[int] = set()
    for seed in range(60):
        rng = random.Random(seed)
        config = SchedulerConfig(
            num_gpu_blocks=rng.randrange(12, 40),
            num_cpu_blocks=8,
            block_size=4,
            max_model_len=32,
            max_num_batched_tokens=rng.randrange(32, 64),
            max_num_seqs=rng.randrange(3, 12),
            enable_chunked_prefill=chunked,
            watermark_blocks=rng.randrange(2),
        )
        scheduler = Scheduler(config)
        for i in range(40):
            coming = [
                SequenceGroup(f"{i}-{k}", rng.randrange(1, 20), n=rng.randrange(1, 3), max_tokens=rng.randrange(1, 9))
                for k in range(rng.randrange(4))
            ]
            said = taken_next(scheduler, coming)
            for group in coming:
                scheduler.add(group)
            other = bool(scheduler.swapped) or scheduler.decodes_owed
            plan = scheduler.schedule()
            verbs = [action.verb for action in plan.log]
            if "preempt" not in verbs and not other:
                assert verbs.count("admit") == said, (seed, i, plan.log)
                told.add(said)
            scheduler.update(plan, set())
    assert told >= {0, 1, 2, 3}
