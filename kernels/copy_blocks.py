"""Copy whole blocks inside one pool, keys and values of all layers.

    pool[:, :, target] = old(pool)[:, :, source]      for every pair (source, target): all reads before any write

pool (layers, 2, blocks, block_size, kv_heads, head_dim), keys at index 0 and values at index 1 of the second dimension
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kernels.pairs import BlockPair, check_pairs, pair_indices


def copy_blocks_reference(pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    """The meaning, also the CPU path.  The gather is finished before the scatter starts."""
    pool.index_copy_(2, targets, pool.index_select(2, sources))


def copy_blocks(pool: Tensor, pairs: Sequence[BlockPair]) -> None:
    """Copy block `source` to block `target` for every pair, in place.  No pairs: nothing happens.

    Raises IndexError for a block outside the pool and ValueError for a repeated target, before anything is copied.
    """
    if not pairs:
        return
    check_pairs(pairs, pool.shape[2], pool.shape[2], "copy")
    sources, targets = pair_indices(pairs)
    copy_blocks_reference(pool, sources.to(pool.device), targets.to(pool.device))
