"""What the engine must know of a model, read from a Hugging Face config.json or from GGUF metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.models.errors import ModelLoadError

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "OPTForCausalLM")
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3")
GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base and scaling.

    kind: default, linear (Chen et al. 2023: positions divided by `factor`) or llama3 (long wavelengths only).
    low_freq_factor, high_freq_factor, original_max_position: llama3 only.
    divisors: one for each frequency, as a GGUF file stores its scaling; empty when it has none.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of one model.

    max_position: tokens that the position embedding covers.
    sliding_window: tokens that attention sees in the checkpoint's own definition; None = all.
    eos_token_ids: every id that ends a sequence, from config and generation config together.
    dtype: the type of the checkpoint's weights; None when it does not say.
    The fields of the last block are of OPT alone.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: torch.dtype | None = None

    embed_size: int = 0
    norm_before: bool = True
    final_norm: bool = True
    norm_affine: bool = True

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ModelLoadError(f"sliding_window is {self.sliding_window}; it must be at least 1")

    @property
    def max_context(self) -> int:
        """The longest sequence that is computed as the checkpoint defines it: positions and sliding window."""
        if self.sliding_window is None:
            return self.max_position
        return min(self.max_position, self.sliding_window)

    def check_max_model_len(self, wanted: int | None) -> int:
        """`wanted`, or the longest possible when it is None.  Raises ValueError when it is out of range."""
        if wanted is None or 1 <= wanted <= self.max_context:
            return wanted or self.max_context
        if wanted > self.max_context and self.sliding_window == self.max_context:
            raise ValueError(
                f"max_model_len={wanted} passes the model's sliding window of {self.sliding_window} tokens. Attention "
                f"over a sliding window is not supported: use max_model_len <= {self.sliding_window}, where it is exact"
            )
        raise ValueError(f"max_model_len={wanted}, but the model takes 1 to {self.max_context} tokens")


def _require(config: Mapping[str, Any], key: str, where: str, convert: Callable[[Any], Any] = int) -> Any:
    """config[key], converted.  Raises ModelLoadError when it is absent or of the wrong kind."""
    if config.get(key) is None:
        raise ModelLoadError(f"{where} has no '{key}'")
    try:
        return convert(config[key])
    except (TypeError, ValueError):
        raise ModelLoadError(f"{where}: '{key}' is {config[key]!r}, not a number") from None


def _refuse(condition: bool, where: str, what: str, allowed: str) -> None:
    if condition:
        raise ModelLoadError(f"{where}: {what} is not supported; supported: {allowed}")


def _token_ids(*values: Any) -> tuple[int, ...]:
    """Ids given as an int, a list or nothing, each once, in order."""
    flat: list[int] = []
    for value in values:
        flat += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(int(token) for token in flat))


def _hf_rope(config: Mapping[str, Any], where: str) -> RopeConfig:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    _refuse(kind not in SUPPORTED_ROPE_TYPES, where, f"rope type {kind!r}", ", ".join(SUPPORTED_ROPE_TYPES))
    partial = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    _refuse(partial != 1.0, where, f"partial_rotary_factor {partial}", "1.0")
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if kind == "default":
        return RopeConfig(theta)
    factor = _require(scaling, "factor", f"{where}, rope scaling", float)
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    low, high = (_require(scaling, f"{end}_freq_factor", f"{where}, rope scaling", float) for end in ("low", "high"))
    original = _require(scaling, "original_max_position_embeddings", f"{where}, rope scaling")
    return RopeConfig(theta, kind, factor, low, high, original)


def config_from_hf(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None = None, where: str = "config.json"
) -> ModelConfig:
    """Read the contents of config.json and, if there is one, generation_config.json.

    where: what messages call the file.  Raises ModelLoadError for what is missing or not supported.
    """
    names = config.get("architectures") or []
    architecture = next((name for name in names if name in SUPPORTED_ARCHITECTURES), None)
    if architecture is None:
        found = ", ".join(names) or f"none named (model_type {config.get('model_type')!r})"
        _refuse(True, where, f"architecture {found}", ", ".join(SUPPORTED_ARCHITECTURES))
    quantization = config.get("quantization_config")
    _refuse(
        bool(quantization), where, "quantization_config", "weights in float32, float16 or bfloat16, or a .gguf file"
    )
    hidden, heads = _require(config, "hidden_size", where), _require(config, "num_attention_heads", where)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    common: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": _require(config, "vocab_size", where),
        "hidden_size": hidden,
        "num_layers": _require(config, "num_hidden_layers", where),
        "num_heads": heads,
        "head_dim": int(config.get("head_dim") or hidden // heads),
        "max_position": _require(config, "max_position_embeddings", where),
        "bos_token_id": config.get("bos_token_id"),
        "eos_token_ids": _token_ids((generation or {}).get("eos_token_id"), config.get("eos_token_id")),
        "dtype": _DTYPES.get(dtype),
    }
    if architecture == "OPTForCausalLM":
        return _opt_config(config, common, where)
    activation = config.get("hidden_act", "silu")
    _refuse(activation not in ("silu", "swish"), where, f"hidden_act {activation!r}", "silu")
    rope = _hf_rope(config, where)
    if rope.kind == "linear":
        common["max_position"] = int(common["max_position"] * rope.factor)
    bias = bool(config.get("attention_bias", False))
    windowed = architecture == "MistralForCausalLM" or config.get("use_sliding_window", False)
    return ModelConfig(
        **common,
        intermediate_size=_require(config, "intermediate_size", where),
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=rope,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bias or architecture == "Qwen2ForCausalLM",
        out_bias=bias and architecture == "LlamaForCausalLM",
        mlp_bias=bool(config.get("mlp_bias", False)),
        sliding_window=config.get("sliding_window") if windowed else None,
    )


def _opt_config(config: Mapping[str, Any], common: dict[str, Any], where: str) -> ModelConfig:
    activation = config.get("activation_function", "relu")
    _refuse(activation != "relu", where, f"activation_function {activation!r}", "relu")
    bias = bool(config.get("enable_bias", True))
    before = bool(config.get("do_layer_norm_before", True))
    return ModelConfig(
        **common,
        intermediate_size=_require(config, "ffn_dim", where),
        num_kv_heads=common["num_heads"],
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        embed_size=int(config.get("word_embed_proj_dim") or common["hidden_size"]),
        norm_before=before,
        final_norm=before and not config.get("_remove_final_layer_norm", False),
        norm_affine=bool(config.get("layer_norm_elementwise_affine", True)),
    )


def config_from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], divisors: tuple[float, ...], where: str
) -> ModelConfig:
    """Read a GGUF file's metadata.

    shapes: shape of every tensor, rows first; they tell what the metadata does not (biases, tied embeddings).
    divisors: contents of the tensor rope_freqs.weight, if there is one.
    Raises ModelLoadError for what is missing or not supported.
    """
    name = metadata.get("general.architecture")
    _refuse(name not in GGUF_ARCHITECTURES, where, f"architecture {name!r}", ", ".join(GGUF_ARCHITECTURES))
    part = {key.removeprefix(f"{name}."): value for key, value in metadata.items() if key.startswith(f"{name}.")}
    experts = part.get("expert_count") or 0
    _refuse(experts > 0, where, f"mixture of {experts} experts", "dense models")
    hidden, heads = _require(part, "embedding_length", where), _require(part, "attention.head_count", where)
    if "token_embd.weight" not in shapes:
        raise ModelLoadError(f"{where} has no tensor 'token_embd.weight'")
    kind = part.get("rope.scaling.type") or ("linear" if part.get("rope.scale_linear") else "none")
    _refuse(kind not in ("none", "linear"), where, f"rope.scaling.type {kind!r}", "none, linear")
    theta = float(part.get("rope.freq_base") or 10000.0)
    factor = float(part.get("rope.scaling.factor") or part.get("rope.scale_linear") or 1.0)
    rope = RopeConfig(theta, "linear", factor) if kind == "linear" else RopeConfig(theta, divisors=divisors)
    head_dim = int(part.get("attention.key_length") or hidden // heads)
    rotated = int(part.get("rope.dimension_count") or head_dim)
    _refuse(rotated != head_dim, where, f"rope.dimension_count {rotated}", f"the head's {head_dim}")
    return ModelConfig(
        architecture=GGUF_ARCHITECTURES[str(name)],
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=hidden,
        intermediate_size=_require(part, "feed_forward_length", where),
        num_layers=_require(part, "block_count", where),
        num_heads=heads,
        num_kv_heads=int(part.get("attention.head_count_kv") or heads),
        head_dim=head_dim,
        max_position=_require(part, "context_length", where),
        norm_eps=_require(part, "attention.layer_norm_rms_epsilon", where, float),
        rope=rope,
        tie_embeddings="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        out_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        sliding_window=part.get("attention.sliding_window"),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_token_ids(
            metadata.get("tokenizer.ggml.eos_token_id"), metadata.get("tokenizer.ggml.eot_token_id")
        ),
    )
