"""Layer normalisation (Ba, Kiros and Hinton 2016, equation 4).

    out[t] = (x[t] - mean(x[t])) / sqrt(var(x[t]) + eps) * weight + bias         var: biased, over the width

x (tokens, width), weight and bias (width,) or None (1 and 0), out like x.  Computed in float32, cast once at the end.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.dispatch import next_power_of_2, refuse_unless, same_device, tl, triton, uses_triton
from kernels.rms_norm import MAX_WIDTH, norm_warps, rows_of


def layer_norm_reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """The meaning, also the CPU path."""
    weight = None if weight is None else weight.float()
    bias = None if bias is None else bias.float()
    return F.layer_norm(x.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)


@triton.jit
def layer_norm_kernel(
    x,
    weight,
    bias,
    out,
    x_token,
    eps,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """One program for each token.  The variance is taken from differences, not as a difference of two large sums."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PADDED)
    inside = i < WIDTH
    row = tl.load(x + token * x_token + i, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(row) / WIDTH
    away = tl.where(inside, row - mean, 0.0)
    y = away * tl.rsqrt(tl.sum(away * away) / WIDTH + eps)
    if HAS_WEIGHT:
        y = y * tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y = y + tl.load(bias + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + i, y.to(out.dtype.element_ty), mask=inside)


def launch_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Start the kernel on checked arguments."""
    same_device("layer_norm", x=x, weight=weight, bias=bias)
    refuse_unless(x.shape[-1] <= MAX_WIDTH, lambda: f"layer_norm: width {x.shape[-1]} passes {MAX_WIDTH}")
    for name, part in (("weight", weight), ("bias", bias)):
        if part is not None and not part.is_contiguous():
            raise ValueError(f"layer_norm: {name} has stride {part.stride()}")
    flat = rows_of(x)
    tokens, width = flat.shape
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    if tokens:
        layer_norm_kernel[(tokens,)](
            x=flat,
            weight=flat if weight is None else weight,
            bias=flat if bias is None else bias,
            out=out,
            x_token=flat.stride(0),
            eps=eps,
            WIDTH=width,
            PADDED=next_power_of_2(width),
            HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None,
            num_warps=norm_warps(width),
        )
    return out.view(x.shape)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Normalise each token's vector.  Raises ValueError if `weight` or `bias` is not as wide as `x`."""
    for name, part in (("weight", weight), ("bias", bias)):
        if part is not None and part.shape != x.shape[-1:]:
            raise ValueError(f"layer_norm: {name} {tuple(part.shape)} does not fit x {tuple(x.shape)}")
    if uses_triton(x):
        return launch_layer_norm(x, weight, bias, eps)
    return layer_norm_reference(x, weight, bias, eps)
