"""What a simulation saw: times of requests, actions of plans, blocks moved, and how it ended."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.scheduler import SchedulerConfig
from engine.simulate.timeline import Timeline

FINISHED, ABORTED, STUCK, CUT_OFF = "finished", "aborted", "stuck", "cut off"
PERCENTILES = (50, 90, 99)
LATENCIES = ("ttft", "tpot", "e2e", "queue", "stall")


@dataclass(slots=True)
class Tally:
    """Counts of one simulation.  Times are seconds of the simulated clock.

    outcome: finished, aborted (the policy raised), stuck (steps that do nothing for ever) or cut off (max_steps).
    outcome_step, error: the step in which it ended otherwise, the first that did nothing if stuck; what was raised.
    arrived, finished, shortened: requests; those that max_model_len gives fewer tokens than the trace asks for.
    refused: reason -> requests that the scheduler refused.  actions: log verb -> times, preemptions by mode.
    prompt_tokens: computed for the first time.  recomputed_tokens: computed again, since their KV had been dropped.
    generated_tokens: drawn, of all branches.
    ttft: first token less arrival.  tpot: (last token less first) / (tokens less 1), of answers of at least 2 tokens.
    e2e: last token less arrival.  queue: first step that computed for the request, less arrival.
    stall: from a preemption of a request that streams to its next token.
    """

    config: SchedulerConfig
    timeline: Timeline = field(default_factory=Timeline)
    outcome: str = FINISHED
    outcome_step: int | None = None
    error: str = ""
    steps: int = 0
    arrived: int = 0
    finished: int = 0
    shortened: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    actions: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    recomputed_tokens: int = 0
    decode_tokens: int = 0
    generated_tokens: int = 0
    blocks_swapped_out: int = 0
    blocks_swapped_in: int = 0
    blocks_copied: int = 0
    begun: float = math.inf
    ended: float = 0.0
    ttft: array[float] = field(default_factory=lambda: array("d"))
    tpot: array[float] = field(default_factory=lambda: array("d"))
    e2e: array[float] = field(default_factory=lambda: array("d"))
    queue: array[float] = field(default_factory=lambda: array("d"))
    stall: array[float] = field(default_factory=lambda: array("d"))

    @property
    def preemptions(self) -> int:
        return self.actions["preempt:swap"] + self.actions["preempt:recompute"]

    @property
    def seconds(self) -> float:
        """From the first arrival to the end of the last step."""
        return max(0.0, self.ended - self.begun)

    def summary(self) -> dict[str, Any]:
        """Plain values, for tables and JSON.  Times are seconds, rates a second, occupancy is a part of the pool."""
        refused = sum(self.refused.values())
        seconds = self.seconds
        rate = 1 / seconds if seconds else 0.0
        timeline, config = self.timeline, self.config
        return {
            "outcome": {"kind": self.outcome, "step": self.outcome_step, "error": self.error},
            "requests": {
                "arrived": self.arrived,
                "finished": self.finished,
                "refused": dict(sorted(self.refused.items())),
                "unfinished": self.arrived - self.finished - refused,
                "shortened": self.shortened,
            },
            "seconds": seconds,
            "busy": timeline.busy / seconds if seconds else 0.0,
            "latency_s": {name: spread(getattr(self, name)) for name in LATENCIES},
            "steps": self.steps,
            "preemptions": {
                "swap": self.actions["preempt:swap"],
                "recompute": self.actions["preempt:recompute"],
            },
            "demotions": self.actions["demote"],
            "tokens": {
                "prompt": self.prompt_tokens,
                "decoded": self.decode_tokens,
                "generated": self.generated_tokens,
                "recomputed": self.recomputed_tokens,
            },
            "blocks": {
                "swapped_out": self.blocks_swapped_out,
                "swapped_in": self.blocks_swapped_in,
                "copied": self.blocks_copied,
            },
            "occupancy": {
                "gpu": _part(timeline, "gpu_blocks_used", config.num_gpu_blocks),
                "cpu": _part(timeline, "cpu_blocks_used", config.num_cpu_blocks),
            },
            "queues": {
                name: {"mean": timeline.mean(name), "peak": timeline.peak(name)}
                for name in ("running", "swapped", "waiting")
            },
            "throughput": {
                "requests_per_s": self.finished * rate,
                "prompt_tokens_per_s": self.prompt_tokens * rate,
                "generated_tokens_per_s": self.generated_tokens * rate,
            },
        }


def _part(timeline: Timeline, series: str, capacity: int) -> dict[str, float]:
    if not capacity:
        return {"mean": 0.0, "peak": 0.0}
    return {"mean": timeline.mean(series) / capacity, "peak": timeline.peak(series) / capacity}


def spread(values: Sequence[float]) -> dict[str, Any]:
    """How many there are, mean, percentiles and the largest; None where there are none."""
    ordered = sorted(values)
    if not ordered:
        return {"count": 0, "mean": None, **{f"p{percent}": None for percent in PERCENTILES}, "max": None}
    return {
        "count": len(ordered),
        "mean": math.fsum(ordered) / len(ordered),
        **{f"p{percent}": quantile(ordered, percent / 100) for percent in PERCENTILES},
        "max": ordered[-1],
    }


def quantile(ordered: Sequence[float], part: float) -> float:
    """Linear between the two nearest of an ascending sequence, as NumPy's default (Hyndman and Fan 1996, type 7)."""
    place = (len(ordered) - 1) * part
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
