"""Gated activation SwiGLU (Shazeer 2020, equation 6), gate and up projections side by side in one tensor.

    out[t, i] = silu(x[t, i]) * x[t, width + i],      silu(a) = a / (1 + exp(-a))

x (tokens, 2 * width), out (tokens, width)
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_mul_reference(x: Tensor) -> Tensor:
    """The meaning, also the CPU path."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def silu_mul(x: Tensor) -> Tensor:
    """silu of the first half of each row, times its second half.  Raises ValueError for an odd width."""
    if x.shape[-1] % 2:
        raise ValueError(f"silu_mul: width {x.shape[-1]} is odd")
    return silu_mul_reference(x)
