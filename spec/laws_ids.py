"""Laws on block ids, tables, slots and contents: concrete states only.

State laws here read the live scheduler (its pools), step laws a `views.Step`.
"""

from __future__ import annotations

from typing import Any

from spec.law import Kind, Tier, law
from spec.logic import cdiv

IDS = Tier.IDS


@law("B3", Kind.STATE, tier=IDS, mid=True, origin="a reference count of 2 for one holder, a leak, then livelock")
def refcounts_exact(s: Any) -> bool:
    """a block's reference count is the number of table entries naming it, and the free blocks are those nobody names"""
    return all(_counted(pool, queue) for pool, queue in ((s.blocks.gpu, s.running), (s.blocks.cpu, s.swapped)))


def _counted(pool: Any, queue: Any) -> bool:
    refs = [0] * pool.capacity
    for g in queue:
        for table in g.tables:
            for block in table:
                if not 0 <= block < pool.capacity:  # a negative one would count for the last
                    return False
                refs[block] += 1
    return pool.refs == refs and sorted(pool.free) == [block for block, count in enumerate(refs) if not count]


@law("B4t", Kind.STATE, tier=IDS, origin="tables too short for a write, or too long: blocks nobody uses")
def tables_cover(s: Any) -> bool:
    """a live branch's table covers what is computed and no more than is known (on the CPU exactly what is computed),
    others' are empty; held counts the distinct blocks"""
    size = s.config.block_size
    for on_gpu, queue in ((True, s.running), (False, s.swapped)):
        for g in queue:
            live = set(g.branches)
            if any(table for branch, table in enumerate(g.tables) if branch not in live):
                return False
            if g.held != len({block for table in g.tables for block in table}):
                return False
            for branch, done in computed(g):
                blocks = len(g.tables[branch])
                least = cdiv(done, size)
                if blocks < least or blocks > (cdiv(g.known, size) if on_gpu else least):
                    return False
                if on_gpu and g.deficit > g.live and g.forked and blocks != cdiv(g.known, size):
                    return False
    return not any(table for g in s.waiting for table in g.tables)


@law("B5t", Kind.STATE, tier=IDS, mid=True, origin="blocks of two groups confused")
def blocks_have_one_group(s: Any) -> bool:
    """no block is in the tables of two groups on one device"""
    for queue in (s.running, s.swapped):
        named = [block for g in queue for block in {block for table in g.tables for block in table}]
        if len(named) != len(set(named)):
            return False
    return True


@law("Q10", Kind.STATE, tier=IDS, origin="a decode that a step overlooks writes beyond its blocks")
def filed_as_due(s: Any) -> bool:
    """exactly the running decodes are in the calendar, each under the beat at which it needs blocks, and the sum of
    their live branches is kept"""
    calendar, size = s.calendar, s.config.block_size
    decodes = [g for g in s.running if g.forked and g.deficit == g.live]
    for g in decodes:
        spare = 0 if g.tail_shared else len(g.tables[g.branches[0]]) * size + 1 - g.known
        day = calendar.beat + spare
        if calendar.filed.get(g) != (day, g.live) or g not in calendar.days.get(day, ()):
            return False
    return bool(
        len(calendar.filed) == len(decodes) == sum(map(len, calendar.days.values()))
        and calendar.branches == sum(g.live for g in decodes)
        and calendar.roll(s.running) == decodes
    )


@law("S9", Kind.STEP, tier=IDS, origin="the copy list missed pairs; a swap-out kept after its demotion")
def plan_is_delta(t: Any) -> bool:
    """the plan's swap and copy lists are exactly the net change of the tables: live sources, free distinct targets; a
    group swapped out and demoted in one step leaves no entry"""
    old = t.was
    was_swapped = {g.request_id for g in t.before.swapped}
    was_running = {g.request_id for g in t.before.running}
    size = t.config.block_size
    out: set[tuple[int, int]] = set()
    back: set[tuple[int, int]] = set()
    copied: set[tuple[int, int]] = set()
    for g in t.mid.swapped:
        if g.request_id in was_running:
            for branch, done in computed(g):
                before = old[g.request_id].tables[branch][: cdiv(done, size)]
                out.update(zip(before, g.tables[branch], strict=True))
    arrived: dict[str, dict[int, set[int]]] = {}
    for g in t.mid.running:
        was = old[g.request_id]
        if was.tables == g.tables and g.request_id in was_running:
            continue
        for branch, done in computed(g):
            filled = cdiv(done, size)
            if g.request_id in was_swapped:
                goes = arrived.setdefault(g.request_id, {})
                for source, target in zip(was.tables[branch], g.tables[branch][:filled], strict=True):
                    goes.setdefault(source, set()).add(target)
            elif g.request_id in was_running:
                copied.update(
                    (a, b) for a, b in zip(was.tables[branch], g.tables[branch][:filled], strict=False) if a != b
                )
    moves = dict(t.plan.blocks_to_swap_in)
    for goes in arrived.values():
        for source, targets in goes.items():
            home = moves.get(source)
            if home not in targets:
                return False
            back.add((source, home))
            copied.update((home, target) for target in targets if target != home)
    sources = {source for source, _ in t.plan.blocks_to_copy}
    named = {block for g in t.mid.running for table in g.tables for block in table} if sources else set()
    if not sources <= named or not sources.isdisjoint(target for _, target in t.plan.blocks_to_copy):
        return False
    lists = (t.plan.blocks_to_swap_out, t.plan.blocks_to_swap_in, t.plan.blocks_to_copy)
    return all(
        len(pairs) == len(set(pairs)) == len({target for _, target in pairs}) and set(pairs) == expected
        for pairs, expected in zip(lists, (out, back, copied), strict=True)
    )


@law("S10r", Kind.STEP, tier=IDS, origin="positions skipped or computed twice")
def rows_are_in_order(t: Any) -> bool:
    """the rows of a plan are exactly the positions its tokens stand for, in order and without gap, each in its table's
    own slot"""
    size = t.config.block_size
    rows = list(t.plan.scheduled)
    at = 0
    for v in t.served:
        done = dict(computed(v.group))
        left = v.tokens
        seen: list[int] = []
        while at < len(rows) and rows[at].group.request_id == v.group.request_id:
            row = rows[at]
            at += 1
            table = v.group.tables[row.branch]
            begin = done.get(row.branch)
            if begin is None or row.branch in seen or row.end <= row.start:
                return False
            if seen:  # the shared prompt blocks are computed once, by the first branch
                begin = max(begin, v.group.shared_tokens)
            seen.append(row.branch)
            if row.start != begin or row.end > v.group.known or tuple(row.block_table) != table:
                return False
            if row.slots != [table[p // size] * size + p % size for p in range(row.start, row.end)]:
                return False
            left -= row.end - row.start
        if left != 0 or seen != sorted(seen):
            return False
    return at == len(rows)


@law("S12r", Kind.STEP, tier=IDS, origin="a chunk that was not the last one sampled")
def draws_when_caught_up(t: Any) -> bool:
    """a group's branches each draw one token, from the row that ends with their last token, exactly when its scheduled
    tokens are its whole deficit"""
    for v in t.served:
        rows = [row for row in t.plan.scheduled if row.group.request_id == v.group.request_id]
        drawn = [branch for row in rows for branch in row.draws]
        every_branch = list(v.group.branches) if v.group.forked else list(range(v.group.n))
        if drawn != (every_branch if v.tokens == v.was.deficit else []):
            return False
        if any(row.draws and row.end != v.group.known for row in rows):
            return False
    return True


@law("S21", Kind.STEP, tier=IDS, origin="metrics that do not add up")
def totals_add_up(t: Any) -> bool:
    """the plan's totals are the tokens of its decodes and of its prefills"""
    decodes = sum(v.tokens for v in t.served if v.was.forked and v.was.deficit == v.was.live)
    return bool(
        t.plan.num_decode_tokens == decodes and t.plan.num_prefill_tokens == sum(v.tokens for v in t.served) - decodes
    )


@law("B6", Kind.STEP, tier=IDS, origin="two branches wrote into one block")
def writes_are_exclusive(t: Any) -> bool:
    """a block written in this step has one owner, except full prompt blocks of one group, written once; no two tokens
    of a step share a slot"""
    size = t.config.block_size
    owners = [0] * t.config.num_gpu_blocks
    for g in t.mid.running:
        for table in g.tables:
            for block in table:
                owners[block] += 1
    slots: set[int] = set()
    count = 0
    for row in t.plan.scheduled:
        for position, slot in zip(range(row.start, row.end), row.slots, strict=True):
            if owners[slot // size] != 1 and position >= row.group.prompt_len // size * size:
                return False
        slots.update(row.slots)
        count += len(row.slots)
    return len(slots) == count


def computed(g: Any) -> list[tuple[int, int]]:
    """(branch, tokens with KV) of each live branch: the shared prompt blocks first, then tail after tail."""
    if not g.forked:
        return [(0, g.known - g.deficit)]
    tail = g.known - g.shared_tokens
    if g.deficit == g.live:
        return [(branch, g.known - 1) for branch in g.branches]
    left = g.shared_tokens + g.live * tail - g.deficit
    shared = min(left, g.shared_tokens)
    left -= shared
    out = []
    for branch in g.branches:
        own = min(left, tail - 1) if shared == g.shared_tokens else 0
        left -= own
        out.append((branch, shared + own))
    return out
