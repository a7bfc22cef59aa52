"""Worlds for tests: a scheduler, requests, and a driver that checks the invariants after every step.

The checks here use formulas of their own, written from the meaning of the words, never the scheduler's.
Requests are written as in the case list: R(p=prompt_len, n=branches, m=max_tokens).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable

from engine.scheduler import Plan, Scheduler, SchedulerConfig, SequenceGroup, Status

Stop = Callable[[SequenceGroup, int], bool]


def world(
    gpu: int, cpu: int = 0, bs: int = 4, t: int | None = None, s: int | None = None, length: int = 1 << 20, **more
):
    """A scheduler with these capacities: blocks, block size, token budget, sequences, max_model_len."""
    if t is None and not more.get("enable_chunked_prefill", True):
        t = max(length, 64)
    return Scheduler(
        SchedulerConfig(
            num_gpu_blocks=gpu,
            num_cpu_blocks=cpu,
            block_size=bs,
            max_num_batched_tokens=t,
            max_num_seqs=s,
            max_model_len=length,
            **more,
        )
    )


def R(p: int, n: int = 1, m: int | None = None, id: str | None = None) -> SequenceGroup:  # noqa: N802
    """A request, named by its count if no id is given."""
    R.count += 1
    return SequenceGroup(id or f"r{R.count}", prompt_len=p, n=n, max_tokens=m)


R.count = 0


class Shadow:
    """Ghost contents of both pools: which token of which branch every slot holds.

    A prompt token is named by (group, position); a token after it by (group, branch, position).
    """

    def __init__(self, block_size: int) -> None:
        self.size = block_size
        self.gpu: dict[tuple[int, int], object] = {}
        self.cpu: dict[tuple[int, int], object] = {}

    def execute(self, plan: Plan) -> None:
        self._move(self.gpu, self.cpu, plan.blocks_to_swap_out)
        self._move(self.cpu, self.gpu, plan.blocks_to_swap_in)
        self._move(self.gpu, self.gpu, plan.blocks_to_copy)
        written: Counter = Counter()
        for row in plan.scheduled:
            assert len(row.slots) == row.end - row.start > 0
            for t, slot in zip(range(row.start, row.end), row.slots, strict=True):
                at = (slot // self.size, slot % self.size)
                assert at == (row.block_table[t // self.size], t % self.size), "a slot is not its table's"
                self.gpu[at] = name(row.group, row.branch, t)
                written[at] += 1
        assert not written or max(written.values()) == 1, "two tokens of a step share a slot"

    def _move(self, source: dict, target: dict, pairs: list[tuple[int, int]]) -> None:
        read = [(to, i, source.get((frm, i))) for frm, to in pairs for i in range(self.size)]
        for to, i, value in read:
            target[to, i] = value

    def check(self, group: SequenceGroup, lengths: dict[int, int]) -> None:
        """Every computed position of every table holds its own token."""
        pool = self.gpu if group.status is Status.RUNNING else self.cpu
        for branch, computed in lengths.items():
            for t in range(computed):
                at = (group.tables[branch][t // self.size], t % self.size)
                assert pool.get(at) == name(group, branch, t), f"{group} branch {branch} position {t}: {pool.get(at)}"


def name(group: SequenceGroup, branch: int, position: int) -> tuple:
    if position < group.prompt_len:
        return (group.request_id, position)
    return (group.request_id, branch, position)


def computed(group: SequenceGroup) -> dict[int, int]:
    """Tokens with KV of each live branch, from its counts: shared prompt blocks first, then tail after tail."""
    if group.status is Status.WAITING:
        return {}
    if not group.forked:
        return {0: group.known - group.deficit}
    bs_part = group.shared_tokens
    per_tail = group.known - bs_part
    left = bs_part + group.live * per_tail - group.deficit
    out = {}
    shared = min(left, bs_part)
    left -= shared
    for branch in group.branches:
        own = min(left, per_tail - 1) if shared == bs_part else 0
        left -= own
        out[branch] = shared + own
    assert left == 0
    return out


def check(s: Scheduler) -> None:
    """The invariants that hold at every step boundary."""
    c = s.config
    for pool, status in ((s.blocks.gpu, Status.RUNNING), (s.blocks.cpu, Status.SWAPPED)):
        refs = Counter(b for g in s.groups.values() if g.status is status for table in g.tables for b in table)
        assert [refs[b] for b in range(pool.capacity)] == pool.refs
        assert sorted(pool.free) == [b for b in range(pool.capacity) if refs[b] == 0]
        for g in s.groups.values():
            if g.status is status:
                assert g.held == len({b for table in g.tables for b in table})
    queued = [*s.running, *s.swapped, *s.waiting]
    assert [g.arrival for g in queued] == sorted(g.arrival for g in s.groups.values())
    for queue, status in ((s.running, Status.RUNNING), (s.swapped, Status.SWAPPED), (s.waiting, Status.WAITING)):
        assert all(g.status is status for g in queue)
    assert sum(g.live for g in [*s.running, *s.swapped]) <= c.seqs
    for g in queued:
        assert g.deficit >= 1
        lengths = computed(g)
        size = c.block_size
        if g.status is Status.WAITING:
            assert g.held == 0
            assert not any(g.tables)
        if g.status is Status.SWAPPED:
            assert all(len(g.tables[b]) == -(-n // size) for b, n in lengths.items())
        if g.status is Status.RUNNING:
            for b, n in lengths.items():
                assert -(-n // size) <= len(g.tables[b]) <= -(-g.known // size)
            if not g.forked or g.deficit > g.live:  # behind: it holds what it knows until it has caught up
                assert all(len(g.tables[b]) == -(-g.known // size) for b in g.branches)
    behind = [g for g in [*s.running, *s.swapped] if not g.forked or g.deficit > g.live]
    assert len(behind) <= 1
    assert not behind or behind[0] is [*s.running, *s.swapped][-1]


def check_plan(s: Scheduler, plan: Plan) -> None:
    """What must hold of a plan, seen before `update`."""
    assert plan.num_tokens == sum(r.end - r.start for r in plan.scheduled) <= s.config.tokens
    assert not (plan.blocks_to_swap_in and plan.blocks_to_swap_out)
    served = {g for g, _ in plan.groups}
    if plan.preempted:
        assert not any(a.verb in ("admit", "swap_in") for a in plan.log)
        assert max((g.arrival for g in served), default=-1) < min(g.arrival for g in plan.preempted)
    if s.swapped:
        assert not any(a.verb == "admit" for a in plan.log)
    if s.config.enable_chunked_prefill and s.running:
        assert served == set(s.running)


class Run:
    """Drives a scheduler step by step with all checks on, and remembers what happened."""

    def __init__(self, s: Scheduler, stop: Stop | None = None) -> None:
        self.s, self.stop = s, stop
        self.shadow = Shadow(s.config.block_size)
        self.verbs: Counter = Counter()
        self.ended: dict[str, SequenceGroup] = {}
        self.steps = 0
        self.tokens = 0

    def add(self, *groups: SequenceGroup) -> None:
        for group in groups:
            self.s.add(group)

    def step(self, between: Callable[[Plan], None] | None = None) -> Plan:
        had = self.s.has_unfinished()
        plan = self.s.schedule()
        assert bool(plan.groups) == had, "an empty step while work is unfinished"
        check_plan(self.s, plan)
        self.shadow.execute(plan)
        if between:
            between(plan)
        stopped = {
            (row.group.request_id, b)
            for row in plan.scheduled
            for b in row.draws
            if self.stop and self.stop(row.group, b)
        }
        self.left(self.s.update(plan, stopped))
        self.verbs.update(a.verb + (":" + a.detail if a.verb == "preempt" else "") for a in plan.log)
        self.steps += 1
        self.tokens += plan.num_tokens
        self.check()
        return plan

    def left(self, groups: Iterable[SequenceGroup]) -> None:
        """Remember who left; nobody does twice."""
        for group in groups:
            assert group.request_id not in self.ended, "a group left twice"
            self.ended[group.request_id] = group

    def check(self) -> None:
        check(self.s)
        for group in [*self.s.running, *self.s.swapped]:
            self.shadow.check(group, computed(group))

    def drain(self, limit: int = 100_000) -> Run:
        while self.s.has_unfinished():
            self.step()
            assert self.steps < limit, "no end in sight"
        assert_empty(self.s)
        return self


def assert_empty(s: Scheduler) -> None:
    """Nothing is left of anything."""
    assert not s.running
    assert not s.swapped
    assert not s.waiting
    assert not s.groups
    assert not s._aborting
    for pool in (s.blocks.gpu, s.blocks.cpu):
        assert sorted(pool.free) == list(range(pool.capacity))
        assert not any(pool.refs)


def random_world(rng: random.Random) -> Scheduler:
    """Any configuration: both orders, every mode, pools of 4 to 64 blocks, swap from none to ample."""
    chunked = rng.random() < 0.5
    bs = rng.choice([1, 2, 4, 16])
    length = rng.choice([16, 48, 128])
    t = rng.choice([1, 3, 8, 24, 200]) if chunked else rng.choice([length, length + 7, 300])
    gpu = rng.randint(4, 64)
    return world(
        gpu,
        rng.choice([0, 0, 1, 2, 4, 8, 16, 64, 256]),
        bs,
        t,
        rng.randint(1, min(t, 32)),
        length,
        enable_chunked_prefill=chunked,
        preemption_mode=rng.choice([None, "swap", "recompute"]),
        watermark_blocks=rng.choice([0, 0, 1, gpu // 8, gpu]),
    )


def random_request(rng: random.Random, s: Scheduler) -> SequenceGroup:
    limit = s.config.max_model_len
    p = rng.choice([1, rng.randint(1, 12), rng.randint(1, limit - 1)])
    m = rng.choice([None, 1, 2, rng.randint(1, limit)])
    return R(p=p, n=rng.choice([1, 1, 2, 3, rng.randint(1, 8)]), m=m)


def ids(groups: Iterable[SequenceGroup]) -> list[str]:
    return [g.request_id for g in groups]
