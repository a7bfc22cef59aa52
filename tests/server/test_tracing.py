"""OpenTelemetry spans: one request each, and where its time went."""

from __future__ import annotations

import gzip
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from engine.errors import ConfigError
from engine.tracing import RequestTracer, provider_of, start_tracing
from tests.oracle import World
from tests.server.servers import running


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


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'lawful\[otel\]'"):
        start_tracing("http://127.0.0.1:4318", "m")


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://localhost:4317", "/v1/traces", "http://"])
def test_an_endpoint_of_another_kind_is_named(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"it must be an OTLP endpoint over HTTP, as http://localhost:4318"):
        start_tracing(endpoint, "m")


class Collector(ThreadingHTTPServer):
    """An OTLP collector on loopback: it keeps what it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.received: list[tuple[str, str | None, bytes]] = []  # path, content type, body


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.received.append((self.path, self.headers.get("Content-Type"), body))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("path", ["", "/v1/traces"])
def test_a_server_sends_its_spans_to_a_collector_and_the_last_ones_at_its_end(path: str) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    with Collector() as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        with running("--otlp-traces-endpoint", collector.url + path) as server:
            for i in range(3):
                asked = {"prompt": "abc", "max_tokens": 4, "request_id": f"r{i}"}
                assert server.post("/v1/completions", asked)[0] == 200
            server.signal()
            assert server.exit_code() == 0
            server.check_quiet()
        collector.shutdown()
        assert {(path, kind) for path, kind, _ in collector.received} == {("/v1/traces", "application/x-protobuf")}
        spans = []
        for _, _, body in collector.received:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                names = {item.key: item.value.string_value for item in resource.resource.attributes}
                assert names["service.name"] == "lawful"
                spans += [span for scope in resource.scope_spans for span in scope.spans]
        assert Counter(span.name for span in spans) == {"request": 3, "queue": 3, "prefill": 3, "decode": 3}
        roots = {span.span_id: span for span in spans if not span.parent_span_id}
        ids = {item.value.string_value for span in roots.values() for item in span.attributes if "id" in item.key}
        assert ids == {"cmpl-r0", "cmpl-r1", "cmpl-r2"}
        assert all(span.parent_span_id in roots for span in spans if span.name != "request")


def test_a_collector_that_is_not_there_holds_nothing_up() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with running("--otlp-traces-endpoint", "http://127.0.0.1:9", delay=0.0) as server:
        assert server.post("/v1/completions", {"prompt": "abc", "max_tokens": 4})[0] == 200
        server.signal()
        assert server.exit_code(30) == 0
        assert "Traceback" not in server.log
