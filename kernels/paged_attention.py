"""Causal attention of mixed rows over the paged cache of one layer.

    out[t, h] = sum_p softmax_p(scale * query[t, h] . K[p, g]) V[p, g]       p = 0 .. position of t,  g = h // group

with group = heads / kv_heads (Ainslie et al. 2023) and K[p], V[p] found at block_table[p // block_size], offset
p % block_size (Kwon et al. 2023, equation 4).  A row is a run of query tokens at positions start .. end - 1 of one
sequence; a decode is a row of one token.  Keys and values at positions end and beyond are never used: what lies in
the rest of the last block, or in blocks of others, may be anything, NaN included.

query (tokens, heads, head_dim)    key_cache, value_cache (blocks, block_size, kv_heads, head_dim), contiguous
out (tokens, heads, head_dim), type of query
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class _Decodes(NamedTuple):
    """Rows of one token with contexts of similar length, padded to the longest."""

    tokens: Tensor  # (rows,) index into query
    slots: Tensor  # (rows * longest,)
    longest: int
    mask: Tensor | None  # (rows, 1, 1, longest), True = attend; None: all are equally long


class _Chunk(NamedTuple):
    """One row of several tokens."""

    first: int  # its tokens are query[first:last]
    last: int
    slots: Tensor  # (end,)
    mask: Tensor | None  # (last - first, end), True = attend; None: the row starts at position 0


class PagedRows:
    """The rows of one step, made once and read by every layer.

    query_starts (rows + 1,) int64: row r owns tokens query_starts[r] .. query_starts[r + 1] - 1.
    starts, ends (rows,) int64: first position of its tokens, and one past the last, which is also its context.
    block_tables (rows, most blocks) int64, padded with 0.
    """

    def __init__(
        self,
        starts: Sequence[int],
        ends: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """Copies what it needs of the tables.  Raises ValueError for a table too short for its row."""
        for row, (start, end, table) in enumerate(zip(starts, ends, block_tables, strict=True)):
            if not 0 <= start <= end:
                raise ValueError(f"row {row}: positions {start} to {end}")
            if len(table) * block_size < end:
                raise ValueError(f"row {row}: {len(table)} blocks of {block_size} do not cover {end} tokens")
        self.block_size = block_size
        self.device = torch.device(device)
        self._spans = list(zip(starts, ends, strict=True))
        self.max_query = max((end - start for start, end in self._spans), default=0)
        self.max_context = max(ends, default=0)
        self._query_starts = [0]
        for start, end in self._spans:
            self._query_starts.append(self._query_starts[-1] + end - start)
        self.num_tokens = self._query_starts[-1]
        width = -(-self.max_context // block_size)
        needed = [-(-end // block_size) for end in ends]
        padded = [[*table[:n], *(0,) * (width - n)] for table, n in zip(block_tables, needed, strict=True)]
        self.block_tables = torch.tensor(padded, dtype=torch.int64, device=device).view(len(padded), width)
        self.starts = torch.tensor(starts, dtype=torch.int64, device=device)
        self.ends = torch.tensor(ends, dtype=torch.int64, device=device)
        self.query_starts = torch.tensor(self._query_starts, dtype=torch.int64, device=device)

    def _slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Slots of `positions` (rows, any) of the given rows."""
        blocks = self.block_tables[rows].gather(1, positions // self.block_size)
        return blocks * self.block_size + positions % self.block_size

    @cached_property
    def decodes(self) -> list[_Decodes]:
        """Rows of one token.  A bucket holds contexts within a factor of two, so padding at most doubles the work."""
        buckets: dict[int, list[int]] = {}
        for row, (start, end) in enumerate(self._spans):
            if end - start == 1:
                buckets.setdefault((max(end, 64) - 1).bit_length(), []).append(row)
        made = []
        for bucket in buckets.values():
            lengths = [self._spans[row][1] for row in bucket]
            longest = max(lengths)
            rows = torch.tensor(bucket, dtype=torch.int64, device=self.device)
            positions = torch.arange(longest, device=self.device)
            inside = positions < self.ends[rows, None]
            # Padding reads the row's own first token: finite whenever the row is, and its weight is zero.
            slots = self._slots(rows, positions * inside)
            mask = None if min(lengths) == longest else inside[:, None, None, :]
            made.append(_Decodes(self.query_starts[rows], slots.view(-1), longest, mask))
        return made

    @cached_property
    def chunks(self) -> list[_Chunk]:
        """Rows of two tokens and more."""
        made = []
        for row, (start, end) in enumerate(self._spans):
            if end - start < 2:
                continue
            positions = torch.arange(end, device=self.device)
            slots = self._slots(torch.tensor([row], device=self.device), positions[None]).view(-1)
            mask = None if start == 0 else positions <= positions[start:, None]
            made.append(_Chunk(self._query_starts[row], self._query_starts[row + 1], slots, mask))
        return made


def paged_attention_reference(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, rows: PagedRows, scale: float
) -> Tensor:
    """The meaning, also the CPU path: gather exactly the context, then dense attention."""
    kv_heads, head_dim = key_cache.shape[2:]
    group = query.shape[1] // kv_heads
    keys, values = (cache.view(-1, kv_heads, head_dim) for cache in (key_cache, value_cache))
    query = query.reshape(-1, kv_heads, group, head_dim)
    out = torch.empty_like(query)
    for some in rows.decodes:
        shape = (-1, some.longest, kv_heads, head_dim)
        k = keys.index_select(0, some.slots).view(shape).transpose(1, 2)  # (rows, kv_heads, longest, head_dim)
        v = values.index_select(0, some.slots).view(shape).transpose(1, 2)
        # The heads that share a key head stand where the query tokens usually are.
        out[some.tokens] = F.scaled_dot_product_attention(query[some.tokens], k, v, attn_mask=some.mask, scale=scale)
    for row in rows.chunks:
        q = query[row.first : row.last].permute(2, 1, 0, 3)  # (group, kv_heads, tokens, head_dim)
        k = keys.index_select(0, row.slots).transpose(0, 1).expand(group, -1, -1, -1)
        v = values.index_select(0, row.slots).transpose(0, 1).expand(group, -1, -1, -1)
        done = F.scaled_dot_product_attention(q, k, v, attn_mask=row.mask, is_causal=row.mask is None, scale=scale)
        out[row.first : row.last] = done.permute(2, 1, 0, 3)
    return out.view(-1, kv_heads * group, head_dim)


def paged_attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, rows: PagedRows, scale: float) -> Tensor:
    """Attention of every query token over the context of its row.  See the head of this file for shapes.

    Raises ValueError where shapes do not fit, and IndexError (on the CPU) for a block outside the cache.
    """
    if key_cache.shape != value_cache.shape or query.shape[2] != key_cache.shape[3]:
        raise ValueError(f"paged_attention: query {tuple(query.shape)} does not fit cache {tuple(key_cache.shape)}")
    if query.shape[1] % key_cache.shape[2]:
        raise ValueError(f"paged_attention: {query.shape[1]} heads cannot share {key_cache.shape[2]} KV heads evenly")
    if query.shape[0] != rows.num_tokens:
        raise ValueError(f"paged_attention: {query.shape[0]} query tokens, but the rows have {rows.num_tokens}")
    if key_cache.shape[1] != rows.block_size:
        raise ValueError(f"paged_attention: blocks of {key_cache.shape[1]}, but the rows have {rows.block_size}")
    return paged_attention_reference(query, key_cache, value_cache, rows, scale)
