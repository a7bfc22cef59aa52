"""Every reachable state of the real scheduler with its real allocator, at small scope, with all laws checked.

The environment does anything it may: requests from a menu arrive while fewer than a bound are unfinished (so runs never
end), any subset of the branches that draw a token stops, any group is aborted at a boundary or between schedule and
update, a step or a group fails.  States are told apart up to the names of blocks and groups (`codec`).

Each step is made by the real code, and each way it can go on is a transition made by the real code.  State laws are
checked on every new state, laws on a step once a step, laws on a round and the ghost contents on every transition.
Three things are not done twice, where they would come out the same:

The *tail* of a step is the waiting groups behind the most senior one that the step left waiting and never named.  The
laws are local in it: what they ask of a waiting group they ask of it alone, of it and its neighbour in the order, of
the head of waiting, or of whoever was moved.  A step that was checked in full is run again with everything that could
show a tail sealed (`sealed`): where the real code comes to its end without a look behind the seals, with the same plan,
the same state in mid-step and after every outcome, compared field by field and block by block, it does so whatever the
tail is, and the laws say the same of all.  Code that looks is run and checked in every state.

Adding a group is done likewise, with all of the scheduler sealed but the number of groups before it.

The outcomes of a plan are many, the ways a group comes out of it few: what is asked of each group alone is asked once
of each way (`forms`).

`in_full=True` does everything every time, and the proofs compare the two.
"""

from __future__ import annotations

import gc
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

from spec import plain, views
from spec.check import forms
from spec.check.codec import ALLOWED, NAMES, RANKS, SCHEDULER_FIELDS, Codec, UnfaithfulError, UnusableError
from spec.check.forms import Form
from spec.check.image import Image, Row, frozen, full, put
from spec.check.patience import EndlessError, patience, told
from spec.check.sealed import Books, Nothing, Queue, Void
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
    """A law broken: at which event of the shortest run, and the run.  keys: of the states before each event."""

    law: Law
    run: tuple[Event, ...]  # the last one broke it
    detail: str = ""
    keys: tuple[bytes, ...] = ()


@dataclass
class Graph:
    """The transitions: for each state what follows, as (state, event kind, ranks served, rank of each group after)."""

    edges: list[list[tuple[int, bool, int, tuple[int, ...]]]] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)  # unfinished groups in each state
    keys: list[bytes] = field(default_factory=list)
    parents: Sequence[int] = ()  # the state from which each was found, and by what
    events: Sequence[Event | None] = ()

    def run_to(self, state: int) -> tuple[Event, ...]:
        """The shortest run to a state."""
        events = []
        while state > 0:
            event, state = self.events[state], self.parents[state]
            assert event is not None
            events.append(event)
        return tuple(reversed(events))


@dataclass
class Found:
    """What an exploration saw.  runs: steps that the real code made; the others are the same but for a sealed tail.

    twice: steps that were planned and updated once more, from the same state.  refused: of the menu, by `add`.
    endless: the violation is a call that does not return, so nothing behind it was seen.
    """

    states: int
    edges: int
    seconds: float
    complete: bool
    violation: Violation | None
    sometimes: Counter[str]
    graph: Graph | None = None
    runs: int = 0
    twice: int = 0
    refused: tuple[tuple[int, int, int], ...] = ()
    endless: bool = False

    @property
    def rate(self) -> float:
        """States a second."""
        return self.states / max(self.seconds, 1e-9)


class _BrokenError(Exception):
    def __init__(self, law: Law, event: Event, detail: str = "") -> None:
        super().__init__(law.id)
        self.law, self.event, self.detail = law, event, detail


RAISED = (Exception, SystemExit)  # by code under test
LOOKED_AT = ("log", "groups", "scheduled", "blocks_to_swap_out", "blocks_to_swap_in", "blocks_to_copy")  # of a plan
FIRST, THEN_EACH = 64, 32  # states from which a step is made twice
AGAIN = 8  # times more where that went differently, to tell why
NO_PART = ("num_steps", "num_arrivals", "request_id", "arrival", "num_preemptions")  # of a state, for its key
EACH_ALONE = ("S12", "N3")  # laws on a round that are about each group after it, and nothing else after it


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
        rounds = tuple(one for one in plain.of(Kind.ROUND, Tier.COUNTS) if one.id in ids)
        self.round_whole = plain.checker(tuple(one for one in rounds if one.id not in EACH_ALONE))
        self.round_alone = plain.checker(tuple(one for one in rounds if one.id in EACH_ALONE))
        self.ids = of(Kind.STATE, Tier.IDS)
        # the key has just recounted the references (B3)
        self.ids_new = plain.checker(
            tuple(one for one in plain.of(Kind.STATE, Tier.IDS) if one.id in ids and one.id != "B3")
        )
        self.ids_in_mid = of(Kind.STATE, Tier.IDS, mid=True)
        self.ids_step = of(Kind.STEP, Tier.IDS)


Make = Callable[[], Any]
NewGroup = Callable[[str, int, int, int], Any]
Hook = Callable[[views.Step, views.Round, Event], str | None]
REFINES = Law(
    "refinement",
    "log_replays",
    "the log of every plan, replayed in the spec action by action, leads to the state that the scheduler is in",
    "",
    Kind.ROUND,
    Tier.COUNTS,
    False,
    None,
)


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
    twice: bool = False,
) -> Found:
    """Breadth-first over everything that can happen from the empty scheduler; stops at the first law broken.

    step_hook(step, round, event) is called for each transition made by a step; what it returns, if not empty, is wrong
    with the step, and ends the search as a violation of REFINES.  goal(state) ends the search: the run to
    the first state that satisfies it is returned as a violation of no law (`law` is that of S8).

    laws: the ids to check instead of all; transitions into states that the key cannot tell, because they break other
    laws, are then left out.

    in_full: evaluate the laws on every step, also where one like it was checked already.

    twice: some steps are made once more from the same state, under other names and counters, to see that equal states
    go on alike.

    A call that does not return breaks S8, and ends the search.  Raises UnusableError where a scheduler cannot be
    searched: it keeps what the key cannot hold, or does not go on alike.
    """
    try:
        with patience(lambda: None):
            search = _Search(world, make, new_group, step_hook, frozenset(laws or BY_ID), goal, in_full, twice)
    except EndlessError as error:
        raise UnusableError(f"no scheduler can be made: a call {error}") from None
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


class _Part(NamedTuple):
    """Some of the groups of a state: all that laws about each group alone read of it."""

    running: list[Any]
    swapped: list[Any]
    waiting: list[Any]


class _End(NamedTuple):
    """What came of a plan: the number of the state, the state, which groups changed, who is in the books, the log."""

    number: int
    event: Event
    after: Image
    changed: list[int]
    left: set[str]
    log: list[Any]


class _Outcome(NamedTuple):
    """What came of a plan, the tail left out: the state after it, and the number of its core and its waiting groups.

    changed: the groups that are not as in mid-step, as they were there.  ranks: where each group is now.
    """

    event: Event
    stopped: list[tuple[str, int]]
    failed: list[str]
    after: Image
    log: list[Any]
    changed: list[Row]
    core: int
    waiting: tuple[int, ...]
    ranks: tuple[int, ...]


class _Entry:
    """A step that was checked in full.  depth: of the waiting groups that matter.

    mid: the state that the plan left, until the step was run again without a tail; blind: it went the same then.
    """

    __slots__ = ("blind", "count", "depth", "hits", "mid", "outcomes", "plan", "served", "sometimes")

    def __init__(
        self,
        depth: int,
        count: int,
        plan: Any,
        mid: Image,
        outcomes: list[_Outcome],
        served: int,
        sometimes: tuple[tuple[str, int], ...],
    ) -> None:
        self.depth, self.count, self.plan, self.outcomes, self.served = depth, count, plan, outcomes, served
        self.mid: Image | None = mid
        self.sometimes = sometimes
        self.blind = False
        self.hits = 0


class _Ready(NamedTuple):
    """A state that the scheduler was made to be in."""

    rows: list[Row]  # of the waiting groups
    waiting: list[Any]
    everyone: list[Any]
    values: list[tuple[Any, ...]]  # of everyone
    books: dict[str, Any]


def _a(event: Event) -> str:
    return {"add": "add()", "abort": "abort()"}.get(event.kind, "a step")


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
        twice: bool,
    ) -> None:
        self.world, self.make, self.new_group, self.hook, self.goal = world, make, new_group, hook, goal
        self.codec = Codec(make, new_group)
        self.laws, self.checks = laws, Checks(laws)
        self.complete = len(laws) == len(BY_ID)
        # hooks and goals look at every state; who is aborted in mid-step may be in the tail
        self.quick = not in_full and hook is None and goal is None and not world.mid_aborts
        self.alone = not in_full and hook is None
        self.sometimes: Counter[str] = Counter()
        self.extra = ("decodes_owed", *self.codec.extra)
        self.s = make()
        self.own: Any = vars(self.s)
        self.own_count = len(self.own)
        self.blocks = self.s.blocks
        self.pools = self.blocks.gpu, self.blocks.cpu
        self.homes = [new_group(NAMES[rank], 1, 1, 1) for rank in range(world.groups)]
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
        self.endless_add = False
        self.adds = tuple(Event("add", group=request) for request in world.menu if self._accepted(request))
        self.refused = tuple(request for request in world.menu if Event("add", group=request) not in self.adds)
        self.added: dict[tuple[int, tuple[int, int, int]], int] = {}
        self.blind_adds: dict[tuple[int, int, tuple[int, int, int]], bool] = {}
        self.edges = 0
        self.runs = 0
        self.here = 0
        self.event = Event("step")  # under way
        self.plan_class: type | None = None
        self.asking = False  # the hook: what it raises is for whoever gave it
        self.twice = twice
        self.steps = self.repeated = 0
        self.graph: Graph | None = None

    def _accepted(self, request: tuple[int, int, int]) -> bool:
        """This configuration does not refuse it."""
        if self.endless_add:
            return True
        try:
            self.make().add(self.new_group("a", *request))
        except ValueError:
            return False
        except RAISED:
            pass  # to be met in the search
        except EndlessError:
            self.endless_add = True
        return True

    def run(self, limit: int, keep_graph: bool) -> Found:
        begun = time.process_time()
        self.graph = Graph(parents=self.parents, events=self.events) if keep_graph else None
        violation = None
        endless = False
        self._new(self._number(*self.codec.parts(self.make())), -1, None)
        number = 0
        collecting = gc.isenabled()
        gc.disable()  # nothing here is cyclic, and the heap only grows
        try:
            with patience(lambda: (self.edges, self.runs, self.here)):
                while number < len(self.states) < limit:
                    self.here = number
                    try:
                        self._expand(self.states[number])
                    except (_BrokenError, UnusableError):
                        raise
                    except RAISED as error:  # a plan or a state that is none
                        if self.asking:
                            raise
                        self._broken([BY_ID["S8"]], self.event, f"what came of it cannot be followed: {told(error)}")
                    number += 1
        except _BrokenError as broken:
            violation = self._violation(broken.law, broken.event, broken.detail)
        except EndlessError as error:
            endless = True
            violation = self._violation(BY_ID["S8"], self.event, f"a call {error}")
        except UnusableError as error:
            error.run = error.run or self._run_to(self.here, self.event)
            raise
        finally:
            for core in self.cores:
                for entry in core.entries.values():
                    for what, count in entry.sometimes if entry.hits else ():
                        self.sometimes[what] += count * entry.hits
                core.entries.clear()  # much to look through for a collector, and none of it cyclic
            if collecting:
                gc.enable()
        seconds = time.process_time() - begun
        complete = violation is None and number == len(self.states)
        return Found(
            len(self.states),
            self.edges,
            seconds,
            complete,
            violation,
            self.sometimes,
            self.graph,
            self.runs,
            self.repeated,
            self.refused,
            endless,
        )

    def _violation(self, law: Law, event: Event, detail: str) -> Violation:
        keys, state = [], self.here
        while state >= 0:
            keys.append(self._key(self.states[state]))
            state = self.parents[state]
        return Violation(law, self._run_to(self.here, event), detail, tuple(reversed(keys)))

    def _key(self, number: int) -> bytes:
        """What `Codec.encode` says of the state."""
        core, queue = self.cores[number >> _SHIFT], self.queues[number & _MASK]
        return b"".join((core.key, bytes((len(queue),)), *(self.kinds[kind] for kind in queue)))

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

    def _number(self, key: bytes, waiting: tuple[bytes, ...]) -> int:
        """The number of the core of a state and of its waiting groups, in one."""
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
        count, running = len(image.groups), len(s.running)
        image.groups = self.homes[:count]
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
        unfinished = core.count + len(queue)
        if self.graph is not None:
            self.graph.edges.append([])
            self.graph.keys.append(self._key(number))
            self.graph.groups.append(unfinished)
        if self.twice and unfinished:
            self.steps += 1
            if self.steps <= FIRST or self.steps % THEN_EACH == 0:
                self.event = Event("step")
                self._go_on_alike(core, queue)
        for event in self.adds if unfinished < world.groups else ():
            self.event = event
            if self.quick and self._add_again(core, queue, unfinished, event):
                continue
            self._ready(core, queue)
            try:
                s.add(self.new_group(NAMES[unfinished], *event.group))
            except RAISED as error:
                self._broken([BY_ID["S8"]], event, f"add() raised {told(error)}")
                continue
            there = self._arrive(s, event, 0, unfinished)
            if there >= 0 and there >> _SHIFT == core.number:
                *before, kind = self.queues[there & _MASK]
                if tuple(before) == queue:
                    self.added[queue[-1] if queue else ~core.number, event.group] = kind
        if world.aborts and unfinished:
            ready = self._ready(core, queue)
            for rank in range(unfinished):
                self.event = event = Event("abort", rank=rank)
                try:
                    s.abort(NAMES[rank])
                except RAISED as error:
                    self._broken([BY_ID["S8"]], event, f"abort() raised {told(error)}")
                else:
                    self._arrive(s, event, 0, unfinished)
                self._back(core, ready)
        if unfinished:
            self.event = Event("step")
            if not (self.quick and self._step_again(core, queue)):
                self._steps(s, core, queue, self._ready(core, queue))

    def _go_on_alike(self, core: _Core, queue: tuple[int, ...]) -> None:
        """The step from here, made again under other names and counters, decides the same and leads to the same."""
        first, again = self._tried(core, queue), self._tried(core, queue, NO_PART)
        self.repeated += 1
        if first == again:
            return
        from spec.check.report import of_plan  # it imports this file

        other = next((one for one in (self._tried(core, queue) for _ in range(AGAIN)) if one != first), None)
        read = [] if other else [one for one in NO_PART if self._tried(core, queue, (one,)) != first]
        if other is not None or read:
            again = other or self._tried(core, queue, (read[0],))
        self._ready(core, queue)  # the plans are shown by these names
        shown = [one if isinstance(one, str) else "; ".join(of_plan(one)) for one, _ in (first, again)]
        kind = type(self.s).__name__
        if shown[0] == shown[1]:
            did = f"the plans look alike ({shown[0]}), but what is in them or the state after update() differs"
        else:
            did = f"once it does: {shown[0]}\n   once it does: {shown[1]}"
        if not read:
            text = (
                f"{kind} decides differently from the same state.\n   {did}\nA policy may read nothing but its own "
                "fields and its arguments: no randomness, no clock, no variable of a class, a module or a closure that "
                "changes"
            )
        else:
            text = (
                f"{kind} decides by {', '.join(read)}, which {'are' if read[1:] else 'is'} no part of a state: the "
                f"same state with another {read[0]} goes on differently.\n   {did}\nKeep a counter of your own in a "
                "field (a bool or an int from 0 to 255); ids may only be compared for equality, and of arrivals only "
                "the order counts"
            )
        raise UnusableError(text)

    def _tried(self, core: _Core, queue: tuple[int, ...], other: tuple[str, ...] = ()) -> tuple[Any, Any]:
        """The plan of the step from here and the key after it, or what was raised.  other: what to change before."""
        s, own = self.s, self.own
        ready = self._ready(core, queue)
        names = {}
        for rank, g in enumerate(ready.everyone):
            names[NAMES[-1 - rank] if "request_id" in other else g.request_id] = g.request_id
            if "request_id" in other:
                g.request_id = NAMES[-1 - rank]
            if "arrival" in other:
                g.arrival = 7 * rank + 3
            if "num_preemptions" in other:
                g.num_preemptions += 3
        own["groups"] = dict(zip(names, ready.everyone, strict=True))
        if "num_steps" in other:
            own["num_steps"] = 41
        if "num_arrivals" in other:
            own["num_arrivals"] = 1009
        plan: Any = None
        try:
            plan = s.schedule()
            twin = frozen(plan)
            if twin is not None:
                twin.step = 0
                twin.log = [entry._replace(request_id=names.get(entry[1], entry[1])) for entry in twin.log]
            s.update(plan)
            return twin, self.codec.parts(s)
        except UnfaithfulError:
            return twin, None
        except RAISED as error:
            return f"{type(error).__name__} is raised", None

    def _ready(self, core: _Core, queue: tuple[int, ...]) -> _Ready:
        """Make the scheduler what it is in this state."""
        known = self.rows.get
        rows = [known((kind, rank)) or self._row(kind, rank) for rank, kind in enumerate(queue, core.count)]
        waiting = [row.group for row in rows]
        everyone = core.image.groups + waiting
        values = core.image.values + [row.values for row in rows]
        ready = _Ready(rows, waiting, everyone, values, dict(zip(NAMES, everyone, strict=False)))
        self._back(core, ready)
        return ready

    def _back(self, core: _Core, ready: _Ready) -> None:
        """Make it that again."""
        for g, now, was in zip(ready.everyone, map(full, ready.everyone), ready.values, strict=True):
            if now != was:
                put(g, was)
        own = self.own
        own["blocks"] = self.blocks
        self.blocks.gpu, self.blocks.cpu = self.pools
        core.image.frame(self.s, ready.waiting)
        own["groups"] = ready.books.copy()
        own["num_arrivals"] = len(ready.books)
        own["num_steps"] = 0
        own["_plan"] = None
        own["_log"] = []

    def _add_again(self, core: _Core, queue: tuple[int, ...], rank: int, event: Event) -> bool:
        """Add a group that was added before behind the same neighbour; False if that has not been.

        The state laws look at each group with its neighbour in the order, and at counts of running and swapped.  What
        `add` does is what it did when it could see nothing of the scheduler.
        """
        kind = self.added.get((queue[-1] if queue else ~core.number, event.group))
        if kind is None:
            return False
        blind = self.blind_adds.get((kind, rank, event.group))
        if blind is None:
            try:
                blind = self.blind_adds[kind, rank, event.group] = self._add_blindly(kind, rank, event)
            except EndlessError:
                blind = self.quick = False
        if blind:
            self._go(core.number << _SHIFT | self._queue((*queue, kind)), event, 0, range(rank))
        return blind

    def _add_blindly(self, kind: int, rank: int, event: Event) -> bool:
        """Whether `add`, which sees only how many groups came before, adds the group that it added before."""
        s, own = self.s, self.own
        name, g = NAMES[rank], self.new_group(NAMES[rank], *event.group)
        self.blocks.gpu = self.blocks.cpu = Void()
        own["blocks"], own["calendar"] = self.blocks, Nothing()
        own["running"], own["swapped"] = Queue(()), Queue(())
        own["waiting"], own["groups"] = waiting, books = Queue((), ends=True), Books({}, fresh=name)
        own["num_steps"] = Nothing()
        for extra in self.extra:
            own[extra] = Nothing()
        own["num_arrivals"] = rank
        own["_plan"], own["_log"], own["_departed"], own["_aborting"] = None, [], [], []
        fields = dict(own)
        try:
            s.add(g)
        except Exception:
            return False
        fields["num_arrivals"] = own["num_arrivals"]
        return (
            own.keys() == fields.keys()
            and all(own[field] is value for field, value in fields.items())
            and not any(getattr(value, "looked", False) for value in fields.values())
            and not own["_departed"]
            and not own["_aborting"]
            and not own["running"].shown()
            and not own["swapped"].shown()
            and waiting.shown() == [g]
            and books.shown() == {name: g}
            and full(g) == self._row(kind, rank).values
        )

    def _go(self, number: int, event: Event, served: int, ranks: Iterable[int]) -> None:
        """A transition to a state that is lawful."""
        self.edges += 1
        there = self.index.get(number)
        if there is None:
            there = self._new(number, self.here, event)
        if self.graph is not None:
            self.graph.edges[self.here].append((there, event.kind == "step", served, tuple(ranks)))

    def _arrive(self, s: Any, event: Event, served: int, unfinished: int, number: int = -1) -> int:
        """A transition has led here: is the state lawful, and new?  Its number, or -1 where the key cannot tell."""
        self.edges += 1
        if len(self.own) != self.own_count:
            self._new_field(event)
        try:
            number = self._number(*self.codec.parts(s)) if number < 0 else number
        except UnusableError:
            raise
        except Exception:  # unfaithful, or numbers that are none
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

    def _new_field(self, event: Event) -> None:
        fields = set(SCHEDULER_FIELDS) | set(self.extra)
        new = sorted(set(self.own) - fields)
        if new:
            raise UnusableError(f"{type(self.s).__name__}.{new[0]} is new after {_a(event)}; {ALLOWED}")
        gone = sorted(fields - set(self.own))
        raise UnusableError(f"{type(self.s).__name__}.{gone[0]} is gone after {_a(event)}")

    def _ranks(self, unfinished: int) -> tuple[int, ...]:
        """Where the groups are now, by their places before."""
        s = self.s
        place = {g.request_id: i for i, g in enumerate([*s.running, *s.swapped, *s.waiting])}
        return tuple(place.get(NAMES[rank], -1) for rank in range(unfinished))

    # steps

    def _step_again(self, core: _Core, queue: tuple[int, ...]) -> bool:
        """Go on as in a step that was checked in full, with another tail; False if there was none like it."""
        entries = core.entries
        for depth in core.depths:
            entry = entries.get(queue[:depth])
            if entry is not None:
                break
        else:
            return False
        if entry.mid is not None:
            try:
                entry.blind = self._step_blindly(core, queue[:depth], entry, entry.mid)
            except EndlessError:  # it came to its end before: this is the seals' doing
                self.quick = False
            entry.plan = entry.mid = None
            if not entry.blind:
                entry.outcomes = []
        if not entry.blind:
            return False
        tail = queue[depth:]
        ranks: tuple[int, ...] = ()
        for event, _, _, _, _, _, core_there, waiting_there, places in entry.outcomes:
            if self.graph is not None:
                kept = len(places) - places.count(-1)
                ranks = (*places, *range(kept, kept + len(tail)))
            self._go(core_there << _SHIFT | self._queue(waiting_there + tail), event, entry.served, ranks)
        entry.hits += 1
        return True

    def _step_blindly(self, core: _Core, queue: tuple[int, ...], entry: _Entry, mid: Image) -> bool:
        """Whether schedule and update, which see nothing of a tail, nor whether there is one, do what they did."""
        s, own = self.s, self.own
        ready = self._ready(core, queue)
        sealed = self._seal(ready.waiting, ready.books)
        try:
            plan = s.schedule()
        except Exception:
            return False
        if plan != entry.plan or s._plan is not plan or s._log is not plan.log or not self._unseen(sealed, ready.books):
            return False
        if s._departed or s._aborting or not mid.same(s, [], []):
            return False
        log = plan.log
        mark = len(log)
        for event, stopped, failed, after, logged, changed, _, _, ranks in entry.outcomes:
            self.runs += 1
            mid.frame(s, [])
            own["_plan"], own["_log"] = plan, log
            del log[mark:]
            sealed = self._seal(mid.queues[2], ready.books)
            try:
                if event.broken:
                    s.fail(plan)
                else:
                    s.update(plan, stopped, failed)
            except Exception:
                return False
            left = {name: g for (name, g), rank in zip(ready.books.items(), ranks, strict=True) if rank >= 0}
            if s._plan is not None or s._aborting or log != logged or not self._unseen(sealed, left):
                return False
            if not after.same(s, [], []):
                return False
            for row in changed:
                put(*row)
        return True

    def _seal(self, waiting: list[Any], books: dict[str, Any]) -> tuple[Queue, Books, Nothing]:
        """Leave only these groups to be seen of those that wait."""
        own = self.own
        own["waiting"], own["groups"], own["num_arrivals"] = sealed = Queue(waiting), Books(books), Nothing()
        return sealed

    def _unseen(self, sealed: tuple[Queue, Books, Nothing], books: dict[str, Any]) -> bool:
        """Nobody has looked behind the seals; the books are these, and waiting is a plain queue again."""
        own = self.own
        queue, groups, number = sealed
        if own["waiting"] is not queue or own["groups"] is not groups or own["num_arrivals"] is not number:
            return False
        own["waiting"] = deque(queue.shown())
        return not (queue.looked or groups.looked or number.looked) and groups.shown() == books

    def _steps(self, s: Any, core: _Core, queue: tuple[int, ...], ready: _Ready) -> None:
        """Schedule once, check it in full, and go on with everything that can come of it."""
        everyone, books = ready.everyone, ready.books
        before = views.snapshot(s)
        shadow = Shadow.of(s)
        event = Event("step")
        self.event = event
        try:
            plan = s.schedule()
        except RAISED as error:
            return self._broken([BY_ID["S8"]], event, told(error))
        if type(plan) is not self.plan_class:
            missing = [name for name in LOOKED_AT if not hasattr(type(plan), name) and not hasattr(plan, name)]
            if missing:
                what = f"a {type(plan).__name__} without {missing[0]}" if plan is not None else "None"
                return self._broken([BY_ID["S8"]], event, f"schedule() returned {what}; it must return a Plan")
            self.plan_class = type(plan)
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
        ends: list[_End | None] = []
        met: forms.Forms | None = [[] for _ in everyone] if self.alone else None
        moved: list[int] = []
        for event in events:
            if event is not events[0]:
                self.own.update(fields)
                for place in moved:
                    put(everyone[place], image.values[place])
                image.frame(s, [])
                self.own["groups"] = groups.copy()
                del log[mark:]  # shared with the plan
            there, found, moved = self._finish(s, step, event, shadow, served, counted, everyone, image, met)
            if alike and there >= 0:
                after = Image(s, everyone, self.extra, [form.values for form in found])
                ends.append(_End(there, event, after, moved, set(s.groups), [*plan.log]))
            else:
                ends.append(None)
        for place in moved:  # their lists are kept in a form
            put(everyone[place], image.values[place])
        self.sometimes.update(counted)
        if alike and all(ends):
            self._keep(core, queue, ready, twin, image, ends, served, counted)  # type: ignore[arg-type]
        return None

    def _keep(
        self,
        core: _Core,
        queue: tuple[int, ...],
        ready: _Ready,
        plan: Any,
        mid: Image,
        ends: list[_End],
        served: int,
        counted: Counter[str],
    ) -> None:
        """Remember a step that was checked in full, unless it touched a group behind one that it left alone."""
        rows = ready.rows
        named = {g.request_id for g, _ in plan.groups} | {g.request_id for g in plan.preempted}
        for end in ends:
            named |= {entry[1] for entry in end.log}
        depth = max((i + 1 for i, row in enumerate(rows) if row.group.request_id in named), default=0)
        depth += 1  # the head of those who still wait matters
        tail, untouched = ready.waiting[depth:], [row.values for row in rows[depth:]]
        if depth > len(queue) or not mid.cut(tail, untouched):
            return
        outcomes = []
        for there, event, after, changed, left, log in ends:
            kinds = self.queues[there & _MASK]
            if not after.cut(tail, untouched) or kinds[len(kinds) - len(tail) :] != queue[depth:]:
                return
            running, swapped, waiting = after.queues
            place = {g.request_id: i for i, g in enumerate([*running, *swapped, *waiting])}
            head = NAMES[: len(mid.groups)]
            if not left.issuperset(place) or any(name in left and name not in place for name in head):
                return
            outcomes.append(
                _Outcome(
                    event,
                    [(NAMES[r], b) for r, b in event.stopped],
                    [NAMES[r] for r in event.failed],
                    after,
                    log,
                    [Row(mid.groups[place], mid.values[place]) for place in changed],
                    there >> _SHIFT,
                    kinds[: len(kinds) - len(tail)],
                    tuple([place.get(name, -1) for name in head]),
                )
            )
        core.entries[queue[:depth]] = _Entry(depth, core.count, plan, mid, outcomes, served, tuple(counted.items()))
        if depth not in core.depths:
            core.depths.append(depth)

    def _finish(
        self,
        s: Any,
        step: views.Step,
        event: Event,
        shadow: Shadow,
        served: int,
        counted: Counter[str],
        everyone: list[Any],
        mid: Image,
        met: forms.Forms | None,
    ) -> tuple[int, list[Form], list[int]]:
        """Carry one outcome of a plan through: the number of the state after it, -1 where the key cannot tell; the
        forms of the groups, and which of them are not as in mid-step.

        met: the forms in which they came out of this plan before; None to look at everything plainly.
        """
        plan = step.plan
        self.runs += 1
        self.event = event
        try:
            for rank in event.aborted:
                s.abort(NAMES[rank])
            mark = len(plan.log)
            if event.broken:
                s.fail(plan)
            else:
                s.update(plan, [(NAMES[r], b) for r, b in event.stopped], [NAMES[r] for r in event.failed])
        except RAISED as error:
            self._broken([BY_ID["S8"]], event, told(error))
            return -1, [], [*range(len(everyone))]
        number = -1
        found: list[Form] = []
        moved = [*range(len(everyone))]
        here: list[tuple[Any, Form]] = []
        if met is not None:
            try:
                found, moved = forms.find(self.codec, everyone, met, mid.values)
                key, waiting, here = forms.parts(self.codec, s, everyone, found)
                number = self._number(key, waiting)
            except UnusableError:
                raise
            except Exception:  # unfaithful, or numbers that are none: `_arrive` says which law that breaks
                pass
        if not event.broken:
            turn = views.conclude(step, s)
            if number < 0 or not self._right(turn, mark, shadow, here):
                self._broken(self.checks.round(turn), event)
                if not self._agrees(shadow, s):
                    self._broken([BY_ID["B7"]], event)
                if self.hook is not None:
                    whole = turn._replace(after=views.snapshot(s))
                    self.asking = True
                    said = self.hook(step, whole, event)
                    self.asking = False
                    if said:
                        raise _BrokenError(REFINES, event, said)
        for entry in plan.log[mark:]:
            counted[entry[0]] += 1
        return self._arrive(s, event, served, len(step.before.groups), number), found, moved

    @staticmethod
    def _agrees(shadow: Shadow, s: Any) -> bool:
        try:
            return shadow.agrees(s)
        except Exception:
            return False  # tables that are none

    def _right(self, turn: views.Round, mark: int, shadow: Shadow, here: list[tuple[Any, Form]]) -> bool:
        """Laws and contents after an outcome are right.

        What laws say of each group alone depends on the plan, on the group, and on what the log says of it; so do its
        contents.  A group that came out the same before, with the same word in the log, is not looked at again.
        """
        if self.checks.round_whole(turn):
            return False
        told: dict[str, list[Any]] = {}
        for entry in turn.step.plan.log[mark:]:
            told.setdefault(entry[1], []).append(entry)
        new = []
        part = _Part([], [], [])
        by_status = dict(zip(self.codec.statuses, part, strict=True))
        for g, form in here:
            said = told.get(form.name)
            if said not in form.told:
                new.append((form, said))
                by_status[form.status].append(g)
        if new:
            if self.checks.round_alone(turn._replace(after=part)) or not shadow.agrees(part):  # type: ignore[arg-type]
                return False
            for form, said in new:
                form.told.append(said)
        return True

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
