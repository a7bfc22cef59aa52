"""Ghost contents of both pools: law B7, which says that every token is where its table says.

A block holds names of tokens.  The plan's swaps, copies and writes are carried out on the names; what the tables then
say must be what the slots hold.  A prompt token is named by its group and position, the tokens after the prompt by
group, branch and position, so that branches that share what they must not share are found out.
"""

from __future__ import annotations

from typing import Any

from spec.laws_ids import computed

_BRANCH = 1 << 12
_GROUP = 1 << 24


class Shadow:
    """The names that every slot holds, 0 for none.  Groups are told apart by their arrival."""

    def __init__(self, block_size: int, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        self.size = block_size
        self.gpu = [0] * (num_gpu_blocks * block_size)
        self.cpu = [0] * (num_cpu_blocks * block_size)

    @classmethod
    def of(cls, s: Any) -> Shadow:
        """What a lawful boundary state's pools hold: computed positions their token, the rest nothing of use."""
        shadow = cls(s.config.block_size, s.config.num_gpu_blocks, s.config.num_cpu_blocks)
        size = shadow.size
        for queue, pool in ((s.running, shadow.gpu), (s.swapped, shadow.cpu)):
            for g in queue:
                prompt = (g.arrival + 1) * _GROUP
                for branch, done in computed(g):
                    table = g.tables[branch]
                    name = prompt + (branch + 1) * _BRANCH
                    for at in range(done):
                        pool[table[at // size] * size + at % size] = at + (prompt if at < g.prompt_len else name)
        return shadow

    def execute(self, plan: Any) -> None:
        """Carry the plan out, in the order that executors follow; within a list all reads come before the writes."""
        self.move(plan)
        gpu = self.gpu
        for row in plan.scheduled:
            g = row.group
            prompt = (g.arrival + 1) * _GROUP
            name = prompt + (row.branch + 1) * _BRANCH
            for at, slot in zip(range(row.start, row.end), row.slots, strict=True):
                gpu[slot] = at + (prompt if at < g.prompt_len else name)

    def move(self, plan: Any) -> None:
        """The first half of it: swap out, swap in, copy."""
        self._move(self.gpu, self.cpu, plan.blocks_to_swap_out)
        self._move(self.cpu, self.gpu, plan.blocks_to_swap_in)
        self._move(self.gpu, self.gpu, plan.blocks_to_copy)

    def _move(self, source: list[int], target: list[int], pairs: list[tuple[int, int]]) -> None:
        size = self.size
        held = [source[a * size : (a + 1) * size] for a, _ in pairs]
        for (_, b), block in zip(pairs, held, strict=True):
            target[b * size : (b + 1) * size] = block

    def agrees(self, s: Any) -> bool:
        """Every computed position of every table holds its own token."""
        try:
            return self._agrees(s)
        except (IndexError, ValueError):
            return False  # a table too short for what is computed, or too few counts for all branches

    def _agrees(self, s: Any) -> bool:
        size = self.size
        for queue, pool in ((s.running, self.gpu), (s.swapped, self.cpu)):
            for g in queue:
                prompt = (g.arrival + 1) * _GROUP
                for branch, done in computed(g):
                    table = g.tables[branch]
                    name = prompt + (branch + 1) * _BRANCH
                    for at in range(done):
                        if pool[table[at // size] * size + at % size] != at + (prompt if at < g.prompt_len else name):
                            return False
        return True
