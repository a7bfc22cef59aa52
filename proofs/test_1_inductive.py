"""Theorems for all sizes: the production scheduler keeps the laws from any state that satisfies them.

Every token count, block count, capacity, budget, limit and watermark is an unbounded symbol; a proof goes down every
path of the production code, and repeats each on plain ints.  Shapes bound the number of groups only; test_2 has none.

* `schedule()`: with block needs as symbols under the count protocol, so for any block size and any n; and again with
  the formulas for n of 1, 2, 3 and block sizes 1, 4, 16 where there are at most three groups.
* `update()`: one turn of its loop with any other group before or behind, then the landing (see steps.py), and a few
  runs of both in one as a check on that cut.
* `abort`, `add`, `fail`; the rows of a plan; the formulas obey the protocol.

Not said here: laws on block ids, slots and contents (B3, B4t, B5t, B6, B7, S9 on ids, S10r, S12r, S21) need tables and
are checked on every reachable state at small scope and in the allocator's own proofs; temporal laws (L3, L5, E1) in
test_2 and by search; Q8 has no meaning where the block size is a symbol and is proved with the formulas.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import Counter
from typing import Any

import pytest

from engine.scheduler import RefusedError, Scheduler, SequenceGroup
from proofs import faults_symbolic as faults
from proofs import steps
from proofs.worlds import MODES, CountedBlocks, Shape, build, rowless
from spec.check.symbolic import Executor, Report, Source, Symbols, prove
from spec.laws import BY_ID, STATE
from spec.logic import Bool, conj, disj, every, implies, least, most, pick, total
from spec.words import Measure
from tests.worlds import random_request, random_world

ORDERS = {"chunked": True, "prefill_first": False}
SHAPES = [(r, s, w) for r in range(4) for s in range(3) for w in range(3)]
FEW = [(r, s, w) for r, s, w in SHAPES if s <= 1 and w <= 1]
TWOS = [shape for shape in SHAPES if 1 <= sum(shape) <= 2]
THREES = [shape for shape in SHAPES if sum(shape) == 3]
N = (1, 2, 3)
BLOCK_SIZES = (1, 4, 16)


def demand(report: Report) -> None:
    """The theorem holds, and its hypothesis is satisfiable."""
    assert report.proved, str(report)


def shape_params() -> list[Any]:
    """Every shape, order and mode; the larger ones are slow."""
    out = []
    for (order, chunked), (r, s, w), (name, mode) in itertools.product(ORDERS.items(), SHAPES, MODES.items()):
        marks = () if (r, s, w) in FEW else pytest.mark.slow
        out.append(pytest.param(Shape(r, s, w, chunked, mode), id=f"{order}-{r}-{s}-{w}-{name}", marks=marks))
    return out


def orders_and(shapes: list[tuple[int, int, int]]) -> list[Any]:
    return [
        pytest.param(Shape(r, s, w, chunked), id=f"{order}-{r}-{s}-{w}")
        for (order, chunked), (r, s, w) in itertools.product(ORDERS.items(), shapes)
    ]


def widths(shape: Shape, kinds: tuple[int, ...] = N) -> list[Shape]:
    """The shape with every choice of live branches for each group and of how many have forked.

    With three groups: every number in every place, alike and mixed.
    """
    if shape.groups <= 2 or len(kinds) < 3:
        choices = list(itertools.product(kinds, repeat=shape.groups))
    else:
        choices = [(1, 1, 1), (2, 2, 2), (3, 3, 3), (1, 2, 3), (2, 3, 1), (3, 1, 2)]
    return [
        shape._replace(forked=forked, branches=tuple((n, n) for n in choice))
        for forked in steps.forked_counts(*shape[:3])
        for choice in choices
    ]


# schedule


@pytest.mark.parametrize("shape", shape_params())
def test_schedule_keeps_every_law_from_any_lawful_state(shape: Shape) -> None:
    demand(steps.prove_every_schedule(shape))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize(
    "shape",
    [
        *orders_and(TWOS),
        *[pytest.param(*p.values, id=p.id, marks=pytest.mark.slow) for p in orders_and(THREES)],
    ],
)
def test_schedule_keeps_every_law_with_the_block_formulas(shape: Shape, block_size: int) -> None:
    for one in widths(shape._replace(block_size=block_size)):
        demand(steps.prove_schedule(one))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("shape", orders_and([(2, 0, 1), (1, 1, 1), (2, 1, 0)]))
def test_schedule_keeps_every_law_with_the_block_formulas_in_threes(shape: Shape, block_size: int) -> None:
    for forked in steps.forked_counts(*shape[:3]):
        mixed = ((2, 2), (1, 1), (3, 3)) if forked < 2 else ((2, 2), (3, 1), (3, 3))
        demand(steps.prove_schedule(shape._replace(block_size=block_size, forked=forked, branches=mixed)))


# update


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize(
    ("n", "live", "forked"),
    [(n, live, forked) for n in N for live in N for forked in (False, True) if live == n or (forked and live < n)],
)
@pytest.mark.parametrize(
    ("shape", "at"),
    [
        pytest.param(Shape(1, 0, 0), 0, id="alone"),
        pytest.param(Shape(2, 0, 0), 0, id="before_any_other"),
        pytest.param(Shape(2, 0, 0), 1, id="behind_any_other"),
        pytest.param(Shape(1, 1, 0), 0, id="before_any_swapped"),
        pytest.param(Shape(1, 0, 1), 0, id="before_any_waiting"),
        pytest.param(Shape(2, 1, 1, chunked=False), 0, id="prefill_first_amid_any_others"),
    ],
)
def test_update_keeps_every_law_group_by_group(
    shape: Shape, at: int, n: int, live: int, forked: bool, block_size: int
) -> None:
    proved = 0
    kinds: list[Any] = [None] * shape.groups
    kinds[at] = (n, live)
    for count in range(at + forked, (shape.groups if forked else at) + 1):
        world = shape._replace(branches=tuple(kinds), block_size=block_size, forked=count)
        report = steps.prove_update(world, at)
        if report.satisfiable:  # where the senior one is behind, the junior one must have forked already
            demand(report)
            proved += 1
    assert proved


@pytest.mark.parametrize("shape", orders_and(SHAPES))
def test_the_mid_step_laws_are_the_state_laws_once_the_plan_is_used_up(shape: Shape) -> None:
    for forked in steps.forked_counts(*shape[:3]):
        demand(steps.prove_landing(shape._replace(forked=forked)))


@pytest.mark.parametrize(
    ("shape", "n"),
    [
        pytest.param(
            *p.values,
            n,
            id=f"{p.id}-n{n}",
            marks=pytest.mark.slow if (n == 2 and sum(p.values[0][:3]) > 1) or sum(p.values[0][:3]) > 2 else (),
        )
        for p in orders_and([*TWOS, (1, 1, 1), (2, 1, 0)])
        for n in (1, 2)
    ],
)
def test_a_whole_step_in_one_run_agrees_with_the_cut(shape: Shape, n: int) -> None:
    for one in widths(shape._replace(block_size=4), (n,)):
        demand(steps.prove_step(one))


# the other operations


@pytest.mark.parametrize("shape", orders_and([(2, 1, 1), (0, 2, 2)]))
def test_abort_at_a_boundary_keeps_every_law(shape: Shape) -> None:
    for forked in steps.forked_counts(*shape[:3]):
        for name in "abcd"[: shape.groups]:
            report = steps.prove_operation(shape._replace(forked=forked), steps.abort(name))
            demand(report)
            assert report.reached["abort"] == report.paths


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("n", N)
@pytest.mark.parametrize("unlimited", [False, True], ids=["max_tokens", "no_max_tokens"])
def test_add_keeps_every_law_or_refuses_and_changes_nothing(n: int, unlimited: bool, block_size: int) -> None:
    def prompt(world: Any) -> list[Bool]:
        rest, shared = world.source.integer("new.prompt_rest"), world.source.integer("new.shared_blocks")
        return [rest >= 0, rest < block_size, shared >= 0]

    for shape in (Shape(0, 0, 0), Shape(1, 1, 1, forked=2)):
        report = steps.prove_operation(shape._replace(block_size=block_size), steps.add(n, unlimited), also=prompt)
        demand(report)
        assert 0 < report.reached["add"] < report.paths


@pytest.mark.parametrize("shape", orders_and([(1, 0, 0), (2, 1, 1), (0, 2, 0), (0, 1, 2), (3, 0, 0)]))
def test_fail_keeps_every_law(shape: Shape) -> None:
    for forked in steps.forked_counts(*shape[:3]):
        demand(steps.prove_operation(shape._replace(forked=forked), steps.fail))


# rows


def lone(source: Source, live: int, forked: bool, block_size: int) -> Any:
    """A group that runs, with tokens for a step."""
    world = build(Shape(1, 0, 0, forked=int(forked), branches=((live, live),), block_size=block_size), source)
    group = world.scheduler.running[0]
    group.tokens = source.integer("tokens")
    return world


def lone_facts(world: Any) -> list[Bool]:
    group = world.scheduler.running[0]
    least_left = group.live if group.forked else 1
    given = disj(group.tokens == group.deficit, group.tokens <= group.deficit - least_left)
    return [*steps.lawful_but(world, "Q9"), group.tokens >= 1, given, group.deficit < group.whole]


def computed(g: SequenceGroup, deficit: Any) -> list[Any]:
    """Tokens with KV of each live branch, from the words: shared blocks first, then tail after tail, by hand."""
    if not g.forked:
        return [g.known - deficit]
    tail = g.known - g.shared_tokens
    done = g.shared_tokens + g.live * tail - deficit
    out = []
    left = done - g.shared_tokens
    for _ in range(g.live):
        own = least(most(left, 0), tail - 1)
        out.append(pick(left <= 0, least(done, g.shared_tokens), g.shared_tokens + own))
        left = left - own
    return out


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("forked", [False, True], ids=["first_run", "forked"])
@pytest.mark.parametrize("live", N)
def test_rows_are_exactly_the_tokens_given_in_order_without_gap(live: int, forked: bool, block_size: int) -> None:
    """S10 and S12 for one group: rows add up, go on where each branch stands, and finish every branch or none."""

    def rows(world: Any) -> Any:
        group = world.scheduler.running[0]
        return world, list(group.rows(group.tokens))

    def claims(outcome: Any) -> dict[str, Bool]:
        world, rows = outcome
        group = world.scheduler.running[0]
        before = computed(group, group.deficit)
        after = computed(group, group.deficit - group.tokens)
        finishes = group.tokens == group.deficit
        ends: dict[int, Any] = {}
        told = {}
        for index, start, end in rows:
            shared_by_first = implies(index > 0, start >= group.shared_tokens) if group.forked else True
            told[f"row {index}"] = conj(
                start < end,
                end <= group.known,
                disj(start == before[index], conj(index > 0, before[index] <= start, start == group.shared_tokens)),
                shared_by_first,
                index not in ends,
            )
            ends[index] = end
        told["sum"] = total(end - start for _, start, end in rows) == group.tokens
        told["order"] = list(ends) == sorted(ends)
        told["all finish"] = implies(finishes, every(ends.get(i, -1) == group.known for i in range(len(before))))
        told["standing"] = disj(
            finishes,
            every(ends.get(i, before[i]) == after[i] for i in range(len(before)) if i == 0 or i in ends),
        )
        told["computed"] = every(a == b for a, b in zip(group.computed(), before, strict=True))
        return told

    demand(
        prove(
            lambda source: lone(source, live, forked, block_size),
            lone_facts,
            rows,
            claims,
            lambda outcome: [list(row) for row in outcome[1]],
        )
    )


@pytest.mark.parametrize("forked", [False, True], ids=["first_run", "forked"])
def test_a_piece_is_all_it_lacks_or_leaves_every_branch_its_last_token(forked: bool) -> None:
    """S10 for any n: never more than the budget, and something whenever the budget has room for it."""

    def claims(outcome: Any) -> dict[str, Bool]:
        group, budget, piece = outcome
        keep = group.live if forked else 0
        return {
            "budget": disj(piece <= budget, piece <= 0),
            "whole or less": disj(piece == group.deficit, piece <= group.deficit - keep),
            "most": disj(piece == budget, piece == group.deficit, piece == group.deficit - keep),
            "progress": implies(conj(budget >= group.live, budget >= 1), piece >= 1),
        }

    def body(world: Any) -> Any:
        group = world.scheduler.running[0]
        budget = world.source.integer("budget")
        return group, budget, group.piece(budget)

    demand(
        prove(
            lambda source: build(Shape(1, 0, 0, forked=int(forked)), source),
            steps.lawful,
            body,
            claims,
            lambda outcome: [outcome[1], outcome[2]],
        )
    )


# the protocol


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("n", N)
@pytest.mark.parametrize("where", ["running", "swapped", "waiting"])
def test_the_block_formulas_obey_the_count_protocol(where: str, n: int, block_size: int) -> None:
    """What `AnyBlocks` is allowed to assume the production formulas satisfy, and they equal those of the laws."""
    at = [int(where == queue) for queue in ("running", "swapped", "waiting")]

    def claims(world: Any) -> dict[str, Bool]:
        group = next(world.groups())
        blocks: CountedBlocks = world.scheduler.blocks
        exact = Measure(block_size)
        cover, filled = blocks.cover(group), exact.filled(group)
        peak = blocks.peak(group.prompt_len, group.n, group.max_tokens)
        told = {
            "cover": conj(cover >= 1, cover <= peak, cover == exact.cover(group), peak == exact.peak(group)),
            "filled": conj(filled >= 0, filled <= cover, disj(group.deficit >= group.whole, filled >= 1)),
            "shared": implies(group.tail_shared, cover == filled + group.live - 1),
            "tails": group.whole >= group.known + (group.live - 1 if group.forked else 0),
        }
        if where != "waiting":
            told["swap size"] = blocks.swap_size(group) == filled
        return told

    for forked, live in [(0, n), *((1, live) for live in range(1, n + 1))]:
        shape = Shape(*at, forked=forked, branches=((n, live),), block_size=block_size)
        demand(
            prove(
                lambda source, shape=shape: build(shape, source),  # type: ignore[misc]
                steps.lawful,
                lambda world: world,
                claims,
                lambda world: steps.numbers(world),
            )
        )


@pytest.mark.parametrize("seed", range(12))
def test_the_counting_keeper_counts_what_the_allocator_does(seed: int) -> None:
    """`CountedBlocks` in lockstep with `BlockManager`: the same decisions, the same counts, on random runs."""
    rng = random.Random(seed)
    real = random_world(rng)
    config = real.config
    counting = rowless(Scheduler)(
        config, CountedBlocks(config.block_size, config.num_gpu_blocks, config.num_cpu_blocks)
    )
    both = (real, counting)

    def counts(scheduler: Scheduler) -> list[Any]:
        queues = (scheduler.running, scheduler.swapped, scheduler.waiting)
        groups = [
            [(g.request_id, g.held, g.deficit, g.known, g.live, g.tail_shared) for g in queue] for queue in queues
        ]
        return [groups, scheduler.blocks.gpu_free, scheduler.blocks.cpu_free]

    for _ in range(150):
        if rng.random() < 0.4:
            new = random_request(rng, real)
            for scheduler in both:
                with contextlib.suppress(RefusedError):
                    scheduler.add(SequenceGroup(new.request_id, new.prompt_len, new.n, new.max_tokens))
        if rng.random() < 0.05 and real.groups:
            name = rng.choice(list(real.groups))
            for scheduler in both:
                scheduler.abort(name)
        plans = [scheduler.schedule() for scheduler in both]
        assert plans[0].log == plans[1].log
        assert counts(real) == counts(counting)
        drawn = [(row.group.request_id, branch) for row in plans[0].scheduled for branch in row.draws]
        stopped = {one for one in drawn if rng.random() < 0.1}
        for scheduler, plan in zip(both, plans, strict=True):
            scheduler.update(plan, stopped)
        assert counts(real) == counts(counting)


# no proof is empty


@pytest.mark.parametrize("shape", orders_and(SHAPES))
def test_every_hypothesis_is_satisfiable(shape: Shape) -> None:
    for forked in steps.forked_counts(*shape[:3]):
        for mode in MODES.values():
            world = build(shape._replace(forked=forked, mode=mode), Symbols())
            assert Executor(steps.lawful(world)).satisfiable


@pytest.mark.parametrize("order", ORDERS)
def test_every_phase_and_every_way_to_preempt_is_reached(order: str) -> None:
    seen: Counter[str] = Counter()
    for shape, forked in ((3, 0, 0), 2), ((3, 1, 1), 4), ((0, 1, 1), 0), ((0, 1, 0), 1), ((0, 0, 1), 1), ((0, 0, 1), 0):
        report = steps.prove_schedule(Shape(*shape, chunked=ORDERS[order], forked=forked))
        demand(report)
        seen += report.reached
    assert seen.keys() >= {
        "admit",
        "admit:prompt",
        "admit:rebuild",
        "grow",
        "demote",
        "swap_in",
        "swap_in:mid-prompt",
        "swap_in:rebuilt or decode",
        "swap_out",
        "preempt:swap",
        "preempt:recompute",
        "serve:running",
        "serve:newcomer",
        "several victims",
        "swapped out and demoted in one step",
    }


def test_a_rebuild_of_several_branches_is_reached_in_rows() -> None:
    """Pieces that end within a tail, and pieces over more than one tail, both occur."""
    executor = Executor(lone_facts(lone(Symbols(), 3, True, 4)))
    kinds = set()
    for path in executor.paths(lambda: list((g := lone(Symbols(), 3, True, 4).scheduler.running[0]).rows(g.tokens))):
        kinds.add(len(path.result))
    assert kinds == {1, 2, 3}


@pytest.mark.parametrize("fault", faults.IN_SCHEDULE, ids=lambda fault: fault.policy.__name__)
def test_a_fault_planted_in_schedule_is_refuted(fault: faults.Fault) -> None:
    report = steps.prove_schedule(fault.shape, fault.policy, max_failures=99)
    assert report.broken() & fault.laws, f"{report.broken()} are broken"


@pytest.mark.parametrize("fault", faults.IN_UPDATE, ids=lambda fault: fault.policy.__name__)
def test_a_fault_planted_in_update_is_refuted(fault: faults.Fault) -> None:
    report = steps.prove_update(fault.shape, 0, fault.policy, max_failures=99)
    assert report.broken() & fault.laws, f"{report.broken()} are broken"


@pytest.mark.parametrize("fault", faults.IN_UPDATE, ids=lambda fault: fault.policy.__name__)
def test_a_fault_planted_in_update_is_refuted_by_a_whole_step_too(fault: faults.Fault) -> None:
    report = steps.prove_step(fault.shape, fault.policy, max_failures=99)
    assert report.failures, str(report)


def test_a_counterexample_names_the_law_the_values_and_the_branches() -> None:
    fault = faults.IN_SCHEDULE[0]
    report = steps.prove_schedule(fault.shape, fault.policy)
    text = str(report.failures[0])
    assert text.split()[0] in BY_ID
    assert "num_gpu" not in text
    assert "gpu_blocks = " in text


def test_every_law_on_counts_is_in_some_theorem() -> None:
    stated = {law.id for law in (*STATE, *steps.STATE_IN_MID, *steps.MID, *steps.STEP, *steps.ROUND)}
    counted = {law.id for law in BY_ID.values() if law.predicate is not None and law.tier.value == "counts"}
    assert counted == stated
