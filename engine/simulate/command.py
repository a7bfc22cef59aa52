"""`lawful simulate`: a trace through the production scheduler or another policy, and what its users would have seen."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from engine.scheduler import PreemptionMode, SchedulerConfig
from engine.scheduler.contracts import lifted
from engine.simulate.cost import DEFAULT, CostModel, load_cost
from engine.simulate.policies import policy_of
from engine.simulate.simulation import Simulation
from engine.simulate.tally import FINISHED, Tally
from engine.simulate.workload import count_lines, read_trace

SAMPLE = "data/azure2023_conv_1000.csv"
NOTE_EVERY = 0.1  # seconds between two looks of the progress bar


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is simulated.  Names are those of the command line; None is what its help says.

    trace: a file (see `workload`), None for the sample.  rate, scale, spread, repeat, requests, seed: as `read_trace`.
    gpu_blocks, swap: sizes of the pools in blocks.  watermark: part of the GPU's that admissions leave free.
    n: branches of each request.  policy: see `policies`.  record_trace: where the scheduler's trace goes.

    Raises ValueError for a number out of range, naming it and what is allowed.
    """

    trace: str | None = None
    policy: str = "strict"
    cost_model: CostModel | str = DEFAULT
    n: int = 1
    requests: int | None = None
    rate: float = 1.0
    scale: float = 1.0
    spread: float = 0.0
    repeat: int = 1
    seed: int = 0
    gpu_blocks: int = 2048
    swap: int = 512
    block_size: int = 16
    watermark: float = 0.01
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    preemption_mode: str | None = None
    enable_chunked_prefill: bool = True
    max_steps: int | None = None
    record_trace: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("n", 1), ("repeat", 1), ("requests", 1), ("max_steps", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{flag(name)} is {value}; it must be at least {least}")
        for name in ("rate", "scale"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{flag(name)} is {getattr(self, name)}; it must be above 0")
        if not 0 <= self.spread < math.inf:
            raise ValueError(f"--spread is {self.spread}; it must be a number of seconds of at least 0")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"--watermark is {self.watermark}; it must be at least 0 and below 1")

    def scheduler_config(self, mode: str | None) -> SchedulerConfig:
        """Capacities.  mode: forced by the policy.  Raises ConfigError, a ValueError."""
        if mode is not None and self.preemption_mode not in (None, mode):
            raise ValueError(
                f"--policy {self.policy} preempts by {mode}; --preemption-mode {self.preemption_mode} does not"
            )
        return SchedulerConfig(
            num_gpu_blocks=self.gpu_blocks,
            num_cpu_blocks=self.swap,
            block_size=self.block_size,
            max_model_len=self.max_model_len or max(2, self.gpu_blocks * self.block_size),
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            enable_chunked_prefill=self.enable_chunked_prefill,
            preemption_mode=mode or self.preemption_mode,
            watermark_blocks=int(self.watermark * self.gpu_blocks),
        )


def flag(name: str) -> str:
    """How the command line spells an option."""
    return "--" + name.replace("_", "-")


def simulate(
    options: Options, note: Callable[[int, float], None] = lambda done, now: None
) -> tuple[dict[str, Any], Tally]:
    """Run the simulation: everything about it as plain values, and the tally behind it.

    Contracts are lifted: policies that break laws are what it is for, and `lawful check` tells which.
    """
    policy, mode = policy_of(options.policy)
    cost = load_cost(options.cost_model) if isinstance(options.cost_model, str) else options.cost_model
    config = options.scheduler_config(mode)
    path = options.trace or str(resources.files("engine").joinpath(SAMPLE))
    requests = read_trace(
        path,
        rate=options.rate,
        scale=options.scale,
        spread=options.spread,
        repeat=options.repeat,
        limit=options.requests,
        seed=options.seed,
    )
    with lifted():
        scheduler = policy(config)
        record = None
        if options.record_trace is not None:
            from engine.scheduler.trace import TraceWriter

            record = TraceWriter(scheduler, options.record_trace)
        try:
            tally = Simulation(scheduler, cost, n=options.n, max_steps=options.max_steps, note=note).run(requests)
        finally:
            if record is not None:
                record.close()
    result = {
        "policy": options.policy,
        "scheduler": f"{policy.__module__}:{policy.__qualname__}",
        "n": options.n,
        "trace": {
            "name": Path(path).name,
            **{name: getattr(options, name) for name in ("rate", "scale", "spread", "repeat", "requests", "seed")},
        },
        "config": {
            **asdict(config),
            "preemption_mode": config.mode.value if isinstance(config.mode, PreemptionMode) else None,
        },
        "cost_model": cost.to_dict(),
        **tally.summary(),
    }
    return result, tally


# the command


def run(args: argparse.Namespace) -> int:
    """The command: 0 when every accepted request finished, else 1."""
    if args.fit:
        from engine.simulate.fit import fit_command

        return fit_command(args.fit, args.model, args.device, progress=not args.quiet, clock=args.fit_clock)
    names = Options.__dataclass_fields__
    options = Options(**{name: getattr(args, name) for name in names if hasattr(args, name)})
    if args.plot:
        from engine.simulate.plot import check_plot

        check_plot(args.plot)
    if args.json and args.json != "-" and not Path(args.json).resolve().parent.is_dir():
        raise ValueError(f"--json is {args.json!r}; there is no such directory")
    result, tally = _with_progress(options) if not args.quiet and sys.stderr.isatty() else simulate(options)
    if args.json == "-":
        print(json.dumps(result))
    else:
        if args.json:
            Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        from rich.console import Console

        from engine.simulate.report import show

        show(result, Console(width=None if sys.stdout.isatty() else 120, highlight=False))
    if args.plot:
        from engine.simulate.plot import plot

        plot(tally, args.plot, f"{options.policy} on {result['trace']['name']}, n={options.n}")
    return 0 if tally.outcome == FINISHED else 1


def _with_progress(options: Options) -> tuple[dict[str, Any], Tally]:
    from tqdm import tqdm

    total = options.requests
    if options.trace is not None:
        lines = count_lines(options.trace) * options.repeat
        total = lines if total is None else min(total, lines)
    with tqdm(total=total, unit="req", dynamic_ncols=True) as bar:
        last = time.monotonic()

        def note(done: int, now: float) -> None:
            nonlocal last
            moment = time.monotonic()
            if moment - last >= NOTE_EVERY:
                last = moment
                bar.set_postfix_str(f"simulated {now:,.0f} s", refresh=False)
                bar.update(done - bar.n)

        result, tally = simulate(options, note)
        bar.update(tally.finished + tally.refused.total() - bar.n)
    return result, tally
