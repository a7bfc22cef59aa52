"""OpenTelemetry spans: one request each, and where its time went."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from engine.errors import ConfigError
from engine.tracing import RequestTracer, provider_of, start_tracing
from tests.oracle import World


def traced(world: World) -> dict[str, list[Any]]:
    """Run the world to its end; the spans of each request by its id, in order of their start, the whole first."""
    exporter = InMemorySpanExporter()
    world.core.observer = RequestTracer(provider_of([SimpleSpanProcessor(exporter)]), "m")
    return {"exporter": [exporter]}


def spans_of(exporter: InMemorySpanExporter) -> dict[str, list[Any]]:
    spans = exporter.get_finished_spans()
    roots = {span.context.span_id: span for span in spans if span.name == "request"}
    found = {span.attributes["gen_ai.request.id"]: [span] for span in roots.values()}
    for span in sorted(spans, key=lambda span: (span.start_time, span.end_time)):
        if span.name != "request":
            assert span.parent is not None
            root = roots[span.parent.span_id]
            assert root.start_time <= span.start_time <= span.end_time <= root.end_time + 1_000_000_000
            found[root.attributes["gen_ai.request.id"]].append(span)
    return found


def test_a_request_alone_is_queue_pieces_of_its_prompt_and_decode() -> None:
    world = World(gpu=32, t=8)
    [exporter] = traced(world)["exporter"]
    world.add("A", p=20, m=4)
    world.drain()
    spans = spans_of(exporter)["A"]
    assert [span.name for span in spans] == ["request", "queue", "prefill", "prefill", "prefill", "decode"]
    assert [span.attributes["lawful.tokens"] for span in spans if span.name == "prefill"] == [8, 8, 4]
    root = spans[0]
    assert root.attributes["gen_ai.usage.prompt_tokens"] == 20
    assert root.attributes["gen_ai.usage.completion_tokens"] == 4
    assert root.attributes["gen_ai.response.finish_reasons"] == ("length",)


@pytest.mark.parametrize(("mode", "phase"), [("swap", "swapped"), ("recompute", "preempted")])
def test_a_preempted_request_shows_the_time_it_was_out(mode: str, phase: str) -> None:
    world = World(gpu=5, cpu=8, preemption_mode=mode)
    [exporter] = traced(world)["exporter"]
    for name in ("A", "B"):
        world.add(name, p=8, m=8)
    world.drain()
    spans = spans_of(exporter)
    assert phase not in [span.name for span in spans["A"]]
    names = [span.name for span in spans["B"]]
    assert phase in names
    assert names.index(phase) < len(names) - 1, "it came back"
    assert spans["B"][0].attributes["lawful.num_preemptions"] == 1


def test_an_aborted_and_a_failed_request_end_their_spans() -> None:
    world = World(gpu=32)
    [exporter] = traced(world)["exporter"]
    world.add("A", p=8, m=20)
    world.step()
    world.abort("A")
    world.drain()

    def fault(plan: Any) -> None:
        raise RuntimeError("CUDA error")

    world.add("B", p=8, m=20)
    world.before = fault
    world.drain()
    spans = spans_of(exporter)
    assert spans["A"][0].attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert not spans["B"][0].status.is_ok
    assert world.core.observer is not None
    assert not world.core.observer._requests  # type: ignore[attr-defined]


def test_missing_packages_are_named() -> None:
    try:
        import opentelemetry.exporter.otlp.proto.http  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match=r"pip install 'lawful\[otel\]'"):
            start_tracing("http://127.0.0.1:4318", "m")
