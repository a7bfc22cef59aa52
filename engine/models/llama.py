"""Llama, Mistral and Qwen2: RMS norm, rotary embedding, grouped-query attention, gated MLP.

Touvron et al. 2023; Jiang et al. 2023; Qwen team 2024.  They differ in biases and numbers, all in `ModelConfig`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.cache import KVCache
from engine.models.attention import Metadata, attend
from engine.models.config import ModelConfig
from engine.models.linear import Linear, QuantizedLinear, packing
from engine.models.rope import Turns, angles, inverse_frequencies
from engine.models.weights import Weights
from kernels.dispatch import uses_triton
from kernels.quantized_rows import QuantizedWeight
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rotary import rotary
from kernels.silu_mul import silu_mul


@dataclass
class _Layer:
    """One layer.  Projections that read the same input are one."""

    input_norm: Tensor
    qkv: Linear  # hidden -> (heads + 2 * kv_heads) * head_dim
    out: Linear  # heads * head_dim -> hidden
    mlp_norm: Tensor
    gate_up: Linear  # hidden -> 2 * intermediate
    down: Linear  # intermediate -> hidden


class LlamaModel:
    """A decoder of `config.num_layers` layers whose weights come from `weights`.

    dtype: of weights and KV cache.  row_type: of what flows between the layers, see `engine.models.linear`.
    """

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        """Takes every tensor it needs.  Raises ModelLoadError for a missing tensor or a wrong shape."""
        self.config = config
        self.dtype = weights.dtype
        self._pack, self.row_type = packing(weights.dtype, weights.device)
        # Angles that turn neighbours are one complex product in float32; the weights are brought into that order here.
        alone = weights.device.type == "cpu" and not uses_triton(torch.empty(0))  # no kernel turns them
        self.turns = Turns(config) if alone and self.row_type == torch.float32 else None
        vocabulary = (config.vocab_size, config.hidden_size)
        self.embedding = weights.take("model.embed_tokens.weight", vocabulary)
        self.layers = [self._load_layer(weights, f"model.layers.{i}.") for i in range(config.num_layers)]
        self.norm = weights.take("model.norm.weight", (config.hidden_size,)).to(self.row_type)
        head_name = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
        head = self.embedding if config.tie_embeddings else weights.take(head_name, vocabulary)
        self.head = self._linear(head, None, weights.quantized([head_name]))
        self.frequencies = inverse_frequencies(config.rope, config.head_dim).to(self.embedding.device)
        self.scale = config.head_dim**-0.5

    def _load_layer(self, weights: Weights, prefix: str) -> _Layer:
        c = self.config
        queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        attention, mlp = prefix + "self_attn.", prefix + "mlp."

        def linear(names: list[str], rows: list[int], columns: int, biased: bool, turned: int = 0) -> Linear:
            weight = weights.stack([name + ".weight" for name in names], rows, (columns,))
            bias = weights.stack([name + ".bias" for name in names], rows) if biased else None
            blocks = weights.quantized([name + ".weight" for name in names])
            if self.turns is not None and turned:
                order = _neighbours(torch.arange(len(weight)), turned, c.head_dim)
                weight, bias = weight[order], None if bias is None else bias[order]
                blocks = None if blocks is None else blocks.rows(order)
            return self._linear(weight, bias, blocks)

        def norm(name: str) -> Tensor:
            return weights.take(f"{prefix}{name}.weight", (c.hidden_size,)).to(self.row_type)

        qkv = [attention + name for name in ("q_proj", "k_proj", "v_proj")]
        halves = [mlp + "gate_proj", mlp + "up_proj"]
        return _Layer(
            input_norm=norm("input_layernorm"),
            qkv=linear(qkv, [queries, keys, keys], c.hidden_size, c.qkv_bias, c.num_heads + c.num_kv_heads),
            out=linear([attention + "o_proj"], [c.hidden_size], queries, c.out_bias),
            mlp_norm=norm("post_attention_layernorm"),
            gate_up=linear(halves, [c.intermediate_size] * 2, c.hidden_size, c.mlp_bias),
            down=linear([mlp + "down_proj"], [c.hidden_size], c.intermediate_size, c.mlp_bias),
        )

    def _linear(self, weight: Tensor, bias: Tensor | None, blocks: QuantizedWeight | None) -> Linear:
        packed = self._pack(weight, bias)
        return packed if blocks is None else QuantizedLinear(blocks, bias, packed)

    def forward(self, tokens: Tensor, positions: Tensor, metadata: Metadata, cache: KVCache) -> Tensor:
        """Hidden states (tokens, hidden) of a flat batch; tokens and positions (tokens,) int64."""
        c = self.config
        turned = c.num_heads + c.num_kv_heads
        turn = self._turner(positions)
        norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]  # what follows each layer
        hidden = F.embedding(tokens, self.embedding).to(self.row_type)
        x = rms_norm(hidden, self.layers[0].input_norm, c.norm_eps)
        for i, layer in enumerate(self.layers):
            heads = layer.qkv(x).view(len(x), -1, c.head_dim)
            query_key = turn(heads[:, :turned])
            query, key, value = query_key[:, : c.num_heads], query_key[:, c.num_heads :], heads[:, turned:]
            mixed = attend(query, key, value, i, cache, metadata, self.scale)
            x, hidden = add_rms_norm(layer.out(mixed), hidden, layer.mlp_norm, c.norm_eps)
            x = silu_mul(layer.gate_up(x))
            x, hidden = add_rms_norm(layer.down(x), hidden, norms[i], c.norm_eps)
        return x

    def _turner(self, positions: Tensor) -> Callable[[Tensor], Tensor]:
        """What turns the heads of a step's tokens (tokens, heads, head_dim) by their positions."""
        if self.turns is not None:
            return self.turns.at(positions)
        cos, sin = angles(positions, self.frequencies)
        return lambda heads: rotary(heads, cos, sin)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """(rows, vocab_size) float32 for the rows (rows, hidden) that sample."""
        return self.head(hidden).float()


def _neighbours(rows: Tensor, heads: int, head_dim: int) -> Tensor:
    """The first `heads` heads with the two halves of each dealt out in turn: 0, half, 1, half + 1 and so on.

    Queries and keys in another order, the same for both, have the same products.
    """
    turned, rest = rows[: heads * head_dim], rows[heads * head_dim :]
    dealt = turned.view(heads, 2, head_dim // 2, *rows.shape[1:]).transpose(1, 2)
    return torch.cat((dealt.reshape(turned.shape), rest))
