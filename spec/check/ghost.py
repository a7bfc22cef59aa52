"""Queues of any length: a row that stands for any number of groups, of which only sums are known.

Guarantees: whatever is proved of code that takes from a `GhostQueue` holds for every queue of which the row's sums are
true.  A group that the code asks for is made out of the row when it is asked for: lawful, and of any size that the
sums leave room for; the rest of the row keeps the rest of the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from spec.check.symbolic import Source, assume
from spec.logic import Bool, Int, conj, disj


class Row:
    """Any number of groups in a row.  count, held, live: how many, their blocks and their live branches in sum.

    make: makes a lawful group of this name and says what is known of it.  homeless: they hold no blocks.
    """

    def __init__(
        self, source: Source, name: str, make: Callable[[str], tuple[Any, Bool]], homeless: bool = False
    ) -> None:
        self.source = source
        self.name = name
        self.make = make
        self.homeless = homeless
        self.count: Int = source.integer(f"{name}.count")
        self.held: Int = 0 if homeless else source.integer(f"{name}.held")
        self.live: Int = source.integer(f"{name}.live")
        self.front: list[Any] = []  # groups made out of it, from either end, in order
        self.back: list[Any] = []
        self.number = 0

    def facts(self) -> Bool:
        """Each group holds a block and has a branch; no groups hold nothing."""
        held = True if self.homeless else self.held >= self.count
        nothing = conj(self.count == 0, self.held == 0, self.live == 0)
        return conj(self.count >= 0, held, self.live >= self.count, disj(self.count >= 1, nothing))

    def take(self) -> Any:
        """Make a group out of the row, which must not be empty."""
        self.number += 1
        group, known = self.make(f"{self.name}{self.number}")
        assume(conj(known, self.count >= 1))
        self.count = self.count - 1
        self.held = self.held - group.held
        self.live = self.live - group.live
        assume(self.facts())
        return group

    def take_first(self) -> Any:
        group = self.take()
        self.front.append(group)
        return group

    def take_last(self) -> Any:
        group = self.take()
        self.back.insert(0, group)
        return group


class GhostQueue:
    """A deque with a row in the middle: `left`, any number of others, `right`."""

    def __init__(self, left: Iterable[Any] = (), row: Row | None = None, right: Iterable[Any] = ()) -> None:
        self.left = list(left)
        self.row = row
        self.right = list(right)

    def __bool__(self) -> bool:
        return bool(self.left or self.right) or (self.row is not None and bool(self.row.count >= 1))

    def __getitem__(self, index: int) -> Any:
        if index == 0:
            self._meet_first()
            return (self.left or self.right)[0]
        assert index == -1, "a queue is read at its ends"
        self._meet_last()
        return (self.right or self.left)[-1]

    def __iter__(self) -> Iterator[Any]:
        """Its groups; the row counts as one group of that many branches."""
        yield from self.left
        if self.row is not None:
            yield self.row
        yield from self.right

    def popleft(self) -> Any:
        self._meet_first()
        return (self.left or self.right).pop(0)

    def pop(self) -> Any:
        self._meet_last()
        return (self.right or self.left).pop()

    def append(self, group: Any) -> None:
        (self.right if self.row is not None else self.left).append(group)

    def appendleft(self, group: Any) -> None:
        self.left.insert(0, group)

    def _meet_first(self) -> None:
        if not self.left and self.row is not None and self.row.count >= 1:
            self.left.append(self.row.take_first())

    def _meet_last(self) -> None:
        if not self.right and self.row is not None and self.row.count >= 1:
            self.right.insert(0, self.row.take_last())


def order(queues: Iterable[GhostQueue]) -> list[Any]:
    """The groups and rows of the queues one after the other, each row with what was made out of it in its place.

    A row's place is where it is and what was taken from it is where it has gone: so two lists, made before and after,
    are equal exactly when everybody kept their place.
    """
    return [item for queue in queues for item in queue]


def in_place(before: list[Any], after: list[Any]) -> bool:
    """Everybody is where they were: groups made out of a row count as having been in it, at their end of it."""
    expanded: list[Any] = []
    for item in before:
        expanded += [*item.front, item, *item.back] if isinstance(item, Row) else [item]
    return _same(expanded, after) or _same(_without_empty(expanded), _without_empty(after))


def _same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(one is other for one, other in zip(a, b, strict=True))


def _without_empty(items: list[Any]) -> list[Any]:
    """An empty row is nowhere."""
    return [item for item in items if not (isinstance(item, Row) and item.count == 0)]
