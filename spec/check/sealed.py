"""Containers that show their first elements and nothing else: to see that code does not look at the rest.

A step that ran to its end on sealed containers, which never said how many more there are nor which, does the same
whatever the rest is.  So its run stands for the runs on all of them.  Looking is noted, and raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

_HARMLESS = {"__class__", "__class_getitem__", "__delattr__", "__doc__", "__getattribute__", "__setattr__"}
_HARMLESS |= {"__new__", "__init__", "__init_subclass__", "__subclasshook__"}


class LookedError(Exception):
    """Code has asked for what is sealed."""


def _look(self: Any, *_: Any, **__: Any) -> Any:
    object.__setattr__(self, "looked", True)
    raise LookedError


class Nothing:
    """A number that nobody may read."""

    looked = False


class _SealedDeque(deque):  # type: ignore[type-arg]
    looked = False


class _SealedDict(dict):  # type: ignore[type-arg]
    looked = False


for _holder, _kind in ((Nothing, int), (_SealedDeque, deque), (_SealedDict, dict)):
    for _name in {"__bool__", *dir(_kind)} - _HARMLESS:
        setattr(_holder, _name, _look)


class Void:
    """An object that has nothing to show."""

    def __getattribute__(self, name: str) -> Any:
        raise LookedError

    def __setattr__(self, name: str, value: Any) -> None:
        raise LookedError


class Queue(_SealedDeque):
    """A queue of which more may wait behind the elements that it shows.

    ends: it may be added to, and what is added is all that it shows.
    """

    def __init__(self, shown: Iterable[Any], ends: bool = False) -> None:
        super().__init__(shown)
        self.ends = ends

    def shown(self) -> list[Any]:
        return list(deque.__iter__(self))

    def __bool__(self) -> bool:
        return bool(deque.__len__(self)) or _look(self)

    def __getitem__(self, at: Any) -> Any:
        if self.ends or not isinstance(at, int) or not 0 <= at < deque.__len__(self):
            _look(self)
        return deque.__getitem__(self, at)

    def popleft(self) -> Any:
        if self.ends or not deque.__len__(self):
            _look(self)
        return deque.popleft(self)

    def appendleft(self, one: Any) -> None:
        if self.ends:
            _look(self)
        deque.appendleft(self, one)

    def append(self, one: Any) -> None:
        if not self.ends:
            _look(self)
        deque.append(self, one)


class Books(_SealedDict):
    """A dictionary that may have more than the entries that it shows.

    fresh: a key that it is known not to have, and that may be put in.
    """

    def __init__(self, shown: dict[Any, Any], fresh: Any = None) -> None:
        super().__init__(shown)
        self.fresh = fresh

    def shown(self) -> dict[Any, Any]:
        return dict(dict.items(self))

    def _known(self, key: Any) -> bool:
        return dict.__contains__(self, key) or (key != self.fresh and _look(self))

    def __bool__(self) -> bool:
        return bool(dict.__len__(self)) or _look(self)

    def __contains__(self, key: Any) -> bool:
        return self._known(key)

    def __getitem__(self, key: Any) -> Any:
        self._known(key)
        return dict.__getitem__(self, key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._known(key)
        return dict.get(self, key, default)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._known(key)
        dict.__setitem__(self, key, value)

    def __delitem__(self, key: Any) -> None:
        self._known(key)
        dict.__delitem__(self, key)
