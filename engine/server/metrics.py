"""GET /metrics: what Prometheus scrapes.  Counters are counts of the plan log's actions.

A scrape reads the snapshot that the engine's thread made after its last step or command: its numbers fit each other,
so received = finished by reason + running + swapped + waiting in every scrape, and it never waits for a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector, CollectorRegistry
from starlette.responses import Response

from engine.async_llm import AsyncLLM
from engine.stats import Snapshot

PREFIX = "lawful:"
router = APIRouter()

Value = Callable[[Snapshot], float]


def _of(name: str) -> Value:
    return lambda snapshot: float(snapshot.values[name])


# name -> (help, value), in the order of the page; names end as vLLM's where it has the same
COUNTERS: dict[str, tuple[str, Value]] = {
    "requests_received": ("Requests accepted.", _of("requests_received")),
    "num_preemptions": ("Times a group was preempted.", _of("preemptions")),
    "num_demotions": ("Times a swapped group lost its KV to make room on the CPU.", _of("demotions")),
    "prompt_tokens": ("Prompt tokens computed for the first time.", _of("prompt_tokens")),
    "generation_tokens": ("Tokens drawn.", _of("generation_tokens")),
    "computed_tokens": ("All tokens that steps computed.", _of("computed_tokens")),
    "recomputed_tokens": ("Tokens computed again because their KV had been dropped.", _of("recomputed_tokens")),
    "blocks_swapped_out": ("Blocks moved from the GPU to the CPU.", _of("blocks_swapped_out")),
    "blocks_swapped_in": ("Blocks moved from the CPU to the GPU.", _of("blocks_swapped_in")),
    "blocks_copied": ("Blocks copied on write.", _of("blocks_copied")),
    "engine_steps": ("Steps planned.", _of("steps")),
    "engine_failed_steps": ("Steps that could not be executed.", _of("failed_steps")),
}
LABELLED: dict[str, tuple[str, str, Callable[[Snapshot], dict[str, int]]]] = {
    "request_success": (
        "Requests that ended, by reason (stop, length, abort, error).",
        "finished_reason",
        lambda snapshot: {"stop": 0, "length": 0, "abort": 0, "error": 0, **snapshot.finished_by},
    ),
    "scheduler_actions": (
        "Actions in the logs of executed plans (admit, grow, preempt:swap, swap_out, demote, fork, ...).",
        "action",
        lambda snapshot: dict(snapshot.actions),
    ),
}
GAUGES: dict[str, tuple[str, Value]] = {
    "num_requests_running": ("Groups in running.", lambda snapshot: snapshot.queues.running),
    "num_requests_swapped": ("Groups in swapped.", lambda snapshot: snapshot.queues.swapped),
    "num_requests_waiting": ("Groups in waiting.", lambda snapshot: snapshot.queues.waiting),
    "largest_inter_token_gap_seconds": ("The longest wait of any stream for its next token.", _of("largest_gap_s")),
}
HISTOGRAMS: dict[str, tuple[str, str]] = {
    "time_to_first_token_seconds": ("time_to_first_token", "From arrival to the first token."),
    "inter_token_latency_seconds": ("inter_token_latency", "Between two tokens of a request, preemption included."),
    "time_per_output_token_seconds": ("inter_token_latency", "The same under the older name."),
    "e2e_request_latency_seconds": ("e2e_latency", "From arrival to the last token."),
    "request_queue_time_seconds": ("queue_time", "From arrival to the first step that gives the request tokens."),
    "request_prefill_time_seconds": ("prefill_time", "From then to the first token."),
    "request_decode_time_seconds": ("decode_time", "From the first token to the last."),
    "request_inference_time_seconds": ("inference_time", "From the first step to the last token."),
    "request_prompt_tokens": ("prompt_tokens", "Prompt tokens of finished requests."),
    "request_generation_tokens": ("generation_tokens", "Generated tokens of finished requests, all branches."),
    "request_params_n": ("params_n", "Branches of accepted requests, max(n, best_of)."),
    "request_params_max_tokens": ("params_max_tokens", "max_tokens of accepted requests, as resolved."),
    "iteration_tokens_total": ("iteration_tokens", "Tokens of a step."),
}


class EngineCollector(Collector):
    """Turns the engine's snapshot into Prometheus' families, each with the label model_name."""

    def __init__(self, llm: AsyncLLM, model_name: str) -> None:
        self._llm = llm
        self._model = model_name

    def collect(self) -> Iterator[Metric]:
        """All families, in the order of the tables above."""
        snapshot = self._llm.engine.snapshot
        yield from self._gauges(snapshot)
        for name, (text, value) in COUNTERS.items():
            yield self._counter(name, text, value(snapshot))
        for name, (text, label, values) in LABELLED.items():
            yield self._labelled(name, text, label, values(snapshot))
        refused = self._llm.refusals()
        yield self._labelled("requests_refused", "Requests that were not accepted, by reason.", "reason", refused)
        yield from self._histograms(snapshot)
        yield self._info()

    def _gauges(self, snapshot: Snapshot) -> Iterator[Metric]:
        for name, (text, value) in GAUGES.items():
            yield self._gauge(name, text, value(snapshot))
        config = self._llm.core.scheduler.config
        for device, total, used in (
            ("gpu", config.num_gpu_blocks, snapshot.queues.gpu_blocks_used),
            ("cpu", config.num_cpu_blocks, snapshot.queues.cpu_blocks_used),
        ):
            share = used / total if total else 0.0
            text = f"Referenced part of the {device.upper()} blocks, 0 to 1."
            yield self._gauge(f"{device}_cache_usage_perc", text, share)
            family = GaugeMetricFamily(
                f"{PREFIX}{device}_blocks", f"{device.upper()} blocks by state.", labels=["model_name", "state"]
            )
            for state, count in (("referenced", used), ("cached", 0), ("free", total - used)):
                family.add_metric([self._model, state], count)
            yield family
        healthy = self._llm.health() is None
        yield self._gauge("healthy", "1 while /health says 200.", float(healthy))

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _labelled(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name", label])
        for key, value in sorted(values.items()):
            family.add_metric([self._model, key], value)
        return family

    def _histograms(self, snapshot: Snapshot) -> Iterator[Metric]:
        for name, (source, text) in HISTOGRAMS.items():
            counts = snapshot.histograms[source]
            buckets: list[tuple[str, float]] = []
            below = 0
            for bound, count in zip((*counts.bounds, float("inf")), counts.counts, strict=True):
                below += count
                buckets.append(("+Inf" if bound == float("inf") else str(bound), below))
            family = HistogramMetricFamily(PREFIX + name, text, labels=["model_name"])
            family.add_metric([self._model], buckets, counts.total)
            yield family

    def _info(self) -> Metric:
        config = self._llm.core.scheduler.config
        values: dict[str, Any] = {
            "block_size": config.block_size,
            "num_gpu_blocks": config.num_gpu_blocks,
            "num_cpu_blocks": config.num_cpu_blocks,
            "max_model_len": config.max_model_len,
            "max_num_batched_tokens": config.tokens,
            "max_num_seqs": config.seqs,
            "enable_chunked_prefill": config.enable_chunked_prefill,
            "enable_prefix_caching": False,
        }
        family = InfoMetricFamily(f"{PREFIX}cache_config", "Capacities and limits.", labels=["model_name"])
        family.add_metric([self._model], {name: str(value) for name, value in values.items()})
        return family


def registry_of(llm: AsyncLLM, model_name: str) -> CollectorRegistry:
    """A registry of this engine alone: two engines in one process do not mix."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(llm, model_name))
    return registry


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    return Response(generate_latest(request.app.state.registry), media_type=CONTENT_TYPE_LATEST)
