"""A counterexample that a person can follow: one row a step, the offending one marked, then the law and its values.

The run is carried out again on a fresh scheduler, so what is shown is what the real code did.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from spec import views
from spec.check.explore import Event, Violation
from spec.check.patience import EndlessError, patience, told
from spec.views import STEP_VERBS


@dataclass
class Row:
    """One event: the state after it and what happened."""

    event: str
    running: str
    swapped: str
    waiting: str
    gpu: str
    cpu: str
    actions: list[str] = field(default_factory=list)


class Replayed:
    """A run carried out again on a fresh scheduler, with names that last: a, b, c in order of arrival."""

    def __init__(self, make: Callable[[], Any], new_group: Callable[[str, int, int, int], Any]) -> None:
        self.s = make()
        self.new_group = new_group
        self.arrived = 0
        self.steps = 0
        self.rows: list[Row] = []
        self.values: Any = None  # what the last event was: a state before it, and the plan if there was one

    def carry_out(self, event: Event) -> None:
        """Do what the event says, and note the row; an error or a call without end is shown at the end of it."""
        s = self.s
        before: Any = None
        actions: list[str] = []
        name = event.kind
        plan = None
        try:
            order = [g.request_id for g in (*s.running, *s.swapped, *s.waiting)]
            before = views.snapshot(s)
            if event.kind == "add":
                p, n, m = event.group
                name = f"add {_name(self.arrived)}"
                actions.append(f"prompt {p}, n {n}, max_tokens {m}")
                self.arrived += 1
                with patience(lambda: None):
                    s.add(self.new_group(_name(self.arrived - 1), p, n, m))
            elif event.kind == "abort":
                name = f"abort {order[event.rank]}"
                with patience(lambda: None):
                    s.abort(order[event.rank])
            else:
                self.steps += 1
                name = f"step {self.steps}"
                with patience(lambda: None):
                    returned = s.schedule()
                if not hasattr(returned, "groups") or not hasattr(returned, "log"):
                    raise TypeError(f"schedule() returned {_kind(returned)}, which is no Plan")
                plan = returned
                actions += of_plan(plan)
                for rank in event.aborted:
                    s.abort(order[rank])
                    actions.append(f"abort {order[rank]} in mid-step")
                mark = len(plan.log)
                stopped, failed = [(order[r], b) for r, b in event.stopped], [order[r] for r in event.failed]
                actions += [f"{name} branch {branch} stops" for name, branch in stopped]
                actions += [f"{name} fails" for name in failed]
                with patience(lambda: None):
                    if event.broken:
                        actions.append("the step fails")
                        s.fail(plan)
                    else:
                        s.update(plan, stopped, failed)
                actions += [_entry(entry) for entry in plan.log[mark:]]
        except EndlessError:
            actions.append("does not return")
        except (Exception, SystemExit) as error:
            actions.append(told(error))
        self.values = (before, plan)
        self.rows.append(of_state(name, s, actions))


def of_state(event: str, s: Any, actions: list[str] | None = None) -> Row:
    """The row of an event that left this state."""
    return Row(
        event,
        queue(getattr(s, "running", [None])),
        queue(getattr(s, "swapped", [None])),
        queue(getattr(s, "waiting", [None])),
        f"{s.blocks.gpu_free}/{s.config.num_gpu_blocks}",
        f"{s.blocks.cpu_free}/{s.config.num_cpu_blocks}",
        actions or [],
    )


def _kind(returned: Any) -> str:
    return "None" if returned is None else f"a {type(returned).__name__}"


def _name(arrival: int) -> str:
    return chr(ord("a") + arrival) if arrival < 26 else f"r{arrival}"


def queue(groups: Any) -> str:
    """Each group as name, known tokens, * branches, and what it lacks where that is more than the next token."""
    shown = []
    for g in groups:
        if not hasattr(g, "request_id"):  # a broken queue
            shown.append(f"?{g}")
            continue
        text = f"{g.request_id}:{g.known}"
        if g.n > 1:
            text += f"x{g.live}"
        if g.deficit != (g.live if g.forked else 0):
            text += f"-{g.deficit}"
        shown.append(text)
    return " ".join(shown) or "."


def of_plan(plan: Any) -> list[str]:
    """What a plan does, in its order, and who runs."""
    done = [_entry(entry) for entry in plan.log if entry.verb in STEP_VERBS and entry.verb != "swap_out"]
    ran = [f"{g.request_id} {tokens}" for g, tokens in plan.groups]
    return [*done, "run " + ", ".join(ran) if ran else "run nobody"]


def of_log(log: Any) -> list[str]:
    """The entries of a log, in order."""
    return [_entry(entry) for entry in log]


def _entry(entry: Any) -> str:
    verb, request_id, blocks, detail = entry
    text = f"{verb.replace('_', ' ')} {request_id}"
    if detail and verb in ("preempt", "finish_branch"):
        text += f" ({'by ' if verb == 'preempt' else 'branch '}{detail})"
    return f"{text} [{blocks}]" if blocks else text


def timeline(
    violation: Violation, make: Callable[[], Any], new_group: Callable[[str, int, int, int], Any], width: int = 120
) -> str:
    """The run as a table, the step that breaks the law marked, and below it the law, its statement and the values."""
    shown, law, values = in_parts(violation, make, new_group, width)
    return f"{shown}\n\n{law}\n{values}"


def in_parts(
    violation: Violation, make: Callable[[], Any], new_group: Callable[[str, int, int, int], Any], width: int = 120
) -> tuple[str, str, str]:
    """The three parts of a timeline: the run, the law with what is said of it, and the values."""
    run = Replayed(make, new_group)
    for event in violation.run:
        run.carry_out(event)
    law = violation.law
    said = [f"{law.id} {law.name}: {law.statement}"]
    said += [f"   {line}" for line in violation.detail.splitlines()]
    if law.id == "Q10":
        said += [f"   {line}" for line in calendar(run.s)]
    values = [f"   {line}" for line in _values(run)]
    values.append("   (a group shows as name:known tokens, x live branches, - tokens it lacks; [blocks])")
    shown, told_of, numbers = (
        "\n".join(line.rstrip() for line in part) for part in (table(run.rows, width), said, values)
    )
    return shown, told_of, numbers


def calendar(s: Any) -> list[str]:
    """What the calendar of decodes says beside what law Q10 asks of it: one line a group, then its sums."""
    filed, beat = s.calendar.filed, s.calendar.beat
    lines = [f"the calendar, at beat {beat}:"]
    decodes = [g for g in s.running if g.forked and g.deficit == g.live]
    for g in decodes:
        # as in law Q10: at once while the last block is shared, else when its tables are full
        day = beat + (0 if g.tail_shared else len(g.tables[g.branches[0]]) * s.config.block_size + 1 - g.known)
        if g not in filed:
            lines.append(f">> {g.request_id} decodes and is not filed; it needs blocks at beat {day}")
            continue
        said, live = filed[g]
        there = [one for one, groups in s.calendar.days.items() if g in groups]
        wrong = said != day or live != g.live or there != [day]
        lines.append(
            f"{'>>' if wrong else '  '} {g.request_id} is filed under beat {said} with {live} branches"
            f"{'' if there == [said] else f', though listed under {there or None}'}; "
            f"it needs blocks at beat {day} and has {g.live}"
        )
    for g in filed:
        if g not in decodes:
            what = f"is no running decode ({g.status.value})"
            lines.append(f">> {g.request_id} is filed under beat {filed[g][0]} and {what}")
    strays = [g.request_id for groups in s.calendar.days.values() for g in groups if g not in filed]
    if strays:
        lines.append(f">> listed under a beat and not filed: {', '.join(strays)}")
    sum_of_live = sum(g.live for g in decodes)
    if s.calendar.branches != sum_of_live:
        lines.append(f">> it counts {s.calendar.branches} branches; the running decodes have {sum_of_live}")
    roll = [g.request_id for g in s.calendar.roll(s.running)]
    if roll != [g.request_id for g in decodes]:
        lines.append(f">> its roll is {roll}; the running decodes are {[g.request_id for g in decodes]}")
    return lines


def table(rows: list[Row], width: int = 120) -> list[str]:
    """The rows in columns, the last one marked."""
    rows = [Row("", "running", "swapped", "waiting", "GPU free", "CPU free", ["actions"]), *rows]
    columns = ("event", "running", "swapped", "waiting", "gpu", "cpu")
    widths = [max(len(getattr(row, name)) for row in rows) for name in columns]
    lines = []
    for i, row in enumerate(rows):
        mark = ">> " if i == len(rows) - 1 else "   "
        cells = [getattr(row, name).ljust(w) for name, w in zip(columns, widths, strict=True)]
        lines += _wrapped(mark + "  ".join(cells) + "  ", row.actions, width)
    return lines


def _wrapped(left: str, actions: list[str], width: int) -> list[str]:
    """The actions beside the columns, on as many lines as they need."""
    lines, current = [], left
    begun = False
    for text in actions:
        if begun and len(current) + len(text) + 2 > width:
            lines.append(current + ";")
            current, begun = " " * len(left), False
        current += ("; " if begun else "") + text
        begun = True
    return [*lines, current]


def _values(run: Replayed) -> list[str]:
    """The state that the offending event met, and the one it left."""
    before, _ = run.values
    s = run.s
    lines = [f"config: {of_config(s.config)}"]
    for title, state in (("before", before), ("after", s)):
        lines += [f"{title}: {line}" for line in of_groups(state)]
    return lines


def of_config(config: Any) -> str:
    """The capacities, budgets and orders of a configuration."""
    return (
        f"GPU {config.num_gpu_blocks} and CPU {config.num_cpu_blocks} blocks of {config.block_size or 'any size'}, "
        f"max_num_batched_tokens {config.tokens}, max_num_seqs {config.seqs}, watermark {config.watermark_blocks}, "
        f"max_model_len {config.max_model_len}, "
        + ("chunked" if config.enable_chunked_prefill else "prefill-first")
        + (f", preemption_mode {config.mode.value}" if config.mode else "")
    )


def of_groups(state: Any, measure: Any = None) -> list[str]:
    """One line a group: its queue and place, and its numbers.

    measure: where blocks are counted by no formula, what they come to for each group.
    """
    lines = []
    for queue in ("running", "swapped", "waiting"):
        for place, g in enumerate(getattr(state, queue, ()), 1):
            if not hasattr(g, "request_id"):
                lines.append(f"{queue} {place}: {g!r}, which is no group")
                continue
            text = (
                f"{queue} {place}: {g.request_id}: known {g.known}, deficit {g.deficit} ({_phase(g)}), "
                f"live {g.live}/{g.n}, holds {g.held}, prompt {g.prompt_len}, max_tokens {g.max_tokens}"
            )
            if g.tokens:
                text += f", given {g.tokens} tokens"
            if g.tail_shared:
                text += ", branches share the last block"
            if measure is not None and g.request_id in getattr(measure, "covers", ()):
                name = g.request_id
                covers, fills, peak = measure.covers[name], measure.fills[name], measure.peaks[name]
                text += f"; all it knows takes {covers} blocks, what is computed {fills}, its peak is {peak}"
            if g.status.value != queue:
                text += f"; its status is {g.status.value}"
            lines.append(text)
    return lines


def _phase(g: Any) -> str:
    """What a group is at."""
    if not g.forked:
        return "prompt not begun" if g.deficit >= g.known else "in mid-prompt"
    return "decode" if g.deficit == g.live else "in mid-rebuild" if g.held else "to be rebuilt"


def in_words(world: Any, act: Callable[[], Any], measure: Any = None) -> list[str]:
    """A scheduler with plain numbers before and after a call, and what it logged: how a broken claim came about.

    act: makes the call; what it returns is a plan, or what is to be shown of it, or nothing.
    """
    lines = [f"config: {of_config(world.config)}"]

    def state(title: str) -> None:
        free = f"{title}: free are GPU {world.blocks.gpu_free}, CPU {world.blocks.cpu_free}"
        lines.append(free + ("; decodes are owed their turn" if world.decodes_owed else ""))
        lines.extend(f"{title}: {line}" for line in of_groups(world, measure))

    state("before")
    try:
        with patience(lambda: None):
            plan = act()
        done = of_plan(plan) if hasattr(plan, "groups") and hasattr(plan, "log") else [*(plan or ())]
    except EndlessError as error:
        done = [f"a call {error}"]
    except (Exception, SystemExit) as error:
        done = [told(error)]
    if done:
        lines.append(f"the code: {'; '.join(done)}")
    state("after")
    return lines
