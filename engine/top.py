"""`lawful top`: a running server's queues, blocks and rates in the terminal."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from engine.http_client import HttpError, get_json

COLOURS = {"running": "green", "swapped": "yellow", "waiting": "cyan"}
ROWS = 12  # groups shown of each queue
BAR = 40  # characters


def top(url: str, key: str | None, interval: float, once: bool, console: Console | None = None) -> int:
    """Show the server until interrupted, or once; 0.  Raises ValueError when it cannot be asked."""
    console = console or Console()
    if not 0.05 <= interval < float("inf"):
        raise ValueError(f"--interval is {interval}; it must be at least 0.05")
    before, state = None, _look(url, key)
    if once:
        console.print(render(state, None, 0.0, url))
        return 0
    with Live(render(state, None, 0.0, url), console=console, screen=True, auto_refresh=False) as live:
        while True:
            began = time.monotonic()
            time.sleep(interval)
            before, state = state, _look(url, key)
            live.update(render(state, before, time.monotonic() - began, url), refresh=True)


def _look(url: str, key: str | None) -> dict[str, Any]:
    try:
        state: dict[str, Any] = asyncio.run(get_json(url, "/debug/scheduler", key))
    except HttpError as error:
        if error.status == 404:
            raise ValueError(f"{url} does not tell its state: start it with --enable-debug") from None
        raise ValueError(f"{url}: {error}") from None
    except OSError as error:
        raise ValueError(f"{url} does not answer: {error.strerror or error}") from None
    return state


def render(state: dict[str, Any], before: dict[str, Any] | None, seconds: float, url: str) -> RenderableType:
    """One look as a page.  before: the look `seconds` earlier, for rates."""
    healthy = state["health"] == "ok"
    title = Text.assemble(
        ("lawful ", "bold"),
        f"{state['model']} at {url}   ",
        (state["health"], "green" if healthy else "bold red"),
        f"   step {state['steps']}   laws {state['laws']['contracts']}",
    )
    parts: list[RenderableType] = [title, _rates(state, before, seconds), _device("GPU", state["gpu"])]
    parts.append(_device("CPU", state["cpu"]))
    parts += [_queue(name, queue) for name, queue in state["queues"].items()]
    return Group(*parts)


def _rates(state: dict[str, Any], before: dict[str, Any] | None, seconds: float) -> RenderableType:
    totals = state["totals"]
    rate = "prompt – tokens/s", "generation – tokens/s"
    if before is not None and seconds > 0:
        rate = tuple(  # type: ignore[assignment]
            f"{name} {(totals[f'{name}_tokens'] - before['totals'][f'{name}_tokens']) / seconds:.1f} tokens/s"
            for name in ("prompt", "generation")
        )
    ended = ", ".join(f"{reason} {count}" for reason, count in sorted(state["finished_by"].items())) or "0"
    lines = (
        [*rate, f"preemptions {totals['preemptions']}", f"demotions {totals['demotions']}"],
        [f"received {totals['requests_received']}", f"finished {ended}", f"refused {totals['requests_refused']}"],
        [
            f"recomputed {totals['recomputed_tokens']} tokens",
            f"swapped {totals['blocks_swapped_out']} blocks out, {totals['blocks_swapped_in']} in",
        ],
    )
    return Text("\n".join("   ".join(line) for line in lines))


def _device(name: str, device: dict[str, Any]) -> Text:
    blocks = device["blocks"]
    used = round(BAR * device["referenced"] / blocks) if blocks else 0
    share = 100 * device["referenced"] / blocks if blocks else 0.0
    text = f" {device['referenced']} of {blocks} blocks, {share:.1f}%"
    return Text.assemble(f"{name} ", ("█" * used, "magenta"), ("░" * (BAR - used), "dim"), text)


def _queue(name: str, queue: dict[str, Any]) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False, padding=0)
    table.add_column("request", no_wrap=True, ratio=1)  # it gives way: ids are long, and numbers must be whole
    table.add_column("kind", no_wrap=True)
    for column in ("prompt", "generated", "deficit", "live", "blocks", "preempted"):
        table.add_column(column, justify="right", no_wrap=True)
    for group in queue["groups"][:ROWS]:
        table.add_row(
            Text(group["request_id"], overflow="ellipsis"),
            group["kind"],
            str(group["prompt_tokens"]),
            f"{group['generated_tokens']}/{group['max_tokens']}",
            str(group["deficit"]),
            f"{group['live']}/{group['n']}",
            str(group["blocks"]),
            str(group["preemptions"]),
        )
    more = queue["length"] - min(queue["length"], ROWS)
    rest = [Text(f"… and {more} more", style="dim")] if more else []
    head = queue["head_waits_for"]
    why = [Text.assemble(("head: ", "bold"), head)] if head else []
    title = f"{name} {queue['length']}"
    body = Group(*why, *([table] if queue["groups"] else [Text("empty", style="dim")]), *rest)
    return Panel(body, title=title, title_align="left", border_style=COLOURS[name])
