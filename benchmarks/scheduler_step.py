"""Time of one scheduler step, without a model; against vLLM V1's scheduler if an environment with it is at hand.

python benchmarks/scheduler_step.py [--sizes 16 64 256 1024 8192] [--peer "PYTHON benchmarks/peer_vllm_step.py"]
    [--json] [--rounds 5] [--write]

decode: N groups of one branch decoding.  mixed: N decodes and prompts of 1500 tokens that fill the budget.
65536 GPU blocks of 16 tokens (more above 512 decodes), 4096 tokens a step, prompts of 128 to 143 tokens; a figure is
the median of 60 steps, in microseconds of the thread's processor time, so that other load on the machine matters less.
Each round measures lawful and then the peer; a ratio is the median over the rounds of (ours / the peer's).
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from engine.scheduler import Scheduler, SchedulerConfig, SequenceGroup

RESULTS = Path(__file__).parent / "results" / "scheduler_step.json"
Row = dict[str, float]


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
        start = time.thread_time()
        plan = scheduler.schedule()
        middle = time.thread_time()
        scheduler.update(plan)
        plans.append((middle - start) * 1e6)
        updates.append((time.thread_time() - middle) * 1e6)
    return plans, updates


def measure(count: int, mixed: bool) -> Row:
    """One round of one size."""
    scheduler = world(count)

    def arrive(i: int) -> None:
        while len(scheduler.waiting) < 4:
            scheduler.add(SequenceGroup(f"p{scheduler.num_arrivals}", 1500, 1, 1))

    plans, updates = steps(scheduler, 60, arrive if mixed else None)
    return {"schedule_us": statistics.median(plans), "update_us": statistics.median(updates)}


def peer(command: str, sizes: list[int]) -> dict[tuple[str, int], Row]:
    """One round of the peer: its command prints a JSON object with `rows` as here."""
    arguments = [*shlex.split(command), "--sizes", *map(str, sizes)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the peer's command failed:\n{done.stderr[-2000:]}")
    return {(row["load"], row["decodes"]): row for row in json.loads(done.stdout.splitlines()[-1])["rows"]}


def total(row: Row) -> float:
    return row["schedule_us"] + row["update_us"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 64, 256, 1024, 8192])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer", help="command that prints the peer's figures as JSON, for sizes up to 1024")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}, which docs/build.py shows")
    args = parser.parse_args()
    loads = [(load, n) for load in ("decode", "mixed") for n in args.sizes]
    ours: list[dict[tuple[str, int], Row]] = []
    theirs: list[dict[tuple[str, int], Row]] = []
    for _ in range(args.rounds):
        ours.append({(load, n): measure(n, load == "mixed") for load, n in loads})
        if args.peer:
            theirs.append(peer(args.peer, [n for n in args.sizes if n <= 1024]))
    rows = []
    for at in loads:
        row = {name: statistics.median(one[at][name] for one in ours) for name in ("schedule_us", "update_us")}
        line = [f"{at[0]}, {at[1]:,} decodes", f"{row['schedule_us']:.0f}", f"{row['update_us']:.0f}"]
        if theirs and at in theirs[0]:
            they = statistics.median(total(one[at]) for one in theirs)
            ratio = statistics.median(total(a[at]) / total(b[at]) for a, b in zip(ours, theirs, strict=True))
            line += [f"{they:.0f}", f"{ratio:.3f}"]
        else:
            line += ["", ""]
        rows.append(line)
    columns = ["load", "schedule(), us", "update(), us", "vLLM V1, both calls, us", "ratio of both"]
    result = {
        "section": "scheduler-step",
        "title": "Scheduler step",
        "command": "python " + shlex.join(["benchmarks/scheduler_step.py", *public(sys.argv[1:])]),
        "machine": f"{platform.machine()}, {platform.python_implementation()} {platform.python_version()}",
        "date": datetime.now(UTC).date().isoformat(),
        "tables": [{"title": f"median of {args.rounds} rounds", "columns": columns, "rows": rows}],
    }
    if args.write:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    if args.json:
        print(json.dumps(result))
        return
    for line in [columns, *rows]:
        print(f"{line[0]:24}" + "".join(f"{cell:>26}" for cell in line[1:]))


def public(arguments: list[str]) -> list[str]:
    """The arguments as anyone can give them: where the peer is installed is not told."""
    return ["PYTHON_OF_VLLM benchmarks/peer_vllm_step.py" if "peer_vllm" in one else one for one in arguments]


if __name__ == "__main__":
    main()
