"""Refinement: the log of every plan, replayed in the spec guard by guard, lands in the state the scheduler is in."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from spec.abstract import ACTIONS, Counts, Row, abstract, add, find, may_add, row
from spec.views import Round, Step


@dataclass(frozen=True)
class Mismatch:
    """Where the replay stopped: an action that is not allowed, or two states that differ."""

    text: str
    at: str  # the action, or "mid" and "after" for the states compared
    spec: Any = None
    scheduler: Any = None

    def __str__(self) -> str:
        return f"{self.at}: {self.text}\n  spec:      {self.spec}\n  scheduler: {self.scheduler}"


class _StoppedError(Exception):
    def __init__(self, mismatch: Mismatch) -> None:
        super().__init__(mismatch.text)
        self.mismatch = mismatch


def _apply(name: str, s: Counts, request_id: str, value: Any) -> Counts:
    g = find(s, request_id)
    if g is None:
        raise _StoppedError(Mismatch(f"{request_id} is in no queue", name))
    one = ACTIONS[name]
    if one.guard(s, g, value) is not True:
        state = ", ".join(
            f"{field} {part}" for field, part in s._asdict().items() if field not in ("config", "measure")
        )
        raise _StoppedError(Mismatch(f"{name} {request_id} [{value}] is not allowed in the spec", name, state, "-"))
    return one.effect(s, g, value)


def _same(s: Counts, there: Counts, at: str) -> None:
    for name, a, b in zip(Counts._fields, s, there, strict=True):
        if name not in ("config", "measure") and a != b:
            raise _StoppedError(Mismatch(f"{name} differs", at, a, b))


def _scheduled(step: Step) -> tuple[Counts, dict[str, list[tuple[str, int]]]]:
    """The state in mid-step, by the spec; and what the log says came after, by group."""
    s = abstract(step.before)
    rest: dict[str, list[tuple[str, int]]] = defaultdict(list)
    begun = False  # entries before the first of the step's own tell what happened before it
    mode = ""
    entries = list(step.plan.log)
    own = len(step.verbs)
    for verb, request_id, blocks, detail in entries:
        if own and verb in ("admit", "swap_in", "grow", "demote", "swap_out", "preempt"):
            begun = True
            own -= 1
            if verb == "preempt":
                mode = detail
                if mode == "recompute":
                    s = _apply("recompute", s, request_id, blocks)
                continue
            if verb == "swap_out" and mode != "swap":
                raise _StoppedError(Mismatch(f"{request_id} was not preempted by swap", verb))
            s = _apply(verb, s, request_id, blocks)
        elif begun or not own:
            rest[request_id].append((verb, blocks))
    for g, tokens in step.plan.groups:
        s = _apply("serve", s, g.request_id, tokens)
    return s, rest


def replay_step(step: Step) -> Mismatch | None:
    """Replay schedule(): from the state before through the log and the tokens given to the state in mid-step."""
    try:
        s, _ = _scheduled(step)
        _same(s, abstract(step.mid), "mid")
    except _StoppedError as stopped:
        return stopped.mismatch
    return None


def replay(turn: Round) -> Mismatch | None:
    """Replay a whole round: what replay_step does, then what update() logged, to the state after it."""
    step = turn.step
    try:
        s, rest = _scheduled(step)
        _same(s, abstract(step.mid), "mid")
        since = {request_id: _since_arrival(verbs) for request_id, verbs in rest.items()}
        for v in step.served:
            request_id = v.was.request_id
            verbs = since.pop(request_id, [])
            if not any(verb in ("abort", "fail") for verb, _ in verbs):
                s = _apply("compute", s, request_id, v.tokens)
                g = find(s, request_id)
                assert g is not None
                if g.deficit == 0:
                    s, verbs = _sampled(s, g, verbs)
            for verb, blocks in verbs:
                s = _apply(verb, s, request_id, blocks)
        for request_id, verbs in since.items():
            for verb, blocks in verbs:
                if find(s, request_id) is not None:
                    s = _apply(verb, s, request_id, blocks)
        for new in turn.after.waiting:  # who arrived between schedule() and update()
            if find(s, new.request_id) is None and ("add", 0) in rest[new.request_id]:
                if may_add(s, row(new)) is not True:
                    raise _StoppedError(Mismatch(f"{new.request_id} could never run to its end", "add"))
                s = add(s, row(new))
        _same(s, abstract(turn.after), "after")
    except _StoppedError as stopped:
        return stopped.mismatch
    return None


def _since_arrival(verbs: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """What the log says of an id after it was last given to a new group."""
    last = max((i for i, (verb, _) in enumerate(verbs) if verb == "add"), default=-1)
    return verbs[last + 1 :]


def _sampled(s: Counts, g: Row, verbs: list[tuple[str, int]]) -> tuple[Counts, list[tuple[str, int]]]:
    """Fork if it is the first time, which the log mentions when there is more than one branch; then draw."""
    if not g.forked:
        if g.n > 1:
            if not verbs or verbs[0][0] != "fork":
                raise _StoppedError(Mismatch(f"{g.request_id} forked without a word in the log", "fork"))
            verbs = verbs[1:]
        s = _apply("fork", s, g.request_id, 0)
    return _apply("sample", s, g.request_id, 0), verbs
