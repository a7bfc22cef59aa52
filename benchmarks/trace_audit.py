"""How fast a trace is audited, and what recording one costs: python -m benchmarks.trace_audit [--write]

Records loads without a model, audits them, and prints lines a second of CPU time and the most expensive functions.
--write: put the table into benchmarks/results/trace_audit.md.
"""

from __future__ import annotations

import argparse
import cProfile
import datetime
import json
import os
import platform
import pstats
import random
import tempfile
import time
from pathlib import Path

from engine.scheduler import Scheduler, SchedulerConfig, SequenceGroup
from engine.scheduler.trace import TraceWriter
from spec.check.trace import audit

RESULTS = Path(__file__).parent / "results" / "trace_audit.md"
Load = tuple[SchedulerConfig, list[tuple[int, int, int]]]


def loads() -> dict[str, Load]:
    """Configurations and requests (p, n, m), all queued at once."""
    rng = random.Random(3)
    few = [(rng.randint(4, 30), rng.choice([1, 1, 2]), rng.randint(4, 30)) for _ in range(200)]
    mixed = [(rng.randint(20, 120), rng.choice([1, 1, 2]), rng.randint(20, 80)) for _ in range(60)]
    wide = [(rng.randint(20, 200), 1, rng.randint(50, 100)) for _ in range(300)]
    return {
        "few at once": (SchedulerConfig(num_gpu_blocks=24, num_cpu_blocks=12, block_size=4, max_num_seqs=8), few),
        "ten at once": (SchedulerConfig(num_gpu_blocks=60, num_cpu_blocks=30, max_num_batched_tokens=256), mixed),
        "the report's load, small": (
            SchedulerConfig(num_gpu_blocks=512, num_cpu_blocks=455, max_num_batched_tokens=512, max_model_len=512),
            [(300, 8, 200)] * 60,
        ),
        "150 at once": (SchedulerConfig(num_gpu_blocks=2000, num_cpu_blocks=400, max_num_batched_tokens=1024), wide),
    }


def drive(config: SchedulerConfig, requests: list[tuple[int, int, int]], path: Path | None) -> tuple[int, float]:
    """Steps and CPU seconds, recorded or not."""
    s = Scheduler(config)
    trace = None if path is None else TraceWriter(s, path)
    begun = time.process_time()
    for i, (p, n, m) in enumerate(requests):
        s.add(SequenceGroup(f"r{i}", p, n, m))
    steps = 0
    while s.has_unfinished():
        s.update(s.schedule())
        steps += 1
    if trace is not None:
        trace.close()
    return steps, time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    lines = [
        "| load | lines | groups a line | rows a line | bytes a line | us a step | us recorded | audited lines/s | "
        "audited rows/s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        for name, (config, requests) in loads().items():
            steps, plain = drive(config, requests, None)
            _, recorded = drive(config, requests, path)
            spent = []
            for _ in range(3):
                begun = time.process_time()
                seen = audit(path)
                spent.append(time.process_time() - begun)
                assert seen.lawful, seen.findings
            content = [json.loads(line) for line in path.read_text().splitlines()]
            groups = sum(len(line.get(part, ())) for line in content for part in ("decodes", "run")) / seen.lines
            rows = sum(len(line.get(part, ())) for line in content for part in ("slots", "rows")) / seen.lines
            rate = seen.lines / min(spent)
            lines.append(
                f"| {name} | {seen.lines:,} | {groups:.0f} | {rows:.0f} | {path.stat().st_size / seen.lines:,.0f} | "
                f"{plain / steps * 1e6:.0f} | {recorded / steps * 1e6:.0f} | {rate:,.0f} | {rate * rows:,.0f} |"
            )
            print(lines[-1], flush=True)
            if name == "ten at once":
                profile = cProfile.Profile()
                profile.runcall(audit, path)
                stats = pstats.Stats(profile)
        print("\nwhere the audit's time goes (ten at once):")
        stats.sort_stats("tottime").print_stats(12)
    if options.write:
        RESULTS.write_text(
            "# Trace audit: lines a second and core\n\n"
            f"`python -m benchmarks.trace_audit --write`, {datetime.date.today()}, Python {platform.python_version()}, "
            f"{platform.machine()}, {os.cpu_count()} cores.  Processor time of one process; the best of three audits.\n"
            "A line is a step.  Decodes that go on as they did are counted together, so what a line costs follows the "
            "groups to which something else happens: those that come, go, move or need a block.\n\n"
            + "\n".join(lines)
            + "\n"
        )


if __name__ == "__main__":
    main()
