"""Root mean square normalisation (Zhang and Sennrich 2019, equation 4), with the residual stream's addition before it.

    sum[t] = x[t] + residual[t]                                       rounded to the type of x; x[t] without residual
    out[t] = sum[t] / sqrt(mean_i(sum[t, i]^2) + eps) * weight

x, residual, sum, out (tokens, width), weight (width,).  Computed in float32, cast once at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dispatch import next_power_of_2, refuse_unless, same_device, tl, triton, uses_triton

MAX_WIDTH = 32768  # a row is held in registers: 64 numbers for each thread of 16 warps


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The meaning, also the CPU path."""
    wide = x.float()
    length: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)  # one pass, where square and mean are two
    scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    out: Tensor = (wide * scale).mul_(weight.float())
    return out.to(x.dtype)


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    summed,
    out,
    x_token,
    residual_token,
    eps,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """One program for each token: the row is read once and stays in registers between the two uses."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PADDED)
    inside = i < WIDTH  # PADDED is the next power of two; what is masked counts as 0 in the sum of squares
    row = tl.load(x + token * x_token + i, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        row = row + tl.load(residual + token * residual_token + i, mask=inside, other=0.0).to(tl.float32)
        rounded = row.to(summed.dtype.element_ty)
        tl.store(summed + token * WIDTH + i, rounded, mask=inside)
        row = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row) / WIDTH + eps)
    w = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + i, (row * scale * w).to(out.dtype.element_ty), mask=inside)


def norm_warps(width: int) -> int:
    """Two 16-byte accesses a thread, and no more than 32 warps' worth of a row in registers."""
    return max(1, min(16, next_power_of_2(width) // 512))


def rows_of(x: Tensor) -> Tensor:
    """(tokens, width) with neighbouring numbers of a row next to each other."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()


def launch_rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Start the kernel on checked arguments: (out, sum)."""
    same_device("rms_norm", x=x, weight=weight, residual=residual)
    refuse_unless(x.shape[-1] <= MAX_WIDTH, lambda: f"rms_norm: width {x.shape[-1]} passes {MAX_WIDTH}")
    refuse_unless(weight.is_contiguous(), lambda: f"rms_norm: weight has stride {weight.stride()}")
    flat = rows_of(x)
    tokens, width = flat.shape
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    added = flat if residual is None else rows_of(residual)
    summed = flat if residual is None else torch.empty_like(out)
    if tokens:
        rms_norm_kernel[(tokens,)](
            x=flat,
            residual=added,
            weight=weight,
            summed=summed,
            out=out,
            x_token=flat.stride(0),
            residual_token=added.stride(0),
            eps=eps,
            WIDTH=width,
            PADDED=next_power_of_2(width),
            HAS_RESIDUAL=residual is not None,
            num_warps=norm_warps(width),
        )
    return out.view(x.shape), x if residual is None else summed.view(x.shape)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise each token's vector.  Raises ValueError if `weight` is not as wide as `x`."""
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm: weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}")
    if uses_triton(x):
        return launch_rms_norm(x, weight, eps, None)[0]
    return rms_norm_reference(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(the normalised sum, the sum x + residual).  Raises ValueError where shapes or types differ."""
    if weight.shape != x.shape[-1:] or residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"rms_norm: weight {tuple(weight.shape)} and residual {tuple(residual.shape)} {residual.dtype} do not fit "
            f"x {tuple(x.shape)} {x.dtype}"
        )
    if uses_triton(x):
        return launch_rms_norm(x, weight, eps, residual)
    summed = residual + x
    return rms_norm_reference(summed, weight, eps), summed
