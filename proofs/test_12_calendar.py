"""A step looks only at the decodes that need blocks, and comes to the same as the walk over all of them.

`_decodes` first asks the calendar which decodes are due, and if all of them fit, serves the others unseen.  The laws
are proved of the walk (`test_1`, `test_2`).  Here it is shown that the short cut is the walk: on symbols for a few
groups, by one turn of the walk's loop for any number of them, on every reachable state of the small scopes, and on long
random runs; and that the calendar, which says who is due, is right (law Q10): on symbols for one group here, on every
state that `test_3` reaches, and by planted faults in `proofs.planted`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from engine.scheduler import Plan, PreemptionMode, RefusedError, Scheduler, SchedulerConfig, SequenceGroup
from engine.scheduler.blocks import BlockManager
from engine.scheduler.calendar import DecodeCalendar
from engine.scheduler.phases import Phases, Step
from proofs import steps
from proofs.endless import Endless, endless, turn
from proofs.scopes import SMALL, explored, new_group
from proofs.worlds import Shape, World, build
from spec.check.codec import Codec
from spec.check.report import timeline
from spec.check.symbolic import Report, Source, prove
from spec.logic import Bool, cdiv, conj, implies
from spec.words import is_decode


class Walks(Scheduler):
    """The production scheduler without the short cut: it looks at every decode."""

    def _all_grow(self, step: Step) -> bool:
        return False


# on symbols


class DueByNeed(DecodeCalendar):
    """What the calendar is proved to say, of any numbers: who needs blocks now, and who decodes."""

    __slots__ = ("scheduler",)

    def __init__(self, scheduler: Any) -> None:
        super().__init__()
        self.scheduler = scheduler

    def due(self) -> list[SequenceGroup]:
        decodes = self.roll(self.scheduler.running)
        self.branches = sum(group.live for group in decodes)
        return [group for group in decodes if self.scheduler.blocks.need(group) > 0]

    def roll(self, running: Any) -> list[SequenceGroup]:
        return [group for group in running if group.is_decode]

    def file(self, group: SequenceGroup, beats: int) -> None:
        pass


@dataclass
class Pair:
    """The same world twice: the one takes the short cut where it can, the other walks."""

    short: World
    walk: World
    taken: bool = False


def pair(shape: Shape, source: Source, kind: type[Scheduler] = Scheduler) -> Pair:
    short, walk = build(shape, source), build(shape, source)
    short.scheduler.calendar = DueByNeed(short.scheduler)
    return Pair(short, walk)


def both(it: Pair, all_grow: Callable[[Any, Step], bool]) -> Pair:
    """The decode phase of both, if the short cut is open."""
    ahead, behind = Step(Plan(0), it.short.scheduler.config.tokens), Step(Plan(0), it.walk.scheduler.config.tokens)
    it.taken = all_grow(it.short.scheduler, ahead)
    if it.taken:
        it.walk.scheduler._decodes(behind)
    it.short.scheduler._log = [it.short.scheduler.running, ahead]
    it.walk.scheduler._log = [it.walk.scheduler.running, behind]
    return it


def same_outcome(it: Pair) -> dict[str, Bool]:
    """Every number and place, every log entry, all tokens given and left."""
    if not it.taken:
        return {}
    (_, ahead), (_, behind) = it.short.scheduler._log, it.walk.scheduler._log
    told = {
        "queues and pools": same(steps.numbers(it.short), steps.numbers(it.walk)),
        "tokens left": ahead.tokens == behind.tokens,
        "served": same(_served(ahead), _served(behind)),
        "log": same(list(map(tuple, ahead.plan.log)), list(map(tuple, behind.plan.log))),
        "nobody preempted": not behind.plan.preempted and not ahead.plan.preempted,
    }
    return told


def _served(step: Step) -> list[Any]:
    return [(group.request_id, tokens) for group, tokens in step.plan.groups]


def same(one: Any, other: Any) -> Bool:
    """Equal, number by number."""
    if isinstance(one, list | tuple):
        return conj(len(one) == len(other), *map(same, one, other))
    return one == other


def prove_short_cut(shape: Shape, all_grow: Callable[[Any, Step], bool] = Phases._all_grow) -> Report:
    return prove(
        lambda source: pair(shape, source),
        lambda it: steps.lawful(it.short),
        lambda it: both(it, all_grow),
        same_outcome,
        lambda it: [it.taken, steps.numbers(it.short) if it.taken else None],
        lambda it: ["taken" if it.taken else "walked"],
    )


SHAPES = [
    Shape(running, 0, 0, forked=forked, branches=branches, block_size=size)
    for running, branches in ((1, ((1, 1),)), (1, ((3, 2),)), (2, ((1, 1), (2, 2))), (3, ((2, 1), (1, 1), (1, 1))))
    for forked in (running - 1, running)
    for size in (1, 4, 16)
    if forked == running or branches[-1][0] == branches[-1][1]  # before the fork all n are live
] + [Shape(running, 0, 0, forked=forked) for running in (1, 2, 3) for forked in (running - 1, running)]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.running}r-{s.forked}forked-bs{s.block_size or 'any'}")
def test_the_short_cut_comes_to_what_the_walk_comes_to(shape: Shape) -> None:
    report = prove_short_cut(shape)
    assert report.proved, str(report)
    assert report.reached["taken"]
    if shape.forked == shape.running > 1:  # one alone always fits (law Q3)
        assert report.reached["walked"]


def test_a_short_cut_that_ignores_the_room_is_refuted() -> None:
    def whatever(self: Any, step: Step) -> bool:
        for group in self.calendar.due():
            self._grow(group, self.blocks.need(group), step)
        step.serve_all(self.calendar.roll(self.running), self.calendar.branches)
        return True

    report = prove_short_cut(Shape(2, 0, 0, forked=2), whatever)
    assert report.broken() & {"queues and pools", "nobody preempted"}


@pytest.mark.parametrize("last", [None, True, False], ids=["amid_decodes", "last_forked", "last_in_first_run"])
def test_a_decode_that_fits_is_served_whoever_else_runs(last: bool | None) -> None:
    """One turn of the walk with any number of groups: nobody is preempted, and the decode takes just what it lacks.

    By induction over the running groups: while the needs of all decodes together fit, so does each in its turn.
    """
    rest = (True,) if last is None else (True, last)

    def fits(it: Endless) -> list[Bool]:
        return [is_decode(it.head), it.scheduler.blocks.need(it.head) <= it.scheduler.blocks.gpu_free]

    def serve(it: Endless) -> bool:
        it.need = it.scheduler.blocks.need(it.head)  # type: ignore[attr-defined]
        return bool(it.scheduler._decode_head(it.step))

    def claims(it: Endless) -> dict[str, Bool]:
        need = it.need  # type: ignore[attr-defined]
        grown = [action for action in it.step.plan.log if action.verb == "grow"]
        return {
            "served": it.result is True and it.step.plan.served[-1][0] is it.head,
            "tokens": conj(it.head.tokens == it.head.live, it.step.tokens == it.tokens - it.head.live),
            "nobody preempted": not it.step.plan.preempted,
            "takes what it lacks": it.scheduler.blocks.gpu_free == it.free[0] - need,
            "logged": conj(len(grown) == 1, grown[0].blocks == need) if grown else need <= 0,
        }

    def enough(it: Endless) -> list[Bool]:
        return [it.step.tokens >= it.head.live, *fits(it)]

    report = turn(lambda source: endless(source, rest=rest, behind=last is not None), enough, serve, claims)
    assert report.proved, str(report)
    assert report.reached["grow"]


# who is due


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize(("n", "live"), [(1, 1), (2, 2), (3, 2), (3, 3)])
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_a_decode_needs_blocks_from_the_beat_on_that_is_announced(size: int, n: int, live: int, blocks: int) -> None:
    """With tables of so many blocks and any number of tokens in them: `beats` is the first later step with a need."""
    keeper = BlockManager(size, 1, 0)

    def make(source: Source) -> Any:
        shared = source.integer("shared_blocks")
        group = SequenceGroup("a", shared * size + source.integer("rest"), n)
        group.shared_blocks, group.shared_tokens = shared, shared * size
        group.forked, group.live, group.branches = True, live, list(range(live))
        group.tables = [list(range(blocks))] * n
        group.known = source.integer("known")
        group.deficit = live
        group.held = shared + live * (blocks - shared)
        group.tokens = source.integer("later")
        return group

    def lawful(group: Any) -> list[Bool]:
        rest = group.prompt_len - group.shared_tokens
        computed = group.known - 1
        return [
            conj(group.shared_blocks >= 0, rest >= 0, rest < size, group.prompt_len >= 1, group.tokens >= 0),
            conj(group.known > group.prompt_len, group.shared_blocks <= blocks),
            conj(cdiv(computed, size) <= blocks, blocks <= cdiv(group.known, size)),
        ]

    def ask(group: Any) -> tuple[Any, Any, Any]:
        beats, after = keeper.beats(group), group.tokens
        group.known += after
        return beats, after, keeper.need(group)

    report = prove(
        make,
        lawful,
        ask,
        lambda seen: {
            "from then on": implies(seen[1] >= seen[0], seen[2] > 0),
            "not before": implies(seen[1] < seen[0], seen[2] == 0),
            "not past": seen[0] >= 0,
        },
        list,
    )
    assert report.proved, str(report)


def test_all_who_need_blocks_are_found_and_grow_however_many_they_are() -> None:
    """Three hundred decodes reach the end of a block together: every one is due, and gets its block."""
    count = 300
    s = Scheduler(
        SchedulerConfig(num_gpu_blocks=3 * count, block_size=4, max_num_batched_tokens=4 * count, max_num_seqs=count)
    )
    for i in range(count):
        s.add(SequenceGroup(f"r{i}", 4, 1, 9))
    s.update(s.schedule())
    everyone = [group.request_id for group in s.running]
    assert len(everyone) == count
    assert [group.request_id for group in s.calendar.due()] == everyone
    plan = s.schedule()
    assert [action.request_id for action in plan.log] == everyone
    assert all(len(group.tables[0]) == 2 for group in s.running)
    s.update(plan)
    assert s.calendar.due() == []


def test_shared_tails_are_due_at_once() -> None:
    s = Scheduler(SchedulerConfig(num_gpu_blocks=20, block_size=4, max_num_batched_tokens=64, max_model_len=64))
    group = s.add(SequenceGroup("a", 6, 3, 9))
    s.update(s.schedule())
    assert group.tail_shared
    assert s.calendar.due() == [group]
    s.update(s.schedule())
    assert s.calendar.filed == {group: (s.calendar.beat + 1, 3)}


# on every reachable state


@pytest.mark.parametrize("name", SMALL)
def test_the_short_cut_is_the_walk_on_every_reachable_state(name: str) -> None:
    """Both kinds of scheduler, from each state: equal plans, and equal states after them."""
    world = SMALL[name].world
    short, walk = (Codec(lambda kind=kind: kind(world.config), new_group) for kind in (Scheduler, Walks))
    found = explored(world, graph=True, limit=LIMIT)
    if found.violation is not None:
        pytest.fail(timeline(found.violation, lambda: Scheduler(world.config), new_group), pytrace=False)
    graph = found.graph
    assert graph is not None
    taken = 0
    for key in graph.keys:
        one, two = short.restore(key), walk.restore(key)
        plan, other = one.schedule(), two.schedule()
        taken += bool(plan.decodes)
        assert plan.to_dict() == other.to_dict()
        assert (plan.num_decode_tokens, plan.num_prefill_tokens) == (other.num_decode_tokens, other.num_prefill_tokens)
        one.update(plan)
        two.update(other)
        assert short.encode(one) == walk.encode(two)
    assert taken > len(graph.keys) // 20


LIMIT = 3000  # states of each scope


# on long random runs


def run(kind: type[Scheduler], seed: int, chunked: bool, mode: PreemptionMode | None) -> list[Any]:
    """Arrivals, stops, aborts and failures drawn from the seed; what every step decided and what came of it."""
    rng = random.Random(seed)
    config = SchedulerConfig(
        num_gpu_blocks=rng.choice([40, 64, 120]),
        num_cpu_blocks=rng.choice([0, 13, 40, 90]),
        block_size=rng.choice([1, 4, 16]),
        max_num_batched_tokens=64 if chunked else 200,
        max_num_seqs=rng.choice([8, 24, 64]),
        max_model_len=200,
        enable_chunked_prefill=chunked,
        preemption_mode=mode,
    )
    s = kind(config)
    told: list[Any] = []
    made = 0
    while made < 150 or s.has_unfinished():
        while made < 150 and len(s.waiting) < 6:
            made += 1
            try:
                s.add(SequenceGroup(f"r{made}", rng.randint(1, 60), rng.choice([1, 1, 2, 3, 5]), rng.randint(1, 40)))
            except RefusedError as error:
                told.append(str(error))
        plan = s.schedule()
        told.append((plan.to_dict(), plan.num_decode_tokens, plan.num_prefill_tokens))
        if rng.random() < 0.02 and s.groups:
            s.abort(rng.choice(sorted(s.groups)))
        draws = [(row.group.request_id, branch) for row in plan.scheduled for branch in row.draws]
        names = [group.request_id for group, _ in plan.groups]
        if names and rng.random() < 0.005:
            left = s.fail(plan, [rng.choice(names)])
        else:
            stopped = [draw for draw in draws if rng.random() < 0.02]
            left = s.update(plan, stopped, [name for name in names if rng.random() < 0.003])
        told.append(([group.request_id for group in left], list(map(tuple, plan.log))))
    return told


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mode", [None, *PreemptionMode], ids=["any_mode", "swap", "recompute"])
@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "prefill_first"])
def test_long_runs_decide_alike_with_and_without_the_short_cut(
    chunked: bool, mode: PreemptionMode | None, seed: int
) -> None:
    assert run(Scheduler, seed, chunked, mode) == run(Walks, seed, chunked, mode)
