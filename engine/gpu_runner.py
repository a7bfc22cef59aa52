"""The runner for a GPU: decodes from tensors that stay on the device, as captured graphs; all else as one flat batch.

Guarantees: what it computes for a plan is what `ModelRunner` computes; rows that pad a batch to a captured size write
nothing and read no block.

Steps in which every row is one token, the most of them, run on a persistent batch: tokens, positions, slots, context
lengths and block tables lie on the device, and a step sends only what the plan changed.  A row's table is looked at
when the plan's log names its request (it grew, was swapped in, forked), else its numbers go up by one.

On the CPU (LAWFUL_KERNELS=triton with TRITON_INTERPRET=1) the same code runs through the interpreter, without graphs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.cache import KVCache
from engine.models.attention import AttentionMetadata
from engine.models.config import ModelConfig
from engine.request import RequestState
from engine.runner import Draw, Model, ModelRunner, Sampler
from engine.scheduler.plan import Plan, ScheduledSequence
from kernels.paged_rows import PagedRows, partition_for

logger = logging.getLogger("lawful")

GRAPH_SIZES = (1, 2, 4, *range(8, 257, 8))  # batches in between are padded: by 7 rows at most, each nearly free
Key = tuple[str, int]  # request id, branch


def padded_size(rows: int) -> int:
    """The least captured size that holds so many rows; beyond the largest, the number itself."""
    return next((size for size in GRAPH_SIZES if size >= rows), rows)


@dataclass(slots=True)
class _Row:
    """What the device knows of one row."""

    place: int
    end: int
    table: list[int]


class DecodeBatch:
    """Rows of one token each, on the device, dense from 0.

    Row r is (tokens[r], positions[r], slots[r], ends[r], tables[r]); beyond the batch, token 0 at position 0, slot -1
    and end 0, which write and read nothing.
    """

    def __init__(self, capacity: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self.capacity = capacity
        self.block_size = block_size
        self.device = device
        pinned = device.type == "cuda"
        self._host = torch.zeros((4, capacity), dtype=torch.int64, pin_memory=pinned)
        self._host[2] = -1
        self._numbers = self._host.to(device, copy=True)
        self.tokens, self.positions, self.slots, self.ends = self._numbers
        self.tables = torch.zeros((capacity, max_blocks), dtype=torch.int64, device=device)
        self.arange = torch.arange(capacity + 1, device=device)
        self._rows: dict[Key, _Row] = {}
        self._keys: list[Key] = []
        self.entries_sent = 0

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def keys(self) -> list[Key]:
        """Whose row each is."""
        return self._keys

    @property
    def max_end(self) -> int:
        """The longest context."""
        return max((row.end for row in self._rows.values()), default=0)

    def update(
        self, scheduled: list[ScheduledSequence], requests: Mapping[str, RequestState], touched: set[str]
    ) -> None:
        """Make the batch these rows.

        touched: ids of requests whose tables may have changed since the last update.
        """
        wanted = {(row.group.request_id, row.branch): row for row in scheduled}
        moved: list[_Row] = [self._remove(key) for key in [key for key in self._keys if key not in wanted]]
        dirty: dict[int, tuple[int, list[int]]] = {}  # place -> (first entry that changed, entries)
        changed = {row.place for row in moved}
        tokens, positions, slots, ends = self._host.numpy()
        for key, row in wanted.items():
            known = self._rows.get(key)
            if known is None:
                known = self._rows[key] = _Row(len(self._keys), 0, [])
                self._keys.append(key)
                dirty[known.place] = 0, row.block_table
                known.table = list(row.block_table)
            elif known.place in changed:
                dirty[known.place] = 0, row.block_table
                known.table = list(row.block_table)
            elif key[0] in touched or len(known.table) != len(row.block_table):
                first = _first_difference(known.table, row.block_table)
                if first < len(row.block_table):
                    dirty[known.place] = first, row.block_table[first:]
                known.table = list(row.block_table)
            place = known.place
            known.end = row.end
            tokens[place] = requests[key[0]].tokens(key[1], row.start, row.end)[0]
            positions[place], slots[place], ends[place] = row.start, row.slots[0], row.end
        size = padded_size(len(self._keys))
        tokens[len(self._keys) : size] = positions[len(self._keys) : size] = ends[len(self._keys) : size] = 0
        slots[len(self._keys) : size] = -1
        self._numbers.copy_(self._host, non_blocking=True)  # 8 KB whole: a strided copy would wait
        self._send(dirty)

    def _remove(self, key: Key) -> _Row:
        """Take a row out; the last row takes its place.  Returns the last row."""
        gone = self._rows.pop(key)
        last_key = self._keys.pop()
        if last_key == key:
            return gone
        last = self._rows[last_key]
        last.place = gone.place
        self._keys[gone.place] = last_key
        return last

    def _send(self, dirty: dict[int, tuple[int, list[int]]]) -> None:
        """Table entries that changed, in one copy."""
        places: list[int] = []
        columns: list[int] = []
        blocks: list[int] = []
        for place, (first, entries) in dirty.items():
            places += [place] * len(entries)
            columns += range(first, first + len(entries))
            blocks += entries
        if places:
            sent = torch.tensor([places, columns, blocks], dtype=torch.int64)
            if self.device.type == "cuda":
                sent = sent.pin_memory().to(self.device, non_blocking=True)
            self.tables[sent[0], sent[1]] = sent[2]
            self.entries_sent += len(places)

    def metadata(self, size: int, max_context: int, partition: int) -> AttentionMetadata:
        """Of the first `size` rows, over these very tensors."""
        rows = PagedRows.of_decodes(
            self.ends[:size], self.tables[:size], self.arange[: size + 1], self.block_size, max_context, partition
        )
        return AttentionMetadata(self.slots[:size], rows)


def _first_difference(old: list[int], new: list[int]) -> int:
    for i, (a, b) in enumerate(zip(old, new, strict=False)):
        if a != b:
            return i
    return min(len(old), len(new))


@dataclass
class _Graph:
    """A captured decode step."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor


@dataclass
class RunnerTimes:
    """Seconds of the host's own work in decode steps, before the device is waited for."""

    steps: int = 0
    prepare: float = 0.0
    launch: float = 0.0
    graphs: int = 0


class GpuRunner(ModelRunner):
    """A runner whose decodes are persistent on the device.

    max_num_seqs, max_model_len: the engine's limits; they size the persistent batch.
    use_graphs: None for wherever the device is a GPU.
    """

    def __init__(
        self,
        model: Model,
        model_config: ModelConfig,
        cache: KVCache,
        device: torch.device | str,
        sampler: Sampler,
        max_num_seqs: int = 256,
        max_model_len: int | None = None,
        use_graphs: bool | None = None,
    ) -> None:
        super().__init__(model, model_config, cache, device, sampler)
        self.max_model_len = max_model_len or model_config.max_context
        self.partition = partition_for(self.max_model_len)
        most = -(-self.max_model_len // cache.block_size)
        self.batch = DecodeBatch(padded_size(max_num_seqs), most, cache.block_size, self.device)
        self.use_graphs = self.device.type == "cuda" if use_graphs is None else use_graphs
        self.times = RunnerTimes()
        self._touched: set[str] = set()
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._pool: Any = None

    def _logits(self, plan: Plan, requests: Mapping[str, RequestState]) -> tuple[Tensor, list[Draw]]:
        self._touched.update(action.request_id for action in plan.log)
        rows = plan.scheduled
        if not 0 < len(rows) <= self.batch.capacity or any(
            row.end - row.start != 1 or row.draws != (row.branch,) for row in rows
        ):
            return super()._logits(plan, requests)
        started = time.perf_counter()
        self.batch.update(rows, requests, self._touched)
        self._touched.clear()
        size = padded_size(len(rows))
        prepared = time.perf_counter()
        logits = self._decode(size)
        self.times.steps += 1
        self.times.prepare += prepared - started
        self.times.launch += time.perf_counter() - prepared
        draws = [(requests[request_id], branch) for request_id, branch in self.batch.keys]
        return logits[: len(rows)], draws

    def _decode(self, size: int) -> Tensor:
        """Logits (size, vocab_size) of the persistent batch, padded to `size`."""
        longest = self.batch.max_end
        partitions = max(1, -(-longest // self.partition))
        splits = 1 if partitions == 1 else 1 << (partitions - 1).bit_length()  # few graphs; the rest ends at once
        if not self.use_graphs or size not in GRAPH_SIZES:
            return self._run(size, splits)
        found = self._graphs.get((size, splits))
        if found is None:
            found = self._graphs[size, splits] = self._capture(size, splits)
            self.times.graphs += 1
        found.graph.replay()
        return found.logits

    def _run(self, size: int, splits: int) -> Tensor:
        longest = min(splits * self.partition, max(self.max_model_len, 1))
        metadata = self.batch.metadata(size, longest, self.partition)
        hidden = self.model.forward(self.batch.tokens[:size], self.batch.positions[:size], metadata, self.cache)
        return self.model.compute_logits(hidden)

    def _capture(self, size: int, splits: int) -> _Graph:
        """Capture one decode step, after a run that compiles what is not compiled yet.

        The warm run writes what the step itself will write again, and nothing else.
        """
        side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._run(size, splits)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._run(size, splits)
        if self._pool is None:
            self._pool = graph.pool()  # graphs never run at once: they share their scratch memory
        logger.debug("captured a decode step of %d rows and %d partitions", size, splits)
        return _Graph(graph, logits)


@torch.inference_mode()
def activation_memory(
    model: Model,
    config: ModelConfig,
    block_size: int,
    tokens: int,
    seqs: int,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> int:
    """Bytes that the largest step takes beyond weights and cache: run it once over a small cache and look.  0 on a CPU.

    tokens, seqs: the budgets of a step.  dtype: of the cache.  The rows are prompts as long as they may be; all
    sequences draw.
    """
    if torch.device(device).type != "cuda":
        return 0
    lengths = [min(max_model_len, tokens - at) for at in range(0, tokens, max_model_len)]
    blocks = -(-max(lengths) // block_size)
    cache = KVCache(config, blocks, 0, block_size, dtype, device)
    cache.device_pool.zero_()
    table = list(range(blocks))
    metadata = AttentionMetadata.build(
        [0] * len(lengths), lengths, [table] * len(lengths), [-1] * tokens, block_size, device
    )
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ids = torch.zeros(tokens, dtype=torch.int64, device=device)
    hidden = model.forward(ids, ids, metadata, cache)
    logits = model.compute_logits(hidden[:seqs])
    logits.logsumexp(dim=-1)
    edited = logits.clone()  # what penalties and biases work on
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del ids, hidden, logits, edited, cache, metadata
    torch.cuda.empty_cache()
    return peak
