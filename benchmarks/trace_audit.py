"""How fast a trace is audited, and what recording one costs: python benchmarks/trace_audit.py

Records loads without a model, audits them, and prints lines a second of CPU time and the most expensive functions.
"""

from __future__ import annotations

import cProfile
import pstats
import random
import tempfile
import time
from pathlib import Path

from engine.scheduler import Scheduler, SchedulerConfig, SequenceGroup
from engine.scheduler.trace import TraceWriter
from spec.check.trace import audit

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
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        print(f"{'load':<26}{'steps':>6}{'us/step':>9}{'recorded':>10}{'bytes/line':>12}{'audited lines/s':>17}")
        for name, (config, requests) in loads().items():
            steps, plain = drive(config, requests, None)
            _, recorded = drive(config, requests, path)
            begun = time.process_time()
            seen = audit(path)
            assert seen.lawful, seen.findings
            rate = seen.lines / (time.process_time() - begun)
            size = path.stat().st_size / seen.lines
            each, with_trace = plain / steps * 1e6, recorded / steps * 1e6
            print(f"{name:<26}{steps:>6}{each:>9.0f}{with_trace:>10.0f}{size:>12.0f}{rate:>17.0f}")
            if name == "few at once":
                profile = cProfile.Profile()
                profile.runcall(audit, path)
                stats = pstats.Stats(profile)
        print("\nwhere the audit's time goes (few at once):")
        stats.sort_stats("tottime").print_stats(12)


if __name__ == "__main__":
    main()
