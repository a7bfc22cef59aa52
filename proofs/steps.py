"""What is assumed, run and claimed of a symbolic world: schedule(), update() and the small operations.

The step is cut in two.  schedule() takes any lawful state to one that satisfies the mid-step laws and its own step
laws.  update() works through the plan group by group; one turn of its loop takes a state with a plan to one with the
rest of the plan, whatever else is in the queues; and when nothing of the plan is left, the mid-step laws are the state
laws.  So by induction on the plan a whole step takes lawful states to lawful states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from engine.scheduler import Plan, RefusedError, Scheduler, SequenceGroup
from proofs.worlds import Shape, World, build
from spec import views
from spec.check.report import in_words, of_log
from spec.check.symbolic import Report, Source, prove
from spec.law import Law
from spec.laws import BY_ID, MID, ROUND, STATE, STATE_IN_MID, STEP
from spec.logic import Bool, conj, every


def bearing(laws: Iterable[Law], world: World) -> list[Law]:
    """The laws that say something in this world: Q8 relates tokens to a block size, Q5b lists branches by number."""
    silent = set()
    if not world.shape.block_size:
        silent.add("Q8")
    if world.measure.covers:
        silent.add("Q5b")
    return [law for law in laws if law.id not in silent]


def state_laws(world: World) -> dict[str, Bool]:
    """What holds at a step boundary."""
    view = world.view()
    return {law.id: law(view) for law in bearing(STATE, world)}


def lawful(world: World) -> list[Bool]:
    """The state laws, the configuration and the count protocol."""
    return [*world.facts, *state_laws(world).values()]


def lawful_but(world: World, *ids: str) -> list[Bool]:
    """The same without some laws."""
    return [*world.facts, *(claim for id, claim in state_laws(world).items() if id not in ids)]


def numbers(world: World) -> list[Any]:
    """Every number and place of a world: what a symbolic path and its plain repetition must agree on."""
    scheduler = world.scheduler
    queues = [
        [
            (g.request_id, g.status.value, g.known, g.deficit, g.held, g.tokens, g.live, g.forked, g.tail_shared)
            for g in queue
        ]
        for queue in (scheduler.running, scheduler.swapped, scheduler.waiting)
    ]
    blocks = scheduler.blocks
    return [queues, blocks.gpu_free, blocks.cpu_free, scheduler.decodes_owed, list(scheduler.groups)]


# a broken claim in words


def heading(claim: str, shape: Shape) -> list[str]:
    """What the claim says, and in which world it is broken."""
    law = BY_ID.get("S8" if claim == "returns" else claim)
    branches = ", ".join("any" if one is None else f"{one[1]} of {one[0]}" for one in shape.branches) or "any"
    return [
        *([str(law)] if law is not None else []),
        f"shape: {shape.running} running, {shape.swapped} swapped, {shape.waiting} waiting, "
        f"{shape.forked} beyond their first token; {'chunked' if shape.chunked else 'prefill-first'}, "
        f"preemption mode {shape.mode.value if shape.mode else 'by width'}, block size {shape.block_size or 'any'}, "
        f"live branches {branches}",
    ]


def telling(
    shape: Shape, make: Callable[[Source], Any], act: Callable[[Any], Any], world_of: Callable[[Any], World]
) -> Callable[[str, Source], list[str]]:
    """Tells the plain run of a broken claim.  act: carries it out, and returns what `in_words` shows of it."""

    def explain(claim: str, values: Source) -> list[str]:
        it = make(values)
        world = world_of(it)
        return [*heading(claim, shape), *in_words(world.scheduler, lambda: act(it), world.measure)]

    return explain


def itself(it: Any) -> Any:
    """The world is what is built."""
    return it


# schedule


@dataclass
class Planned:
    """A world between schedule() and update()."""

    world: World
    step: views.Step


def schedule(world: World) -> Planned:
    """One call of the production schedule()."""
    before = world.view()
    plan = world.scheduler.schedule()
    return Planned(world, views.observe(before, plan, world.view()))


def step_laws(planned: Planned) -> dict[str, Bool]:
    """What schedule() must make true: the state laws that hold in mid-step, the mid-step laws and the step laws.

    S9 is said of groups here.  CUT: what the lemma for update() takes for granted beyond them.
    """
    step = planned.step
    claims = {law.id: law(step.mid) for law in bearing(STATE_IN_MID, planned.world)}
    claims.update((law.id, law(step)) for law in (*MID, *STEP))
    claims["S9"] = moves_are_net(planned)
    arrivals = [v.group.arrival for v in step.served]
    claims["CUT"] = conj(
        arrivals == sorted(arrivals),
        every(conj(v.was.deficit == v.group.deficit, v.was.known == v.group.known) for v in step.served),
    )
    return claims


def moves_are_net(planned: Planned) -> bool:
    """The swap lists name the groups that changed device, once, and no others."""
    step, plan = planned.step, planned.step.plan
    was_running = [g.request_id for g in step.before.running]
    was_swapped = [g.request_id for g in step.before.swapped]
    out = [(g.request_id, "out") for g in step.mid.swapped if g.request_id in was_running]
    back = [(g.request_id, "in") for g in step.mid.running if g.request_id in was_swapped]
    return sorted(plan.blocks_to_swap_out) == sorted(out) and plan.blocks_to_swap_in == back


def planned_numbers(planned: Planned) -> list[Any]:
    """The numbers of the world and of the plan."""
    plan = planned.step.plan
    return [
        numbers(planned.world),
        [(g.request_id, tokens) for g, tokens in plan.groups],
        [tuple(action) for action in plan.log],
        [g.request_id for g in plan.preempted],
    ]


def events(planned: Planned) -> set[str]:
    """What a step did, for proofs that a proof is not empty."""
    step = planned.step
    names = set(step.verbs)
    names.update(f"preempt:{victim.mode}" for victim in step.victims)
    if len(step.victims) > 1:
        names.add("several victims")
    if {g.request_id for g in step.demoted} & {v.group.request_id for v in step.victims}:
        names.add("swapped out and demoted in one step")
    running = {g.request_id for g in step.before.running}
    names.update("serve:" + ("running" if v.was.request_id in running else "newcomer") for v in step.served)
    names.update("swap_in:" + ("rebuilt or decode" if g.forked else "mid-prompt") for g in step.swapped_in)
    names.update("admit:" + ("rebuild" if g.forked else "prompt") for g in step.admitted)
    return names


def forked_counts(running: int, swapped: int, waiting: int) -> range:
    """How many groups can have forked: all inside but the last must (Q4), and they are a prefix (L4)."""
    return range(max(running + swapped - 1, 0), running + swapped + waiting + 1)


def prove_schedule(
    shape: Shape, policy: type[Scheduler] = Scheduler, max_failures: int = 1, laws: Callable[..., Any] = step_laws
) -> Report:
    """schedule() from any lawful state of this shape keeps every law."""

    def make(source: Source) -> World:
        return build(shape, source, policy)

    return prove(
        make,
        lawful,
        schedule,
        laws,
        planned_numbers,
        events,
        max_failures,
        telling(shape, make, lambda world: schedule(world).step.plan, itself),
    )


def prove_every_schedule(shape: Shape, policy: type[Scheduler] = Scheduler) -> Report:
    """The same for every number of groups that can have forked."""
    report = Report()
    for forked in forked_counts(shape.running, shape.swapped, shape.waiting):
        report.absorb(prove_schedule(shape._replace(forked=forked), policy))
        if report.failures:
            break
    return report


# update


@dataclass
class Turn:
    """A world in which update() is about to take its turn on group `at`; the juniors in `later` are still to come."""

    world: World
    at: SequenceGroup
    later: list[SequenceGroup]
    mid: views.State
    left: bool = False

    def step(self, served: list[SequenceGroup]) -> views.Step:
        """The world as a step whose plan serves these groups."""
        view = self.world.view()
        return observe(view, [g for g in served if g.request_id in view.groups], self.world.scheduler._log)


def observe(mid: views.State, served: list[Any], log: list[Any]) -> views.Step:
    """A state in mid-step, with what is left of the plan."""
    return views.observe(mid, Plan(0, served=[(g, g.tokens) for g in served], log=log), mid)


def midway(shape: Shape, source: Any, at: int, policy: type[Scheduler] = Scheduler) -> Turn:
    """A world with a plan that serves running group `at` and all its juniors that run."""
    world = build(shape, source, policy)
    running = list(world.scheduler.running)
    for group in running[at:]:
        group.tokens = source.integer(f"{group.request_id}.tokens")
    return Turn(world, running[at], running[at + 1 :], world.view())


def mid_laws(turn: Turn, served: list[SequenceGroup]) -> dict[str, Bool]:
    """What holds between schedule() and update(), or between two turns of update(), with this left of the plan."""
    step = turn.step(served)
    claims = {law.id: law(step.mid) for law in bearing(STATE_IN_MID, turn.world)}
    claims.update((law.id, law(step)) for law in (*MID, BY_ID["S10"]))
    return claims


def update(turn: Turn) -> Turn:
    """One turn of the production update(), after any stop, failure or abort."""
    world, group = turn.world, turn.at
    plan = Plan(0, served=[(group, group.tokens)])
    plan.log = world.scheduler._log
    world.scheduler._plan = plan
    name, ask = group.request_id, world.source.boolean
    if ask("abort"):
        world.scheduler.abort(name)
    failed = {name} if ask("fail") else set()
    stopped = {(name, branch) for branch in range(group.n) if ask(f"stop.{branch}")}
    turn.left = bool(world.scheduler.update(plan, stopped, failed))
    # the log is the plan's and the next step starts another: keep the one that tells what happened
    world.scheduler._log = plan.log
    return turn


def turn_laws(turn: Turn) -> dict[str, Bool]:
    """The mid-step laws with the rest of the plan, and the laws on what became of the group."""
    claims = mid_laws(turn, turn.later)
    after, name = turn.world.view(), turn.at.request_id
    log = turn.world.scheduler._log
    whole = observe(turn.mid, [g for g in turn.mid.running if g.request_id == name], log)
    alone = observe(_one(turn.mid, name), list(_one(turn.mid, name).running), log)
    for law in ROUND:
        step, state = (whole, after) if law.id in ("N1", "N2") else (alone, _one(after, name))
        claims[law.id] = law(views.conclude(step, state))
    claims["Q5b"] = BY_ID["Q5b"](_one(after, name))
    claims["others untouched"] = _rest(turn.mid, name) == _rest(after, name)
    return claims


def _one(state: views.State, name: str) -> views.State:
    """The state with one group only."""
    only = {queue: tuple(g for g in getattr(state, queue) if g.request_id == name) for queue in QUEUES}
    return state._replace(groups=tuple(g for g in state.groups if g == name), **only)


def _rest(state: views.State, name: str) -> list[Any]:
    """The numbers of all groups but one; symbols are compared as terms."""
    return [repr(g) for queue in QUEUES for g in getattr(state, queue) if g.request_id != name]


QUEUES = ("running", "swapped", "waiting")


def turn_numbers(turn: Turn) -> list[Any]:
    """The numbers of the world, and what happened."""
    return [numbers(turn.world), turn.left, [tuple(action) for action in turn.world.scheduler._log]]


def prove_update(shape: Shape, at: int, policy: type[Scheduler] = Scheduler, max_failures: int = 1) -> Report:
    """One turn of update() on running group `at` of any world in mid-step."""

    def make(source: Source) -> Turn:
        return midway(shape, source, at, policy)

    def act(turn: Turn) -> list[str]:
        source, name = turn.world.source, turn.at.request_id
        happens = [what for what in ("abort", "fail") if source.boolean(what)]
        happens += [f"branch {branch} stops" for branch in range(turn.at.n) if source.boolean(f"stop.{branch}")]
        update(turn)
        return [f"update() of {name}", *happens, *of_log(turn.world.scheduler._log)]

    return prove(
        make,
        lambda turn: [*turn.world.facts, *mid_laws(turn, [turn.at, *turn.later]).values()],
        update,
        turn_laws,
        turn_numbers,
        lambda turn: {action.verb for action in turn.world.scheduler._log},
        max_failures,
        telling(shape, make, act, lambda turn: turn.world),
    )


def prove_landing(shape: Shape) -> Report:
    """With nothing left of the plan the mid-step laws are the state laws."""

    def make(source: Source) -> Turn:
        return Turn(build(shape, source), None, [], None)  # type: ignore[arg-type]

    return prove(
        make,
        lambda turn: [*turn.world.facts, *mid_laws(turn, []).values()],
        lambda turn: turn,
        lambda turn: state_laws(turn.world),
        lambda turn: numbers(turn.world),
        explain=telling(shape, make, lambda turn: [], lambda turn: turn.world),
    )


# both together, and the other operations


@dataclass
class Stepped:
    """A world after a whole step."""

    planned: Planned
    after: views.State


def whole_step(world: World) -> Stepped:
    """schedule() and update() in one, with any branch stopping: the check on the cut."""
    planned = schedule(world)
    plan = planned.step.plan
    stopped = {
        (g.request_id, branch)
        for g, _ in plan.groups
        for branch in range(g.n)
        if world.source.boolean(f"{g.request_id}.stop.{branch}")
    }
    world.scheduler.update(plan, stopped)
    return Stepped(planned, world.view())


def round_laws(stepped: Stepped) -> dict[str, Bool]:
    """The state laws again, and the laws on a step with its update."""
    claims = state_laws(stepped.planned.world)
    outcome = views.conclude(stepped.planned.step, stepped.after)
    claims.update((law.id, law(outcome)) for law in ROUND)
    return claims


def prove_step(shape: Shape, policy: type[Scheduler] = Scheduler, max_failures: int = 1) -> Report:
    """schedule() and update() together take any lawful state of this shape to a lawful state."""

    def make(source: Source) -> World:
        return build(shape, source, policy)

    return prove(
        make,
        lawful,
        whole_step,
        round_laws,
        lambda stepped: [planned_numbers(stepped.planned), numbers(stepped.planned.world)],
        lambda stepped: {action.verb for action in stepped.planned.step.plan.log},
        max_failures,
        telling(shape, make, lambda world: of_log(whole_step(world).planned.step.plan.log), itself),
    )


def abort(name: str) -> Callable[[World], World]:
    """An abort of one group at a step boundary."""

    def body(world: World) -> World:
        world.scheduler.abort(name)
        return world

    return body


def add(n: int, unlimited: bool) -> Callable[[World], World]:
    """The arrival of a group of any size; refused ones leave the world as it was."""

    def body(world: World) -> World:
        source = world.source
        limit = None if unlimited else source.integer("new.max_tokens")
        shared, rest = source.integer("new.shared_blocks"), source.integer("new.prompt_rest")
        assert world.shape.block_size
        group = SequenceGroup("new", shared * world.shape.block_size + rest, n, limit)
        try:
            world.scheduler.add(group)
        except RefusedError:
            assert "new" not in world.scheduler.groups
        return world

    return body


def fail(world: World) -> World:
    """A step that was not carried out: all or some of the groups in its plan are lost, the others start again."""
    plan = world.scheduler.schedule()
    names = [g.request_id for g, _ in plan.groups if world.source.boolean(f"{g.request_id}.lost")]
    world.scheduler.fail(plan, names)
    return world


def prove_operation(
    shape: Shape,
    operation: Callable[[World], World],
    policy: type[Scheduler] = Scheduler,
    also: Callable[[World], Iterable[Bool]] = lambda world: (),
) -> Report:
    """The operation takes any lawful state of this shape to a lawful state."""

    def make(source: Source) -> World:
        return build(shape, source, policy)

    return prove(
        make,
        lambda world: [*lawful(world), *also(world)],
        operation,
        state_laws,
        numbers,
        lambda world: {action.verb for action in world.scheduler._log},
        explain=telling(shape, make, lambda world: of_log(operation(world).scheduler._log), itself),
    )
