"""Histograms that the engine thread fills and a scrape reads: plain counts, no lock, a copy is a consistent picture."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

SHORT_TIMES = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
TOKEN_TIMES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
LONG_TIMES = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
)
TOKEN_COUNTS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
STEP_TOKENS = tuple(float(2**power) for power in range(15))
WIDTHS = (1.0, 2.0, 5.0, 10.0, 20.0)


class HistogramCounts(NamedTuple):
    """A copy of a histogram: observations up to each bound, above the one before; the last is beyond all bounds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def observations(self) -> int:
        return sum(self.counts)


class Histogram:
    """Counts of observations by size.  bounds: ascending; a value equal to a bound is counted under it."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def copy(self) -> HistogramCounts:
        """What was counted so far."""
        return HistogramCounts(self.bounds, tuple(self.counts), self.total)


class Histograms:
    """What is measured of every request and step, in seconds or tokens."""

    __slots__ = (
        "decode_time",
        "e2e_latency",
        "generation_tokens",
        "inference_time",
        "inter_token_latency",
        "iteration_tokens",
        "params_max_tokens",
        "params_n",
        "prefill_time",
        "prompt_tokens",
        "queue_time",
        "time_to_first_token",
    )

    def __init__(self) -> None:
        self.queue_time = Histogram(LONG_TIMES)
        self.time_to_first_token = Histogram(SHORT_TIMES)
        self.inter_token_latency = Histogram(TOKEN_TIMES)
        self.e2e_latency = Histogram(LONG_TIMES)
        self.prefill_time = Histogram(LONG_TIMES)
        self.decode_time = Histogram(LONG_TIMES)
        self.inference_time = Histogram(LONG_TIMES)
        self.prompt_tokens = Histogram(TOKEN_COUNTS)
        self.generation_tokens = Histogram(TOKEN_COUNTS)
        self.params_n = Histogram(WIDTHS)
        self.params_max_tokens = Histogram(TOKEN_COUNTS)
        self.iteration_tokens = Histogram(STEP_TOKENS)

    def copy(self) -> dict[str, HistogramCounts]:
        """All of them, by name."""
        return {name: getattr(self, name).copy() for name in self.__slots__}
