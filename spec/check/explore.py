"""Every reachable state of the real scheduler with its real allocator, at small scope, with all laws checked.

The environment does anything it may: requests from a menu arrive while fewer than a bound are unfinished (so runs never
end), any subset of the branches that draw a token stops, any group is aborted at a boundary or between schedule and
update, a step or a group fails.  States are told apart up to the names of blocks and groups (`codec`).

Each state is scheduled once and each way it can go on is a transition.  State laws are checked on every new state,
laws on a step once a state, laws on a round and the ghost contents on every transition.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

from spec import plain, views
from spec.check.codec import NAMES, RANKS, Codec, Saved, UnfaithfulError
from spec.check.shadow import Shadow
from spec.laws import BY_ID, Law
from spec.views import LEAVING


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
    deepest: int = 0

    @property
    def rate(self) -> float:
        """States a second."""
        return self.states / max(self.seconds, 1e-9)


class _BrokenError(Exception):
    def __init__(self, law: Law, event: Event, detail: str = "") -> None:
        super().__init__(law.id)
        self.law, self.event, self.detail = law, event, detail


Make = Callable[[], Any]
NewGroup = Callable[[str, int, int, int], Any]


def explore(
    world: World,
    make: Make,
    new_group: NewGroup,
    *,
    limit: int = 100_000_000,
    graph: bool = False,
    step_hook: Callable[[Any, Any, Any], None] | None = None,
    goal: Callable[[Any], bool] | None = None,
) -> Found:
    """Breadth-first over everything that can happen from the empty scheduler; stops at the first law broken.

    step_hook(step, round, event) is called for each transition made by a step.  goal(state) ends the search: the run to
    the first state that satisfies it is returned as a violation of no law (`law` is that of S8).
    """
    search = _Search(world, make, new_group, step_hook)
    return search.run(limit, graph, goal)


class _Search:
    def __init__(self, world: World, make: Make, new_group: NewGroup, step_hook: Any) -> None:
        self.world, self.make, self.new_group, self.step_hook = world, make, new_group, step_hook
        self.codec = Codec(make, new_group)
        self.sometimes: Counter[str] = Counter()
        self.index: dict[bytes, int] = {}
        self.parents: list[tuple[int, Event | None]] = []
        config = world.config
        self.sizes = (config.block_size, config.num_gpu_blocks, config.num_cpu_blocks)
        self.adds = tuple(Event("add", group=request) for request in self._accepted())

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
        graph = Graph() if keep_graph else None
        edges = 0
        complete = True
        violation = None
        queue: deque[bytes] = deque()
        index, parents = self.index, self.parents
        start = self.codec.encode(self.make())
        index[start] = 0
        parents.append((-1, None))
        queue.append(start)
        here = -1
        try:
            while queue:
                key = queue.popleft()
                here += 1
                if graph is not None:
                    graph.edges.append([])
                    graph.keys.append(key)
                    graph.groups.append(key[0] + key[1] + key[2])
                for event, successor, served, ranks in self._successors(key, graph is not None):
                    edges += 1
                    there = index.get(successor)
                    if there is None:
                        there = index[successor] = len(parents)
                        parents.append((here, event))
                        queue.append(successor)
                        if goal is not None and goal(self.codec.restore(successor)):
                            raise _BrokenError(BY_ID["S8"], event, "goal")
                    if graph is not None:
                        graph.edges[here].append((there, event.kind == "step", served, ranks))
                if len(parents) >= limit:
                    complete = False
                    break
        except _BrokenError as broken:
            complete = False
            if broken.detail == "goal":
                violation = Violation(broken.law, self._run_to(len(parents) - 1, None), "goal")
            else:
                violation = Violation(broken.law, self._run_to(here, broken.event), broken.detail)
        seconds = time.process_time() - begun
        return Found(len(parents), edges, seconds, complete, violation, self.sometimes, graph)

    def _run_to(self, state: int, last: Event | None) -> tuple[Event, ...]:
        events = [] if last is None else [last]
        while state > 0:
            state, event = self.parents[state]
            assert event is not None
            events.append(event)
        return tuple(reversed(events))

    # one state

    def _successors(self, key: bytes, ranked: bool) -> Iterator[tuple[Event, bytes, int, tuple[int, ...]]]:
        world = self.world
        s = self.codec.restore(key)
        before = views.snapshot(s)
        for one in plain.check_state(before) or plain.check_ids(s):
            raise _BrokenError(one, self.parents[self.index[key]][1] or Event("start"))
        unfinished = len(before.groups)
        saved = Saved(s)
        if unfinished < world.groups:
            for event in self.adds:
                s.add(self.new_group(NAMES[unfinished], *event.group))
                yield self._close(s, event, 0, ranked, unfinished)
                saved.load()
        if world.aborts:
            for rank in range(unfinished):
                event = Event("abort", rank=rank)
                if not s.abort(NAMES[rank]):
                    raise _BrokenError(BY_ID["N1"], event)
                yield self._close(s, event, 0, ranked, unfinished)
                saved.load()
        if unfinished:
            yield from self._steps(s, before, ranked)

    def _close(
        self, s: Any, event: Event, served: int, ranked: bool, unfinished: int
    ) -> tuple[Event, bytes, int, tuple[int, ...]]:
        try:
            key = self.codec.encode(s)
        except UnfaithfulError:
            raise _BrokenError(self._which(s), event) from None
        ranks: tuple[int, ...] = ()
        if ranked:
            place = {g.request_id: i for i, g in enumerate([*s.running, *s.swapped, *s.waiting])}
            ranks = tuple(place.get(NAMES[rank], -1) for rank in range(unfinished))
        return event, key, served, ranks

    @staticmethod
    def _which(s: Any) -> Law:
        """The law that an unfaithful state breaks."""
        state = views.snapshot(s)
        for one in plain.check_state(state) + plain.check_ids(s):
            return one
        return BY_ID["Q1"]

    def _schedule(self, s: Any) -> Any:
        try:
            return s.schedule()
        except Exception as error:
            raise _BrokenError(BY_ID["S8"], Event("step"), f"{type(error).__name__}: {error}") from error

    def _steps(self, s: Any, before: Any, ranked: bool) -> Iterator[tuple[Event, bytes, int, tuple[int, ...]]]:
        shadow = Shadow.of(s)
        plan = self._schedule(s)
        mid = views.snapshot(s)
        step = self._observe(before, plan, mid)
        self._check_step(step, s)
        try:
            shadow.execute(plan)
        except Exception as error:
            raise _BrokenError(BY_ID["B7"], Event("step"), str(error)) from error
        self.sometimes.update(step.verbs)
        served = sum(1 << RANKS[v.was.request_id] for v in step.served)
        saved = Saved(s)
        for event in self._outcomes(plan, len(before.groups)):
            saved.load()
            for rank in event.aborted:
                s.abort(NAMES[rank])
            try:
                if event.broken:
                    s.fail(plan)
                else:
                    s.update(plan, [(NAMES[r], b) for r, b in event.stopped], [NAMES[r] for r in event.failed])
            except Exception as error:
                raise _BrokenError(BY_ID["S8"], event, f"{type(error).__name__}: {error}") from error
            turn = views.conclude(step, s)
            if not event.broken:
                for one in plain.check_round(turn):
                    raise _BrokenError(one, event)
                if not shadow.agrees(s):
                    raise _BrokenError(BY_ID["B7"], event)
            for verb, *_ in plan.log:
                if verb in LEAVING or verb in ("fork", "finish_branch"):
                    self.sometimes[verb] += 1
            if self.step_hook is not None:
                self.step_hook(step, turn._replace(after=views.snapshot(s)), event)
            yield self._close(s, event, served, ranked, len(before.groups))

    @staticmethod
    def _observe(before: Any, plan: Any, mid: Any) -> Any:
        try:
            return views.observe(before, plan, mid)
        except KeyError as error:
            raise _BrokenError(BY_ID["S19"], Event("step"), f"unknown group {error}") from None

    @staticmethod
    def _check_step(step: Any, s: Any) -> None:
        for one in (
            plain.check_step(step)
            or plain.check_mid(step)
            or plain.check_state_in_mid(step.mid)
            or plain.check_ids_in_mid(s)
            or plain.check_ids_step(step)
        ):
            raise _BrokenError(one, Event("step"))

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
