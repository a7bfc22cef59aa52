"""Fit a cost model: run a model on loads of every kind, time each step, and solve for the costs by least squares.

Errors count relative to the time of their step, since steps differ by a factor of a hundred and most are short.
A cost that would come out negative is left out, and the rest solved again.

Times are wall times.  On a machine that others use, processor time tells what the step itself took: that is the time of
all threads together, so it stands for the time of a step only where there is one, and never for a GPU's.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from engine.config import EngineArgs
from engine.sampling import SamplingParams
from engine.simulate.cost import COSTS, CostModel, Work, work_of
from engine.simulate.tally import quantile

if TYPE_CHECKING:
    from engine.core import EngineCore
    from engine.request import RequestState, StepOutput
    from engine.runner import Runner
    from engine.scheduler import Plan

logger = logging.getLogger("lawful")

Load = Sequence[tuple[int, int, int]]  # (prompt tokens, branches, output tokens) of requests that come at once
COLUMNS = ("step", "prefill_token", "decode_token", "prefill_pair", "decode_kv", "swapped_token", "copied_token")
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}
LEAST_STEPS = 5  # a cost that fewer steps have is noise, and stays 0

WARM_UP: Load = [(64, 1, 4)]
# Prompts alone from short to long, decodes few and many with short and long contexts, both at once, forks, and more
# than the pool holds, so that groups are swapped.
LOADS: tuple[Load, ...] = (
    *([(length, 1, 2)] for length in (16, 32, 64, 128, 256, 512, 1024, 1500)),
    [(32, 1, 48)],
    [(1200, 1, 32)],
    [(128, 1, 32)] * 4,
    [(32, 1, 32)] * 16,
    [(320, 1, 32)] * 16,
    [(700, 1, 32)] * 8,
    [(64 * i, 1, 8 * i) for i in range(1, 9)],
    [(24 * i + 8, 2, 24) for i in range(1, 9)],
    [(200, 2, 32)] * 28,
)
POOL = {"num_gpu_blocks_override": 384, "num_cpu_blocks_override": 384, "max_model_len": 2048}


@dataclass(frozen=True, slots=True)
class Step:
    """One measured step."""

    work: Work
    seconds: float


class _Watched:
    """A runner that notes the work of the plan it carries out."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.num_gpu_blocks = runner.num_gpu_blocks
        self.num_cpu_blocks = runner.num_cpu_blocks
        self.block_size = runner.block_size
        self.work: Work | None = None

    def execute(self, plan: Plan, requests: Mapping[str, RequestState]) -> StepOutput:
        self.work = work_of(plan, self.block_size)
        return self.runner.execute(plan, requests)


def measure(core: EngineCore, loads: Iterable[Load], clock: Callable[[], float] = time.perf_counter) -> list[Step]:
    """Run every load to its end, after one short request that is not counted; the steps with their times.

    A step's time is that of `EngineCore.step`: schedule, execute, sample, text, update; in seconds of the clock.
    """
    watched = _Watched(core.runner)
    core.runner = watched
    rng = random.Random(0)
    steps: list[Step] = []
    try:
        for number, load in enumerate(chain([WARM_UP], loads)):
            for prompt, n, tokens in load:
                ids = [rng.randrange(core.vocab_size) for _ in range(prompt)]
                core.add_request(core.new_id(), ids, SamplingParams(n=n, max_tokens=tokens, ignore_eos=True))
            while core.has_unfinished_requests():
                watched.work = None
                begun = clock()
                core.step()
                seconds = clock() - begun
                if number > 0 and watched.work is not None and any(watched.work):
                    steps.append(Step(watched.work, seconds))
    finally:
        core.runner = watched.runner
    return steps


@dataclass(frozen=True, slots=True)
class Fit:
    """A cost model and how well it tells the steps it was made from.

    median_error, p90_error: of |predicted - measured| / measured, over steps.
    r2: part of the variance of the steps' seconds that the model explains.
    total: predicted over measured seconds of all steps together.
    """

    cost: CostModel
    steps: int
    median_error: float
    p90_error: float
    r2: float
    total: float


def fit(steps: Sequence[Step], name: str = "fitted", source: str = "") -> Fit:
    """Non-negative costs that minimise the sum of squared relative errors.

    Raises ValueError when there are fewer steps than costs.
    """
    if len(steps) < len(COLUMNS):
        raise ValueError(f"{len(steps)} steps were measured; a fit needs at least {len(COLUMNS)}")
    work = np.array([[1, *step.work] for step in steps], dtype=np.float64)  # (steps, costs)
    seconds = np.array([step.seconds for step in steps])
    costs = np.zeros(len(COLUMNS))
    used = [i for i in range(len(COLUMNS)) if np.count_nonzero(work[:, i]) >= LEAST_STEPS]
    while used:
        scale = work[:, used].max(axis=0)  # costs differ by many orders of magnitude
        found, *_ = np.linalg.lstsq(work[:, used] / scale / seconds[:, None], np.ones(len(steps)), rcond=None)
        if (found >= 0).all():
            costs[used] = found / scale
            break
        del used[int(np.argmin(found))]
    predicted = work @ costs
    errors = sorted(np.abs(predicted - seconds) / seconds)
    variance = float(((seconds - seconds.mean()) ** 2).sum())
    values = {column: float(f"{cost:.4g}") for column, cost in zip(COLUMNS, costs, strict=True)}
    return Fit(
        CostModel(**values, name=name, source=source),
        len(steps),
        float(quantile(errors, 0.5)),
        float(quantile(errors, 0.9)),
        1 - float(((seconds - predicted) ** 2).sum()) / variance if variance else 1.0,
        float(predicted.sum() / seconds.sum()),
    )


def fit_command(
    path: str, model: str, device: str, progress: bool, loads: Sequence[Load] = LOADS, clock: str = "wall"
) -> int:
    """Measure `model` here, write its cost model to `path` and print it; 0.

    clock: a name of CLOCKS.  Raises ValueError where the processor's time would not be the time of a step.
    """
    from engine.llm import build_core

    if not path.endswith(".json"):
        raise ValueError(f"--fit is {path!r}; its name must end in .json, as --cost-model reads it")
    if not Path(path).resolve().parent.is_dir():
        raise ValueError(f"--fit is {path!r}; there is no such directory")
    args = EngineArgs(model=model, device=device, preemption_mode="swap", disable_log_stats=True, **POOL)  # type: ignore[arg-type]
    threads = check_clock(clock, args.resolve_device())
    level = logger.level
    logger.setLevel(logging.ERROR)  # preemptions are what is wanted here
    try:
        core = build_core(args)
        if progress and sys.stderr.isatty():
            from tqdm import tqdm

            steps = measure(core, tqdm(loads, unit="load", dynamic_ncols=True), CLOCKS[clock])
        else:
            steps = measure(core, loads, CLOCKS[clock])
    finally:
        logger.setLevel(level)
    kind = args.resolve_device()
    cores = f"{threads} thread{'s' if threads > 1 else ''} on {os.cpu_count()} cores, {platform.machine()}"
    place = cores if kind == "cpu" else kind
    source = f"lawful simulate --fit, {Path(model).name}, {place}, {clock} time, {datetime.date.today()}"
    found = fit(steps, Path(path).stem, source)
    quality = {name: round(getattr(found, name), 4) for name in ("median_error", "p90_error", "r2", "total")}
    content = {**found.cost.to_dict(), "fitted": {"steps": found.steps, **quality}}
    Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    _show(found, steps)
    print(f"written to {path}; use it with --cost-model {path}")
    return 0


def check_clock(clock: str, device: str) -> int:
    """Threads that a step computes with.  Raises ValueError where the clock would not tell how long a step takes."""
    import torch

    if clock not in CLOCKS:
        raise ValueError(f"--fit-clock is {clock!r}; it must be one of {', '.join(CLOCKS)}")
    threads = torch.get_num_threads()
    if clock == "processor" and device != "cpu":
        raise ValueError(f"--fit-clock is processor and the device {device}; what a GPU does takes no processor time")
    if clock == "processor" and threads > 1:
        raise ValueError(
            f"--fit-clock is processor, which adds up the time of all {threads} threads; set OMP_NUM_THREADS=1"
        )
    return threads


def _show(found: Fit, steps: Sequence[Step]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, justify in (("cost", "left"), ("seconds", "right"), ("steps with it", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name in COSTS:
        at = COLUMNS.index(name)
        count = len(steps) if at == 0 else sum(step.work[at - 1] > 0 for step in steps)
        table.add_row(name, f"{getattr(found.cost, name):.3g}", f"{count:,}")
    console.print(table)
    console.print(
        f"{found.steps:,} steps; error of a step: median {found.median_error:.1%}, p90 {found.p90_error:.1%}; "
        f"R² {found.r2:.3f}; predicted / measured in all {found.total:.3f}"
    )
