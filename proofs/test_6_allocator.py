"""The block allocator refines the count protocol: ids, references, copy-on-write and swap maps do what the counts say.

A check says yes exactly when the action succeeds; what it takes is what was announced; and after every action the
reference counts are exact, tables are as long as they must be, nobody shares what is not shared, and every block has
the contents its tables promise.  Exhaustive up to six blocks on each device and three tables, for n in {1, 2, 3} and
block size in {1, 4, 16}; random beyond.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from engine.scheduler import SequenceGroup, Status
from engine.scheduler.blocks import BlockManager
from proofs.mutants import MUTANTS
from spec.logic import cdiv
from spec.words import Measure

GPU = CPU = 6
TABLES = 3

Pairs = list[tuple[int, int]]


class Memory:
    """A manager with a few groups on it, and the names of the tokens that the blocks hold."""

    def __init__(self, size: int, gpu: int = GPU, cpu: int = CPU, kind: type[BlockManager] = BlockManager) -> None:
        self.size = size
        self.blocks = kind(size, gpu, cpu)
        self.groups: list[SequenceGroup] = []
        self.arrived = 0
        self.contents: dict[Status, dict[tuple[int, int], object]] = {Status.RUNNING: {}, Status.SWAPPED: {}}

    def copied(self) -> Memory:
        """Another memory in the same state."""
        then = copy.copy(self)
        then.blocks = copy.copy(self.blocks)
        for name in ("gpu", "cpu"):
            pool = copy.copy(getattr(self.blocks, name))
            pool.free, pool.refs = list(pool.free), list(pool.refs)
            setattr(then.blocks, name, pool)
        then.groups = [copy.copy(group) for group in self.groups]
        for group in then.groups:
            group.branches, group.tables = list(group.branches), [list(table) for table in group.tables]
        then.contents = {status: dict(held) for status, held in self.contents.items()}
        return then

    # what the policy does with a group, one action each; only the order in which it does them is left out

    def arrive(self, p: int, n: int, m: int) -> None:
        group = SequenceGroup(str(self.arrived), p, n, m)
        self.arrived += 1
        group.shared_blocks = p // self.size
        group.shared_tokens = group.shared_blocks * self.size
        self.groups.append(group)

    def admit(self, group: SequenceGroup) -> None:
        self.blocks.admit(group)
        group.status = Status.RUNNING

    def grow(self, group: SequenceGroup) -> None:
        self.copy(self.blocks.grow(group))

    def run(self, group: SequenceGroup, tokens: int) -> None:
        """Compute tokens of the deficit; sample when there is none left."""
        for index, start, end in group.rows(tokens):
            branch = group.branches[index]
            for position in range(start, end):
                self.write(group, branch, position)
        group.deficit -= tokens
        if group.deficit == 0:
            if not group.forked:
                group.forked = True
                group.branches = list(range(group.n))
                self.blocks.fork(group)
                group.tail_shared = group.n > 1 and group.shared_tokens < group.prompt_len
            group.known += 1
            group.deficit = group.live

    def stop(self, group: SequenceGroup, branch: int) -> None:
        self.blocks.finish_branch(group, branch)
        group.branches = [one for one in group.branches if one != branch]
        group.live -= 1
        group.deficit -= 1
        group.tail_shared = group.tail_shared and group.live > 1

    def swap_out(self, group: SequenceGroup) -> None:
        moves = self.blocks.swap_out(group)
        self.move(Status.RUNNING, Status.SWAPPED, moves)
        group.status = Status.SWAPPED

    def swap_in(self, group: SequenceGroup) -> None:
        moves, copies = self.blocks.swap_in(group)
        self.move(Status.SWAPPED, Status.RUNNING, moves)
        self.copy(copies)
        group.status = Status.RUNNING

    def drop(self, group: SequenceGroup) -> None:
        if group.status is Status.RUNNING:
            self.blocks.drop_gpu(group)
        else:
            self.blocks.drop_cpu(group)
        group.forget()
        group.status = Status.WAITING

    # contents

    def move(self, source: Status, target: Status, pairs: Pairs) -> None:
        read = [(b, i, self.contents[source].get((a, i))) for a, b in pairs for i in range(self.size)]
        for block, i, value in read:
            self.contents[target][block, i] = value

    def copy(self, pairs: Pairs) -> None:
        self.move(Status.RUNNING, Status.RUNNING, pairs)

    def write(self, group: SequenceGroup, branch: int, position: int) -> None:
        block = group.tables[branch][position // self.size]
        self.contents[Status.RUNNING][block, position % self.size] = self.name(group, branch, position)

    def name(self, group: SequenceGroup, branch: int, position: int) -> object:
        return (group.request_id, position) if position < group.prompt_len else (group.request_id, branch, position)

    # what must hold

    def check(self) -> None:
        measure = Measure(self.size)
        for pool, status in ((self.blocks.gpu, Status.RUNNING), (self.blocks.cpu, Status.SWAPPED)):
            refs = [0] * pool.capacity
            for group in self.groups:
                if group.status is status:
                    for table in group.tables:
                        for block in table:
                            refs[block] += 1
            assert refs == pool.refs, "B3"
            assert sorted(pool.free) == [block for block, count in enumerate(refs) if not count], "B1"
        for group in self.groups:
            named = [block for table in group.tables for block in table]
            assert group.held == len(set(named)), "held counts distinct blocks"
            if group.status is Status.WAITING:
                assert not named, "B5"
                continue
            if group.status is Status.SWAPPED:
                assert group.held == measure.filled(group), "B4"
            for branch, done in zip(group.branches, group.computed(), strict=True):
                table = group.tables[branch]
                assert cdiv(done, self.size) <= len(table) <= cdiv(group.known, self.size), "B4"
                for position in range(done):
                    at = (table[position // self.size], position % self.size)
                    assert self.contents[group.status].get(at) == self.name(group, branch, position), "B7"
                for other in group.branches:
                    if other != branch:
                        common = set(table) & set(group.tables[other])
                        if group.tail_shared:
                            assert table == group.tables[other], "B6"
                        else:
                            assert common <= set(table[: group.shared_blocks]), "B6"

    # every action that is possible, with what its check says

    def actions(self, most_known: int) -> Iterator[tuple[str, bool, Callable[[Memory], None]]]:
        """(name, whether its check says that it fits, what it does).  What does not fit is tried too: it must fail."""
        for i, group in enumerate(self.groups):
            if group.status is Status.WAITING:
                yield "admit", self.blocks.cover(group) <= self.blocks.gpu_free, lambda m, i=i: m.admit(m.groups[i])
            elif group.status is Status.SWAPPED:
                fits = self.blocks.cover(group) <= self.blocks.gpu_free
                yield "swap_in", fits, lambda m, i=i: m.swap_in(m.groups[i])
                yield "drop", True, lambda m, i=i: m.drop(m.groups[i])
            else:
                yield "drop", True, lambda m, i=i: m.drop(m.groups[i])
                if group.deficit < group.whole:
                    fits = self.blocks.swap_size(group) <= self.blocks.cpu_free
                    yield "swap_out", fits, lambda m, i=i: m.swap_out(m.groups[i])
                need = self.blocks.need(group)
                if group.is_decode and need:
                    yield "grow", need <= self.blocks.gpu_free, lambda m, i=i: m.grow(m.groups[i])
                if not need and group.known < most_known:
                    for tokens in {group.deficit, group.piece(group.deficit - 1)}:
                        if tokens > 0:
                            yield "run", True, lambda m, i=i, t=tokens: m.run(m.groups[i], t)
                if group.is_decode and group.live > 1:
                    for branch in group.branches:
                        yield "stop", True, lambda m, i=i, b=branch: m.stop(m.groups[i], b)

    def step(self, name: str, fits: bool, act: Callable[[Memory], None]) -> Memory | None:
        """The memory after the action, all claims checked; None if it did not fit, and then it must fail."""
        then = self.copied()
        free = (then.blocks.gpu_free, then.blocks.cpu_free)
        announced = {id(g): (then.blocks.cover(g), g.held, then.blocks.swap_size(g)) for g in then.groups}
        states = {id(g): g.status for g in then.groups}
        try:
            act(then)
        except MemoryError:
            assert not fits, f"{name} was announced as fitting"
            return None
        assert fits, f"{name} was announced as not fitting"
        now = (then.blocks.gpu_free, then.blocks.cpu_free)
        moved = [g for g in then.groups if g.status is not states[id(g)]]
        if name == "grow":
            taken = sum(cover - held for g in then.groups for cover, held, _ in [announced[id(g)]] if g.held != held)
            assert now == (free[0] - taken, free[1])
        elif moved:
            (group,) = moved
            cover, held, size = announced[id(group)]
            on_gpu = states[id(group)] is Status.RUNNING
            expected = {
                "admit": (free[0] - cover, free[1]),
                "swap_in": (free[0] - cover, free[1] + held),
                "swap_out": (free[0] + held, free[1] - size),
                "drop": (free[0] + held * on_gpu, free[1] + held * (not on_gpu)),
            }[name]
            assert now == expected, f"{name}: what was taken is not what was announced"
        elif name == "run":
            assert now == free
        then.check()
        return then

    def key(self) -> tuple[Any, ...]:
        """The memory up to the names of blocks."""
        names: dict[tuple[Status, int], int] = {}
        return tuple(
            (
                g.prompt_len,
                g.n,
                g.known,
                g.deficit,
                g.live,
                g.forked,
                g.tail_shared,
                g.status,
                g.held,
                tuple(g.branches),
                tuple(tuple(names.setdefault((g.status, b), len(names)) for b in table) for table in g.tables),
            )
            for g in self.groups
        )


def prompts(size: int) -> list[int]:
    """Prompts below, at and above a block's edge."""
    return sorted({1, size, size + 1})


def shapes(n: int, size: int) -> list[tuple[tuple[int, int], ...]]:
    """Which groups (p, n): with at most three tables together; alone, or beside groups of one branch."""
    found: list[tuple[tuple[int, int], ...]] = [((p, n),) for p in prompts(size)]
    if n < TABLES:
        found += [((p, n), (q, 1)) for p in prompts(size) for q in (size, size + 1)]
    if n == 1:
        found.append(((size, 1), (size, 1), (size + 1, 1)))
    return found


def reachable(size: int, groups: tuple[tuple[int, int], ...], kind: type[BlockManager] = BlockManager) -> int:
    """Every state of these groups under all actions; the number of states."""
    start = Memory(size, kind=kind)
    for p, n in groups:
        start.arrive(p, n, 64)
    most_known = max(p for p, _ in groups) + (2 if len(groups) < TABLES else 1)
    seen = {start.key()}
    queue = deque([start])
    while queue:
        here = queue.popleft()
        for name, fits, act in here.actions(most_known):
            then = here.step(name, fits, act)
            if then is not None and (key := then.key()) not in seen:
                seen.add(key)
                queue.append(then)
    return len(seen)


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_allocator_refines_the_count_protocol(n: int, size: int) -> None:
    assert sum(reachable(size, groups) for groups in shapes(n, size)) > 30


@pytest.mark.parametrize(
    "mutant", [m for m in MUTANTS if m.blocks is not BlockManager and m.id != "SharesAcrossGroups"], ids=lambda m: m.id
)
def test_a_planted_fault_in_the_allocator_is_found(mutant: Any) -> None:
    def search() -> None:
        for groups in (((2, 2),), ((1, 2), (2, 1)), ((3, 3),), ((5, 3),)):
            reachable(2, groups, mutant.blocks)

    with pytest.raises((AssertionError, MemoryError, ValueError, IndexError)):
        search()


class LargeMemory(RuleBasedStateMachine):
    """The same actions at random on pools of tens of blocks and up to eight branches."""

    @initialize(size=st.sampled_from([1, 2, 4, 16]), gpu=st.integers(4, 60), cpu=st.integers(0, 40))
    def begin(self, size: int, gpu: int, cpu: int) -> None:
        self.memory = Memory(size, gpu, cpu)

    @precondition(lambda self: len(self.memory.groups) < 6)
    @rule(p=st.integers(1, 40), n=st.integers(1, 8))
    def arrive(self, p: int, n: int) -> None:
        self.memory.arrive(p, n, 64)

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        actions = list(self.memory.actions(most_known=64))
        if actions:
            name, fits, act = actions[data.draw(st.integers(0, len(actions) - 1))]
            then = self.memory.step(name, fits, act)
            self.memory = then if then is not None else self.memory


def test_the_allocator_refines_the_count_protocol_at_large() -> None:
    run_state_machine_as_test(
        LargeMemory, settings=settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
    )
