"""Carry a plan out on a model: moves first, then one flat batch, then one draw for every branch that samples.

The scheduler decides, the runner obeys: it moves exactly the blocks that the plan names, in the plan's order, and
reads a row's context only through the block table that the plan gives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from engine.allocator import keep_freed_memory
from engine.cache import KVCache
from engine.models.attention import AttentionMetadata, Metadata
from engine.models.config import ModelConfig
from engine.models.cpu_attention import CpuAttention
from engine.request import RequestState, Sampled, StepOutput
from engine.scheduler.plan import Plan, ScheduledSequence
from kernels.dispatch import uses_triton
from kernels.paged_rows import partition_for

Draw = tuple[RequestState, int]


class Sampler(Protocol):
    """Draws tokens.  logits (draws, vocab_size) float32, one row for each (request, branch).

    An exception in place of a draw fails that request and no other.
    """

    def sample(self, logits: Tensor, draws: list[Draw]) -> list[Sampled | Exception]: ...


class Model(Protocol):
    """What the runner needs of a model; see `engine.models.llama.LlamaModel`."""

    row_type: torch.dtype

    def forward(self, tokens: Tensor, positions: Tensor, metadata: Metadata, cache: KVCache) -> Tensor: ...

    def compute_logits(self, hidden: Tensor) -> Tensor: ...


class Runner(Protocol):
    """All that the engine knows of whoever computes: a plan goes in, draws come out."""

    num_gpu_blocks: int
    num_cpu_blocks: int
    block_size: int

    def execute(self, plan: Plan, requests: Mapping[str, RequestState]) -> StepOutput: ...


class ModelRunner:
    """A runner on one device."""

    def __init__(
        self, model: Model, model_config: ModelConfig, cache: KVCache, device: torch.device | str, sampler: Sampler
    ) -> None:
        self.model = model
        self.model_config = model_config
        self.cache = cache
        self.device = torch.device(device)
        self.sampler = sampler
        self.num_gpu_blocks = cache.num_gpu_blocks
        self.num_cpu_blocks = cache.num_cpu_blocks
        self.block_size = cache.block_size
        self.partition = partition_for(model_config.max_context)
        if self.device.type == "cpu":
            keep_freed_memory()

    @torch.inference_mode()
    def execute(self, plan: Plan, requests: Mapping[str, RequestState]) -> StepOutput:
        """Swap out, swap in, copy, then write and compute the scheduled rows, and draw.

        requests: request id -> state, for every request that the plan schedules.
        Raises KeyError for a request that is not there and IndexError for a block outside its pool.
        """
        self.cache.swap_out(plan.blocks_to_swap_out)
        self.cache.swap_in(plan.blocks_to_swap_in)
        self.cache.copy(plan.blocks_to_copy)
        logits, draws = self._logits(plan, requests)
        return collect(draws, self.sampler.sample(logits, draws)) if draws else StepOutput()

    def _logits(self, plan: Plan, requests: Mapping[str, RequestState]) -> tuple[Tensor, list[Draw]]:
        """Compute the rows; one row of logits (draws, vocab_size) for each draw."""
        scheduled = plan.scheduled  # made when it is read
        if not scheduled:
            return torch.empty(0), []
        hidden = self._forward(scheduled, requests)
        draws, rows = draws_of(scheduled, requests)
        if not draws:
            return hidden[:0], draws
        logits = self.model.compute_logits(hidden[torch.tensor(sorted(set(rows)), device=self.device)])
        if len(logits) < len(rows):
            place = {row: i for i, row in enumerate(sorted(set(rows)))}
            logits = logits[torch.tensor([place[row] for row in rows], device=self.device)]
        return logits, draws

    def _forward(self, scheduled: list[ScheduledSequence], requests: Mapping[str, RequestState]) -> Tensor:
        """Hidden states (tokens, width) of all rows, one after the other."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for row in scheduled:
            tokens += requests[row.group.request_id].tokens(row.branch, row.start, row.end)
            positions += range(row.start, row.end)
            slots += row.slots
        return self.model.forward(
            torch.tensor(tokens, dtype=torch.int64, device=self.device),
            torch.tensor(positions, dtype=torch.int64, device=self.device),
            self._metadata(scheduled, slots),
            self.cache,
        )

    def _metadata(self, scheduled: list[ScheduledSequence], slots: list[int]) -> Metadata:
        starts, ends = [row.start for row in scheduled], [row.end for row in scheduled]
        tables = [row.block_table for row in scheduled]
        pool = self.cache.device_pool
        if pool.device.type == "cpu" and not uses_triton(pool):
            return CpuAttention(starts, ends, tables, slots, self.cache, self.model.row_type)
        return AttentionMetadata.build(starts, ends, tables, slots, self.block_size, self.device, self.partition)


def draws_of(scheduled: list[ScheduledSequence], requests: Mapping[str, RequestState]) -> tuple[list[Draw], list[int]]:
    """Who draws in this step, and for each draw the index of its row's last token in the flat batch."""
    draws: list[Draw] = []
    rows: list[int] = []
    last = -1
    for row in scheduled:
        last += row.end - row.start
        for branch in row.draws:
            draws.append((requests[row.group.request_id], branch))
            rows.append(last)
    return draws, rows


def collect(draws: list[Draw], drawn: list[Sampled | Exception]) -> StepOutput:
    """Sort a sampler's answers into samples and errors."""
    output = StepOutput()
    for (state, branch), answer in zip(draws, drawn, strict=True):
        if isinstance(answer, Exception):
            output.errors[state.request_id] = answer
        else:
            output.samples[state.request_id, branch] = answer
    return output
