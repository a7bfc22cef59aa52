"""Two hundred streaming clients that come, read and leave as they like: nothing is lost, nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.cli import main
from engine.http_client import Connection, HttpError, get_json
from tests.server.servers import request, samples, wait_for

CLIENTS = 200


@contextmanager
def serving(command: list[str]) -> Iterator[tuple[str, int, Path]]:
    """A server process with contracts off, as in production: its URL, process id and log."""
    environment = {**os.environ, "LAWFUL_CONTRACTS": "off", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with tempfile.TemporaryDirectory() as home:
        log = Path(home, "log")
        with log.open("w") as out:
            process = subprocess.Popen(
                [sys.executable, *command, "--port", "0", "--dump-dir", home],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=Path(__file__).resolve().parents[2],
            )
        try:
            found = wait_for(lambda: re.search(r"on (http://\S+)", log.read_text()) or process.poll() is not None, 120)
            assert isinstance(found, re.Match), log.read_text()
            yield found[1], process.pid, log
            process.terminate()
            assert process.wait(60) == 0, log.read_text()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(10)


def resident(pid: int) -> float:
    """MiB of memory."""
    return int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0]) / 1024


async def client(url: str, number: int, until: float, most: int, seen: Counter[str]) -> None:
    rng = random.Random(number)
    while time.monotonic() < until:
        tokens, n = rng.randrange(1, most), rng.choice((1, 1, 1, 2))
        body = {
            "prompt": [rng.randrange(65, 90) for _ in range(rng.randrange(1, 80))],
            "max_tokens": tokens,
            "n": n,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        leaves = rng.choice((None, None, None, 0, 1, rng.randrange(1, 20)))
        connection = Connection(url, "/v1/completions", body)
        try:
            if leaves == 0:  # before any answer
                await asyncio.wait_for(connection.__aenter__(), rng.random() / 2)
                connection.hang_up()
                seen["left"] += 1
                continue
            async with connection as answer:
                events, usage = 0, None
                async for event in answer.events():
                    events += 1
                    usage = event["usage"]
                    if events == leaves:
                        break
                if events == leaves:
                    seen["left"] += 1
                else:
                    assert usage is not None
                    assert usage["completion_tokens"] == tokens * n
                    seen["answered"] += 1
        except TimeoutError:
            seen["left"] += 1
        except HttpError as error:
            if error.status != 429:
                raise
            seen["refused"] += 1
            await asyncio.sleep(rng.random())


async def load(url: str, pid: int, seconds: float, most: int) -> tuple[Counter[str], list[float]]:
    """Clients and a watcher that scrapes, checks the balance, and looks at the memory."""
    seen: Counter[str] = Counter()
    memory: list[float] = []
    until = time.monotonic() + seconds

    async def watch() -> None:
        while True:
            await asyncio.sleep(1)
            memory.append(resident(pid))
            async with Connection(url, "/metrics") as answer:
                now = samples((await answer.body()).decode())
            ended = sum(value for name, value in now.items() if name.startswith("lawful:request_success_total"))
            unfinished = sum(now[f"lawful:num_requests_{name}"] for name in ("running", "swapped", "waiting"))
            assert now["lawful:requests_received_total"] == ended + unfinished
            assert (await get_json(url, "/health"))["status"] == "ok"

    watcher = asyncio.create_task(watch())
    await asyncio.gather(*(client(url, i, until, most, seen) for i in range(CLIENTS)))
    assert not watcher.done(), watcher.exception()
    watcher.cancel()
    return seen, memory


def check(command: list[str], seconds: float, most: int, flat: float, trace: Path) -> None:
    """Load, then look at what is left; and at the end the recorded trace obeys the laws."""
    with serving([*command, "--record-trace", str(trace)]) as (url, pid, log):

        def metrics() -> dict[str, float]:
            return samples(request(f"{url}/metrics")[1])

        def idle() -> bool:
            now = metrics()
            return all(
                now[f"lawful:{name}"] == 0
                for name in (
                    "num_requests_running",
                    "num_requests_swapped",
                    "num_requests_waiting",
                    "gpu_cache_usage_perc",
                    "cpu_cache_usage_perc",
                )
            )

        seen, memory = asyncio.run(load(url, pid, seconds, most))
        wait_for(idle, 60)
        now = metrics()
        reasons = {
            reason: now[f'lawful:request_success_total{{finished_reason="{reason}"}}']
            for reason in ("stop", "length", "abort", "error")
        }
        summary = f"{dict(seen)} {reasons} memory {memory[:1]} {memory[-1:]}"
        print(summary)
        assert reasons["error"] == 0, summary
        assert seen["answered"] > 0, summary
        assert seen["left"] > 0, summary
        assert reasons["stop"] + reasons["length"] >= seen["answered"], summary
        assert reasons["abort"] <= seen["left"], summary
        assert now["lawful:requests_received_total"] == sum(reasons.values()), summary
        assert now["lawful:num_preemptions_total"] > 0, "the pool was not tight"
        third = len(memory) // 3  # the first third is warming up
        assert max(memory[-3:]) - memory[third] < flat, f"memory grows: {memory}"
        assert not re.search(r"ERROR|CRITICAL|Traceback|Exception", log.read_text()), log.read_text()
    lines = len(trace.read_text().splitlines())
    assert lines > now["lawful:engine_steps_total"]
    assert main(["audit", str(trace)]) == 0


@pytest.mark.timeout(180)
def test_two_hundred_clients_for_a_quarter_of_a_minute(tmp_path: Path) -> None:
    """On the KV oracle, with a pool for a few of them."""
    oracle = ["-m", "tests.server.process", '{"delay": 0.002}', "serve"]
    pool = ["--num-gpu-blocks-override", "120", "--num-cpu-blocks-override", "40", "--max-num-seqs", "48"]
    check([*oracle, *pool, "--max-queued-requests", "150"], 15, 40, flat=48, trace=tmp_path / "trace")


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(1500)
def test_two_hundred_clients_on_the_embedded_model_for_two_minutes(tmp_path: Path) -> None:
    pool = ["--block-size", "8", "--num-gpu-blocks-override", "64", "--num-cpu-blocks-override", "24"]
    limits = ["--max-num-seqs", "32", "--max-model-len", "512", "--max-num-batched-tokens", "256"]
    check(["-m", "engine", "serve", *pool, *limits], 120, 48, flat=64, trace=tmp_path / "trace")
