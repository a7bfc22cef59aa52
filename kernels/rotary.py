"""Rotary position embedding (Su et al. 2021, equation 34), the two halves of a head paired as Llama does.

    out[t, h, i]        = x[t, h, i] * cos[t, i]        - x[t, h, i + half] * sin[t, i]         half = head_dim / 2
    out[t, h, i + half] = x[t, h, i + half] * cos[t, i] + x[t, h, i] * sin[t, i]

x (tokens, heads, head_dim), any strides; cos, sin (tokens, half) float32 = cos and sin of position * inv_freq[i]
out (tokens, heads, head_dim) contiguous, type of x.  Computed in float32, cast once at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The meaning, also the CPU path."""
    cos, sin = cos[:, None, :], sin[:, None, :]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn every head of every token by its position.  Queries and keys may come in one tensor.

    Raises ValueError where shapes do not fit or head_dim is odd.
    """
    if x.shape[-1] % 2 or cos.shape != (x.shape[0], x.shape[-1] // 2) or sin.shape != cos.shape:
        raise ValueError(f"rotary: cos {tuple(cos.shape)} and sin {tuple(sin.shape)} do not fit x {tuple(x.shape)}")
    return rotary_reference(x, cos, sin)
