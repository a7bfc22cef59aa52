"""Laws on a step together with what update() made of it, and on whole runs.  `r` is a `views.Round`."""

from __future__ import annotations

from typing import Any

from spec.law import Kind, law, over_runs
from spec.logic import Bool, Int, conj, disj, every, implies
from spec.words import lexically_less, queued, remaining_work

Round = Any


@law("N1", Kind.ROUND, origin="a group that can never come back was dropped in silence")
def nothing_lost(r: Round) -> Bool:
    """a group leaves only by finish, abort or fail, and then it is gone"""
    return set(r.after.groups) == {one for one in r.step.mid.groups if one not in r.departed}


@law("N2", Kind.ROUND, origin="a mutant whose update moved a bystander")
def update_moves_nobody(r: Round) -> Bool:
    """update takes groups out of their queues and changes nothing else about their order"""
    return all(
        [g.request_id for g in after] == [g.request_id for g in mid if g.request_id not in r.departed]
        for mid, after in (
            (r.step.mid.running, r.after.running),
            (r.step.mid.swapped, r.after.swapped),
            (r.step.mid.waiting, r.after.waiting),
        )
    )


@law("S12", Kind.ROUND, origin="a chunk that was not the last one sampled")
def samples_when_caught_up(r: Round) -> Bool:
    """a group grows by one token a branch exactly when its scheduled tokens were its whole deficit; else it lacks as
    many fewer as it was given"""
    return every(
        _advanced(r.step.now[g.request_id], g, r.step.given.get(g.request_id, 0))
        for g in queued(r.after)
        if g.request_id in r.step.now
    )


def _advanced(old: Any, new: Any, tokens: Int) -> Bool:
    grew = conj(new.known == old.known + 1, new.deficit == new.live, new.forked)
    kept = conj(
        new.known == old.known,
        new.deficit == old.deficit - tokens,
        new.live == old.live,
        new.forked == old.forked,
        new.held == old.held,
    )
    return conj(implies(old.deficit == tokens, grew), disj(old.deficit == tokens, kept))


@law("N3", Kind.ROUND, origin="a finished branch went on; a branch that was there no longer, without a word")
def branches_end_as_logged(r: Round) -> Bool:
    """a fork makes all n branches, and from then on a branch leaves only as the log says"""
    ended = [(request_id, detail) for verb, request_id, _, detail in r.step.plan.log if verb == "finish_branch"]
    return all(
        list(g.branches)
        == [
            branch
            for branch in (r.step.now[g.request_id].branches if r.step.now[g.request_id].forked else range(g.n))
            if (g.request_id, str(branch)) not in ended
        ]
        for g in queued(r.after)
        if g.forked and g.request_id in r.step.now
    )


@law("L2", Kind.ROUND, origin="recompute livelock: 600 steps, 242 preemptions, no end")
def work_decreases(r: Round) -> Bool:
    """every step makes the vector of remaining work, in seniority order, lexicographically smaller (departed groups
    count 0, all n branches from the start)"""
    old = queued(r.step.before)
    if not old:
        return True
    now = {g.request_id: remaining_work(g) for g in queued(r.after)}
    return lexically_less([now.get(g.request_id, 0) for g in old], [remaining_work(g) for g in old])


over_runs(
    "S8",
    "schedule_is_total",
    "schedule() returns a plan from every reachable state; it never raises for lack of memory",
    origin="vLLM issue 5578: the engine died of it",
)
over_runs(
    "L3",
    "termination",
    "chunked: an accepted group finishes within the sum of p + n*(m-1) + (n-1)*(p mod BS) over itself and its seniors "
    "at arrival, in steps; prefill-first: within twice as many",
    origin="a bound a person can compute, not just 'eventually'",
)
over_runs(
    "L5",
    "no_starvation",
    "no run goes round for ever while an accepted group stays in the queues",
    origin="a second opinion on L1 to L3",
)
over_runs(
    "E1",
    "schedule_independence",
    "outputs do not depend on batching, chunking, preemption, swap or cache hits",
    origin="the reason why a scheduler may be changed at all",
)


def steps_bound(g: Any, seniors: list[Any], chunked: bool = True) -> Int:
    """L3: steps within which `g` leaves, from its arrival; `seniors` are the unfinished groups before it.

    The most senior group computes at least one token a step (in one of two steps, prefill-first) and is never
    preempted.  What it lacks when it becomes the most senior is at most all of its work from nothing, and that is most
    for a rebuild: each of n branches computes the partly filled prompt block again.
    """
    bound: Int = 0
    for one in [*seniors, g]:
        again = (one.n - 1) * (one.prompt_len - one.shared_tokens)
        bound = bound + one.prompt_len + one.n * (one.max_tokens - 1) + again
    return bound if chunked else 2 * bound
