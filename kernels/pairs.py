"""The index arithmetic that block moves share: lists of pairs become checked index tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BlockPair = tuple[int, int]


def check_pairs(pairs: Sequence[BlockPair], num_sources: int, num_targets: int, move: str) -> None:
    """Every source and target lies in its pool and no target is named twice.

    move: what is being done, for the message ("swap out", say).
    Raises IndexError for an id outside its pool and ValueError for a repeated target, each naming the id.
    """
    seen: set[int] = set()
    for source, target in pairs:
        if not 0 <= source < num_sources:
            raise IndexError(f"{move}: source block {source} is outside the pool of {num_sources} blocks")
        if not 0 <= target < num_targets:
            raise IndexError(f"{move}: target block {target} is outside the pool of {num_targets} blocks")
        if target in seen:
            raise ValueError(f"{move}: target block {target} is named twice")
        seen.add(target)


def pair_indices(pairs: Sequence[BlockPair]) -> tuple[Tensor, Tensor]:
    """Sources and targets as two int64 tensors (pairs,) on the CPU."""
    both = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    return both[:, 0].contiguous(), both[:, 1].contiguous()
