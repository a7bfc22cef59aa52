"""Laws on one call of schedule(): what it may decide, and the state it leaves for update().

`t` is a `views.Step`.  A law marked *chunked* or *prefill-first* binds in that order of phases only; which order a
configuration has is always concrete.
"""

from __future__ import annotations

from typing import Any

from spec.law import Kind, law
from spec.logic import Bool, Int, conj, disj, every, implies, neg, some, total
from spec.words import behind, cover, filled, grant, is_decode, lacks_at_least, queued, sequences, whole

Step = Any


def chunked(t: Step) -> bool:
    return bool(t.config.enable_chunked_prefill)


def tokens_left(t: Step) -> Int:
    return t.config.tokens - total(v.tokens for v in t.served)


def served_ids(t: Step) -> frozenset[str]:
    return frozenset(t.given)


# what holds between schedule() and update()


@law("M1", Kind.MID, origin="a write into a block the group does not hold; kernels rely on it")
def served_are_covered(t: Step) -> Bool:
    """between schedule and update every group with tokens runs and holds blocks for all it knows, private copies
    included"""
    running = {g.request_id for g in t.mid.running}
    return every(
        conj(v.group.request_id in running, v.group.held == cover(t.mid, v.group), neg(v.group.tail_shared))
        for v in t.served
    )


@law("M2", Kind.MID, origin="tables_cover, in mid-step")
def unserved_keep_blocks(t: Step) -> Bool:
    """between schedule and update a running group without tokens holds what a decode has computed or all it knows, a
    swapped one what is computed"""
    served = served_ids(t)
    return conj(
        every(
            conj(
                is_decode(g) if not chunked(t) else True,
                disj(g.held == filled(t.mid, g), g.held == cover(t.mid, g)),
            )
            for g in t.mid.running[:-1]
            if g.request_id not in served
        ),
        every(
            disj(conj(is_decode(g), g.held == filled(t.mid, g)), g.held == cover(t.mid, g))
            for g in t.mid.running[-1:]
            if g.request_id not in served
        ),
        every(g.held == filled(t.mid, g) for g in t.mid.swapped),
    )


@law("M3", Kind.MID, origin="two groups in mid-prompt: the junior one could starve the other of blocks")
def one_behind_after(t: Step) -> Bool:
    """after the plan only the most junior of running ++ swapped can still be in mid-prompt or mid-rebuild"""
    inside = [*t.mid.running, *t.mid.swapped]
    return every(_will_be_abreast(g, g.deficit - t.given.get(g.request_id, 0)) for g in inside[:-1])


def _will_be_abreast(g: Any, rest: Int) -> Bool:
    """It lacks nothing, or one token a branch."""
    return disj(rest == 0, conj(g.forked, rest == g.live))


@law("M4", Kind.MID, origin="the tokens of a step are written in one place and read in another")
def tokens_recorded(t: Step) -> Bool:
    """each group carries the tokens that the plan gives it, and no other group any"""
    return every(g.tokens == t.given.get(g.request_id, 0) for g in queued(t.mid))


@law("M5", Kind.MID, origin="needed by the induction")
def homes_are_filled(t: Step) -> Bool:
    """after the plan whoever has a home will have computed something there"""
    return every(g.deficit - t.given.get(g.request_id, 0) < whole(g) for g in [*t.mid.running, *t.mid.swapped])


# what schedule() may decide


@law("S1", Kind.STEP, origin="vLLM issue 5578 and the pull request that answers it")
def no_prefill_while_swapped(t: Step) -> Bool:
    """no new prefill while any swapped group remains"""
    if not t.admitted:
        return True
    last_return = max((i for i, verb in enumerate(t.verbs) if verb == "swap_in"), default=-1)
    return not t.mid.swapped and t.verbs.index("admit") > last_return


@law("S2", Kind.STEP, origin="vLLM pull request: preempted now, admitted now is thrashing")
def no_admission_after_preemption(t: Step) -> Bool:
    """a step that preempts neither swaps in nor admits"""
    return not t.victims or not (t.swapped_in or t.admitted)


@law("S3", Kind.STEP, origin="swap lists of one step are carried out in one order")
def swap_one_way(t: Step) -> Bool:
    """a step never swaps both out and in"""
    return not ("swap_out" in t.verbs and "swap_in" in t.verbs)


@law("S4", Kind.STEP, origin="chunked prefill keeps streams going (Sarathi)")
def decodes_first(t: Step) -> Bool:
    """chunked: every group that runs after the step was scheduled in it, decodes before prefills"""
    if not chunked(t):
        return True
    served = served_ids(t)
    return conj(
        all(g.request_id in served for g in t.mid.running),
        every(
            disj(is_decode(a.was), behind(b.was), _brought_in(t, b))
            for a, b in zip(t.served, t.served[1:], strict=False)
        ),
    )


def _brought_in(t: Step, v: Any) -> bool:
    """It was not running before the step: swapped in or admitted, after all that ran."""
    return all(v.was.request_id != g.request_id for g in t.before.running)


@law("S4p", Kind.STEP, origin="vLLM's prefill-first order")
def prefills_or_decodes(t: Step) -> Bool:
    """prefill-first: a step that admits runs no decode and computes each new prompt whole, and a step that runs no
    prefill, or any decode that was running, runs every running decode"""
    if chunked(t):
        return True
    served = served_ids(t)
    ran = {g.request_id for g in t.before.running}
    decoded = some(conj(is_decode(v.was), v.was.request_id in ran) for v in t.served)
    prefilled = some(behind(v.was) for v in t.served)
    admitted = {g.request_id for g in t.admitted}
    all_decode = every(disj(g.request_id in served, behind(g)) for g in t.mid.running)
    only_new = every(disj(v.was.request_id in admitted, behind(v.was)) for v in t.served)
    return conj(
        every(disj(g.forked, t.given.get(g.request_id, 0) == g.deficit) for g in t.admitted),
        implies(bool(admitted), only_new),
        implies(disj(decoded, neg(prefilled)), all_decode),
    )


@law("S5", Kind.STEP, origin="chunk limits tested on the wrong number")
def token_budget(t: Step) -> Bool:
    """scheduled tokens are at most max_num_batched_tokens"""
    return tokens_left(t) >= 0


@law("S6", Kind.STEP, origin="the first arrival sat swapped out while the last one ran")
def victims_are_junior(t: Step) -> Bool:
    """every group preempted or demoted in a step is junior to every group scheduled in it"""
    losers = [*(v.group for v in t.victims), *t.demoted]
    return every(v.was.arrival < g.arrival for v in t.served for g in losers)


@law("S7", Kind.STEP, origin="small requests overtook a large one")
def no_overtaking(t: Step) -> Bool:
    """groups swapped in or admitted are a prefix of their queue, in its order"""
    back = [g.request_id for g in t.swapped_in]
    new = [g.request_id for g in t.admitted]
    return conj(
        back == [g.request_id for g in t.before.swapped[: len(back)]],
        new == [g.request_id for g in t.before.waiting[: len(new)]],
    )


@law("S10", Kind.STEP, origin="an entry with no tokens, found by a mutant that survived")
def tokens_in_range(t: Step) -> Bool:
    """every scheduled group is scheduled once and gets at least 1 token and at most its deficit, and a piece that does
    not finish it leaves every branch its last token"""
    return conj(
        len(served_ids(t)) == len(t.served),
        every(
            conj(
                v.tokens >= 1,
                disj(v.tokens == v.was.deficit, v.tokens <= v.was.deficit - most_one(v.was)),
            )
            for v in t.served
        ),
    )


def most_one(g: Any) -> Int:
    """What a piece that does not finish the group leaves at least."""
    return lacks_at_least(g) if g.forked else 1


@law("S11", Kind.STEP, origin="budget left idle while a prompt waits")
def work_conserving(t: Step) -> Bool:
    """no prefill in the plan keeps a branch with a deficit above 1 while tokens remain"""
    left = tokens_left(t)
    return every(
        disj(v.tokens == v.was.deficit, left <= 0, conj(v.was.forked, v.was.deficit - v.tokens == v.was.live))
        for v in t.served
    )


@law("S11s", Kind.STEP, origin="swapped groups kept outside although they fit")
def head_of_swapped_is_taken(t: Step) -> Bool:
    """after a step that ran decodes or nothing, and preempted nobody, the head of swapped does not fit in the blocks,
    tokens and sequences left"""
    if t.victims or not t.mid.swapped:
        return True
    head = t.mid.swapped[0]
    stays_out = disj(
        grant(head, tokens_left(t)) <= 0,
        cover(t.mid, head) > t.mid.blocks.gpu_free,
        sequences(t.mid.running) + head.live > t.config.seqs,
    )
    return disj(stays_out, _prefill_step(t))


@law("S11w", Kind.STEP, origin="waiting groups kept outside although they fit")
def head_of_waiting_is_taken(t: Step) -> Bool:
    """when nobody was preempted and nothing is swapped, the head of waiting does not fit in the blocks less watermark,
    tokens and sequences left; prefill-first: unless the step owed the decodes their turn"""
    if t.victims or t.mid.swapped or not t.mid.waiting:
        return True
    head = t.mid.waiting[0]
    if chunked(t):
        return _stays_waiting(t, head, t.mid, tokens_left(t))
    if t.swapped_in or t.before.swapped:
        return True
    return disj(
        conj(_prefill_step(t), _stays_waiting(t, head, t.mid, tokens_left(t))),
        conj(neg(_prefill_step(t)), disj(_decodes_turn(t), _stays_waiting(t, head, t.before, t.config.tokens))),
    )


def _stays_waiting(t: Step, head: Any, s: Any, tokens: Int) -> Bool:
    """It cannot be admitted in this state out of these tokens."""
    given = grant(head, tokens)
    whole_prompts = not t.config.enable_chunked_prefill and not head.forked
    return disj(
        given <= 0,
        conj(whole_prompts, given < head.deficit),
        cover(s, head) + (t.config.watermark_blocks if s.running else 0) > s.blocks.gpu_free,
        sequences(s.running) + head.live > t.config.seqs,
    )


def _prefill_step(t: Step) -> Bool:
    """Prefill-first: a step that served a running prefill or admitted."""
    if chunked(t):
        return False
    ran = {g.request_id for g in t.before.running}
    return disj(bool(t.admitted), some(conj(behind(v.was), v.was.request_id in ran) for v in t.served))


def _decodes_turn(t: Step) -> Bool:
    """Prefill-first: the step before left decodes out."""
    if not t.before.running:
        return False
    return conj(t.before.decodes_owed, is_decode(t.before.running[0]))


@law("S13", Kind.STEP, origin="preemption although the last block had room")
def no_needless_preemption(t: Step) -> Bool:
    """the most senior victim would not fit in the blocks left at the end of the phase"""
    if not t.victims:
        return True
    return t.mid.blocks.gpu_free < cover(t.before, t.victims[-1].group)


@law("S14", Kind.STEP, origin="swapped work thrown away although there was room")
def no_needless_demotion(t: Step) -> Bool:
    """the most senior demoted group would not fit in the CPU blocks left, or nothing remains swapped, or a group senior
    to it was recomputed in the step"""
    if not t.demoted:
        return True
    oldest = t.demoted[-1]
    return disj(
        t.mid.blocks.cpu_free < filled(t.before, oldest),
        not t.mid.swapped,
        some(v.group.arrival < oldest.arrival for v in t.victims if v.mode == "recompute"),
    )


@law("S15", Kind.STEP, origin="preemption_mode=recompute with two branches: assertion")
def preferred_mode(t: Step) -> Bool:
    """a victim is preempted in the preferred mode unless others are swapped (then swap) or it exceeds the CPU (then
    recompute)"""
    return every(
        disj(
            conj(_prefers_recompute(t, v.group), not v.others_swapped),
            filled(t.before, v.group) > t.config.num_cpu_blocks,
        )
        if v.mode == "recompute"
        else disj(neg(_prefers_recompute(t, v.group)), v.others_swapped)
        for v in t.victims
    )


def _prefers_recompute(t: Step, g: Any) -> Bool:
    """It is recomputed where nothing speaks against it: as configured, else with one live branch."""
    mode = t.config.mode
    return g.live == 1 if mode is None else mode.value == "recompute"


@law("S16", Kind.STEP, origin="vLLM's watermark: admission leaves room for growth")
def watermark_kept(t: Step) -> Bool:
    """an admission while others run leaves at least the watermark free"""
    if not t.admitted or len(t.mid.running) < 2:
        return True
    return t.config.watermark_blocks <= t.mid.blocks.gpu_free


@law("S17", Kind.STEP, origin="a stream waits for newcomers one step at most")
def decodes_owed_are_run(t: Step) -> Bool:
    """prefill-first: a step that leaves decodes out, and no other, is followed by one that runs every decode"""
    if chunked(t):
        return True
    served = served_ids(t)
    skipped = some(conj(is_decode(g), g.request_id not in served) for g in t.mid.running)
    return conj(
        implies(skipped, t.mid.decodes_owed),
        implies(t.mid.decodes_owed, skipped),
        implies(_decodes_turn(t), neg(skipped)),
    )


@law("S18", Kind.STEP, origin="an empty step for ever: the engine hangs")
def never_idle(t: Step) -> Bool:
    """a step gives somebody a token unless nothing is unfinished"""
    return bool(t.served) or not t.before.groups


@law("S19", Kind.STEP, origin="a group was lost or invented by a plan")
def schedule_loses_nobody(t: Step) -> Bool:
    """schedule moves groups between queues and loses, invents or renames none"""
    return sorted(g.request_id for g in queued(t.before)) == sorted(g.request_id for g in queued(t.mid))


@law("S20", Kind.STEP, origin="a mutant that counts tokens as computed when they are planned")
def moves_keep_counts(t: Step) -> Bool:
    """schedule changes no group's length or branches; it raises the deficit of the groups that lose their KV to all
    they know, and changes no other deficit"""
    dropped = {g.request_id for g in t.demoted} | {v.group.request_id for v in t.victims if v.mode == "recompute"}
    return every(
        conj(
            g.known == t.was[g.request_id].known,
            g.branches == t.was[g.request_id].branches,
            g.live == t.was[g.request_id].live,
            g.forked == t.was[g.request_id].forked,
            g.max_tokens == t.was[g.request_id].max_tokens,
            g.arrival == t.was[g.request_id].arrival,
            g.deficit == (whole(g) if g.request_id in dropped else t.was[g.request_id].deficit),
        )
        for g in queued(t.mid)
        if g.request_id in t.was
    )


@law("L1", Kind.STEP, origin="recompute livelock; the hang behind a half-prefilled group")
def progress(t: Step) -> Bool:
    """chunked: every step gives the most senior unfinished group at least one token, and it is never preempted"""
    if not chunked(t) or not t.before.groups:
        return True
    head = queued(t.before)[0].request_id
    return conj(head in served_ids(t), all(v.group.request_id != head for v in t.victims))


@law("L1p", Kind.STEP, origin="the like of L1 in the other order")
def progress_in_two(t: Step) -> Bool:
    """prefill-first: of two steps in a row at least one gives the most senior unfinished group a token, and it is never
    preempted"""
    if chunked(t) or not t.before.groups:
        return True
    head = queued(t.before)[0]
    return conj(
        all(v.group.request_id != head.request_id for v in t.victims),
        disj(head.request_id in served_ids(t), conj(t.mid.decodes_owed, neg(_decodes_turn(t)))),
    )
