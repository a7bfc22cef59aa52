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

_PLAIN_FIELDS = tuple(sorted(set(GROUP_FIELDS) - {"branches", "tables"}))
scalars: Callable[[Any], tuple[Any, ...]] = attrgetter(*_PLAIN_FIELDS)
_space: dict[str, Any] = {}
exec(f"def put(g, values):\n    {', '.join('g.' + name for name in _PLAIN_FIELDS)} = values", _space)
put: Callable[[Any, tuple[Any, ...]], None] = _space["put"]


class Row(NamedTuple):
    """A group and all that its fields held."""

    group: Any
    values: tuple[Any, ...]
    branches: list[int]
    tables: list[list[int]]

    @classmethod
    def of(cls, g: Any) -> Row:
        return cls(g, scalars(g), [*g.branches], [[*table] for table in g.tables])

    def load(self) -> None:
        """Make the group what it was."""
        g, values, branches, tables = self
        put(g, values)
        g.branches = [*branches]
        g.tables = [[*table] for table in tables]


class Image:
    """Every field that can matter of a scheduler, with the same groups; the books only as far as their size.

    What the key of a state ignores is ignored here too; who is in the books is for the caller to compare.
    """

    __slots__ = ("extra", "more", "pools", "queues", "rows")

    def __init__(self, s: Any, groups: Iterable[Any], extra: tuple[str, ...]) -> None:
        """Of the scheduler as it is now.  extra: fields of a policy's own."""
        self.extra = extra
        self.more = tuple(getattr(s, name) for name in extra)
        self.rows = tuple(Row.of(g) for g in groups)
        self.queues = [*s.running], [*s.swapped], [*s.waiting]
        gpu, cpu = s.blocks.gpu, s.blocks.cpu
        self.pools = [*gpu.free], [*gpu.refs], [*cpu.free], [*cpu.refs]

    def cut(self, tail: list[Row]) -> bool:
        """Leave the tail out, if it is there and untouched."""
        if not tail:
            return True
        count = len(tail)
        running, swapped, waiting = self.queues
        if waiting[-count:] != [row.group for row in tail] or list(self.rows[-count:]) != tail:
            return False
        self.queues = running, swapped, waiting[:-count]
        self.rows = self.rows[:-count]
        return True

    def same(self, s: Any, tail: list[Any]) -> bool:
        """The scheduler is as the image, with this tail in the queue; the fields of the tail are not looked at."""
        running, swapped, waiting = self.queues
        if [*s.waiting] != waiting + tail or [*s.running] != running or [*s.swapped] != swapped:
            return False
        gpu, cpu = s.blocks.gpu, s.blocks.cpu
        if (gpu.free, gpu.refs, cpu.free, cpu.refs) != self.pools:
            return False
        for name, value in zip(self.extra, self.more, strict=True):
            if getattr(s, name) != value:
                return False
        for g, values, branches, tables in self.rows:
            if scalars(g) != values or g.branches != branches or g.tables != tables:
                return False
        return True

    def load(self, s: Any, tail: list[Any]) -> None:
        """Make the scheduler, its pools and these groups what they were, with this tail in the queue."""
        own = vars(s)
        running, swapped, waiting = self.queues
        own["running"], own["swapped"], own["waiting"] = deque(running), deque(swapped), deque(waiting + tail)
        for name, value in zip(self.extra, self.more, strict=True):
            own[name] = value
        own["_departed"], own["_aborting"] = [], []
        gpu, cpu = s.blocks.gpu, s.blocks.cpu
        free, refs, cpu_free, cpu_refs = self.pools
        gpu.free, gpu.refs, cpu.free, cpu.refs = [*free], [*refs], [*cpu_free], [*cpu_refs]
        for g, values, branches, tables in self.rows:
            put(g, values)
            g.branches = [*branches]
            g.tables = [[*table] for table in tables]


def frozen(plan: Any) -> Any:
    """A copy of a plan that stays as it is, to compare others with; None for a plan of another kind."""
    if not is_dataclass(plan) or isinstance(plan, type) or not hasattr(plan, "scheduled"):
        return None
    twin = object.__new__(type(plan))
    for one in fields(plan):
        value = getattr(plan, one.name)
        object.__setattr__(twin, one.name, [*value] if isinstance(value, list) else value)
    twin.scheduled = [row._replace(block_table=[*row.block_table], slots=[*row.slots]) for row in plan.scheduled]
    return twin
