"""A counterexample that a person can follow: one row a step, the offending one marked, then the law and its values.

The run is carried out again on a fresh scheduler, so what is shown is what the real code did.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from spec import views
from spec.check.explore import Event, Violation
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
        """Do what the event says, and note the row; an exception ends the row and is shown in it."""
        s = self.s
        order = [g.request_id for g in (*s.running, *s.swapped, *s.waiting)]
        before = views.snapshot(s)
        actions: list[str] = []
        name = ""
        plan = None
        try:
            if event.kind == "add":
                p, n, m = event.group
                group = s.add(self.new_group(_name(self.arrived), p, n, m))
                self.arrived += 1
                name = f"add {group.request_id}"
                actions.append(f"prompt {p}, n {n}, max_tokens {m}")
            elif event.kind == "abort":
                name = f"abort {order[event.rank]}"
                s.abort(order[event.rank])
            else:
                self.steps += 1
                name = f"step {self.steps}"
                plan = s.schedule()
                actions += of_plan(plan)
                for rank in event.aborted:
                    s.abort(order[rank])
                    actions.append(f"abort {order[rank]} in mid-step")
                mark = len(plan.log)
                if event.broken:
                    s.fail(plan)
                else:
                    s.update(plan, [(order[r], b) for r, b in event.stopped], [order[r] for r in event.failed])
                actions += [_entry(entry) for entry in plan.log[mark:]]
        except Exception as error:
            actions.append(f"{type(error).__name__}: {error}")
        self.values = (before, plan)
        self.rows.append(
            Row(
                name,
                queue(s.running),
                queue(s.swapped),
                queue(s.waiting),
                f"{s.blocks.gpu_free}/{s.config.num_gpu_blocks}",
                f"{s.blocks.cpu_free}/{s.config.num_cpu_blocks}",
                actions,
            )
        )


def _name(arrival: int) -> str:
    return chr(ord("a") + arrival) if arrival < 26 else f"r{arrival}"


def queue(groups: Any) -> str:
    """Each group as name, known tokens, * branches, and what it lacks where that is more than the next token."""
    shown = []
    for g in groups:
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
    run = Replayed(make, new_group)
    for event in violation.run:
        run.carry_out(event)
    lines = table(run.rows, width)
    law = violation.law
    lines += ["", f"{law.id} {law.name}: {law.statement}"]
    if violation.detail:
        lines.append(f"   {violation.detail}")
    lines += [f"   {line}" for line in _values(run)]
    lines.append("   (a group shows as name:known tokens, x live branches, - tokens it lacks; [blocks])")
    return "\n".join(line.rstrip() for line in lines)


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
    config = s.config
    lines = [
        f"config: GPU {config.num_gpu_blocks} and CPU {config.num_cpu_blocks} blocks of {config.block_size}, "
        f"max_num_batched_tokens {config.tokens}, max_num_seqs {config.seqs}, watermark {config.watermark_blocks}, "
        + ("chunked" if config.enable_chunked_prefill else "prefill-first")
        + (f", preemption_mode {config.mode.value}" if config.mode else "")
    ]
    for title, state in (("before", before), ("after", s)):
        for queue in ("running", "swapped", "waiting"):
            for g in getattr(state, queue):
                lines.append(
                    f"{title}: {queue} {g.request_id}: known {g.known}, deficit {g.deficit}, live {g.live}/{g.n}, "
                    f"holds {g.held}, prompt {g.prompt_len}, max_tokens {g.max_tokens}"
                )
    return lines
