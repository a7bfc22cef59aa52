"""OpenTelemetry spans of every request: where its time went.

    request ── queue ── prefill (one a chunk) ── decode ── preempted or swapped ── prefill ── decode

Spans follow the plan's log: admit ends the queue, preempt ends the decode, swap_in ends the time on the CPU.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from engine.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

    from engine.outputs import RequestMetrics, RequestOutput
    from engine.sampling import SamplingParams
    from engine.scheduler import Plan

EXPORT_TIMEOUT = 3  # seconds that a collector may take; at the end of a server it is waited for that long


class _Request:
    """The spans of one request: the whole, and the phase it is in."""

    __slots__ = ("phase", "root")

    def __init__(self, root: Span) -> None:
        self.root = root
        self.phase: tuple[str, Span] | None = None


class RequestTracer:
    """An `engine.core.Observer` that writes spans.  It belongs to the engine's thread."""

    def __init__(self, provider: TracerProvider, model: str) -> None:
        from opentelemetry import trace

        self._trace = trace
        self._provider = provider
        self._tracer = provider.get_tracer("lawful")
        self._model = model
        self._requests: dict[str, _Request] = {}
        self._zero = time.time_ns() - time.monotonic_ns()  # the engine measures on the monotonic clock

    def on_add(self, request_id: str, metrics: RequestMetrics, prompt_tokens: int, params: SamplingParams) -> None:
        """A request has come: its span and its time in the queue begin."""
        attributes: dict[str, Any] = {
            "gen_ai.request.model": self._model,
            "gen_ai.request.id": request_id,
            "gen_ai.request.n": params.n,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.prompt_tokens": prompt_tokens,
        }
        if params.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = params.max_tokens
        begun = self._ns(metrics.arrival_time)
        root = self._tracer.start_span("request", start_time=begun, attributes=attributes)
        request = self._requests[request_id] = _Request(root)
        self._enter(request, "queue", begun)

    def on_step(self, plan: Plan, started: float, ended: float) -> None:
        """A step is over: phases change as its log says, and every piece of a prompt is a span of its own."""
        begun, over = self._ns(started), self._ns(ended)
        for action in plan.log:
            request = self._requests.get(action.request_id)
            if request is None:
                continue
            if action.verb == "preempt":
                phase = "swapped" if action.detail == "swap" else "preempted"
                self._enter(request, phase, begun, {"lawful.blocks": int(action.blocks)})
            elif action.verb == "demote":
                self._enter(request, "preempted", begun)
            elif action.verb in ("admit", "swap_in"):
                self._leave(request, begun)
        decodes = {row.group.request_id for row in plan.scheduled if row.draws and row.end - row.start == 1}
        for group, tokens in plan.groups:
            request = self._requests.get(group.request_id)
            if request is None:
                continue
            if group.request_id in decodes and group.generated > 1:
                if request.phase is None:
                    self._enter(request, "decode", begun)
            else:
                self._leave(request, begun)
                attributes = {"lawful.tokens": int(tokens), "lawful.step": plan.step}
                self._span(request, "prefill", begun, attributes).end(over)

    def on_departure(self, output: RequestOutput) -> None:
        """A request has ended, whatever way."""
        request = self._requests.pop(output.request_id, None)
        if request is None:
            return
        metrics = output.metrics
        over = self._ns(time.monotonic() if metrics is None or metrics.finished_time is None else metrics.finished_time)
        self._leave(request, over)
        root = request.root
        root.set_attribute("gen_ai.usage.completion_tokens", sum(len(c.token_ids) for c in output.outputs))
        root.set_attribute("gen_ai.response.finish_reasons", [c.finish_reason or "" for c in output.outputs])
        if metrics is not None:
            root.set_attribute("lawful.num_preemptions", metrics.num_preemptions)
            if metrics.time_in_queue is not None:
                root.set_attribute("gen_ai.latency.time_in_queue", metrics.time_in_queue)
            if metrics.first_token_time is not None:
                first = metrics.first_token_time - metrics.arrival_time
                root.set_attribute("gen_ai.latency.time_to_first_token", first)
        if output.error is not None:
            root.set_status(self._trace.StatusCode.ERROR, output.error)
        root.end(over)

    def close(self) -> None:
        """Send what has not been sent; a collector that does not answer is not waited for long."""
        self._provider.shutdown()

    def _ns(self, moment: float) -> int:
        return self._zero + int(moment * 1e9)

    def _span(self, request: _Request, name: str, begun: int, attributes: Any = None) -> Span:
        context = self._trace.set_span_in_context(request.root)
        return self._tracer.start_span(name, context=context, start_time=begun, attributes=attributes)

    def _enter(self, request: _Request, name: str, begun: int, attributes: Any = None) -> None:
        self._leave(request, begun)
        request.phase = (name, self._span(request, name, begun, attributes))

    def _leave(self, request: _Request, over: int) -> None:
        if request.phase is not None:
            request.phase[1].end(over)
            request.phase = None


def start_tracing(endpoint: str, model: str) -> RequestTracer:
    """A tracer that exports to an OTLP endpoint over HTTP, as protobuf.

    endpoint: of a collector, as http://host:4318; without a path /v1/traces is meant, as the protocol has it.
    Raises ConfigError for another kind of endpoint, and when the packages are missing.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"otlp_traces_endpoint is {endpoint!r}; it must be an OTLP endpoint over HTTP, as http://localhost:4318"
        )
    if parts.path in ("", "/"):
        endpoint = parts._replace(path="/v1/traces").geturl()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(f"spans need more packages ({error.name} is missing): pip install 'lawful[otel]'") from None
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT)
    return RequestTracer(provider_of([BatchSpanProcessor(exporter)]), model)


def provider_of(processors: Sequence[Any]) -> TracerProvider:
    """A provider of its own: nothing global is touched.  processors: of the OpenTelemetry SDK."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    provider = TracerProvider(resource=Resource.create({"service.name": "lawful"}))
    for processor in processors:
        provider.add_span_processor(processor)
    return provider
