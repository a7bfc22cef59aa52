"""A scheduler as it was, field by field: to come back to, and to tell whether another run of the real code led there.

The last of the waiting groups, the *tail*, can be left out of an image.  Then it says how the rest was, whatever waits
behind, and one image serves for all states that differ in their tails alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from spec.check.codec import GROUP_FIELDS

FIELDS = (*sorted(set(GROUP_FIELDS) - {"branches", "tables"}), "branches", "tables")
full: Callable[[Any], tuple[Any, ...]] = attrgetter(*FIELDS)  # with the group's own lists: true until it is touched
_space: dict[str, Any] = {}
exec(
    f"def put(g, values):\n    {', '.join('g.' + name for name in FIELDS)} = values\n"
    "    g.branches = [*g.branches]\n    g.tables = [[*table] for table in g.tables]",
    _space,
)
put: Callable[[Any, tuple[Any, ...]], None] = _space["put"]


def kept(g: Any) -> tuple[Any, ...]:
    """All that the fields of a group hold, with lists of their own."""
    *rest, branches, tables = full(g)
    return (*rest, [*branches], [[*table] for table in tables])


class Row(NamedTuple):
    """A group and all that its fields held."""

    group: Any
    values: tuple[Any, ...]

    @classmethod
    def of(cls, g: Any) -> Row:
        return cls(g, kept(g))

    def load(self) -> None:
        """Make the group what it was."""
        put(*self)


class Image:
    """Every field that can matter of a scheduler, with the same groups; the books only as far as their size.

    What the key of a state ignores is ignored here too; who is in the books is for the caller to compare.
    """

    __slots__ = ("calendar", "extra", "groups", "more", "pools", "queues", "values")

    def __init__(
        self, s: Any, groups: Iterable[Any], extra: tuple[str, ...], values: list[tuple[Any, ...]] | None = None
    ) -> None:
        """Of the scheduler as it is now.  extra: fields of a policy's own.

        values: of the groups, where they are known and nobody else will touch their lists.
        """
        self.extra = extra
        self.calendar = type(s.calendar)
        self.more = tuple([getattr(s, name) for name in extra])
        self.groups = [*groups]
        self.values = [*map(kept, self.groups)] if values is None else values
        self.queues = [*s.running], [*s.swapped], [*s.waiting]
        gpu, cpu = s.blocks.gpu, s.blocks.cpu
        self.pools = [*gpu.free], [*gpu.refs], [*cpu.free], [*cpu.refs]

    def cut(self, tail: list[Any], values: list[tuple[Any, ...]]) -> bool:
        """Leave the tail out, if it is there with these values."""
        if not tail:
            return True
        count = len(tail)
        running, swapped, waiting = self.queues
        if waiting[-count:] != tail or self.groups[-count:] != tail or self.values[-count:] != values:
            return False
        self.queues = running, swapped, waiting[:-count]
        self.groups, self.values = self.groups[:-count], self.values[:-count]
        return True

    def same(self, s: Any, tail: list[Any], values: list[tuple[Any, ...]]) -> bool:
        """The scheduler is as the image, with this tail in the queue, whose groups have these values."""
        running, swapped, waiting = self.queues
        if [*s.waiting] != waiting + tail or [*s.running] != running or [*s.swapped] != swapped:
            return False
        gpu, cpu = s.blocks.gpu, s.blocks.cpu
        if (gpu.free, gpu.refs, cpu.free, cpu.refs) != self.pools:
            return False
        for name, value in zip(self.extra, self.more, strict=True):
            if getattr(s, name) != value:
                return False
        return [*map(full, self.groups + tail)] == self.values + values

    def changed(self, values: list[tuple[Any, ...]]) -> list[int]:
        """The places of the groups that do not have the values of the image."""
        return [place for place, (now, was) in enumerate(zip(values, self.values, strict=True)) if now != was]

    def load(self, s: Any, tail: list[Any]) -> None:
        """Make the scheduler, its pools and these groups what they were, with this tail in the queue."""
        for g, values in zip(self.groups, self.values, strict=True):
            put(g, values)
        self.frame(s, tail)

    def frame(self, s: Any, tail: list[Any]) -> None:
        """The same for all but the groups, which must be what they were."""
        own = vars(s)
        running, swapped, waiting = self.queues
        own["running"], own["swapped"], own["waiting"] = deque(running), deque(swapped), deque(waiting + tail)
        for name, value in zip(self.extra, self.more, strict=True):
            own[name] = value
        own["_departed"], own["_aborting"] = [], []
        gpu, cpu = s.blocks.gpu, s.blocks.cpu
        free, refs, cpu_free, cpu_refs = self.pools
        gpu.free, gpu.refs, cpu.free, cpu.refs = [*free], [*refs], [*cpu_free], [*cpu_refs]
        own["calendar"] = self.calendar.of(s.running, s.blocks.beats)  # last: it follows from the groups


def frozen(plan: Any) -> Any:
    """A copy of a plan that stays as it is, to compare others with; None for a plan of another kind."""
    if not is_dataclass(plan) or isinstance(plan, type) or not hasattr(plan, "scheduled"):
        return None
    twin = object.__new__(type(plan))
    rows = plan.scheduled  # what is written on reading is written now, the groups as well
    for one in fields(plan):
        value = getattr(plan, one.name)
        object.__setattr__(twin, one.name, [*value] if isinstance(value, list) else value)
    twin.scheduled = [row._replace(block_table=[*row.block_table], slots=[*row.slots]) for row in rows]
    return twin
