"""/metrics: cases 73 and 75, the balance at any time, and counters as counts of the plan log's actions."""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.async_llm import AsyncLLM
from engine.sampling import SamplingParams
from engine.scheduler import Plan
from engine.server import metrics
from engine.server.metrics import registry_of
from tests.oracle import World, prompt_of
from tests.server.servers import samples

ROOT = Path(__file__).resolve().parents[2]


def page(llm: AsyncLLM) -> dict[str, float]:
    return samples(metrics.generate_latest(registry_of(llm, "m")).decode())


def balance(now: dict[str, float]) -> None:
    ended = sum(value for name, value in now.items() if name.startswith("lawful:request_success_total"))
    unfinished = sum(now[f"lawful:num_requests_{name}"] for name in ("running", "swapped", "waiting"))
    assert now["lawful:requests_received_total"] == ended + unfinished


def test_gauges_are_right_after_everything_was_aborted() -> None:
    """Case 73: no step follows the aborts."""
    world = World(gpu=64, cpu=8, s=8)

    async def run() -> None:
        async with AsyncLLM.from_core(world.core) as llm:
            held = asyncio.Event()
            loop = asyncio.get_running_loop()
            release = threading.Event()

            def hold(plan: Plan) -> None:
                loop.call_soon_threadsafe(held.set)
                release.wait(20)

            world.before = hold
            params = SamplingParams(max_tokens=100, ignore_eos=True)
            streams = [llm.submit(prompt_of(str(i), 5, 64), params, str(i)) for i in range(12)]
            await held.wait()
            for stream in streams:
                stream.abort()
            world.before = None
            release.set()
            for stream in streams:
                output = await stream.result()
                assert output.outputs[0].finish_reason == "abort"
            await asyncio.sleep(0.05)
            steps = world.core.stats.steps
            now = page(llm)
            for name in ("running", "swapped", "waiting"):
                assert now[f"lawful:num_requests_{name}"] == 0
            for device in ("gpu", "cpu"):
                assert now[f"lawful:{device}_cache_usage_perc"] == 0
                assert now[f'lawful:{device}_blocks{{state="referenced"}}'] == 0
                assert now[f'lawful:{device}_blocks{{state="cached"}}'] == 0
            assert now['lawful:request_success_total{finished_reason="abort"}'] == 12
            assert world.core.stats.steps == steps
            balance(now)

    asyncio.run(run())
    world.check_drained()


def test_counters_are_sums_over_plan_logs_and_the_balance_holds_at_any_time() -> None:
    """A tight pool: preemptions by swap and recompute, demotions, aborts; compared with a recount of every plan."""
    world = World(gpu=16, cpu=6, s=8, t=24)
    scrapes = 0

    async def run() -> dict[str, float]:
        nonlocal scrapes
        async with AsyncLLM.from_core(world.core) as llm:

            async def one(i: int) -> None:
                params = SamplingParams(n=1 + i % 3, max_tokens=4 + i % 9, ignore_eos=True, seed=i)
                stream = llm.submit(prompt_of(str(i), 3 + i % 7, 64), params, str(i))
                if i % 7 == 3:
                    await asyncio.sleep(0.01)
                    stream.abort()
                await stream.result()

            async def scrape() -> None:
                nonlocal scrapes
                while True:
                    balance(page(llm))
                    scrapes += 1
                    await asyncio.sleep(0)

            scraper = asyncio.create_task(scrape())
            await asyncio.gather(*(one(i) for i in range(60)))
            scraper.cancel()
            await asyncio.sleep(0.05)
            return page(llm)

    now = asyncio.run(run())
    world.check_drained()
    assert scrapes > 20
    log = Counter(
        f"preempt:{action.detail}" if action.verb == "preempt" else action.verb
        for plan in world.plans
        for action in plan.log
    )
    shown = {
        name.split('"')[1]: value for name, value in now.items() if name.startswith("lawful:scheduler_actions_total")
    }
    assert shown == dict(log)
    assert now["lawful:num_preemptions_total"] == log["preempt:swap"] + log["preempt:recompute"] > 0
    assert now["lawful:num_demotions_total"] == log["demote"]
    for name in ("swap_out", "swap_in"):
        direction = name.removeprefix("swap_")
        moved = sum(len(getattr(plan, f"blocks_to_swap_{direction}")) for plan in world.plans)
        assert now[f"lawful:blocks_swapped_{direction}_total"] == moved
    assert now["lawful:computed_tokens_total"] == sum(plan.num_tokens for plan in world.plans)
    assert now["lawful:engine_steps_total"] == len(world.plans) == now["lawful:iteration_tokens_total_count"]
    balance(now)


def test_a_preempted_request_counts_its_prompt_once_and_its_recomputed_tokens_apart() -> None:
    """Case 75, as far as there is no prefix cache: queries and hits do not exist yet; nothing is counted twice."""
    world = World(gpu=5, t=16)

    async def run() -> dict[str, float]:
        async with AsyncLLM.from_core(world.core) as llm:
            params = SamplingParams(max_tokens=8, ignore_eos=True, seed=1)
            streams = [llm.submit(prompt_of(name, 8, 64), params, name) for name in "AB"]
            for stream in streams:
                await stream.result()
            return page(llm)

    now = asyncio.run(run())
    assert world.verbs["preempt:recompute"] > 0
    assert now["lawful:prompt_tokens_total"] == 16
    assert now["lawful:generation_tokens_total"] == 16
    assert now["lawful:recomputed_tokens_total"] > 0
    drawn_again = now["lawful:computed_tokens_total"] - now["lawful:recomputed_tokens_total"]
    assert drawn_again == 16 + 14, "every prompt token and every generated one but the last of each, once"


def test_histograms_count_every_request_once() -> None:
    world = World(gpu=64)

    async def run() -> dict[str, float]:
        async with AsyncLLM.from_core(world.core) as llm:
            params = SamplingParams(max_tokens=5, ignore_eos=True, n=2)
            for stream in [llm.submit([1, 2, 3], params) for _ in range(4)]:
                await stream.result()
            return page(llm)

    now = asyncio.run(run())
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert now[f"lawful:{name}_count"] == 4
        assert now[f'lawful:{name}_bucket{{le="+Inf"}}'] == 4
    assert now["lawful:inter_token_latency_seconds_count"] == 4 * 4
    assert now["lawful:request_prompt_tokens_sum"] == 12
    assert now["lawful:request_generation_tokens_sum"] == 40
    assert now["lawful:request_params_n_sum"] == 8


def test_refusals_are_counted_by_reason() -> None:
    world = World(gpu=8, length=64)

    async def run() -> dict[str, float]:
        async with AsyncLLM.from_core(world.core) as llm:
            for prompt, params in (
                ([1] * 64, SamplingParams()),
                ([1], SamplingParams(max_tokens=60, n=4)),
                ([64], SamplingParams()),
                ([], SamplingParams()),
            ):
                with pytest.raises(ValueError):
                    await anext(llm.generate(prompt, params))
            with pytest.raises(ValueError):
                await anext(llm.chat([]))
            return page(llm)

    now = asyncio.run(run())
    reasons = {name.split('"')[1]: v for name, v in now.items() if name.startswith("lawful:requests_refused_total")}
    assert reasons == {"max_model_len": 1, "num_gpu_blocks": 1, "invalid_value": 1, "invalid_prompt": 2}


def test_the_page_is_what_prometheus_reads_and_names_end_as_they_should() -> None:
    world = World(gpu=8)

    async def run() -> str:
        async with AsyncLLM.from_core(world.core) as llm:
            return metrics.generate_latest(registry_of(llm, 'a "model"\n')).decode()

    families: dict[str, Any] = {family.name: family for family in text_string_to_metric_families(asyncio.run(run()))}
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "num_requests_swapped",
        "gpu_cache_usage_perc",
        "cpu_cache_usage_perc",
        "num_preemptions",
        "prompt_tokens",
        "generation_tokens",
        "request_success",
        "time_to_first_token_seconds",
        "time_per_output_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_queue_time_seconds",
        "iteration_tokens_total",
        "cache_config_info",
    ):
        family = families[f"lawful:{name}"]
        assert family.documentation
        assert all(sample.labels["model_name"] == 'a "model"\n' for sample in family.samples)


def test_the_documentation_lists_every_metric() -> None:
    text = (ROOT / "docs" / "serving.md").read_text()
    listed = set(re.findall(r"`lawful:(\w+)", text))
    counters = {f"{name}_total" for name in (*metrics.COUNTERS, *metrics.LABELLED, "requests_refused")}
    others = {*metrics.GAUGES, *metrics.HISTOGRAMS, "cache_config_info", "healthy"}
    devices = {f"{device}_{what}" for device in ("gpu", "cpu") for what in ("cache_usage_perc", "blocks")}
    assert listed == counters | others | devices
