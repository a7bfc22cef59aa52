"""Llama, Mistral and Qwen2: RMS norm, rotary embedding, grouped-query attention, gated MLP.

Touvron et al. 2023; Jiang et al. 2023; Qwen team 2024.  They differ in biases and numbers, all in `ModelConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from engine.cache import KVCache
from engine.models.attention import AttentionMetadata, attend
from engine.models.config import ModelConfig
from engine.models.rope import angles, inverse_frequencies
from engine.models.weights import Weights
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rotary import rotary
from kernels.silu_mul import silu_mul


@dataclass
class _Layer:
    """Weights of one layer.  Projections that read the same input are one matrix."""

    input_norm: Tensor
    qkv: Tensor  # ((heads + 2 * kv_heads) * head_dim, hidden)
    qkv_bias: Tensor | None
    out: Tensor  # (hidden, heads * head_dim)
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor  # (2 * intermediate, hidden)
    gate_up_bias: Tensor | None
    down: Tensor  # (hidden, intermediate)
    down_bias: Tensor | None


class LlamaModel:
    """A decoder of `config.num_layers` layers whose weights come from `weights`."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        """Takes every tensor it needs.  Raises ModelLoadError for a missing tensor or a wrong shape."""
        self.config = config
        vocabulary = (config.vocab_size, config.hidden_size)
        self.embedding = weights.take("model.embed_tokens.weight", vocabulary)
        self.layers = [self._load_layer(weights, f"model.layers.{i}.") for i in range(config.num_layers)]
        self.norm = weights.take("model.norm.weight", (config.hidden_size,))
        self.head = self.embedding if config.tie_embeddings else weights.take("lm_head.weight", vocabulary)
        self.frequencies = inverse_frequencies(config.rope, config.head_dim).to(self.embedding.device)
        self.scale = config.head_dim**-0.5

    def _load_layer(self, weights: Weights, prefix: str) -> _Layer:
        c = self.config
        queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        qkv = [attention + name for name in ("q_proj", "k_proj", "v_proj")]
        halves = [mlp + "gate_proj", mlp + "up_proj"]

        def weight(names: list[str], rows: list[int], columns: int) -> Tensor:
            return weights.stack([name + ".weight" for name in names], rows, (columns,))

        def bias(wanted: bool, names: list[str], rows: list[int]) -> Tensor | None:
            return weights.stack([name + ".bias" for name in names], rows) if wanted else None

        return _Layer(
            input_norm=weights.take(prefix + "input_layernorm.weight", (c.hidden_size,)),
            qkv=weight(qkv, [queries, keys, keys], c.hidden_size),
            qkv_bias=bias(c.qkv_bias, qkv, [queries, keys, keys]),
            out=weight([attention + "o_proj"], [c.hidden_size], queries),
            out_bias=bias(c.out_bias, [attention + "o_proj"], [c.hidden_size]),
            mlp_norm=weights.take(prefix + "post_attention_layernorm.weight", (c.hidden_size,)),
            gate_up=weight(halves, [c.intermediate_size] * 2, c.hidden_size),
            gate_up_bias=bias(c.mlp_bias, halves, [c.intermediate_size] * 2),
            down=weight([mlp + "down_proj"], [c.hidden_size], c.intermediate_size),
            down_bias=bias(c.mlp_bias, [mlp + "down_proj"], [c.hidden_size]),
        )

    def forward(self, tokens: Tensor, positions: Tensor, metadata: AttentionMetadata, cache: KVCache) -> Tensor:
        """Hidden states (tokens, hidden) of a flat batch; tokens and positions (tokens,) int64."""
        c = self.config
        turned = c.num_heads + c.num_kv_heads
        cos, sin = angles(positions, self.frequencies)
        norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]  # what follows each layer
        hidden = F.embedding(tokens, self.embedding)
        x = rms_norm(hidden, self.layers[0].input_norm, c.norm_eps)
        for i, layer in enumerate(self.layers):
            heads = F.linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, c.head_dim)
            query_key = rotary(heads[:, :turned], cos, sin)
            query, key, value = query_key[:, : c.num_heads], query_key[:, c.num_heads :], heads[:, turned:]
            mixed = attend(query, key, value, i, cache, metadata, self.scale)
            x, hidden = add_rms_norm(F.linear(mixed, layer.out, layer.out_bias), hidden, layer.mlp_norm, c.norm_eps)
            x = silu_mul(F.linear(x, layer.gate_up, layer.gate_up_bias))
            x, hidden = add_rms_norm(F.linear(x, layer.down, layer.down_bias), hidden, norms[i], c.norm_eps)
        return x

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """(rows, vocab_size) float32 for the rows (rows, hidden) that sample."""
        return F.linear(hidden, self.head).float()
