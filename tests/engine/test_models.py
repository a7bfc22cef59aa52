"""Every architecture against transformers: same logits, same greedy continuation, however the steps are cut."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.models.config import ModelConfig, RopeConfig, config_from_gguf, config_from_hf
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


OPT = {"architectures": ["OPTForCausalLM"], "ffn_dim": 8}
ODD: list[Any] = [None, -1, 0, 1, "x", "", [], ["x"], [None], {}, {"x": 1}, 1.5, 1e30, True, False, 2**63, 10**400]
ODD += [math.nan, math.inf, -math.inf]


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
        (
            {"rope_scaling": {"type": "yarn", "factor": 2}},
            "'type' is 'yarn'; it must be one of default, linear, llama3",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling has no 'factor'"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'; it must be one of silu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "config.json: 4 heads cannot share 3"),
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is 0.5; it must be 1"),
        (
            {"architectures": "MistralForCausalLM"},
            "'architectures' is 'MistralForCausalLM'; it must be a list of names",
        ),
        ({"num_hidden_layers": 0}, "config.json: 'num_hidden_layers' is 0; it must be an integer from 1 to"),
        ({"num_attention_heads": 0}, "'num_attention_heads' is 0; it must be an integer from 1"),
        ({"hidden_size": -64}, "'hidden_size' is -64; it must be an integer from 1"),
        ({"hidden_size": True}, "'hidden_size' is True"),
        ({"num_hidden_layers": 1e30}, "'num_hidden_layers' is 1e[+]30"),
        ({"vocab_size": 10**5000}, "'vocab_size' is an integer of thousands of digits"),
        ({"num_attention_heads": 64}, "64 attention heads do not fit a hidden size of 32"),
        ({"head_dim": 7}, "head_dim is 7; it must be even"),
        ({"rms_norm_eps": "x"}, "'rms_norm_eps' is 'x'; it must be a number above 0"),
        ({"rope_parameters": "x"}, "'rope_parameters' is 'x'; it must be a mapping"),
        ({"rope_scaling": {"type": "linear", "factor": math.inf}}, "'factor' is inf; it must be a number from 1"),
        ({"eos_token_id": "a"}, "'eos_token_id' is 'a'; it must be made of token ids from 0 to 9"),
        ({"eos_token_id": [2, 9999]}, r"'eos_token_id' is \[2, 9999\]; .* as vocab_size is 10"),
        ({"sliding_window": 0}, "'sliding_window' is 0"),
        ({"tie_word_embeddings": "no"}, "'tie_word_embeddings' is 'no'; it must be true or false"),
        ({**OPT, "head_dim": 4}, "hidden_size 32 is not 4 heads of 4"),
    ],
)
def test_what_is_not_supported_is_said(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        config(**changes)


def test_an_end_token_of_the_generation_config_is_refused_in_that_file_s_name() -> None:
    with pytest.raises(ModelLoadError, match=r"^/m/generation_config.json: 'eos_token_id' is 9999"):
        config_from_hf(BASE, {"eos_token_id": 9999}, "/m/config.json")


def test_integers_written_as_floats_are_read() -> None:
    scaling = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    read = config(rope_scaling={**scaling, "original_max_position_embeddings": 8192.0}, head_dim=None)
    assert read.rope.original_max_position == 8192
    assert read.head_dim == 8


def test_damaged_gguf_metadata_is_refused_by_name() -> None:
    sound: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.embedding_length": 32,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 8,
        "llama.block_count": 1,
        "llama.feed_forward_length": 8,
        "llama.context_length": 100,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.attention.sliding_window": 50,
        "llama.expert_count": 0,
        "llama.rope.freq_base": 1e4,
        "llama.rope.dimension_count": 8,
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 2.0,
        "llama.rope.scale_linear": 2.0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 3,
    }
    shapes = {"token_embd.weight": (10, 32)}
    assert config_from_gguf(sound, shapes, (), "m.gguf").eos_token_ids == (2, 3)
    for key in sound:
        for odd in ODD:
            try:
                said = repr(config_from_gguf({**sound, key: odd}, shapes, (), "m.gguf"))
            except ModelLoadError as error:
                said = str(error)
            assert said.startswith(("m.gguf", "ModelConfig("))
    for divisors in ((1.0,) * 3, (1.0, 1.0, 0.0, 1.0), (math.nan,) * 4):
        with pytest.raises(ModelLoadError, match=r"m.gguf: tensor 'rope_freqs.weight' must hold 4 positive"):
            config_from_gguf(sound, shapes, divisors, "m.gguf")


def test_old_spellings_of_rope_are_read() -> None:
    old = config(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})
    assert old.rope == RopeConfig(5e5, "linear", 2.0)
    assert old.max_position == 200
