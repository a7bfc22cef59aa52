"""Time of one scheduler step, without a model.

python benchmarks/scheduler_step.py [--json] [--sizes 16 64 256 1024 4096]

decode: N groups of one branch decoding.  mixed: N decodes and prompts of 1500 tokens that fill the budget.
65536 GPU blocks of 16 tokens (more above 512 decodes), 4096 tokens a step, prompts of 128 to 143 tokens; median and
lower quartile of 60 steps.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable

from engine.scheduler import Scheduler, SchedulerConfig, SequenceGroup


def world(count: int) -> Scheduler:
    """A scheduler in which `count` groups are decoding."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_gpu_blocks=max(65536, 128 * count),
            max_num_batched_tokens=max(4096, count + 64),
            max_num_seqs=max(count, 64) + 64,
            max_model_len=8192,
        )
    )
    for i in range(count):
        scheduler.add(SequenceGroup(f"d{i}", 128 + i % 16, 1, 4000))
    while any(not group.forked for group in scheduler.groups.values()):
        scheduler.update(scheduler.schedule())
    return scheduler


def steps(
    scheduler: Scheduler, rounds: int, before: Callable[[int], None] | None = None
) -> tuple[list[float], list[float]]:
    """Microseconds of schedule() and of update() over `rounds` steps."""
    plans, updates = [], []
    for i in range(rounds):
        if before:
            before(i)
        start = time.perf_counter()
        plan = scheduler.schedule()
        middle = time.perf_counter()
        scheduler.update(plan)
        plans.append((middle - start) * 1e6)
        updates.append((time.perf_counter() - middle) * 1e6)
    return plans, updates


def measure(count: int, mixed: bool) -> dict[str, float]:
    scheduler = world(count)

    def arrive(i: int) -> None:
        while len(scheduler.waiting) < 4:
            scheduler.add(SequenceGroup(f"p{scheduler.num_arrivals}", 1500, 1, 1))

    plans, updates = steps(scheduler, 60, arrive if mixed else None)
    return {
        "schedule_us": statistics.median(plans),
        "schedule_us_low": statistics.quantiles(plans, n=4)[0],
        "update_us": statistics.median(updates),
        "update_us_low": statistics.quantiles(updates, n=4)[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 64, 256, 1024, 4096])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [
        {"decodes": n, "load": load, **measure(n, load == "mixed")} for load in ("decode", "mixed") for n in args.sizes
    ]
    if args.json:
        print(json.dumps({"python": platform.python_version(), "machine": platform.machine(), "rows": rows}))
        return
    print(f"{'load':8}{'decodes':>8}{'schedule us':>14}{'(quartile)':>12}{'update us':>12}{'(quartile)':>12}")
    for row in rows:
        print(
            f"{row['load']:8}{row['decodes']:8}{row['schedule_us']:14.0f}{row['schedule_us_low']:12.0f}"
            f"{row['update_us']:12.0f}{row['update_us_low']:12.0f}"
        )


if __name__ == "__main__":
    main()
