"""Field cases 60 to 62: clients that leave, a stop while busy, an engine that does not move; and other faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.http_client import Connection, HttpError
from tests.server.servers import Server, running, wait_for

pytestmark = pytest.mark.timeout(120)

LONG = {"prompt": "abcd", "max_tokens": 1500, "seed": 1}


class Client:
    """One request in a thread: what became of it."""

    def __init__(self, server: Server, stream: bool = False, **body: Any) -> None:
        self.events: list[Any] = []
        self.status: int | None = None
        self.error: str | None = None
        self.answer: Any = None
        self.seconds = 0.0
        body = {**LONG, "stream": stream, **body}
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(server.url, body)))
        self._thread.start()

    async def _run(self, url: str, body: dict[str, Any]) -> None:
        begun = time.monotonic()
        try:
            async with Connection(url, "/v1/completions", body) as answer:
                self.status = answer.status
                if body["stream"] and answer.status == 200:
                    async for event in answer.events():
                        self.events.append(event)
                else:
                    self.answer = await answer.json()
        except (HttpError, OSError, asyncio.IncompleteReadError) as error:
            self.error = str(error) or type(error).__name__
        self.seconds = time.monotonic() - begun

    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, seconds: float = 20) -> Client:
        self._thread.join(seconds)
        assert self.done(), "a hung socket"
        return self

    def was_told(self) -> bool:
        """It got a final event, or a status."""
        return bool(self.error and "shut" in self.error) or (self.status not in (None, 200))


def aborted(server: Server) -> float:
    return server.metrics()['lawful:request_success_total{finished_reason="abort"}']


# 60


async def leave(url: str, body: Any, after: Callable[[], bool] | int) -> None:
    """Send a request and close the socket after so many events, or when something has happened."""
    async with Connection(url, "/v1/completions", body) if isinstance(after, int) else _sent(url, body) as answer:
        if isinstance(after, int):
            async for _ in answer.events():
                after -= 1
                if after == 0:
                    return
        else:
            for _ in range(500):
                if after():
                    return
                await asyncio.sleep(0.02)
            raise AssertionError("that never happened")


@contextlib.asynccontextmanager
async def _sent(url: str, body: Any) -> Any:
    """The request is sent and no answer is waited for."""
    connection = Connection(url, "/v1/completions", body)
    reader, writer = await asyncio.open_connection(connection._host, connection._port)
    writer.write(connection._request)
    await writer.drain()
    try:
        yield reader
    finally:
        writer.transport.abort()


def test_a_client_that_leaves_is_forgotten_in_every_queue() -> None:
    """Case 60: in the stream, before a whole answer, while waiting, while swapped."""
    flags = ["--max-num-seqs", "4", "--block-size", "4", "--num-gpu-blocks-override", "40", "--max-model-len", "128"]
    with running(*flags, "--num-cpu-blocks-override", "40", delay=0.01) as server:
        body = {"prompt": "abcd", "max_tokens": 100, "seed": 1}
        asyncio.run(leave(server.url, {**body, "stream": True}, 3))
        wait_for(server.idle)
        assert aborted(server) == 1
        asyncio.run(leave(server.url, body, lambda: server.queues()[0] == 1))
        wait_for(server.idle)
        assert aborted(server) == 2

        owner = Client(server, n=3, prompt="first", max_tokens=45)
        wait_for(lambda: server.queues()[0] == 1)
        asyncio.run(leave(server.url, {**body, "n": 3, "max_tokens": 20}, lambda: server.queues() == (1, 0, 1)))
        wait_for(lambda: server.queues()[2] == 0)
        assert owner.wait().answer["usage"]["completion_tokens"] == 135
        assert aborted(server) == 3
        wait_for(server.idle)
        server.check_balance()
        server.check_quiet()


def test_a_client_that_leaves_while_swapped_out_gives_its_cpu_blocks_back() -> None:
    """Case 60, and 28 through the server: two branches each, a pool for one and a half of them."""
    flags = ["--block-size", "4", "--num-gpu-blocks-override", "30", "--num-cpu-blocks-override", "40"]
    with running(*flags, "--max-model-len", "128", delay=0.01) as server:
        first = Client(server, n=2, prompt="first", max_tokens=50)
        wait_for(lambda: server.queues()[0] == 1)
        body = {"prompt": "second", "n": 2, "max_tokens": 50, "seed": 2}
        asyncio.run(leave(server.url, body, lambda: server.queues()[1] == 1))
        wait_for(lambda: server.queues()[1] == 0 and server.metrics()['lawful:cpu_blocks{state="referenced"}'] == 0)
        assert first.wait().answer["usage"]["completion_tokens"] == 100
        assert aborted(server) == 1
        wait_for(server.idle)
        server.check_quiet()


# 61


@pytest.mark.parametrize("timeout", ["0", "2"])
def test_a_stop_while_busy_tells_everyone(timeout: str) -> None:
    """Case 61: running, waiting and streaming clients; with time enough for none of them."""
    flags = ["--max-num-seqs", "3", "--drain-timeout", timeout]
    with running(*flags, delay=0.02) as server:
        clients = [Client(server, stream=i % 2 == 0, max_tokens=1900) for i in range(5)]
        wait_for(lambda: server.queues() == (3, 0, 2))
        begun = time.monotonic()
        server.signal()
        if timeout != "0":
            wait_for(lambda: server.get("/health")[0] == 503)
            status, answer = server.post("/v1/completions", LONG)
            assert (status, answer["error"]["code"]) == (503, "shutdown")
        assert server.exit_code() == 0
        assert time.monotonic() - begun < float(timeout) + 10, "2 s, and what a busy machine adds"
        for client in clients:
            assert client.wait().was_told(), (client.status, client.error, client.answer)
        assert {client.status for client in clients[1::2]} == {503}
        server.check_quiet()


def test_a_drain_lets_everyone_finish() -> None:
    """Case 61."""
    with running("--drain-timeout", "30", delay=0.005) as server:
        clients = [Client(server, stream=i % 2 == 0, max_tokens=100) for i in range(4)]
        wait_for(lambda: server.queues()[0] == 4)
        server.signal()
        assert server.exit_code(30) == 0
        for client in clients:
            assert client.wait().error is None
            assert client.status == 200
        assert [client.events[-1]["choices"][0]["finish_reason"] for client in clients[::2]] == ["length"] * 2
        assert "ended with status 0" in server.log


def test_a_second_signal_ends_it_now_and_an_idle_server_ends_at_once() -> None:
    """Case 61."""
    with running("--drain-timeout", "600", delay=0.02) as server:
        client = Client(server, stream=True)
        wait_for(lambda: len(client.events) > 0)
        server.signal()
        wait_for(lambda: server.get("/health")[0] == 503)
        assert not client.done()
        server.signal(signal.SIGINT)
        assert server.exit_code() == 0
        assert client.wait().was_told()
    with running() as idle:
        idle.signal()
        assert idle.exit_code() == 0


def test_a_stop_ends_even_if_a_step_never_does() -> None:
    """Case 61: stuck executor."""
    with running("--drain-timeout", "1", stuck=7) as server:
        clients = [Client(server, prompt="7 bytes"), Client(server, stream=True)]
        wait_for(lambda: server.metrics()["lawful:engine_steps_total"] >= 0 and not any(c.done() for c in clients))
        time.sleep(0.3)
        server.signal()
        assert server.exit_code() == 0
        for client in clients:
            client.wait()
        assert clients[0].status == 503


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_while_the_model_is_loading_is_as_clean_as_any(number: int) -> None:
    """Case 61: an orchestrator that changes its mind."""
    server = Server(until="loading", loading=600)
    try:
        server.signal(number)
        assert server.exit_code() == 0
        assert f"{signal.Signals(number).name} before the server was ready" in server.log
        server.check_quiet()
    finally:
        server.stop()


def test_signals_without_end_still_end_with_status_0() -> None:
    """Case 61: an impatient one."""
    with running("--drain-timeout", "600", delay=0.02) as server:
        client = Client(server, stream=True)
        wait_for(lambda: len(client.events) > 0)
        with contextlib.suppress(ProcessLookupError):
            while server.process.is_alive():
                server.signal()
                time.sleep(0.001)
        assert server.exit_code() == 0
        assert client.wait().was_told()


def test_the_library_installs_no_signal_handlers() -> None:
    """Case 61."""
    from tests.oracle import World

    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    World(gpu=16).llm().generate([1, 2, 3], use_tqdm=False)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


# 62


def test_a_step_that_never_ends_is_unhealthy_and_its_clients_are_told() -> None:
    """Case 62 (a), and recovery: the step takes 3 s, the limit is 1."""
    with running("--stall-timeout", "1", stuck=7, stuck_for=3) as server:
        assert server.get("/health")[0] == 200
        clients = [Client(server, prompt="7 bytes"), Client(server, stream=True)]
        assert wait_for(lambda: server.get("/health")[0] == 503)
        _, answer = server.get("/health")
        assert "no step has ended for" in answer["error"]["message"]
        for client in clients:
            client.wait()
            assert client.status == 503 or "no step has ended" in (client.error or "")
        assert server.post("/v1/completions", LONG)[1]["error"]["code"] == "stalled"
        assert server.metrics()["lawful:healthy"] == 0
        wait_for(lambda: server.get("/health")[0] == 200)
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200
        wait_for(server.idle)
        server.check_balance()


def test_a_slow_engine_is_healthy_and_so_is_an_idle_one() -> None:
    """Case 62 (c)."""
    with running("--stall-timeout", "2.5", delay=0.25) as server:
        client = Client(server, max_tokens=11)
        seen = set()
        while not client.done():
            seen.add(server.get("/health")[0])
            time.sleep(0.1)
        assert client.status == 200
        time.sleep(2.6)
        seen.add(server.get("/health")[0])
        assert seen == {200}


def test_a_failing_step_ends_its_groups_alone_and_leaves_a_dump() -> None:
    """An exception in a step: its groups get a clear error, what waits is served, and the state is written down."""
    with running("--max-num-seqs", "1", fail=7, delay=0.01) as server:
        alone = Client(server, max_tokens=3).wait().answer["choices"]
        first = Client(server, max_tokens=60, stream=True)
        wait_for(lambda: server.queues()[0] == 1)
        bad = Client(server, prompt="7 bytes", max_tokens=5)
        wait_for(lambda: server.queues()[2] == 1)
        later = Client(server, max_tokens=3)
        first.wait()
        assert (first.status, first.error) == (200, None)
        assert bad.wait().status == 500
        assert "illegal memory access" in bad.answer["error"]["message"]
        assert later.wait().answer["choices"] == alone
        assert server.get("/health")[0] == 200
        [dump] = Path(server.dir, ".lawful").glob("step-*.json")
        content = json.loads(dump.read_text())
        assert "illegal memory access" in content["error"]
        assert content["plan"]["groups"]
        assert set(content["state"]) >= {"running", "swapped", "waiting", "config", "pools"}
        assert str(dump.name) in server.log
        now = server.metrics()
        assert now["lawful:engine_failed_steps_total"] == 1
        assert now['lawful:request_success_total{finished_reason="error"}'] >= 1
        wait_for(server.idle)
        server.check_balance()


def test_a_stream_that_fails_midway_says_so_in_an_event() -> None:
    with running(fail=7, delay=0.01) as server:
        stream = Client(server, stream=True)
        wait_for(lambda: len(stream.events) > 2)
        bad = Client(server, prompt="7 bytes")
        assert bad.wait().status == 500
        stream.wait()
        assert stream.status == 200
        assert "the step failed: RuntimeError" in (stream.error or "")


def test_a_broken_device_is_said_and_ends_the_server_with_an_error() -> None:
    """Case 62 (b): every step raises; all clients get an error at once and the process ends with 1."""
    with running("--max-failed-steps", "3", "--max-num-seqs", "1", broken=True) as server:
        clients = [Client(server, max_tokens=5, stream=i % 2 == 0) for i in range(6)]
        for client in clients:
            client.wait()
            assert client.status in (500, 503, None)
        assert server.exit_code() == 1
        assert "the last 3 steps failed" in server.log
        assert all(client.seconds < 10 for client in clients)


def test_a_dead_engine_thread_is_said_and_ends_the_server_with_an_error() -> None:
    """Case 62 (b): a bug in the scheduler itself."""
    with running(die=7, delay=0.01) as server:
        clients = [Client(server), Client(server, stream=True)]
        wait_for(lambda: server.queues()[0] == 2)
        bad = Client(server, prompt="7 bytes")
        for client in [*clients, bad]:
            client.wait()
        assert [client.status for client in clients] == [503, 200]
        assert "the engine has stopped: ValueError: the scheduler has a bug" in (clients[1].error or "")
        assert server.exit_code() == 1
        assert "the engine cannot go on" in server.log
        [dump] = Path(server.dir, ".lawful").glob("step-*.json")
        assert len(json.loads(dump.read_text())["state"]["running"]) == 2


# other faults


def test_a_full_queue_is_a_429_with_retry_after() -> None:
    from tests.server.servers import request

    with running("--max-num-seqs", "1", "--max-queued-requests", "2", delay=0.02) as server:
        runs = Client(server, max_tokens=60)
        wait_for(lambda: server.queues()[0] == 1)
        waiting = [Client(server, max_tokens=2, stream=i == 0) for i in range(2)]
        wait_for(lambda: server.queues()[2] == 2)
        for stream in (False, True):
            status, answer, headers = request(f"{server.url}/v1/completions", {**LONG, "stream": stream})
            assert (status, answer["error"]["code"], answer["error"]["type"]) == (429, "queue_full", "rate_limit_error")
            assert int(headers["retry-after"]) >= 1
        status, answer, _ = request(f"{server.url}/v1/completions", {"prompt": ["a", "b", "c"]})
        assert status == 400, "three could never wait together"
        for client in [runs, *waiting]:
            assert client.wait().status == 200
        now = server.metrics()
        assert now['lawful:requests_refused_total{reason="queue_full"}'] == 2
        assert now["lawful:requests_received_total"] == 3
        wait_for(server.idle)
        server.check_quiet()


def test_a_slow_reader_does_not_hold_up_the_engine_and_loses_nothing() -> None:
    """Its deltas coalesce: the engine ends the request while the reader has hardly begun."""
    with running(delay=0.0) as server:
        body = {**LONG, "n": 4, "max_tokens": 500, "stream": True, "return_token_ids": True, "logprobs": 20}
        connection = Connection(server.url, "/v1/completions", body)
        reader = socket.socket()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect((connection._host, connection._port))
        reader.sendall(connection._request)
        wait_for(lambda: server.metrics()["lawful:requests_received_total"] == 1)
        wait_for(server.idle, 60)
        data = b""
        reader.settimeout(20)
        while not data.endswith(b"0\r\n\r\n") and (chunk := reader.recv(1 << 16)):
            data += chunk
        reader.close()
        tokens = [0] * 4
        events = [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]
        for event in events:
            for choice in event["choices"]:
                tokens[choice["index"]] += len(choice["token_ids"])
        assert tokens == [500] * 4, "nothing is lost"
        assert len(events) < 4 * 500, "deltas were joined"
        assert b"[DONE]" in data[-60:]
        server.check_quiet()


def test_a_reader_that_never_reads_is_cut_off() -> None:
    with running("--write-timeout", "1", delay=0.0) as server:
        body = {**LONG, "n": 8, "max_tokens": 500, "stream": True, "logprobs": 20}
        connection = Connection(server.url, "/v1/completions", body)
        reader = socket.socket()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect((connection._host, connection._port))
        reader.sendall(connection._request)
        wait_for(lambda: "is cut off" in server.log, 60)
        wait_for(server.idle)
        reader.settimeout(10)
        data = b""
        with reader, contextlib.suppress(ConnectionError):
            while chunk := reader.recv(1 << 16):
                data += chunk
        assert b"[DONE]" not in data


def test_bodies_that_are_no_requests(shared: Server) -> None:
    """Malformed JSON, deep nesting, wrong types, oversize bodies: a 4xx each, and the server stays."""
    for body in (b"", b"{", b"[]", b"nul", b'"text"', b"\xff\xfe", b"[" * 100_000, b'{"prompt": "a"', b"{}"):
        status, answer = shared.post("/v1/completions", body)
        assert status == 400, (body[:20], answer)
        assert answer["error"]["message"]
    status, answer = shared.post("/v1/completions", b'{"prompt": "' + b"x" * (9 << 20) + b'"}')
    assert (status, answer["error"]["code"]) == (413, "body_too_large")
    shared.check_quiet()


def test_an_oversize_body_without_a_length_is_cut_off(shared: Server) -> None:
    connection = Connection(shared.url, "/v1/completions")
    with socket.create_connection((connection._host, connection._port), timeout=20) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(160):
                client.sendall(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
        answer = b""
        with contextlib.suppress(ConnectionError):
            while chunk := client.recv(1 << 16):
                answer += chunk
        assert b" 413 " in answer[:40]
    assert shared.get("/health")[0] == 200
    shared.check_quiet()


def test_a_port_in_use_is_said_before_a_model_is_loaded(shared: Server) -> None:
    port = shared.url.rpartition(":")[2]
    with pytest.raises(AssertionError, match=r"cannot listen on 127.0.0.1 port \d+: Address already in use"):
        Server("--port", port)
