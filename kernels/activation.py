"""ReLU and GELU (Hendrycks and Gimpel 2016), alone or as a gate (Shazeer 2020, equation 6).

out[t, i] = act(x[t, i])                       x, out (tokens, width)
out[t, i] = act(x[t, i]) * x[t, width + i]     gated: x (tokens, 2 * width), out (tokens, width)

relu(a) = max(a, 0)     gelu(a) = a / 2 * (1 + erf(a / sqrt 2))
gelu_tanh(a) = a / 2 * (1 + tanh(sqrt(2 / pi) * (a + 0.044715 a^3)))
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.dispatch import next_power_of_2, refuse_unless, tl, triton, uses_triton
from kernels.rms_norm import rows_of
from kernels.silu_mul import CHUNK

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
KINDS = {name: kind for kind, name in enumerate(ACTIVATIONS)}


def activation_reference(x: Tensor, name: str, gated: bool) -> Tensor:
    """The meaning, also the CPU path."""
    act = ACTIVATIONS[name]
    if not gated:
        return act(x)
    gate, up = x.chunk(2, dim=-1)
    return act(gate) * up


@triton.jit
def activation_kernel(x, out, x_token, width, CHUNK: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr):
    """A program makes one chunk of one token's row."""
    token = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = i < width  # the last chunk of a row may be shorter
    a = tl.load(x + token * x_token + i, mask=inside, other=0.0).to(tl.float32)
    if KIND == 0:
        y = tl.where(a < 0.0, 0.0, a)  # NaN stays NaN, as torch has it
    elif KIND == 1:
        y = 0.5 * a * (1.0 + tl.erf(a * 0.7071067811865476))
    else:
        # tanh(z) = 1 - 2 / (1 + exp(2 z)): right at both ends, where exp is 0 or inf
        z = 0.7978845608028654 * (a + 0.044715 * a * a * a)
        y = 0.5 * a * (2.0 - 2.0 / (1.0 + tl.exp(2.0 * z)))
    if GATED:
        up = tl.load(x + token * x_token + width + i, mask=inside, other=0.0).to(tl.float32)
        y = y.to(out.dtype.element_ty).to(tl.float32) * up  # rounded before the product, as the reference does
    tl.store(out + token * width + i, y.to(out.dtype.element_ty), mask=inside)


def launch_activation(x: Tensor, name: str, gated: bool) -> Tensor:
    """Start the kernel on checked arguments."""
    flat = rows_of(x)
    tokens, width = flat.shape[0], flat.shape[1] // (2 if gated else 1)
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    chunk = min(CHUNK, next_power_of_2(width))
    most = (1 << 16) - 1  # the second dimension of a grid ends there
    for at in range(0, tokens if width else 0, most):
        some = flat[at : at + most]
        activation_kernel[(triton.cdiv(width, chunk), len(some))](
            x=some,
            out=out[at:],
            x_token=flat.stride(0),
            width=width,
            CHUNK=chunk,
            KIND=KINDS[name],
            GATED=gated,
            num_warps=4,
        )
    return out.view(*x.shape[:-1], width)


def activation(x: Tensor, name: str, gated: bool = False) -> Tensor:
    """relu, gelu or gelu_tanh of x; gated: of its first half, times its second half.

    Raises ValueError for another name, or for an odd width where a gate is asked for.
    """
    refuse_unless(name in KINDS, lambda: f"activation {name!r} is not one of {', '.join(KINDS)}")
    refuse_unless(not gated or x.shape[-1] % 2 == 0, lambda: f"activation: width {x.shape[-1]} is odd")
    # Alone there is nothing to fuse, and torch's own is at the memory's bandwidth.
    return launch_activation(x, name, gated) if gated and uses_triton(x) else activation_reference(x, name, gated)
