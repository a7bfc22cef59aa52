"""States of the real scheduler as short byte strings, and back: equal strings mean equal futures.

A key keeps every field that can matter, canonical in what cannot: block ids are renumbered by first occurrence, groups
renamed by their place in the queues.  The rest is either derived (checked before it is left out) or cannot influence
any decision; FIELDS says which is which, and a field that it does not name is an error, not a silent loss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from operator import attrgetter
from typing import Any

KEPT, DERIVED, CONSTANT, IGNORED = "kept", "derived", "constant", "ignored"

GROUP_FIELDS = {
    "request_id": DERIVED,  # its place in the queues: ids are only compared for equality
    "arrival": DERIVED,  # its place in the queues: only the order matters, and law Q2 is checked first
    "prompt_len": KEPT,
    "n": KEPT,
    "max_tokens": KEPT,
    "shared_blocks": DERIVED,  # p // BS, law Q8
    "shared_tokens": DERIVED,
    "live": KEPT,
    "known": KEPT,
    "deficit": KEPT,
    "forked": KEPT,
    "tail_shared": KEPT,
    "held": KEPT,
    "tokens": CONSTANT,  # 0 at a step boundary, law Q9
    "branches": KEPT,
    "tables": KEPT,
    "status": DERIVED,  # the queue it is in, law Q1
    "num_preemptions": IGNORED,  # a counter for metrics
}
SCHEDULER_FIELDS = {
    "config": CONSTANT,
    "blocks": DERIVED,  # from the tables: laws B3 and B5t
    "running": KEPT,
    "swapped": KEPT,
    "waiting": KEPT,
    "groups": DERIVED,  # from the queues: law Q1
    "num_arrivals": IGNORED,  # only gives the next arrival
    "num_steps": IGNORED,  # only numbers the plans
    "decodes_owed": KEPT,
    "_plan": CONSTANT,  # None at a step boundary
    "_log": IGNORED,  # handed to the next plan, never read
    "_departed": IGNORED,  # handed to the next plan, never read
    "_aborting": CONSTANT,  # empty at a step boundary
}
BLOCKS_FIELDS = {"block_size": CONSTANT, "gpu": DERIVED, "cpu": DERIVED}
POOL_FIELDS = {"capacity": CONSTANT, "free": DERIVED, "name": CONSTANT, "refs": DERIVED}

NAMES = tuple("abcdefghijklmnopqrstuvwxyz")  # request ids by place in the queues
RANKS = {name: rank for rank, name in enumerate(NAMES)}


class UnfaithfulError(Exception):
    """The state breaks what the key relies on, so a law about it is broken."""


def fields_of(thing: Any) -> set[str]:
    """All fields of an object, slotted or not."""
    slots = {name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())}
    return slots | set(getattr(thing, "__dict__", ()))


class Codec:
    """Encodes and restores the schedulers that `make` builds; `new_group(id, p, n, m)` builds a group."""

    def __init__(self, make: Callable[[], Any], new_group: Callable[[str, int, int, int], Any]) -> None:
        self.make = make
        self.fresh_group = new_group
        s, g = make(), new_group("a", 1, 1, 1)
        status = type(g.status)
        self.statuses = (status("running"), status("swapped"), status("waiting"))
        self.group_class = type(g)
        self.scheduler_class = type(s)
        self.size = s.config.block_size
        self.capacities = (s.config.num_gpu_blocks, s.config.num_cpu_blocks)
        self.extra = self._check_fields(s, g)
        self.idle = s  # never run: its parts are copied by `restore`
        self.pool_class = type(s.blocks.gpu)

    @staticmethod
    def _check_fields(s: Any, g: Any) -> tuple[str, ...]:
        """Fields that a subclass adds to the scheduler are kept as they are; any other unknown one is refused."""
        for thing, known in ((g, GROUP_FIELDS), (s.blocks, BLOCKS_FIELDS), (s.blocks.gpu, POOL_FIELDS)):
            unknown = fields_of(thing) ^ set(known)
            if unknown:
                raise TypeError(f"{type(thing).__name__}: the key does not know the fields {sorted(unknown)}")
        missing = set(SCHEDULER_FIELDS) - fields_of(s)
        extra = tuple(sorted(fields_of(s) - set(SCHEDULER_FIELDS)))
        if missing or any(not isinstance(getattr(s, name), bool | int) for name in extra):
            raise TypeError(f"{type(s).__name__}: the key does not know the fields {sorted(missing) or list(extra)}")
        return extra

    def encode(self, s: Any) -> bytes:
        """The key of a scheduler at a step boundary; UnfaithfulError if what the key leaves out is not as derived."""
        if s._plan is not None or s._aborting:
            raise UnfaithfulError
        head = [len(s.running), len(s.swapped), len(s.waiting), s.decodes_owed]
        for name in self.extra:
            head.append(getattr(s, name))
        arrival = -1
        groups = s.groups
        count = 0
        for queue, status in zip((s.running, s.swapped, s.waiting), self.statuses, strict=True):
            for g in queue:
                if g.status is not status or g.tokens or g.arrival <= arrival or groups.get(g.request_id) is not g:
                    raise UnfaithfulError
                arrival = g.arrival
                count += 1
                head += _COUNTS(g)
                head.append(len(g.branches))
                head.append(len(g.tables))
                head += g.branches
                head += map(len, g.tables)
        if count != len(groups):
            raise UnfaithfulError
        for g in s.waiting:
            if any(g.tables):
                raise UnfaithfulError
        blocks = s.blocks
        return b"".join((bytes(head), self._named(s.running, blocks.gpu), self._named(s.swapped, blocks.cpu)))

    @staticmethod
    def _named(queue: Any, pool: Any) -> bytes:
        """All table entries of a queue, one after the other, with ids by first occurrence."""
        refs, free = pool.refs, pool.free
        if not queue:
            if any(refs) or len(free) != pool.capacity or len(set(free)) != pool.capacity:
                raise UnfaithfulError
            return b""
        named = b"".join([bytes(table) for g in queue for table in g.tables])
        order = bytes(dict.fromkeys(named))
        count = named.count
        for block in order:
            if refs[block] != count(block):
                raise UnfaithfulError
        if refs.count(0) != len(free) or len(order) + len(free) != pool.capacity:
            raise UnfaithfulError
        if len({*free, *order}) != pool.capacity:
            raise UnfaithfulError
        return named.translate(bytes.maketrans(order, _IDS[: len(order)]))

    def restore(self, key: bytes) -> Any:
        """A scheduler at the step boundary that the key stands for."""
        idle = self.idle
        s = object.__new__(self.scheduler_class)
        vars(s).update(vars(idle))
        n_running, n_swapped, n_waiting, owed = key[:4]
        s.decodes_owed = owed == 1
        at = 4
        for name in self.extra:
            setattr(s, name, type(getattr(idle, name))(key[at]))
            at += 1
        count = n_running + n_swapped + n_waiting
        everyone = []
        size, make = self.size, self.group_class
        running, swapped, waiting = self.statuses
        for rank in range(count):
            g = object.__new__(make)
            g.request_id = NAMES[rank]
            g.arrival = rank
            (
                g.prompt_len,
                g.n,
                g.max_tokens,
                g.live,
                g.known,
                g.deficit,
                forked,
                tail_shared,
                g.held,
                branches,
                tables,
            ) = key[at : at + 11]
            g.forked = forked == 1
            g.tail_shared = tail_shared == 1
            g.shared_blocks = g.prompt_len // size
            g.shared_tokens = g.shared_blocks * size
            g.tokens = g.num_preemptions = 0
            at += 11
            g.branches = list(key[at : at + branches])
            at += branches
            g.tables = list(key[at : at + tables])  # their lengths, for now
            at += tables
            g.status = running if rank < n_running else swapped if rank < n_running + n_swapped else waiting
            everyone.append(g)
        s.running = deque(everyone[:n_running])
        s.swapped = deque(everyone[n_running : n_running + n_swapped])
        s.waiting = deque(everyone[n_running + n_swapped :])
        blocks = object.__new__(type(idle.blocks))
        blocks.block_size = size
        blocks.gpu, at = self._restore_pool(idle.blocks.gpu, s.running, key, at)
        blocks.cpu, at = self._restore_pool(idle.blocks.cpu, s.swapped, key, at)
        for g in s.waiting:
            g.tables = [[] for _ in g.tables]
        s.blocks = blocks
        s.groups = {g.request_id: g for g in everyone}
        s.num_arrivals = count
        s._log, s._departed, s._aborting = [], [], []
        return s

    def _restore_pool(self, idle: Any, queue: Any, key: bytes, at: int) -> tuple[Any, int]:
        pool = object.__new__(self.pool_class)
        pool.name, pool.capacity = idle.name, idle.capacity
        refs = [0] * pool.capacity
        start = at
        for g in queue:
            tables = []
            for length in g.tables:
                tables.append(list(key[at : at + length]))
                at += length
            g.tables = tables
        for block in key[start:at]:
            refs[block] += 1
        used = max(key[start:at], default=-1) + 1  # ids are given by first occurrence, so these are all
        pool.refs = refs
        pool.free = list(range(pool.capacity - 1, used - 1, -1))
        return pool, at


class Saved:
    """A scheduler as it is now, to come back to: `load` undoes whatever was done to it since."""

    __slots__ = ("_fields", "_log", "_pools", "_rows", "_s")

    def __init__(self, s: Any) -> None:
        self._s = s
        self._fields = dict(vars(s))
        self._log = len(s._log)
        self._rows = [(g, _ALL(g), [*g.branches], [[*table] for table in g.tables]) for g in s.groups.values()]
        self._pools = [(pool, [*pool.free], [*pool.refs]) for pool in (s.blocks.gpu, s.blocks.cpu)]
        # the scheduler goes on with copies, the originals stay as they are
        self.load()

    def load(self) -> Any:
        """The scheduler, as it was."""
        s, fields = self._s, self._fields
        own = vars(s)
        own.update(fields)
        own["running"], own["swapped"], own["waiting"] = (
            fields["running"].copy(),
            fields["swapped"].copy(),
            fields["waiting"].copy(),
        )
        own["groups"] = fields["groups"].copy()
        own["_departed"], own["_aborting"] = fields["_departed"].copy(), fields["_aborting"].copy()
        del fields["_log"][self._log :]  # shared with the plan under way
        for g, values, branches, tables in self._rows:
            _put_all(g, values)
            g.branches = [*branches]
            g.tables = [[*table] for table in tables]
        for pool, free, refs in self._pools:
            pool.free = [*free]
            pool.refs = [*refs]
        return s


_IDS = bytes(range(256))
_COUNTS = attrgetter("prompt_len", "n", "max_tokens", "live", "known", "deficit", "forked", "tail_shared", "held")
_PLAIN_FIELDS = tuple(sorted(set(GROUP_FIELDS) - {"branches", "tables"}))
_ALL = attrgetter(*_PLAIN_FIELDS)
_space: dict[str, Any] = {}
exec(f"def put(g, values):\n    {', '.join('g.' + name for name in _PLAIN_FIELDS)} = values", _space)
_put_all: Callable[[Any, Any], None] = _space["put"]
