"""Field cases of the blocks: tables, reference counts, copies and swaps.  Numbers are those of the case list."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from engine.request import RequestState
from engine.scheduler import Plan, RefusedError, Scheduler, SchedulerConfig, SequenceGroup, Status
from engine.scheduler.blocks import BlockManager, BlockPool
from tests.oracle import AMPLE, World
from tests.worlds import R, Run, computed

# 20


def test_branches_that_end_at_different_times_free_every_block_once() -> None:
    """Case 20.  There is no sliding window: a model that has one is served only within it."""
    ends = {0: 3, 1: 7, 2: 10}

    def end(state: RequestState, branch: int, position: int) -> int | None:
        return 63 if position - len(state.prompt_token_ids) == ends[branch] - 1 else None

    world = World(gpu=16, favourites=end, eos=(63,))
    world.add("A", p=6, n=3, m=10, temperature=0, ignore_eos=False)
    used = []
    while world.core.has_unfinished_requests():
        world.step()
        used.append(world.scheduler.counts().gpu_blocks_used)
    assert [len(tokens) for tokens in world.tokens("A")] == [3, 7, 10]
    assert used == [2, 4, 3, 5, 5, 5, 3, 4, 4, 0]
    assert world.scheduler.blocks.gpu_free == 16
    assert world.same_as_alone("A")


def test_freeing_a_free_block_is_a_hard_error() -> None:
    """Case 20."""
    pool = BlockPool("GPU", 2)
    block = pool.take()
    pool.drop(block)
    with pytest.raises(ValueError, match=f"GPU block {block} is free already"):
        pool.drop(block)
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.share(block)
    pool.take(), pool.take()
    with pytest.raises(MemoryError, match="no free block on the GPU: 2 of 2 are referenced"):
        pool.take()


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_group_that_lost_a_branch_is_preempted_and_comes_back_whole(first: int, mode: str) -> None:
    """Case 20, with a preemption after one branch has ended, whichever it was."""

    def end(state: RequestState, branch: int, position: int) -> int | None:
        done = position - len(state.prompt_token_ids)
        if state.request_id == "A" or done > 1 or len(state.outputs) == 1:
            return None
        return 10 + branch if done == 0 else 63 if branch == first else None

    world = World(gpu=10, cpu=10, favourites=end, eos=(63,), preemption_mode=mode)
    world.add("A", p=6, n=2, m=14)
    world.add("B", p=6, n=3, m=10, ignore_eos=False, temperature=0)
    world.until(lambda: any(g.request_id == "B" for plan in world.plans for g in plan.preempted))
    assert world.group("B").live == 2
    world.drain()
    assert [len(tokens) for tokens in world.tokens("B")] == [2 if b == first else 10 for b in range(3)]
    assert world.all_same_as_alone()


# 21


@pytest.mark.parametrize(("p", "n", "copies"), [(6, 2, 1), (6, 3, 2), (8, 3, 0)])
def test_copy_on_write_happens_exactly_once_for_every_extra_writer(p: int, n: int, copies: int) -> None:
    """Case 21: A, B and C.  The last holder writes in place, and a full last block is nobody's to write."""

    def apart(state: RequestState, branch: int, position: int) -> int | None:
        return 10 + branch if position == len(state.prompt_token_ids) and len(state.outputs) > 1 else None

    world = World(gpu=32, favourites=apart)
    world.add("A", p=p, n=n, m=9, temperature=0)
    world.step()
    assert not world.plans[0].blocks_to_copy
    world.step()
    assert len(world.plans[1].blocks_to_copy) == copies
    assert [tokens[0] for tokens in world.tokens("A")] == list(range(10, 10 + n))
    while world.core.has_unfinished_requests():
        compare_contents(world, "A")
        world.step()
    assert sum(len(plan.blocks_to_copy) for plan in world.plans) == copies
    assert world.same_as_alone("A")


def compare_contents(world: World, name: str) -> None:
    """The KV of every branch is that of a single request with the same tokens."""
    group, state = world.group(name), world.core._states[name]
    size = world.scheduler.config.block_size
    for branch, length in computed(group).items():
        single = World(gpu=32, bs=size)
        single.add("single", prompt=state.tokens(branch, 0, length), m=2)
        single.step()
        kept = [
            contents(w, g.tables[b], length)
            for w, g, b in ((world, group, branch), (single, single.group("single"), 0))
        ]
        assert np.array_equal(*kept)


def contents(world: World, table: list[int], length: int) -> np.ndarray:
    pool = world.runner.device_pool[:, table]
    return pool.reshape(len(pool), -1)[:, :length]


# 23


class Announced(BlockManager):
    """The serving block manager, watched: what a count announces is what the action then takes, to the block."""

    seen: Counter[str]

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config.block_size, config.num_gpu_blocks, config.num_cpu_blocks)
        self.seen = Counter()

    def _watch(self, verb: str, gpu: int, cpu: int, act):  # type: ignore[no-untyped-def]
        before = self.gpu_free, self.cpu_free
        assert gpu <= before[0], "the check and the action disagree"
        assert cpu <= before[1], "the check and the action disagree"
        result = act()
        assert (before[0] - self.gpu_free, before[1] - self.cpu_free) == (gpu, cpu), verb
        self.seen[verb] += 1
        return result

    def _within_peak(self, group: SequenceGroup) -> None:
        assert group.held == len({block for table in group.tables for block in table})
        assert group.held <= self.peak(group.prompt_len, group.n, group.max_tokens) <= self.gpu.capacity

    def admit(self, group: SequenceGroup) -> None:
        self._watch("admit", self.cover(group), 0, lambda: super(Announced, self).admit(group))
        self._within_peak(group)

    def grow(self, group: SequenceGroup):  # type: ignore[no-untyped-def]
        copies = self._watch("grow", self.need(group), 0, lambda: super(Announced, self).grow(group))
        self._within_peak(group)
        return copies

    def swap_out(self, group: SequenceGroup):  # type: ignore[no-untyped-def]
        size = self.swap_size(group)
        moves = self._watch("swap_out", -group.held, size, lambda: super(Announced, self).swap_out(group))
        assert len(moves) == len({out for out, _ in moves}) == size, "each block is moved once"
        return moves

    def swap_in(self, group: SequenceGroup):  # type: ignore[no-untyped-def]
        moves, copies = self._watch(
            "swap_in", self.cover(group), -group.held, lambda: super(Announced, self).swap_in(group)
        )
        self._within_peak(group)
        return moves, copies

    def drop_gpu(self, group: SequenceGroup) -> None:
        self._watch("drop_gpu", -group.held, 0, lambda: super(Announced, self).drop_gpu(group))

    def drop_cpu(self, group: SequenceGroup) -> None:
        self._watch("drop_cpu", 0, -group.held, lambda: super(Announced, self).drop_cpu(group))

    def fork(self, group: SequenceGroup) -> None:
        self._watch("fork", 0, 0, lambda: super(Announced, self).fork(group))

    def finish_branch(self, group: SequenceGroup, branch: int) -> None:
        held = group.held
        before = self.gpu_free
        super().finish_branch(group, branch)
        assert self.gpu_free - before == held - group.held
        self.seen["finish_branch"] += 1


@pytest.mark.parametrize("bs", [1, 4, 16])
def test_a_count_announces_exactly_what_the_action_takes(bs: int) -> None:
    """Case 23.  Actions have no way to fail: the policy asks the same count first, and the count is exact, so there is
    no failed action that could leave something behind."""
    rng = random.Random(bs)
    seen: Counter[str] = Counter()
    for _ in range(120):
        gpu, chunked = rng.randint(4, 40), rng.random() < 0.5
        config = SchedulerConfig(
            num_gpu_blocks=gpu,
            num_cpu_blocks=rng.choice([0, 3, 8]),
            block_size=bs,
            max_model_len=60,
            max_num_batched_tokens=rng.choice([8, 30, 100]) if chunked else 100,
            max_num_seqs=8,
            enable_chunked_prefill=chunked,
            preemption_mode=rng.choice([None, "swap", "recompute"]),
        )
        blocks = Announced(config)
        run = Run(Scheduler(config, blocks), stop=lambda group, branch: rng.random() < 0.04)
        for _ in range(12):
            try:
                run.add(R(p=rng.randint(1, 30), n=rng.choice([1, 2, 3, 5]), m=rng.randint(1, 30)))
            except RefusedError:
                continue
            run.step()
            if rng.random() < 0.1:
                run.s.abort(rng.choice(list(run.s.groups) or ["none"]))
        run.drain()
        seen += blocks.seen
    assert set(seen) == {"admit", "grow", "swap_out", "swap_in", "drop_gpu", "drop_cpu", "fork", "finish_branch"}


# 24


def test_blocks_swapped_out_are_used_again_in_the_same_step_and_nothing_is_lost() -> None:
    """Case 24 on the KV oracle; the order of copies on a GPU stream is a matter of the runner."""
    world = World(gpu=7, cpu=8)
    world.add("A", p=4, n=2, m=12)
    world.add("B", p=4, n=2, m=12)
    for _ in range(5):
        world.step()
    held = {block for table in world.group("B").tables for block in table}
    before = world.runner.device_pool.copy()
    assert len(held) == 3
    world.step()
    plan = world.plans[-1]
    assert plan.step == 5, "the fifth decode"
    assert {out for out, _ in plan.blocks_to_swap_out} == held
    taken = {block for row in plan.scheduled for block in row.block_table}
    assert taken & held, "A is given a block of B's in the same step"
    for out, home in plan.blocks_to_swap_out:
        assert np.array_equal(world.runner.host_pool[:, home], before[:, out]), "what compute wrote is what was kept"
    world.drain()
    for plan in world.plans:
        assert not (plan.blocks_to_swap_out and plan.blocks_to_swap_in)
        assert not {out for out, _ in plan.blocks_to_swap_out} & {block for _, block in plan.blocks_to_swap_in}
    assert world.verbs["swap_in"] == 1
    assert world.all_same_as_alone()


# 25


def test_an_abort_takes_every_branch_and_every_entry_with_it() -> None:
    """Case 25."""
    world = World(gpu=AMPLE)
    world.add("A", p=8, n=2, m=1000)
    for _ in range(3):
        world.step()
    assert world.abort("A")
    assert not world.scheduler.has_unfinished()
    assert world.scheduler.blocks.gpu_free == AMPLE
    [last] = world.step()
    assert (last.request_id, last.finished) == ("A", True)
    assert [c.finish_reason for c in last.outputs] == ["abort", "abort"]
    assert [len(c.token_ids) for c in last.outputs] == [3, 3], "what it had is not lost"
    world.check_drained()
    plan = world.scheduler.schedule()
    assert plan.is_empty
    assert not plan.finished, "the runner was told in the step that gave the last output"
    world.scheduler.update(plan)
    for i in range(100):
        world.add(f"next{i}", p=5, n=2, m=2)
    world.drain()
    assert len(world.ended) == 101
    assert world.core.stats.to_dict()["requests_aborted"] == 1
    assert world.core.stats.to_dict()["requests_finished"] == 100


# 26


def test_abort_is_total_and_tells_the_end_of_a_request_once() -> None:
    """Case 26: never ran, twice, unknown, and in the very step of its last token."""
    world = World(gpu=16, s=1)
    world.add("A", p=4, m=3)
    world.add("B", p=4, m=3)
    world.step()
    free = world.scheduler.blocks.gpu_free
    assert world.abort("B")
    assert not world.abort("B")
    assert not world.abort("nope")
    assert world.scheduler.blocks.gpu_free == free
    world.step()

    def abort_in_the_last_step(plan: Plan) -> None:
        assert world.core.abort_request("A")
        assert not world.core.abort_request("A")

    world.between = abort_in_the_last_step
    assert [(output.request_id, output.finished) for output in world.step()] == [("A", True)]
    world.between = None
    assert world.ended["A"].outputs[0].finish_reason == "abort"
    assert len(world.tokens("A")[0]) == 2, "the step's own token is discarded"
    assert not world.abort("A"), "gone already"
    world.add("C", p=4, m=3)
    world.drain()
    assert world.same_as_alone("C")
    assert world.core.stats.aborted == 2


# 28


def test_an_abort_while_swapped_out_gives_the_cpu_blocks_back_at_once() -> None:
    """Case 28, in the world of case 3 with room on the CPU."""
    world = World(gpu=8, cpu=8)
    world.add("A", p=4, n=2, m=12)
    world.add("B", p=4, n=2, m=12)
    world.until(lambda: world.scheduler.swapped)
    assert world.scheduler.counts().cpu_blocks_used == 3, "the shared block was copied once"
    gpu = world.scheduler.counts().gpu_blocks_used
    assert world.group("B").status is Status.SWAPPED
    assert world.abort("B")
    assert world.scheduler.counts().cpu_blocks_used == 0
    assert world.scheduler.counts().gpu_blocks_used == gpu
    world.drain()
    assert not any(plan.blocks_to_swap_in for plan in world.plans)
    world.scheduler.update(plan := world.scheduler.schedule())
    assert [g.request_id for p in [*world.plans, plan] for g in p.finished].count("B") == 1
    assert world.same_as_alone("A")


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("status", list(Status)[:3])
def test_an_abort_in_any_queue_at_any_moment_leaves_nothing(status: Status, between: bool) -> None:
    """Cases 25, 26 and 28: waiting, running and swapped, at a boundary and between schedule and update."""
    world = World(gpu=8, cpu=8, s=4)
    for name in "ABC":
        world.add(name, p=4, n=2, m=12)
    for name in "ABC":
        world.until(lambda name=name: world.group(name).status is status or name != "B")
    victim = {Status.WAITING: "C", Status.RUNNING: "A", Status.SWAPPED: "B"}[status]
    world.until(lambda: world.group(victim).status is status)
    if between:
        world.between = lambda plan: world.core.abort_request(victim) and None
        world.step()
        world.between = None
    else:
        world.abort(victim)
    assert victim not in world.scheduler.groups
    assert world.ended.get(victim) is not None or world.core._gone
    world.drain()
    assert [c.finish_reason for c in world.ended[victim].outputs] == ["abort", "abort"]
    assert all(world.same_as_alone(name) for name in "ABC" if name != victim)
    assert world.core.stats.aborted == 1
