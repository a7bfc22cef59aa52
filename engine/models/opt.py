"""OPT (Zhang et al. 2022): learned positions, layer norm before or after each half, ReLU MLP."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from engine.cache import KVCache
from engine.models.attention import Metadata, attend
from engine.models.config import ModelConfig
from engine.models.linear import Linear, packing
from engine.models.weights import Weights
from kernels.activation import activation
from kernels.layer_norm import layer_norm

POSITION_OFFSET = 2  # the first two rows of the position table belong to no position
EPS = 1e-5

Norm = tuple[Tensor | None, Tensor | None]


@dataclass
class _Layer:
    """One layer; norms with weight and bias, or neither."""

    attention_norm: Norm
    qkv: Linear  # hidden -> 3 * hidden
    out: Linear
    mlp_norm: Norm
    up: Linear  # hidden -> intermediate
    down: Linear


class OPTModel:
    """A decoder of `config.num_layers` layers whose weights come from `weights`.

    dtype: of weights and KV cache.  row_type: of what flows between the layers, see `engine.models.linear`.
    """

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        """Takes every tensor it needs.  Raises ModelLoadError for a missing tensor or a wrong shape."""
        self.config = config
        self._weights = weights
        self.dtype = weights.dtype
        self._pack, self.row_type = packing(weights.dtype, weights.device)
        c, start = config, "model.decoder."
        vocabulary = (c.vocab_size, c.embed_size)
        self.embedding = weights.take(start + "embed_tokens.weight", vocabulary)
        self.positions = weights.take(
            start + "embed_positions.weight", (c.max_position + POSITION_OFFSET, c.hidden_size)
        )
        self.project_in = self.project_out = None
        if c.embed_size != c.hidden_size:
            self.project_in = self._pack(weights.take(start + "project_in.weight", (c.hidden_size, c.embed_size)), None)
            self.project_out = self._pack(
                weights.take(start + "project_out.weight", (c.embed_size, c.hidden_size)), None
            )
        self.layers = [self._load_layer(f"{start}layers.{i}.") for i in range(c.num_layers)]
        self.norm = self._load_norm(start + "final_layer_norm") if c.final_norm else None
        head = self.embedding if c.tie_embeddings else weights.take("lm_head.weight", vocabulary)
        self.head = self._pack(head, None)
        self.scale = c.head_dim**-0.5
        del self._weights

    def _load_norm(self, name: str) -> Norm:
        if not self.config.norm_affine:
            return None, None
        shape = (self.config.hidden_size,)
        weight, bias = self._weights.take(name + ".weight", shape), self._weights.take(name + ".bias", shape)
        return weight.to(self.row_type), bias.to(self.row_type)

    def _load_linear(self, names: list[str], rows: int, columns: int) -> Linear:
        count = [rows] * len(names)
        weight = self._weights.stack([name + ".weight" for name in names], count, (columns,))
        bias = self._weights.stack([name + ".bias" for name in names], count) if self.config.mlp_bias else None
        return self._pack(weight, bias)

    def _load_layer(self, prefix: str) -> _Layer:
        hidden, wide = self.config.hidden_size, self.config.intermediate_size
        return _Layer(
            attention_norm=self._load_norm(prefix + "self_attn_layer_norm"),
            qkv=self._load_linear([f"{prefix}self_attn.{name}_proj" for name in "qkv"], hidden, hidden),
            out=self._load_linear([prefix + "self_attn.out_proj"], hidden, hidden),
            mlp_norm=self._load_norm(prefix + "final_layer_norm"),
            up=self._load_linear([prefix + "fc1"], wide, hidden),
            down=self._load_linear([prefix + "fc2"], hidden, wide),
        )

    def forward(self, tokens: Tensor, positions: Tensor, metadata: Metadata, cache: KVCache) -> Tensor:
        """Hidden states (tokens, embed_size) of a flat batch; tokens and positions (tokens,) int64."""
        c = self.config
        hidden = F.embedding(tokens, self.embedding).to(self.row_type)
        if self.project_in is not None:
            hidden = self.project_in(hidden)
        hidden = hidden + F.embedding(positions + POSITION_OFFSET, self.positions)
        for i, layer in enumerate(self.layers):
            x = layer_norm(hidden, *layer.attention_norm, EPS) if c.norm_before else hidden
            heads = layer.qkv(x).view(len(x), 3, c.num_heads, c.head_dim)
            mixed = attend(heads[:, 0], heads[:, 1], heads[:, 2], i, cache, metadata, self.scale)
            hidden = hidden + layer.out(mixed)
            if not c.norm_before:
                hidden = layer_norm(hidden, *layer.attention_norm, EPS)
            x = layer_norm(hidden, *layer.mlp_norm, EPS) if c.norm_before else hidden
            hidden = hidden + layer.down(activation(layer.up(x), "relu"))
            if not c.norm_before:
                hidden = layer_norm(hidden, *layer.mlp_norm, EPS)
        if self.norm is not None:
            hidden = layer_norm(hidden, *self.norm, EPS)
        return hidden if self.project_out is None else self.project_out(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """(rows, vocab_size) float32 for the rows (rows, embed_size) that sample."""
        return self.head(hidden).float()
