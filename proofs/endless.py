"""Worlds with any number of groups: each queue has a row that stands for all groups which a loop body does not touch.

A loop of the scheduler is cut at its head: from any state that satisfies the loop's invariant, one turn of the real
loop body either leaves the loop, in a state that satisfies what follows it, or comes back to the head with the
invariant again and one group less to go.  `BLOCKED` methods are replaced by what was proved of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.scheduler import Plan, PreemptionMode, Scheduler, SequenceGroup, Status
from engine.scheduler.phases import Step
from proofs.worlds import AnyBlocks, AnyConfig, AnyMeasure, Shape, World, place, rowless
from spec import views
from spec.check.ghost import GhostQueue, Row, in_place, order
from spec.check.symbolic import Cut, Report, Source, assume, prove
from spec.laws import BY_ID
from spec.logic import Bool, Int, conj, disj, every, implies, total
from spec.words import is_decode

# what is known of one group in its queue, whatever the others are
ONE = [BY_ID[id] for id in ("B5", "Q3", "Q5", "Q6", "Q7", "Q8t")]
HOME = [*ONE, BY_ID["B4"], BY_ID["Q9"]]


@dataclass
class Endless:
    """A scheduler in the middle of a step, with rows in its queues."""

    world: World
    step: Step
    served: GhostQueue  # scheduler.running
    rest: GhostQueue  # running groups not served yet
    swapped: GhostQueue
    waiting: GhostQueue
    facts: list[Bool]
    before: list[Any] = field(default_factory=list)
    head: Any = None
    free: tuple[Int, Int] = (0, 0)
    tokens: Int = 0
    result: Any = None

    @property
    def scheduler(self) -> Any:
        return self.world.scheduler

    @property
    def queues(self) -> tuple[GhostQueue, ...]:
        return self.scheduler.running, self.step.rest, self.scheduler.swapped, self.scheduler.waiting


def known(world: World, group: SequenceGroup, laws: list[Any]) -> Bool:
    """The laws on one group."""
    state = views.State(world.scheduler.config, (), (), (), (), views.Blocks(0, 0), False, world.measure)
    state = state._replace(**{group.status.value: (views.group(group),)})
    return conj(*(law(state) for law in laws))


def meet(world: World, name: str, status: Status, forked: bool, decode: bool) -> tuple[Any, Bool]:
    """A lawful group of any size, met in this queue."""
    group = place(world, name, 0, status, forked)
    laws = ONE if status is Status.WAITING else HOME
    mine, world.facts = conj(*world.facts), []
    world.scheduler.groups[name] = group
    return group, conj(mine, known(world, group, laws), is_decode(group) if decode else True)


def endless(
    source: Source,
    policy: type[Scheduler] = Scheduler,
    chunked: bool = True,
    mode: PreemptionMode | None = None,
    rest: tuple[bool, ...] = (),
    behind: bool = False,
    running_behind: bool | None = None,
    swapped_last: bool | None = None,
    waiting_forked: bool = False,
    nothing_swapped: bool = False,
) -> Endless:
    """Any lawful state in the middle of a step: served ++ rest ++ swapped ++ waiting.

    rest: its head and its last group beside the row, by whether they have forked; behind: the last may be.
    running_behind: served ends in a group that may be behind, forked or not; None for no such group.
    swapped_last: likewise of swapped.
    """
    config: Any = AnyConfig(
        source.integer("gpu_blocks"),
        source.integer("cpu_blocks"),
        None,
        source.integer("max_model_len"),
        source.integer("max_num_batched_tokens"),
        source.integer("max_num_seqs"),
        source.integer("watermark"),
        chunked,
        mode,
    )
    measure = AnyMeasure(None)
    blocks = AnyBlocks(measure, None, source.integer("gpu_free"), source.integer("cpu_free"))
    scheduler = rowless(policy)(config, blocks)
    world = World(Shape(0, 0, 0, chunked, mode), source, scheduler, measure)
    facts: list[Bool] = [config.lawful(), blocks.gpu_free >= 0, blocks.cpu_free >= 0]

    def row(name: str, status: Status, forked: bool = True) -> Row:
        home = status is not Status.WAITING
        out = Row(source, name, lambda each: meet(world, each, status, forked, home), not home)
        facts.append(out.facts())
        return out

    def group(name: str, status: Status, forked: bool, decode: bool) -> SequenceGroup:
        out, is_known = meet(world, name, status, forked, decode)
        facts.append(is_known)
        return out

    served = GhostQueue((), row("served", Status.RUNNING))
    if running_behind is not None:
        served.right.append(group("junior", Status.RUNNING, running_behind, False))
    ahead = GhostQueue()
    if rest:
        ahead.left.append(group("head", Status.RUNNING, rest[0], len(rest) > 1 or not behind))
        ahead.row = row("rest", Status.RUNNING)
        if len(rest) > 1:
            ahead.right.append(group("last", Status.RUNNING, rest[1], not behind))
    swapped = GhostQueue()
    if not nothing_swapped:
        swapped.row = row("swapped", Status.SWAPPED)
        if swapped_last is not None:
            swapped.right.append(group("youngest", Status.SWAPPED, swapped_last, False))
    waiting = GhostQueue((), row("waiting", Status.WAITING, waiting_forked))
    scheduler.running, scheduler.swapped, scheduler.waiting = served, swapped, waiting
    step = Step(Plan(0), source.integer("tokens_left"))
    step.rest = ahead  # type: ignore[assignment]
    facts.append(books(scheduler, step))
    inside = total(g.live for queue in (served, ahead, swapped) for g in queue)
    facts += [inside <= config.seqs, step.tokens >= 0, step.tokens <= config.tokens]
    out = Endless(world, step, served, ahead, swapped, waiting, facts)
    out.head = ahead.left[0] if rest else None
    return out


def books(scheduler: Any, step: Step) -> Bool:
    """B1 over rows: free and held are the capacity on both devices."""
    running = total(g.held for queue in (scheduler.running, step.rest) for g in queue)
    swapped = total(g.held for g in scheduler.swapped)
    return conj(
        scheduler.blocks.gpu_free + running == scheduler.config.num_gpu_blocks,
        scheduler.blocks.cpu_free + swapped == scheduler.config.num_cpu_blocks,
    )


def start(it: Endless) -> Endless:
    """Remember what is needed to say what changed."""
    it.before = order(it.queues)
    it.free = (it.scheduler.blocks.gpu_free, it.scheduler.blocks.cpu_free)
    it.tokens = it.step.tokens
    return it


def always(it: Endless) -> dict[str, Bool]:
    """What every loop body keeps: books, capacities, order, statuses, sequences, and each met group lawful."""
    scheduler, blocks = it.scheduler, it.scheduler.blocks
    inside = total(g.live for queue in it.queues[:3] for g in queue)
    met = [g for queue in it.queues for g in queue if not isinstance(g, Row)]
    statuses = (
        (scheduler.running, Status.RUNNING),
        (it.step.rest, Status.RUNNING),
        (scheduler.swapped, Status.SWAPPED),
        (scheduler.waiting, Status.WAITING),
    )
    return {
        "B1": books(scheduler, it.step),
        "B2": conj(blocks.cpu_free >= 0, blocks.gpu_free >= 0),
        "Q1": all(g.status is status for queue, status in statuses for g in queue if not isinstance(g, Row)),
        "Q2": in_place(it.before, order(it.queues)),
        "S5s": inside <= scheduler.config.seqs,
        "each": every(known(it.world, g, ONE) for g in met),
        "S5": it.step.tokens >= 0,
    }


def figures(it: Any) -> list[Any]:
    """What the plain repetition of a path must agree on."""
    if isinstance(it, Cut):
        it = it.args[1]
    blocks = it.scheduler.blocks
    return [
        [
            [
                (g.name, g.count, g.held, g.live) if isinstance(g, Row) else (g.request_id, g.held, g.deficit)
                for g in queue
            ]
            for queue in it.queues
        ],
        blocks.gpu_free,
        blocks.cpu_free,
        it.step.tokens,
        it.result,
        [tuple(action) for action in it.step.plan.log],
    ]


def turn(
    make: Callable[[Source], Endless],
    invariant: Callable[[Endless], list[Bool]],
    body: Callable[[Endless], Any],
    claims: Callable[[Endless], Mapping[str, Bool]],
    max_failures: int = 1,
) -> Report:
    """One turn of a loop body from any state of its invariant."""

    def run(it: Endless) -> Endless:
        start(it)
        try:
            it.result = body(it)
        except Cut as cut:
            it.result = cut.at
        return it

    return prove(
        make,
        lambda it: [*it.facts, *invariant(it)],
        run,
        lambda it: {**always(it), **claims(it)},
        figures,
        lambda it: {action.verb for action in it.step.plan.log} | {f"result {it.result}"},
        max_failures,
    )


# what replaces a loop where it is called: the state it leaves, and no more


def room_made(policy: type[Scheduler], source: Source, make_row: Callable[[], Row]) -> type[Scheduler]:
    """`_make_room` as proved: any number of the most junior swapped groups demoted, until it fits or none is left."""

    class Summed(policy):  # type: ignore[valid-type, misc]
        def _make_room(self, size: Int, step: Step) -> bool:
            old = self.swapped
            kept = make_row()
            gone_held = total(g.held for g in old) - kept.held
            gone_live = total(g.live for g in old) - kept.live
            count = total(g.count if isinstance(g, Row) else 1 for g in old)
            assume(conj(kept.facts(), kept.count <= count, gone_held >= count - kept.count))
            assume(
                conj(
                    gone_live >= count - kept.count, implies(kept.count == count, conj(gone_held == 0, gone_live == 0))
                )
            )
            self.blocks._cpu = self.blocks._cpu + gone_held
            assume(disj(size <= self.blocks.cpu_free, kept.count == 0))
            self.swapped = GhostQueue((), kept)
            return bool(size <= self.blocks.cpu_free)

    return Summed
