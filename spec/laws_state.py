"""Laws on one state.  All hold at step boundaries; those marked `mid` also between schedule() and update()."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from spec.law import Kind, law
from spec.logic import Bool, conj, disj, every, implies, neg, total
from spec.words import filled, generated, is_decode, measure, queued, sequences, whole

State = Any


@law("B1", Kind.STATE, mid=True, origin="PagedAttention: a lost block is lost for ever")
def blocks_conserved(s: State) -> Bool:
    """on each device free and held blocks together are the capacity"""
    return conj(
        s.blocks.gpu_free + total(g.held for g in s.running) == s.config.num_gpu_blocks,
        s.blocks.cpu_free + total(g.held for g in s.swapped) == s.config.num_cpu_blocks,
    )


@law("B2", Kind.STATE, mid=True, origin="vLLM issue 5578: swap space runs out")
def cpu_capacity(s: State) -> Bool:
    """CPU blocks never exceed capacity"""
    return conj(s.blocks.cpu_free >= 0, total(g.held for g in s.swapped) <= s.config.num_cpu_blocks)


@law("B2g", Kind.STATE, mid=True, origin="the like of B2 on the other device")
def gpu_capacity(s: State) -> Bool:
    """GPU blocks never exceed capacity"""
    return conj(s.blocks.gpu_free >= 0, total(g.held for g in s.running) <= s.config.num_gpu_blocks)


@law("B4", Kind.STATE, origin="blocks asked for too early or too late; the half-prefilled group that could not return")
def held_covers(s: State) -> Bool:
    """a running group that is behind holds blocks for all it knows, a decode for what is computed or all it knows, a
    swapped group for what is computed"""
    m = measure(s)
    return conj(
        every(disj(g.held == m.cover(g), conj(is_decode(g), g.held == m.filled(g))) for g in s.running),
        every(g.held == m.filled(g) for g in s.swapped),
    )


@law("B5", Kind.STATE, mid=True, origin="a swapped group marked ignored kept its CPU blocks")
def one_home(s: State) -> Bool:
    """a running and a swapped group hold at least one block, a waiting one holds none"""
    return conj(
        every(g.held >= 1 for g in s.running),
        every(g.held >= 1 for g in s.swapped),
        every(g.held == 0 for g in s.waiting),
    )


@law("Q1", Kind.STATE, mid=True, origin="a group in two queues, or in none")
def queues_partition(s: State) -> Bool:
    """every unfinished group is in exactly one queue, once, and its status says which"""
    ids = [g.request_id for g in queued(s)]
    return conj(
        sorted(ids) == sorted(s.groups),
        every(g.status.value == "running" for g in s.running),
        every(g.status.value == "swapped" for g in s.swapped),
        every(g.status.value == "waiting" for g in s.waiting),
    )


@law("Q2", Kind.STATE, mid=True, origin="the first arrival sat swapped out while the last one ran")
def seniority(s: State) -> Bool:
    """running ++ swapped ++ waiting is sorted by seniority"""
    ages = [g.arrival for g in queued(s)]
    return every(a < b for a, b in pairwise(ages))


@law("Q3", Kind.STATE, mid=True, origin="one too large group is admitted and preempted for ever")
def fits_alone(s: State) -> Bool:
    """every queued group could run to its end with the pool to itself, within max_model_len and max_num_seqs"""
    m = measure(s)
    return every(
        conj(
            m.peak(g) <= s.config.num_gpu_blocks,
            g.prompt_len + g.max_tokens <= s.config.max_model_len,
            g.n <= s.config.seqs,
        )
        for g in queued(s)
    )


@law("Q4", Kind.STATE, origin="a half-prefilled group in front of others was never swapped in: the engine hung")
def one_behind(s: State) -> Bool:
    """of running ++ swapped at most the most junior group is in mid-prompt or mid-rebuild"""
    inside = [*s.running, *s.swapped]
    return every(is_decode(g) for g in inside[:-1])


@law("Q5", Kind.STATE, mid=True, origin="one sibling finished, the group preempted: assertion")
def lockstep(s: State) -> Bool:
    """live branches have equal length: they fork together, and each lacks at least the token they sample together"""
    return every(
        conj(g.live <= g.deficit, g.known > g.prompt_len, g.live >= 1, g.live <= g.n)
        if g.forked
        else conj(g.deficit >= 1, g.known == g.prompt_len, g.live == g.n)
        for g in queued(s)
    )


@law("Q5b", Kind.STATE, mid=True, origin="needed by the induction")
def branches_are_listed(s: State) -> Bool:
    """a group lists its live branches, and before the fork the one that runs for all"""
    return every(len(g.branches) == (g.live if g.forked else 1) for g in queued(s))


@law("Q6", Kind.STATE, mid=True, origin="needed by the induction")
def counts_in_range(s: State) -> Bool:
    """no group lacks more than all it knows, and none that is queued has generated all its tokens"""
    return every(
        conj(g.prompt_len >= 1, g.deficit <= whole(g), generated(g) >= 0, generated(g) < g.max_tokens)
        for g in queued(s)
    )


@law("Q7", Kind.STATE, mid=True, origin="KV dropped but counted as computed")
def waiting_lack_all(s: State) -> Bool:
    """a waiting group lacks all it knows"""
    return every(conj(g.deficit == whole(g), neg(g.tail_shared)) for g in s.waiting)


@law("Q8", Kind.STATE, mid=True, origin="needed by the induction")
def shared_part(s: State) -> Bool:
    """what branches share for good is the full prompt blocks"""
    size = s.config.block_size
    return every(
        conj(
            g.shared_tokens == g.shared_blocks * size,
            g.shared_tokens <= g.prompt_len,
            g.prompt_len < g.shared_tokens + size,
        )
        for g in queued(s)
    )


@law("Q8t", Kind.STATE, mid=True, origin="needed by the induction")
def shared_tail(s: State) -> Bool:
    """several branches share the partly filled last prompt block until they first write to it, and no longer; until
    then the group holds nothing beyond it"""
    return every(
        implies(
            g.tail_shared,
            conj(
                g.forked and g.live > 1,
                g.known == g.prompt_len + 1,
                g.deficit == g.live,
                g.shared_tokens < g.prompt_len,
                g.held == filled(s, g),
            ),
        )
        for g in queued(s)
        if g.tail_shared is not False
    )


@law("Q9", Kind.STATE, origin="needed by the induction")
def idle_between_steps(s: State) -> Bool:
    """between steps no group is given tokens, and whoever has a home has computed something"""
    return conj(
        every(g.tokens == 0 for g in queued(s)),
        every(g.deficit < whole(g) for g in s.running),
        every(g.deficit < whole(g) for g in s.swapped),
    )


@law("S5s", Kind.STATE, mid=True, origin="swap-in was not charged for its sequences")
def sequence_budget(s: State) -> Bool:
    """live branches of running and swapped together, all n of a group that has not forked, are at most max_num_seqs"""
    return sequences(s.running) + sequences(s.swapped) <= s.config.seqs


@law("L4", Kind.STATE, mid=True, origin="newcomers overtook: the fairness that the report asks for")
def first_come(s: State) -> Bool:
    """groups get their first token in seniority order"""
    forked = [g.forked for g in queued(s)]
    return every(a or not b for a, b in pairwise(forked))
