"""Blocks: the pools of ids, and the manager that keeps every group's tables true to its counts.

Guarantees: on each device free and referenced blocks together are the capacity (law B1); a block's reference count is
the number of table entries naming it (B3); a check and the action it announces use one formula, so an action that was
announced as fitting never fails, and what it takes is what was announced.

The policy sees only the counts (`BlockCounts`); ids never leave this file except in tables and in the plan's lists.
"""

from __future__ import annotations

from typing import Protocol

from engine.scheduler import contracts
from engine.scheduler.plan import BlockPair
from engine.scheduler.sequence import SequenceGroup
from spec.logic import Int, cdiv


class BlockCounts(Protocol):
    """What the policy may ask and do: counts in, counts out.

    `cover` is what a running group must hold for all tokens it knows, `need` what of that it lacks, `beats` for how
    many steps a decode will lack nothing, `swap_size` what it would take on the CPU.  The verbs carry out what was
    asked for and have no way to fail once it fits.
    """

    @property
    def gpu_free(self) -> Int: ...
    @property
    def cpu_free(self) -> Int: ...
    def cover(self, group: SequenceGroup) -> Int: ...
    def need(self, group: SequenceGroup) -> Int: ...
    def beats(self, group: SequenceGroup) -> Int: ...
    def swap_size(self, group: SequenceGroup) -> Int: ...
    def admit(self, group: SequenceGroup) -> None: ...
    def grow(self, group: SequenceGroup) -> list[BlockPair]: ...
    def swap_out(self, group: SequenceGroup) -> list[BlockPair]: ...
    def swap_in(self, group: SequenceGroup) -> tuple[list[BlockPair], list[BlockPair]]: ...
    def drop_gpu(self, group: SequenceGroup) -> None: ...
    def drop_cpu(self, group: SequenceGroup) -> None: ...
    def peak(self, prompt_len: Int, n: int, max_tokens: Int) -> Int: ...
    def fork(self, group: SequenceGroup) -> None: ...
    def finish_branch(self, group: SequenceGroup, branch: int) -> None: ...


class BlockPool:
    """The blocks of one device: a stack of free ids and a reference count for each block.

    Taking an empty pool's block or dropping a free block is a bug in the caller and raises.
    """

    __slots__ = ("capacity", "free", "name", "refs")

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.capacity = capacity
        self.free = list(range(capacity - 1, -1, -1))
        self.refs = [0] * capacity

    def take(self) -> int:
        """A free block, now referenced once."""
        if not self.free:
            raise MemoryError(f"no free block on the {self.name}: {self.capacity} of {self.capacity} are referenced")
        block = self.free.pop()
        self.refs[block] = 1
        return block

    def take_many(self, count: int) -> list[int]:
        """So many free blocks, in the order in which `take` would give them."""
        if count > len(self.free):
            raise MemoryError(
                f"{count} blocks are wanted and {len(self.free)} of {self.capacity} are free on the {self.name}"
            )
        if count <= 0:
            return []
        blocks = self.free[: -count - 1 : -1]
        del self.free[-count:]
        for block in blocks:
            self.refs[block] = 1
        return blocks

    def share(self, block: int) -> None:
        """One more table entry names the block."""
        if self.refs[block] <= 0:
            raise ValueError(f"{self.name} block {block} is free and cannot be shared")
        self.refs[block] += 1

    def drop(self, block: int) -> None:
        """One table entry fewer names the block; the last one frees it."""
        if self.refs[block] <= 0:
            raise ValueError(f"{self.name} block {block} is free already")
        self.refs[block] -= 1
        if self.refs[block] == 0:
            self.free.append(block)

    def drop_many(self, blocks: list[int]) -> None:
        """The same for each of the blocks, in order."""
        refs, free = self.refs, self.free
        for block in blocks:
            if refs[block] == 1:
                refs[block] = 0
                free.append(block)
            else:
                self.drop(block)


class BlockManager:
    """Keeps the tables of all groups over the two pools; the implementation of `BlockCounts` that serves."""

    __slots__ = ("block_size", "cpu", "gpu")

    def __init__(self, block_size: int, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        self.block_size = block_size
        self.gpu = BlockPool("GPU", num_gpu_blocks)
        self.cpu = BlockPool("CPU", num_cpu_blocks)

    # counts

    @property
    def gpu_free(self) -> int:
        return len(self.gpu.free)

    @property
    def cpu_free(self) -> int:
        return len(self.cpu.free)

    def cover(self, group: SequenceGroup) -> Int:
        """Distinct GPU blocks for all known tokens of its branches, private copies included."""
        blocks = cdiv(group.known, self.block_size)
        if not group.forked:
            return blocks
        return group.shared_blocks + group.live * (blocks - group.shared_blocks)

    def need(self, group: SequenceGroup) -> Int:
        """GPU blocks that a running group lacks, copy-on-write targets included."""
        return self.cover(group) - group.held

    def beats(self, group: SequenceGroup) -> Int:
        """Steps that a running decode can go on with the blocks it has: 0 if it needs some now."""
        if group.tail_shared:
            return 0
        return len(group.tables[group.branches[0]]) * self.block_size + 1 - group.known

    def swap_size(self, group: SequenceGroup) -> Int:
        """CPU blocks that its computed tokens take, shared blocks counted once."""
        counts = [cdiv(computed, self.block_size) for computed in group.computed()]
        done = group.whole - group.deficit
        if group.tail_shared or done <= group.shared_tokens:
            return counts[0]  # every branch names the same blocks
        return group.shared_blocks + sum(count - group.shared_blocks for count in counts)

    def peak(self, prompt_len: Int, n: int, max_tokens: Int) -> Int:
        """Most GPU blocks a group ever covers, alone: its last token is never computed."""
        if max_tokens <= 1:
            return cdiv(prompt_len, self.block_size)
        shared = prompt_len // self.block_size
        return shared + n * (cdiv(prompt_len + max_tokens - 1, self.block_size) - shared)

    # verbs of the step

    @contracts.blocks_admit
    def admit(self, group: SequenceGroup) -> None:
        """Give a waiting group the blocks for all tokens it knows: shared prompt blocks once, a tail each."""
        group.held = self.cover(group)
        group.tables = self._tables(group, [[] for _ in group.branches])

    @contracts.blocks_grow
    def grow(self, group: SequenceGroup) -> list[BlockPair]:
        """Give a decode what it lacks; returns the copies (source, target) that its first writes call for."""
        copies = self._part_tail(group)
        length = cdiv(group.known, self.block_size)
        for branch in group.branches:
            table = group.tables[branch]
            table += self.gpu.take_many(length - len(table))
        group.held = self.cover(group)
        return copies

    @contracts.blocks_swap_out
    def swap_out(self, group: SequenceGroup) -> list[BlockPair]:
        """Move the computed blocks to the CPU, each once; returns (GPU block, CPU block) pairs in table order."""
        moved: dict[int, int] = {}
        tables: list[list[int]] = [[] for _ in group.tables]
        for branch, computed in zip(group.branches, group.computed(), strict=True):
            for block in group.tables[branch][: cdiv(computed, self.block_size)]:
                if block in moved:
                    self.cpu.share(moved[block])
                else:
                    moved[block] = self.cpu.take()
                tables[branch].append(moved[block])
        self._release(group, self.gpu)
        group.tables = tables
        group.held = len(moved)
        return list(moved.items())

    @contracts.blocks_swap_in
    def swap_in(self, group: SequenceGroup) -> tuple[list[BlockPair], list[BlockPair]]:
        """Bring a group back, with blocks for all tokens it knows; returns the moves (CPU, GPU) and the copies."""
        moved: dict[int, int] = {}
        homes = [group.tables[branch] for branch in group.branches]
        tables: list[list[int]] = []
        for home in homes:
            table = []
            for block in home:
                if block in moved:
                    self.gpu.share(moved[block])
                else:
                    moved[block] = self.gpu.take()
                table.append(moved[block])
            tables.append(table)
        self._release(group, self.cpu)
        group.tables = self._tables(group, tables)
        copies = self._part_tail(group)
        group.held = self.cover(group)
        return list(moved.items()), copies

    @contracts.blocks_drop_gpu
    def drop_gpu(self, group: SequenceGroup) -> None:
        """Give all its GPU blocks back."""
        self._release(group, self.gpu)

    @contracts.blocks_drop_cpu
    def drop_cpu(self, group: SequenceGroup) -> None:
        """Give all its CPU blocks back."""
        self._release(group, self.cpu)

    # verbs of update

    @contracts.blocks_fork
    def fork(self, group: SequenceGroup) -> None:
        """After its first run: `n` branches that name all prompt blocks of branch 0."""
        first = group.tables[0]
        group.tables = [first, *(list(first) for _ in range(1, group.n))]
        for block in first:
            for _ in range(1, group.n):
                self.gpu.share(block)

    @contracts.blocks_finish_branch
    def finish_branch(self, group: SequenceGroup, branch: int) -> None:
        """Drop the table of one branch of a running group; what its siblings name stays."""
        before = len(self.gpu.free)
        for block in group.tables[branch]:
            self.gpu.drop(block)
        group.tables[branch] = []
        group.held -= len(self.gpu.free) - before

    # inner

    def _tables(self, group: SequenceGroup, begun: list[list[int]]) -> list[list[int]]:
        """Complete the begun tables of the live branches for all known tokens, full prompt blocks in common."""
        length = cdiv(group.known, self.block_size)
        common = begun[0]
        tables: list[list[int]] = [[] for _ in group.tables]
        for branch, table in zip(group.branches, begun, strict=True):
            for block in common[len(table) : group.shared_blocks]:  # none for the first branch, whose table it is
                self.gpu.share(block)
                table.append(block)
            table += self.gpu.take_many(length - len(table))
            tables[branch] = table
        return tables

    def _part_tail(self, group: SequenceGroup) -> list[BlockPair]:
        """Copy-on-write of the shared last prompt block: every live branch but the last gets its own copy."""
        if not group.tail_shared:
            return []
        copies = []
        for branch in group.branches[:-1]:
            table = group.tables[branch]
            shared = table[group.shared_blocks]
            table[group.shared_blocks] = self.gpu.take()
            self.gpu.drop(shared)
            copies.append((shared, table[group.shared_blocks]))
        group.tail_shared = False
        return copies

    def _release(self, group: SequenceGroup, pool: BlockPool) -> None:
        for branch in group.branches:
            pool.drop_many(group.tables[branch])
        group.tables = [[] for _ in group.tables]
        group.held = 0
