"""The embedded model against transformers: same logits, and the same greedy tokens on real prompts."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import LLM, SamplingParams
from engine.demo import sample_prompts
from engine.models.load import locate_model

pytestmark = pytest.mark.model

MODEL = "smollm2-135m"
PROMPTS = 20


@pytest.fixture(scope="module")
def reference() -> Any:
    """transformers' own reading of the file, in float32."""
    from transformers import AutoModelForCausalLM, GgufConfig

    file = locate_model(MODEL).path
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        ).eval()


@pytest.fixture(scope="module")
def llm() -> LLM:
    """The engine on a pool that holds about three of the prompts at a time."""
    return LLM(
        MODEL,
        dtype="float32",
        num_gpu_blocks_override=32,
        num_cpu_blocks_override=8,
        max_num_batched_tokens=64,
        disable_log_stats=True,
    )


def logits_of(reference: Any, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([tokens])).logits[0]


def test_greedy_output_is_that_of_transformers_token_for_token(reference: Any, llm: LLM) -> None:
    """Greedy decoding is fixed by its prefix, so one reference run over prompt and output checks every token of it."""
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=1)
    chats = [[{"role": "user", "content": prompt}] for prompt in sample_prompts(PROMPTS)]
    outputs = llm.chat(chats, params, use_tqdm=False)
    assert llm.core.stats.preemptions > 0, "the pool is not tight enough to try anything"
    for output in outputs:
        prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
        logits = logits_of(reference, prompt + answer[:-1])[len(prompt) - 1 :]
        assert answer == logits.argmax(-1).tolist()
        logprobs = logits.double().log_softmax(-1)
        for position, (token, found) in enumerate(zip(answer, output.outputs[0].logprobs or [], strict=True)):
            expected = logprobs[position, token].item()
            assert abs(found[token].logprob - expected) <= 1e-3 * abs(logits[position]).max()


def test_logits_agree_with_transformers_to_a_thousandth(
    reference: Any, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Tensor] = []
    compute = llm.core.runner.model.compute_logits  # type: ignore[attr-defined]
    monkeypatch.setattr(
        llm.core.runner.model, "compute_logits", lambda hidden: seen.append(compute(hidden)) or seen[-1]
    )  # type: ignore[attr-defined]
    prompt = llm.get_tokenizer().encode(sample_prompts(2)[1])
    output = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)[0]
    expected = logits_of(reference, prompt + output.outputs[0].token_ids[:-1])[len(prompt) - 1 :]
    assert len(seen) == 4
    for ours, theirs in zip(seen, expected, strict=True):
        assert (ours[-1] - theirs).abs().max() <= 1e-3 * theirs.abs().max()


def test_it_knows_the_capital_of_france(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    output = llm.chat(question, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)[0].outputs[0]
    assert output.text == "The capital of France is Paris."
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
