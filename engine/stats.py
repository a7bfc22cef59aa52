"""What the engine counts and says about itself: counters of plan-log actions, the log line, the preemption warning.

Counters are sums over `Plan.log` and `Plan` totals, so that they can be recomputed from a recorded trace.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.histogram import HistogramCounts, Histograms
from engine.outputs import RequestMetrics
from engine.scheduler import Plan, QueueCounts, SchedulerConfig, SequenceGroup, Status

logger = logging.getLogger("lawful")

LOG_INTERVAL = 5.0  # seconds between two log lines
WARN_EVERY = 50  # preemptions between two warnings, after the first


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Counts of one moment at a step boundary, to be read from any thread: they fit each other.

    values: as `EngineStats.to_dict`.  actions: log verb -> times.  finished_by: how requests ended -> how many.
    received = sum of finished_by + running + swapped + waiting.
    """

    queues: QueueCounts
    values: Mapping[str, Any]
    actions: Mapping[str, int]
    refused: Mapping[str, int]
    finished_by: Mapping[str, int]
    histograms: Mapping[str, HistogramCounts]


@dataclass
class EngineStats:
    """Counts since the engine was made.

    actions: log verb -> times it happened (preemptions apart by mode: "preempt:swap", "preempt:recompute").
    prompt_tokens, generation_tokens: tokens of accepted prompts computed for the first time, and tokens drawn.
    computed_tokens: all tokens that steps computed, recomputed ones included.
    recomputed_tokens: tokens computed again because their KV had been dropped.
    blocks_swapped_out, blocks_swapped_in, blocks_copied: blocks that plans moved.
    received, finished, aborted, failed, refused: requests; received = finished + aborted + failed + unfinished.
    finished_by: "stop", "length", "abort" or "error" -> requests that ended so; "length" if any branch did.
    failed_steps: steps that could not be executed.
    largest_gap: the longest that a stream waited for its next token, in seconds, preemption included.
    """

    config: SchedulerConfig
    log_stats: bool = False
    actions: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    blocks_swapped_out: int = 0
    blocks_swapped_in: int = 0
    blocks_copied: int = 0
    received: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    finished_by: Counter[str] = field(default_factory=Counter)
    failed_steps: int = 0
    largest_gap: float = 0.0
    histograms: Histograms = field(default_factory=Histograms)
    _begun: dict[str, int] = field(default_factory=dict)  # request id -> prompt tokens computed at least once
    _last_log: float = field(default_factory=time.monotonic)
    _at_last_log: tuple[int, int] = (0, 0)

    @property
    def preemptions(self) -> int:
        return self.actions["preempt:swap"] + self.actions["preempt:recompute"]

    @property
    def demotions(self) -> int:
        return self.actions["demote"]

    def on_plan(self, plan: Plan) -> None:
        """Count a plan when it is made."""
        self.steps += 1
        self.computed_tokens += plan.num_tokens
        self.histograms.iteration_tokens.observe(plan.num_tokens)
        for group, tokens in plan.groups:
            if not group.is_decode:
                self._count_prefill(group, tokens)
        self.blocks_swapped_out += len(plan.blocks_to_swap_out)
        self.blocks_swapped_in += len(plan.blocks_to_swap_in)
        self.blocks_copied += len(plan.blocks_to_copy)
        preempted = (action for action in plan.log if action.verb == "preempt")
        for count, action in enumerate(preempted, start=self.preemptions + 1):
            self._warn(action.request_id, action.detail, count)

    def _count_prefill(self, group: SequenceGroup, tokens: int) -> None:
        """Tell tokens computed for the first time from those computed again."""
        if group.forked:
            self.recomputed_tokens += tokens - (group.live if tokens == group.deficit else 0)
            return
        end = group.known - group.deficit + tokens
        new = max(0, min(tokens, end - self._begun.get(group.request_id, 0)))
        self.prompt_tokens += new
        self.recomputed_tokens += tokens - new
        if new:
            self._begun[group.request_id] = end

    def on_receipt(self, group: SequenceGroup) -> None:
        """Count a group that was accepted."""
        self.received += 1
        self.histograms.params_n.observe(group.n)
        self.histograms.params_max_tokens.observe(group.max_tokens)

    def on_scheduled(self, metrics: RequestMetrics, now: float) -> None:
        """A step gives a request tokens; the first one ends its time in the queue."""
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = now
            self.histograms.queue_time.observe(now - metrics.arrival_time)

    def on_draw(self, metrics: RequestMetrics, now: float) -> None:
        """A request has drawn a token in every live branch."""
        if metrics.first_token_time is None or metrics.last_token_time is None:
            metrics.first_token_time = now
            self.histograms.time_to_first_token.observe(now - metrics.arrival_time)
        else:
            gap = now - metrics.last_token_time
            self.histograms.inter_token_latency.observe(gap)
            self.largest_gap = max(self.largest_gap, gap)
        metrics.last_token_time = now

    def on_departure(self, group: SequenceGroup, metrics: RequestMetrics, reason: str, generated: int) -> None:
        """Count a group that left.  reason: see `finished_by`.  generated: tokens of all its branches."""
        self._begun.pop(group.request_id, None)
        self.finished_by[reason] += 1
        self._measure(group, metrics, generated)
        if group.status is Status.FINISHED:
            self.finished += 1
        elif group.status is Status.ABORTED:
            self.aborted += 1
        else:
            self.failed += 1

    def _measure(self, group: SequenceGroup, metrics: RequestMetrics, generated: int) -> None:
        """Times and sizes of a finished request; those of one that was cut off would say nothing."""
        if group.status is not Status.FINISHED:
            return
        seen = self.histograms
        scheduled, first, last = metrics.first_scheduled_time, metrics.first_token_time, metrics.last_token_time
        if scheduled is not None and first is not None and last is not None:
            seen.prefill_time.observe(first - scheduled)
            seen.decode_time.observe(last - first)
            seen.inference_time.observe(last - scheduled)
            seen.e2e_latency.observe(last - metrics.arrival_time)
        seen.prompt_tokens.observe(group.prompt_len)
        seen.generation_tokens.observe(generated)

    def on_update(self, plan: Plan, sampled: int) -> None:
        """Count what came of a plan; its log is complete now."""
        self.generation_tokens += sampled
        for action in plan.log:
            self.actions[f"preempt:{action.detail}" if action.verb == "preempt" else action.verb] += 1

    def _warn(self, request_id: str, mode: str, count: int) -> None:
        if count % WARN_EVERY == 1:
            logger.warning(
                "Sequence group %s is preempted by PreemptionMode.%s mode because a more senior group needs its KV "
                "cache blocks. It loses no output, but time. More gpu_memory_utilization, fewer max_num_seqs or "
                "shorter requests make this rarer. total_cumulative_preemption_cnt=%d",
                request_id,
                mode.upper(),
                count,
            )

    def maybe_log(self, counts: QueueCounts, force: bool = False) -> None:
        """Write the log line if it is on and due."""
        now = time.monotonic()
        elapsed = now - self._last_log
        if not self.log_stats or (elapsed < LOG_INTERVAL and not force) or elapsed <= 0:
            return
        prompt, generation = self._at_last_log
        logger.info("%s", self.line(counts, elapsed, self.prompt_tokens - prompt, self.generation_tokens - generation))
        self._last_log, self._at_last_log = now, (self.prompt_tokens, self.generation_tokens)

    def line(self, counts: QueueCounts, seconds: float, prompt_tokens: int, generation_tokens: int) -> str:
        """The log line for what `seconds` brought."""
        config = self.config
        gpu = 100 * counts.gpu_blocks_used / config.num_gpu_blocks
        cpu = 100 * counts.cpu_blocks_used / config.num_cpu_blocks if config.num_cpu_blocks else 0.0
        return (
            f"Avg prompt throughput: {prompt_tokens / seconds:.1f} tokens/s, "
            f"Avg generation throughput: {generation_tokens / seconds:.1f} tokens/s, "
            f"Running: {counts.running} reqs, Swapped: {counts.swapped} reqs, Pending: {counts.waiting} reqs, "
            f"GPU KV cache usage: {gpu:.1f}%, CPU KV cache usage: {cpu:.1f}%"
        )

    def snapshot(self, counts: QueueCounts) -> Snapshot:
        """All counts of this moment; `counts` must be of the same."""
        return Snapshot(
            queues=counts,
            values=self.to_dict(),
            actions=dict(self.actions),
            refused=dict(self.refused),
            finished_by=dict(self.finished_by),
            histograms=self.histograms.copy(),
        )

    def to_dict(self) -> dict[str, object]:
        """Plain values, for tables and JSON."""
        return {
            "steps": self.steps,
            "failed_steps": self.failed_steps,
            "preemptions": self.preemptions,
            "preemptions_by_swap": self.actions["preempt:swap"],
            "preemptions_by_recompute": self.actions["preempt:recompute"],
            "demotions": self.demotions,
            "blocks_swapped_out": self.blocks_swapped_out,
            "blocks_swapped_in": self.blocks_swapped_in,
            "blocks_copied": self.blocks_copied,
            "prompt_tokens": self.prompt_tokens,
            "generation_tokens": self.generation_tokens,
            "computed_tokens": self.computed_tokens,
            "recomputed_tokens": self.recomputed_tokens,
            "largest_gap_s": self.largest_gap,
            "requests_received": self.received,
            "requests_finished": self.finished,
            "requests_aborted": self.aborted,
            "requests_failed": self.failed,
            "requests_refused": sum(self.refused.values()),
        }
