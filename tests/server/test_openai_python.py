"""The official `openai` client for Python against a real server process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.servers import Server, wait_for

MODEL = "smollm2-135m"
HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(shared: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("gpt-4")


def test_a_chat_is_answered(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=6, seed=1)
    [choice] = answer.choices
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert (choice.message.role, len(choice.message.content or ""), choice.finish_reason) == ("assistant", 6, "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 6
    assert answer.usage.prompt_tokens == len("<user>hello</user><assistant>")


def test_a_chat_streams_what_it_answers_whole(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 20, "seed": 7}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_completion_of_four_branches_streams_each_of_them(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": "once upon", "n": 4, "max_tokens": 12, "seed": 3}
    whole = client.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in whole.choices}) == 4
    texts = [""] * 4
    reasons = {}
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == dict.fromkeys(range(4), "length")
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (9, 48)


def test_chat_with_four_branches(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, n=4, max_tokens=5, seed=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20


def test_logprobs_of_a_chat_say_the_tokens_and_their_bytes(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 5, "logprobs": True, "top_logprobs": 3, "seed": 5}
    [choice] = client.chat.completions.create(**asked).choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    for entry in choice.logprobs.content:
        assert bytes(entry.bytes or []).decode() == entry.token
        assert entry.logprob < 0
        assert len(entry.top_logprobs) == 3
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (top.logprob for top in entry.top_logprobs), reverse=True
        )
    streamed = []
    for chunk in client.chat.completions.create(**asked, stream=True):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content or []
    assert streamed == choice.logprobs.content


def test_logprobs_of_a_completion_have_offsets(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": "x", "max_tokens": 6, "logprobs": 2, "seed": 5}
    [choice] = client.completions.create(**asked).choices
    assert choice.logprobs is not None
    assert choice.logprobs.text_offset == [0, 1, 2, 3, 4, 5]
    assert "".join(choice.logprobs.tokens or []) == choice.text
    assert all(2 <= len(top) <= 3 for top in choice.logprobs.top_logprobs or [])
    offsets = []
    for chunk in client.completions.create(**asked, stream=True):
        offsets += (chunk.choices[0].logprobs and chunk.choices[0].logprobs.text_offset) or []
    assert offsets == [0, 1, 2, 3, 4, 5]


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    text = client.completions.create(model=MODEL, prompt="y", max_tokens=40, seed=11).choices[0].text
    stop = text[20:23]
    cut = text.index(stop)
    for stream in (False, True):
        answer: Any = client.completions.create(
            model=MODEL, prompt="y", max_tokens=40, seed=11, stop=[stop, "\u20ac"], stream=stream
        )
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        assert "".join(choice.text for choice in choices) == text[:cut]
        assert choices[-1].finish_reason == "stop"
        assert choices[-1].stop_reason == stop


def test_prompts_in_every_form_and_several_at_once(client: openai.OpenAI) -> None:
    same: Any = {"model": MODEL, "max_tokens": 5, "temperature": 0}
    one = client.completions.create(prompt="abc", **same).choices[0].text
    assert client.completions.create(prompt=list(b"abc"), **same).choices[0].text == one
    several = client.completions.create(prompt=["abc", "d", "abc"], n=2, **same)
    assert [choice.index for choice in several.choices] == list(range(6))
    assert [several.choices[i].text for i in (0, 1, 4, 5)] == [one] * 4
    assert client.completions.create(prompt=[list(b"abc")], **same).choices[0].text == one
    texts = [""] * 3
    for chunk in client.completions.create(prompt=["abc", "d", "abc"], stream=True, **same):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [one, several.choices[2].text, one]


def test_echo_gives_the_prompt_before_the_text(client: openai.OpenAI) -> None:
    same: Any = {"model": MODEL, "max_tokens": 5, "temperature": 0}
    plain = client.completions.create(prompt="abc", **same).choices[0].text
    assert client.completions.create(prompt="abc", echo=True, **same).choices[0].text == "abc" + plain
    stream = client.completions.create(prompt="abc", echo=True, stream=True, **same)
    assert "".join(chunk.choices[0].text for chunk in stream) == "abc" + plain


def test_best_of_returns_the_likeliest(client: openai.OpenAI) -> None:
    same: Any = {"model": MODEL, "prompt": "abc", "max_tokens": 5, "seed": 4, "logprobs": 0}
    all_of_them = client.completions.create(n=4, **same).choices

    def total(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs)

    best = client.completions.create(n=1, best_of=4, **same).choices
    assert [choice.text for choice in best] == [max(all_of_them, key=total).text]


def test_logit_bias_forces_a_token(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="abc", max_tokens=4, temperature=0, logit_bias={str(ord("Q")): 100}
    )
    assert answer.choices[0].text == "QQQQ"


def test_errors_arrive_as_the_right_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=MODEL, prompt="a", temperature=-1)
    assert bad.value.param == "temperature"
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=HELLO)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt="a" * 3000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="unknown parameter: colour"):
        client.completions.create(model=MODEL, prompt="a", extra_body={"colour": 1})


def test_closing_a_stream_aborts_the_request(client: openai.OpenAI, shared: Server) -> None:
    wait_for(shared.idle)
    before = shared.metrics()['lawful:request_success_total{finished_reason="abort"}']
    stream = client.completions.create(model=MODEL, prompt="a", max_tokens=2000, stream=True)
    for _, _chunk in zip(range(3), stream, strict=False):
        pass
    stream.close()
    wait_for(shared.idle)
    assert shared.metrics()['lawful:request_success_total{finished_reason="abort"}'] == before + 1
    shared.check_balance()
    shared.check_quiet()


async def _many(url: str) -> list[str]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        import asyncio

        answers = await asyncio.gather(
            *(client.completions.create(model=MODEL, prompt=f"{i}", max_tokens=5, seed=i % 3) for i in range(30))
        )
        return [answer.choices[0].text for answer in answers]


def test_many_at_once_through_the_asynchronous_client(shared: Server) -> None:
    import asyncio

    texts = asyncio.run(_many(shared.url))
    assert all(len(text) == 5 for text in texts)
