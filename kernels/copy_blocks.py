"""Copy whole blocks inside one pool, keys and values of all layers.

    pool[:, :, target] = old(pool)[:, :, source]      for every pair (source, target): all reads before any write

pool (layers, 2, blocks, block_size, kv_heads, head_dim), keys at index 0 and values at index 1 of the second dimension
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.dispatch import next_power_of_2, refuse_unless, tl, triton, uses_triton
from kernels.fp8 import movable
from kernels.pairs import BlockPair, check_pairs, pair_indices

CHUNK = 1024  # words of 8 bytes a program moves: 4 warps of threads with four 16-byte accesses each in flight


def copy_blocks_reference(pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    """The meaning, also the CPU path.  The gather is finished before the scatter starts."""
    pool = movable(pool)
    pool.index_copy_(2, targets, pool.index_select(2, sources))


@triton.jit
def move_blocks_kernel(
    source,
    target,
    source_ids,
    target_ids,
    source_layer,
    source_part,
    source_block,
    target_layer,
    target_part,
    target_block,
    words,
    CHUNK: tl.constexpr,
):
    """A program moves one chunk of the keys or the values of one block of one layer."""
    pair = tl.program_id(1).to(tl.int64)
    layer = (tl.program_id(2) // 2).to(tl.int64)
    part = (tl.program_id(2) % 2).to(tl.int64)
    i = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = i < words  # the last chunk of a block may be shorter
    here = tl.load(source_ids + pair).to(tl.int64)  # block * stride passes 2**31
    there = tl.load(target_ids + pair).to(tl.int64)
    row = tl.load(source + layer * source_layer + part * source_part + here * source_block + i, mask=inside)
    tl.store(target + layer * target_layer + part * target_part + there * target_block + i, row, mask=inside)


def as_words(pool: Tensor) -> Tensor:
    """(layers, 2, blocks, words): the same memory as the widest ints that its blocks are made of.

    Copying bits needs no type of number, and eight bytes a lane are half a 16-byte access.
    Raises ValueError when a block of a layer is not contiguous.
    """
    inner = pool.shape[3:].numel()
    if pool.numel() and not pool[0, 0, 0].is_contiguous():
        raise ValueError(f"blocks of a pool with strides {pool.stride()} are not contiguous")
    flat = pool.as_strided((*pool.shape[:3], inner), (*pool.stride()[:3], 1))
    steps = [step * pool.itemsize for step in (inner, flat.storage_offset(), *flat.stride()[:3])]
    words = (torch.int64, torch.int32, torch.int16, torch.int8)
    word = next(word for word in words if all(step % word.itemsize == 0 for step in steps))
    return flat.view(word)


def launch_move_blocks(source: Tensor, target: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """target[:, :, target_ids[i]] = source[:, :, source_ids[i]] for all i; pools as `as_words` gives them.

    The pools are different memory, or no block is both read and written.
    """
    layers, _, _, words = source.shape
    if not len(source_ids) or not words:
        return
    chunk = min(CHUNK, next_power_of_2(words))
    most = (1 << 16) - 1  # the second and third dimension of a grid end there
    refuse_unless(layers * 2 <= most, lambda: f"a pool of {layers} layers")
    for at in range(0, len(source_ids), most):
        count = min(most, len(source_ids) - at)
        move_blocks_kernel[(triton.cdiv(words, chunk), count, layers * 2)](
            source=source,
            target=target,
            source_ids=source_ids[at:],
            target_ids=target_ids[at:],
            source_layer=source.stride(0),
            source_part=source.stride(1),
            source_block=source.stride(2),
            target_layer=target.stride(0),
            target_part=target.stride(1),
            target_block=target.stride(2),
            words=words,
            CHUNK=chunk,
            num_warps=4,
        )


def copy_blocks(pool: Tensor, pairs: Sequence[BlockPair]) -> None:
    """Copy block `source` to block `target` for every pair, in place.  No pairs: nothing happens.

    Raises IndexError for a block outside the pool and ValueError for a repeated target, before anything is copied.
    """
    if not pairs:
        return
    check_pairs(pairs, pool.shape[2], pool.shape[2], "copy")
    sources, targets = (ids.to(pool.device, non_blocking=True) for ids in pair_indices(pairs))
    if not uses_triton(pool):
        copy_blocks_reference(pool, sources, targets)
        return
    words = as_words(pool)
    if not {source for source, _ in pairs} & {target for _, target in pairs}:
        launch_move_blocks(words, words, sources, targets)
        return
    # A chain: some block is read and written.  The reads go to a place of their own first.
    staging = words.new_empty((*words.shape[:2], len(pairs), words.shape[3]))
    places = torch.arange(len(pairs), device=pool.device)
    launch_move_blocks(words, staging, sources, places)
    launch_move_blocks(staging, words, places, targets)
