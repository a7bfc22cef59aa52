"""Queues and memory over time: a bounded number of buckets, each twice as wide whenever they run out."""

from __future__ import annotations

from typing import NamedTuple

from engine.scheduler import QueueCounts

BUCKETS = 1024
SERIES = ("running", "swapped", "waiting", "gpu_blocks_used", "cpu_blocks_used")


class Point(NamedTuple):
    """Means over one bucket that begins at `at`; groups, and blocks."""

    at: float
    values: tuple[float, ...]


class Timeline:
    """Time-weighted means of every series, in at most `BUCKETS` buckets, and over all steps; peaks.

    Time in which there was no step counts as empty in the buckets, and not at all in `mean`.
    """

    def __init__(self, width: float = 1e-3) -> None:
        self.width = width  # seconds
        self.begun = 0.0
        self.busy = 0.0  # seconds in steps
        self.peaks = [0] * len(SERIES)
        self._buckets: list[list[float]] = []
        self._totals = [0.0] * len(SERIES)

    def begin(self, moment: float) -> None:
        """The first bucket begins here; nothing was added yet."""
        self.begun = moment

    def add(self, begin: float, seconds: float, counts: QueueCounts) -> None:
        """A step from `begin` on, during which the queues and pools held this."""
        values = (counts.running, counts.swapped, counts.waiting, counts.gpu_blocks_used, counts.cpu_blocks_used)
        self.busy += seconds
        for i, value in enumerate(values):
            if value:
                self._totals[i] += value * seconds
                if value > self.peaks[i]:
                    self.peaks[i] = value
        begin -= self.begun
        end = begin + seconds
        while end >= self.width * BUCKETS:
            self._widen()
        index = int(begin / self.width)
        while begin < end:
            until = min(end, (index + 1) * self.width)
            part = until - begin
            while len(self._buckets) <= index:
                self._buckets.append([0.0] * len(SERIES))
            bucket = self._buckets[index]
            for i, value in enumerate(values):
                if value:
                    bucket[i] += value * part
            begin, index = until, index + 1

    def _widen(self) -> None:
        old = self._buckets
        if len(old) % 2:
            old.append([0.0] * len(SERIES))
        self._buckets = [
            [a + b for a, b in zip(left, right, strict=True)] for left, right in zip(old[::2], old[1::2], strict=True)
        ]
        self.width *= 2

    def mean(self, series: str) -> float:
        """The mean over the time in steps."""
        return self._totals[SERIES.index(series)] / self.busy if self.busy else 0.0

    def peak(self, series: str) -> int:
        return self.peaks[SERIES.index(series)]

    def points(self) -> list[Point]:
        """The buckets, in order."""
        return [
            Point(self.begun + i * self.width, tuple(total / self.width for total in bucket))
            for i, bucket in enumerate(self._buckets)
        ]
