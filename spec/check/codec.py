"""States of the real scheduler as short byte strings, and back: equal strings mean equal futures.

A key keeps every field that can matter, canonical in what cannot: block ids are renumbered by first occurrence, groups
renamed by their place in the queues.  The rest is either derived (checked before it is left out) or cannot influence
any decision; FIELDS says which is which, and a field that it does not name is an error, not a silent loss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from operator import attrgetter, itemgetter
from typing import Any

from spec.laws_ids import filed_as_due

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
    "calendar": DERIVED,  # from the running decodes: law Q10
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


class UnusableError(TypeError):
    """The scheduler is none that can be searched: the message says what it has or does, and what is allowed.

    run: the events that lead to where it was seen, of `spec.check.explore`; empty if it is so from the start.
    """

    run: tuple[Any, ...] = ()


ALLOWED = (
    "a field that a policy adds must be a bool or an int from 0 to 255, set in __init__: so the search knows when two "
    "states are the same (a constant belongs on the class)"
)


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
        self.patterns: dict[bytes, tuple[bytes, bytes, Callable[[Any], Any], Any]] = {}  # by the entries of a group

    @staticmethod
    def _check_fields(s: Any, g: Any) -> tuple[str, ...]:
        """Fields that a subclass adds to the scheduler are kept as they are; any other unknown one is refused."""
        kind = type(s).__name__
        missing = sorted(set(SCHEDULER_FIELDS) - fields_of(s))
        if missing:
            raise UnusableError(
                f"{kind} has no {', '.join(missing)}: a policy derives from engine.scheduler.Scheduler, and an "
                "__init__ of its own calls super().__init__(config)"
            )
        for thing, known in ((g, GROUP_FIELDS), (s.blocks, BLOCKS_FIELDS), (s.blocks.gpu, POOL_FIELDS)):
            unknown = fields_of(thing) ^ set(known)
            if unknown:
                raise UnusableError(f"{type(thing).__name__}: the key does not know the fields {sorted(unknown)}")
        extra = tuple(sorted(fields_of(s) - set(SCHEDULER_FIELDS)))
        for name in extra:
            if name not in vars(s):
                raise UnusableError(f"{kind}.{name} is in __slots__, which the search cannot restore; {ALLOWED}")
            if not isinstance(getattr(s, name), bool | int):
                raise UnusableError(_no_field(kind, name, getattr(s, name)))
        return extra

    def encode(self, s: Any) -> bytes:
        """The key of a scheduler at a step boundary; UnfaithfulError if what the key leaves out is not as derived."""
        core, waiting = self.parts(s)
        return b"".join((core, bytes((len(waiting),)), *waiting))

    def parts(self, s: Any) -> tuple[bytes, tuple[bytes, ...]]:
        """The key in two: all but the waiting groups, which come one by one."""
        if s._plan is not None or s._aborting:
            raise UnfaithfulError
        try:
            core = [bytes((len(s.running), len(s.swapped), s.decodes_owed, *[getattr(s, name) for name in self.extra]))]
        except (ValueError, TypeError):
            raise UnusableError(self._out_of_range(s)) from None
        arrival = -1
        groups = s.groups
        count = 0
        blocks = s.blocks
        for queue, status, pool in (
            (s.running, self.statuses[0], blocks.gpu),
            (s.swapped, self.statuses[1], blocks.cpu),
        ):
            refs, free = pool.refs, pool.free
            named = bytes(free)
            for g in queue:
                if g.status is not status or g.tokens or g.arrival <= arrival or groups.get(g.request_id) is not g:
                    raise UnfaithfulError
                arrival = g.arrival
                count += 1
                head, order, references, counts = self.head(g)
                if references(refs) != counts:
                    raise UnfaithfulError
                named += order
                core.append(head)
            # whoever is named is named by one group, and not free: every block once, and the free ones by nobody
            if len(named) != pool.capacity or len({*named}) != len(named) or refs.count(0) != len(free):
                raise UnfaithfulError
        status = self.statuses[2]
        waiting = []
        for g in s.waiting:
            if g.status is not status or g.tokens or g.arrival <= arrival or groups.get(g.request_id) is not g:
                raise UnfaithfulError
            arrival = g.arrival
            count += 1
            if any(g.tables):
                raise UnfaithfulError
            waiting.append(self.head(g)[0])
        if count != len(groups) or not filed_as_due(s):
            raise UnfaithfulError
        return b"".join(core), tuple(waiting)

    def _out_of_range(self, s: Any) -> str:
        """Which field of a policy's own no byte can hold."""
        kind = type(s).__name__
        for name in self.extra:
            if not hasattr(s, name):
                return f"{kind}.{name} was deleted; {ALLOWED}"
            value = getattr(s, name)
            if not isinstance(value, int) or not 0 <= value < 256:
                return _no_field(kind, name, value)
        owed = s.decodes_owed
        return f"{kind}.decodes_owed is {_short(owed)}; it must be True or False"

    def head(self, g: Any) -> tuple[bytes, bytes, Callable[[Any], Any], Any]:
        """What stands for a group in the key; its blocks; what reads their references, and what these must be."""
        tables = g.tables
        ids = b"".join(map(bytes, tables))
        known = self.patterns.get(ids)
        if known is None:
            known = self.patterns[ids] = _pattern(ids)
        pattern, order, references, counts = known
        lengths = map(len, tables) if g.status is not self.statuses[2] else ()
        return (
            bytes((*_COUNTS(g), len(g.branches), len(tables), *g.branches, *lengths)) + pattern,
            order,
            references,
            counts,
        )

    def restore(self, key: bytes) -> Any:
        """A scheduler at the step boundary that the key stands for."""
        idle = self.idle
        s = object.__new__(self.scheduler_class)
        vars(s).update(vars(idle))
        n_running, n_swapped, owed = key[:3]
        s.decodes_owed = owed == 1
        at = 3
        for name in self.extra:
            setattr(s, name, _as_kind(type(getattr(idle, name)), key[at]))
            at += 1
        everyone: list[Any] = []
        for rank in range(n_running + n_swapped):
            g, at = self._restore_group(key, at, rank, self.statuses[0 if rank < n_running else 1])
            lengths = key[at : at + len(g.tables)]
            at += len(lengths)
            for branch, length in enumerate(lengths):
                g.tables[branch] = list(key[at : at + length])
                at += length
            everyone.append(g)
        s.running = deque(everyone[:n_running])
        s.swapped = deque(everyone[n_running:])
        blocks = object.__new__(type(idle.blocks))
        blocks.block_size = self.size
        blocks.gpu = self._restore_pool(idle.blocks.gpu, s.running)
        blocks.cpu = self._restore_pool(idle.blocks.cpu, s.swapped)
        s.blocks = blocks
        s.calendar = type(idle.calendar).of(s.running, blocks.beats)
        s.waiting = deque()
        n_waiting = key[at]
        at += 1
        for _ in range(n_waiting):
            g, at = self._restore_group(key, at, len(everyone), self.statuses[2])
            everyone.append(g)
            s.waiting.append(g)
        s.groups = {g.request_id: g for g in everyone}
        s.num_arrivals = len(everyone)
        s._log, s._departed, s._aborting = [], [], []
        return s

    def _restore_group(self, key: bytes, at: int, rank: int, status: Any) -> tuple[Any, int]:
        """A group without blocks."""
        g = object.__new__(self.group_class)
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
        g.shared_blocks = g.prompt_len // self.size
        g.shared_tokens = g.shared_blocks * self.size
        g.tokens = g.num_preemptions = 0
        at += 11
        g.branches = list(key[at : at + branches])
        g.tables = [[] for _ in range(tables)]
        g.status = status
        return g, at + branches

    def _restore_pool(self, idle: Any, queue: Any) -> Any:
        """A pool with the blocks of these groups taken; ids that each counts from 0 follow those of the one before."""
        pool = object.__new__(self.pool_class)
        pool.name, pool.capacity = idle.name, idle.capacity
        refs = [0] * pool.capacity
        used = 0
        for g in queue:
            first = used
            for table in g.tables:
                for i, block in enumerate(table):
                    table[i] = block = first + block
                    refs[block] += 1
                    used = max(used, block + 1)
        pool.refs = refs
        pool.free = list(range(pool.capacity - 1, used - 1, -1))
        return pool


def _as_kind(kind: type[int], value: int) -> int:
    """The value as what the field was at first, unless it has become a plain number since."""
    try:
        one = kind(value)
    except ValueError:  # no member of an enum
        return value
    return one if one == value else value


def _no_field(kind: str, name: str, value: Any) -> str:
    if value is None or isinstance(value, int):
        return f"{kind}.{name} is {value}; {ALLOWED}"
    return f"{kind}.{name} is {_short(value)}, of type {type(value).__name__}; {ALLOWED}"


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        return "something that cannot be shown"
    return text if len(text) <= 60 else text[:57] + "..."


def _pattern(ids: bytes) -> tuple[bytes, bytes, Callable[[Any], Any], Any]:
    """Of the table entries of a group: ids by first occurrence; which they are; what reads their references; how often
    each is named."""
    order = bytes(dict.fromkeys(ids))
    counts = tuple(map(ids.count, order))
    if len(order) > 1:
        return ids.translate(bytes.maketrans(order, _IDS[: len(order)])), order, itemgetter(*order), counts
    return bytes(len(ids)), order, (itemgetter(*order) if order else lambda refs: None), *(counts or (None,))


_IDS = bytes(range(256))
_COUNTS = attrgetter("prompt_len", "n", "max_tokens", "live", "known", "deficit", "forked", "tail_shared", "held")
