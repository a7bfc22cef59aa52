"""`lawful bench serve`: open-loop load on a running server, and what its clients saw of it.

Open loop: arrivals follow their own clock (Poisson, or a trace's), not the server's answers, so that a slow server
shows as long waits and not as few requests.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import math
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any, TextIO

from engine.http_client import Connection, HttpError, get_json

PERCENTILES = (99,)


@dataclass(frozen=True, slots=True)
class Item:
    """One request: when it comes, in seconds from the start, and how long it is."""

    arrival: float
    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True)
class Load:
    """What is sent."""

    items: list[Item]
    vocab_size: int
    seed: int
    model: str | None
    ignore_eos: bool
    max_concurrency: int | None
    timeout: float
    rate: float

    @classmethod
    def of(cls, args: argparse.Namespace) -> Load:
        """The load that the command line asks for.  Raises ValueError for numbers that make none."""
        for name in ("num_prompts", "input_len", "output_len", "vocab_size"):
            if getattr(args, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1")
        for name in ("request_rate", "burstiness", "scale", "speed", "timeout"):
            if not getattr(args, name) > 0:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be above 0")
        if args.max_concurrency is not None and args.max_concurrency < 1:
            raise ValueError(f"--max-concurrency is {args.max_concurrency}; it must be at least 1")
        if args.trace:
            items = read_trace(args.trace, args.num_prompts, args.scale, args.speed)
        else:
            times = arrivals(args.num_prompts, args.request_rate, args.burstiness, args.seed)
            items = [Item(moment, args.input_len, args.output_len) for moment in times]
        return cls(
            items=items,
            vocab_size=args.vocab_size,
            seed=args.seed,
            model=args.served_model,
            ignore_eos=not args.no_ignore_eos,
            max_concurrency=args.max_concurrency,
            timeout=args.timeout,
            rate=args.request_rate,
        )


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Times from 0 with gaps from a gamma distribution of mean 1/rate; burstiness 1 makes a Poisson process."""
    if math.isinf(rate):
        return [0.0] * count
    rng = random.Random(seed)
    moment, moments = 0.0, []
    for _ in range(count):
        moments.append(moment)
        moment += rng.gammavariate(burstiness, 1 / (rate * burstiness))
    return moments


def read_trace(path: str, count: int, scale: float, speed: float) -> list[Item]:
    """The first `count` rows of a trace, in its order.  Raises ValueError for a file that is none."""
    items: list[Item] = []
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if len(items) == count:
                break
            try:
                prompt, output = int(row["prompt_tokens"]), int(row["output_tokens"])
                moment = float(row.get("arrival_s") or 0)
            except (KeyError, ValueError) as error:
                raise ValueError(f"{path}, row {len(items) + 1} is no request: {error}") from None
            items.append(Item(moment / speed, max(1, int(prompt / scale)), max(1, int(output / scale))))
    if not items:
        raise ValueError(f"{path} has no rows")
    return items


@dataclass(slots=True)
class Outcome:
    """What one client saw.  Times are seconds from its arrival; gaps are between tokens as they came."""

    prompt_tokens: int
    asked: int
    output_tokens: int = 0
    ttft: float | None = None
    e2e: float | None = None
    gaps: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def tpot(self) -> float | None:
        """Mean seconds for each token after the first."""
        if self.ttft is None or self.e2e is None or self.output_tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.output_tokens - 1)


def run(load: Load, url: str, key: str | None, progress: bool = False) -> dict[str, Any]:
    """Send the load and summarise it.  Raises ValueError when the server cannot be asked at all."""
    return asyncio.run(_run(load, url, key, progress))


async def _run(load: Load, url: str, key: str | None, progress: bool) -> dict[str, Any]:
    try:
        model = load.model or (await get_json(url, "/v1/models", key))["data"][0]["id"]
    except (HttpError, OSError) as error:
        raise ValueError(f"{url}: {error}") from None
    rng = random.Random(load.seed)
    slots = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency else None
    begun = time.perf_counter()

    async def client(item: Item, prompt: list[int]) -> Outcome:
        await asyncio.sleep(max(0.0, begun + item.arrival - time.perf_counter()))
        if slots is None:
            return await _one(load, url, key, model, item, prompt)
        async with slots:
            return await _one(load, url, key, model, item, prompt)

    prompts = [[rng.randrange(load.vocab_size) for _ in range(item.prompt_tokens)] for item in load.items]
    tasks = [asyncio.create_task(client(item, prompt)) for item, prompt in zip(load.items, prompts, strict=True)]
    if progress:
        from tqdm import tqdm

        with tqdm(total=len(tasks), unit="req", dynamic_ncols=True) as bar:
            for task in tasks:
                task.add_done_callback(lambda _: bar.update())
            await asyncio.gather(*tasks)
    outcomes = await asyncio.gather(*tasks)
    return summary(outcomes, time.perf_counter() - begun, load, model)


async def _one(load: Load, url: str, key: str | None, model: str, item: Item, prompt: list[int]) -> Outcome:
    outcome = Outcome(item.prompt_tokens, item.output_tokens)
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": item.output_tokens,
        "ignore_eos": load.ignore_eos,
        "temperature": 1.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    begun = last = time.perf_counter()
    try:
        async with asyncio.timeout(load.timeout), Connection(url, "/v1/completions", body, key) as answer:
            async for event in answer.events():
                now = time.perf_counter()
                got = sum(len(choice.get("token_ids") or ()) for choice in event["choices"])
                if got:
                    if outcome.ttft is None:
                        outcome.ttft = now - begun
                        got -= 1
                    outcome.gaps += [(now - last) / got] * got if got else []
                    last = now
                    outcome.e2e = now - begun
                if event.get("usage"):
                    outcome.output_tokens = event["usage"]["completion_tokens"]
    except (HttpError, OSError, ValueError, asyncio.IncompleteReadError) as error:
        outcome.error = str(error) or type(error).__name__
    except TimeoutError:
        outcome.error = f"no end within {load.timeout:g} s"
    return outcome


def summary(outcomes: list[Outcome], seconds: float, load: Load, model: str) -> dict[str, Any]:
    """Rates, and mean, median and p99 of each time in milliseconds."""
    done = [outcome for outcome in outcomes if outcome.error is None]
    made = sum(outcome.output_tokens for outcome in done)
    read = sum(outcome.prompt_tokens for outcome in done)
    result: dict[str, Any] = {
        "model": model,
        "num_prompts": len(outcomes),
        "request_rate": None if math.isinf(load.rate) else load.rate,
        "max_concurrency": load.max_concurrency,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "duration_s": seconds,
        "total_input_tokens": read,
        "total_output_tokens": made,
        "request_throughput": len(done) / seconds,
        "output_throughput": made / seconds,
        "total_token_throughput": (read + made) / seconds,
        "errors": sorted({outcome.error for outcome in outcomes if outcome.error})[:5],
    }
    for name, values in (
        ("ttft", [outcome.ttft for outcome in done]),
        ("tpot", [outcome.tpot for outcome in done]),
        ("itl", [gap for outcome in done for gap in outcome.gaps]),
        ("e2el", [outcome.e2e for outcome in done]),
    ):
        known = sorted(1000 * value for value in values if value is not None)
        result[f"mean_{name}_ms"] = statistics.fmean(known) if known else None
        result[f"median_{name}_ms"] = statistics.median(known) if known else None
        for percent in PERCENTILES:
            result[f"p{percent}_{name}_ms"] = percentile(known, percent)
    result["requests"] = [
        {"ttft_s": o.ttft, "tpot_s": o.tpot, "e2e_s": o.e2e, "output_tokens": o.output_tokens, "error": o.error}
        for o in outcomes
    ]
    return result


def percentile(ordered: list[float], percent: float) -> float | None:
    """Linear between the two nearest of an ascending list; None of none."""
    if not ordered:
        return None
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def report(result: dict[str, Any], as_json: bool, path: str | None, out: TextIO) -> int:
    """Print the summary, write all of it if asked to; 0 if every request completed, else 1."""
    if path:
        with open(path, "w", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
    brief = {name: value for name, value in result.items() if name != "requests"}
    out.write((json.dumps(brief) if as_json else table(brief)) + "\n")
    return 0 if result["failed"] == 0 else 1


def table(result: dict[str, Any]) -> str:
    """The summary for people."""
    rows: list[tuple[str, Any]] = [
        ("Successful requests", result["completed"]),
        ("Failed requests", result["failed"]),
        ("Benchmark duration (s)", result["duration_s"]),
        ("Total input tokens", result["total_input_tokens"]),
        ("Total generated tokens", result["total_output_tokens"]),
        ("Request throughput (req/s)", result["request_throughput"]),
        ("Output token throughput (tok/s)", result["output_throughput"]),
        ("Total token throughput (tok/s)", result["total_token_throughput"]),
    ]
    for name, title in (
        ("ttft", "time to first token"),
        ("tpot", "time per output token after the first"),
        ("itl", "inter-token latency"),
        ("e2el", "end-to-end latency"),
    ):
        rows.append((f"-- {title} --", ""))
        for kind in ("mean", "median", *(f"p{percent}" for percent in PERCENTILES)):
            rows.append((f"{kind.capitalize()} {name.upper()} (ms)", result[f"{kind}_{name}_ms"]))
    rows += [("Error", error) for error in result["errors"]]
    return "\n".join(f"{name:<42}{_shown(value)}" for name, value in rows)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
