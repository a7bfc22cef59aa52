"""Every architecture against transformers: same logits, same greedy continuation, however the steps are cut."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.models.config import ModelConfig, RopeConfig, config_from_hf
from engine.models.errors import ModelLoadError
from engine.models.rope import inverse_frequencies
from engine.runner import ModelRunner
from tests.engine.paged import CHECKPOINTS, make_checkpoint, model_runner, request, row, run

TABLE = [17, 3, 38, 9, 0, 25, 11, 30]
PROMPT = [5, 88, 14, 3, 77, 41, 9, 62, 100, 23, 7]


@pytest.fixture(scope="module", params=list(CHECKPOINTS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ModelRunner]:
    """A transformers model and a runner of the same checkpoint."""
    reference = make_checkpoint(request.param)
    path = tmp_path_factory.mktemp(request.param)
    reference.save_pretrained(path)
    return reference, model_runner(path)


def reference_logits(model: Any, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


def reference_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def same(actual: Tensor, expected: Tensor) -> None:
    assert (actual - expected).abs().max() <= 1e-3 * expected.abs().max()


def test_logits_of_every_prompt_position(pair: tuple[Any, ModelRunner]) -> None:
    reference, runner = pair
    expected = reference_logits(reference, PROMPT)
    for end in range(1, len(PROMPT) + 1):
        run(runner, state := request(PROMPT), scheduled=[row(state, 0, end, TABLE, 4, draws=(0,))])
        same(runner.sampler.logits[0], expected[end - 1])


def test_greedy_continuation_through_chunks_swaps_and_copies(pair: tuple[Any, ModelRunner]) -> None:
    reference, runner = pair
    expected = reference_greedy(reference, PROMPT, 14)
    state, other = request(PROMPT), request(PROMPT[3:8], "other")
    table, cuts = list(TABLE), [0, 1, 6, 8, len(PROMPT)]
    for start, end in pairwise(cuts):
        draws = (0,) if end == len(PROMPT) else ()
        company = row(other, 0, 5, [39, 20], 4)
        run(runner, state, other, scheduled=[company, row(state, start, end, table, 4, draws=draws)])
    for step in range(13):
        position = len(PROMPT) + step
        moves: dict[str, Any] = {}
        if step == 3:  # out and in again, elsewhere and in another order
            held = -(-position // 4)
            run(runner, state, blocks_to_swap_out=[(block, i) for i, block in enumerate(table[:held])])
            runner.cache.device_pool[:, :, table[:held]] = float("nan")
            table = [12, 33, 4, 19, 28, 1, 2, 7][:held] + table[held:]
            moves["blocks_to_swap_in"] = [(i, block) for i, block in enumerate(table[:held])]
        if step == 6:  # the partly filled block is copied before it is written
            moves["blocks_to_copy"] = [(table[position // 4], 36)]
            table[position // 4] = 36
        decode = row(state, position, position + 1, table, 4, draws=(0,))
        run(runner, state, scheduled=[decode], **moves)
    assert state.outputs[0] == expected


def test_saved_in_half_precision_it_loads_in_float32(tmp_path: Path) -> None:
    model = make_checkpoint("llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    runner = model_runner(tmp_path, dtype="float32")
    assert runner.model_config.dtype == torch.bfloat16
    run(runner, state := request(PROMPT), scheduled=[row(state, 0, len(PROMPT), TABLE, 4, draws=(0,))])
    same(runner.sampler.logits[0], reference_logits(model.float(), PROMPT)[-1])


@pytest.mark.parametrize("name", ["llama", "opt"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types_stay_near_float32(name: str, dtype: str, tmp_path: Path) -> None:
    model = make_checkpoint(name)
    model.save_pretrained(tmp_path)
    runner = model_runner(tmp_path, dtype=dtype)
    run(runner, state := request(PROMPT), scheduled=[row(state, 0, len(PROMPT), TABLE, 4, draws=(0,))])
    expected = reference_logits(model, PROMPT)[-1]
    assert (runner.sampler.logits[0] - expected).abs().max() <= 0.06 * expected.abs().max()


def test_llama3_scaling_keeps_short_waves_and_divides_long_ones() -> None:
    plain = inverse_frequencies(RopeConfig(theta=500000.0), 128)
    rope = RopeConfig(500000.0, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    scaled = inverse_frequencies(rope, 128)
    waves = 2 * torch.pi / plain
    assert torch.equal(scaled[waves < 8192 / 4], plain[waves < 8192 / 4])
    torch.testing.assert_close(scaled[waves > 8192], plain[waves > 8192] / 8)
    between = (waves > 8192 / 4) & (waves < 8192)
    assert between.any()
    assert ((scaled[between] < plain[between]) & (scaled[between] > plain[between] / 8)).all()


BASE = {
    "architectures": ["MistralForCausalLM"],
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 10,
    "intermediate_size": 8,
    "max_position_embeddings": 100,
}


def config(**changes: Any) -> ModelConfig:
    return config_from_hf({**BASE, **changes})


def test_end_of_sequence_ids_of_both_files_are_kept() -> None:
    assert config_from_hf({**BASE, "eos_token_id": 2}, {"eos_token_id": [7, 2]}).eos_token_ids == (7, 2)
    assert config(eos_token_id=None).eos_token_ids == ()


def test_a_sliding_window_limits_the_context() -> None:
    windowed = config(sliding_window=40)
    assert windowed.check_max_model_len(None) == 40
    assert windowed.check_max_model_len(40) == 40
    with pytest.raises(ValueError, match=r"sliding window of 40 .* max_model_len <= 40"):
        windowed.check_max_model_len(41)
    assert config(sliding_window=400).check_max_model_len(100) == 100
    qwen = config(architectures=["Qwen2ForCausalLM"], sliding_window=40, use_sliding_window=False)
    assert qwen.check_max_model_len(None) == 100


def test_max_model_len_stays_within_the_positions() -> None:
    assert config().check_max_model_len(None) == 100
    for wanted in (101, 0, -1):
        with pytest.raises(ValueError, match="1 to 100"):
            config().check_max_model_len(wanted)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; supported: LlamaForCausalLM"),
        ({"architectures": None, "model_type": "bert"}, "none named .*bert"),
        ({"hidden_size": None}, "config.json has no 'hidden_size'"),
        ({"vocab_size": "many"}, "'vocab_size' is 'many'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "rope type 'yarn'.*default, linear, llama3"),
        ({"rope_scaling": {"type": "linear"}}, "rope scaling has no 'factor'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_is_not_supported_is_said(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        config(**changes)


def test_old_spellings_of_rope_are_read() -> None:
    old = config(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})
    assert old.rope == RopeConfig(5e5, "linear", 2.0)
    assert old.max_position == 200
