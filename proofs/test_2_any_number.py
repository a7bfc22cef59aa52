"""Theorems for any number of groups and queues of any length.

**Each loop body of the real code, once.**  A queue is a few groups and a row that stands for any number of others
(spec/check/ghost.py).  A loop is cut at its head: from any state of the invariant one turn of the production method
ends the loop in a state of what follows, or comes back to the head with the invariant and one group less.  A loop
inside the body is replaced by what was proved of it before (`room_made`), or cut in its turn.

**Composition.**  Let the state at the start of a step satisfy the state laws.
1. Before `_decodes` nothing is served and the tokens are all there: the decode invariant.  Each turn of the outer loop
   keeps it (`test_decode_...`); its inner loop, which preempts, takes one group from the tail of `rest` a turn, so it
   ends; `_preempt` puts the group where the order wants it (`test_preempt_...`), through `_make_room`, whose loop takes
   one group from the tail of `swapped` a turn (`test_make_room_...`).  So after `_decodes` every running decode is
   served or gone, most junior first, and the tokens left are all but the live branches of the served.
2. `_catch_up` serves the one running group that may be behind (`test_catch_up_...`).  With 1 every running group has a
   token now (S4, L1): the head of all first, which is never its own victim.
3. `_swap_in` and `_admit` turn by turn keep books, order and limits (`test_swap_in_...`, `test_admit_...`); with
   nothing running their first turn succeeds: no deadlock (S18).  In prefill-first order the same bodies are called in
   another sequence, and their invariants ask for nothing but the books, the limits and the tokens left, which hold at
   each call; `decodes_owed` gives a step in which decodes were left out to be followed by 1 (S17, proved by shape in
   test_1: it looks at the head of `running` and at no other group).
4. `update` works group by group with any other group before or behind: test_1, any number by induction on the plan.
A loop body reads no group but the ones it takes from the ends, so nothing else of a queue can matter to it.

**No abort for lack of swap** (S8): `_preempt` returns on every path with the books kept, for any CPU size, 0 too.

**The aggregate model**: sums over all groups, each action touching one arbitrary group: its invariant is inductive for
any number, nothing deadlocks, the old admission rule breaks it.

**The bound** (L3): the oldest gets a token in every step (in one of two, prefill-first) and loses none; its work
is bounded by its own numbers; so a group leaves within the sum of the bounds of itself and its seniors at arrival.
"""

from __future__ import annotations

from typing import Any

import pytest

from engine.scheduler import Plan, PreemptionMode, Scheduler, SchedulerConfig, SequenceGroup
from engine.scheduler.phases import Step
from proofs import faults_symbolic as faults
from proofs import steps
from proofs.endless import Endless, endless, room_made, turn
from proofs.worlds import MODES, Shape, build
from spec import aggregate
from spec.check.ghost import Row
from spec.check.symbolic import Cut, Executor, Report, Symbols
from spec.laws import BY_ID, steps_bound
from spec.logic import Bool, Int, conj, disj, neg, total
from spec.words import is_decode, queued, remaining_work

ORDERS = {"chunked": True, "prefill_first": False}
order_and_mode = pytest.mark.parametrize(
    ("chunked", "mode"),
    [pytest.param(c, m, id=f"{order}-{name}") for order, c in ORDERS.items() for name, m in MODES.items()],
)
in_both_orders = pytest.mark.parametrize("chunked", list(ORDERS.values()), ids=list(ORDERS))


def demand(report: Report, *results: str) -> None:
    """The lemma holds, and each way out of the turn is taken by some path."""
    assert report.proved, str(report)
    for result in results:
        assert report.reached[f"result {result}"], report.reached


def served_live(it: Endless) -> Int:
    return total(g.live for g in it.scheduler.running)


def tokens_left_by_decodes(it: Endless) -> Bool:
    """Each served decode took a token for each live branch."""
    return it.step.tokens == it.scheduler.config.tokens - served_live(it)


# making room on the CPU


def one_demotion(policy: type[Scheduler]) -> type[Scheduler]:
    """Back at the head of the loop in `_make_room` after one demotion."""

    class Once(policy):  # type: ignore[valid-type, misc]
        def _demote(self, step: Step) -> None:
            super()._demote(step)
            raise Cut("again")

    return Once


def prove_make_room(
    policy: type[Scheduler] = Scheduler, last: bool | None = True, chunked: bool = True, max_failures: int = 1
) -> Report:
    """A turn of the loop in `_make_room`."""

    def claims(it: Endless) -> dict[str, Bool]:
        size, free = it.world.source.integer("size"), it.scheduler.blocks.cpu_free
        if it.result != "again":
            return {
                "outcome": size <= free if it.result else not it.scheduler.swapped,
                "nothing moved": free == it.free[1],
            }
        gone = it.scheduler.waiting.left[0]
        freed = free - it.free[1]
        return {
            "S14": conj(size > it.free[1], free < size + freed),
            "freed": freed >= 1,
            "B5": gone.held == 0,
            "Q7": conj(gone.deficit == gone.whole, neg(gone.tail_shared)),
        }

    return turn(
        lambda source: endless(source, one_demotion(policy), chunked, swapped_last=last),
        lambda it: [it.world.source.integer("size") >= 0],
        lambda it: it.scheduler._make_room(it.world.source.integer("size"), it.step),
        claims,
        max_failures,
    )


@in_both_orders
@pytest.mark.parametrize("last", [None, True, False], ids=["amid_decodes", "last_forked", "last_in_first_run"])
def test_make_room_demotes_the_most_junior_until_it_fits_or_nothing_is_swapped(
    last: bool | None, chunked: bool
) -> None:
    demand(prove_make_room(last=last, chunked=chunked), "again", "True", *["False"] * (last is None))


# the loops themselves


@pytest.mark.parametrize("length", [0, 1, 2, 5, 6, 41, 300])
@pytest.mark.parametrize("loop", ["_decodes", "_swap_in", "_admit", "_make_room"])
def test_a_loop_goes_on_until_its_body_stops_or_its_queue_is_empty(loop: str, length: int) -> None:
    """Whatever the body does and however long the queue: the lemmas on one turn are about every turn there is."""
    for stop in sorted({0, 1, length // 2, length, length + 1}):
        turns: list[str] = []

        class Bodies(Scheduler):
            def _decode_head(self, step: Any, turns: list[str] = turns, stop: int = stop) -> bool:
                turns.append(step.rest[0].request_id)
                if len(turns) <= stop:
                    self.running.append(step.rest.popleft())
                return len(turns) <= stop

            def _swap_in_head(self, step: Any, turns: list[str] = turns, stop: int = stop) -> bool:
                turns.append(self.swapped[0].request_id)
                if len(turns) <= stop:
                    self.running.append(self.swapped.popleft())
                return len(turns) <= stop

            def _admit_head(self, step: Any, turns: list[str] = turns, stop: int = stop) -> bool:
                turns.append(self.waiting[0].request_id)
                if len(turns) <= stop:
                    self.running.append(self.waiting.popleft())
                return len(turns) <= stop

            def _demote(self, step: Any, turns: list[str] = turns) -> None:
                turns.append(self.swapped.pop().request_id)
                self.blocks.cpu.free.append(0)

        s = Bodies(SchedulerConfig(num_gpu_blocks=1, block_size=1, max_model_len=2, max_num_batched_tokens=2))
        groups = [SequenceGroup(f"r{i}", 1) for i in range(length)]
        queue = {"_decodes": s.running, "_swap_in": s.swapped, "_make_room": s.swapped, "_admit": s.waiting}[loop]
        queue.extend(groups)
        step = Step(Plan(0), 2)
        names = [group.request_id for group in groups]
        if loop == "_make_room":
            assert s._make_room(stop, step) is (stop <= length)
            assert turns == names[::-1][:stop]
            continue
        getattr(s, loop)(step)
        assert turns == names[: stop + 1]
        assert [group.request_id for queue in (s.running, s.swapped, s.waiting) for group in queue] == names


# one preemption


def prove_preempt(
    policy: type[Scheduler] = Scheduler,
    mode: PreemptionMode | None = None,
    forked: bool = True,
    chunked: bool = True,
    max_failures: int = 1,
) -> Report:
    """One preemption of the most junior running group, with any number of others anywhere."""

    def make(source: Any) -> Endless:
        box: list[Endless] = []
        kept = lambda: Row(source, "kept", box[0].scheduler.swapped.row.make)  # noqa: E731
        summed = room_made(policy, source, kept)
        it = endless(source, summed, chunked, mode, rest=(True, forked), behind=True)
        box.append(it)
        return it

    def body(it: Endless) -> Any:
        it.head = it.step.rest.pop()
        it.tokens = it.head.held
        it.world.scheduler._was_swapped = bool(it.scheduler.swapped)
        it.scheduler._preempt(it.head, it.step)
        return it.step.plan.log[0].detail

    def claims(it: Endless) -> dict[str, Bool]:
        victim, blocks, config = it.head, it.scheduler.blocks, it.scheduler.config
        queue = it.scheduler.swapped if it.result == "swap" else it.scheduler.waiting
        size = it.world.measure.fills[victim.request_id]
        others = it.world.scheduler._was_swapped
        recompute = victim.live == 1 if mode is None else mode is PreemptionMode.RECOMPUTE
        told: dict[str, Bool] = {
            "Q2": queue.left[:1] == [victim],
            "freed": blocks.gpu_free == it.free[0] + it.tokens,
            "kept": conj(victim.tokens == 0, victim.live >= 1),
        }
        if it.result == "swap":
            told["B4"] = victim.held == size
            told["S15"] = disj(others, neg(recompute))
        else:
            told["Q2 of recompute"] = not it.scheduler.swapped
            told["Q7"] = conj(victim.held == 0, victim.deficit == victim.whole, neg(victim.tail_shared))
            told["S15"] = disj(conj(recompute, not others), size > config.num_cpu_blocks)
        return told

    def all_claims(it: Endless) -> dict[str, Bool]:
        return claims(it)

    return turn(make, lambda it: [], body, all_claims, max_failures)


@order_and_mode
@pytest.mark.parametrize("forked", [True, False], ids=["forked", "in_first_run"])
def test_preempt_always_succeeds_and_keeps_the_order_and_the_books(
    forked: bool, mode: PreemptionMode | None, chunked: bool
) -> None:
    demand(prove_preempt(Scheduler, mode, forked, chunked), "swap", "recompute")


# decodes


def one_preemption(policy: type[Scheduler]) -> type[Scheduler]:
    """Back at the head of the loop in `_decode_head` after one preemption; the group itself is the end of it."""

    class Once(policy):  # type: ignore[valid-type, misc]
        def _preempt(self, victim: SequenceGroup, step: Step) -> None:
            self._the_victim = victim
            self.blocks.drop_gpu(victim)
            victim.forget()  # as after a recompute; where it goes is the business of the lemma on `_preempt`
            victim.status = type(victim.status).WAITING
            self.waiting.appendleft(victim)
            if step.rest:
                raise Cut("again")

    return Once


def prove_decode(
    policy: type[Scheduler] = Scheduler, rest: tuple[bool, ...] = (True,), chunked: bool = True, max_failures: int = 1
) -> Report:
    """A turn of the loop over decodes, up to one preemption."""

    def claims(it: Endless) -> dict[str, Bool]:
        head, blocks = it.head, it.scheduler.blocks
        cover = it.world.measure.covers[head.request_id]
        told = {"tokens": tokens_left_by_decodes(it)}
        if it.result is True:
            told["M1"] = conj(head.held == cover, neg(head.tail_shared))
            told["S10"] = conj(head.tokens == head.live, head.deficit == head.live)
            told["served last"] = it.scheduler.running.right[-1] is head
        elif it.result == "again":
            gained = blocks.gpu_free - it.free[0]
            told["S6"] = it.step.rest[0] is head
            told["S13"] = blocks.gpu_free < gained + cover - head.held
            told["freed"] = gained >= 1
        elif it.step.plan.log or it.scheduler.waiting.left:
            told["L1"] = served_live(it) >= 1  # never the head of all
            told["last of rest"] = not it.step.rest
        else:
            told["behind"] = neg(is_decode(head))
        return told

    return turn(
        lambda source: endless(source, one_preemption(policy), chunked, rest=rest, behind=True, nothing_swapped=True),
        lambda it: [tokens_left_by_decodes(it), only_the_last_is_behind(it)],
        lambda it: it.scheduler._decode_head(it.step),
        claims,
        max_failures,
    )


def only_the_last_is_behind(it: Endless) -> Bool:
    """Q4: where others follow the head, it is a decode."""
    alone = it.step.rest.row.count == 0 if not it.step.rest.right else False
    return disj(is_decode(it.head), alone)


@in_both_orders
@pytest.mark.parametrize(
    "rest",
    [(True,), (False,), (True, True), (True, False)],
    ids=["head", "first_run", "head_and_last", "head_and_first_run"],
)
def test_decode_serves_the_head_or_takes_from_the_tail_and_never_the_oldest_of_all(
    rest: tuple[bool, ...], chunked: bool
) -> None:
    demand(
        prove_decode(rest=rest, chunked=chunked),
        *{(True,): ["True", "False", "again"], (False,): ["False"]}.get(rest, ["True", "again"]),
    )


# running prefills


@in_both_orders
@pytest.mark.parametrize("forked", [True, False], ids=["rebuild", "first_run"])
def test_catch_up_gives_the_last_running_group_what_is_left_and_at_least_one_token(forked: bool, chunked: bool) -> None:
    def tokens(it: Endless) -> Bool:
        others = total(g.live for g in it.scheduler.running) - it.scheduler.running.right[-1].live
        return it.step.tokens == it.scheduler.config.tokens - (others if chunked else 0)

    def claims(it: Endless) -> dict[str, Bool]:
        group = it.scheduler.running.right[-1]
        given, left = group.tokens, it.step.tokens
        return {
            "L1": disj(is_decode(group), given >= 1),
            "S10": disj(given == group.deficit, given <= group.deficit - (group.live if forked else 0)),
            "S11": disj(
                is_decode(group), given == group.deficit, left == 0, conj(forked, group.deficit - given == group.live)
            ),
            "charged": left == it.tokens - given,
        }

    demand(
        turn(
            lambda source: endless(source, chunked=chunked, running_behind=forked),
            lambda it: [tokens(it)],
            lambda it: it.scheduler._catch_up(it.step),
            claims,
        ),
        "None",
    )


# coming in


def came_in(it: Endless, group: Any) -> dict[str, Bool]:
    """What holds of a group that was let in."""
    cover = it.world.measure.covers[group.request_id]
    keep = group.live if group.forked else 0
    left = it.step.tokens
    return {
        "M1": conj(group.held == cover, neg(group.tail_shared)),
        "S10": conj(group.tokens >= 1, disj(group.tokens == group.deficit, group.tokens <= group.deficit - keep)),
        "charged": left == it.tokens - group.tokens,
        "S11": disj(group.tokens == group.deficit, left == 0, group.deficit - group.tokens == keep),
        "S7": it.scheduler.running.right[-1] is group,
        "M3": disj(group.tokens == group.deficit, left < it.scheduler.config.seqs, conj(keep >= 1, left >= 0)),
    }


def alone(it: Endless) -> Bool:
    """Nothing runs and nothing is spent: the case that must not be a deadlock."""
    return conj(it.served.row.count == 0, it.step.tokens == it.scheduler.config.tokens)


def prove_swap_in(
    policy: type[Scheduler] = Scheduler, last: bool | None = None, chunked: bool = True, n: int = 1
) -> Report:
    """A turn of the loop over swapped groups."""

    def claims(it: Endless) -> dict[str, Bool]:
        if it.result:
            return came_in(it, it.scheduler.running.right[-1])
        head, blocks, config = it.scheduler.swapped[0], it.scheduler.blocks, it.scheduler.config
        return {
            "S18": neg(it.world.alone),
            "S11s": disj(
                head.piece(it.step.tokens) <= 0,
                it.world.measure.covers[head.request_id] > blocks.gpu_free,
                served_live(it) + head.live > config.seqs,
            ),
        }

    def body(it: Endless) -> Any:
        it.world.alone = alone(it)  # type: ignore[attr-defined]
        return bool(it.scheduler.swapped) and it.scheduler._swap_in_head(it.step)

    def claims_if_any(it: Endless) -> dict[str, Bool]:
        return claims(it) if it.result or it.scheduler.swapped else {}

    return turn(
        lambda source: endless(source, policy, chunked, swapped_last=last),
        lambda it: [],
        body,
        claims_if_any,
        n,
    )


@in_both_orders
@pytest.mark.parametrize("last", [None, True, False], ids=["amid_decodes", "last_forked", "last_in_first_run"])
def test_swap_in_takes_the_head_while_it_fits_and_always_when_nothing_runs(last: bool | None, chunked: bool) -> None:
    demand(prove_swap_in(last=last, chunked=chunked), "True", "False")


def prove_admit(policy: type[Scheduler] = Scheduler, forked: bool = False, chunked: bool = True, n: int = 1) -> Report:
    """A turn of the loop over waiting groups."""

    def claims(it: Endless) -> dict[str, Bool]:
        config, blocks = it.scheduler.config, it.scheduler.blocks
        if it.result:
            group = it.scheduler.running.right[-1]
            told = came_in(it, group)
            told["S16"] = disj(it.served.row.count == 0, blocks.gpu_free >= config.watermark_blocks)
            if not chunked and not forked:
                told["whole prompts"] = group.tokens == group.deficit
            return told
        if not it.scheduler.waiting:
            return {}
        head = it.scheduler.waiting[0]
        watermark = config.watermark_blocks if it.scheduler.running else 0
        given = head.piece(it.step.tokens)
        return {
            "S18": neg(it.world.alone),
            "S11w": disj(
                given <= 0,
                conj(not chunked, not forked, given < head.deficit),
                it.world.measure.covers[head.request_id] + watermark > blocks.gpu_free,
                served_live(it) + head.live > config.seqs,
            ),
        }

    def body(it: Endless) -> Any:
        it.world.alone = alone(it)  # type: ignore[attr-defined]
        return bool(it.scheduler.waiting) and it.scheduler._admit_head(it.step)

    return turn(
        lambda source: endless(source, policy, chunked, nothing_swapped=True, waiting_forked=forked),
        lambda it: [],
        body,
        claims,
        n,
    )


@in_both_orders
@pytest.mark.parametrize("forked", [False, True], ids=["prompts", "rebuilds"])
def test_admit_takes_the_head_while_it_fits_and_always_when_nothing_runs(forked: bool, chunked: bool) -> None:
    demand(prove_admit(forked=forked, chunked=chunked), "True", "False")


# faults


def test_a_room_that_is_not_made_is_refuted_for_any_number() -> None:
    report = prove_make_room(faults.NeverDemotes, max_failures=9)
    assert report.broken() == {"outcome"}


def test_a_recompute_behind_swapped_groups_is_refuted_for_any_number() -> None:
    report = prove_preempt(faults.RecomputesBehindSwapped, max_failures=9)
    assert "Q2 of recompute" in report.broken()


def test_growth_one_block_too_early_is_refuted_for_any_number() -> None:
    report = prove_decode(faults.GrowsOneBlockTooEarly, (True,), max_failures=9)
    assert report.broken() & {"S13", "L1"}


def test_swap_in_for_nothing_is_refuted_for_any_number() -> None:
    assert "charged" in prove_swap_in(faults.SwapsInForNothing, n=9).broken()


def test_admission_beyond_max_num_seqs_is_refuted_for_any_number() -> None:
    assert "S5s" in prove_admit(faults.ForgetsTheSequenceLimit, n=9).broken()


def test_admission_below_the_watermark_is_refuted_for_any_number() -> None:
    assert "S16" in prove_admit(faults.IgnoresTheWatermark, n=9).broken()


# the aggregate model


def refuted(hypothesis: list[Bool], claim: Bool) -> Any:
    """Values that break the claim; None if it follows."""
    executor = Executor(hypothesis)
    assert executor.satisfiable
    return executor.refute(claim)


@pytest.mark.parametrize("action", list(aggregate.ACTIONS))
def test_the_aggregate_invariant_is_inductive(action: str) -> None:
    sums, group = aggregate.symbols(Symbols())
    guard, effect = aggregate.ACTIONS[action]
    given = [aggregate.invariant(sums), aggregate.fits_alone(sums, group), guard(sums, group)]
    assert refuted(given, aggregate.invariant(effect(sums, group))) is None


def test_no_deadlock_with_nothing_running_the_head_comes_in() -> None:
    sums, group = aggregate.symbols(Symbols())
    lawful = [aggregate.invariant(sums), aggregate.fits_alone(sums, group), sums.runs == 0]
    head = disj(
        conj(aggregate.is_swapped(sums, group), group.arrival == sums.oldest_swap),
        conj(sums.swaps == 0, sums.waits >= 1, group.held == 0),
    )
    assert refuted([*lawful, head], aggregate.can_go_on(sums, group)) is None


def test_no_abort_for_lack_of_swap_a_victim_can_always_be_preempted() -> None:
    sums, group = aggregate.symbols(Symbols())
    given = [aggregate.invariant(sums), aggregate.fits_alone(sums, group), aggregate.runs_last(sums, group)]
    assert refuted(given, aggregate.can_preempt(sums, group)) is None


def test_without_demotion_and_recompute_a_victim_can_find_no_room() -> None:
    """The reported abort: with swap as the only way out, a full swap area is reachable whatever the admission rule."""
    sums, group = aggregate.symbols(Symbols())
    given = [aggregate.invariant(sums), aggregate.fits_alone(sums, group), aggregate.runs_last(sums, group)]
    assert refuted(given, aggregate.ACTIONS["swap_out"][0](sums, group)) is not None


def test_the_old_admission_rule_breaks_seniority() -> None:
    """Admission while groups are swapped: whoever comes in is junior to them."""
    sums, group = aggregate.symbols(Symbols())
    _, admit = aggregate.ACTIONS["admit"]
    given = [aggregate.invariant(sums), aggregate.fits_alone(sums, group), sums.swaps >= 1, sums.waits >= 1]
    old_rule = [group.cover <= sums.gpu_free, sums.live_runs + sums.live_swaps + group.live <= sums.seqs]
    newcomer = [group.arrival > sums.oldest_swap]
    assert refuted([*given, *old_rule, *newcomer], aggregate.invariant(admit(sums, group))) is not None


# the bound


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("where", ["running", "swapped", "waiting"])
def test_the_remaining_work_of_a_lawful_group_is_positive_and_bounded(where: str, n: int, block_size: int) -> None:
    """L3, first part: wherever a group is, and however often it was rebuilt, its work lies between 1 and its bound."""
    at = [int(where == queue) for queue in ("running", "swapped", "waiting")]
    for forked, live in [(0, n), *((1, live) for live in range(1, n + 1))]:
        shape = Shape(*at, forked=forked, branches=((n, live),), block_size=block_size)
        world = build(shape, Symbols())
        group = next(world.groups())
        work = remaining_work(group)
        assert refuted(steps.lawful(world), conj(work >= 1, work <= steps_bound(group, []))) is None


def test_the_bound_of_a_group_is_the_sum_over_itself_and_its_seniors() -> None:
    """L3 as the laws state it adds up the bounds of the groups, twice in prefill-first order."""
    shape = Shape(0, 0, 3, branches=((1, 1), (2, 2), (3, 3)), block_size=4)
    *seniors, group = build(shape, Symbols()).groups()
    bound = total(steps_bound(g, []) for g in (*seniors, group))
    assert (steps_bound(group, seniors) == bound) is True
    assert (steps_bound(group, seniors, chunked=False) == 2 * bound) is True


@in_both_orders
@pytest.mark.parametrize("shape", [(1, 0, 1), (2, 1, 1), (0, 1, 1), (0, 0, 2)], ids=lambda s: "-".join(map(str, s)))
def test_every_step_computes_a_token_of_the_oldest_and_takes_nothing_from_it(
    shape: tuple[int, int, int], chunked: bool
) -> None:
    """L3, second part.  The oldest is never a victim and its lack never grows; it gets a token in every step, in
    prefill-first order in one of two.  Its work only falls, by a token at least each time (L2 of `update`, test_1), so
    it ends within its bound; then the next is the oldest.  Nobody who arrives later ever becomes older.  So a group
    ends within the sum of the bounds of itself and its seniors at arrival.
    """

    def claims(planned: steps.Planned) -> dict[str, Bool]:
        step = planned.step
        oldest = queued(step.before)[0]
        now = step.now[oldest.request_id]
        return {
            "oldest": BY_ID["L1" if chunked else "L1p"](step),
            "turns": BY_ID["S17"](step),
            "lack": now.deficit == oldest.deficit,
        }

    for forked in steps.forked_counts(*shape):
        report = steps.prove_schedule(Shape(*shape, chunked=chunked, forked=forked), laws=claims)
        assert report.proved, str(report)
