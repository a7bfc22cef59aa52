"""`LLM`: prompts in every spelling, results in their order, and clear errors for everything that cannot be."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, EngineArgs, SamplingParams
from engine.errors import (
    ConfigError,
    InvalidParameterError,
    InvalidPromptError,
    ModelLoadError,
    RefusedError,
    TokenizerError,
)
from engine.tokenizer import ByteTokenizer
from tests.oracle import World

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)
SHORT = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "eos_token_id": 2,
}


def byte_world(**more: Any) -> World:
    tokenizer = ByteTokenizer([*(bytes([i]) for i in range(256)), "<eos>"], chat_template=TEMPLATE)
    return World(**{"gpu": 64, "cpu": 16, "tokenizer": tokenizer, "length": 128, **more})  # type: ignore[arg-type]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory that is a model as far as load_format="dummy" looks."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def dummy(path: Path, **more: Any) -> LLM:
    return LLM(
        str(path), **{"load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu", "block_size": 4, **more}
    )


# prompts


def test_prompts_may_be_text_ids_or_mappings_alone_or_in_lists() -> None:
    llm = byte_world().llm()
    expected = llm.generate("hello", SHORT, use_tqdm=False)[0].outputs[0].token_ids
    for prompts in (
        "hello",
        ["hello"],
        list(b"hello"),
        [list(b"hello")],
        tuple(b"hello"),
        {"prompt": "hello"},
        [{"prompt_token_ids": list(b"hello")}],
        [{"prompt_token_ids": list(b"hello"), "prompt": "shown"}],
    ):
        [output] = llm.generate(prompts, SHORT, use_tqdm=False)
        assert output.outputs[0].token_ids == expected
        assert output.prompt_token_ids == list(b"hello")
        assert output.finished
        assert output.error is None
    assert output.prompt == "shown"
    [output] = llm.generate(prompt_token_ids=[list(b"hello")], sampling_params=SHORT, use_tqdm=False)
    assert (output.prompt, output.outputs[0].token_ids) == (None, expected)
    assert llm.generate([], SHORT, use_tqdm=False) == []
    assert llm.core.has_unfinished_requests() is False


def test_results_come_in_the_order_of_the_prompts_each_with_its_own_parameters() -> None:
    world = byte_world(gpu=12, cpu=4)
    params = [SamplingParams(max_tokens=m, n=n, ignore_eos=True, seed=m) for m, n in [(30, 1), (2, 3), (17, 2), (1, 1)]]
    outputs = world.llm().generate(["aaaa", "bb", "cccccc", "d"], params, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["aaaa", "bb", "cccccc", "d"]
    assert [[len(c.token_ids) for c in output.outputs] for output in outputs] == [[30], [2] * 3, [17] * 2, [1]]
    assert [int(output.request_id) for output in outputs] == [0, 1, 2, 3]
    assert world.core.stats.preemptions > 0
    world.check_drained()


def test_best_of_returns_the_best_n_in_order() -> None:
    [output] = byte_world().llm().generate("x", SamplingParams(n=2, best_of=5, max_tokens=6, seed=1), use_tqdm=False)
    assert [c.index for c in output.outputs] == [0, 1]
    assert output.outputs[0].cumulative_logprob >= output.outputs[1].cumulative_logprob


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        ({}, InvalidPromptError, "give prompts or prompt_token_ids"),
        ({"prompts": "a", "prompt_token_ids": [1]}, InvalidPromptError, "not both"),
        ({"prompts": 5}, InvalidPromptError, "prompts is a int; it must be text, token ids or a list of these"),
        ({"prompts": b"abc"}, InvalidPromptError, "prompts is a bytes"),
        ({"prompts": ["a", "b"], "sampling_params": [SHORT]}, ValueError, "has 1 entries for 2 prompts"),
        (
            {"prompts": "a", "sampling_params": {"n": 1}},
            TypeError,
            "must be SamplingParams or a list of them, got dict",
        ),
        ({"prompts": "a", "sampling_params": ["n"]}, TypeError, "must be SamplingParams or a list of them"),
        ({"prompts": ["a", "b"], "priority": [0]}, ValueError, "priority has 1 entries for 2 prompts"),
        ({"prompts": "a", "priority": [3]}, RefusedError, "priority is 3; only 0 is supported"),
        ({"prompts": ""}, InvalidPromptError, "the prompt is empty; it must have at least 1 token"),
        ({"prompts": [[]]}, InvalidPromptError, "the prompt is empty"),
        ({"prompts": [None]}, InvalidPromptError, "the prompt is a NoneType; it must be text or a list of token ids"),
        ({"prompts": {"text": "a"}}, InvalidPromptError, r"has the keys \['text'\]; it needs 'prompt'"),
        ({"prompts": [[300]]}, InvalidParameterError, "prompt_token_ids must be token ids from 0 to 256"),
        ({"prompts": [[True]]}, InvalidParameterError, "prompt_token_ids"),
        ({"prompts": "x" * 128}, RefusedError, r"the prompt has 128 tokens, .* max_model_len \(128\); at most 127"),
        ({"prompts": "a", "sampling_params": SamplingParams(n=300)}, RefusedError, "n is 300 but max_num_seqs is 256"),
        (
            {"prompts": "a", "sampling_params": SamplingParams(n=8, max_tokens=100)},
            RefusedError,
            r"\(prompt 1, n 8, max_tokens 100\) alone needs 200 KV cache blocks but the pool has 64",
        ),
        ({"prompts": "a\ud800"}, ValueError, "surrogates not allowed"),
    ],
)
def test_what_cannot_be_served_raises_with_the_value_and_what_is_allowed(call: dict, kind: type, message: str) -> None:
    """One prompt, so that all of them are refused; the engine then serves on."""
    world = byte_world()
    llm = world.llm()
    with pytest.raises(kind, match=message):
        llm.generate(**call, use_tqdm=False)
    world.check_drained()
    assert len(llm.generate("next", SHORT, use_tqdm=False)[0].outputs[0].token_ids) == 4


def test_one_refused_prompt_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    world = byte_world()
    long = SamplingParams(n=8, max_tokens=100)
    prompts = ["good", "", [999], "x" * 500, {"text": "a"}, "too wide", None, "fine"]
    params = [SHORT] * 5 + [long, SHORT, SHORT]
    with caplog.at_level(logging.WARNING, "lawful"):
        outputs = world.llm().generate(prompts, params, use_tqdm=False)
    assert [output.error is None for output in outputs] == [True] + [False] * 6 + [True]
    assert [len(output.outputs) for output in outputs] == [1, 0, 0, 0, 0, 0, 0, 1]
    assert [output.prompt for output in outputs][:2] == ["good", ""]
    assert all(output.finished for output in outputs)
    for output, words in zip(outputs[1:7], ("empty", "999", "500 tokens", "keys", "202 KV", "NoneType"), strict=True):
        assert words in output.error
    assert len([record for record in caplog.records if "is refused" in record.getMessage()]) == 6
    alone = byte_world().llm().generate(["good", "fine"], SHORT, use_tqdm=False)
    assert [outputs[0].outputs[0].text, outputs[7].outputs[0].text] == [o.outputs[0].text for o in alone]


def test_a_request_that_ends_with_an_error_says_so_in_its_result() -> None:
    def broken(generated: list[int], logits: Any) -> Any:
        raise ZeroDivisionError("mine")

    world = byte_world()
    params = [SHORT, SamplingParams(max_tokens=4, logits_processors=[broken])]
    good, bad = world.llm().generate(["a", "b"], params, use_tqdm=False)
    assert good.error is None
    assert "mine" in bad.error
    assert bad.outputs[0].finish_reason == "error"


@pytest.mark.parametrize("at", [0, 1, 6])
def test_an_interrupt_ends_the_call_and_leaves_an_engine_that_serves(at: int) -> None:
    world = byte_world(gpu=12, cpu=4)
    llm = world.llm()

    def interrupt(plan: Any) -> None:
        if plan.step == at:
            raise KeyboardInterrupt

    world.between = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["aaaa", "bbbb", "cccc"], SamplingParams(n=2, max_tokens=12, ignore_eos=True), use_tqdm=False)
    world.check_drained()
    assert llm.stats["requests_aborted"] == 3
    world.between = None
    assert len(llm.generate("next", SHORT, use_tqdm=False)[0].outputs[0].token_ids) == 4


# chat


def test_chat_answers_one_conversation_or_many_through_the_template() -> None:
    llm = byte_world().llm()
    hello = [{"role": "user", "content": "hello"}]
    [one] = llm.chat(hello, SHORT, use_tqdm=False)
    assert one.prompt == "<user>hello<bot>"
    assert one.prompt_token_ids == list(b"<user>hello<bot>")
    two = llm.chat([hello, [*hello, {"role": "bot", "content": "hi"}]], SHORT, use_tqdm=False)
    assert [output.prompt for output in two] == ["<user>hello<bot>", "<user>hello<bot>hi<bot>"]
    assert two[0].outputs[0].token_ids == one.outputs[0].token_ids
    [other] = llm.chat(hello, SHORT, use_tqdm=False, chat_template="{{ messages[0].content }}!")
    assert other.prompt == "hello!"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "messages must be a list"),
        ([], "messages must be a list"),
        ([[]], "a conversation must be a list of at least one message"),
        ([{"role": "user"}], "a message must have 'role' and 'content', got"),
        ([[{"content": "x"}]], "a message must have 'role' and 'content', got"),
        (["hello"], "a conversation must be a list of at least one message"),
    ],
)
def test_messages_that_are_none_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(InvalidPromptError, match=message):
        byte_world().llm().chat(messages, SHORT, use_tqdm=False)


def test_chat_without_a_template_or_a_tokenizer_says_what_is_missing() -> None:
    hello = [{"role": "user", "content": "hello"}]
    with pytest.raises(TokenizerError, match="no chat template"):
        World(gpu=64, tokenizer=ByteTokenizer()).llm().chat(hello)
    with pytest.raises(InvalidPromptError, match="no tokenizer"):
        World(gpu=64).llm().chat(hello)


# models that cannot be read


def test_an_unknown_model_is_refused_naming_what_is_known() -> None:
    with pytest.raises(ModelLoadError, match=r"model 'smollm9' is neither a directory .* nor one of smollm2-135m"):
        LLM("smollm9")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "config.json"),
        ({"config.json": "{"}, "config.json"),
        ({"config.json": "[]"}, "config.json"),
        ({"config.json": json.dumps({"architectures": ["LlamaForCausalLM"]})}, "has no '"),
        ({"config.json": json.dumps(LLAMA)}, "weights|safetensors"),
        ({"config.json": json.dumps(LLAMA), "model.safetensors": "not a tensor"}, "model.safetensors"),
        ({"config.json": json.dumps(LLAMA), "pytorch_model.bin": "not a pickle"}, "pytorch_model.bin"),
        (
            {"config.json": json.dumps({**LLAMA, "architectures": ["MambaForCausalLM"]})},
            "MambaForCausalLM.*LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, OPTForCausalLM",
        ),
    ],
)
def test_a_broken_or_unsupported_model_is_refused_naming_the_file(tmp_path: Path, files: dict, message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ModelLoadError, match=message):
        LLM(str(tmp_path), skip_tokenizer_init=True, device="cpu", num_gpu_blocks_override=8)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "model.gguf"
    for data in (b"", b"GGUF", b"GGUF" + bytes(40), b"nothing of the kind"):
        broken.write_bytes(data)
        with pytest.raises(ModelLoadError, match=r"model\.gguf"):
            LLM(str(broken), skip_tokenizer_init=True, device="cpu")


# arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_sise": 4}, r"unknown engine argument 'block_sise'; known are .*block_size"),
        ({"block_size": 0}, "block_size is 0; it must be an int of at least 1"),
        ({"block_size": "16"}, "block_size is '16'; it must be an int"),
        ({"block_size": None}, "block_size is None; it must be an int"),
        ({"max_model_len": 1}, "max_model_len is 1; it must be an int of at least 2"),
        ({"max_model_len": 97}, "max_model_len=97, but the model takes 1 to 96 tokens"),
        ({"max_model_len": 48, "num_gpu_blocks_override": 11}, r"max_model_len is 48 .* holds 44 tokens \(11 blocks"),
        ({"num_gpu_blocks_override": 0}, "num_gpu_blocks_override is 0; it must be an int of at least 1"),
        ({"num_cpu_blocks_override": -1}, "num_cpu_blocks_override is -1; it must be an int of at least 0"),
        ({"swap_space": -1}, "swap_space is -1 GiB; it must be a number of 0 or more"),
        ({"swap_space": float("nan")}, "swap_space is nan GiB"),
        ({"swap_space": "4"}, "swap_space is '4' GiB"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization is 0; it must be above 0 and at most 1"),
        ({"gpu_memory_utilization": 1.1}, "gpu_memory_utilization is 1.1"),
        ({"gpu_memory_utilization": 1e-12}, "the KV cache pool has no block"),
        ({"watermark": 1}, "watermark is 1; it must be at least 0 and below 1"),
        ({"max_num_seqs": 33, "max_num_batched_tokens": 32}, r"max_num_seqs \(33\) exceeds .*\(32\)"),
        ({"max_num_batched_tokens": 32, "enable_chunked_prefill": False}, r"\(32\) is below max_model_len \(96\)"),
        ({"preemption_mode": "drop"}, "preemption_mode is 'drop'; allowed are 'swap', 'recompute' and None"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype is 'int8'; allowed are auto, fp8, fp8_e4m3"),
        ({"device": "tpu"}, "device is 'tpu'; allowed are auto, cpu, cuda"),
        ({"seed": "x"}, "seed is 'x'; it must be an int or None"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2; only 1 is supported"),
        ({"quantization": "awq"}, "quantization is 'awq'; allowed are None and 'gguf'"),
        ({"trust_remote_code": True}, "trust_remote_code is True; only False is supported"),
        ({"dtype": "int7"}, "dtype 'int7' is not supported; use auto, float32"),
        ({"load_format": "zip"}, "load_format 'zip' is not one of auto, safetensors, pt, gguf, dummy"),
    ],
)
def test_an_argument_that_cannot_be_is_refused_naming_it_and_what_is_allowed(
    checkpoint: Path, arguments: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        dummy(checkpoint, **arguments)
    if not {"dtype", "load_format"} & set(arguments):
        assert isinstance(refused.value, ConfigError)


def test_a_model_that_is_no_name_is_refused() -> None:
    for model in (None, 5, ""):
        with pytest.raises(ConfigError, match="it must be a path or the name of an embedded model"):
            LLM(model)  # type: ignore[arg-type]


def test_the_context_is_lowered_to_the_pool_when_none_was_asked_for(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "lawful"):
        llm = dummy(checkpoint, num_gpu_blocks_override=10)
    assert llm.core.scheduler.config.max_model_len == 40
    assert "max_model_len is lowered from the model's 96 to the 40 tokens" in caplog.text
    [output] = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 37


def test_pools_are_sized_from_memory_and_the_overrides_win(checkpoint: Path) -> None:
    from engine.models.load import load_config

    config = load_config(str(checkpoint))
    sized = EngineArgs(block_size=4, swap_space=1e-6, watermark=0.1).scheduler_config(config, 100, "cpu", memory=20_000)
    assert (sized.num_gpu_blocks, sized.num_cpu_blocks, sized.watermark_blocks) == (180, 10, 18)
    most = EngineArgs(block_size=4, max_num_seqs=2).scheduler_config(config, 100, "cpu", memory=10**9)
    assert most.num_gpu_blocks == most.num_cpu_blocks == 2 * 24, "more than all sequences can fill is of no use"
    override = EngineArgs(block_size=4, num_gpu_blocks_override=30, num_cpu_blocks_override=7)
    got = override.scheduler_config(config, 100, "cpu", memory=1)
    assert (got.num_gpu_blocks, got.num_cpu_blocks) == (30, 7)
    none = EngineArgs(block_size=4, swap_space=0).scheduler_config(config, 100, "cpu", memory=20_000)
    assert none.num_cpu_blocks == 0


def test_defaults_are_those_of_the_documentation(checkpoint: Path) -> None:
    from engine.models.load import load_config

    config = load_config(str(checkpoint))
    chunked = EngineArgs().scheduler_config(config, 100, "cpu", memory=10**6)
    assert (chunked.tokens, chunked.seqs, chunked.enable_chunked_prefill) == (2048, 256, True)
    small = EngineArgs(max_num_batched_tokens=100).scheduler_config(config, 100, "cpu", memory=10**6)
    assert small.seqs == 100


@pytest.mark.parametrize(("mode", "cpu"), [("swap", 40), ("recompute", 0), (None, 3)])
def test_a_random_model_gives_the_same_with_little_memory_as_with_much(checkpoint: Path, mode: str, cpu: int) -> None:
    prompts = [[5, 17, 3, 90, 41, 7, 77, 12, 9], [8, 8, 4], [61, 33, 2, 9, 54, 1, 99]]
    params = SamplingParams(n=2, max_tokens=14, ignore_eos=True, seed=4)
    results = []
    for gpu, swap in ((200, 0), (12, cpu)):
        llm = dummy(
            checkpoint,
            num_gpu_blocks_override=gpu,
            num_cpu_blocks_override=swap,
            preemption_mode=mode,
            dtype="float32",
        )
        outputs = llm.generate(prompts, params, use_tqdm=False)
        results.append([[c.token_ids for c in output.outputs] for output in outputs])
    assert llm.stats["preemptions"] > 0
    assert results[0] == results[1]


def test_the_same_engine_seed_gives_the_same_outputs_and_another_gives_others(checkpoint: Path) -> None:
    def run(seed: int | None) -> list[int]:
        llm = dummy(checkpoint, num_gpu_blocks_override=64, seed=seed, max_model_len=64)
        [output] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=20, ignore_eos=True), use_tqdm=False)
        return output.outputs[0].token_ids

    assert run(3) == run(3)
    assert run(3) != run(4)


def test_progress_is_shown_on_request_only(capsys: pytest.CaptureFixture[str]) -> None:
    llm = byte_world().llm()
    llm.generate(["a", "b"], SHORT, use_tqdm=False)
    assert capsys.readouterr().err == ""
    llm.generate(["a", "b"], SHORT)
    assert "Processed prompts: 100%" in capsys.readouterr().err


def test_one_broken_conversation_does_not_stop_the_others() -> None:
    llm = LLM.from_core(byte_world().core)
    good = [{"role": "user", "content": "hi"}]
    outputs = llm.chat([good, [{"role": "user"}], [{"role": "user", "content": "\ud800"}], good], SHORT, use_tqdm=False)
    assert [bool(output.error) for output in outputs] == [False, True, True, False]
    assert outputs[0].outputs[0].token_ids == outputs[3].outputs[0].token_ids


def test_stop_strings_need_a_tokenizer() -> None:
    llm = LLM.from_core(World(gpu=16).core)
    with pytest.raises(InvalidParameterError, match="stop must be empty"):
        llm.generate([[5, 6]], SamplingParams(stop=["a"]), use_tqdm=False)


def test_two_llms_over_one_engine_do_not_share_request_ids() -> None:
    core = byte_world().core
    first, second = LLM.from_core(core), LLM.from_core(core)
    one, two = first.generate("a", SHORT, use_tqdm=False)[0], second.generate("a", SHORT, use_tqdm=False)[0]
    assert one.request_id != two.request_id


def test_requests_of_another_caller_are_not_swallowed() -> None:
    core = byte_world().core
    core.add_request("mine", [1, 2], SHORT)
    with pytest.raises(RuntimeError, match="unfinished requests of another caller"):
        LLM.from_core(core).generate("a", SHORT, use_tqdm=False)
    outputs = []
    while core.has_unfinished_requests():
        outputs += core.step(finished_only=True)
    assert [output.request_id for output in outputs] == ["mine"]


def test_a_second_thread_is_told_so_at_once() -> None:
    llm = LLM.from_core(byte_world().core)
    llm._busy.acquire()
    with pytest.raises(RuntimeError, match="generating in another thread"):
        llm.generate("a", SHORT, use_tqdm=False)
    llm._busy.release()
    assert llm.generate("a", SHORT, use_tqdm=False)[0].finished


@pytest.mark.parametrize("place", ["schedule", "update"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_in_the_engines_own_books_leaves_it_usable(
    place: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = byte_world()
    llm = LLM.from_core(world.core)
    alone = llm.generate("abc", SHORT, use_tqdm=False)[0].outputs[0].token_ids

    def torn(*_: Any, **__: Any) -> Any:
        monkeypatch.undo()
        raise error

    monkeypatch.setattr(world.core.scheduler, place, torn)
    with pytest.raises(error):
        llm.generate(["abc", "de"], SHORT, use_tqdm=False)
    assert not world.core.has_unfinished_requests()
    assert llm.generate("abc", SHORT, use_tqdm=False)[0].outputs[0].token_ids == alone
    assert world.core.scheduler.counts().gpu_blocks_used == 0


def test_prefill_first_is_checked_against_the_length_that_the_pool_allows(checkpoint: Path) -> None:
    llm = dummy(checkpoint, enable_chunked_prefill=False, num_gpu_blocks_override=8, max_num_batched_tokens=32)
    assert llm.core.scheduler.config.max_model_len == 32


@pytest.mark.parametrize("blocks", [10**11, 10**30])
def test_a_pool_that_cannot_be_had_is_named(checkpoint: Path, blocks: int) -> None:
    with pytest.raises(ConfigError, match=str(blocks)):
        dummy(checkpoint, num_gpu_blocks_override=blocks)
