"""The small print: defaults, limits, counts, logs and messages, each to the exact number.

The laws say what a step may do; these say what the words beside it mean.  Each was a change of one line that nothing
else noticed.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from engine.scheduler import (
    Action,
    ConfigError,
    DuplicateError,
    Plan,
    PreemptionMode,
    ProtocolError,
    QueueCounts,
    RefusedError,
    Scheduler,
    SchedulerConfig,
    SequenceGroup,
    Status,
)
from engine.scheduler.blocks import BlockManager, BlockPool
from tests.worlds import R, Run, assert_empty, ids, world

# configuration


def config(**values: Any) -> SchedulerConfig:
    return SchedulerConfig(**{"num_gpu_blocks": 8, **values})


def test_the_defaults_are_these() -> None:
    c = config()
    assert (c.num_cpu_blocks, c.block_size, c.max_model_len, c.watermark_blocks) == (0, 16, 2048, 0)
    assert (c.tokens, c.seqs, c.mode, c.enable_chunked_prefill) == (2048, 256, None, True)
    assert (c.max_num_batched_tokens, c.max_num_seqs) == (2048, 256)


def test_absent_budgets_follow_the_order_and_each_other() -> None:
    assert config(max_model_len=5000).tokens == 2048
    assert config(max_model_len=5000, enable_chunked_prefill=False).tokens == 5000
    assert config(max_model_len=100, enable_chunked_prefill=False).tokens == 2048
    assert config(max_num_batched_tokens=7).seqs == 7
    assert config(max_num_batched_tokens=256).seqs == 256
    assert config(max_num_batched_tokens=257).seqs == 256


@pytest.mark.parametrize(("text", "mode"), [("swap", PreemptionMode.SWAP), ("recompute", PreemptionMode.RECOMPUTE)])
def test_a_mode_is_named_by_text_or_by_itself(text: str, mode: PreemptionMode) -> None:
    assert config(preemption_mode=text).mode is config(preemption_mode=mode).mode is mode
    assert str(mode) == f"PreemptionMode.{text.upper()}"


def test_no_other_mode_is_accepted() -> None:
    for wrong in ("drop", "SWAP", ""):
        with pytest.raises(
            ConfigError, match=f"preemption_mode is {wrong!r}; allowed are 'swap', 'recompute' and None"
        ):
            config(preemption_mode=wrong)


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("num_gpu_blocks", 1),
        ("num_cpu_blocks", 0),
        ("block_size", 1),
        ("max_model_len", 2),
        ("max_num_batched_tokens", 1),
        ("max_num_seqs", 1),
        ("watermark_blocks", 0),
    ],
)
def test_each_value_has_a_least_one(name: str, least: int) -> None:
    more = {"max_num_seqs": 1} if name == "max_num_batched_tokens" else {}
    assert getattr(config(**more, **{name: least}), name) == least
    with pytest.raises(ConfigError, match=f"{name} is {least - 1}; it must be at least {least}"):
        config(**{"max_num_seqs": 1, **more, name: least - 1})
    for wrong in (1.5, "3", True, False):
        with pytest.raises(ConfigError, match=f"{name} is .*; it must be an int"):
            config(**{"max_num_seqs": 1, **more, name: wrong})


def test_the_limits_of_the_start_check_are_exact() -> None:
    assert config(max_num_seqs=9, max_num_batched_tokens=9).seqs == 9
    with pytest.raises(ConfigError, match=r"max_num_seqs \(10\) exceeds max_num_batched_tokens \(9\)"):
        config(max_num_seqs=10, max_num_batched_tokens=9)
    late: dict[str, Any] = {"enable_chunked_prefill": False, "max_model_len": 32}
    assert config(max_num_batched_tokens=32, **late).tokens == 32
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(31\) is below max_model_len \(32\)"):
        config(max_num_batched_tokens=31, **late)
    assert config(max_num_batched_tokens=31, max_model_len=32).tokens == 31


# a group


def test_a_new_group_is_this() -> None:
    g = SequenceGroup("a", 5)
    assert (g.n, g.max_tokens, g.arrival, g.live, g.known, g.deficit) == (1, None, -1, 1, 5, 5)
    assert (g.shared_blocks, g.shared_tokens, g.forked, g.tail_shared) == (0, 0, False, False)
    assert (g.held, g.tokens, g.branches, g.tables, g.num_preemptions) == (0, 0, [0], [[]], 0)
    assert g.status is Status.WAITING
    assert (g.generated, g.is_decode, g.whole) == (0, False, 5)
    assert repr(g) == "<SequenceGroup 'a' prefill known=5 deficit=5 live=1 held=0>"


def test_a_decode_says_so() -> None:
    run = Run(world(8))
    g = R(p=5, n=2, m=4, id="a")
    run.add(g)
    run.step()
    assert repr(g) == "<SequenceGroup 'a' decode known=6 deficit=2 live=2 held=2>"
    assert (g.generated, g.is_decode) == (1, True)


def test_the_preferred_mode_is_the_configured_one_else_by_width() -> None:
    one, two = SequenceGroup("a", 1), SequenceGroup("b", 1, 2)
    assert one.prefers(None) is PreemptionMode.RECOMPUTE
    assert two.prefers(None) is PreemptionMode.SWAP
    for mode in PreemptionMode:
        assert one.prefers(mode) is two.prefers(mode) is mode


@pytest.mark.parametrize(("live", "n"), [(1, 1), (2, 2), (3, 3), (2, 4)])
@pytest.mark.parametrize(("prompt", "known"), [(4, 5), (4, 6), (5, 6), (7, 9), (8, 9), (3, 4), (9, 13)])
def test_tokens_with_kv_and_rows_follow_from_the_deficit(live: int, n: int, prompt: int, known: int) -> None:
    """Shared prompt blocks first, then tail after tail; every piece goes on where the one before ended."""
    g = SequenceGroup("a", prompt, n)
    g.shared_blocks, g.shared_tokens = prompt // 4, prompt // 4 * 4
    g.forked, g.live, g.known, g.branches = True, live, known, list(range(live))
    tail = known - g.shared_tokens
    assert g.whole == g.shared_tokens + live * tail
    for given in itertools.product((1, 2, 3, 100), repeat=3):
        g.forget()
        assert g.deficit == g.whole
        done = [0] * live
        for tokens in given:
            tokens = g.piece(tokens)
            if tokens <= 0:
                continue
            assert tokens == g.deficit or tokens <= g.deficit - live
            last = tokens == g.deficit
            rows = list(g.rows(tokens))
            assert sum(end - start for _, start, end in rows) == tokens
            for index, start, end in rows:
                assert start == max(done[index], g.shared_tokens if index else 0)
                assert start < end <= (known if last else known - 1)
                done[index] = end
            if last:
                assert done == [known] * live
                break
            g.deficit -= tokens
            shared = done[0] if done[0] < g.shared_tokens else g.shared_tokens
            assert g.computed() == [max(one, shared) for one in done]


def test_a_piece_is_what_is_lacked_or_what_there_is() -> None:
    g = SequenceGroup("a", 5)
    assert [g.piece(budget) for budget in (0, 1, 4, 5, 9)] == [0, 1, 4, 5, 5]
    g.forked, g.live, g.deficit = True, 3, 8
    assert [g.piece(budget) for budget in (0, 1, 5, 6, 7, 8, 9)] == [0, 1, 5, 5, 5, 8, 8]


# refusal


def fits(p: int, n: int, m: int, blocks: int, size: int) -> bool:
    """Whether a group alone fits when it has computed all but its last token: by laying its blocks out."""
    shared = p // size
    computed = p if m <= 1 else p + m - 1
    owners = 1 if m <= 1 else n
    return shared + owners * (-(-computed // size) - shared) <= blocks


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_max_tokens_is_the_most_that_fits_and_no_more(n: int, size: int) -> None:
    for p, blocks, length in itertools.product(range(1, 10), (1, 2, 3, 5, 8), (8, 12)):
        s = world(blocks, bs=size, length=length, t=16, s=8)
        possible = [m for m in range(1, length - p + 1) if fits(p, n, m, blocks, size)]
        for asked in (None, 1, 2, 3, 50):
            group = R(p=p, n=n, m=asked)
            wanted = max(possible, default=0) if asked is None else min(asked, length - p)
            if p >= length or wanted not in possible:
                with pytest.raises(RefusedError):
                    s.check(group)
                with pytest.raises(RefusedError):
                    s.add(group)
                assert (group.max_tokens, s.has_unfinished(), list(s.waiting)) == (asked, False, [])
                continue
            assert s.check(group) == wanted
            assert (group.max_tokens, group.arrival) == (asked, -1)
            assert s.add(group) is group
            assert group.max_tokens == wanted
            assert s.abort(group.request_id)


@pytest.mark.parametrize(
    ("group", "message", "reason"),
    [
        ({"p": 0}, "the prompt is empty; it must have at least 1 token", "empty_prompt"),
        ({"p": 1, "n": 0}, "n is 0; it must be at least 1", "n"),
        ({"p": 1, "m": 0}, "max_tokens is 0; it must be at least 1", "max_tokens"),
        ({"p": 8}, r"the prompt has 8 tokens, .* max_model_len \(8\); at most 7 are allowed", "max_model_len"),
        ({"p": 1, "n": 5}, "n is 5 but max_num_seqs is 4", "max_num_seqs"),
        (
            {"p": 3, "n": 2, "m": 3},
            r"\(prompt 3, n 2, max_tokens 3\) alone needs 4 KV cache blocks but the pool has 3",
            "num_gpu_blocks",
        ),
    ],
)
def test_a_refusal_names_the_numbers_and_the_limit(group: dict, message: str, reason: str) -> None:
    s = world(3, bs=4, length=8, t=8, s=4)
    with pytest.raises(RefusedError, match=message) as refused:
        s.add(R(**group))
    assert reason in vars(refused.value).values()


def test_the_largest_that_is_accepted_is_accepted() -> None:
    s = world(4, bs=4, length=8, t=8, s=4)
    for group in (R(p=7), R(p=1, n=4, m=1), R(p=1, m=1), R(p=3, n=2, m=3)):
        s.add(group)
    assert [g.max_tokens for g in s.waiting] == [1, 1, 1, 3]
    assert [g.arrival for g in s.waiting] == [0, 1, 2, 3]


def test_an_id_can_be_used_again_only_after_its_group_has_left() -> None:
    s = world(4)
    s.add(R(p=1, m=1, id="a"))
    with pytest.raises(DuplicateError):
        s.add(R(p=1, m=1, id="a"))
    assert len(s.waiting) == 1
    s.update(s.schedule())
    s.add(R(p=1, m=1, id="a"))
    assert [g.arrival for g in s.waiting] == [1]


def test_a_group_is_used_once_whichever_it_was() -> None:
    s = world(8)
    groups = [s.add(R(p=1, m=1)) for _ in range(3)]
    s.update(s.schedule())
    for group in groups:
        with pytest.raises(RefusedError, match="was added before"):
            s.add(group)
    assert not s.has_unfinished()


# blocks


def test_a_pool_hands_out_what_it_has_and_says_what_is_wrong() -> None:
    pool = BlockPool("CPU", 2)
    assert (pool.name, pool.capacity, sorted(pool.free), pool.refs) == ("CPU", 2, [0, 1], [0, 0])
    a, b = pool.take(), pool.take()
    assert (a, b) == (0, 1)
    with pytest.raises(MemoryError, match="no free block on the CPU: 2 of 2 are referenced"):
        pool.take()
    pool.share(a)
    assert pool.refs == [2, 1]
    pool.drop(a)
    assert (pool.refs, pool.free) == ([1, 1], [])
    pool.drop(a)
    assert (pool.refs, pool.free) == ([0, 1], [0])
    with pytest.raises(ValueError, match="CPU block 0 is free and cannot be shared"):
        pool.share(a)
    with pytest.raises(ValueError, match="CPU block 0 is free already"):
        pool.drop(a)
    pool.share(b)
    pool.drop(b)
    assert pool.take() == a
    assert pool.refs == [1, 1]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_announced_sizes_are_what_is_taken_at_every_piece_of_a_rebuild(n: int, size: int) -> None:
    """A group is preempted by hand after each piece of its rebuild, and what it was said to take is what it takes."""
    for p, known in itertools.product((1, 2, 3, 4, 5, 12), (1, 2, 3)):
        whole = p // size * size + n * (p + known - p // size * size)
        for deficit in range(n, whole):
            blocks = BlockManager(size, 40, 40)
            g = SequenceGroup("a", p, n)
            g.shared_blocks, g.shared_tokens = p // size, p // size * size
            g.forked, g.branches, g.tables, g.known = True, list(range(n)), [[] for _ in range(n)], p + known
            assert g.whole == whole
            g.deficit = deficit
            cover, size_there = blocks.cover(g), blocks.swap_size(g)
            blocks.admit(g)
            assert (g.held, 40 - blocks.gpu_free, blocks.need(g)) == (cover, cover, 0)
            assert len({block for table in g.tables for block in table}) == cover
            moves = blocks.swap_out(g)
            assert (g.held, 40 - blocks.cpu_free, blocks.gpu_free) == (size_there, size_there, 40)
            assert len(moves) == len({there for _, there in moves}) == size_there
            assert [len(table) for table in g.tables] == [-(-done // size) for done in g.computed()]
            home, copies = blocks.swap_in(g)
            assert (g.held, 40 - blocks.gpu_free, blocks.cpu_free) == (cover, cover, 40)
            assert (len(home), copies) == (size_there, [])


# plans, logs and counts


def test_a_plan_counts_and_copies_itself() -> None:
    run = Run(world(8, t=6, s=3))
    run.add(R(p=5, n=2, m=3, id="a"), R(p=4, m=2, id="b"))
    plan = run.s.schedule()
    assert (plan.step, plan.num_tokens, plan.num_prefill_tokens, plan.num_decode_tokens) == (0, 6, 6, 0)
    assert not plan.is_empty
    assert plan.to_dict() == {
        "step": 0,
        "scheduled": [
            ("a", 0, 0, 5, [0, 1], [0, 1, 2, 3, 4], (0, 1)),
            ("b", 0, 0, 1, [2], [8], ()),
        ],
        "blocks_to_swap_out": [],
        "blocks_to_swap_in": [],
        "blocks_to_copy": [],
        "log": [("add", "a", 0, ""), ("add", "b", 0, ""), ("admit", "a", 2, ""), ("admit", "b", 1, "")],
        "groups": [("a", 5), ("b", 1)],
        "preempted": [],
        "finished": [],
    }
    run.s.update(plan)
    assert plan.log[4:] == [("fork", "a", 0, "2")]
    second = run.s.schedule()
    assert (second.step, second.num_tokens, second.num_prefill_tokens, second.num_decode_tokens) == (1, 5, 3, 2)
    assert second.log == [("grow", "a", 1, "")]
    assert second.blocks_to_copy == [(1, 3)]
    run.s.update(second, stopped={("a", 1)})
    assert second.log[1:] == [("finish_branch", "a", 0, "1")]
    third = run.s.schedule()
    departed = run.s.update(third)
    assert ids(departed) == ["a", "b"]
    assert third.log == [("grow", "b", 1, ""), ("finish", "a", 2, ""), ("finish", "b", 2, "")]
    last = run.s.schedule()
    assert (last.is_empty, last.step, ids(last.finished), last.log) == (True, 3, ["a", "b"], [])


def test_an_empty_scheduler_makes_empty_plans() -> None:
    s = world(4)
    plan = s.schedule()
    assert (plan.is_empty, plan.num_tokens, plan.groups, plan.scheduled) == (True, 0, [], [])
    assert s.update(plan) == []
    assert not s.has_unfinished()
    assert s.schedule().step == 1
    assert Plan(3).step == 3
    assert Action("add", "a") == ("add", "a", 0, "")


def test_counts_tell_queues_and_blocks_in_use() -> None:
    run = Run(world(6, cpu=4, preemption_mode="swap"))
    assert run.s.counts() == QueueCounts(0, 0, 0, 0, 0)
    run.add(R(p=7, m=12, id="a"), R(p=7, m=12, id="b"), R(p=16, m=1, id="c"))
    assert run.s.counts() == QueueCounts(0, 0, 3, 0, 0)
    run.step()
    assert run.s.counts() == QueueCounts(2, 0, 1, 4, 0)
    while not run.s.swapped:
        run.step()
    assert run.s.counts() == QueueCounts(1, 1, 1, 4, 3)
    assert run.s.running[0].num_preemptions == 0
    assert run.s.swapped[0].num_preemptions == 1
    run.drain()
    assert run.s.counts() == QueueCounts(0, 0, 0, 0, 0)


def test_preemptions_of_a_group_are_counted() -> None:
    s = world(6, cpu=0)
    groups = [s.add(R(p=p, m=m, id=name)) for name, p, m in (("a", 1, 24), ("b", 8, 5), ("c", 4, 16))]
    preempted: list[str] = []
    while s.has_unfinished():
        plan = s.schedule()
        preempted += ids(plan.preempted)
        s.update(plan)
    assert [g.num_preemptions for g in groups] == [preempted.count(name) for name in "abc"]
    assert max(g.num_preemptions for g in groups) > 1


def preempting(mode: str, cpu: int = 8) -> tuple[Plan, SequenceGroup]:
    """The plan that first preempts, and the victim."""
    s = world(6, cpu=cpu, preemption_mode=mode)
    victim = R(p=7, n=2, m=6, id="b")
    s.add(R(p=7, m=14, id="a"))
    s.add(victim)
    while True:
        plan = s.schedule()
        if plan.preempted:
            return plan, victim
        s.update(plan)


def test_a_preemption_is_logged_with_its_mode_and_the_blocks_it_gives_and_moves() -> None:
    plan, victim = preempting("swap")
    entries = [entry for entry in plan.log if entry.request_id == "b"]
    assert [entry.verb for entry in entries] == ["preempt", "swap_out"]
    assert entries[0].detail == "swap"
    assert entries[1].blocks == len(plan.blocks_to_swap_out) == victim.held > 0
    assert entries[0].blocks == len({source for source, _ in plan.blocks_to_swap_out})
    plan, victim = preempting("recompute")
    entries = [entry for entry in plan.log if entry.request_id == "b"]
    assert [(entry.verb, entry.detail) for entry in entries] == [("preempt", "recompute")]
    assert entries[0].blocks > 0
    assert ids(plan.preempted) == ["b"]
    assert (victim.held, victim.status, victim.deficit) == (0, Status.WAITING, victim.whole)


def test_a_swap_in_and_a_demotion_are_logged_with_their_blocks() -> None:
    run = Run(world(7, cpu=3, bs=2, t=8, s=5, length=16, preemption_mode="swap"))
    run.add(*(R(p=2, n=n, m=7, id=name) for name, n in zip("abcd", (1, 2, 1, 1), strict=True)))
    seen = set()
    while run.s.has_unfinished():
        plan = run.s.schedule()
        for entry in plan.log:
            if entry.verb in ("demote", "swap_in"):
                seen.add(entry.verb)
                assert entry.blocks > 0
        back = sum(entry.blocks for entry in plan.log if entry.verb == "swap_in")
        assert back >= len(plan.blocks_to_swap_in)
        copied = plan.to_dict()
        for name in ("blocks_to_swap_out", "blocks_to_swap_in", "blocks_to_copy", "log"):
            assert copied[name] == getattr(plan, name)
        run.s.update(plan)
    assert seen == {"demote", "swap_in"}


# the protocol of a step


def test_plans_are_made_and_updated_in_turn() -> None:
    s = world(4)
    s.add(R(p=1, m=2, id="a"))
    plan = s.schedule()
    with pytest.raises(ProtocolError, match=r"schedule\(\) called before the plan of step 0 was updated"):
        s.schedule()
    with pytest.raises(ProtocolError, match=r"the plan of step 7 is not under way \(step 0 is\)"):
        s.update(Plan(7))
    with pytest.raises(ProtocolError, match="is not under way"):
        s.fail(Plan(7))
    s.update(plan)
    for late in (s.update, s.fail):
        with pytest.raises(ProtocolError, match=r"the plan of step 0 is not under way \(none is\)"):
            late(plan)


def test_an_abort_in_mid_step_waits_for_update_and_discards_what_was_computed() -> None:
    s = world(8)
    a, b = s.add(R(p=4, m=4, id="a")), s.add(R(p=4, m=4, id="b"))
    plan = s.schedule()
    assert s.abort("b")
    assert not s.abort("b")
    assert not s.abort("nobody")
    assert (b.status, len(s.running), b.known) == (Status.RUNNING, 2, 4)
    assert ids(s.update(plan)) == ["b"]
    assert (b.status, b.known, a.known) == (Status.ABORTED, 4, 5)
    assert plan.log[-1] == ("abort", "b", 1, "")
    assert s.blocks.gpu_free == 7
    assert s.abort("a")
    assert (a.status, s.has_unfinished(), s.blocks.gpu_free) == (Status.ABORTED, False, 8)
    last = s.schedule()
    assert ids(last.finished) == ["b", "a"]
    assert last.log == [("abort", "a", 1, "")]


def test_a_group_aborted_and_failed_in_one_step_leaves_once_as_aborted() -> None:
    for end in ("update", "fail"):
        s = world(8)
        a = s.add(R(p=4, m=4, id="a"))
        plan = s.schedule()
        s.abort("a")
        departed = s.update(plan, failed={"a"}) if end == "update" else s.fail(plan)
        assert ids(departed) == ["a"]
        assert a.status is Status.ABORTED


def test_a_group_whose_sampling_failed_leaves_and_the_others_go_on() -> None:
    s = world(8)
    a, b = s.add(R(p=4, m=4, id="a")), s.add(R(p=4, m=4, id="b"))
    plan = s.schedule()
    assert ids(s.update(plan, failed={"a", "nobody"})) == ["a"]
    assert (a.status, a.known, b.known, b.is_decode) == (Status.FAILED, 4, 5, True)
    assert ids(s.schedule().finished) == ["a"]


@pytest.mark.parametrize("named", [None, ["a"], [], ["c"], ["nobody"]])
def test_a_failed_step_takes_the_named_groups_and_computes_the_others_again(named: list[str] | None) -> None:
    s = world(5, cpu=4, preemption_mode="swap")
    for name in "abc":
        s.add(R(p=7, m=6, id=name))
    while not s.swapped:
        s.update(s.schedule())
    plan = s.schedule()
    departed = s.fail(plan, named)
    assert ids(departed) == (ids(g for g, _ in plan.groups) if named is None else [n for n in named if n in "abc"])
    assert all(g.status is Status.FAILED for g in departed)
    assert (list(s.running), list(s.swapped)) == ([], [])
    assert ids(s.waiting) == [name for name in "abc" if name not in ids(departed)]
    assert all((g.deficit, g.tokens, g.held, g.tail_shared) == (g.whole, 0, 0, False) for g in s.waiting)
    assert (s.blocks.gpu_free, s.blocks.cpu_free) == (5, 4)
    Run(s).drain()


# the end of a branch


def test_only_a_branch_that_drew_and_is_named_ends() -> None:
    s = world(16)
    g = s.add(R(p=4, n=3, m=6, id="a"))
    s.update(s.schedule(), stopped={("a", 1), ("b", 0), ("a", 7)})
    assert (g.branches, g.live, g.deficit, g.known) == ([0, 2], 2, 2, 5)
    assert g.tables[1] == []
    s.update(s.schedule(), stopped={("a", 1)})
    assert (g.branches, g.deficit) == ([0, 2], 2)
    assert ids(s.update(s.schedule(), stopped={("a", 0), ("a", 2)})) == ["a"]
    assert g.status is Status.FINISHED
    assert s.blocks.gpu_free == 16


@pytest.mark.parametrize("m", [1, 2, 5])
@pytest.mark.parametrize("n", [1, 3])
def test_a_group_ends_with_its_last_token_and_not_before(n: int, m: int) -> None:
    run = Run(world(16))
    g = R(p=5, n=n, m=m)
    run.add(g)
    for _ in range(m):
        assert g.status is not Status.FINISHED
        run.step()
    assert g.status is Status.FINISHED
    assert g.generated == m


def test_the_tail_is_shared_while_two_branches_have_not_written() -> None:
    for p, n, shared in ((5, 2, True), (4, 2, False), (5, 1, False)):
        s = world(16)
        g = s.add(R(p=p, n=n, m=6))
        s.update(s.schedule())
        assert g.tail_shared is shared
        s.update(s.schedule())
        assert g.tail_shared is False
    s = world(16)
    g = s.add(R(p=5, n=3, m=6, id="a"))
    s.update(s.schedule(), stopped={("a", 0)})
    assert (g.tail_shared, g.branches) == (True, [1, 2])
    s = world(16)
    g = s.add(R(p=5, n=3, m=6, id="a"))
    s.update(s.schedule(), stopped={("a", 0), ("a", 1)})
    assert (g.tail_shared, g.branches) == (False, [2])


# orders and limits


def test_prefill_first_gives_decodes_their_turn_after_each_prefill_step() -> None:
    s = Scheduler(SchedulerConfig(num_gpu_blocks=64, block_size=4, max_model_len=32, enable_chunked_prefill=False))
    s.add(R(p=4, m=8, id="a"))
    turns = []
    for i in range(6):
        plan = s.schedule()
        turns.append(([g.request_id for g, _ in plan.groups], s.decodes_owed))
        s.update(plan)
        s.add(R(p=4, m=1, id=f"new{i}"))
    assert turns == [
        (["a"], False),
        (["new0"], True),
        (["a"], False),
        (["new1", "new2"], True),
        (["a"], False),
        (["new3", "new4"], True),
    ]


@pytest.mark.parametrize(("watermark", "admitted"), [(0, 3), (1, 2), (4, 1), (99, 1)])
def test_the_watermark_binds_only_while_others_run(watermark: int, admitted: int) -> None:
    s = world(9, watermark_blocks=watermark)
    for _ in range(3):
        s.add(R(p=12, m=1))
    assert len(s.schedule().groups) == admitted


@pytest.mark.parametrize("watermark", [0, 1, 9])
def test_a_group_that_needs_the_whole_pool_is_admitted_when_nothing_runs(watermark: int) -> None:
    s = world(3, watermark_blocks=watermark)
    s.add(R(p=12, m=1))
    assert len(s.schedule().groups) == 1


def test_a_scheduler_uses_the_blocks_that_it_is_given() -> None:
    c = config(block_size=4)
    blocks = BlockManager(4, 8, 0)
    assert Scheduler(c, blocks).blocks is blocks
    own = Scheduler(c).blocks
    assert (own.gpu_free, own.cpu_free) == (8, 0)


def drain(s: Scheduler) -> None:
    while s.has_unfinished():
        s.update(s.schedule())
    assert_empty(s)


def rebuilding_beside_a_decode() -> tuple[Scheduler, SequenceGroup, SequenceGroup]:
    """Prefill-first: A decodes, and B, whose rebuild takes two steps, has just had the first of them."""
    s = world(12, bs=2, t=11, s=8, length=11, enable_chunked_prefill=False, preemption_mode="recompute")
    s.add(R(p=5, m=6, id="x"))
    a, b = s.add(R(p=1, m=10, id="a")), s.add(R(p=1, n=3, m=5, id="b"))
    while not b.num_preemptions:
        s.update(s.schedule())
    s.abort("x")
    plan = s.schedule()
    assert [(g.request_id, tokens) for g, tokens in plan.groups] == [("b", 11)]
    s.update(plan)
    assert (a.is_decode, b.is_decode, b.deficit, s.decodes_owed) == (True, False, 4, True)
    return s, a, b


def test_a_rebuild_in_two_pieces_lets_decodes_have_their_turn_between() -> None:
    s, _, _ = rebuilding_beside_a_decode()
    for served, owed in ((["a"], False), (["b"], True), (["a"], False)):
        plan = s.schedule()
        assert (ids(g for g, _ in plan.groups), s.decodes_owed) == (served, owed)
        s.update(plan)
    drain(s)


def test_a_turn_owed_to_a_stream_that_has_left_is_not_an_empty_step() -> None:
    s, _, _ = rebuilding_beside_a_decode()
    s.abort("a")
    plan = s.schedule()
    assert ids(g for g, _ in plan.groups) == ["b"]
    s.update(plan)
    drain(s)


def test_a_swapped_group_that_is_aborted_gives_its_blocks_back() -> None:
    s = world(6, cpu=4, preemption_mode="swap")
    s.add(R(p=7, m=14, id="a"))
    b = s.add(R(p=7, m=12, id="b"))
    while not s.swapped:
        s.update(s.schedule())
    assert s.blocks.cpu_free == 4 - b.held < 4
    assert s.abort("b")
    assert (list(s.swapped), s.blocks.cpu_free, b.held, b.status) == ([], 4, 0, Status.ABORTED)
    drain(s)
