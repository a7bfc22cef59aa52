"""Gated activation SwiGLU (Shazeer 2020, equation 6), gate and up projections side by side in one tensor.

    out[t, i] = silu(x[t, i]) * x[t, width + i],      silu(a) = a / (1 + exp(-a))

x (tokens, 2 * width), out (tokens, width)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.dispatch import next_power_of_2, tl, triton, uses_triton
from kernels.rms_norm import rows_of

CHUNK = 1024  # 4 warps, one 16-byte access of half-precision numbers for each thread and operand


def silu_mul_reference(x: Tensor) -> Tensor:
    """The meaning, also the CPU path."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@triton.jit
def silu_mul_kernel(x, out, x_token, width, CHUNK: tl.constexpr):
    """A program makes one chunk of one token's row."""
    token = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = i < width  # the last chunk of a row may be shorter
    gate = tl.load(x + token * x_token + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + token * x_token + width + i, mask=inside, other=0.0).to(tl.float32)
    # The reference rounds silu to the type before the product; so does this.
    silu = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + token * width + i, (silu * up).to(out.dtype.element_ty), mask=inside)


def launch_silu_mul(x: Tensor) -> Tensor:
    """Start the kernel on checked arguments."""
    flat = rows_of(x)
    tokens, width = flat.shape[0], flat.shape[1] // 2
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    chunk = min(CHUNK, next_power_of_2(width))
    most = (1 << 16) - 1  # the second dimension of a grid ends there
    for at in range(0, tokens if width else 0, most):
        some = flat[at : at + most]
        silu_mul_kernel[(triton.cdiv(width, chunk), len(some))](
            x=some, out=out[at:], x_token=flat.stride(0), width=width, CHUNK=chunk, num_warps=4
        )
    return out.view(*x.shape[:-1], width)


def silu_mul(x: Tensor) -> Tensor:
    """silu of the first half of each row, times its second half.  Raises ValueError for an odd width."""
    if x.shape[-1] % 2:
        raise ValueError(f"silu_mul: width {x.shape[-1]} is odd")
    return launch_silu_mul(x) if uses_triton(x) else silu_mul_reference(x)
