"""Paged attention of one step on a CPU, in a few large torch operations a layer.

Computes what `kernels.paged_attention` computes, and reads the cache through the block tables as it does.  Rows of one
token are gathered together, keys and values in one copy, into memory that all layers of the step share: a fresh
tensor for every layer costs several times the copy itself in page faults.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.cache import KVCache
from kernels.fp8 import movable, to_cache_type

Numbers = npt.NDArray[np.int64]
PADDED = 2.0  # rows are gathered together as long as padding at most doubles what is read


class _Decodes(NamedTuple):
    """Rows of one token, their contexts padded to the longest."""

    tokens: Tensor | None  # (rows,) index into the query; None: the query is these rows, in this order
    slots: Tensor  # (2 * rows * longest,): first the keys', then the values'
    rows: int
    longest: int
    mask: Tensor | None  # (rows, 1, 1, longest), 0 or -inf; None: all are equally long


class _Chunk(NamedTuple):
    """One row of several tokens."""

    first: int  # its tokens are query[first:last]
    last: int
    slots: Tensor  # (2 * end,)
    end: int
    mask: Tensor | None  # (last - first, end), 0 or -inf; None: the row starts at position 0


class CpuAttention:
    """The rows of one step; made once, used by every layer in turn."""

    def __init__(
        self,
        starts: Sequence[int],
        ends: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        slots: Sequence[int],
        cache: KVCache,
        dtype: torch.dtype,
    ) -> None:
        """One entry for each row, and one slot for each token of all rows in order.  dtype: of queries and result.

        Raises ValueError for positions that are none or a table too short for its row, and IndexError for a block or
        slot outside the pool.
        """
        self._cache = cache
        self._dtype = dtype
        size = cache.num_gpu_blocks * cache.block_size
        first, last = np.array(starts, dtype=np.int64), np.array(ends, dtype=np.int64)
        lengths = last - first
        if len(lengths) and (first.min() < 0 or lengths.min() < 0):
            raise ValueError(f"rows from positions {list(starts)} to {list(ends)}")
        to = np.array(slots, dtype=np.int64)
        if len(to) and not 0 <= to.min() <= to.max() < size:
            raise IndexError(f"slots {to.min()} to {to.max()} pass the pool of {size}")
        self._writes = torch.from_numpy(np.concatenate((to, to + size)))  # values lie one pool behind the keys
        begins = np.cumsum(lengths) - lengths
        decodes = np.flatnonzero(lengths == 1)
        alone = len(decodes) == len(lengths)
        self._decodes = [
            self._gather(
                [block_tables[row] for row in rows.tolist()], last[rows], None if alone and whole else begins[rows]
            )
            for rows, whole in _buckets(decodes, last)
        ]
        self._chunks = [
            self._chunk(block_tables[row], int(first[row]), int(last[row]), int(begins[row]))
            for row in np.flatnonzero(lengths > 1).tolist()
        ]
        most = max([len(some.slots) for some in self._decodes] + [len(row.slots) for row in self._chunks], default=0)
        width = cache.flat_layer(0).shape[1]
        self._memory = torch.empty((most, width), dtype=cache.device_pool.dtype)
        self._converted = self._memory if self._memory.dtype == dtype else torch.empty((most, width), dtype=dtype)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float) -> Tensor:
        """Write this step's keys and values, then attend: (tokens, heads * head_dim).

        query (tokens, heads, head_dim), key and value (tokens, kv_heads, head_dim).
        """
        pool = self._cache.flat_layer(layer)
        new = torch.cat((key.flatten(1), value.flatten(1)))
        movable(pool).index_copy_(0, self._writes, movable(to_cache_type(new, pool.dtype)))
        heads, dim = query.shape[1:]
        shape = key.shape[1], heads // key.shape[1], dim
        only = self._decodes[0] if len(self._decodes) == 1 and not self._chunks else None
        if only is not None and only.tokens is None:
            return self._decode(only, query, pool, shape, scale).reshape(-1, heads * dim)
        out = torch.empty((len(query), heads * dim), dtype=query.dtype)
        for some in self._decodes:
            picked = query if some.tokens is None else query[some.tokens]
            out[some.tokens] = self._decode(some, picked, pool, shape, scale).reshape(-1, heads * dim)
        for row in self._chunks:
            out[row.first : row.last] = self._prefill(row, query[row.first : row.last], pool, shape, scale).flatten(1)
        return out

    def _decode(self, some: _Decodes, query: Tensor, pool: Tensor, shape: tuple[int, int, int], scale: float) -> Tensor:
        """(rows, kv_heads, group, head_dim): heads that share a key head stand where query tokens usually are."""
        kv_heads, group, dim = shape
        both = self._read(pool, some.slots).view(2, some.rows, some.longest, kv_heads, dim)
        keys, values = both[0].transpose(1, 2), both[1].transpose(1, 2)
        q = query.view(-1, kv_heads, group, dim)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=some.mask, scale=scale)

    def _prefill(self, row: _Chunk, query: Tensor, pool: Tensor, shape: tuple[int, int, int], scale: float) -> Tensor:
        """(tokens, heads, head_dim)"""
        kv_heads, group, dim = shape
        both = self._read(pool, row.slots).view(2, 1, row.end, kv_heads, dim)
        keys, values = (x.transpose(1, 2).expand(group, -1, -1, -1) for x in both)
        q = query.view(-1, kv_heads, group, dim).permute(2, 1, 0, 3)  # (group, kv_heads, tokens, head_dim)
        done = F.scaled_dot_product_attention(
            q, keys, values, attn_mask=row.mask, is_causal=row.mask is None, scale=scale
        )
        return done.permute(2, 1, 0, 3).flatten(1, 2)

    def _read(self, pool: Tensor, slots: Tensor) -> Tensor:
        """(slots, kv_heads * head_dim) of the pool in the type of the queries, in memory that the next call reuses."""
        read = torch.index_select(pool, 0, slots, out=self._memory[: len(slots)])
        return read if read.dtype == self._dtype else self._converted[: len(slots)].copy_(read)

    def _gather(self, tables: list[Sequence[int]], ends: Numbers, tokens: Numbers | None) -> _Decodes:
        longest = int(ends.max())
        blocks = _padded(tables, -(-longest // self._cache.block_size))
        slots = self._slots(blocks, ends)[:, :longest]
        mask = None
        if ends.min() < longest:
            inside = np.arange(longest) < ends[:, None]
            # Padding reads the row's own first token: finite whenever the row is, and its weight is zero.
            slots = np.where(inside, slots, slots[:, :1])
            mask = self._mask(inside)[:, None, None, :]
        index = None if tokens is None else torch.from_numpy(tokens)
        return _Decodes(index, self._both(slots), len(ends), longest, mask)

    def _chunk(self, table: Sequence[int], start: int, end: int, begin: int) -> _Chunk:
        slots = self._slots(_padded([table], len(table)), np.array([end]))[0, :end]
        mask = None if start == 0 else self._mask(np.arange(end) <= np.arange(start, end)[:, None])
        return _Chunk(begin, begin + end - start, self._both(slots), end, mask)

    def _slots(self, blocks: Numbers, ends: Numbers) -> Numbers:
        """(rows, width * block_size) slots of the blocks (rows, width), which must cover `ends` and lie in the pool."""
        size, count = self._cache.block_size, self._cache.num_gpu_blocks
        if blocks.shape[1] * size < ends.max():
            raise ValueError(f"{blocks.shape[1]} blocks of {size} do not cover {ends.max()} tokens")
        used = blocks[np.arange(blocks.shape[1]) * size < ends[:, None]]
        if len(used) and not 0 <= used.min() <= used.max() < count:
            wrong = used[(used < 0) | (used >= count)]
            if (wrong == _NONE).all():
                raise ValueError(f"a block table is too short: rows end at {ends.tolist()}, blocks hold {size} tokens")
            raise IndexError(f"block {wrong[0]} is outside a cache of {count} blocks")
        return (blocks[:, :, None] * size + np.arange(size)).reshape(len(blocks), -1)

    def _both(self, slots: Numbers) -> Tensor:
        """Indices of keys, then of values."""
        flat = slots.reshape(-1)
        return torch.from_numpy(np.concatenate((flat, flat + self._cache.num_gpu_blocks * self._cache.block_size)))

    def _mask(self, inside: npt.NDArray[Any]) -> Tensor:
        """As numbers to add: attention would turn a mask of truth values into these once a layer."""
        return torch.from_numpy(np.where(inside, np.float32(0), np.float32(-np.inf))).to(self._dtype)


_NONE = -(1 << 40)  # stands in a padded table where there is no block


def _padded(tables: list[Sequence[int]], width: int) -> Numbers:
    return np.array([[*table[:width], *(_NONE,) * (width - len(table))] for table in tables], dtype=np.int64)


def _buckets(rows: Numbers, ends: Numbers) -> list[tuple[Numbers, bool]]:
    """Rows to be gathered together, and whether that is all of them in their order."""
    if len(rows) == 0:
        return []
    lengths = ends[rows]
    if len(rows) * lengths.max() <= PADDED * lengths.sum():
        return [(rows, True)]
    kind = np.ceil(np.log2(np.maximum(lengths, 64))).astype(np.int64)  # within a factor of two
    return [(rows[kind == each], False) for each in np.unique(kind)]
