"""Layer normalisation (Ba, Kiros and Hinton 2016, equation 4).

    out[t] = (x[t] - mean(x[t])) / sqrt(var(x[t]) + eps) * weight + bias         var: biased, over the width

x (tokens, width), weight and bias (width,) or None (1 and 0), out like x.  Computed in float32, cast once at the end.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def layer_norm_reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """The meaning, also the CPU path."""
    weight = None if weight is None else weight.float()
    bias = None if bias is None else bias.float()
    return F.layer_norm(x.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Normalise each token's vector.  Raises ValueError if `weight` or `bias` is not as wide as `x`."""
    for name, part in (("weight", weight), ("bias", bias)):
        if part is not None and part.shape != x.shape[-1:]:
            raise ValueError(f"layer_norm: {name} {tuple(part.shape)} does not fit x {tuple(x.shape)}")
    return layer_norm_reference(x, weight, bias, eps)
