"""What a kernel may rely on, stated once.

The address proofs assume these conditions and nothing else about ids; theorems derive them from the laws, by symbols
for rows and on every small step for rows and moves, and the last of them from the launcher as well; a plan of the real
scheduler is held against them as it is.  All are made with the connectives of `spec.logic`, so the same text
runs on ints and on symbols.  No condition says anything of entries past a row's end: those may be anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spec.logic import Bool, Int, cdiv, conj, implies

CONDITIONS = {
    "entry_in_pool": "B2, B3: a table entry that a context reaches names a block of the pool",
    "table_covers": "B4: a table has an entry for every position of its context",
    "slot_in_pool": "B2, B3, B4: a token's slot lies in the pool, or is negative and means padding",
    "slots_differ": "B6: no two tokens of a step share a slot",
    "pair_in_pools": "B2, B3, S9: a move's source and target are blocks of their pools, since tables name them",
    "targets_differ": "S9: no block is the target of two moves",
    "no_chain": "S9: inside one pool no block is both source and target; copy_blocks sees to it whatever the list",
}


def entry_in_pool(block: Int, blocks: Int) -> Bool:
    """A table entry that a context reaches names a block of the pool."""
    return conj(block >= 0, block < blocks)


def table_covers(width: Int, end: Int, block_size: int) -> Bool:
    """A table of `width` entries has one for every position below `end`."""
    return cdiv(end, block_size) <= width


def slot_in_pool(slot: Int, blocks: Int, block_size: int) -> Bool:
    """A slot lies in the pool; a negative one is padding."""
    return slot < blocks * block_size


def slots_differ(token: Int, slot: Int, other_token: Int, other_slot: Int) -> Bool:
    """Two tokens that share a slot, padding apart, are one."""
    return implies(conj(slot >= 0, slot == other_slot), token == other_token)


def pair_in_pools(source: Int, target: Int, source_blocks: Int, target_blocks: Int) -> Bool:
    """A move's source and target are blocks of their pools."""
    return conj(source >= 0, source < source_blocks, target >= 0, target < target_blocks)


def targets_differ(move: Int, target: Int, other_move: Int, other_target: Int) -> Bool:
    """Two moves to one target are one."""
    return implies(target == other_target, move == other_move)


def no_chain(source: Int, target: Int) -> Bool:
    """No source is a target."""
    return source != target


def broken_by(plan: Any, gpu_blocks: int, cpu_blocks: int, block_size: int) -> list[str]:
    """The conditions that a plan on ints does not meet, by name."""
    broken = set()

    def hold(name: str, condition: Bool) -> None:
        if not condition:
            broken.add(name)

    tokens: list[int] = []
    for row in plan.scheduled:
        hold("table_covers", table_covers(len(row.block_table), row.end, block_size))
        for block in row.block_table[: cdiv(row.end, block_size)]:
            hold("entry_in_pool", entry_in_pool(block, gpu_blocks))
        tokens += row.slots
    _differ(hold, "slots_differ", tokens, slots_differ)
    for slot in tokens:
        hold("slot_in_pool", slot_in_pool(slot, gpu_blocks, block_size))
    for pairs, sources, targets in (
        (plan.blocks_to_swap_out, gpu_blocks, cpu_blocks),
        (plan.blocks_to_swap_in, cpu_blocks, gpu_blocks),
        (plan.blocks_to_copy, gpu_blocks, gpu_blocks),
    ):
        for source, target in pairs:
            hold("pair_in_pools", pair_in_pools(source, target, sources, targets))
        _differ(hold, "targets_differ", [target for _, target in pairs], targets_differ)
    for source, _ in plan.blocks_to_copy:
        for _, target in plan.blocks_to_copy:
            hold("no_chain", no_chain(source, target))
    return sorted(broken)


def _differ(hold: Any, name: str, values: Sequence[int], condition: Any) -> None:
    """Pairs of equal values, found by their last place: comparing all pairs would take too long."""
    last: dict[int, int] = {}
    for i, value in enumerate(values):
        if value in last:
            hold(name, condition(i, value, last[value], value))
        last[value] = i
