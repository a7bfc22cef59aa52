"""Root mean square normalisation (Zhang and Sennrich 2019, equation 4).

    out[t] = x[t] / sqrt(mean_i(x[t, i]^2) + eps) * weight

x (tokens, width), weight (width,), out like x.  Computed in float32, cast once at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The meaning, also the CPU path."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise each token's vector.  Raises ValueError if `weight` is not as wide as `x`."""
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm: weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}")
    return rms_norm_reference(x, weight, eps)
