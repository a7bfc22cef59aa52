"""The KV oracle: a runner without weights whose output proves what its KV cache held.

A slot holds a hash of the token and position written to it; a row's logits come from a hash over every entry that its
block table reaches.  So a wrong table, a missed copy, a stale block, a wrong slot, a swap too few or too many, or a
write that did not happen changes the output, and exactly (law E1): no arithmetic error can hide or mimic it.

With h as 64-bit mixing, for a branch of tokens t_0 .. t_q:

    entry(0, p) = h(t_p, p, 0)     chain(l, p) = sum of h(entry(l, i), i) over i = 0 .. p, mod 2^64
    entry(l, p) = h(chain(l - 1, p), p, l)      logits[v] from h(chain(last, q), v), in [0, 1)

From the second layer on an entry depends on all tokens before it, as in a transformer; with one layer only, a stale
block that holds the same tokens at the same positions goes unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.request import RequestState, StepOutput
from engine.runner import Sampler, collect, draws_of
from engine.scheduler.plan import BlockPair, Plan, ScheduledSequence
from kernels.pairs import check_pairs

Hashes = npt.NDArray[np.uint64]
Favourites = Callable[[RequestState, int, int], "int | None"]

POISON = np.uint64(0xDEAD_BEEF_DEAD_BEEF)  # what a slot holds that was never written
_FIRST = np.uint64(0xBF58_476D_1CE4_E5B9)
_SECOND = np.uint64(0x94D0_49BB_1331_11EB)
_STEP = np.uint64(0x9E37_79B9_7F4A_7C15)
MAX_LAYERS = 64
_LAYER = _STEP * np.arange(1, MAX_LAYERS + 1, dtype=np.uint64)


def _mix(values: Hashes) -> Hashes:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014), a bijection on 64 bits."""
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    return values ^ (values >> np.uint64(31))


def _entry(contents: Hashes, positions: Hashes, layer: int) -> Hashes:
    return _mix(_mix(contents + _LAYER[layer]) + positions * _STEP)


def _chain(entries: Hashes, positions: Hashes) -> Hashes:
    """Running sums, so that one pass gives the chain at every position."""
    return np.cumsum(_mix(entries ^ _mix(positions + _STEP)), dtype=np.uint64)


def _logits(chains: Hashes, vocab_size: int) -> npt.NDArray[np.float32]:
    """(rows, vocab_size) in [0, 1) from one chain for each row."""
    mixed = _mix(_mix(chains)[:, None] + _STEP * np.arange(1, vocab_size + 1, dtype=np.uint64))
    return (mixed >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def oracle_logits(tokens: Sequence[int], vocab_size: int, num_layers: int = 1) -> npt.NDArray[np.float32]:
    """What a correct engine must see after `tokens`: (vocab_size,).  No cache takes part."""
    positions = np.arange(len(tokens), dtype=np.uint64)
    chain = np.asarray(tokens, dtype=np.uint64)
    for layer in range(num_layers):
        chain = _chain(_entry(chain, positions, layer), positions)
    return _logits(chain[-1:], vocab_size).reshape(-1)


class OracleRunner:
    """A runner over two pools of hashes.

    device_pool, host_pool: (layers, blocks, block_size) uint64, filled with POISON at first.  Freed blocks keep what
        they held, so that a stale read shows.
    favourites: called with (request, branch, position of the token to draw); a token id that it returns gets the
        largest logit, 2.0.
    """

    def __init__(
        self,
        vocab_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        block_size: int,
        sampler: Sampler,
        num_layers: int = 1,
        favourites: Favourites | None = None,
    ) -> None:
        """Raises ValueError unless there are 1 to MAX_LAYERS layers."""
        if not 1 <= num_layers <= MAX_LAYERS:
            raise ValueError(f"num_layers is {num_layers}; 1 to {MAX_LAYERS} are possible")
        self.vocab_size = vocab_size
        self.num_gpu_blocks = num_gpu_blocks
        self.num_cpu_blocks = num_cpu_blocks
        self.block_size = block_size
        self.sampler = sampler
        self.num_layers = num_layers
        self.favourites = favourites
        self.device_pool: Hashes = np.full((num_layers, num_gpu_blocks, block_size), POISON)
        self.host_pool: Hashes = np.full((num_layers, num_cpu_blocks, block_size), POISON)

    def execute(self, plan: Plan, requests: Mapping[str, RequestState]) -> StepOutput:
        """Swap out, swap in, copy, then write and read the scheduled rows, and draw.

        Raises IndexError for a block or slot outside its pool and ValueError for a block that is written by two moves.
        """
        _move(self.device_pool, self.host_pool, plan.blocks_to_swap_out, "swap out")
        _move(self.host_pool, self.device_pool, plan.blocks_to_swap_in, "swap in")
        _move(self.device_pool, self.device_pool, plan.blocks_to_copy, "copy")
        if not plan.scheduled:
            return StepOutput()
        chains = self._forward(plan.scheduled, requests)
        draws, rows = draws_of(plan.scheduled, requests)
        if not draws:
            return StepOutput()
        logits = _logits(chains[rows], self.vocab_size)
        if self.favourites is not None:
            ends = [row.end for row in plan.scheduled for _ in row.draws]
            for i, ((state, branch), position) in enumerate(zip(draws, ends, strict=True)):
                token = self.favourites(state, branch, position)
                if token is not None:
                    logits[i, token] = 2.0
        return collect(draws, self.sampler.sample(torch.from_numpy(logits), draws))

    def _forward(self, scheduled: list[ScheduledSequence], requests: Mapping[str, RequestState]) -> Hashes:
        """The last layer's chain at every scheduled token, rows one after the other.  Every write of a layer comes
        before any read of it, as in a transformer's forward pass."""
        tokens = [t for row in scheduled for t in requests[row.group.request_id].tokens(row.branch, row.start, row.end)]
        slots = np.array([slot for row in scheduled for slot in row.slots], dtype=np.int64)
        positions = np.concatenate([np.arange(row.start, row.end, dtype=np.uint64) for row in scheduled])
        if len(tokens) != len(positions) or len(slots) != len(positions):
            raise ValueError(f"{len(positions)} scheduled tokens, but {len(tokens)} known ones and {len(slots)} slots")
        if len(slots) and not 0 <= slots.min() <= slots.max() < self.num_gpu_blocks * self.block_size:
            raise IndexError(f"slots {slots.min()} to {slots.max()} pass the pool of {self.num_gpu_blocks} blocks")
        reads, read_positions = self._context(scheduled)
        ends = np.cumsum([row.end for row in scheduled])
        begins = ends - [row.end for row in scheduled]
        lengths = [row.end - row.start for row in scheduled]
        first = np.repeat(begins, lengths)  # where the context of each token's row begins
        own = first + positions.astype(np.int64)  # where each token's own entry lies among the reads
        contents = np.array(tokens, dtype=np.uint64)
        for layer in range(self.num_layers):
            pool = self.device_pool[layer].reshape(-1)
            pool[slots] = _entry(contents, positions, layer)
            sums = _chain(pool[reads], read_positions)
            contents = sums[own] - np.where(first > 0, sums[first - 1], np.uint64(0))
        return contents

    def _context(self, scheduled: list[ScheduledSequence]) -> tuple[npt.NDArray[np.int64], Hashes]:
        """Slots and positions of the context of every row, one after the other."""
        inside = np.arange(self.block_size, dtype=np.int64)
        slots, positions = [], []
        for row in scheduled:
            table = np.array(row.block_table[: -(-row.end // self.block_size)], dtype=np.int64)
            if len(table) * self.block_size < row.end:
                raise ValueError(f"{row.group.request_id}: {len(table)} blocks do not cover {row.end} tokens")
            if not 0 <= table.min() <= table.max() < self.num_gpu_blocks:
                raise IndexError(f"{row.group.request_id}: table {table.tolist()} passes {self.num_gpu_blocks} blocks")
            slots.append((table[:, None] * self.block_size + inside).reshape(-1)[: row.end])
            positions.append(np.arange(row.end, dtype=np.uint64))
        return np.concatenate(slots), np.concatenate(positions)


def _move(source: Hashes, target: Hashes, pairs: Sequence[BlockPair], move: str) -> None:
    """Copy blocks; the right-hand side is gathered before anything is written."""
    if not pairs:
        return
    check_pairs(pairs, source.shape[1], target.shape[1], move)
    sources, targets = (list(ids) for ids in zip(*pairs, strict=True))
    target[:, targets] = source[:, sources]
