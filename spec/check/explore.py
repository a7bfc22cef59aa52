"""Every reachable state of the real scheduler with its real allocator, at small scope, with all laws checked.

The environment does anything it may: requests from a menu arrive while fewer than a bound are unfinished (so runs never
end), any subset of the branches that draw a token stops, any group is aborted at a boundary or between schedule and
update, a step or a group fails.  States are told apart up to the names of blocks and groups (`codec`).

Each state is scheduled once by the real code, and each way it can go on is a transition made by the real code.  State
laws are checked on every new state, laws on a step once a state, laws on a round and the ghost contents on every
transition: by evaluation, or because they were evaluated on the same step with another tail.

The *tail* of a step is the waiting groups behind the most senior one that the step left waiting and never named.  The
laws are local in it: what they ask of a waiting group they ask of it alone, of it and its neighbour in the order, of
the head of waiting, or of whoever was moved.  So where the real code does on a state exactly what it did on another
that has the same groups before the tail (the same plan, the same state in mid-step and after every outcome, compared
field by field and block by block) and leaves every field of its own tail's groups as it was, the laws say the same
of both.  Anything else is evaluated in full.  `in_full=True` evaluates everything, and the proofs compare the two.
"""

from __future__ import annotations

import gc
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

from spec import plain, views
from spec.check.codec import NAMES, RANKS, Codec, UnfaithfulError
from spec.check.image import Image, Row, frozen, scalars
from spec.check.shadow import Shadow
from spec.laws import BY_ID, Kind, Law, Tier


class Event(NamedTuple):
    """One transition.  add: `group` is (p, n, m); abort: `rank` is the place in the queues; step: what happens in it.

    stopped: (rank, branch) of branches that stop; aborted: ranks aborted between schedule and update; failed: ranks
    that fail in update; broken: the whole step could not be carried out.
    """

    kind: str
    group: tuple[int, int, int] = (0, 0, 0)
    rank: int = -1
    stopped: tuple[tuple[int, int], ...] = ()
    aborted: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    broken: bool = False


@dataclass(frozen=True, kw_only=True)
class World:
    """What is explored: a configuration and what its environment may do.

    menu: the requests (p, n, m) that may arrive.  groups: most unfinished at once.  stops, aborts, mid_aborts, fails:
    whether the environment stops branches early, aborts at boundaries, aborts in mid-step, fails groups and steps.
    """

    config: Any
    menu: tuple[tuple[int, int, int], ...]
    groups: int
    stops: bool = True
    aborts: bool = True
    mid_aborts: bool = False
    fails: bool = False


@dataclass(frozen=True, slots=True)
class Violation:
    """A law broken: at which event of the shortest run, and the run."""

    law: Law
    run: tuple[Event, ...]  # the last one broke it
    detail: str = ""


@dataclass
class Graph:
    """The transitions: for each state what follows, as (state, event kind, ranks served, rank of each group after)."""

    edges: list[list[tuple[int, bool, int, tuple[int, ...]]]] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)  # unfinished groups in each state
    keys: list[bytes] = field(default_factory=list)


@dataclass
class Found:
    """What an exploration saw."""

    states: int
    edges: int
    seconds: float
    complete: bool
    violation: Violation | None
    sometimes: Counter[str]
    graph: Graph | None = None

    @property
    def rate(self) -> float:
        """States a second."""
        return self.states / max(self.seconds, 1e-9)


class _BrokenError(Exception):
    def __init__(self, law: Law, event: Event, detail: str = "") -> None:
        super().__init__(law.id)
        self.law, self.event, self.detail = law, event, detail


class Checks:
    """The checkers of the selected laws."""

    def __init__(self, ids: frozenset[str]) -> None:
        def of(kind: Kind, tier: Tier, mid: bool = False) -> Callable[[Any], list[Law]]:
            return plain.checker(tuple(one for one in plain.of(kind, tier, mid) if one.id in ids))

        self.state = of(Kind.STATE, Tier.COUNTS)
        self.state_in_mid = of(Kind.STATE, Tier.COUNTS, mid=True)
        self.mid = of(Kind.MID, Tier.COUNTS)
        self.step = of(Kind.STEP, Tier.COUNTS)
        self.round = of(Kind.ROUND, Tier.COUNTS)
        self.ids = of(Kind.STATE, Tier.IDS)
        # the key has just recounted the references (B3)
        self.ids_new = plain.checker(
            tuple(one for one in plain.of(Kind.STATE, Tier.IDS) if one.id in ids and one.id != "B3")
        )
        self.ids_in_mid = of(Kind.STATE, Tier.IDS, mid=True)
        self.ids_step = of(Kind.STEP, Tier.IDS)


Make = Callable[[], Any]
NewGroup = Callable[[str, int, int, int], Any]
Hook = Callable[[views.Step, views.Round, Event], None]


def explore(
    world: World,
    make: Make,
    new_group: NewGroup,
    *,
    limit: int = 100_000_000,
    graph: bool = False,
    step_hook: Hook | None = None,
    goal: Callable[[Any], bool] | None = None,
    laws: Iterable[str] | None = None,
    in_full: bool = False,
) -> Found:
    """Breadth-first over everything that can happen from the empty scheduler; stops at the first law broken.

    step_hook(step, round, event) is called for each transition made by a step.  goal(state) ends the search: the run to
    the first state that satisfies it is returned as a violation of no law (`law` is that of S8).

    laws: the ids to check instead of all; transitions into states that the key cannot tell, because they break other
    laws, are then left out.

    in_full: evaluate the laws on every step, also where one like it was checked already.
    """
    search = _Search(world, make, new_group, step_hook, frozenset(laws or BY_ID), goal, in_full)
    return search.run(limit, graph)


class _Core:
    """A state without its waiting groups, and what is known of the steps from there.

    entries: by the waiting groups that matter.  depths: how many those are, each once.  met: a step began here before.
    """

    __slots__ = ("count", "depths", "entries", "image", "key", "met", "number")

    def __init__(self, number: int, key: bytes, count: int, image: Image) -> None:
        self.number, self.key, self.count, self.image = number, key, count, image
        self.depths: list[int] = []
        self.entries: dict[tuple[int, ...], _Entry] = {}
        self.met = False


class _Outcome(NamedTuple):
    """What came of a plan, the tail left out: the state after it, and the number of its core and its waiting groups."""

    event: Event
    stopped: list[tuple[str, int]]
    failed: list[str]
    after: Image
    gone: list[str]
    log: list[Any]
    core: int
    waiting: tuple[int, ...]
    served: int


class _Entry:
    """A step that was checked in full."""

    __slots__ = ("depth", "hits", "mid", "outcomes", "plan", "sometimes")

    def __init__(
        self, depth: int, plan: Any, mid: Image, outcomes: list[_Outcome], sometimes: tuple[tuple[str, int], ...]
    ) -> None:
        self.depth, self.plan, self.mid, self.outcomes, self.sometimes = depth, plan, mid, outcomes, sometimes
        self.hits = 0


_SHIFT = 24  # of the number of a core in the number of a state
_MASK = (1 << _SHIFT) - 1


class _Search:
    """The search.  One scheduler serves for all states: each is loaded into it.

    Homes hold the running and swapped groups, by place; waiting groups have objects of their own, by what they are and
    place, which are put right again whenever they were touched.
    """

    def __init__(
        self,
        world: World,
        make: Make,
        new_group: NewGroup,
        hook: Hook | None,
        laws: frozenset[str],
        goal: Callable[[Any], bool] | None,
        in_full: bool,
    ) -> None:
        self.world, self.make, self.new_group, self.hook, self.goal = world, make, new_group, hook, goal
        self.codec = Codec(make, new_group)
        self.laws, self.checks = laws, Checks(laws)
        self.complete = len(laws) == len(BY_ID)
        # hooks and goals look at every state; who is aborted in mid-step may be in the tail
        self.quick = not in_full and hook is None and goal is None and not world.mid_aborts
        self.sometimes: Counter[str] = Counter()
        self.extra = ("decodes_owed", *self.codec.extra)
        self.s = make()
        self.own: Any = vars(self.s)
        self.blocks = self.s.blocks
        self.pools = self.blocks.gpu, self.blocks.cpu
        self.homes = [object.__new__(self.codec.group_class) for _ in range(world.groups)]
        self.nobody, _ = self.codec.parts(self.s)
        self.cores: list[_Core] = []
        self.core_numbers: dict[bytes, int] = {}
        self.kinds: list[bytes] = []  # of waiting groups
        self.kind_numbers: dict[bytes, int] = {}
        self.queues: list[tuple[int, ...]] = []  # of waiting groups, by kind
        self.queue_numbers: dict[tuple[int, ...], int] = {}
        self.rows: dict[tuple[int, int], Row] = {}
        self.index: dict[int, int] = {}
        self.states = array("q")  # in order of discovery: number of core and of queue
        self.parents = array("q")
        self.events: list[Event | None] = []
        self.adds = tuple(Event("add", group=request) for request in self._accepted())
        self.added: dict[tuple[int, tuple[int, int, int]], int] = {}
        self.edges = 0
        self.here = 0
        self.graph: Graph | None = None

    def _accepted(self) -> tuple[tuple[int, int, int], ...]:
        """The menu without what this configuration refuses."""
        accepted = []
        for p, n, m in self.world.menu:
            try:
                self.make().add(self.new_group("a", p, n, m))
            except ValueError:
                continue
            accepted.append((p, n, m))
        return tuple(accepted)

    def run(self, limit: int, keep_graph: bool) -> Found:
        begun = time.process_time()
        self.graph = Graph() if keep_graph else None
        violation = None
        self._new(self._number(self.make()), -1, None)
        number = 0
        collecting = gc.isenabled()
        gc.disable()  # nothing here is cyclic, and the heap only grows
        try:
            while number < len(self.states) < limit:
                self.here = number
                self._expand(self.states[number])
                number += 1
        except _BrokenError as broken:
            violation = Violation(broken.law, self._run_to(self.here, broken.event), broken.detail)
        finally:
            if collecting:
                gc.enable()
        for core in self.cores:
            for entry in core.entries.values():
                for what, count in entry.sometimes if entry.hits else ():
                    self.sometimes[what] += count * entry.hits
        seconds = time.process_time() - begun
        complete = violation is None and number == len(self.states)
        return Found(len(self.states), self.edges, seconds, complete, violation, self.sometimes, self.graph)

    def _run_to(self, state: int, last: Event) -> tuple[Event, ...]:
        events = [last]
        while state > 0:
            event = self.events[state]
            state = self.parents[state]
            assert event is not None
            events.append(event)
        return tuple(reversed(events))

    def _broken(self, laws: list[Law], event: Event, detail: str = "") -> None:
        """Stop at the first of the laws that is looked for."""
        for one in laws:
            if one.id in self.laws:
                raise _BrokenError(one, event, detail)

    # numbers of states

    def _number(self, s: Any) -> int:
        """The number of the core of a state and of its waiting groups, in one; UnfaithfulError as the codec says."""
        key, waiting = self.codec.parts(s)
        number = self.core_numbers.get(key)
        if number is None:
            number = self.core_numbers[key] = len(self.cores)
            self.cores.append(self._core(number, key))
        kinds = []
        for one in waiting:
            kind = self.kind_numbers.get(one)
            if kind is None:
                kind = self.kind_numbers[one] = len(self.kinds)
                self.kinds.append(one)
            kinds.append(kind)
        return number << _SHIFT | self._queue(tuple(kinds))

    def _queue(self, kinds: tuple[int, ...]) -> int:
        number = self.queue_numbers.get(kinds)
        if number is None:
            number = self.queue_numbers[kinds] = len(self.queues)
            self.queues.append(kinds)
        return number

    def _core(self, number: int, key: bytes) -> _Core:
        s = self.codec.restore(key + bytes(1))
        image = Image(s, [*s.running, *s.swapped], self.extra)
        image.rows = tuple(row._replace(group=home) for row, home in zip(image.rows, self.homes, strict=False))
        count, running = len(image.rows), len(s.running)
        image.queues = self.homes[:running], self.homes[running:count], []
        return _Core(number, key, count, image)

    def _row(self, kind: int, rank: int) -> Row:
        """The waiting group of this kind at this place."""
        row = self.rows.get((kind, rank))
        if row is None:
            (g,) = self.codec.restore(self.nobody + bytes((1,)) + self.kinds[kind]).waiting
            g.request_id, g.arrival = NAMES[rank], rank
            row = self.rows[kind, rank] = Row.of(g)
        return row

    def _new(self, number: int, parent: int, event: Event | None) -> int:
        there = self.index[number] = len(self.states)
        self.states.append(number)
        self.parents.append(parent)
        self.events.append(event)
        return there

    # one state

    def _expand(self, number: int) -> None:
        """All transitions from a state."""
        world, s = self.world, self.s
        core, queue = self.cores[number >> _SHIFT], self.queues[number & _MASK]
        count = core.count
        unfinished = count + len(queue)
        rows = [self._row(kind, rank) for rank, kind in enumerate(queue, count)]
        waiting = [row.group for row in rows]
        everyone = self.homes[:count] + waiting
        books = dict(zip(NAMES, everyone, strict=False))
        if self.graph is not None:
            self.graph.edges.append([])
            self.graph.keys.append(b"".join((core.key, bytes((len(queue),)), *(self.kinds[kind] for kind in queue))))
            self.graph.groups.append(unfinished)
        self._load(core, waiting, books)
        for event in self.adds if unfinished < world.groups else ():
            if self.quick and self._add_again(core, queue, rows, waiting, books, event):
                continue
            for row in rows:
                row.load()
            self._load(core, waiting, books)
            s.add(self.new_group(NAMES[unfinished], *event.group))
            there = self._arrive(s, event, 0, unfinished)
            if there >= 0 and there >> _SHIFT == core.number:
                *before, kind = self.queues[there & _MASK]
                if tuple(before) == queue:
                    self.added[queue[-1] if queue else ~core.number, event.group] = kind
            for row in rows:
                row.load()
            self._load(core, waiting, books)
        for rank in range(unfinished) if world.aborts else ():
            s.abort(NAMES[rank])
            self._arrive(s, Event("abort", rank=rank), 0, unfinished)
            for row in rows:
                row.load()
            self._load(core, waiting, books)
        if unfinished and not (self.quick and self._step_again(core, queue, rows, waiting, books)):
            for row in rows:
                row.load()
            self._load(core, waiting, books)
            self._steps(s, core, queue, rows, books)
            for row in rows:
                row.load()

    def _load(self, core: _Core, waiting: list[Any], books: dict[str, Any]) -> None:
        """Make the scheduler what it is at the boundary; the waiting groups are right already."""
        own = self.own
        own["blocks"] = self.blocks
        self.blocks.gpu, self.blocks.cpu = self.pools
        core.image.load(self.s, waiting)
        own["groups"] = books.copy()
        own["num_arrivals"] = len(books)
        own["num_steps"] = 0
        own["_plan"] = None
        own["_log"] = []

    def _add_again(
        self,
        core: _Core,
        queue: tuple[int, ...],
        rows: list[Row],
        waiting: list[Any],
        books: dict[str, Any],
        event: Event,
    ) -> bool:
        """Add a group as it was added before behind the same neighbour; False if that has not been, or went otherwise.

        The state laws look at each group with its neighbour in the order, and at counts of running and swapped.
        """
        kind = self.added.get((queue[-1] if queue else ~core.number, event.group))
        if kind is None:
            return False
        s, own = self.s, self.own
        rank = len(books)
        name = NAMES[rank]
        g = self.new_group(name, *event.group)
        s.add(g)
        _, values, branches, tables = self._row(kind, rank)
        if (
            s._plan is not None
            or s._aborting
            or scalars(g) != values
            or g.branches != branches
            or g.tables != tables
            or s.groups != {**books, name: g}
            or not core.image.same(s, [*waiting, g])
        ):
            return False
        for old, values, branches, tables in rows:
            if scalars(old) != values or old.branches != branches or old.tables != tables:
                return False
        s.waiting.pop()
        del s.groups[name]
        own["num_arrivals"] = rank
        own["_log"] = []
        self._go(core.number << _SHIFT | self._queue((*queue, kind)), event, 0, range(rank))
        return True

    def _go(self, number: int, event: Event, served: int, ranks: Iterable[int]) -> None:
        """A transition to a state that is lawful."""
        self.edges += 1
        there = self.index.get(number)
        if there is None:
            there = self._new(number, self.here, event)
        if self.graph is not None:
            self.graph.edges[self.here].append((there, event.kind == "step", served, tuple(ranks)))

    def _arrive(self, s: Any, event: Event, served: int, unfinished: int) -> int:
        """A transition has led here: is the state lawful, and new?  Its number, or -1 where the key cannot tell."""
        self.edges += 1
        try:
            number = self._number(s)
        except UnfaithfulError:
            self._broken(self.checks.state(views.snapshot(s)) or self.checks.ids(s), event)
            if self.complete:
                self._broken([BY_ID["Q1"]], event)  # no predicate sees it, but the state is not as derived
            return -1
        there = self.index.get(number)
        if there is None:
            self._broken(self.checks.state(s) or self.checks.ids_new(s), event)
            there = self._new(number, self.here, event)
            if self.goal is not None and self.goal(s):
                raise _BrokenError(BY_ID["S8"], event, "goal")
        if self.graph is not None:
            self.graph.edges[self.here].append((there, event.kind == "step", served, self._ranks(unfinished)))
        return number

    def _ranks(self, unfinished: int) -> tuple[int, ...]:
        """Where the groups are now, by their places before."""
        s = self.s
        place = {g.request_id: i for i, g in enumerate([*s.running, *s.swapped, *s.waiting])}
        return tuple(place.get(NAMES[rank], -1) for rank in range(unfinished))

    # steps

    def _step_again(
        self, core: _Core, queue: tuple[int, ...], rows: list[Row], waiting: list[Any], books: dict[str, Any]
    ) -> bool:
        """Schedule and update, and see that all went as in a step that was checked in full, with another tail.

        False if there was none like it, or if anything differs: then nothing is noted.
        """
        entries = core.entries
        entry = None
        for depth in core.depths:
            entry = entries.get(queue[:depth])
            if entry is not None:
                break
        if entry is None:
            return False
        depth = entry.depth
        tail, tail_rows = waiting[depth:], rows[depth:]
        s, own, mid = self.s, self.own, entry.mid
        try:
            plan = s.schedule()
        except Exception:
            return False
        if (
            plan != entry.plan
            or s._plan is not plan
            or s._log is not plan.log
            or s._departed
            or s._aborting
            or s.groups != books
            or not mid.same(s, tail)
        ):
            return False
        for g, values, branches, tables in tail_rows:
            if scalars(g) != values or g.branches != branches or g.tables != tables:
                return False
        log = plan.log
        mark = len(log)
        seen = []
        again = False
        for event, stopped, failed, after, gone, logged, core_there, waiting_there, served in entry.outcomes:
            if again:
                own["blocks"] = self.blocks
                self.blocks.gpu, self.blocks.cpu = self.pools
                mid.load(s, tail)
                own["groups"] = books.copy()
                own["_plan"] = plan
                del log[mark:]
                own["_log"] = log
            again = True
            try:
                if event.broken:
                    s.fail(plan)
                else:
                    s.update(plan, stopped, failed)
            except Exception:
                return False
            if s._plan is not None or s._aborting or log != logged or not after.same(s, tail):
                return False
            if gone:
                left = books.copy()
                for name in gone:
                    del left[name]
                if s.groups != left:
                    return False
            elif s.groups != books:
                return False
            for g, values, branches, tables in tail_rows:
                if scalars(g) != values or g.branches != branches or g.tables != tables:
                    return False
            number = core_there << _SHIFT | self._queue(waiting_there + queue[depth:])
            seen.append((number, event, served, () if self.graph is None else self._ranks(len(books))))
        for one in seen:
            self._go(*one)
        entry.hits += 1
        for row in rows[:depth]:
            row.load()
        return True

    def _steps(self, s: Any, core: _Core, queue: tuple[int, ...], rows: list[Row], books: dict[str, Any]) -> None:
        """Schedule once, check it in full, and go on with everything that can come of it."""
        before = views.snapshot(s)
        shadow = Shadow.of(s)
        event = Event("step")
        try:
            plan = s.schedule()
        except Exception as error:
            return self._broken([BY_ID["S8"]], event, f"{type(error).__name__}: {error}")
        mid = views.snapshot(s)
        try:
            step = views.observe(before, plan, mid)
        except KeyError as error:
            return self._broken([BY_ID["S19"]], event, f"unknown group {error}")
        checks = self.checks
        self._broken(
            checks.step(step)
            or checks.mid(step)
            or checks.state_in_mid(mid)
            or checks.ids_in_mid(s)
            or checks.ids_step(step),
            event,
        )
        try:
            shadow.execute(plan)
        except Exception as error:
            self._broken([BY_ID["B7"]], event, f"{type(error).__name__}: {error}")
        counted = Counter(step.verbs)
        counted.update(f"preempt by {victim.mode}" for victim in step.victims)
        served = sum(1 << RANKS[request_id] for request_id in step.given)
        everyone = list(books.values())
        image = Image(s, everyone, self.extra)
        events = list(self._outcomes(plan, len(books)))
        # where every waiting group was named there is no tail; with many outcomes it pays from the second time on
        worth = self.quick and len(queue) > len(step.admitted) and (core.met or len(events) < 3)
        core.met = True
        twin = frozen(plan) if worth else None
        alike = (
            twin is not None
            and s._plan is plan
            and s._log is plan.log
            and not s._departed
            and not s._aborting
            and s.groups == books
        )
        fields, groups, log = dict(self.own), dict(s.groups), s._log
        mark = len(log)
        ends: list[Any] = []
        for event in events:
            if ends:
                self.own.update(fields)
                image.load(s, [])
                self.own["groups"] = groups.copy()
                del log[mark:]  # shared with the plan
            there = self._finish(s, step, event, shadow, served, counted)
            ends.append((there, event, Image(s, [books[i] for i in s.groups if i in books], self.extra), set(s.groups),
                         [*plan.log]) if alike and there >= 0 else None)  # fmt: skip
        self.sometimes.update(counted)
        if alike and all(ends):
            self._keep(core, queue, rows, books, step, twin, image, ends, served, counted)
        return None

    def _keep(
        self,
        core: _Core,
        queue: tuple[int, ...],
        rows: list[Row],
        books: dict[str, Any],
        step: views.Step,
        plan: Any,
        mid: Image,
        ends: list[Any],
        served: int,
        counted: Counter[str],
    ) -> None:
        """Remember a step that was checked in full, unless it touched a group behind one that it left alone."""
        named = {g.request_id for g, _ in plan.groups} | {g.request_id for g in plan.preempted}
        for end in ends:
            named |= {entry[1] for entry in end[4]}
        depth = max((i + 1 for i, row in enumerate(rows) if row.group.request_id in named), default=0)
        depth += 1  # the head of those who still wait matters
        tail = rows[depth:]
        if depth > len(queue) or not mid.cut(tail):
            return
        outcomes = []
        for there, event, after, left, log in ends:
            kinds = self.queues[there & _MASK]
            if not after.cut(tail) or kinds[len(kinds) - len(tail) :] != queue[depth:]:
                return
            outcomes.append(
                _Outcome(
                    event,
                    [(NAMES[r], b) for r, b in event.stopped],
                    [NAMES[r] for r in event.failed],
                    after,
                    [name for name in books if name not in left],
                    log,
                    there >> _SHIFT,
                    kinds[: len(kinds) - len(tail)],
                    served,
                )
            )
        core.entries[queue[:depth]] = _Entry(depth, plan, mid, outcomes, tuple(counted.items()))
        if depth not in core.depths:
            core.depths.append(depth)

    def _finish(
        self, s: Any, step: views.Step, event: Event, shadow: Shadow, served: int, counted: Counter[str]
    ) -> int:
        """Carry one outcome of a plan through; the number of the state after it, -1 where the key cannot tell."""
        plan = step.plan
        for rank in event.aborted:
            s.abort(NAMES[rank])
        mark = len(plan.log)
        try:
            if event.broken:
                s.fail(plan)
            else:
                s.update(plan, [(NAMES[r], b) for r, b in event.stopped], [NAMES[r] for r in event.failed])
        except Exception as error:
            self._broken([BY_ID["S8"]], event, f"{type(error).__name__}: {error}")
            return -1
        if not event.broken:
            turn = views.conclude(step, s)
            self._broken(self.checks.round(turn), event)
            if not shadow.agrees(s):
                self._broken([BY_ID["B7"]], event)
            if self.hook is not None:
                self.hook(step, turn._replace(after=views.snapshot(s)), event)
        for entry in plan.log[mark:]:
            counted[entry[0]] += 1
        return self._arrive(s, event, served, len(step.before.groups))

    def _outcomes(self, plan: Any, unfinished: int) -> Iterator[Event]:
        """All that can come of a plan."""
        world = self.world
        drawn = []
        if world.stops:
            for row in plan.scheduled:
                if row.draws and row.group.known + 1 - row.group.prompt_len < row.group.max_tokens:
                    drawn += [(RANKS[row.group.request_id], branch) for branch in row.draws]
        for count in range(len(drawn) + 1):
            for stopped in combinations(drawn, count):
                yield Event("step", stopped=stopped)
        if world.mid_aborts:
            for rank in range(unfinished):
                others = [one for one in drawn if one[0] != rank]
                for count in range(len(others) + 1):
                    for stopped in combinations(others, count):
                        yield Event("step", stopped=stopped, aborted=(rank,))
        if world.fails:
            for group, _ in plan.groups:
                yield Event("step", failed=(RANKS[group.request_id],))
            yield Event("step", broken=True)  # last: it marks the plan
