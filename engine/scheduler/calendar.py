"""When each running decode will need blocks, so that a step looks only at those that do.

The running decodes keep time together: a step that runs decodes gives every one of them a token a branch, which is one
*beat*.  So the beat at which a decode outgrows its blocks is known when it begins to decode, and moves only when it is
given blocks or a branch ends.  Of N decodes about N / block_size are due at a beat; a step need not look at the others.

Guarantees (law Q10): exactly the running decodes are filed, each under the beat at which it needs blocks, with its live
branches in the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter

from engine.scheduler.sequence import SequenceGroup

_by_seniority = attrgetter("arrival")


class DecodeCalendar:
    """The running decodes, filed under the beat at which each needs blocks.

    beat: steps that ran decodes so far.  branches: live branches of all filed groups.  filed: for each group the beat
    it is filed under, and its live branches at that time.  days: the groups of each beat to come.
    """

    __slots__ = ("_roll", "beat", "branches", "days", "filed")

    def __init__(self) -> None:
        self.beat = 0
        self.branches = 0
        self.filed: dict[SequenceGroup, tuple[int, int]] = {}
        self.days: dict[int, dict[SequenceGroup, None]] = {}
        self._roll: list[SequenceGroup] | None = []

    @classmethod
    def of(cls, running: Iterable[SequenceGroup], beats: Callable[[SequenceGroup], int]) -> DecodeCalendar:
        """The calendar that belongs to these running groups.  beats: steps that a decode can go on with its blocks."""
        calendar = cls()
        for group in running:
            if group.is_decode:
                calendar.file(group, beats(group))
        return calendar

    def file(self, group: SequenceGroup, beats: int) -> None:
        """A decode that can go on for so many beats with the blocks it has; replaces what was filed of it."""
        old = self.filed.get(group)
        if old is None:
            self._roll = None
        else:
            del self.days[old[0]][group]
            self.branches -= old[1]
        day = self.beat + beats
        self.filed[group] = day, group.live
        self.branches += group.live
        filed = self.days.get(day)
        if filed is None:
            filed = self.days[day] = {}
        filed[group] = None

    def strike(self, group: SequenceGroup) -> None:
        """The group does not run any more; nothing if it was no decode."""
        old = self.filed.pop(group, None)
        if old is not None:
            self._roll = None
            del self.days[old[0]][group]
            self.branches -= old[1]

    def advance(self) -> None:
        """The beat is over."""
        self.days.pop(self.beat, None)
        self.beat += 1

    def due(self) -> list[SequenceGroup]:
        """The decodes that need blocks at this beat, most senior first."""
        return sorted(self.days.get(self.beat, ()), key=_by_seniority)

    def roll(self, running: Iterable[SequenceGroup]) -> list[SequenceGroup]:
        """The decodes in the order of `running`.  The list is never changed: another set of decodes is another list."""
        if self._roll is None:
            self._roll = [group for group in running if group in self.filed]
        return self._roll
