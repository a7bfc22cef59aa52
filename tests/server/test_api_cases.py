"""Field cases of the API as a client sees them: statuses, bodies, streams."""

from __future__ import annotations

import concurrent.futures
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.servers import Server, request, running, wait_for

pytestmark = pytest.mark.timeout(120)

GOOD = {"prompt": "neighbour", "max_tokens": 30, "seed": 9}


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """max_model_len 16, blocks of 4, as in case 50."""
    with running("--max-model-len", "16", "--block-size", "4", "--num-gpu-blocks-override", "16") as server:
        yield server
        server.check_quiet()


def complete(server: Server, **body: Any) -> tuple[int, Any]:
    return server.post("/v1/completions", body)


def events(server: Server, path: str, **body: Any) -> list[Any]:
    """Parsed events of a stream, [DONE] included as a string."""
    status, text, headers = request(server.url + path, {**body, "stream": True})
    assert status == 200, text
    assert headers["content-type"].startswith("text/event-stream")
    assert text.endswith("data: [DONE]\n\n")
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


# 49


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize(
    ("given", "plain", "echoed", "tokens"),
    [
        ({"max_tokens": 0}, 400, 200, 0),
        ({"max_tokens": None}, 200, 200, 16),
        ({}, 200, 200, 16),
        ({"max_tokens": 1}, 200, 200, 1),
        ({"max_tokens": -1}, 400, 400, 0),
    ],
)
def test_max_tokens_zero_null_absent_one_and_minus_one(
    shared: Server, given: Any, plain: int, echoed: int, tokens: int, logprobs: Any, echo: bool, stream: bool
) -> None:
    """Case 49.  Logprobs of prompt tokens are not computed, so echo with logprobs is a stated 400."""
    before = shared.metrics()["lawful:requests_received_total"]
    body = {"prompt": "abc", "echo": echo, "logprobs": logprobs, "seed": 1, **given}
    expected = 400 if echo and logprobs is not None else echoed if echo else plain
    status, answer, _ = request(f"{shared.url}/v1/completions", {**body, "stream": stream})
    assert status == expected
    if expected == 400:
        assert answer["error"]["param"] in ("max_tokens", "logprobs")
        assert shared.metrics()["lawful:requests_received_total"] == before, "nothing reached the engine"
    elif not stream:
        [choice] = answer["choices"]
        assert choice["finish_reason"] == "length"
        assert choice["text"].startswith("abc" if echo else "")
        assert len(choice["text"]) == tokens + 3 * echo
        assert answer["usage"]["completion_tokens"] == tokens
    assert shared.idle() or wait_for(shared.idle)


# 50


def test_exact_limits_around_max_model_len(small: Server) -> None:
    """Case 50, each followed by a request that must succeed."""
    for p, m, echo, status, made in [
        (15, 5, False, 200, 1),
        (12, 4, False, 200, 4),
        (16, 1, False, 400, 0),
        (16, 0, True, 200, 0),
        (17, 0, True, 400, 0),
        (17, 1, False, 400, 0),
    ]:
        got, answer = complete(small, prompt=[65] * p, max_tokens=m, echo=echo)
        assert got == status, answer
        if status == 200:
            assert answer["usage"]["completion_tokens"] == made
            assert answer["choices"][0]["finish_reason"] == "length"
        else:
            assert answer["error"]["code"] == "context_length_exceeded"
            assert str(p) in answer["error"]["message"]
        follower, _ = complete(small, prompt=[65] * 4, max_tokens=1)
        assert follower == 200


def test_a_prompt_far_beyond_every_limit_is_refused_at_once(small: Server) -> None:
    status, answer = complete(small, prompt=[65] * 1_000_000, max_tokens=1)
    assert status == 400
    assert answer["error"]["code"] == "context_length_exceeded"


# 51


def test_a_prompt_longer_than_the_budget_without_chunking_never_starts() -> None:
    """Case 51: the configuration is refused."""
    server = ["--max-num-batched-tokens", "8", "--max-num-seqs", "4", "--max-model-len", "32"]
    with pytest.raises(AssertionError, match=r"max_num_batched_tokens \(8\) is below max_model_len \(32\)"):
        Server(*server, "--no-enable-chunked-prefill")
    with running(*server, "--enable-chunked-prefill") as chunked:
        status, answer = complete(chunked, prompt=[70] * 12, max_tokens=4, return_token_ids=True)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 4)
        assert chunked.metrics()["lawful:engine_steps_total"] == 5, "two for the prompt, with the first token"


# 53


def test_a_request_id_in_use_is_refused_and_its_owner_does_not_notice(shared: Server) -> None:
    """Case 53."""
    alone = complete(shared, prompt="owner", max_tokens=300, seed=5)[1]["choices"]
    got: list[Any] = []
    thread = threading.Thread(
        target=lambda: got.append(
            shared.post("/v1/completions", {"prompt": "owner", "max_tokens": 300, "seed": 5, "request_id": "x"})
        )
    )
    thread.start()
    wait_for(lambda: shared.queues()[0] == 1)
    status, answer = complete(shared, prompt="other", max_tokens=3, request_id="x")
    assert status == 400
    assert answer["error"]["code"] == "duplicate_request_id"
    assert complete(shared, prompt="other", max_tokens=3, request_id="x_1")[0] == 200
    status, answer = shared.post("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2}, X_Request_Id="x-0")
    assert status == 200, "parts of a request have ids that nobody can ask for"
    thread.join()
    assert got[0][0] == 200
    assert got[0][1]["id"] == "cmpl-x"
    assert got[0][1]["choices"] == alone
    assert complete(shared, prompt="third", max_tokens=3, request_id="x")[0] == 200, "the id is free again"
    assert all(value >= 0 for value in shared.metrics().values())
    shared.check_balance()


def test_request_ids_are_honoured_and_made_up_ones_are_unique(shared: Server) -> None:
    _, answer, headers = request(f"{shared.url}/v1/completions", {"prompt": "a"}, {"X-Request-Id": "mine-1"})
    assert (answer["id"], headers["x-request-id"]) == ("cmpl-mine-1", "mine-1")
    ids = {complete(shared, prompt="a", max_tokens=1)[1]["id"] for _ in range(20)}
    assert len(ids) == 20
    for bad in ("", "has space", "x" * 257, "ümlaut", "new\nline"):
        assert complete(shared, prompt="a", request_id=bad)[0] == 400
    assert request(f"{shared.url}/v1/completions", {"prompt": "a"}, {"X-Request-Id": "two words"})[0] == 400


# 54

NAN, INF = float("nan"), float("inf")
BAD: list[tuple[str, Any]] = [
    ("temperature", NAN),
    ("temperature", -1),
    ("temperature", INF),
    ("temperature", "hot"),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_k", -2),
    ("n", 0),
    ("n", -1),
    ("n", 1.5),
    ("n", True),
    ("n", 100_000_000),
    ("best_of", 0),
    ("presence_penalty", 9),
    ("frequency_penalty", -9),
    ("repetition_penalty", 9),
    ("logprobs", 10**6),
    ("logprobs", -1),
    ("seed", 2**70),
    ("stop", [""]),
    ("stop", ["x"] * 10_000),
    ("stop", [1]),
    ("stop", {"a": 1}),
    ("max_tokens", "5"),
    ("max_tokens", 1e30),
    ("min_tokens", 31),
    ("min_p", 2),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"1": 1000}),
    ("logit_bias", {"257": 5}),
    ("logit_bias", {"-1": 5}),
    ("stop_token_ids", [257]),
    ("stop_token_ids", [-1]),
    ("allowed_token_ids", [10**9]),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [5] * 2_000_000),
    ("stop_token_ids", [5] * 2_000_000),
    ("logit_bias", {str(10**6 + i): 1 for i in range(300)}),
    ("prompt", [-1]),
    ("prompt", [257]),
    ("prompt", [2**40]),
    ("prompt", []),
    ("prompt", ""),
    ("prompt", [[]]),
    ("prompt", ["a", [1]]),
    ("prompt", None),
    ("prompt", "\ud800"),
    ("prompt", {"text": "a"}),
    ("prompt", ["a"] * 5000),
    ("suffix", "tail"),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("priority", 1),
    ("colour", "red"),
    ("echo", 1),
]


def test_a_bad_value_is_a_400_that_names_the_field_and_the_neighbour_does_not_notice(shared: Server) -> None:
    """Cases 43 and 54: a good request is under way all the time."""
    alone = complete(shared, **GOOD)[1]["choices"]
    neighbours: list[Any] = []
    over = threading.Event()

    def go_on() -> None:
        while not over.is_set():
            neighbours.append(complete(shared, **GOOD))

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        for field, value in BAD:
            status, answer = complete(shared, **{**GOOD, field: value})
            assert status == 400, (field, value, answer)
            assert answer["error"]["param"] == field, (field, value, answer)
            assert set(answer["error"]) == {"message", "type", "param", "code"}
            assert answer["error"]["type"] == "invalid_request_error"
    finally:
        over.set()
        thread.join()
    assert neighbours
    assert all(answer["choices"] == alone for _, answer in neighbours)
    shared.check_balance()
    shared.check_quiet()


CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", []),
        ("messages", "hi"),
        ("messages", [{"content": "no role"}]),
        ("messages", [{"role": "user"}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        ("messages", [{"role": "user", "content": "\ud800"}]),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("response_format", {"type": "json_object"}),
        ("top_logprobs", 3),
        ("chat_template", "{{ 1 }}"),
        ("chat_template_kwargs", {"messages": []}),
        ("continue_final_message", True),
        ("logprobs", 3),
        ("max_tokens", 0),
        ("modalities", ["audio"]),
        ("messages", [{"role": "user", "content": "a"}] * 100_000),
        ("messages", [{"role": "robot", "content": "a"}] * 100_000),
        ("echo", True),
    ],
)
def test_bad_chats_are_refused_by_name(shared: Server, field: str, value: Any) -> None:
    status, answer = shared.post("/v1/chat/completions", {**CHAT, field: value})
    assert (status, answer["error"]["param"].partition("[")[0]) == (400, field), answer
    shared.check_quiet()


def test_fields_that_change_nothing_are_ignored(shared: Server) -> None:
    extra = {"user": "me", "store": False, "metadata": {"a": "b"}, "service_tier": "auto", "parallel_tool_calls": True}
    more = {"tools": [], "tool_choice": "none", "reasoning_effort": "low", "response_format": {"type": "text"}}
    assert shared.post("/v1/chat/completions", {**CHAT, **extra, **more})[0] == 200
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    status, answer = shared.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": parts, "name": "x"}], "max_tokens": 1}
    )
    assert status == 200
    assert answer["usage"]["prompt_tokens"] == len("<user>a\nb</user><assistant>")


# 56


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
@pytest.mark.parametrize("more", [{}, {"n": 2}, {"stop": ["zz", "~"]}])
def test_usage_in_streams_comes_once_and_last_and_only_if_asked_for(shared: Server, options: Any, more: Any) -> None:
    """Case 56."""
    body = {"prompt": [66] * 30, "max_tokens": 9, "seed": 2, **more}
    whole = complete(shared, **body)[1]["usage"]
    chunks = events(shared, "/v1/completions", **body, **({} if options is None else {"stream_options": options}))
    assert chunks.pop() == "[DONE]"
    if options == {"include_usage": True}:
        last = chunks.pop()
        assert (last["choices"], last["usage"]) == ([], whole)
        assert whole["prompt_tokens"] == 30
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert not any("usage" in chunk for chunk in chunks)
    assert all(chunk["choices"] for chunk in chunks)


def test_no_chunk_is_sent_for_pieces_of_a_prompt_or_for_a_preemption() -> None:
    """Case 56: T=8 with p=30, m=1; and a pool so small that requests are preempted."""
    flags = ["--max-num-batched-tokens", "8", "--max-num-seqs", "4", "--block-size", "4", "--max-model-len", "64"]
    with running(*flags, "--num-gpu-blocks-override", "20", "--num-cpu-blocks-override", "4") as server:
        body: dict[str, Any] = {"prompt": [66] * 30, "max_tokens": 1, "stream_options": {"include_usage": True}}
        chunks = events(server, "/v1/completions", **body)
        assert [len(chunk["choices"]) for chunk in chunks[:-1]] == [1, 0]
        assert chunks[1]["usage"]["completion_tokens"] == 1

        def stream(i: int) -> list[Any]:
            asked = {"prompt": [66 + i] * 8, "n": 2, "max_tokens": 24, "seed": i}
            return events(server, "/v1/completions", **asked, stream_options={"include_usage": True})

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for chunks in pool.map(stream, range(4)):
                assert chunks[-2]["usage"]["completion_tokens"] == 48
                assert chunks[-2]["usage"]["prompt_tokens"] == 8
        assert server.metrics()["lawful:num_preemptions_total"] > 0
        server.check_balance()
        server.check_quiet()


# 57


def test_characters_of_several_tokens_are_sent_whole() -> None:
    """Case 57: F0 9F 98 80 and then half of it; after a prompt that ends inside a character; with a stop string."""
    data = "a😀\ufffd!".encode() + "😀".encode()[:2]
    with running(script=[*data, 65]) as server:
        for prompt in ("hi", [*b"price ", *"€".encode()[:2]]):
            body: dict[str, Any] = {"prompt": prompt, "max_tokens": len(data), "temperature": 0}
            whole = complete(server, **body)[1]["choices"][0]["text"]
            assert whole == "a😀\ufffd!\ufffd"
            chunks = events(server, "/v1/completions", **body)[:-1]
            texts = [chunk["choices"][0]["text"] for chunk in chunks]
            assert "".join(texts) == whole
            assert all(texts), "no chunk for half a character"
            assert sum(text.count("\ufffd") for text in texts) == 2, "none where a character was unfinished"
            stopped = complete(server, **body, stop=["😀"])[1]["choices"][0]
            assert (stopped["text"], stopped["stop_reason"]) == ("a", "😀")
            chunks = events(server, "/v1/completions", **body, stop=["😀x"])[:-1]
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole
        server.check_quiet()


def test_an_unfinished_character_of_the_prompt_is_context_and_no_output(shared: Server) -> None:
    """Case 57: a prompt that ends inside a character."""
    body: dict[str, Any] = {"prompt": [*b"price ", *"€".encode()[:2]], "max_tokens": 5, "seed": 1}
    text = complete(shared, **body)[1]["choices"][0]["text"]
    chunks = events(shared, "/v1/completions", **body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == text
    assert "\ufffd" not in text
    assert len(text) == 5


# the tokenizer's endpoints, and what is around


def test_tokenize_and_detokenize(shared: Server) -> None:
    status, answer = shared.post("/tokenize", {"prompt": "aä", "return_token_strs": True})
    assert (status, answer["tokens"], answer["count"]) == (200, [97, 195, 164], 3)
    assert answer["max_model_len"] == 2048
    assert len(answer["token_strs"]) == 3
    assert shared.post("/detokenize", {"tokens": answer["tokens"]}) == (200, {"prompt": "aä"})
    status, answer = shared.post("/tokenize", {"messages": CHAT["messages"], "add_generation_prompt": False})
    assert bytes(answer["tokens"]).decode() == "<user>hi</user>"
    assert shared.post("/tokenize", {})[0] == 400
    assert shared.post("/detokenize", {"tokens": [257]})[0] == 400


def test_version_health_and_unknown_paths(shared: Server) -> None:
    import engine

    assert shared.get("/version") == (200, {"version": engine.__version__})
    assert shared.get("/health") == (200, {"status": "ok"})
    status, answer = shared.get("/v1/nothing")
    assert (status, answer["error"]["type"]) == (404, "invalid_request_error")
    assert shared.get("/v1/completions")[0] == 405


def test_keys_names_and_templates() -> None:
    flags = ["--api-key", "secret", "--api-key", "other", "--served-model-name", "a", "b/c"]
    with running(*flags, "--chat-template", "{% for m in messages %}[{{ m.content }}]{% endfor %}") as server:
        assert server.get("/v1/models")[0] == 401
        status, answer = server.post("/v1/completions", {"prompt": "x"}, Authorization="Bearer wrong")
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert server.post("/tokenize", {"prompt": "x"})[0] == 401
        assert server.get("/health")[0] == server.get("/metrics")[0] == 200
        for key in ("secret", "other"):
            status, models = server.get("/v1/models", Authorization=f"Bearer {key}")
            assert [model["id"] for model in models["data"]] == ["a", "b/c"]
        key = {"Authorization": "Bearer secret"}
        assert server.get("/v1/models/b/c", **key)[0] == 200
        status, answer = server.post("/v1/chat/completions", {**CHAT, "model": "b/c"}, **key)
        assert (status, answer["model"], answer["usage"]["prompt_tokens"]) == (200, "b/c", len("[hi]"))
        assert server.post("/v1/completions", {"prompt": "x", "model": "smollm2-135m"}, **key)[0] == 404
        assert server.get("/debug/scheduler", **key)[0] == 404, "it is opt-in"
        assert server.get("/ui")[0] == 404


def test_a_trusted_request_brings_its_own_template() -> None:
    with running("--trust-request-chat-template") as server:
        status, answer = server.post("/v1/chat/completions", {**CHAT, "chat_template": "abc"})
        assert (status, answer["usage"]["prompt_tokens"]) == (200, 3)
        status, answer = server.post("/v1/chat/completions", {**CHAT, "chat_template": "{% broken"})
        assert (status, answer["error"]["param"]) == (400, "messages")
