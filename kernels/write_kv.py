"""Write new keys and values of one layer into the paged cache.

    key_cache[slots[t]] = key[t],  value_cache[slots[t]] = value[t]      for every t with slots[t] >= 0

key, value (tokens, kv_heads, head_dim), any strides    slots (tokens,) int64, negative = padding, writes nothing
key_cache, value_cache (blocks, block_size, kv_heads, head_dim), contiguous
Slots of one call that are not padding are distinct, so the order of the writes does not show.
"""

from __future__ import annotations

import torch
from torch import Tensor


def write_kv_reference(key: Tensor, value: Tensor, slots: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    """The meaning, also the CPU path."""
    if slots.is_cuda or (slots < 0).any():
        keep = slots >= 0
        key, value, slots = key[keep], value[keep], slots[keep]
    # index_copy_ wants the source contiguous or it walks it element by element.
    key_cache.view(-1, *key.shape[1:]).index_copy_(0, slots, key.contiguous())
    value_cache.view(-1, *value.shape[1:]).index_copy_(0, slots, value.contiguous())


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
    if key.dtype != key_cache.dtype:
        raise ValueError(f"write_kv: keys are {key.dtype} and the cache is {key_cache.dtype}")
    write_kv_reference(key, value, slots, key_cache, value_cache)
