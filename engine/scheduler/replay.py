"""Runs a dumped violation again: from the state it kept, call by call, with every law checked on the way."""

from __future__ import annotations

import importlib
import json
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.scheduler.calendar import DecodeCalendar
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.contracts import lifted
from engine.scheduler.recorder import describe
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import SequenceGroup, Status
from spec import plain, views
from spec.check.patience import EndlessError, patience, told
from spec.check.report import calendar, of_plan, of_state, table


@dataclass(frozen=True)
class Replay:
    """What a replay saw.  expected: the law of the dump; broken: the laws broken now, empty if all held."""

    expected: str
    broken: tuple[str, ...]
    timeline: str

    @property
    def reproduced(self) -> bool:
        """The dumped violation happened again, or another in its place."""
        return bool(self.broken)


def load_state(state: dict[str, Any], kind: type[Scheduler] = Scheduler) -> Scheduler:
    """The scheduler that `contracts` dumped."""
    s = kind(SchedulerConfig(**state["config"]))
    for name in ("running", "swapped", "waiting"):
        groups = [_load_group(row) for row in state[name]]
        setattr(s, name, deque(groups))
        s.groups |= {group.request_id: group for group in groups}
    s.decodes_owed = state["decodes_owed"]
    s.num_arrivals, s.num_steps = state["num_arrivals"], state["num_steps"]
    for name, pool in state["pools"].items():
        own = getattr(s.blocks, name)
        own.free, own.refs = list(pool["free"]), list(pool["refs"])
    s.calendar = DecodeCalendar.of(s.running, s.blocks.beats)
    return s


def _load_group(row: dict[str, Any]) -> SequenceGroup:
    group = SequenceGroup(row["request_id"], row["prompt_len"], row["n"], row["max_tokens"])
    for name, value in row.items():
        setattr(group, name, Status(value) if name == "status" else value)
    return group


def replay(path: str | Path, kind: Any = None) -> Replay:
    """Run a dump again.  The scheduler's class is imported by the name in the file, so planted faults return too.

    kind: the class, where the name is of no use elsewhere: that of a script, or of a function's own class.
    """
    content = json.loads(Path(path).read_text())
    if kind is None:
        module, _, name = content["scheduler"].partition(":")
        kind = importlib.import_module(module)
        for part in name.split("."):
            kind = getattr(kind, part)
    with lifted():
        return _run(content, load_state(content["state"], kind))


def _run(content: dict[str, Any], s: Scheduler) -> Replay:
    rows = [of_state("start", s, [])]
    broken = _at_boundary(s)
    step: views.Step | None = None
    plan: Any = None
    notes: list[str] = []
    for call in content["calls"]:
        if broken:
            break
        verb = call["call"]
        actions: list[str] = []
        try:
            if verb == "schedule":
                before = views.snapshot(s)
                with patience(lambda: None):
                    plan = s.schedule()
                actions = of_plan(plan)
                step = views.observe(before, plan, views.snapshot(s))
                broken = plain.check_step(step) + plain.check_mid(step) + plain.check_state_in_mid(step.mid)
                broken += plain.check_ids_step(step) + plain.check_ids_in_mid(s)
            elif verb == "update":
                with patience(lambda: None):
                    s.update(plan, [(i, b) for i, b in call["stopped"]], call["failed"])
                assert step is not None
                turn = views.conclude(step, views.snapshot(s))
                broken = plain.check_round(turn) + _at_boundary(s)
            elif verb == "add":
                s.add(SequenceGroup(call["request_id"], call["p"], call["n"], call["m"]))
            elif verb == "abort":
                s.abort(call["request_id"])
            else:
                s.fail(plan, call["request_ids"])
                broken = _at_boundary(s)
        except (Exception, EndlessError) as error:
            actions.append(f"a call {error}" if isinstance(error, EndlessError) else told(error))
            rows.append(of_state(verb, s, actions))
            notes.append("raised")
            break
        if verb in ("add", "abort"):
            actions.append(call["request_id"])
            if s._plan is None:
                broken = _at_boundary(s)
        rows.append(of_state(f"schedule {plan.step}" if verb == "schedule" else verb, s, actions))
    ids = tuple(law.id for law in broken) or (("S8",) if notes else ())
    lines = table(rows)
    lines += ["", *(str(law) for law in broken), describe(views.snapshot(s))]
    if any(law.id == "Q10" for law in broken):
        lines += calendar(s)
    return Replay(content["law"], ids, "\n".join(lines))


def _at_boundary(s: Scheduler) -> list[Any]:
    return plain.check_state(views.snapshot(s)) + plain.check_ids(s)
