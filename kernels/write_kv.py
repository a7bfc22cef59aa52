"""Write new keys and values of one layer into the paged cache.

    key_cache[slots[t]] = key[t],  value_cache[slots[t]] = value[t]      for every t with slots[t] >= 0

key, value (tokens, kv_heads, head_dim), any strides    slots (tokens,) int64, negative = padding, writes nothing
key_cache, value_cache (blocks, block_size, kv_heads, head_dim), each token's heads contiguous
The cache has the type of the keys, or float8_e4m3fn: then values beyond its largest, 448, are held at it.
Slots of one call that are not padding are distinct, so the order of the writes does not show.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dispatch import is_interpreted, next_power_of_2, same_device, tl, triton, uses_triton
from kernels.fp8 import FP8, movable, to_cache_type


def write_kv_reference(key: Tensor, value: Tensor, slots: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    """The meaning, also the CPU path."""
    if slots.is_cuda or (slots < 0).any():
        keep = slots >= 0
        key, value, slots = key[keep], value[keep], slots[keep]
    for cache, new in ((key_cache, key), (value_cache, value)):
        # index_copy_ wants the source contiguous or it walks it element by element.
        new = movable(to_cache_type(new, cache.dtype).contiguous())
        movable(cache).view(-1, *key.shape[1:]).index_copy_(0, slots, new)


@triton.jit
def nearest_fp8(x):
    """The float32 within the type's range that is nearest to x and held by float8_e4m3fn; ties to the even one."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)  # keeps 3 bits of 23
    small = (x + 24576.0) - 24576.0  # below 2^-6 the type's values are 2^-9 apart, as float32's around 24576 are
    return tl.where(tl.abs(x) < 0.015625, small, normal)


@triton.jit
def write_kv_kernel(
    key,
    value,
    slots,
    key_cache,
    value_cache,
    key_token,
    key_head,
    value_token,
    value_head,
    block_stride,
    slot_stride,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    IS_FP8: tl.constexpr,
    ROUND: tl.constexpr,
):
    """One program for each token: keys and values of all its heads are two contiguous runs of the cache."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)  # slot * slot_stride passes 2**31
    if slot >= 0:
        head = tl.arange(0, HEADS_PADDED)[:, None].to(tl.int64)
        d = tl.arange(0, DIM_PADDED)[None, :]
        inside = (head < HEADS) & (d < DIM)  # both may be padded to a power of two
        k = tl.load(key + token * key_token + head * key_head + d, mask=inside, other=0.0)
        v = tl.load(value + token * value_token + head * value_head + d, mask=inside, other=0.0)
        if IS_FP8:
            k = tl.minimum(tl.maximum(k.to(tl.float32), -448.0), 448.0)
            v = tl.minimum(tl.maximum(v.to(tl.float32), -448.0), 448.0)
            if ROUND:
                k, v = nearest_fp8(k), nearest_fp8(v)
        to = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride + head * DIM + d
        tl.store(key_cache + to, k.to(key_cache.dtype.element_ty), mask=inside)
        tl.store(value_cache + to, v.to(value_cache.dtype.element_ty), mask=inside)


def launch_write_kv(key: Tensor, value: Tensor, slots: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    """Start the kernel on checked arguments."""
    same_device("write_kv", key=key, value=value, slots=slots, key_cache=key_cache, value_cache=value_cache)
    tokens, heads, dim = key.shape
    if tokens == 0:
        return
    if not slots.is_contiguous():
        raise ValueError(f"write_kv: slots must be contiguous, not of stride {slots.stride(0)}")
    if not slots.is_cuda and int(slots.max()) >= key_cache.shape[0] * key_cache.shape[1]:  # free to ask on the CPU
        raise IndexError(f"write_kv: slot {int(slots.max())} is outside a cache of {tuple(key_cache.shape[:2])}")
    if key_cache.stride()[1:] != (heads * dim, dim, 1) or key_cache.stride() != value_cache.stride():
        raise ValueError(f"write_kv: the slots of the caches are not contiguous, strides {key_cache.stride()}")
    key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (key, value))
    width = next_power_of_2(heads) * next_power_of_2(dim)
    write_kv_kernel[(tokens,)](
        key=key,
        value=value,
        slots=slots,
        key_cache=key_cache,
        value_cache=value_cache,
        key_token=key.stride(0),
        key_head=key.stride(1),
        value_token=value.stride(0),
        value_head=value.stride(1),
        block_stride=key_cache.stride(0),
        slot_stride=key_cache.stride(1),
        BLOCK_SIZE=key_cache.shape[1],
        HEADS=heads,
        DIM=dim,
        HEADS_PADDED=next_power_of_2(heads),
        DIM_PADDED=next_power_of_2(dim),
        IS_FP8=key_cache.dtype == FP8 and key.dtype != FP8,
        ROUND=is_interpreted(write_kv_kernel),  # whose cast loses the carry of a mantissa that rounds up
        num_warps=write_kv_warps(width),
    )


def write_kv_warps(width: int) -> int:
    """A thread moves 16 bytes of each of the two: 8 elements of 2 bytes.  More warps would leave threads idle."""
    return max(1, min(8, width // 256))


def write_kv(key: Tensor, value: Tensor, slots: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    """Write `key` and `value` into their slots, in place.  See the head of this file for shapes.

    Raises ValueError where shapes or types do not fit, and IndexError (on the CPU) for a slot outside the cache.
    """
    if key.shape != value.shape or key.shape[1:] != key_cache.shape[2:] or key_cache.shape != value_cache.shape:
        raise ValueError(
            f"write_kv: key {tuple(key.shape)} and value {tuple(value.shape)} do not fit caches "
            f"{tuple(key_cache.shape)} and {tuple(value_cache.shape)}"
        )
    if slots.dtype != torch.int64 or slots.shape != key.shape[:1]:
        raise ValueError(f"write_kv: slots must be int64 ({key.shape[0]},), not {slots.dtype} {tuple(slots.shape)}")
    if key.dtype != key_cache.dtype and key_cache.dtype != FP8:
        raise ValueError(f"write_kv: keys are {key.dtype} and the cache is {key_cache.dtype}")
    if uses_triton(key):
        launch_write_kv(key, value, slots, key_cache, value_cache)
    else:
        write_kv_reference(key, value, slots, key_cache, value_cache)
