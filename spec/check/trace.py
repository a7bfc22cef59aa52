"""The audit of a recorded trace: every line replayed against the laws, offline, from the first to the trailer.

The states are built again from what the lines say has changed, at the level of counts and block ids, by code that
shares nothing with the scheduler.  Of each line are checked: its digest and place; that the log accounts for every
change; the laws on states, steps and rounds; the laws on ids, with references counted again from the tables (B3); the
contents of every block, by carrying the plans out on names of tokens (B7); and that groups leave in time (L3).

What is known of a trace at most: an edit that is lawful, and whose digests were computed again up to the end, is a
different lawful run.  Within a line most numbers are stated twice, so that a single edit is found where it is made.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from spec import plain, views
from spec.check.header import wrong_header
from spec.check.shadow import _BRANCH, _GROUP, Shadow
from spec.check.steady import GHOST, Lanes, splices
from spec.laws import BY_ID, IDS_STEP, Law
from spec.laws_ids import computed
from spec.laws_round import nothing_lost, steps_bound
from spec.laws_step import served_ids
from spec.views import LEAVING, STEP_VERBS, Blocks, Group, State
from spec.words import is_decode, remaining_work

FORMAT = 2
_KEY = ',"digest":"'
_SUFFIX = len(_KEY) + 32 + len('"}\n')
_FULL_RECOUNT = 1024  # lines between two counts of all references from nothing
_QUIET = {"step", "decodes", "ends", "slots", "run", "rows", "computes", "mid", "outcome", "after"}  # parts of a line


class Finding(NamedTuple):
    """Something wrong: the line, the law where one is broken, and what was seen."""

    line: int
    law: Law | None
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {f'{self.law} ' if self.law else ''}{self.text}".rstrip()


@dataclass
class Audit:
    """What an audit saw.  findings: all of the first line at which something is wrong; none for a lawful trace."""

    lines: int = 0
    steps: int = 0
    groups: int = 0
    failed_steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list)
    verbs: Counter[str] = field(default_factory=Counter)

    @property
    def lawful(self) -> bool:
        """The whole trace was read and everything in it is as it must be."""
        return not self.findings

    @property
    def laws(self) -> tuple[str, ...]:
        """The ids of the laws that the offending line breaks."""
        return tuple(one.law.id for one in self.findings if one.law is not None)


class _Word(NamedTuple):
    """Stands for an enum of the scheduler's: laws read its value."""

    value: str


_made: Any = tuple.__new__  # of a named tuple, without a count of the fields
_DEVICE = {"running": 0, "swapped": 1}
_STATUS = {name: _Word(name) for name in ("running", "swapped", "waiting", "finish", "abort", "fail")}


@dataclass(frozen=True)
class Config:
    """The configuration, by the names that laws use."""

    num_gpu_blocks: int
    num_cpu_blocks: int
    block_size: int
    max_model_len: int
    tokens: int
    seqs: int
    enable_chunked_prefill: bool
    mode: _Word | None
    watermark_blocks: int

    @classmethod
    def of(cls, stated: dict[str, Any]) -> Config:
        values = dict(stated)
        mode = values.pop("preemption_mode")
        values["tokens"] = values.pop("max_num_batched_tokens")
        values["seqs"] = values.pop("max_num_seqs")
        return cls(mode=None if mode is None else _Word(mode), **values)


class _Entry(NamedTuple):
    verb: str
    request_id: str
    blocks: int = 0
    detail: str = ""


class _Row(NamedTuple):
    group: Group
    branch: int
    start: int
    end: int
    block_table: Sequence[int]
    slots: list[int]
    draws: tuple[int, ...]


@dataclass
class _Plan:
    """What laws read of a plan."""

    log: list[_Entry]
    groups: list[tuple[Group, int]]
    scheduled: list[_Row]
    blocks_to_swap_out: list[tuple[int, int]]
    blocks_to_swap_in: list[tuple[int, int]]
    blocks_to_copy: list[tuple[int, int]]
    num_prefill_tokens: int
    num_decode_tokens: int


class _Wrong(Exception):  # noqa: N818  (a finding on its way up)
    def __init__(self, text: str, *laws: Law) -> None:
        super().__init__(text)
        self.text, self.laws = text, laws


class _Pool:
    """References of one device, counted from the tables, and which group's they are."""

    def __init__(self, capacity: int) -> None:
        self.refs = [0] * capacity
        self.owner: list[str] = [""] * capacity
        self.used = 0

    def drop(self, tables: Iterable[Iterable[int]]) -> None:
        refs = self.refs
        for table in tables:
            for block in table:
                refs[block] -= 1
                if not refs[block]:
                    self.used -= 1

    def name(self, tables: Iterable[Iterable[int]], owner: str) -> None:
        refs, owners = self.refs, self.owner
        for table in tables:
            for block in table:
                if block < 0:
                    raise IndexError(block)
                if not refs[block]:
                    self.used += 1
                    owners[block] = owner
                elif owners[block] != owner:
                    raise _Wrong(f"block {block} is in tables of {owners[block]} and of {owner}", BY_ID["B5t"])
                refs[block] += 1


class _Books:
    """The state that the lines read so far add up to."""

    def __init__(self, header: dict[str, Any], in_full: bool) -> None:
        self.in_full = in_full
        self.config = Config.of(header["config"])
        self.groups: dict[str, Group] = {}
        self.queues: dict[str, list[str]] = {"running": [], "swapped": [], "waiting": []}
        self.home: dict[str, str] = {}  # the queue of each group
        self.members: dict[str, None] = {}  # of the scheduler's books
        self.left: dict[str, str] = {}  # who left them last, and what they became
        self.owed: bool = header["owed"]
        self.arrivals: int = header["arrivals"]
        self.blocks = Blocks(*header["counts"])
        self.work = 0
        self.works: dict[str, int] = {}
        self.pools = (_Pool(self.config.num_gpu_blocks), _Pool(self.config.num_cpu_blocks))
        self.counted: dict[str, tuple[int, tuple[tuple[int, ...], ...]]] = {}  # device and tables as counted
        self.shadow = Shadow(self.config.block_size, self.config.num_gpu_blocks, self.config.num_cpu_blocks)
        self.verified: dict[str, list[int]] = {}  # positions of each branch whose contents are known to be right
        # tables found right, for which branches and blocks, and the shortest and longest of those branches
        self.covered: dict[str, tuple[Any, tuple[int, ...], int, int, int]] = {}
        self.doubts: list[_Wrong] = []
        self.marked: set[str] = set()  # groups that carry tokens or a status out of the ordinary
        self.lanes = Lanes(self)  # the decodes that go on as they did; their groups are what they were when they began
        if self.blocks != (self.config.num_gpu_blocks, self.config.num_cpu_blocks):
            raise _Wrong("the free blocks of an idle scheduler are not all blocks", BY_ID["B1"])

    def state(self, calm: int = 0, ghost: Group | None = None) -> State:
        """The state as laws see it, without the last `calm` groups of waiting and their names.

        ghost: stands for the lanes, in the place of the last of them.
        """
        groups = self.groups
        running, swapped, waiting = self.queues.values()
        names: Iterable[str] = self.members
        calm = calm if len(self.members) == len(running) + len(swapped) + len(waiting) else 0
        lanes = self.lanes.by_name if ghost is not None else ()
        front: list[str] = []
        if ghost is not None:
            cut = len(running)
            while running[cut - 1] not in lanes:
                cut -= 1
            front, running = [name for name in running[:cut] if name not in lanes], running[cut:]
        if calm:
            waiting = waiting[:-calm]
            names = [name for queue in (front, running, swapped, waiting) for name in queue if name in self.members]
        elif ghost is not None:
            names = [name for name in self.members if name not in lanes]
        inside = [groups[name] for name in running]
        if ghost is not None:
            inside = [*[groups[name] for name in front], ghost, *inside]
            names = (GHOST, *names)
        return State(
            self.config,
            tuple(inside),
            tuple([groups[name] for name in swapped]),
            tuple([groups[name] for name in waiting]),
            tuple(names),
            self.blocks,
            self.owed,
            None if self.in_full else self.lanes.measure,
        )

    def whole(self, s: State, running: Sequence[str], more: int, tokens: bool) -> State:
        """The state with each of the lanes in its place instead of the ghost.

        running: the order of the queue.  more, tokens: as `Lanes.group` says.
        """
        lanes = self.lanes
        shown = {g.request_id: g for g in s.running}
        everyone = [shown[name] if name in shown else lanes.group(name, more, tokens) for name in running]
        return s._replace(running=tuple(everyone), groups=(*s.groups[1:], *lanes.by_name), measure=None)

    def calm(self, line: dict[str, Any]) -> int:
        """How many groups at the end of waiting need not be looked at in this line.

        No part of it moves or changes them, and all laws on them were checked when they came: each law is about single
        groups, neighbours or sums.  One more is looked at, the neighbour of those that do change.
        """
        waiting = self.queues["waiting"]
        length = calm = len(waiting)
        for part in ("before", "mid", "after"):
            change = line.get(part)
            if change is not None and "waiting" in change:
                before = length
                for at, removed, inserted in splices(change["waiting"]):
                    calm = min(calm, before - at - removed)
                    length += len(inserted) - removed
        if calm <= 1:
            return 0
        first = self.groups[waiting[-calm]].arrival
        for part in ("before", "mid", "after"):
            for name in line.get(part, {}).get("groups", ()):
                if name in self.groups and self.home.get(name) == "waiting" and self.groups[name].arrival >= first:
                    return 0
        return calm - 1

    def apply(self, change: dict[str, Any], given: dict[str, int], lengths: dict[str, int] | None = None) -> set[str]:
        """Take over what a line says has changed; the names of the groups that are not as they were.

        given: the tokens that the groups carry.  lengths: of those that are longer and of which nothing else is stated.
        """
        moved: set[str] = set()
        home = self.home
        parts = [(name, *part) for name in self.queues if name in change for part in splices(change[name])]
        past, where = 0, ""
        for name, at, removed, _ in parts:
            queue = self.queues[name]
            past, where = past if name == where else 0, name
            if not past <= at <= at + removed <= len(queue):
                raise _Wrong(f"{name} has {len(queue)} groups; {removed} cannot be taken out at {at}")
            past = at + removed
            for out in queue[at:past]:
                home[out] = ""
                moved.add(out)
        for name, at, removed, inserted in reversed(parts):  # from the back, so that places stay what they were
            self.queues[name][at : at + removed] = inserted
            for came in inserted:
                home[came] = name
            moved.update(inserted)
        stated = change.get("groups", {})
        if lengths:
            if not lengths.keys().isdisjoint(stated):
                raise _Wrong("a length is stated twice")
            stated = {**stated, **{name: {"known": known} for name, known in lengths.items()}}
        tokens, groups = given.get, self.groups
        for name in {*self.marked, *stated, *given, *moved}:
            old, one = groups.get(name), stated.get(name)
            if old is None or (one and len(one) != ("known" in one)):
                self._change(name, one, tokens(name, 0))
                continue
            # by far the most frequent: tokens and status, and at most the length
            known = one["known"] if one else old[8]
            status = _STATUS[home.get(name) or "finish"]
            groups[name] = new = _made(Group, (*old[:8], known, *old[9:13], tokens(name, 0), old[14], old[15], status))
            if one:
                work = new.deficit + new.live * (new.max_tokens - 1 - known + new.prompt_len)  # words.remaining_work
                self.work += work - self.works.get(name, 0)
                self.works[name] = work
        self.marked = set(given)
        for name, one in stated.items():
            if "tokens" in one or "status" in one:
                self.marked.add(name)
        touched = moved.union(stated)
        self.left = dict(change.get("left", ()))
        for name in self.left:
            del self.members[name]
            touched.add(name)
        for name in change.get("joined", ()):
            if name in self.members or name not in self.groups:
                raise _Wrong(f"{name} cannot be new")
            self.members[name] = None
        self._recount(touched, change.get("refs", ((), ())))
        for name in self.left.keys() - self.members.keys():
            self.groups.pop(name, None)
            self.home.pop(name, None)
            self.work -= self.works.pop(name, 0)
        self._compare(change)
        for name in stated:
            if not home.get(name):
                raise _Wrong(f"{name} is in no queue, and something is stated of it")
        return touched

    def _change(self, name: str, stated: dict[str, Any] | None, tokens: int) -> None:
        """Put a group's stated values in place of the old ones; tokens and status follow from the rest by default."""
        old = self.groups.get(name)
        values = {key: value for key, value in (stated or {}).items() if key != "table"}
        values["status"] = _STATUS[values["status"]] if "status" in values else _STATUS[self.home.get(name) or "finish"]
        values.setdefault("tokens", tokens)
        if "branches" in values:
            values["branches"] = tuple(values["branches"])
        if "tables" in values:
            values["tables"] = tuple(map(tuple, values["tables"]))
        elif stated and "table" in stated:
            tables = list(old.tables) if old is not None else []
            for branch, kept, rest in stated["table"]:
                if not 0 <= branch < len(tables) or not 0 <= kept <= len(tables[branch]):
                    raise _Wrong(f"{name}: branch {branch} has no {kept} blocks to keep")
                tables[branch] = (*tables[branch][:kept], *rest)
            values["tables"] = tuple(tables)
        fresh = old is None or "arrival" in values
        self.groups[name] = new = Group(request_id=name, **values) if fresh else old._replace(**values)  # type: ignore[union-attr]
        if stated:
            work = remaining_work(new)
            self.work += work - self.works.get(name, 0)
            self.works[name] = work

    def _recount(self, touched: set[str], stated: Sequence[Sequence[int]]) -> None:
        """Count the references of these groups again: first what they no longer name, then what they do.

        stated: for each device block, references, block, references, ... of all blocks of which that changes.
        """
        blocks: tuple[set[int], set[int]] = set(), set()
        now: list[tuple[str, int, tuple[tuple[int, ...], ...]]] = []
        for name in touched:
            device = _DEVICE.get(self.home.get(name, ""), -1) if name in self.groups else -1
            tables = self.groups[name].tables if device >= 0 else ()
            before, old = self.counted.get(name, (-1, ()))
            if (before, old) == (device, tables):
                continue
            gone, came = old, tables
            if before == device and len(old) == len(tables):
                gone = came = ()
                for a, b in zip(old, tables, strict=True):
                    if a != b:
                        kept = _common(a, b)
                        gone, came = (*gone, a[kept:]), (*came, b[kept:])
            for place, parts in ((before, gone), (device, came)):
                if place >= 0:
                    blocks[place].update(*parts)
            if self.in_full:  # else what stays in a table is not counted again
                gone, came = old, tables
            if before >= 0:
                self.pools[before].drop(gone)
                del self.counted[name]
            if device >= 0:
                now.append((name, device, came))
                self._unverify(name, old if before == device else (), tables)
            else:
                self.verified.pop(name, None)
        for name, device, tables in now:
            self.pools[device].name(tables, name)
            self.counted[name] = device, self.groups[name].tables
        for pool, pairs, those in zip(self.pools, stated, blocks, strict=True):
            if list(pairs[::2]) != sorted(those):
                self._doubt("the blocks whose references are stated are not those that the tables touch", "B3")
            for block, refs in zip(pairs[::2], pairs[1::2], strict=True):
                if pool.refs[block] != refs:
                    self._doubt(f"block {block} has {refs} references and {pool.refs[block]} table entries", "B3")

    def _unverify(self, name: str, old: tuple[tuple[int, ...], ...], new: tuple[tuple[int, ...], ...]) -> None:
        """Contents are known only as far as the tables are what they were."""
        size = self.config.block_size
        known = self.verified.get(name, [])
        fresh = []
        for branch, table in enumerate(new):
            was = old[branch] if branch < len(old) else ()
            done = known[branch] if branch < len(known) and was else 0
            if was is not table:
                done = min(done, _common(was, table) * size)
            fresh.append(done)
        self.verified[name] = fresh

    def _compare(self, change: dict[str, Any]) -> None:
        """The counters that the line states beside what changed."""
        self.owed = change.get("owed", self.owed)
        gpu, cpu, members, work = change["counts"]
        self.blocks = Blocks(gpu, cpu)
        for pool, free in zip(self.pools, self.blocks, strict=True):
            if len(pool.refs) - pool.used != free:
                self._doubt(f"{free} blocks are free and {pool.used} of {len(pool.refs)} named", "B1")
        if members != len(self.members):
            self._doubt(f"{members} groups are counted, {len(self.members)} known")
        if work != self.work:
            self._doubt(f"the remaining work is stated as {work}, the groups' add up to {self.work}")

    def _doubt(self, text: str, law: str = "") -> None:
        """A counter that is not what the rest adds up to: told after the laws, which say more where one is broken."""
        self.doubts.append(_Wrong(text, *([BY_ID[law]] if law else [])))

    def tables(self, s: State, names: set[str]) -> list[Law]:
        """B4t of these groups: it is about each group alone.

        Of a decode whose tables are those that were seen before, only the lengths can have become wrong.
        """
        size, covered = self.config.block_size, self.covered
        doubtful = set()
        for name in names:
            g = self.groups.get(name)
            if g is None:
                covered.pop(name, None)
                continue
            seen = None if self.in_full else covered.get(name)
            if seen is not None and g.forked and g.deficit == g.live and self.home[name] == "running":
                tables, branches, held, least, most = seen
                if g.tables is tables and g.branches is branches and g.held == held:
                    done = g.known - 1
                    if least >= -(-done // size) and most <= done // size + 1:
                        continue
            doubtful.add(name)
        broken = _tables(s, doubtful)
        for name in doubtful if not broken else ():
            g = self.groups.get(name)
            if g is not None and g.branches:
                lengths = [len(g.tables[branch]) for branch in g.branches]
                covered[name] = g.tables, g.branches, g.held, min(lengths), max(lengths)
        return broken

    def recount(self) -> None:
        """References of all tables, counted from nothing."""
        for device, queue in enumerate(("running", "swapped")):
            refs = [0] * len(self.pools[device].refs)
            for name in self.queues[queue]:
                for table in self.groups[name].tables:
                    for block in table:
                        refs[block] += 1
            if refs != self.pools[device].refs:
                raise _Wrong("the references do not add up to the tables", BY_ID["B3"])

    # contents

    def write(self, plan: _Plan) -> None:
        """Carry a plan out on the names of tokens."""
        if self.in_full:
            self.shadow.execute(plan)
        else:
            self.shadow.move(plan)
            self._write_rows(plan)
        for row in plan.scheduled:
            known = self.verified[row.group.request_id]
            if max(known, default=0) > row.start:  # of any branch, since full prompt blocks are shared
                known[:] = [min(done, row.start) for done in known]

    def _write_rows(self, plan: _Plan) -> None:
        """The writes of a plan of which S10r holds, block by block: each row's slots are its table's own."""
        gpu, size = self.shadow.gpu, self.config.block_size
        for g, branch, at, end, table, _, _ in plan.scheduled:
            prompt = (g.arrival + 1) * _GROUP
            own = prompt + (branch + 1) * _BRANCH
            while at < end:
                slot = table[at // size] * size + at % size
                to = min(end, at - at % size + size, g.prompt_len if at < g.prompt_len else end)
                token = at + (prompt if at < g.prompt_len else own)
                gpu[slot : slot + to - at] = range(token, token + to - at)
                at = to

    def contents(self, names: Iterable[str]) -> None:
        """Every computed position of these groups' tables holds its own token (B7)."""
        size = self.config.block_size
        for name in names:
            device, _ = self.counted.get(name, (-1, ()))
            if device < 0:
                continue
            g, known = self.groups[name], self.verified[name]
            pool = self.shadow.cpu if device else self.shadow.gpu
            prompt = (g.arrival + 1) * _GROUP
            lead: tuple[int, ...] = ()
            for branch, done in computed(g):
                table, own = g.tables[branch], prompt + (branch + 1) * _BRANCH
                first = known[branch]
                if not lead:
                    lead, shown = table, done
                elif first < min(shown, g.prompt_len) and not self.in_full:
                    # the first branch has shown the prompt as far as its blocks are the same
                    first = max(first, min(_common(lead, table) * size, shown, g.prompt_len))
                while first < done:
                    slot = table[first // size] * size + first % size
                    # as far as one block goes, and one of the two ways in which tokens are named
                    to = min(done, first - first % size + size, g.prompt_len if first < g.prompt_len else done)
                    token = first + (prompt if first < g.prompt_len else own)
                    if pool[slot : slot + to - first] != list(range(token, token + to - first)):
                        raise _Wrong(f"{name}, branch {branch}: position {first} or one after it holds another token",
                                     BY_ID["B7"])  # fmt: skip
                    first = to
                known[branch] = done


class Auditor:
    """Reads a trace line by line; `line` returns what is wrong with one, and nothing may be read after that.

    in_full: evaluate everything that a line may have changed, also where less is enough to know what would be found.
    """

    def __init__(self, in_full: bool = False) -> None:
        self.in_full = in_full
        self.seen = Audit()
        self.books: _Books | None = None
        self.digest = ""
        self.step = 0
        self.ended = False
        self.deadlines: dict[str, int] = {}  # L3: the step before which each group leaves; none after a failed step
        self.bounds: dict[str, int] = {}

    def line(self, text: str) -> list[Finding]:
        """What is wrong with the next line."""
        self.seen.lines = number = self.seen.lines + 1
        if self.ended:
            return [Finding(number, None, "there is a line after the trailer")]
        if text.endswith("\n") and not text.strip():
            return [Finding(number, None, "the line is blank: no trace has blank lines")]
        if not text.endswith('"}\n') or len(text) <= _SUFFIX:
            return [Finding(number, None, "the line is cut off: the trace ends in the middle of it")]
        body, stated = text[:-_SUFFIX] + "}", text[-35:-3]
        digest = blake2b((self.digest + body).encode(), digest_size=16).hexdigest()
        findings = []
        if digest != stated or text[-_SUFFIX:-35] != _KEY:
            findings.append(
                Finding(
                    number, None, "the digest is not that of this line after the one before: changed or out of place"
                )
            )
        self.digest = digest
        try:
            self._read(json.loads(body))
        except _Wrong as wrong:
            findings += [Finding(number, law, wrong.text) for law in wrong.laws or (None,)]
        except Exception as error:
            findings.append(Finding(number, None, f"the line makes no sense here: {type(error).__name__}: {error}"))
        return findings

    def end(self) -> list[Finding]:
        """What is wrong with the end of the file."""
        if self.ended:
            return []
        number = self.seen.lines
        return [Finding(number, None, f"the trace is cut off after line {number}: the trailer is missing")]

    def _read(self, line: dict[str, Any]) -> None:
        if self.books is None:
            self._header(line)
        elif "end" in line:
            self._trailer(line)
        elif line.get("step") != self.step:
            raise _Wrong(f"step {line.get('step')} follows step {self.step - 1}: lines are missing, double or moved")
        else:
            self._step(line, self.books)
            self.step += 1
            self.seen.steps += 1

    def _header(self, line: dict[str, Any]) -> None:
        if line.get("trace") != "lawful":
            raise _Wrong("this is not the header of a trace")
        if line["format"] != FORMAT:
            raise _Wrong(f"the format is {line['format']}; this audit reads {FORMAT}")
        if wrong := wrong_header(line):
            raise _Wrong(wrong)
        self.books = _Books(line, self.in_full)
        self.step = line["steps"]

    def _trailer(self, line: dict[str, Any]) -> None:
        assert self.books is not None
        self.books.lanes.end_all()
        self._events(line, self.books)
        stated, have = line["end"], {"lines": self.seen.lines, "steps": self.seen.steps}
        if stated != have:
            raise _Wrong(f"the trailer states {stated}; read were {have}")
        self.books.recount()
        self.ended = True

    # one step

    def _step(self, line: dict[str, Any], books: _Books) -> None:
        lanes = books.lanes
        lanes.look(line)
        quiet = line.keys() == _QUIET and len(line["after"]) == 2 and len(line["mid"]) == 1
        quiet = quiet and 0 < lanes.live == len(line["slots"])
        if quiet and self._only_goes_on(line, books):
            return
        lanes.settled = False
        calm = books.calm(line)
        events = self._events(line, books)
        if "raised" in line and "run" not in line:
            raise _Wrong(f"schedule raised {line['raised']}", BY_ID["S8"])
        ghost = lanes.ghost()
        before, stood = books.state(calm, ghost), list(books.queues["running"])
        log = _log(line.get("log", ()))
        decodes, lengths = _decodes(line, books)
        given = {name: len(slots) for name, _, slots in decodes}
        given.update(line["run"])
        touched = books.apply(line["mid"], given)
        mid = books.state(calm, ghost and ghost._replace(tokens=ghost.live))
        ran = list(books.queues["running"])
        prefills, computed = line["computes"]
        out, back, copies = ([(a, b) for a, b in line.get(name, ())] for name in ("out", "in", "copy"))
        groups = [(books.groups[name], len(slots)) for name, _, slots in decodes]
        groups += [(books.groups[name], tokens) for name, tokens in line["run"]]
        rows = _decode_rows(decodes, books.groups)
        rows += [_row(row, books) for row in line["rows"]]
        plan = _Plan(events + log, groups, rows, out, back, copies, prefills, computed)
        self.seen.tokens += prefills + computed
        shown = plan
        if ghost is not None:  # it runs where the last of the lanes does
            all_lanes = next(g for g in mid.running if g.request_id == GHOST), lanes.live
            shown = replace(plan, groups=[*groups[: lanes.place], all_lanes, *groups[lanes.place :]])
        step = _observe(before, shown, mid)
        broken = _step_laws(step, books)
        if (broken or (step.admitted and len(mid.running) < 2)) and ghost is not None:
            broken = _step_laws(_whole_step(line, step, books, stood, ran), books)
        _obey(broken, books)
        _account_for_schedule(step, log, touched)
        books.write(plan)
        if "outcome" not in line:
            if "raised" in line:
                raise _Wrong(f"what came of the step raised {line['raised']}", BY_ID["S8"])
            return  # the trace was closed in the midst of a step
        logged = _log(line.get("logged", ()))
        plan.log += logged
        books.work -= lanes.live
        changed = books.apply(line["after"], {}, lengths)
        after = books.state(calm, ghost and ghost._replace(known=ghost.known + 1))
        turn = views.conclude(step, after)
        failed = line["outcome"] == "fail"
        if not failed and line["outcome"] != "update":
            raise _Wrong(f"the outcome is {line['outcome']!r}")
        looked_at = changed | touched | given.keys()
        broken = _round_laws(turn, failed, looked_at, books)
        if broken and ghost is not None:
            whole = _whole_step(line, step, books, stood, ran)
            end = books.whole(after, books.queues["running"], 1, False)
            broken = _round_laws(views.conclude(whole, end), failed, looked_at, books)
        _obey(broken, books)
        self._arrivals(logged, books, changed, self.step + 1)
        _account_for_outcome(turn, logged, changed, failed, books.left)
        if not failed:
            books.contents(looked_at)
        self._in_time(books, failed)
        for entry in log + logged:
            self.seen.verbs[entry.verb] += 1
        self.seen.failed_steps += failed
        lanes.advance()
        if not failed and not self.in_full:
            for name in given:
                lanes.begin(name)
        if self.seen.lines % _FULL_RECOUNT == 0:
            books.recount()

    def _only_goes_on(self, line: dict[str, Any], books: _Books) -> bool:
        """A line says only that all lanes go on, and everything is in order; False if in doubt.

        No group is another but for the lengths of the lanes, so the laws on states say what they said after the line
        before, and those on ids and rounds have nothing to look at but the lanes.  What is left are the laws on the
        step, which look at the blocks and tokens that it leaves; after another such line they are given the same again.
        """
        lanes = books.lanes
        live, stated = lanes.live, [*books.blocks, len(books.members)]
        if line["run"] or line["rows"] or line["computes"] != [0, live]:
            return False
        if line["mid"]["counts"] != [*stated, books.work] or line["after"]["counts"] != [*stated, books.work - live]:
            return False
        if not lanes.settled:
            ghost, calm = lanes.ghost(), books.calm(line)
            assert ghost is not None
            before, running = books.state(calm, ghost), ghost._replace(tokens=live)
            mid = before._replace(running=tuple([running if g is ghost else g for g in before.running]))
            plan = _Plan([], [(running, live)], [], [], [], [], 0, live)
            step = views.observe(before, plan, mid)
            if plain.check_step(step) or plain.check_mid(step):
                return False
            lanes.settled = True
        books.work -= live
        self.seen.tokens += live
        self._in_time(books, False)
        lanes.advance()
        if self.seen.lines % _FULL_RECOUNT == 0:
            books.recount()
        return True

    def _events(self, line: dict[str, Any], books: _Books) -> list[_Entry]:
        """Arrivals and aborts since the step before: they and nothing else change the state."""
        if "events" not in line:
            if "before" in line:
                raise _Wrong("something changed between two steps without a word in the log")
            return []
        events = _log(line["events"])
        ghost = books.lanes.ghost()
        before = books.state(0, ghost)
        was = dict(books.groups)
        books.apply(line["before"], {})
        after = books.state(0, ghost)
        fresh = set(after.groups) - set(before.groups)
        broken = plain.check_state(after) + _tables(after, fresh)
        if broken and ghost is not None:
            whole = books.whole(after, books.queues["running"], 0, False)
            broken = plain.check_state(whole) + _tables(whole, fresh)
        _obey(broken, books)
        expected = dict.fromkeys(before.groups)
        new: set[str] = set()
        for verb, name, blocks, detail in events:
            if verb == "add" and name not in expected:
                expected[name] = None
                new.add(name)
                held = 0
            elif verb == "abort" and name in expected:
                del expected[name]
                if name not in new and books.left.get(name) != verb:
                    raise _Wrong(f"{name} left by {verb} in the log and by {books.left.get(name)} in its status")
                held = 0 if name in new else was[name].held
                new.discard(name)
            else:
                raise _Wrong(f"{verb} {name} cannot happen between two steps")
            if blocks != held or detail:
                raise _Wrong(f"{verb} {name} states {blocks} blocks; they were {held}")
        if list(expected) != list(after.groups):
            raise _Wrong("the groups are not those that the log leaves", BY_ID["N1"])
        for old, queue in ((before.running, after.running), (before.swapped, after.swapped)):
            if [g for g in old if g.request_id in expected and g.request_id not in new] != list(queue):
                raise _Wrong("an arrival or abort moved or changed another group")
        kept = [g for g in before.waiting if g.request_id in expected and g.request_id not in new]
        if kept != list(after.waiting[: len(kept)]):
            raise _Wrong("an arrival or abort moved or changed another group")
        if self.owed_changed(before, after):
            raise _Wrong("an arrival or abort changed whose turn it is")
        self._arrivals(events, books, new, self.step)
        for verb, _, _, _ in events:
            self.seen.verbs[verb] += 1
        return events

    @staticmethod
    def owed_changed(before: State, after: State) -> bool:
        return bool(before.decodes_owed != after.decodes_owed)

    def _arrivals(self, log: list[_Entry], books: _Books, new: set[str], first_step: int) -> None:
        """Arrivals are numbered without gap; each starts its clock."""
        last = {name: i for i, (verb, name, _, _) in enumerate(log) if verb == "add"}
        for i, (verb, name, _, _) in enumerate(log):
            if verb != "add":
                if verb in LEAVING:
                    self.bounds.pop(name, None)
                    self.deadlines.pop(name, None)
                continue
            number, books.arrivals = books.arrivals, books.arrivals + 1
            self.seen.groups += 1
            g = books.groups.get(name)
            if g is None or name not in new or last[name] != i:
                continue  # gone again already
            if g.arrival != number or g.branches != (0,):
                raise _Wrong(f"{name} is arrival {number}, not {g.arrival}, and begins as branch 0")
            self.bounds[name] = steps_bound(g, [], books.config.enable_chunked_prefill)
            self.deadlines[name] = first_step + sum(self.bounds.values())

    def _in_time(self, books: _Books, failed: bool) -> None:
        """L3: whoever is the most senior has not outstayed its bound; a failed step starts all clocks anew."""
        if failed:
            self.deadlines.clear()
        for queue in books.queues.values():
            if queue:
                name = queue[0]
                if self.step + 1 >= self.deadlines.get(name, self.step + 2):
                    raise _Wrong(f"{name} should have left before step {self.deadlines[name]}", BY_ID["L3"])
                return


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many blocks two tables have in common from the start."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _log(entries: Iterable[Sequence[Any]]) -> list[_Entry]:
    return [_Entry(*entry) for entry in entries]


_Decode = tuple[str, int, list[int]]  # name, end, slots


def _decodes(line: dict[str, Any], books: _Books) -> tuple[list[_Decode], dict[str, int]]:
    """What the columns of a line say of all but the lanes; and the new lengths of those that have one stated."""
    names = line.get("decodes", ())
    known = line.get("after", {}).get("known") or [0] * len(names)
    slots, stated = line.get("slots", []), line["mid"].get("groups", {})
    decodes: list[_Decode] = []
    lengths: dict[str, int] = {}
    at = 0
    for name, end, length in zip(names, line.get("ends", ()), known, strict=True):
        lane = books.lanes.by_name.get(name)
        if lane is not None:
            at += lane.live
            continue
        g = books.groups.get(name)
        if g is None:
            raise _Wrong(f"the plan names {name}, whom nobody knows")
        count = len(stated[name].get("branches", g.branches) if name in stated else g.branches)
        decodes.append((name, end, slots[at : at + count]))
        at += count
        if length:
            lengths[name] = length
    if at != len(slots):
        raise _Wrong(f"there are {len(slots)} slots for {at} decodes' rows")
    return decodes, lengths


def _decode_rows(decodes: list[_Decode], groups: Mapping[str, Group]) -> list[_Row]:
    """One row for each branch, of its last token, which it draws from."""
    rows: list[_Row] = []
    for name, end, slots in decodes:
        g = groups[name]
        tables = g.tables
        for branch, slot in zip(g.branches, slots, strict=True):
            rows.append(_made(_Row, (g, branch, end - 1, end, tables[branch], [slot], (branch,))))
    return rows


def _observe(before: State, plan: _Plan, mid: State) -> views.Step:
    try:
        return views.observe(before, plan, mid)
    except KeyError as error:
        raise _Wrong(f"the plan names {error}, which was in no queue", BY_ID["S19"]) from None


def _whole_step(line: dict[str, Any], step: views.Step, books: _Books, stood: list[str], ran: list[str]) -> views.Step:
    """The same step with all lanes as groups of their own.  stood, ran: the queue running before and after it."""
    before, mid = books.whole(step.before, stood, 0, False), books.whole(step.mid, ran, 0, True)
    now = {g.request_id: g for queue in (mid.running, mid.swapped, mid.waiting) for g in queue}
    decodes: list[_Decode] = []
    at = 0
    for name, end in zip(line["decodes"], line["ends"], strict=True):
        count = len(now[name].branches)
        decodes.append((name, end, line["slots"][at : at + count]))
        at += count
    groups = [(now[name], len(slots)) for name, _, slots in decodes]
    groups += [(now[name], tokens) for name, tokens in line["run"]]
    rows = step.plan.scheduled
    rows = _decode_rows(decodes, now) + rows[len(rows) - len(line["rows"]) :]
    plan = replace(step.plan, groups=groups, scheduled=rows)
    schedule = replace(plan, log=plan.log[: len(line.get("events", ())) + len(line.get("log", ()))])
    return _observe(before, schedule, mid)._replace(plan=plan)


def _row(stated: list[Any], books: _Books) -> _Row:
    name, branch, start, end, runs, draws, *table = stated
    g = books.groups[name]
    if len(runs) == 2 and runs[1] == 1:
        slots = [runs[0]]
    else:
        slots = [
            slot for first, count in zip(runs[::2], runs[1::2], strict=True) for slot in range(first, first + count)
        ]
    if branch < 0:
        raise IndexError(branch)
    return _made(_Row, (g, branch, start, end, table[0] if table else g.tables[branch], slots, tuple(draws)))  # type: ignore[no-any-return]


def _obey(broken: list[Law], books: _Books) -> None:
    """Stop at laws broken, and then at counters that do not add up."""
    if broken:
        raise _Wrong("", *broken)
    if books.doubts:
        raise books.doubts[0]


_tables_cover = plain.checker((BY_ID["B4t"],))
_ids_step = plain.checker(tuple(law for law in IDS_STEP if law.id != "B6"))
_moves_and_totals = plain.checker(tuple(law for law in IDS_STEP if law.id in ("S9", "S21")))


def _step_laws(step: views.Step, books: _Books) -> list[Law]:
    return plain.check_step(step) + plain.check_mid(step) + plain.check_state_in_mid(step.mid) + _rows(step, books)


def _round_laws(turn: views.Round, failed: bool, names: set[str], books: _Books) -> list[Law]:
    broken = plain.check_state(turn.after) + books.tables(turn.after, names)
    if failed:
        return broken + ([] if nothing_lost(turn) else [BY_ID["N1"]])
    return broken + plain.check_round(turn)


def _rows(step: views.Step, books: _Books) -> list[Law]:
    """The laws on ids of a step.  Most lines only decode: then one walk over the rows sees that all is right."""
    plan = step.plan
    if books.lanes.by_name and GHOST in step.given:  # its rows have been looked at
        plan = replace(plan, num_decode_tokens=plan.num_decode_tokens - step.given[GHOST])
        step = step._replace(plan=plan, served=tuple([v for v in step.served if v.was.request_id != GHOST]))
    if not books.in_full and _only_decodes(step, plan, books):
        return _moves_and_totals(step)
    return _ids_step(step) + _exclusive(plan, books)


def _only_decodes(step: views.Step, plan: _Plan, books: _Books) -> bool:
    """Every group with tokens is a decode with one row a branch, each just as S10r, S12r and B6 ask; False if in doubt.

    A decode computes the last position of each branch, after the prompt, in a block of the branch's own.
    """
    size, refs, rows = books.config.block_size, books.pools[0].refs, plan.scheduled
    slots: set[int] = set()
    at, last = 0, len(rows)
    for was, g, tokens in step.served:
        if not g.forked or not tokens == g.deficit == was.deficit == g.live:
            return False
        known = g.known
        block, offset = divmod(known - 1, size)
        before = -1
        for branch in g.branches:
            if at == last or branch <= before:
                return False
            before = branch
            one, number, start, end, table, those, draws = rows[at]
            at += 1
            own = g.tables[branch]
            if one is not g or number != branch or start != known - 1 or end != known or draws != (branch,):
                return False
            if (table is not own and tuple(table) != own) or block >= len(own):
                return False
            home = own[block]
            slot = home * size + offset
            if those != [slot] or refs[home] != 1:
                return False
            slots.add(slot)
    return at == last == len(slots)


def _exclusive(plan: _Plan, books: _Books) -> list[Law]:
    """B6 by the references that are counted already, where the predicate counts all tables anew."""
    size, refs = books.config.block_size, books.pools[0].refs
    slots: set[int] = set()
    count = 0
    for g, _, start, end, _, those, _ in plan.scheduled:
        if end - start != len(those):
            return [BY_ID["B6"]]
        shared = g.prompt_len // size * size
        for position, slot in enumerate(those, start):
            if position >= shared and refs[slot // size] != 1:
                return [BY_ID["B6"]]
        slots.update(those)
        count += len(those)
    return [] if len(slots) == count else [BY_ID["B6"]]


def _tables(s: State, names: Iterable[str]) -> list[Law]:
    """B4t of the groups that may have changed: it is about each group alone."""
    return _tables_cover(
        s._replace(
            running=tuple([g for g in s.running if g.request_id in names]),
            swapped=tuple([g for g in s.swapped if g.request_id in names]),
            waiting=tuple([g for g in s.waiting if g.request_id in names]),
        )
    )


# the log accounts for everything

_MOVES: dict[tuple[str, str], tuple[tuple[str, ...], ...]] = {
    ("waiting", "running"): (("admit",),),
    ("swapped", "running"): (("swap_in",),),
    ("running", "swapped"): (("preempt swap", "swap_out"),),
    ("running", "waiting"): (("preempt recompute",), ("preempt swap", "swap_out", "demote")),
    ("swapped", "waiting"): (("demote",),),
    ("running", "running"): ((), ("grow",)),
    ("swapped", "swapped"): ((),),
    ("waiting", "waiting"): ((),),
}
_TAKES = frozenset(("admit", "swap_in", "grow"))


def _homes(s: State) -> Iterator[tuple[str, str]]:
    for queue in ("running", "swapped", "waiting"):
        for g in getattr(s, queue):
            yield g.request_id, queue


def _account_for_schedule(step: views.Step, log: list[_Entry], touched: set[str]) -> None:
    """Each group changed queue and blocks exactly as the log says, in the order of the policy."""
    verbs: dict[str, list[_Entry]] = {name: [] for name in touched}
    for entry in log:
        if entry.verb not in STEP_VERBS:
            raise _Wrong(f"{entry.verb} is no action of a step")
        verbs.setdefault(entry.request_id, []).append(entry)
    if verbs:
        old, new = dict(_homes(step.before)), dict(_homes(step.mid))
        for name, own in verbs.items():
            move = old[name], new[name]
            told = tuple(f"{one.verb} {one.detail}".rstrip() for one in own)
            if told not in _MOVES[move]:
                raise _Wrong(f"{name} went from {move[0]} to {move[1]} with {', '.join(told) or 'no word'} in the log")
            was, now = step.was[name], step.now[name]
            out = 0
            for entry in own:
                if entry.verb in ("admit", "swap_in"):
                    right = now.held
                elif entry.verb == "grow":
                    right = now.held - was.held
                elif entry.verb == "preempt":
                    right = was.held
                elif entry.verb == "swap_out":
                    right = out = now.held if move[1] == "swapped" else own[-1].blocks
                else:
                    right = was.held if move[0] == "swapped" else out
                if entry.blocks != right:
                    raise _Wrong(f"{entry.verb} {name} states {entry.blocks} blocks; they were {right}")
            if not own and (was.held != now.held or was.tables != now.tables or was.tail_shared != now.tail_shared):
                raise _Wrong(f"{name} changed its blocks with no word in the log")
    order = {name: rank for rank, name in enumerate(step.given)}
    takers = [order.get(entry.request_id, -1) for entry in log if entry.verb in _TAKES]
    losers = [step.was[entry.request_id].arrival for entry in log if entry.verb == "preempt"]
    if takers != sorted(takers) or losers != sorted(losers, reverse=True):
        raise _Wrong("the log's order is not that of the step")
    if step.plan.groups and not step.config.enable_chunked_prefill:
        left_out = any(g.request_id not in served_ids(step) and is_decode(g) for g in step.mid.running)
    else:
        left_out = False
    if step.mid.decodes_owed is not left_out:
        raise _Wrong("decodes are owed a step exactly when this one left them out", BY_ID["S17"])


def _account_for_outcome(
    turn: views.Round, log: list[_Entry], changed: set[str], failed: bool, left: dict[str, str]
) -> None:
    """Forks, finished branches and departures are in the log, with the blocks they had; and nothing else is."""
    step, after = turn.step, turn.after
    new = {g.request_id: g for g in (*after.running, *after.swapped, *after.waiting)}
    verbs: dict[str, list[_Entry]] = {name: [] for name in changed}
    for entry in log:
        verbs.setdefault(entry.request_id, []).append(entry)
    for name, own in verbs.items():
        was, now = step.now.get(name), new.get(name)
        if not (
            own or failed or was is None or now is None or was.forked != now.forked or was.branches != now.branches
        ):
            continue  # nothing happened to it, and nothing is said of it
        expected: list[_Entry] = []
        begun = next((i for i, entry in enumerate(own) if entry.verb == "add"), None)
        if was is None or (begun is not None and begun > 0):
            told = [entry.verb for entry in own]
            if begun is None or told[begun:] != (["add"] if now else ["add", "abort"]):
                raise _Wrong(f"{name} is not accounted for: {', '.join(told)}")
            if was is None:
                continue
            own, now = own[:begun], None
        if failed and now is not None:
            if was.held:
                swapped = was.status.value == "swapped"
                expected = [_Entry("demote", name, was.held) if swapped else
                            _Entry("preempt", name, was.held, "recompute")]  # fmt: skip
        elif now is None:
            last = own[-1] if own else _Entry("", name)
            if last.verb not in LEAVING:
                raise _Wrong(f"{name} left with no word in the log")
            if last.verb != left.get(name):
                raise _Wrong(f"{name} left by {last.verb} in the log and by {left.get(name)} in its status")
            sampled = last.verb == "finish"
            if sampled and was.deficit != step.given.get(name, 0):
                raise _Wrong(f"{name} finished though it drew nothing", BY_ID["S12"])
            forked = sampled and not was.forked and was.n > 1
            forked = forked or (last.verb == "abort" and len(own) > 1)
            expected = [_Entry("fork", name, 0, str(was.n))] if forked else []
            expected.append(_Entry(last.verb, name, was.held))
        else:
            if now.forked and not was.forked and now.n > 1:
                expected.append(_Entry("fork", name, 0, str(now.n)))
            branches = was.branches if was.forked else range(was.n) if now.forked else was.branches
            expected += [
                _Entry("finish_branch", name, 0, str(branch)) for branch in branches if branch not in now.branches
            ]
        if own != expected:
            said, right = (", ".join(f"{e.verb} [{e.blocks}] {e.detail}".rstrip() for e in one) or "nothing"
                           for one in (own, expected))  # fmt: skip
            raise _Wrong(f"of {name} the log says {said}; what happened is {right}")


def audit(path: str | Path, in_full: bool = False) -> Audit:
    """Read a trace to its end, or to the first line at which something is wrong.  in_full: as `Auditor` says.

    Raises OSError, or UnicodeDecodeError when it is not text.
    """
    auditor = Auditor(in_full)
    begun = time.perf_counter()
    with open(path, encoding="utf-8", newline="\n") as lines:
        for text in lines:
            auditor.seen.findings = auditor.line(text)
            if auditor.seen.findings:
                break
        else:
            auditor.seen.findings = auditor.end()
    auditor.seen.seconds = time.perf_counter() - begun
    return auditor.seen
