"""A trace of a scheduler that serves: one JSON line a step, from which every law can be checked again offline.

A line holds what changed, never the whole state, and no prompt, text or token id.  `spec.check.trace` reads it and says
what each part means; the two share no code, so that a fault here shows there.

    {"trace": "lawful", "format": 2, "config": {...}, ...}                                      the header
    {"step": 0, "events": [...], "before": {...},      what happened since the step before, and what it changed
     "log": [...], "decodes": [...], "ends": [...], "slots": [...], "run": [...], "rows": [...],   the plan
     "out": [...], "in": [...], "copy": [...],
     "mid": {...},                                     what schedule() changed
     "outcome": "update", "logged": [...], "after": {...}}      what was made of the plan, and what that changed
    {"end": {"lines": 812, "steps": 810}}                                                       the trailer

The groups that a plan begins with are mostly decodes, with one row a branch: those are stated in columns, "decodes"
their names, "ends" the position after each one's rows, "slots" the slot of every row; and "known" in "after" the length
of each to which nothing happened but a token more, 0 for another.  "run" and "rows" have whatever follows, in full.

Every line ends with a digest of itself and of the digest before it.  Each is handed to the system when its step is
over, so a process that dies leaves whole lines, and no trailer.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from hashlib import blake2b
from operator import attrgetter
from pathlib import Path
from typing import Any, TextIO

from engine.scheduler.plan import Action, Plan
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import SequenceGroup, Status

FORMAT = 2
_SCALARS = (
    "arrival",
    "prompt_len",
    "n",
    "max_tokens",
    "shared_blocks",
    "shared_tokens",
    "live",
    "deficit",
    "forked",
    "tail_shared",
    "held",
)
_scalars = attrgetter(*_SCALARS)
_QUEUES = ("running", "swapped", "waiting")
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class _Seen:
    """A group as the trace last showed it."""

    __slots__ = ("branches", "group", "home", "known", "scalars", "tables", "work")

    def __init__(self, group: SequenceGroup) -> None:
        self.group = group
        self.scalars: tuple[Any, ...] = ()
        self.known: Any = None
        self.branches: list[int] = []
        self.tables: list[list[int]] = []
        self.home = ""  # the device its tables name blocks of, while it has one
        self.work = 0


class TraceWriter:
    """Writes the trace of one scheduler from now on; it must have no unfinished group.

    The scheduler's own `schedule`, `update` and `fail` are called as ever; a scheduler without a writer has no trace
    of this.  Raises OSError when the file cannot be opened, and ValueError when the scheduler is busy.
    """

    def __init__(self, scheduler: Scheduler, path: str | Path) -> None:
        if scheduler.has_unfinished():
            raise ValueError("a trace must begin before the first request; this scheduler has unfinished ones")
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO | None = self.path.open("w", encoding="utf-8")
        self._s = scheduler
        self._digest = ""
        self._lines = self._steps = 0
        self._seen: dict[str, _Seen] = {}
        self._queues: dict[str, list[SequenceGroup]] = {name: [] for name in _QUEUES}
        self._members: set[str] = set()  # of the scheduler's books
        self._replaced: dict[str, str] = {}
        self._work = 0
        self._owed = scheduler.decodes_owed
        self._line: dict[str, Any] | None = None  # of the step under way
        self._mark = 0  # entries of its log that are written
        self._write(
            {
                "trace": "lawful",
                "format": FORMAT,
                "scheduler": f"{type(scheduler).__module__}:{type(scheduler).__qualname__}",
                "config": _config(scheduler),
                "arrivals": scheduler.num_arrivals,
                "steps": scheduler.num_steps,
                "owed": scheduler.decodes_owed,
                "counts": [scheduler.blocks.gpu_free, scheduler.blocks.cpu_free],
            }
        )
        self._plain = scheduler.schedule, scheduler.update, scheduler.fail
        for method in (self.schedule, self.update, self.fail):
            setattr(scheduler, method.__name__, method)

    # in place of the scheduler's own

    def schedule(self) -> Plan:
        """Plan a step, and note how."""
        s = self._s
        if s._plan is not None:
            return self._plain[0]()  # out of turn: it says so
        line: dict[str, Any] = {"step": s.num_steps}
        events = s._log
        self._mark = len(events)
        if events:
            line["events"] = _entries(events)
            line["before"] = self._changes(events, {})
        try:
            plan = self._plain[0]()
        except Exception as error:
            self._write({**line, "raised": f"{type(error).__name__}: {error}"})
            raise
        log = plan.log[self._mark :]
        if log:
            line["log"] = _entries(log)
        line.update(_computes(plan))
        line["computes"] = [plan.num_prefill_tokens, plan.num_decode_tokens]
        for name, pairs in (
            ("out", plan.blocks_to_swap_out),
            ("in", plan.blocks_to_swap_in),
            ("copy", plan.blocks_to_copy),
        ):
            if pairs:
                line[name] = pairs
        line["mid"] = self._changes(log, {group.request_id: tokens for group, tokens in plan.groups})
        self._mark = len(plan.log)
        self._line = line
        return plan

    def update(
        self, plan: Plan, stopped: Collection[tuple[str, int]] = (), failed: Collection[str] = ()
    ) -> list[SequenceGroup]:
        """Take note that the plan was carried out, and write its line."""
        return self._conclude(plan, "update", lambda: self._plain[1](plan, stopped, failed))

    def fail(self, plan: Plan, request_ids: Iterable[str] | None = None) -> list[SequenceGroup]:
        """Take note that the plan was not carried out, and write its line."""
        return self._conclude(plan, "fail", lambda: self._plain[2](plan, request_ids))

    def _conclude(self, plan: Plan, outcome: str, call: Any) -> list[SequenceGroup]:
        if self._s._plan is not plan or self._line is None:
            return call()  # type: ignore[no-any-return]  # out of turn: it says so
        line, self._line = self._line, None
        try:
            departed: list[SequenceGroup] = call()
        except Exception as error:
            self._write({**line, "raised": f"{type(error).__name__}: {error}"})
            raise
        log = plan.log[self._mark :]
        line["outcome"] = outcome
        if log:
            line["logged"] = _entries(log)
        line["after"] = self._changes(log, {}, line.get("decodes"))
        self._steps += 1
        self._write(line)
        return departed

    def close(self) -> None:
        """Write the trailer; the scheduler goes on without a trace.  A second time is nothing."""
        if self._file is None:
            return
        for name in ("schedule", "update", "fail"):
            vars(self._s).pop(name, None)
        if self._line is not None:
            self._write(self._line)  # planned, and nobody will know what came of it
        trailer: dict[str, Any] = {"end": {"lines": self._lines + 1, "steps": self._steps}}
        if self._line is None and self._s._log:
            trailer["events"] = _entries(self._s._log)
            trailer["before"] = self._changes(self._s._log, {})
        self._write(trailer)
        self._file.close()
        self._file = None

    # what changed

    def _changes(
        self, log: Sequence[Action], given: dict[str, int], decodes: list[str] | None = None
    ) -> dict[str, Any]:
        """The difference to what the trace showed last.

        given: the tokens that the groups should carry.  decodes: whose lengths are stated in a column.
        """
        s = self._s
        out: dict[str, Any] = {}
        touched: tuple[set[int], set[int]] = set(), set()  # blocks of each device that tables name or named
        moved: list[SequenceGroup] = []  # into waiting, or out of a queue
        for name in _QUEUES:
            old, new = self._queues[name], list(getattr(s, name))
            if old != new:
                out[name] = parts = []
                for at, removed, inserted in _splices(old, new):
                    parts += [at, removed, [group.request_id for group in inserted]]
                    moved += old[at : at + removed]
                    if name == "waiting":
                        moved += inserted
                self._queues[name] = new
        groups: dict[str, dict[str, Any]] = {}
        longer: dict[str, Any] = {}
        self._homed(groups, longer, given, touched)
        waits = set(map(id, self._queues["waiting"])) if moved else ()
        for group in moved:
            if id(group) in waits:
                change = self._change(group, "waiting", given, touched, None)
                if change:
                    groups[group.request_id] = change
        if longer and decodes:
            out["known"] = [longer.pop(name, 0) for name in decodes]
        for name, known in longer.items():
            groups[name] = {"known": known}
        if groups:
            out["groups"] = groups
        left, joined = self._membership(log, moved, touched)
        if left:
            out["left"] = left
        if joined:
            out["joined"] = joined
        pools = s.blocks.gpu, s.blocks.cpu  # type: ignore[attr-defined]
        refs = [[number for block in sorted(blocks) for number in (block, pool.refs[block])]
                for blocks, pool in zip(touched, pools, strict=True)]  # fmt: skip
        if any(refs):
            out["refs"] = refs
        if s.decodes_owed != self._owed:
            self._owed = out["owed"] = s.decodes_owed
        out["counts"] = [s.blocks.gpu_free, s.blocks.cpu_free, len(s.groups), self._work]
        return out

    def _homed(
        self,
        groups: dict[str, dict[str, Any]],
        longer: dict[str, Any],
        given: dict[str, int],
        touched: tuple[set[int], set[int]],
    ) -> None:
        """What changed of the groups that have a home; longer: the lengths of those that differ in nothing else."""
        for device, queue in enumerate(("running", "swapped")):
            status = Status(queue)
            for group in self._queues[queue]:
                name = group.request_id
                seen = self._seen.get(name)
                if (
                    seen is not None
                    and seen.group is group
                    and seen.home == queue
                    and group.tokens == given.get(name, 0)
                    and group.status is status
                    and _scalars(group) == seen.scalars
                    and group.tables == seen.tables
                    and group.branches == seen.branches
                ):
                    if group.known != seen.known:
                        longer[name] = seen.known = group.known
                        self._count_work(seen)
                    continue
                change = self._change(group, queue, given, touched, device)
                if change:
                    groups[name] = change

    def _count_work(self, seen: _Seen) -> None:
        group = seen.group
        work = group.deficit + group.live * (group.max_tokens - 1 - group.known + group.prompt_len)
        self._work += work - seen.work
        seen.work = work

    def _change(
        self,
        group: SequenceGroup,
        queue: str,
        given: dict[str, int],
        touched: tuple[set[int], set[int]],
        device: int | None,
    ) -> dict[str, Any]:
        """The fields of a group in this queue that differ from what the trace showed last."""
        name = group.request_id
        seen = self._seen.get(name)
        change: dict[str, Any] = {}
        if seen is None or seen.group is not group:
            if seen is not None:  # ended, and its name given to another, since the trace showed it last
                self._replaced[name] = seen.group.status.value
            self._forget(name, touched)
            seen = self._seen[name] = _Seen(group)
        scalars = _scalars(group)
        if scalars != seen.scalars or group.known != seen.known:
            old = seen.scalars or (None,) * len(scalars)
            change = {field: b for field, a, b in zip(_SCALARS, old, scalars, strict=True) if a is None or a != b}
            if group.known != seen.known:
                change["known"] = seen.known = group.known
            seen.scalars = scalars
            self._count_work(seen)
        if group.branches != seen.branches:
            change["branches"] = seen.branches = list(group.branches)
        home = queue if device is not None else ""
        if group.tables != seen.tables or home != seen.home:
            tables = [list(table) for table in group.tables]
            if home == seen.home and len(tables) == len(seen.tables):
                change["table"] = parts = _table_changes(seen.tables, tables)
                if device is not None:
                    for branch, kept, rest in parts:
                        touched[device].update(seen.tables[branch][kept:], rest)
                seen.tables = tables
            else:
                if tables != seen.tables:
                    change["tables"] = tables
                self._touch(seen, touched)
                seen.tables, seen.home = tables, home
                self._touch(seen, touched)
        if group.tokens != given.get(name, 0):
            change["tokens"] = group.tokens
        if group.status.value != queue:
            change["status"] = group.status.value
        return change

    @staticmethod
    def _touch(seen: _Seen, touched: tuple[set[int], set[int]]) -> None:
        if seen.home:
            for table in seen.tables:
                touched[seen.home == "swapped"].update(table)

    def _membership(
        self, log: Sequence[Action], moved: list[SequenceGroup], touched: tuple[set[int], set[int]]
    ) -> tuple[list[list[str]], list[str]]:
        """Who left the scheduler's books, with what they became, and who is new in them."""
        left: list[list[str]] = []
        joined: list[str] = []
        groups = self._s.groups
        for name in dict.fromkeys([entry.request_id for entry in log] + [group.request_id for group in moved]):
            if name in self._replaced:
                left.append([name, self._replaced.pop(name)])
                joined.append(name)
            elif name in groups:
                if name not in self._members:
                    self._members.add(name)
                    joined.append(name)
            elif name in self._members:
                self._members.discard(name)
                seen = self._seen.get(name)
                left.append([name, seen.group.status.value if seen is not None else ""])
                self._forget(name, touched)
        return left, joined

    def _forget(self, name: str, touched: tuple[set[int], set[int]]) -> None:
        seen = self._seen.pop(name, None)
        if seen is not None:
            self._touch(seen, touched)
            self._work -= seen.work

    # lines

    def _write(self, content: dict[str, Any]) -> None:
        if self._file is None:
            return
        body = _encode(content)
        self._digest = blake2b((self._digest + body).encode(), digest_size=16).hexdigest()
        self._file.write(f'{body[:-1]},"digest":"{self._digest}"}}\n')
        self._file.flush()
        self._lines += 1


def _config(s: Scheduler) -> dict[str, Any]:
    config = s.config
    return {
        "num_gpu_blocks": config.num_gpu_blocks,
        "num_cpu_blocks": config.num_cpu_blocks,
        "block_size": config.block_size,
        "max_model_len": config.max_model_len,
        "max_num_batched_tokens": config.tokens,
        "max_num_seqs": config.seqs,
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "preemption_mode": config.mode.value if config.mode is not None else None,
        "watermark_blocks": config.watermark_blocks,
    }


def _entries(log: Iterable[Action]) -> list[list[Any]]:
    """Log entries, without the blocks and details that are empty."""
    return [list(entry) if entry.detail else list(entry[:3]) if entry.blocks else list(entry[:2]) for entry in log]


def _computes(plan: Plan) -> dict[str, Any]:
    """Whom the plan serves and its rows: the first that have a decode's rows in columns, all others one by one."""
    rows, groups = plan.scheduled, plan.groups
    names: list[str] = []
    ends: list[int] = []
    slots: list[int] = []
    at = 0
    for group, tokens in groups:
        own = _as_decode(group, tokens, rows[at : at + tokens])
        if not own:
            break
        names.append(group.request_id)
        ends.append(rows[at].end)
        slots += own
        at += tokens
    line: dict[str, Any] = {"decodes": names, "ends": ends, "slots": slots} if names else {}
    line["run"] = [[group.request_id, tokens] for group, tokens in groups[len(names) :]]
    line["rows"] = [_row(row) for row in rows[at:]]
    return line


def _as_decode(group: SequenceGroup, tokens: int, rows: Sequence[Any]) -> list[int]:
    """The slots of the rows if they are one for each branch, of the same one position, each drawing; else nothing."""
    branches, tables = group.branches, group.tables
    if not tokens == len(branches) == len(rows):
        return []
    slots: list[int] = []
    last = rows[0].end if rows else 0
    for branch, (one, number, start, end, table, those, draws) in zip(branches, rows, strict=True):
        if one is not group or number != branch or end != last or start != last - 1 or draws != (branch,):
            return []
        if table is not tables[branch] or len(those) != 1:
            return []
        slots += those
    return slots


def _row(row: Any) -> list[Any]:
    """A scheduled row: request, branch, start, end, runs of slots, draws; and its table if it is not its branch's."""
    group, branch, start, end, table, slots, draws = row
    entry = [group.request_id, branch, start, end, _runs(slots), draws]
    if table is not group.tables[branch]:
        entry.append(list(table))
    return entry


def _runs(slots: list[int]) -> list[int]:
    """Slots as first, count, first, count, ... of runs without gap."""
    runs: list[int] = []
    following = -1
    for slot in slots:
        if slot == following:
            runs[-1] += 1
        else:
            runs += (slot, 1)
        following = slot + 1
    return runs


def _splices(old: list[Any], new: list[Any]) -> Iterator[tuple[int, int, list[Any]]]:
    """Where the lists differ: at this index of the old one so many are replaced by these."""
    come, go = set(map(id, new)), set(map(id, old))
    i = j = 0
    while True:
        while i < len(old) and j < len(new) and old[i] is new[j]:
            i, j = i + 1, j + 1
        if i == len(old) and j == len(new):
            return
        at, begin = i, j
        while i < len(old) and id(old[i]) not in come:
            i += 1
        while j < len(new) and id(new[j]) not in go:
            j += 1
        if i == at and j == begin:  # the order is another: all that follows is stated
            i, j = len(old), len(new)
        yield at, i - at, new[begin:j]


def _table_changes(old: list[list[int]], new: list[list[int]]) -> list[list[Any]]:
    """(branch, blocks kept, blocks after those) of each table that changed."""
    changes: list[list[Any]] = []
    for branch, (a, b) in enumerate(zip(old, new, strict=True)):
        if a != b:
            kept = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            changes.append([branch, kept, b[kept:]])
    return changes
