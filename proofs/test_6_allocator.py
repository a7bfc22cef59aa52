"""The block allocator refines the count protocol: ids, references, copy-on-write and swap maps do what the counts say.

A check says yes exactly when the action succeeds; what it takes is what was announced; and after every action the
reference counts are exact, tables are as long as they must be, nobody shares what is not shared, and every block has
the contents its tables promise.  A broken claim shows the shortest run of actions to it.  Exhaustive up to six blocks
on each device and three tables, for n in {1, 2, 3} and block size in {1, 4, 16}; random beyond.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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


class Act(NamedTuple):
    """What can be done with a group: the verb, whether its check says that it fits, and the doing.  who: in words."""

    name: str
    fits: bool
    do: Callable[[Memory], None]
    who: str

    def __str__(self) -> str:
        return f"{self.name} {self.who}"


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
            assert refs == pool.refs, f"B3: the tables name the {pool.name} blocks {refs} times"
            free = [block for block, count in enumerate(refs) if not count]
            assert sorted(pool.free) == free, f"B1: nobody names the {pool.name} blocks {free}"
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
                    there, right = self.contents[group.status].get(at), self.name(group, branch, position)
                    assert there == right, f"B7: block {at[0]} holds {there} at {at[1]}; it must be {right}"
                for other in group.branches:
                    if other != branch:
                        common = set(table) & set(group.tables[other])
                        if group.tail_shared:
                            assert table == group.tables[other], "B6"
                        else:
                            assert common <= set(table[: group.shared_blocks]), "B6"

    # every action that is possible, with what its check says

    def actions(self, most_known: int) -> Iterator[Act]:
        """What does not fit is tried too: it must fail."""
        for i, group in enumerate(self.groups):
            who = f"group {group.request_id}"
            if group.status is Status.WAITING:
                fits = self.blocks.cover(group) <= self.blocks.gpu_free
                yield Act("admit", fits, lambda m, i=i: m.admit(m.groups[i]), who)
            elif group.status is Status.SWAPPED:
                fits = self.blocks.cover(group) <= self.blocks.gpu_free
                yield Act("swap_in", fits, lambda m, i=i: m.swap_in(m.groups[i]), who)
                yield Act("drop", True, lambda m, i=i: m.drop(m.groups[i]), who)
            else:
                yield Act("drop", True, lambda m, i=i: m.drop(m.groups[i]), who)
                if group.deficit < group.whole:
                    fits = self.blocks.swap_size(group) <= self.blocks.cpu_free
                    yield Act("swap_out", fits, lambda m, i=i: m.swap_out(m.groups[i]), who)
                need = self.blocks.need(group)
                if group.is_decode and need:
                    yield Act("grow", need <= self.blocks.gpu_free, lambda m, i=i: m.grow(m.groups[i]), who)
                if not need and group.known < most_known:
                    for tokens in {group.deficit, group.piece(group.deficit - 1)}:
                        if tokens > 0:
                            most = f"{who}, {tokens} of the {group.deficit} tokens it lacks"
                            yield Act("run", True, lambda m, i=i, t=tokens: m.run(m.groups[i], t), most)
                if group.is_decode and group.live > 1:
                    for branch in group.branches:
                        one = f"branch {branch} of {who}"
                        yield Act("stop", True, lambda m, i=i, b=branch: m.stop(m.groups[i], b), one)

    def step(self, act: Act) -> Memory | None:
        """The memory after the action, all claims checked; None if it did not fit, and then it must fail."""
        name, fits = act.name, act.fits
        then = self.copied()
        free = (then.blocks.gpu_free, then.blocks.cpu_free)
        announced = {id(g): (then.blocks.cover(g), g.held, then.blocks.swap_size(g)) for g in then.groups}
        states = {id(g): g.status for g in then.groups}
        try:
            act.do(then)
        except MemoryError as error:
            if fits:
                raise AssertionError(f"{name} was announced as fitting: {error}") from error
            return None
        assert fits, f"{name} was announced as not fitting, and went through"
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

    def __str__(self) -> str:
        """The pools and what each group holds, block by block."""
        gpu, cpu = self.blocks.gpu, self.blocks.cpu
        lines = [
            f"GPU free {sorted(gpu.free)}, references {gpu.refs}",
            f"CPU free {sorted(cpu.free)}, references {cpu.refs}",
        ]
        for g in self.groups:
            shared = ", last block shared" if g.tail_shared else ""
            lines.append(
                f"group {g.request_id}: {g.status.value}, prompt {g.prompt_len}, n {g.n}, known {g.known}, deficit "
                f"{g.deficit}, holds {g.held}, branches {g.branches}, tables {g.tables}{shared}"
            )
        return "\n".join(lines)

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
    queue: deque[tuple[Memory, Run | None]] = deque([(start, None)])
    while queue:
        here, run = queue.popleft()
        act = None
        try:
            for act in here.actions(most_known):
                then = here.step(act)
                if then is not None and (key := then.key()) not in seen:
                    seen.add(key)
                    queue.append((then, Run(run, act)))
        except Exception as error:  # a claim, or the allocator's own
            raise AssertionError(shortest(start, run, act, error)) from error
    return len(seen)


class Run(NamedTuple):
    """How a memory was reached: the actions, the last one first."""

    before: Run | None
    act: Act


def shortest(start: Memory, run: Run | None, last: Act | None, error: Exception) -> str:
    """The run to a broken claim, carried out again from empty pools, state by state."""
    acts = [last] if last is not None else []
    while run is not None:
        acts.insert(0, run.act)
        run = run.before
    lines = [f"{type(error).__name__}: {error}".splitlines()[0]]
    lines += [
        f"blocks of {start.size} tokens; the shortest run from empty pools:",
        f"   {start}".replace("\n", "\n   "),
    ]
    here = start
    for number, act in enumerate(acts, 1):
        lines.append(f"{'>>' if number == len(acts) else '  '} {number}. {act}{'' if act.fits else ' (does not fit)'}")
        here = here.copied()
        try:
            act.do(here)
        except Exception as raised:
            lines.append(f"      raises {type(raised).__name__}: {raised}")
        lines.append(f"      {here}".replace("\n", "\n      "))
    return "\n".join(lines)


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

    with pytest.raises(AssertionError, match="the shortest run from empty pools"):
        search()


def test_a_broken_claim_shows_the_shortest_run_to_it() -> None:
    """Copies that are not listed: admitted, run to the fork, and the first growth shows it."""
    mutant = next(one for one in MUTANTS if one.id == "ForgetsCopies")
    with pytest.raises(AssertionError) as caught:
        reachable(2, ((1, 2),), mutant.blocks)
    lines = str(caught.value).splitlines()
    runs = [line for line in lines if line[3:4].isdigit()]
    assert [line[3:] for line in runs[:2]] == ["1. admit group 0", "2. run group 0, 1 of the 1 tokens it lacks"]
    assert [line[:2] for line in runs] == ["  "] * (len(runs) - 1) + [">>"]
    assert "group 0: running, prompt 1, n 2" in lines[-1]


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
            then = self.memory.step(actions[data.draw(st.integers(0, len(actions) - 1))])
            self.memory = then if then is not None else self.memory


def test_the_allocator_refines_the_count_protocol_at_large() -> None:
    run_state_machine_as_test(
        LargeMemory, settings=settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
    )
