"""The rows of one step, as attention reads them: where their tokens, contexts and blocks are.

A row is a run of query tokens at positions start .. end - 1 of one sequence; a decode is a row of one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

PARTITION = 512  # tokens of context one program of a decode reads: 2 % of its bytes are then partial results
MOST_SPLITS = 32  # partial results of a row that one program can put together in its registers


def partition_for(longest: int) -> int:
    """Tokens of a partition where no context is longer: PARTITION, doubled until MOST_SPLITS partitions suffice.

    It depends on the engine's longest sequence and never on a batch, so a row's arithmetic does not either.
    """
    partition = PARTITION
    while partition * MOST_SPLITS < longest:
        partition *= 2
    return partition


class Tiles(NamedTuple):
    """Pieces of rows of at most so many tokens each, longest context first: the grid of the prefill kernel."""

    rows: Tensor  # (tiles,) int64
    firsts: Tensor  # (tiles,) int64: the tile's first token, counted from the row's first


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
        partition: int | None = None,
    ) -> None:
        """Copies what it needs of the tables.  Raises ValueError for a table too short for its row.

        partition: see `partition_for`, whose answer for the longest row is taken when it is None.
        """
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
        self._tiles: dict[tuple[int, bool], Tiles] = {}
        self.partition = partition or partition_for(self.max_context)
        width = -(-self.max_context // block_size)
        needed = [-(-end // block_size) for end in ends]
        padded = [[*table[:n], *(0,) * (width - n)] for table, n in zip(block_tables, needed, strict=True)]
        self.block_tables = self._tensor(padded).view(len(padded), width)
        self.starts = self._tensor(starts)
        self.ends = self._tensor(ends)
        self.query_starts = self._tensor(self._query_starts)

    def _tensor(self, numbers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        made = torch.tensor(numbers, dtype=torch.int64)
        if self.device.type == "cpu":
            return made
        return made.pin_memory().to(self.device, non_blocking=True)  # from pageable memory the copy would wait

    @classmethod
    def of_decodes(
        cls, ends: Tensor, block_tables: Tensor, arange: Tensor, block_size: int, max_context: int, partition: int
    ) -> PagedRows:
        """Rows of one token each over tensors that somebody keeps, for the kernels alone; an end of 0 is padding.

        arange (rows + 1,): 0, 1, 2 and so on.  max_context: no end passes it; ids beyond a row's end are not read.
        """
        self = cls.__new__(cls)
        self.block_size = block_size
        self.device = ends.device
        self.partition = partition
        self._spans = []
        self._query_starts = []
        self.num_tokens = len(ends)
        self.max_query, self.max_context = 1, max_context
        self.block_tables, self.ends, self.starts = block_tables, ends, ends - 1
        self.query_starts = arange
        self.decode_rows = arange[:-1]
        self._tiles = {}
        return self

    @property
    def num_splits(self) -> int:
        """Partitions of the longest context."""
        return max(1, -(-self.max_context // self.partition))

    @cached_property
    def decode_rows(self) -> Tensor:
        """(decodes,) int64: the rows of one token."""
        return self._tensor([row for row, (start, end) in enumerate(self._spans) if end - start == 1])

    def tiles(self, tokens: int, decodes_ride: bool = False) -> Tiles:
        """Rows of two tokens and more, or with `decodes_ride` all rows, in pieces of at most `tokens` tokens."""
        key = tokens, decodes_ride
        if key not in self._tiles:
            least = 1 if decodes_ride else 2
            cut = [
                (min(start + first + tokens, end), row, first)
                for row, (start, end) in enumerate(self._spans)
                if end - start >= least
                for first in range(0, end - start, tokens)
            ]
            cut.sort(key=lambda tile: -tile[0])  # programs start in order: the longest last would run alone
            both = self._tensor([[tile[1] for tile in cut], [tile[2] for tile in cut]])
            self._tiles[key] = Tiles(both[0], both[1])
        return self._tiles[key]

    def check_blocks(self, num_blocks: int) -> None:
        """Raises IndexError for a block outside a pool of `num_blocks`, entries past a row's end apart."""
        if self.block_tables.numel():
            used = torch.arange(self.block_tables.shape[1], device=self.device) * self.block_size < self.ends[:, None]
            wrong = used & ((self.block_tables < 0) | (self.block_tables >= num_blocks))
            if bool(wrong.any()):
                raise IndexError(f"block {int(self.block_tables[wrong][0])} is outside a cache of {num_blocks} blocks")

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
