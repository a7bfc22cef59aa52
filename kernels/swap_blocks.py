"""Move whole blocks from one pool to another (GPU to CPU or back), keys and values of all layers.

    target_pool[:, :, target] = source_pool[:, :, source]      for every pair (source, target)

both pools (layers, 2, blocks, block_size, kv_heads, head_dim), equal but for the number of blocks
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kernels.pairs import BlockPair, check_pairs, pair_indices


def swap_blocks_reference(source_pool: Tensor, target_pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    """The meaning, also the CPU path.  Index tensors lie on the CPU."""
    moved = source_pool.index_select(2, sources.to(source_pool.device))
    target_pool.index_copy_(2, targets.to(target_pool.device), moved.to(target_pool.device))


def swap_blocks(source_pool: Tensor, target_pool: Tensor, pairs: Sequence[BlockPair], move: str = "swap") -> None:
    """Copy block `source` of one pool to block `target` of the other for every pair.  No pairs: nothing happens.

    move: the word for error messages ("swap out" or "swap in").  Contents of the source stay as they are.
    Raises IndexError for a block outside its pool and ValueError for pools that differ or a repeated target, before
    anything is copied.
    """
    if source_pool.shape[:2] != target_pool.shape[:2] or source_pool.shape[3:] != target_pool.shape[3:]:
        raise ValueError(f"{move}: pools {tuple(source_pool.shape)} and {tuple(target_pool.shape)} do not match")
    if source_pool.dtype != target_pool.dtype:
        raise ValueError(f"{move}: pools hold {source_pool.dtype} and {target_pool.dtype}")
    if not pairs:
        return
    check_pairs(pairs, source_pool.shape[2], target_pool.shape[2], move)
    swap_blocks_reference(source_pool, target_pool, *pair_indices(pairs))
