"""Rotary position embedding (Su et al. 2021, equation 34).

Llama pairs the two halves of a head; GPT-NeoX (Black et al. 2022) does so with the first part of it only, and the rest
passes as it is; interleaved (GPT-J) pairs neighbours.  With (a, b) = (i, i + half), or (2i, 2i + 1) interleaved,

    out[t, h, a] = x[t, h, a] * cos[t, i] - x[t, h, b] * sin[t, i]                 i = 0 .. half - 1
    out[t, h, b] = x[t, h, b] * cos[t, i] + x[t, h, a] * sin[t, i]

x (tokens, heads, head_dim), any strides; cos, sin (tokens, half) float32 = cos and sin of position * inv_freq[i],
half <= head_dim / 2; out (tokens, heads, head_dim) contiguous, type of x.  Computed in float32, cast once at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dispatch import next_power_of_2, same_device, tl, triton, uses_triton

HEADS_AT_ONCE = 16  # 16 heads of 128 are 2048 numbers: 16 for each thread of 4 warps


def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """The meaning, also the CPU path."""
    half = cos.shape[1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    if not interleaved and 2 * half == x.shape[-1]:
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    turned = x[..., : 2 * half].float()
    first, second = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    done = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((done.to(x.dtype), x[..., 2 * half :]), dim=-1)


@triton.jit
def rotary_kernel(
    x,
    cos,
    sin,
    out,
    x_token,
    x_head,
    heads,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """A program turns some heads of one token, which share its angles."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS_AT_ONCE + tl.arange(0, HEADS_AT_ONCE))[:, None].to(tl.int64)
    i = tl.arange(0, HALF_PADDED)
    c = tl.load(cos + token * HALF + i, mask=i < HALF, other=0.0)[None, :]
    s = tl.load(sin + token * HALF + i, mask=i < HALF, other=0.0)[None, :]
    if INTERLEAVED:
        a = 2 * i[None, :]
        b = 2 * i[None, :] + 1
    else:
        a = i[None, :]
        b = i[None, :] + HALF
    inside = (head < heads) & (i[None, :] < HALF)  # the last program may have fewer heads; HALF may be padded
    read = x + token * x_token + head * x_head
    write = out + token * heads * DIM + head * DIM
    first = tl.load(read + a, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(read + b, mask=inside, other=0.0).to(tl.float32)
    tl.store(write + a, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(write + b, (second * c + first * s).to(out.dtype.element_ty), mask=inside)
    if 2 * HALF < DIM:
        rest = 2 * HALF + tl.arange(0, REST_PADDED)[None, :]
        inside = (head < heads) & (rest < DIM)
        tl.store(write + rest, tl.load(read + rest, mask=inside, other=0.0), mask=inside)


def launch_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Start the kernel on checked arguments."""
    same_device("rotary", x=x, cos=cos, sin=sin)
    cos, sin = cos.contiguous(), sin.contiguous()
    x = x if x.stride(2) == 1 else x.contiguous()
    tokens, heads, dim = x.shape
    half = cos.shape[1]
    out = torch.empty((tokens, heads, dim), dtype=x.dtype, device=x.device)
    at_once = min(HEADS_AT_ONCE, next_power_of_2(heads))
    if out.numel():
        rotary_kernel[(tokens, triton.cdiv(heads, at_once))](
            x=x,
            cos=cos,
            sin=sin,
            out=out,
            x_token=x.stride(0),
            x_head=x.stride(1),
            heads=heads,
            DIM=dim,
            HALF=half,
            HALF_PADDED=next_power_of_2(half),
            REST_PADDED=next_power_of_2(dim - 2 * half),
            HEADS_AT_ONCE=at_once,
            INTERLEAVED=interleaved,
            num_warps=4,
        )
    return out


def rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Turn every head of every token by its position.  Queries and keys may come in one tensor.

    Raises ValueError where shapes do not fit or head_dim is odd.
    """
    half = cos.shape[-1]
    fits = x.shape[-1] % 2 == 0 and 0 < half <= x.shape[-1] // 2
    if not fits or cos.shape != (x.shape[0], half) or sin.shape != cos.shape:
        raise ValueError(f"rotary: cos {tuple(cos.shape)} and sin {tuple(sin.shape)} do not fit x {tuple(x.shape)}")
    if uses_triton(x):
        return launch_rotary(x, cos, sin, interleaved)
    return rotary_reference(x, cos, sin, interleaved)
