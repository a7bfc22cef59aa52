"""What all models share: the step's attention metadata, and one layer of paged attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cache import KVCache
from engine.models.cpu_attention import CpuAttention
from kernels.paged_attention import PagedRows, paged_attention
from kernels.write_kv import write_kv


@dataclass(frozen=True)
class AttentionMetadata:
    """Where the tokens of one step lie: `slots` (tokens,) int64 to write, and the rows to read.  Made once a step."""

    slots: Tensor
    rows: PagedRows

    @classmethod
    def build(
        cls,
        starts: Sequence[int],
        ends: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        slots: Sequence[int],
        block_size: int,
        device: torch.device | str = "cpu",
        partition: int | None = None,
    ) -> AttentionMetadata:
        """One entry for each row, and one slot for each token of all rows in order.  partition: see `PagedRows`."""
        rows = PagedRows(starts, ends, block_tables, block_size, device, partition)
        return cls(torch.tensor(slots, dtype=torch.int64, device=device), rows)


Metadata = AttentionMetadata | CpuAttention


def attend(
    query: Tensor, key: Tensor, value: Tensor, layer: int, cache: KVCache, metadata: Metadata, scale: float
) -> Tensor:
    """Write this step's keys and values, then attend: (tokens, heads * head_dim).

    query (tokens, heads, head_dim), key and value (tokens, kv_heads, head_dim).  All writes of the step come before
    any read, since a row may read blocks that another row of the same step writes.
    """
    if isinstance(metadata, CpuAttention):
        return metadata.attend(query, key, value, layer, scale)
    key_cache, value_cache = cache.layer(layer)
    write_kv(key, value, metadata.slots, key_cache, value_cache)
    return paged_attention(query, key_cache, value_cache, metadata.rows, scale).flatten(1)
