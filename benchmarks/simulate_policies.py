"""Scheduling rules on real traffic: four traces, every policy, without a model.

    python -m benchmarks.simulate_policies [--json benchmarks/results/simulate_policies.json] [--requests 1000]
    python -m benchmarks.simulate_policies --speed [--json benchmarks/results/simulate_speed.json]

How the load is chosen, once for each trace and n, the same for all policies:
pool: 16 requests of the mean length, prompt and output.  swap: 1/8 of the pool, a half, or eight pools ("ample").
rate: 95 % of what the strict policy finishes a second when every request is there from the start.
cost model: llama2-7b-a100.  Arrivals of mooncake_conversation, recorded in steps of 3 s, are spread over those.

Results are exact: equal inputs give equal numbers, on any machine.  --speed measures the simulator itself.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from engine.simulate.command import Options, simulate
from engine.simulate.report import seconds
from engine.simulate.workload import read_trace

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
TRACES = ("azure2023_conv", "azure2023_code", "mooncake_conversation", "mooncake_synthetic")
SPREAD = {"mooncake_conversation": 3.0}
BLOCK, HOLDS, LOAD = 16, 16, 0.95
COST = "llama2-7b-a100"

RULES = ("strict", "pull-request", "old", "below-half", "recompute")
WATERMARKS = (0.01, 0.05, 0.10, 0.20)  # strict; the first is the default
WATERMARK_MODES = ("n=1", "n=4")
MODES: dict[str, dict[str, Any]] = {
    "n=1": {"n": 1},
    "n=1, preempted by swap": {"n": 1, "preemption_mode": "swap"},
    "n=4": {"n": 4},
    "n=4, half a pool of swap": {"n": 4, "swap": 0.5},
    "n=4, ample swap": {"n": 4, "swap": 8},
}


def setting(trace: str, mode: str, requests: int) -> dict[str, Any]:
    """The options of a trace and a mode, but for the policy."""
    choice = dict(MODES[mode])
    part = choice.pop("swap", 1 / 8)
    path = DATA / f"{trace}.csv"
    lengths = [request.prompt_tokens + request.output_tokens for request in read_trace(path)]
    pool = round(HOLDS * sum(lengths) / len(lengths) / BLOCK)
    arrivals = [request.arrival for request in read_trace(path, limit=requests, spread=SPREAD.get(trace, 0.0))]
    options = {
        "trace": str(path),
        "requests": requests,
        "spread": SPREAD.get(trace, 0.0),
        "gpu_blocks": pool,
        "block_size": BLOCK,
        "cost_model": COST,
        **choice,
    }
    at_once, _ = simulate(Options(rate=1e9, swap=pool // 8, **{**options, "preemption_mode": None}))
    capacity = at_once["requests"]["finished"] / at_once["seconds"]
    offered = at_once["requests"]["finished"] / (arrivals[-1] - arrivals[0])
    rate = float(f"{LOAD * capacity / offered:.3g}")
    return {**options, "rate": rate, "swap": int(part * pool)}


def policies(mode: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, options) of all that are compared in a mode."""
    for name in RULES:
        if name != "recompute" or "preemption_mode" not in MODES[mode]:
            yield name, {"policy": name}
    if mode in WATERMARK_MODES:
        for part in WATERMARKS[1:]:
            yield f"watermark {part:.0%}", {"watermark": part}


def compare(requests: int) -> list[dict[str, Any]]:
    """Every run, as what `lawful simulate --json` writes with trace, mode and name beside it."""
    runs = []
    for trace in TRACES:
        for mode in MODES:
            options = setting(trace, mode, requests)
            for name, change in policies(mode):
                result, _ = simulate(Options(**{**options, **change}))
                runs.append({"trace_name": trace, "mode": mode, "name": name, **result})
                print(f"{trace}, {mode}, {name}: {result['outcome']['kind']}", file=sys.stderr, flush=True)
    return runs


# tables

COLUMNS = (
    "trace",
    "policy",
    "outcome",
    "TTFT p50",
    "TTFT p99",
    "TPOT p50",
    "E2E p50",
    "E2E p99",
    "stall p99",
    "stall max",
    "preempted",
    "demoted",
    "recomputed",
    "swapped out",
    "requests/s",
)


def row_of(run: dict[str, Any]) -> list[str]:
    """What the table says of one run, after trace and policy."""
    latency, outcome = run["latency_s"], run["outcome"]
    times = [column.lower().split() for column in COLUMNS if column.startswith(("TTFT", "TPOT", "E2E", "stall"))]
    finished = outcome["kind"] == "finished"
    arrived = run["requests"]["arrived"]
    ending = "finished" if finished else f"{outcome['kind']} at step {outcome['step']:,}, request {arrived:,}"
    cells = [seconds(latency[name][part]) if finished else "-" for name, part in times]
    return [
        ending,
        *cells,
        f"{sum(run['preemptions'].values()):,}",
        f"{run['demotions']:,}",
        f"{run['tokens']['recomputed']:,}",
        f"{run['blocks']['swapped_out']:,}",
        f"{run['throughput']['requests_per_s']:.3f}" if finished else "-",
    ]


def tables(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One table a mode, policies that do the same in one row; then what watermarks do."""
    made = []
    for mode in MODES:
        rows = []
        for trace in TRACES:
            same: dict[tuple[str, ...], list[str]] = {}
            for run in runs:
                if (run["trace_name"], run["mode"]) == (trace, mode) and run["name"] in RULES:
                    same.setdefault(tuple(row_of(run)), []).append(run["name"])
            rows += [[trace, ", ".join(names), *cells] for cells, names in same.items()]
        made.append({"title": f"{mode}: rules", "columns": list(COLUMNS), "rows": rows})
    made.append(watermarks(runs))
    made.append(loads(runs))
    return made


def watermarks(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Preemptions, and what users saw, by the part of the pool that admissions leave free."""
    names = {"strict": "1 %", **{f"watermark {part:.0%}": f"{part:.0%}".replace("%", " %") for part in WATERMARKS[1:]}}
    columns = ["trace", "mode"]
    for title in ("preempted", "stall p99", "TTFT p99", "E2E p50"):
        columns += [f"{title}, {part}" for part in names.values()]
    rows = []
    for trace in TRACES:
        for mode in WATERMARK_MODES:
            found = {run["name"]: run for run in runs if (run["trace_name"], run["mode"]) == (trace, mode)}
            chosen = [found[name] for name in names]
            row = [trace, mode, *(f"{sum(run['preemptions'].values()):,}" for run in chosen)]
            for kind, part in (("stall", "p99"), ("ttft", "p99"), ("e2e", "p50")):
                row += [seconds(run["latency_s"][kind][part]) for run in chosen]
            rows.append(row)
    return {"title": "watermarks, strict policy", "columns": columns, "rows": rows}


def loads(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """How full the load makes the pool under the strict policy."""
    columns = [
        "trace",
        "mode",
        "GPU blocks",
        "CPU blocks",
        "rate",
        "steps",
        "GPU used",
        "running",
        "waiting",
        "refused",
    ]
    rows = []
    for run in runs:
        if run["name"] == "strict":
            config, queues = run["config"], run["queues"]
            rows.append(
                [
                    run["trace_name"],
                    run["mode"],
                    f"{config['num_gpu_blocks']:,}",
                    f"{config['num_cpu_blocks']:,}",
                    f"{run['trace']['rate']:g}",
                    f"{run['steps']:,}",
                    f"{run['occupancy']['gpu']['mean']:.0%}",
                    f"{queues['running']['mean']:.1f}",
                    f"{queues['waiting']['mean']:.1f}",
                    f"{sum(run['requests']['refused'].values()):,}",
                ]
            )
    return {"title": "the load, strict policy", "columns": columns, "rows": rows}


# the simulator itself


def speed() -> dict[str, Any]:
    """Processor time of 100,000 requests: the conversation trace played until there are so many."""
    rows = []
    for mode, n, rate in (("n=1", 1, 1.0), ("n=1, overloaded", 1, 1.5)):
        options = Options(
            trace=str(DATA / "azure2023_conv.csv"), repeat=6, requests=100_000, n=n, rate=rate, gpu_blocks=6970
        )
        begun = time.process_time()
        result, _ = simulate(options)
        took = time.process_time() - begun
        tokens = result["tokens"]
        rows.append(
            [
                mode,
                f"{result['requests']['finished']:,}",
                f"{result['steps']:,}",
                f"{tokens['generated']:,}",
                f"{result['queues']['running']['mean']:.1f}",
                f"{took:.0f}",
                f"{took / result['steps'] * 1e6:.0f}",
            ]
        )
    columns = ["load", "requests", "steps", "generated tokens", "mean running", "processor s", "us a step"]
    return {
        "title": "the simulator: 100,000 requests of azure2023_conv on 6,970 blocks",
        "columns": columns,
        "rows": rows,
    }


def as_text(content: dict[str, Any]) -> str:
    """JSON with a line for each run and each row, so that a change shows where it is."""
    runs = ",\n".join("  " + json.dumps(run) for run in content["runs"])
    tables = ",\n".join(
        f'  {{"title": {json.dumps(one["title"])}, "columns": {json.dumps(one["columns"])}, "rows": [\n'
        + ",\n".join("   " + json.dumps(row) for row in one["rows"])
        + "\n  ]}"
        for one in content["tables"]
    )
    head = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items() if isinstance(value, str)]
    return "{\n" + ",\n".join([*head, f' "tables": [\n{tables}\n ]', f' "runs": [\n{runs}\n ]']) + "\n}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write every run and the tables")
    parser.add_argument("--requests", type=int, default=1000, help="the first N of each trace")
    parser.add_argument("--speed", action="store_true", help="measure the simulator instead")
    args = parser.parse_args()
    missing = [name for name in TRACES if not (DATA / f"{name}.csv").exists()]
    if missing:
        print(f"the traces are not here: {DATA / missing[0]}.csv is missing; nothing was run", file=sys.stderr)
        return 1
    runs = [] if args.speed else compare(args.requests)
    made = [speed()] if args.speed else tables(runs)
    console = Console(width=None if sys.stdout.isatty() else 220)
    for one in made:
        table = Table(*one["columns"], title=one["title"], title_justify="left")
        for row in one["rows"]:
            table.add_row(*row)
        console.print(table)
    if args.json:
        command = "python -m benchmarks.simulate_policies" + (
            " --speed" if args.speed else f" --requests {args.requests}"
        )
        content = {
            "section": "simulation",
            "title": "The simulator's own speed" if args.speed else "Policies on four traces",
            "command": command,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
            "date": str(datetime.date.today()),
            "tables": made,
            "runs": runs,
        }
        Path(args.json).write_text(as_text(content), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
