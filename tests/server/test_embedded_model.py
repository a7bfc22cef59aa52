"""`lawful serve` alone: the embedded model, as a user meets it."""

from __future__ import annotations

import openai
import pytest

from tests.server.servers import request
from tests.server.test_load import serving

pytestmark = [pytest.mark.timeout(300), pytest.mark.model]


def test_serve_without_a_model_answers_with_the_embedded_one() -> None:
    flags = ["--max-model-len", "512", "--max-num-batched-tokens", "256"]
    question: list = [{"role": "user", "content": "What is the capital of France?"}]
    with serving(["-m", "engine", "serve", *flags]) as (url, _, log):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            model = client.models.list().data[0].id
            assert model == "smollm2-135m"
            asked = {"model": model, "messages": question, "max_tokens": 16, "temperature": 0}
            whole = client.chat.completions.create(**asked)
            assert whole.choices[0].message.content == "The capital of France is Paris."
            assert whole.choices[0].finish_reason == "stop"
            chunks = client.chat.completions.create(**asked, stream=True)
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            assert streamed == whole.choices[0].message.content
        status, answer, _ = request(f"{url}/tokenize", {"messages": question})
        assert (status, answer["count"]) == (200, whole.usage.prompt_tokens if whole.usage else 0)
        assert "Traceback" not in log.read_text()
