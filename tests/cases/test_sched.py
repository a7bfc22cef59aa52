"""Field cases of the scheduler: faults that people met in engines of this kind, each as a small world.

Numbers are those of the case list.  14, 16 and 18 (priorities, adapters) are for when those exist.
"""

from __future__ import annotations

import pytest

from engine import LLM
from engine.scheduler import ConfigError, Plan, RefusedError, SchedulerConfig, Status
from tests.oracle import World

TOO_LARGE = r"alone needs 11 KV cache blocks but the pool has 8"


def served(world: World, name: str) -> bool:
    """Whether the request got a token in the last step."""
    return name in world.names(world.plans[-1])


# 1


def test_a_prompt_larger_than_the_pool_is_refused_at_once_and_the_next_one_is_served() -> None:
    """Case 1.  The policy refuses at add, before the first scheduling attempt."""
    world = World(gpu=8, length=64)
    with pytest.raises(RefusedError, match=TOO_LARGE) as refused:
        world.add("A", p=40, m=4)
    assert refused.value.reason == "num_gpu_blocks"
    world.add("B", p=4, m=4)
    for _ in range(5):
        world.step()
    assert "B" in world.ended
    world.check_drained()
    assert world.core.stats.refused["num_gpu_blocks"] == 1


@pytest.mark.parametrize("watermark", [0, 1])
def test_a_prompt_as_large_as_the_pool_is_served_whatever_the_watermark(watermark: int) -> None:
    """Case 1, edge C.  The case refuses it under a watermark of 1; here the watermark binds admission only while
    others run, so that it can wait for an empty pool and is served."""
    world = World(gpu=8, length=64, watermark_blocks=watermark)
    world.add("B", p=4, m=4)
    world.add("C", p=32, m=1)
    world.step()
    assert served(world, "B")
    assert world.group("C").status is Status.WAITING
    world.drain()
    assert world.all_same_as_alone()


def test_a_watermark_holds_a_newcomer_back_only_while_others_run() -> None:
    """Case 1, the rule behind edge C: four blocks are free and one must stay so."""
    world = World(gpu=8, length=64, watermark_blocks=1)
    world.add("A", p=13, m=2)
    world.step()
    world.add("B", p=16, m=1)
    world.step()
    assert world.group("B").status is Status.WAITING
    world.step()
    assert "B" in world.ended


# 2


def test_a_request_that_would_outgrow_the_pool_is_refused_naming_both_numbers() -> None:
    """Case 2.  The case lets A end by itself after 9 tokens; the policy refuses an explicit max_tokens that can never
    be had, and ends a request that named none exactly there."""
    world = World(gpu=4, length=32)
    with pytest.raises(RefusedError, match="needs 7 KV cache blocks but the pool has 4"):
        world.add("A", p=8, m=20)
    world.add("A", p=8, m=None)
    world.add("B", p=4, m=2)
    world.drain()
    assert [len(tokens) for tokens in world.tokens("A")] == [9]
    assert world.outputs["A"].outputs[0].finish_reason == "length"
    assert world.outputs["A"].metrics.num_preemptions <= 1
    assert world.tokens("A")[0] == world.alone("A").outputs[0].token_ids[:9], "its text is intact"
    assert world.same_as_alone("B")


def test_start_up_with_a_context_longer_than_the_pool_is_refused_naming_both_numbers() -> None:
    """Case 2, the start check: refused before any weights are read."""
    with pytest.raises(ConfigError, match=r"max_model_len is 32 .* holds 16 tokens \(4 blocks of 4\)"):
        LLM("smollm2-135m", max_model_len=32, block_size=4, num_gpu_blocks_override=4, device="cpu")


# 3


@pytest.mark.parametrize("cpu", [0, 2])
def test_no_room_in_the_swap_area_is_an_ordinary_outcome(cpu: int) -> None:
    """Case 3: B cannot be swapped out, so it is computed again."""
    world = World(gpu=8, cpu=cpu)
    world.add("A", p=4, n=2, m=12)
    world.add("B", p=4, n=2, m=12)
    world.until(lambda: world.plans and world.plans[-1].preempted)
    assert world.plans[-1].step == 5, "the fifth decode"
    assert world.names(world.plans[-1]) == ["A"]
    assert [(a.request_id, a.blocks, a.detail) for a in world.plans[-1].log if a.verb == "preempt"] == [
        ("B", 3, "recompute")
    ]
    world.drain()
    assert [len(tokens) for tokens in world.tokens("A") + world.tokens("B")] == [12] * 4
    assert world.all_same_as_alone()
    assert not world.verbs["swap_out"]


# 4


@pytest.mark.parametrize("chunked", [True, False])
def test_nobody_new_is_admitted_while_a_group_sits_swapped_out(chunked: bool) -> None:
    """Case 4, chunked as in the report; the other order keeps the same rule."""
    t = 16 if chunked else 64
    world = World(gpu=16, cpu=16, t=t, s=16, length=64, enable_chunked_prefill=chunked)
    for i in range(8):
        world.add(f"r{i}", p=8, n=2, m=24)
    while world.core.has_unfinished_requests():
        before = {g.request_id for g in world.scheduler.swapped}
        world.step()
        plan = world.plans[-1]
        verbs = [a.verb for a in plan.log]
        if plan.preempted or world.scheduler.swapped:
            assert "admit" not in verbs
        brought = [a.request_id for a in plan.log if a.verb == "swap_in"]
        assert brought == sorted(before)[: len(brought)], "swap-ins follow the order of arrival"
    world.check_drained()
    assert world.verbs["preempt:swap"] > 3
    assert world.all_same_as_alone()
    assert [name for _, _, name in world.log("finish")] == [f"r{i}" for i in range(8)]


# 6


def test_a_victim_is_in_waiting_and_nowhere_else() -> None:
    """Case 6: the first decode leaves no block for B."""
    world = World(gpu=5, t=16)
    world.add("A", p=8, m=8)
    world.add("B", p=8, m=8)
    world.step()
    world.step()
    b = world.group("B")
    assert [g.request_id for g in world.plans[-1].preempted] == ["B"]
    assert list(world.scheduler.waiting) == [b]
    assert b not in world.scheduler.running
    assert not world.scheduler.swapped
    for done in range(3, 9):
        world.step()
        assert [len(tokens) for tokens in world.tokens("A")] == [done], "A gains one token in every step"
    assert "A" in world.ended
    world.drain()
    assert world.all_same_as_alone()


# 8


@pytest.mark.parametrize("chunked", [True, False])
def test_recompute_of_a_group_with_several_branches_rebuilds_all_of_them(chunked: bool) -> None:
    """Case 8: the documented outcome is a rebuild of every branch, which keeps its index."""
    world = World(gpu=10, cpu=10, length=64, preemption_mode="recompute", enable_chunked_prefill=chunked)
    world.add("A", p=8, n=3, m=8)
    world.add("B", p=8, n=3, m=8)
    world.drain()
    assert world.verbs["preempt:recompute"] > 0
    assert not world.verbs["swap_out"]
    assert [c.index for c in world.ended["B"].outputs] == [0, 1, 2]
    assert len(set(map(tuple, world.tokens("B")))) == 3, "the branches differ, so that a mix-up would show"
    assert world.all_same_as_alone()


# 9


@pytest.mark.parametrize("most", [8, 7])
def test_a_swapped_in_group_is_charged_for_every_branch(most: int) -> None:
    """Case 9.  check_plan and check hold tokens to T, sequences to S in every step."""
    world = World(gpu=20, cpu=20, t=most, s=most)
    world.add("A", p=4, n=4, m=16)
    world.add("B", p=4, n=4, m=16)
    together = 0
    while world.core.has_unfinished_requests():
        world.step()
        plan = world.plans[-1]
        together += world.names(plan) == ["A", "B"]
        for action in plan.log:
            if action.verb == "swap_in":
                assert [tokens for group, tokens in plan.groups if group.request_id == "B"] == [4]
                assert sum(1 for row in plan.scheduled if row.group.request_id == "B") == 4
    assert bool(world.verbs["swap_in"]) is (most == 8)
    assert bool(together) is (most == 8)
    assert world.all_same_as_alone()


# 10


def test_the_sequence_limit_counts_branches_from_the_start() -> None:
    """Case 10: a group that has not forked yet counts all its branches, and 0 left means none."""
    world = World(gpu=64, s=4)
    with pytest.raises(RefusedError, match="n is 6 but max_num_seqs is 4"):
        world.add("A", n=6)
    world.add("B", n=3, m=8)
    world.add("C", n=2, m=8)
    while "B" not in world.ended:
        world.step()
        assert "C" not in world.names(world.plans[-1])
    world.drain()
    for i in range(4):
        world.add(f"one{i}", m=5 + i)
    world.add("D", m=3)
    while "one0" not in world.ended:
        world.step()
        assert world.group("D").status is Status.WAITING
    world.step()
    assert served(world, "D")
    world.drain()
    assert world.all_same_as_alone()


def test_the_first_run_of_a_wide_group_never_overlaps_one_that_would_pass_the_limit() -> None:
    """Case 10: also not in the steps before the fork, while a chunked prompt is still on its way."""
    world = World(gpu=64, s=4, t=4)
    world.add("B", p=14, n=3, m=2)
    world.add("C", p=2, n=2, m=2)
    while "B" not in world.ended:
        world.step()
        assert world.names(world.plans[-1]) == ["B"]
    world.drain()


# 11


def arrivals(world: World, steps: int) -> list[int]:
    """A streams while a prompt of 16 tokens arrives before every step; the steps in which A gained a token."""
    world.add("A", p=4, m=60)
    world.step()
    gained = []
    for i in range(steps):
        world.add(f"new{i}", p=16, m=1)
        before = len(world.tokens("A")[0])
        world.step()
        if len(world.tokens("A")[0]) == before + 1:
            gained.append(i)
    return gained


def test_a_stream_gains_a_token_in_every_step_while_newcomers_keep_arriving() -> None:
    """Case 11, chunked.  S is 16: the policy refuses the case's S=64 with T=16, under which decodes alone could pass
    the budget."""
    world = World(gpu=512, t=16, s=16)
    assert arrivals(world, 50) == list(range(50))
    assert all(plan.num_prefill_tokens <= 15 for plan in world.plans[1:])
    world.drain()
    assert world.same_as_alone("A")


def test_prefill_first_lets_a_stream_wait_for_one_step_at_most() -> None:
    """Case 11, prefill-first: the policy bounds the stall, so no metric is needed to watch it."""
    world = World(gpu=512, t=64, s=16, length=64, enable_chunked_prefill=False)
    gained = arrivals(world, 50)
    assert max(b - a for a, b in zip([-1, *gained], [*gained, 50], strict=True)) == 2
    world.drain()
    assert world.same_as_alone("A")


# 13


@pytest.mark.parametrize("gpu", [13, 14, 15, 16, 18, 20])
def test_a_prompt_is_admitted_whole_and_never_computed_over_and_over(gpu: int) -> None:
    """Case 13 (14 blocks), and pools around it."""
    world = World(gpu=gpu, t=8)
    world.add("A", p=32, m=16)
    world.until(lambda: "A" in world.outputs)
    world.add("B", p=32, m=4)
    made: dict[str, int] = {}
    while world.core.has_unfinished_requests():
        world.step()
        for group in world.plans[-1].preempted:
            made_now = group.generated + 1000 * len(world.ended)
            assert made_now > made.get(group.request_id, -1), "it made a token, or somebody finished, in between"
            made[group.request_id] = made_now
    assert sum(plan.num_prefill_tokens for plan in world.plans) <= 2 * 64
    assert world.all_same_as_alone()


# limits that no configuration may pass


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_num_seqs": 64, "max_num_batched_tokens": 16}, r"max_num_seqs \(64\) exceeds .* \(16\)"),
        ({"num_gpu_blocks": 0}, "num_gpu_blocks is 0; it must be at least 1"),
        ({"num_cpu_blocks": -1}, "num_cpu_blocks is -1; it must be at least 0"),
        ({"block_size": 0}, "block_size is 0; it must be at least 1"),
        ({"max_model_len": 1}, "max_model_len is 1; it must be at least 2"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0; it must be at least 1"),
        ({"max_num_seqs": True}, "max_num_seqs is True; it must be an int"),
        ({"watermark_blocks": 1.5}, r"watermark_blocks is 1\.5; it must be an int"),
        ({"preemption_mode": "drop"}, "preemption_mode is 'drop'; allowed are 'swap', 'recompute' and None"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 8, "max_model_len": 32},
            r"max_num_batched_tokens \(8\) is below max_model_len \(32\)",
        ),
    ],
)
def test_a_configuration_under_which_a_request_could_wait_for_ever_is_refused(config: dict, message: str) -> None:
    """Cases 10, 11 and 51: the start check names the values and what is allowed."""
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(**{"num_gpu_blocks": 8, **config})


def test_two_groups_that_each_fit_alone_finish_with_any_swap_size() -> None:
    """Cases 3, 4 and 13 together: swap from none to ample, in both orders and every mode."""
    seen: set[str] = set()
    for cpu in (0, 2, 5, 11):
        for chunked in (True, False):
            for mode in (None, "swap", "recompute"):
                world = World(gpu=12, cpu=cpu, length=64, enable_chunked_prefill=chunked, preemption_mode=mode)
                for i, (p, n, m) in enumerate([(6, 2, 14), (5, 3, 9), (9, 1, 20), (4, 2, 11)]):
                    world.add(f"r{i}", p=p, n=n, m=m)
                world.drain()
                seen |= set(world.verbs)
                results = {name: world.tokens(name) for name in world.asked}
                if cpu == 0 and chunked and mode is None:
                    assert world.all_same_as_alone()
                    expected = results
                assert results == expected
    assert {"preempt:swap", "preempt:recompute", "demote", "swap_in"} <= seen


def test_every_step_serves_the_most_senior_request() -> None:
    """Cases 6 and 13: in the chunked order the first arrival gains something in every step and is never preempted."""
    world = World(gpu=12, cpu=4, t=4)
    for i in range(6):
        world.add(f"r{i}", p=9, n=2, m=9)

    def serves_the_senior(plan: Plan) -> None:
        senior = min(world.scheduler.groups.values(), key=lambda group: group.arrival)
        assert plan.groups[0][0] is senior
        assert senior not in plan.preempted

    world.between = serves_the_senior
    world.drain()
    assert world.core.stats.preemptions > 0
