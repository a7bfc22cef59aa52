"""What happens on the wire beside the endpoints: bad requests of every kind, slow ones, and what is counted of them."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.server.servers import Server, request, running, wait_for

pytestmark = pytest.mark.timeout(120)

REFUSED = "lawful:requests_refused_total"


def connect(server: Server) -> socket.socket:
    parts = urlsplit(server.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=30)


def head(*lines: str, method: str = "POST", path: str = "/v1/completions") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *lines, "", ""]).encode()


def answer_of(client: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body, read until the server closes; then this side closes too."""
    data = b""
    with client, contextlib.suppress(ConnectionError):
        while chunk := client.recv(1 << 16):
            data += chunk
    first, _, rest = data.partition(b"\r\n")
    lines, _, body = rest.partition(b"\r\n\r\n")
    headers = dict(line.split(": ", 1) for line in lines.decode().lower().split("\r\n") if line)
    return int(first.split()[1]) if first else 0, headers, body


def exchange(server: Server, data: bytes) -> tuple[int, dict[str, str], bytes]:
    client = connect(server)
    client.sendall(data)
    return answer_of(client)


def read_health(client: socket.socket) -> None:
    """One answer on a connection that is kept."""
    data = b""
    while not data.endswith(b'{"status":"ok"}'):
        chunk = client.recv(1 << 16)
        assert chunk, data
        data += chunk


def check_error(status: int, headers: Any, body: Any, code: str) -> None:
    """In OpenAI's form, with an id."""
    value = body if isinstance(body, dict) else json.loads(body)
    assert set(value) == {"error"}
    assert set(value["error"]) == {"message", "type", "param", "code"}
    assert value["error"]["code"] == code
    assert value["error"]["message"]
    assert status >= 400
    assert headers["x-request-id"]
    assert headers["content-type"] == "application/json"


def refusals(server: Server) -> dict[str, int]:
    """By reason; /metrics and /debug/scheduler must agree."""
    shown = {name.split('"')[1]: value for name, value in server.metrics().items() if name.startswith(REFUSED)}
    state = server.get("/debug/scheduler")[1]
    assert state["refused_by"] == shown
    assert state["totals"]["requests_refused"] == sum(shown.values())
    return {name: int(value) for name, value in shown.items()}


# the form of errors


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/v1/nothing", 404, "unknown_url"),
        ("GET", "/", 404, "unknown_url"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/chat/completions", 405, "method_not_allowed"),
        ("OPTIONS", "/v1/completions", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("GET", "/v1/models/none", 404, "model_not_found"),
    ],
)
def test_paths_and_methods_that_are_not_there(shared: Server, method: str, path: str, status: int, code: str) -> None:
    got, headers, body = exchange(shared, head("Connection: close", method=method, path=path))
    assert got == status
    check_error(got, headers, body, code)
    assert ("allow" in headers) == (status == 405)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "invalid_json"),
        (b'{"prompt": "caf\xe9"}', "not UTF-8"),
        (b'{"prompt": "a\xff\xfe"}', "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"user": ' * 50_000 + b"1" + b"}" * 50_000, "nested too deeply"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "valid JSON"),
        (b'{"prompt": "a" "b"}', "valid JSON"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_body_that_is_no_json_is_called_so(shared: Server, path: str, body: bytes, said: str) -> None:
    status, answer, headers = request(shared.url + path, body)
    assert status == 400
    check_error(status, headers, answer, "invalid_json")
    assert said == "invalid_json" or said in answer["error"]["message"]
    shared.check_quiet()


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data", None])
def test_another_content_type_is_named_with_what_to_send(shared: Server, kind: str | None) -> None:
    """As curl -d without a header does."""
    body = b'{"prompt": "a", "max_tokens": 1}'
    lines = [f"Content-Length: {len(body)}", "Connection: close", *([f"Content-Type: {kind}"] if kind else [])]
    status, headers, answer = exchange(shared, head(*lines) + body)
    assert status == 415
    check_error(status, headers, answer, "unsupported_media_type")
    message = json.loads(answer)["error"]["message"]
    assert "Content-Type: application/json" in message
    assert kind is None or kind in message
    for good in ("application/json; charset=utf-8", "Application/JSON", "application/vnd.x+json"):
        assert request(f"{shared.url}/v1/completions", body, {"Content-Type": good})[0] == 200


def test_head_is_get_without_a_body(shared: Server) -> None:
    for path in ("/health", "/version", "/v1/models", "/metrics", "/ui", "/openapi.json"):
        status, headers, body = exchange(shared, head("Connection: close", method="HEAD", path=path))
        assert (status, body) == (200, b""), path
        assert int(headers["content-length"]) > 0
        assert headers["x-request-id"]
    assert exchange(shared, head("Connection: close", method="HEAD"))[0] == 405
    assert exchange(shared, head("Connection: close", method="HEAD", path="/nothing"))[0] == 404


def test_the_request_id_is_in_every_answer(shared: Server) -> None:
    for path, body in (
        ("/v1/completions", b"{"),
        ("/v1/completions", {"prompt": "a"}),
        ("/nothing", b""),
        ("/health", None),
    ):
        assert request(shared.url + path, body, {"X-Request-Id": "mine"})[2]["x-request-id"] == "mine"
    status, answer, headers = request(f"{shared.url}/v1/completions", {"prompt": "a"}, {"X-Request-Id": "two words"})
    assert status == 400
    check_error(status, headers, answer, "invalid_value")
    assert headers["x-request-id"] != "two words"


# what is no HTTP, or comes too slowly


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200,
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"x" * 200_000,
        head("Content-Length: -1"),
        head("Content-Length: ten"),
        head("Transfer-Encoding: chunked") + b"zz\r\n",
        head("Transfer-Encoding: chunked") + b"5\r\nhello\r\nzz\r\n",
    ],
)
def test_what_is_no_http_is_answered_and_let_go(shared: Server, data: bytes) -> None:
    status, headers, body = exchange(shared, data)
    assert status in (400, 501)
    check_error(status, headers, body, "invalid_http")
    assert shared.get("/health")[0] == 200
    shared.check_quiet()


def test_an_upgrade_that_is_offered_is_passed_over(shared: Server) -> None:
    for kind in ("h2c", "websocket"):
        lines = ["Connection: Upgrade, close", f"Upgrade: {kind}"]
        status, _, body = exchange(shared, head(*lines, method="GET", path="/health"))
        assert (status, json.loads(body)["status"]) == (200, "ok")
    assert "WARNING" not in shared.log.split("serving")[-1] or "pgrade" not in shared.log


def test_headers_that_do_not_come_are_waited_for_so_long_and_no_longer() -> None:
    """Nothing at all, half a head, a trickle, a second request's half head on a kept connection, a refused body."""
    with running("--api-key", "k", head_timeout=1.0, body_timeout=1.5) as server:
        silent, half, trickle, second, refused, body = (connect(server) for _ in range(6))
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost:")
        second.sendall(head(method="GET", path="/health"))
        read_health(second)
        second.sendall(b"GET /hea")
        refused.sendall(head("Content-Length: 1000"))
        body.sendall(head("Content-Length: 1000", "Authorization: Bearer k") + b"{")
        until = time.monotonic() + 30

        def drip(client: socket.socket, data: bytes) -> None:
            with contextlib.suppress(OSError):
                for byte in data * 100:
                    client.sendall(bytes([byte]))
                    time.sleep(0.05)
                    if time.monotonic() > until:
                        break

        dripping = [
            threading.Thread(target=drip, args=(trickle, b"GET /health HTTP/1.1\r\nX: y")),
            threading.Thread(target=drip, args=(refused, b"x")),
            threading.Thread(target=drip, args=(body, b"x")),
        ]
        for thread in dripping:
            thread.start()
        assert answer_of(silent)[0] == 0, "nothing was asked"
        for client in (half, trickle, second):
            status, headers, answer = answer_of(client)
            assert status == 408
            check_error(status, headers, answer, "request_timeout")
        assert answer_of(refused)[0] == 401
        status, headers, answer = answer_of(body)
        assert status == 408
        check_error(status, headers, answer, "request_timeout")
        for thread in dripping:
            thread.join()
        with connect(server) as idle:  # one that is kept alive between requests is not slow
            for _ in range(3):
                idle.sendall(head(method="GET", path="/health"))
                read_health(idle)
                time.sleep(0.6)
        server.check_quiet()


def test_a_stop_tells_whoever_is_still_sending() -> None:
    """A body that is half here when the server is told to end: 503 at once, no traceback, status 0."""
    with running("--drain-timeout", "20") as server:
        early = connect(server)
        early.sendall(head("Content-Length: 1000", "Content-Type: application/json") + b'{"prompt": "')
        busy = threading.Thread(target=lambda: server.post("/v1/completions", {"prompt": "a", "max_tokens": 5}))
        busy.start()
        busy.join()
        server.signal()
        status, headers, body = answer_of(early)
        assert status == 503
        check_error(status, headers, body, "shutdown")
        assert server.exit_code() == 0
        server.check_quiet()
        assert "uvicorn" not in server.log
    with running("--drain-timeout", "3", delay=0.05) as server:  # one that begins while others are being finished
        stream = threading.Thread(target=lambda: server.post("/v1/completions", {"prompt": "a", "max_tokens": 1000}))
        stream.start()
        wait_for(lambda: server.queues()[0] == 1)
        server.signal()
        wait_for(lambda: server.get("/health")[0] == 503)
        late = connect(server)
        late.sendall(head("Content-Length: 1000", "Content-Type: application/json") + b'{"prompt": "')
        status, headers, body = answer_of(late)
        assert status == 503
        check_error(status, headers, body, "shutdown")
        assert server.exit_code() == 0
        stream.join()
        server.check_quiet()


def test_a_stop_ends_although_a_template_runs_for_ever() -> None:
    """Whoever trusts templates of requests must still be able to stop."""
    with running("--trust-request-chat-template", "--drain-timeout", "0") as server:
        endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
        got: list[Any] = []
        body = {"messages": [{"role": "user", "content": "a"}], "chat_template": endless}
        client = threading.Thread(target=lambda: got.append(server.post("/v1/chat/completions", body)))
        client.start()
        time.sleep(0.5)
        server.signal()
        assert server.exit_code(30) == 0
        client.join()
        [(status, answer)] = got
        assert (status, answer["error"]["code"]) == (503, "shutdown")
        assert "Traceback" not in server.log


def test_a_stop_leaves_a_reader_that_does_not_read() -> None:
    with running("--drain-timeout", "0", delay=0.0) as server:
        reader = socket.socket()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        parts = urlsplit(server.url)
        reader.connect((parts.hostname, parts.port))
        body = json.dumps({"prompt": "a", "n": 8, "max_tokens": 900, "stream": True, "logprobs": 20}).encode()
        reader.sendall(head(f"Content-Length: {len(body)}", "Content-Type: application/json") + body)
        wait_for(lambda: server.metrics()["lawful:generation_tokens_total"] > 4000, 60)
        server.signal()
        assert server.exit_code(20) == 0
        reader.close()
        assert "Traceback" not in server.log


# what is counted


def test_every_refusal_is_counted_once_and_by_its_reason() -> None:
    """Whatever refuses it: the gate, the body's form, a value, the scheduler's limits, the queue."""
    flags = ["--api-key", "k", "--max-body-bytes", "5000", "--max-model-len", "64", "--max-num-seqs", "4"]
    with running(*flags, "--enable-debug", "--max-queued-requests", "2", "--num-gpu-blocks-override", "8") as server:
        key = {"Authorization": "Bearer k"}
        get = server.get
        server.get = lambda path, **headers: get(path, **key, **headers)  # type: ignore[method-assign]
        expected: dict[str, int] = {}
        bodies: list[tuple[str, Any, int]] = [
            ("invalid_json", b"{", 400),
            ("invalid_json", b"\xff", 400),
            ("body_too_large", b" " * 6000, 413),
            ("missing_required_parameter", {}, 400),
            ("unknown_parameter", {"prompt": "a", "colour": 1}, 400),
            ("unsupported_parameter", {"prompt": "a", "suffix": "b"}, 400),
            ("invalid_value", {"prompt": "a", "temperature": -1}, 400),
            ("invalid_value", {"prompt": [999]}, 400),
            ("invalid_value", {"prompt": ["a", [1]]}, 400),
            ("model_not_found", {"prompt": "a", "model": "b"}, 404),
            ("invalid_prompt", {"prompt": ""}, 400),
            ("max_model_len", {"prompt": "a" * 64}, 400),
            ("max_model_len", {"prompt": [65] * 64}, 400),
            ("max_num_seqs", {"prompt": "a", "n": 5}, 400),
            ("num_gpu_blocks", {"prompt": "a", "n": 4, "max_tokens": 60}, 400),
            ("priority", {"prompt": "a", "priority": 1}, 400),
            ("invalid_request", {"prompt": ["a", "b", "c"]}, 400),
            ("invalid_value", {"prompt": ["a", "\ud800"]}, 400),
        ]
        for reason, body, status in bodies:
            reason = "invalid_prompt" if isinstance(body, dict) and "\ud800" in body.get("prompt", "") else reason
            for stream in (False, True):
                if stream and isinstance(body, dict):
                    body = {**body, "stream": True}
                got, answer, _ = request(f"{server.url}/v1/completions", body, key)
                assert got == status, (body, answer)
                expected[reason] = expected.get(reason, 0) + 1
                assert refusals(server) == expected, (reason, body, answer)
        for reason, headers, status in (
            ("invalid_api_key", {}, 401),
            ("invalid_value", {"X-Request-Id": "a b", **key}, 400),
        ):
            assert request(f"{server.url}/v1/chat/completions", {}, headers)[0] == status
            expected[reason] = expected.get(reason, 0) + 1
        assert request(f"{server.url}/v1/completions", b"a", {**key, "Content-Type": "text/plain"})[0] == 415
        expected["unsupported_media_type"] = 1
        assert refusals(server) == expected
        # What asks for no generation is no refused request, whatever is wrong with it.
        for path, body in (("/tokenize", b"{"), ("/nothing", {}), ("/detokenize", {"tokens": [999]})):
            assert request(server.url + path, body, key)[0] in (400, 404)
        assert request(f"{server.url}/v1/completions", {"prompt": "a"}, key)[0] == 200
        assert request(f"{server.url}/v1/completions", {"prompt": ["a", "b"]}, key)[0] == 200
        assert refusals(server) == expected
        assert server.metrics()["lawful:requests_received_total"] == 3
        server.check_balance()
        server.check_quiet()


def test_of_several_prompts_all_are_handed_in_or_none(shared: Server) -> None:
    before = shared.metrics()["lawful:requests_received_total"]
    assert shared.post("/v1/completions", {"prompt": [[65], [66], [257]]})[0] == 400
    assert shared.metrics()["lawful:requests_received_total"] == before
    wait_for(shared.idle)


# the queue


def test_a_burst_on_an_idle_server_is_taken_and_what_then_waits_is_bounded() -> None:
    """--max-queued-requests bounds those that wait, not those that the next step takes."""
    with running("--max-queued-requests", "1", "--max-num-seqs", "8", delay=0.05) as server:
        statuses: list[int] = []

        def ask(tokens: int) -> None:
            statuses.append(server.post("/v1/completions", {"prompt": "a", "max_tokens": tokens})[0])

        burst = [threading.Thread(target=ask, args=(40,)) for _ in range(8)]
        for thread in burst:
            thread.start()
        wait_for(lambda: server.queues()[0] == 8)
        more = [threading.Thread(target=ask, args=(1,)) for _ in range(6)]
        for thread in more:
            thread.start()
        for thread in [*burst, *more]:
            thread.join()
        assert sorted(statuses) == [200] * 9 + [429] * 5
        server.check_balance()


# texts that are too long


def test_a_hopelessly_long_text_is_refused_unread_and_health_answers_meanwhile(shared: Server) -> None:
    """Five megabytes without a space: certain to be too long by its characters alone."""
    text = "x" * 5_000_000
    over = threading.Event()
    seen: list[tuple[int, float]] = []

    def look() -> None:
        while not over.is_set():
            begun = time.monotonic()
            seen.append((shared.get("/health")[0], time.monotonic() - begun))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        chat = {"messages": [{"role": "user", "content": text}]}
        bodies: list[tuple[str, dict[str, Any], str]] = [
            ("/v1/completions", {"prompt": text}, "prompt"),
            ("/v1/completions", {"prompt": ["a", text]}, "prompt"),
            ("/v1/chat/completions", chat, "messages"),
        ]
        for path, body, param in bodies:
            status, answer = shared.post(path, body)
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
            assert answer["error"]["param"] == param
            assert "characters" in answer["error"]["message"]
    finally:
        over.set()
        looking.join()
    assert {status for status, _ in seen} == {200}
    shared.check_quiet()


# names


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/detokenize", {"tokens": [65, 257]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/v1/completions", {"prompt": [257]}, "prompt"),
        ("/v1/completions", {"prompt": "a", "best_of": 65}, "best_of"),
        ("/v1/completions", {"prompt": "a", "n": 65}, "n"),
        ("/v1/completions", {"prompt": "a", "n": 65, "best_of": 65}, "n"),
        ("/v1/completions", {"prompt": "a", "n": 60, "max_tokens": 2000}, "max_tokens"),
        ("/v1/chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens"),
        ("/v1/chat/completions", {"max_completion_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ("/v1/chat/completions", {"max_completion_tokens": 2000, "n": 60}, "max_completion_tokens"),
        ("/v1/chat/completions", {"max_tokens": 0}, "max_tokens"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("/v1/chat/completions", {"best_of": 65}, "best_of"),
        ("/v1/chat/completions", {"tool_choice": "required"}, "tool_choice"),
        ("/v1/chat/completions", {"stream_options": {"include": 1}, "stream": True}, "stream_options.include"),
    ],
)
def test_an_error_names_the_field_that_the_client_sent(shared: Server, path: str, body: Any, param: str) -> None:
    if path.startswith("/v1/chat"):
        body = {"messages": [{"role": "user", "content": "a"}], **body}
    status, answer = shared.post(path, body)
    assert (status, answer["error"]["param"]) == (400, param), answer
    message = answer["error"]["message"]
    assert "prompt_token_ids" not in message
    assert "max_completion_tokens" not in body or " max_tokens" not in message.replace("max_tokens 2000", "")
    shared.check_quiet()


@pytest.mark.parametrize(
    ("message", "param", "said"),
    [
        ({"role": "robot", "content": "a"}, "messages[0].role", "allowed are system, developer, user, assistant, tool"),
        ({"role": 1, "content": "a"}, "messages[0].role", "string"),
        ({"content": "a"}, "messages[0].role", "missing"),
        ({"role": "user", "content": "a", "colour": 1}, "messages[0].colour", "unknown parameter"),
        ({"role": "user"}, "messages[0].content", "no content"),
        ({"role": "user", "content": 1}, "messages[0].content", "string"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0]", "no text"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0]", "only text"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}, "messages[0].content[0].x", "unknown"),
        ({"role": "assistant", "content": "a", "audio": {"id": "1"}}, "messages[0].audio", "not supported"),
        ("hi", "messages[0]", ""),
    ],
)
def test_what_is_wrong_in_a_message_is_named_by_its_place(shared: Server, message: Any, param: str, said: str) -> None:
    status, answer = shared.post("/v1/chat/completions", {"messages": [message], "max_tokens": 1})
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert said in answer["error"]["message"]


def test_messages_of_an_answer_may_come_back_as_they_were(shared: Server) -> None:
    body: dict[str, Any] = {"messages": [{"role": "developer", "content": "be short"}], "max_tokens": 2, "tools": []}
    message = shared.post("/v1/chat/completions", body)[1]["choices"][0]["message"]
    as_openai = {**message, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    for again in (message, as_openai):
        tool = {"role": "tool", "content": "4", "tool_call_id": "1"}
        more = [*body["messages"], again, tool, {"role": "user", "content": "b", "name": "me"}]
        status, answer = shared.post("/v1/chat/completions", {**body, "messages": more})
        assert status == 200, answer
    plain = shared.post("/tokenize", {"messages": [{"role": "system", "content": "be short"}]})[1]["tokens"]
    assert shared.post("/tokenize", {"messages": body["messages"]})[1]["tokens"] == plain
