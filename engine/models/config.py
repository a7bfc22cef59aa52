"""What the engine must know of a model, read from a Hugging Face config.json or from GGUF metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from engine.models.errors import ModelLoadError
from engine.models.fields import Fields

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "OPTForCausalLM")
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3")
GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_WIDTH = 2**24  # no vocabulary or matrix has more rows; a count above it is damage, and would ask for all memory
_LAYERS, _HEADS, _POSITIONS = 2**12, 2**12, 2**31 - 1
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
    eos_token_ids: tuple[int, ...] = ()
    dtype: torch.dtype | None = None

    embed_size: int = 0
    norm_before: bool = True
    final_norm: bool = True
    norm_affine: bool = True

    def __post_init__(self) -> None:
        """What must hold between fields; each alone was checked when it was read."""
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.architecture == "OPTForCausalLM" and self.num_heads * self.head_dim != self.hidden_size:
            raise ModelLoadError(f"hidden_size {self.hidden_size} is not {self.num_heads} heads of {self.head_dim}")
        if self.architecture != "OPTForCausalLM" and self.head_dim % 2:
            raise ModelLoadError(f"head_dim is {self.head_dim}; it must be even, as rotary embedding pairs its halves")

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


def _refuse(condition: bool, where: str, what: str, allowed: str) -> None:
    if condition:
        raise ModelLoadError(f"{where}: {what} is not supported; supported: {allowed}")


def _built(where: str, **fields: Any) -> ModelConfig:
    try:
        return ModelConfig(**fields)
    except ModelLoadError as error:
        raise ModelLoadError(f"{where}: {error}") from None


def _head_dim(fields: Fields, key: str, hidden: int, heads: int) -> int:
    """The field `key`, else what is left of `hidden` for each head."""
    if not fields.has(key) and hidden < heads:
        raise ModelLoadError(f"{fields.where}: {heads} attention heads do not fit a hidden size of {hidden}")
    return fields.integer(key, 1, _WIDTH, hidden // heads)


def _hf_rope(config: Fields) -> RopeConfig:
    scaling = config.inner("rope_parameters" if config.get("rope_parameters") not in (None, {}) else "rope_scaling")
    kind = scaling.choice("rope_type" if scaling.has("rope_type") else "type", SUPPORTED_ROPE_TYPES, "default")
    for fields in (scaling, config):
        if fields.number("partial_rotary_factor", 1.0, 1.0) != 1.0:
            raise fields.refuse("partial_rotary_factor", "1")
    theta = (scaling if scaling.has("rope_theta") else config).number("rope_theta", 1e30, 10000.0)
    if kind == "default":
        return RopeConfig(theta)
    factor = scaling.number("factor", 2**20, least=1.0)
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    low, high = (scaling.number(f"{end}_freq_factor", 2**20) for end in ("low", "high"))
    if high <= low:
        raise scaling.refuse("high_freq_factor", f"above low_freq_factor = {low:g}")
    return RopeConfig(
        theta, kind, factor, low, high, scaling.integer("original_max_position_embeddings", 1, _POSITIONS)
    )


def config_from_hf(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None = None, where: str = "config.json"
) -> ModelConfig:
    """Read the contents of config.json and, if there is one, generation_config.json.

    where: what messages call the file.  Raises ModelLoadError for what is missing, out of range or not supported.
    """
    fields = Fields(config, where)
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise fields.refuse("architectures", f"a list of names; supported are {', '.join(SUPPORTED_ARCHITECTURES)}")
    architecture = next((name for name in names if name in SUPPORTED_ARCHITECTURES), None)
    if architecture is None:
        found = ", ".join(names) or f"none named (model_type {config.get('model_type')!r})"
        _refuse(True, where, f"architecture {found}", ", ".join(SUPPORTED_ARCHITECTURES))
    quantization = config.get("quantization_config")
    _refuse(
        bool(quantization), where, "quantization_config", "weights in float32, float16 or bfloat16, or a .gguf file"
    )
    hidden, heads = fields.integer("hidden_size", 1, _WIDTH), fields.integer("num_attention_heads", 1, _HEADS)
    vocab_size = fields.integer("vocab_size", 1, _WIDTH)
    ends = Fields(generation or {}, str(Path(where).with_name("generation_config.json")))
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    common: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "num_layers": fields.integer("num_hidden_layers", 1, _LAYERS),
        "num_heads": heads,
        "head_dim": _head_dim(fields, "head_dim", hidden, heads),
        "max_position": fields.integer("max_position_embeddings", 1, _POSITIONS),
        "eos_token_ids": _each_once(
            ends.token_ids("eos_token_id", vocab_size), fields.token_ids("eos_token_id", vocab_size)
        ),
        "dtype": _DTYPES.get(dtype),
    }
    if architecture == "OPTForCausalLM":
        return _opt_config(fields, common)
    fields.choice("hidden_act", ("silu", "swish"), "silu")
    rope = _hf_rope(fields)
    if rope.kind == "linear":
        common["max_position"] = int(common["max_position"] * rope.factor)
    bias = fields.flag("attention_bias", False)
    windowed = architecture == "MistralForCausalLM" or fields.flag("use_sliding_window", False)
    return _built(
        where,
        **common,
        intermediate_size=fields.integer("intermediate_size", 1, _WIDTH),
        num_kv_heads=fields.integer("num_key_value_heads", 1, _HEADS, heads),
        norm_eps=fields.number("rms_norm_eps", 1.0, 1e-6),
        rope=rope,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=bias or architecture == "Qwen2ForCausalLM",
        out_bias=bias and architecture == "LlamaForCausalLM",
        mlp_bias=fields.flag("mlp_bias", False),
        sliding_window=_window(fields, "sliding_window") if windowed else None,
    )


def _each_once(*ids: list[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(token_id for some in ids for token_id in some))


def _window(fields: Fields, key: str) -> int | None:
    return fields.integer(key, 1, _POSITIONS) if fields.has(key) else None


def _opt_config(fields: Fields, common: dict[str, Any]) -> ModelConfig:
    fields.choice("activation_function", ("relu",), "relu")
    bias = fields.flag("enable_bias", True)
    before = fields.flag("do_layer_norm_before", True)
    return _built(
        fields.where,
        **common,
        intermediate_size=fields.integer("ffn_dim", 1, _WIDTH),
        num_kv_heads=common["num_heads"],
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        embed_size=fields.integer("word_embed_proj_dim", 1, _WIDTH, common["hidden_size"]),
        norm_before=before,
        final_norm=before and not fields.flag("_remove_final_layer_norm", False),
        norm_affine=fields.flag("layer_norm_elementwise_affine", True),
    )


def config_from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], divisors: tuple[float, ...], where: str
) -> ModelConfig:
    """Read a GGUF file's metadata.

    shapes: shape of every tensor, rows first; they tell what the metadata does not (biases, tied embeddings).
    divisors: contents of the tensor rope_freqs.weight, if there is one.
    Raises ModelLoadError for what is missing, out of range or not supported.
    """
    architecture = Fields(metadata, where).choice("general.architecture", tuple(GGUF_ARCHITECTURES), "none")
    part = Fields(metadata, where, f"{architecture}.")
    experts = part.integer("expert_count", 0, _WIDTH, 0)
    _refuse(experts > 0, where, f"mixture of {experts} experts", "dense models")
    hidden, heads = part.integer("embedding_length", 1, _WIDTH), part.integer("attention.head_count", 1, _HEADS)
    vocab_size = shapes.get("token_embd.weight", (0,))[0]
    if not 1 <= vocab_size <= _WIDTH:
        raise ModelLoadError(f"{where} has no tensor 'token_embd.weight' of 1 to {_WIDTH} rows")
    kind = part.choice("rope.scaling.type", ("none", "linear"), "linear" if part.get("rope.scale_linear") else "none")
    theta = part.number("rope.freq_base", 1e30, 10000.0)
    head_dim = _head_dim(part, "attention.key_length", hidden, heads)
    if part.integer("rope.dimension_count", 1, _WIDTH, head_dim) != head_dim:
        raise part.refuse("rope.dimension_count", f"the head's {head_dim}")
    if kind == "linear":
        factor = "rope.scaling.factor" if part.get("rope.scaling.factor") else "rope.scale_linear"
        rope = RopeConfig(theta, "linear", part.number(factor, 2**20, 1.0, least=1.0))
    else:
        rope = RopeConfig(theta, divisors=divisors)
    if divisors and (len(divisors) != head_dim // 2 or not all(0 < divisor < math.inf for divisor in divisors)):
        raise ModelLoadError(f"{where}: tensor 'rope_freqs.weight' must hold {head_dim // 2} positive numbers")
    tokens = Fields(metadata, where, "tokenizer.ggml.")
    return _built(
        where,
        architecture=GGUF_ARCHITECTURES[architecture],
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=part.integer("feed_forward_length", 1, _WIDTH),
        num_layers=part.integer("block_count", 1, _LAYERS),
        num_heads=heads,
        num_kv_heads=part.integer("attention.head_count_kv", 1, _HEADS, heads),
        head_dim=head_dim,
        max_position=part.integer("context_length", 1, _POSITIONS),
        norm_eps=part.number("attention.layer_norm_rms_epsilon", 1.0),
        rope=rope,
        tie_embeddings="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        out_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        sliding_window=_window(part, "attention.sliding_window"),
        eos_token_ids=_each_once(
            tokens.token_ids("eos_token_id", vocab_size), tokens.token_ids("eot_token_id", vocab_size)
        ),
    )
