"""Every reachable state of the real scheduler with its real allocator, at small scope, with all laws checked.

The environment does anything it may: requests from a menu arrive while fewer than a bound are unfinished (so runs never
end), any subset of the branches that draw a token stops, any group is aborted at a boundary or between schedule and
update, a step or a group fails.  States are told apart up to the names of blocks and groups (`codec`).

Each state is scheduled once and each way it can go on is a transition.  State laws are checked on every new state,
laws on a step once a state, laws on a round and the ghost contents on every transition.
"""

from __future__ import annotations

import gc
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

from spec import plain, views
from spec.check.codec import NAMES, RANKS, Codec, Saved, UnfaithfulError
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
) -> Found:
    """Breadth-first over everything that can happen from the empty scheduler; stops at the first law broken.

    step_hook(step, round, event) is called for each transition made by a step.  goal(state) ends the search: the run to
    the first state that satisfies it is returned as a violation of no law (`law` is that of S8).

    laws: the ids to check instead of all; transitions into states that the key cannot tell, because they break other
    laws, are then left out.
    """
    search = _Search(world, make, new_group, step_hook, frozenset(laws or BY_ID))
    return search.run(limit, graph, goal)


class _Search:
    def __init__(self, world: World, make: Make, new_group: NewGroup, hook: Hook | None, laws: frozenset[str]) -> None:
        self.world, self.make, self.new_group, self.hook = world, make, new_group, hook
        self.codec = Codec(make, new_group)
        self.laws, self.checks = laws, Checks(laws)
        self.complete = len(laws) == len(BY_ID)
        self.sometimes: Counter[str] = Counter()
        self.index: dict[bytes, int] = {}
        self.parents: list[tuple[int, Event | None]] = []
        self.queue: deque[bytes] = deque()
        self.adds = tuple(Event("add", group=request) for request in self._accepted())
        self.edges = 0
        self.here = 0
        self.graph: Graph | None = None
        self.goal: Callable[[Any], bool] | None = None

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

    def run(self, limit: int, keep_graph: bool, goal: Callable[[Any], bool] | None) -> Found:
        begun = time.process_time()
        self.graph = Graph() if keep_graph else None
        self.goal = goal
        violation = None
        start = self.codec.encode(self.make())
        self.index[start] = 0
        self.parents.append((-1, None))
        self.queue.append(start)
        number = 0
        collecting = gc.isenabled()
        gc.disable()  # nothing here is cyclic, and the heap only grows
        try:
            while self.queue and len(self.parents) < limit:
                self.here = number
                self._expand(self.queue.popleft())
                number += 1
        except _BrokenError as broken:
            violation = Violation(broken.law, self._run_to(self.here, broken.event), broken.detail)
        finally:
            if collecting:
                gc.enable()
        seconds = time.process_time() - begun
        complete = violation is None and not self.queue
        return Found(len(self.parents), self.edges, seconds, complete, violation, self.sometimes, self.graph)

    def _run_to(self, state: int, last: Event) -> tuple[Event, ...]:
        events = [last]
        while state > 0:
            state, event = self.parents[state]
            assert event is not None
            events.append(event)
        return tuple(reversed(events))

    def _broken(self, laws: list[Law], event: Event, detail: str = "") -> None:
        """Stop at the first of the laws that is looked for."""
        for one in laws:
            if one.id in self.laws:
                raise _BrokenError(one, event, detail)

    # one state

    def _expand(self, key: bytes) -> None:
        """All transitions from a state."""
        world = self.world
        s = self.codec.restore(key)
        before = views.snapshot(s)
        unfinished = len(before.groups)
        if self.graph is not None:
            self.graph.edges.append([])
            self.graph.keys.append(key)
            self.graph.groups.append(unfinished)
        if unfinished < world.groups or world.aborts:
            saved = Saved(s)
            for event in self.adds if unfinished < world.groups else ():
                s.add(self.new_group(NAMES[unfinished], *event.group))
                self._arrive(s, event, 0, unfinished)
                saved.load()
            for rank in range(unfinished) if world.aborts else ():
                s.abort(NAMES[rank])
                self._arrive(s, Event("abort", rank=rank), 0, unfinished)
                saved.load()
        if unfinished:
            self._steps(s, before)

    def _arrive(self, s: Any, event: Event, served: int, unfinished: int) -> None:
        """A transition has led here: is the state lawful, and is it new?"""
        self.edges += 1
        try:
            key = self.codec.encode(s)
        except UnfaithfulError:
            self._broken(self.checks.state(views.snapshot(s)) or self.checks.ids(s), event)
            if self.complete:
                self._broken([BY_ID["Q1"]], event)  # no predicate sees it, but the state is not as derived
            return
        there = self.index.get(key)
        if there is None:
            self._broken(self.checks.state(s) or self.checks.ids_new(s), event)
            there = self.index[key] = len(self.parents)
            self.parents.append((self.here, event))
            self.queue.append(key)
            if self.goal is not None and self.goal(s):
                raise _BrokenError(BY_ID["S8"], event, "goal")
        if self.graph is not None:
            place = {g.request_id: i for i, g in enumerate([*s.running, *s.swapped, *s.waiting])}
            ranks = tuple(place.get(NAMES[rank], -1) for rank in range(unfinished))
            self.graph.edges[self.here].append((there, event.kind == "step", served, ranks))

    def _steps(self, s: Any, before: Any) -> None:
        """Schedule once, check it, and go on with everything that can come of it."""
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
        self.sometimes.update(step.verbs)
        self.sometimes.update(f"preempt by {victim.mode}" for victim in step.victims)
        served = sum(1 << RANKS[request_id] for request_id in step.given)
        outcomes = list(self._outcomes(plan, len(before.groups)))
        saved = Saved(s) if len(outcomes) > 1 else None
        for event in outcomes:
            if saved is not None:
                saved.load()
            self._finish(s, step, event, shadow, served)
        return None

    def _finish(self, s: Any, step: views.Step, event: Event, shadow: Shadow, served: int) -> None:
        """Carry one outcome of a plan through."""
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
            return self._broken([BY_ID["S8"]], event, f"{type(error).__name__}: {error}")
        if not event.broken:
            turn = views.conclude(step, s)
            self._broken(self.checks.round(turn), event)
            if not shadow.agrees(s):
                self._broken([BY_ID["B7"]], event)
            if self.hook is not None:
                self.hook(step, turn._replace(after=views.snapshot(s)), event)
        for entry in plan.log[mark:]:
            self.sometimes[entry[0]] += 1
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
