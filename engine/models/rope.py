"""Rotary frequencies of a model, and the angles of a step."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from engine.models.config import ModelConfig, RopeConfig
from engine.models.errors import ModelLoadError


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """(head_dim / 2,) float32: theta^(-2i / head_dim), scaled (Su et al. 2021; scaling see `RopeConfig`).

    llama3 (Grattafiori et al. 2024, section 3.4.1, as published with the weights): a frequency whose wavelength w
    passes original / low is divided by `factor`, one below original / high stays, and between the two the weights
    change linearly in original / w.
    """
    steps = torch.arange(0, head_dim, 2, dtype=torch.int64).float()
    frequencies = 1.0 / rope.theta ** (steps / head_dim)
    if rope.divisors:
        if len(rope.divisors) != head_dim // 2:
            raise ModelLoadError(f"rope_freqs.weight has {len(rope.divisors)} entries; {head_dim // 2} are expected")
        return frequencies / torch.tensor(rope.divisors)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_max_position * frequencies / (2 * math.pi)
        kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        kept = kept.clamp(0.0, 1.0)
        return frequencies * (kept + (1 - kept) / rope.factor)
    return frequencies


def angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of position times frequency, each (tokens, head_dim / 2) float32.  positions (tokens,) int64."""
    turned = positions[:, None].float() * frequencies
    return turned.cos(), turned.sin()


class Turns:
    """cos + i sin of every position, for heads whose pairs are neighbours: turning them is one product in place.

    The table grows with the positions that are asked for.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._frequencies = inverse_frequencies(config.rope, config.head_dim)
        self._table = torch.empty((0, 1, config.head_dim // 2), dtype=torch.complex64)

    def at(self, positions: Tensor) -> Callable[[Tensor], Tensor]:
        """A function that turns float32 heads (tokens, heads, head_dim) of these positions in place."""
        last = int(positions.max()) if len(positions) else 0
        if last >= len(self._table):
            cos, sin = angles(torch.arange(1 << (last + 256).bit_length()), self._frequencies)
            self._table = torch.complex(cos, sin)[:, None]
        turns = self._table[positions]

        def turn(heads: Tensor) -> Tensor:
            torch.view_as_complex(heads.view(*heads.shape[:2], heads.shape[2] // 2, 2)).mul_(turns)
            return heads

        return turn
