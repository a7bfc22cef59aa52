"""What a plan says and when: groups at any time, rows until update; and the calendar behind the steady step."""

from __future__ import annotations

from typing import Any

import pytest

from engine.scheduler import Plan, ProtocolError, Scheduler, SchedulerConfig, SequenceGroup, Status
from engine.scheduler.blocks import BlockManager, BlockPool
from engine.scheduler.contracts import lifted
from engine.scheduler.phases import Step


def steady(count: int = 3, n: int = 1, policy: type[Scheduler] = Scheduler) -> Scheduler:
    """Groups a, b, c ... that decode."""
    s = policy(SchedulerConfig(num_gpu_blocks=60, block_size=4, max_num_batched_tokens=64, max_model_len=64))
    for i in range(count):
        s.add(SequenceGroup("abcdef"[i], 5, n, 20))
    s.update(s.schedule())
    return s


def names(plan: Plan) -> list[tuple[str, int]]:
    return [(group.request_id, tokens) for group, tokens in plan.groups]


def test_a_steady_plan_names_the_same_list_of_decodes_as_the_one_before() -> None:
    s = steady()
    first = s.schedule()
    s.update(first)
    second = s.schedule()
    assert second.decodes is first.decodes
    assert names(second) == [("a", 1), ("b", 1), ("c", 1)]
    s.update(second, [("b", 0)])
    third = s.schedule()
    assert names(third) == [("a", 1), ("c", 1)]
    assert names(second) == [("a", 1), ("b", 1), ("c", 1)], "a plan stays what it was"
    assert third.decodes is not second.decodes


def test_a_plan_is_empty_only_without_groups_of_either_kind() -> None:
    s = steady(1)
    plan = s.schedule()
    assert plan.decodes
    assert not plan.served
    assert not plan.is_empty
    s.update(plan, [("a", 0)])
    empty = s.schedule()
    assert empty.is_empty
    assert empty.scheduled == []
    s.update(empty)
    assert empty.scheduled == []
    with lifted():
        unread = s.schedule()
        s.update(unread)
        assert unread.scheduled == []


def test_groups_are_written_once_when_the_step_is_planned_and_follow_it_before() -> None:
    seen: list[Any] = []

    class Looks(Scheduler):
        def _decodes(self, step: Step) -> None:
            seen.append(step.plan.groups)
            super()._decodes(step)
            seen.append(step.plan.groups)

    s = steady(2, policy=Looks)
    seen.clear()
    plan = s.schedule()
    assert seen[0] == []
    assert [group.request_id for group, _ in seen[1]] == ["a", "b"]
    assert names(plan) == [("a", 1), ("b", 1)]
    assert plan.groups is plan.groups


def test_who_had_which_branches_is_known_after_some_have_ended() -> None:
    s = steady(2, n=3)
    plan = s.schedule()
    s.update(plan, [("a", 1), ("a", 2)])
    assert names(plan) == [("a", 3), ("b", 3)]
    later = s.schedule()
    s.update(later)
    assert names(later) == [("a", 1), ("b", 3)]


def test_rows_are_read_before_update_or_not_at_all() -> None:
    with lifted():  # contracts read every plan
        s = steady()
        plan = s.schedule()
        s.update(plan)
        for _ in range(2):
            with pytest.raises(ProtocolError, match="the rows of step 1 were not read before update"):
                _ = plan.scheduled
        read = s.schedule()
        rows = read.scheduled
        assert [row.group.request_id for row in rows] == ["a", "b", "c"]
        s.update(read)
        assert read.scheduled is rows
        failed = s.schedule()
        s.fail(failed, ["a"])
        with pytest.raises(ProtocolError, match="rows of step 3"):
            _ = failed.scheduled


def test_rows_can_be_replaced() -> None:
    plan = steady().schedule()
    plan.scheduled = plan.scheduled[:1]
    assert len(plan.scheduled) == 1


def test_a_plan_made_of_rows_is_for_an_executor() -> None:
    rows = steady().schedule().scheduled
    plan = Plan.of_rows(rows, blocks_to_copy=[(1, 2)])
    assert plan.scheduled is rows
    assert (plan.step, plan.blocks_to_copy, plan.groups) == (0, [(1, 2)], [])


def test_plans_are_equal_that_decide_the_same() -> None:
    s = steady()
    plan = s.schedule()
    twin = Plan.of_rows(
        plan.scheduled, decodes=list(plan.decodes), log=plan.log, num_decode_tokens=3, beat=True, served=[]
    )
    twin.step = plan.step
    assert plan == twin
    for other in (2, 4):
        twin.num_decode_tokens = other
        assert plan != twin
    assert plan.__eq__(3) is NotImplemented
    assert plan != 3


# the short cut


def test_a_policy_with_its_own_rule_for_decodes_is_asked_about_each() -> None:
    asked: list[str] = []

    class Asks(Scheduler):
        def _decode_head(self, step: Step) -> bool:
            asked.append(step.rest[0].request_id)
            return super()._decode_head(step)

    s = steady(policy=Asks)
    asked.clear()
    plan = s.schedule()
    assert asked == ["a", "b", "c"]
    assert [group.request_id for group, _ in plan.served] == asked


def test_a_policy_that_brings_both_keeps_both_and_any_other_keeps_the_short_cut() -> None:
    class Both(Scheduler):
        def _decode_head(self, step: Step) -> bool:
            raise AssertionError("not asked")

        def _all_grow(self, step: Step) -> bool:
            return super()._all_grow(step)

    class Own(Scheduler):
        def _all_grow(self, step: Step) -> bool:
            return super()._all_grow(step)

    class Neither(Scheduler):
        pass

    for policy in (Both, Own, Neither):
        assert len(steady(policy=policy).schedule().decodes) == 3
    with pytest.raises(TypeError):
        type("Odd", (Scheduler,), {}, colour="red")


def test_a_walk_leaves_the_running_prefill_where_it_is() -> None:
    """A policy that looks at every decode ends at the group in mid-prompt, which stays the last of those who run."""

    class Asks(Scheduler):
        def _decode_head(self, step: Step) -> bool:
            return super()._decode_head(step)

    s = Asks(SchedulerConfig(num_gpu_blocks=60, block_size=4, max_num_batched_tokens=8, max_model_len=64))
    s.add(SequenceGroup("a", 5, 1, 20))
    s.add(SequenceGroup("b", 40, 1, 20))
    s.update(s.schedule())
    free = s.blocks.gpu_free
    plan = s.schedule()
    assert names(plan) == [("a", 1), ("b", 7)]
    assert (plan.log, s.blocks.gpu_free) == ([], free)
    assert [group.request_id for group in s.running] == ["a", "b"]
    assert all(group.status is Status.RUNNING for group in s.running)


def test_the_calendar_keeps_no_past() -> None:
    s = steady(3, n=2)
    for _ in range(12):
        s.update(s.schedule())
        assert all(day >= s.calendar.beat for day in s.calendar.days)
    s.update(s.schedule(), [(group, branch) for group in "abc" for branch in (0, 1)])
    assert not s.groups
    assert not s.calendar.filed
    assert s.calendar.branches == 0
    s.update(s.schedule())
    assert not any(s.calendar.days.values())


def test_steady_steps_look_at_nobody_who_needs_nothing() -> None:
    s = steady(3)
    asked: list[str] = []

    class Counting(BlockManager):
        __slots__ = ()

        def need(self, group: SequenceGroup) -> Any:
            asked.append(group.request_id)
            return super().need(group)

    s.blocks.__class__ = Counting
    grown = 0
    with lifted():
        for _ in range(8):
            plan = s.schedule()
            grown += sum(action.verb == "grow" for action in plan.log)
            s.update(plan)
    assert len(asked) == grown == 6  # each of the three crosses a boundary every fourth step


def test_a_steady_update_looks_at_nobody_before_the_last_token_and_writes_nothing_down() -> None:
    looked: list[str] = []

    class Notes(Scheduler):
        def _conclude(self, group: SequenceGroup, *outcome: Any) -> None:
            looked.append(group.request_id)
            super()._conclude(group, *outcome)

    s = steady(2, policy=Notes)
    looked.clear()
    with lifted():
        for _ in range(18):
            plan = s.schedule()
            s.update(plan)
            assert plan._groups is None
        assert looked == []
        plan = s.schedule()
        s.update(plan)
        assert looked == ["a", "b"]
        assert names(plan) == [("a", 1), ("b", 1)]
    assert not s.groups


def test_the_short_cut_is_taken_when_the_blocks_just_suffice() -> None:
    s = Scheduler(SchedulerConfig(num_gpu_blocks=2, block_size=4, max_num_batched_tokens=8, max_model_len=8))
    s.add(SequenceGroup("a", 4, 1, 3))
    s.update(s.schedule())
    assert s.blocks.gpu_free == 1
    plan = s.schedule()
    assert [group.request_id for group in plan.decodes] == ["a"]
    assert s.blocks.gpu_free == 0


# blocks, many at a time


def test_many_blocks_are_taken_in_the_order_of_one_by_one() -> None:
    one, many = BlockPool("GPU", 6), BlockPool("GPU", 6)
    for pool in (one, many):
        pool.drop(pool.take())
    assert many.take_many(3) == [one.take() for _ in range(3)]
    assert (many.free, many.refs) == (one.free, one.refs)
    assert many.take_many(0) == many.take_many(-2) == []
    assert (many.free, many.refs) == (one.free, one.refs)
    with pytest.raises(MemoryError, match="4 blocks are wanted and 3 of 6 are free on the GPU"):
        many.take_many(4)
    assert many.take_many(3) == [one.take() for _ in range(3)]
    assert many.free == []


def test_many_blocks_are_dropped_as_one_by_one() -> None:
    one, many = BlockPool("CPU", 4), BlockPool("CPU", 4)
    for pool in (one, many):
        pool.take_many(3)
        pool.share(1)
    for block in (2, 1, 0):
        one.drop(block)
    many.drop_many([2, 1, 0])
    assert (many.free, many.refs) == (one.free, one.refs)
    assert many.refs == [0, 1, 0, 0]
    with pytest.raises(ValueError, match="CPU block 2 is free already"):
        many.drop_many([2])
