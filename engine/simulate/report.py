"""The table of a simulation, for people."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

TIMES = {
    "ttft": "TTFT: to the first token",
    "tpot": "TPOT: a token after the first",
    "e2e": "E2E: to the last token",
    "queue": "queue: to the first step",
    "stall": "stall: preempted to the next token",
}
COLUMNS = ("mean", "p50", "p90", "p99", "max")


def show(result: dict[str, Any], console: Console) -> None:
    """Print what `command.simulate` made: how it ended, latencies, counts."""
    outcome, requests = result["outcome"], result["requests"]
    config, cost = result["config"], result["cost_model"]
    console.print(Text(f"{result['policy']} on {result['trace']['name']}, n={result['n']}", style="bold"))
    console.print(
        Text(
            f"{config['num_gpu_blocks']:,} GPU and {config['num_cpu_blocks']:,} CPU blocks of {config['block_size']}, "
            f"{config['max_num_batched_tokens']:,} tokens and {config['max_num_seqs']:,} sequences a step, "
            f"watermark {config['watermark_blocks']:,}, cost model {cost['name']}"
        )
    )
    if outcome["kind"] == "finished":
        console.print(Text("finished", style="green"))
    else:
        said = f": {outcome['error']}" if outcome["error"] else ""
        left = f"{requests['unfinished']:,} requests unfinished"
        console.print(Text(f"{outcome['kind']} at step {outcome['step']:,}, {left}{said}", style="bold red"))
    console.print(_latencies(result["latency_s"]))
    console.print(_counts(result))


def _latencies(latency: dict[str, Any]) -> Table:
    table = Table(title="\nsimulated seconds", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in (*COLUMNS, "count"):
        table.add_column(name, justify="right")
    for name, meaning in TIMES.items():
        row = latency[name]
        table.add_row(meaning, *(seconds(row[column]) for column in COLUMNS), f"{row['count']:,}")
    return table


def seconds(value: float | None) -> str:
    """Three significant digits, as few as the value needs."""
    if value is None:
        return "-"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.4f}"


def _counts(result: dict[str, Any]) -> Table:
    requests, tokens, blocks = result["requests"], result["tokens"], result["blocks"]
    preempted, occupancy, queues = result["preemptions"], result["occupancy"], result["queues"]
    through = result["throughput"]
    refused = ", ".join(f"{count:,} by {reason}" for reason, count in requests["refused"].items())
    rows = [
        ("requests", f"{requests['arrived']:,} came, {requests['finished']:,} finished"),
        ("  refused", refused or "none"),
        ("  shortened to max_model_len", f"{requests['shortened']:,}"),
        ("simulated time", f"{seconds(result['seconds'])} s, {result['busy']:.1%} of it in steps"),
        ("steps", f"{result['steps']:,}"),
        ("preemptions", f"{sum(preempted.values()):,}"),
        ("  by swap / by recompute", f"{preempted['swap']:,} / {preempted['recompute']:,}"),
        ("demotions", f"{result['demotions']:,}"),
        ("tokens recomputed", f"{tokens['recomputed']:,}"),
        ("blocks swapped out / in", f"{blocks['swapped_out']:,} / {blocks['swapped_in']:,}"),
        ("blocks copied on write", f"{blocks['copied']:,}"),
    ]
    for device in ("gpu", "cpu"):
        used = occupancy[device]
        rows.append((f"{device.upper()} blocks used, mean / peak", f"{used['mean']:.1%} / {used['peak']:.1%}"))
    for name, queue in queues.items():
        rows.append((f"{name} requests, mean / peak", f"{queue['mean']:.1f} / {queue['peak']:,}"))
    rows.append(("requests/s", f"{through['requests_per_s']:.2f}"))
    rows.append(("prompt tokens/s", f"{through['prompt_tokens_per_s']:,.0f}"))
    rows.append(("generated tokens/s", f"{through['generated_tokens_per_s']:,.0f}"))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_column("what", no_wrap=True)
    table.add_column("count")
    for name, value in rows:
        table.add_row(name, value)
    return table
