"""Decodes that go on are counted together by the audit, and it finds the same as when it looks at each of them.

Lines of wider runs than those of test_trace are forged in every number, and at random in their shape; both ways of
reading must come to the same laws at the same line, also in the lines after.
"""

from __future__ import annotations

import functools
import json
import pickle
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from engine.scheduler import RefusedError, Scheduler, SchedulerConfig, SequenceGroup
from engine.scheduler.contracts import lifted
from engine.scheduler.trace import TraceWriter, _splices
from spec.check.steady import GHOST
from spec.check.trace import Auditor, audit
from tests.test_soak import step as soak_step
from tests.test_trace import leaves, put
from tests.worlds import Run

Line = dict[str, Any]
Verdict = list[tuple[int, str]]


@functools.cache
def recorded(seed: int, trouble: float = 0.01) -> tuple[Line, ...]:
    """The lines of a run, without their digests."""
    rng = random.Random(seed)
    chunked = rng.random() < 0.6
    config = SchedulerConfig(
        num_gpu_blocks=rng.choice([30, 60]),
        num_cpu_blocks=rng.choice([0, 10, 30]),
        block_size=rng.choice([1, 4, 8, 16]),
        max_num_batched_tokens=rng.choice([48, 96]) if chunked else 128,
        max_num_seqs=rng.choice([12, 24]),
        max_model_len=100,
        enable_chunked_prefill=chunked,
        preemption_mode=rng.choice([None, "swap", "recompute"]),
    )
    s = Scheduler(config)
    with tempfile.TemporaryDirectory() as folder, lifted():
        path = Path(folder) / "trace"
        trace = TraceWriter(s, path)
        run = Run(s, stop=lambda group, branch: rng.random() < 0.01)
        seen: Any = Counter()
        for i in range(14):
            try:
                s.add(SequenceGroup(f"r{i}", rng.randint(1, 30), rng.choice([1, 1, 2, 3]), rng.randint(2, 40)))
            except RefusedError:
                continue
            if i % 2:
                soak_step(run, rng, trouble, seen)
        while s.has_unfinished():
            soak_step(run, rng, trouble, seen)
        trace.close()
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    return tuple({key: value for key, value in line.items() if key != "digest"} for line in lines)


def sealed(digest: str, line: Line) -> str:
    """The line with the digest that belongs to it after another."""
    body = json.dumps(line, separators=(",", ":"))
    return f'{body[:-1]},"digest":"{blake2b((digest + body).encode(), digest_size=16).hexdigest()}"}}\n'


class Readers:
    """Two auditors that have read the same lines: one that counts lanes together, and one that does not."""

    def __init__(self) -> None:
        self.short, self.full = Auditor(), Auditor(in_full=True)

    def read(self, line: Line) -> None:
        for one in (self.short, self.full):
            assert one.line(sealed(one.digest, line)) == []

    @property
    def lanes(self) -> int:
        """How many groups are counted together."""
        return len(self.short.books.lanes.by_name) if self.short.books is not None else 0

    def keep(self) -> Kept:
        return Kept(pickle.dumps(self.short), pickle.dumps(self.full))


class Kept:
    """Both auditors as they are, to read on from here as often as one likes."""

    def __init__(self, *states: bytes) -> None:
        self.states = states

    def verdict(self, lines: list[Line]) -> Verdict:
        """What is wrong with the lines that come next; the same in both ways of reading."""
        found = []
        for state in self.states:
            auditor = pickle.loads(state)
            found.append(next(filter(None, (auditor.line(sealed(auditor.digest, line)) for line in lines)), []))
        short, full = ([(one.line, one.law.id if one.law else "") for one in findings] for findings in found)
        assert short == full, f"{short} in short and {full} in full: {json.dumps(lines[0])}"
        return full


def kind(line: Line) -> str:
    """What happens in a line."""
    logged = {entry[0] for entry in line.get("logged", ())}
    log = {entry[0] for entry in line.get("log", ())}
    if "events" in line:
        return "events"
    if "preempt" in log or "swap_in" in log:
        return "moves"
    if "admit" in log:
        return "admits"
    if "finish" in logged:
        return "finishes"
    if "finish_branch" in logged:
        return "ends a branch"
    return "grows" if log else "goes on" if "run" in line and not line["run"] else "else"


KINDS = ("events", "moves", "admits", "finishes", "ends a branch", "grows", "goes on")


def moments(wanted: str) -> Iterator[tuple[Kept, Line]]:
    """Lines of a kind with lanes, each in its place."""
    for seed in range(100):
        readers = Readers()
        for line in recorded(seed):
            if readers.lanes > 1 and kind(line) == wanted:
                yield readers.keep(), line
                break
            readers.read(line)


@pytest.mark.parametrize("wanted", KINDS)
def test_every_number_word_and_flag_beside_lanes_is_forged(wanted: str) -> None:
    """One by one, up and down, in three lines of each kind: found, and in both ways as the same."""
    found = moments(wanted)
    for _ in range(3):
        kept, line = next(found)
        assert kept.verdict([line]) == []
        for path, value in leaves(line):
            if isinstance(value, bool):
                others: tuple[Any, ...] = (not value,)
            elif isinstance(value, int):
                others = (value - 1, value + 1, value + 16)
            else:
                others = (f"{value}x", "fail", "else", *line.get("decodes", ())[:2])
            for other in others:
                if other != value and (path, other) != (("outcome",), "fail"):
                    assert kept.verdict([put(line, path, other)]), f"{path}: {value} to {other} in {line}"


def lists_of(value: Any) -> Iterator[list[Any]]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if isinstance(value, list) and value:
        yield value
    for one in inner:
        yield from lists_of(one)


FIELDS = (
    *("held", "known", "deficit", "live", "max_tokens", "prompt_len", "arrival", "n", "tokens", "shared_blocks"),
    *("forked", "tail_shared", "status", "branches", "table"),
)


def forged(rng: random.Random, line: Line, names: list[str]) -> Line:
    """The line with something changed, dropped, doubled, exchanged or added."""
    line = json.loads(json.dumps(line))
    parts = [line[part] for part in ("before", "mid", "after") if isinstance(line.get(part), dict)]
    name = rng.choice(names)
    how = rng.choice(
        ["value", "value", "value", "list", "list", "key", "field", "entry", "splice", "twice", "exchange"]
    )
    if how == "value":
        path, value = rng.choice(list(leaves(line)))
        words = [*names, "a", "swap", "grow", "finish", "abort", "fail", f"{value}x"]
        if isinstance(value, bool):
            return put(line, path, not value)
        number = isinstance(value, int)
        return put(line, path, value + rng.choice([-16, -2, -1, 1, 2, 16]) if number else rng.choice(words))
    if how == "list":
        items = rng.choice(list(lists_of(line)))
        i, j = rng.randrange(len(items)), rng.randrange(len(items))
        what = rng.randrange(3)
        if what == 0:
            del items[i]
        elif what == 1:
            items.insert(i, items[i])
        else:
            items[i], items[j] = items[j], items[i]
    elif how == "key":
        part = rng.choice([line, *parts])
        part.pop(rng.choice(list(part)), None)
    elif how == "field":
        field = rng.choice(FIELDS)
        value = {
            "forked": rng.random() < 0.5,
            "tail_shared": rng.random() < 0.5,
            "status": rng.choice(["waiting", "running", "swapped", "finish"]),
            "branches": rng.choice([[0], [0, 1], [1]]),
            "table": [[0, rng.randint(0, 2), [rng.randrange(30)]]],
        }.get(field, rng.randint(0, 20))
        rng.choice(parts or [line]).setdefault("groups", {}).setdefault(name, {})[field] = value
    elif how == "entry":
        verbs = ["grow", "preempt", "admit", "swap_in", "demote", "finish", "abort", "fail", "add", "finish_branch"]
        line.setdefault(rng.choice(["log", "logged"]), []).append([rng.choice(verbs), name, rng.randint(0, 5)])
    elif how == "splice":
        splice = [rng.randint(0, 6), rng.randint(0, 2), rng.choice([[], [name]])]
        rng.choice(parts or [line]).setdefault(rng.choice(["running", "swapped", "waiting"]), []).extend(splice)
    elif how == "twice":
        line.setdefault("run", []).append([name, 1])
    else:
        text = json.dumps(line).replace(f'"{name}"', '"@"').replace(f'"{names[0]}"', f'"{name}"')
        line = json.loads(text.replace('"@"', f'"{names[0]}"'))
    return line


@pytest.mark.parametrize("seed", range(4))
def test_both_ways_of_reading_come_to_the_same(seed: int) -> None:
    """Whatever is done to a line, and in the two after it; what is lawful in one way is in the other."""
    rng = random.Random(f"forged {seed}")
    broken: Counter[str] = Counter()
    for number in range(seed * 10, seed * 10 + 6):
        readers, lines = Readers(), recorded(number)
        for at, line in enumerate(lines):
            if readers.lanes and rng.random() < 0.2 and "run" in line:
                kept, names = readers.keep(), list(readers.short.books.members)  # type: ignore[union-attr]
                for _ in range(8):
                    verdict = kept.verdict([forged(rng, line, names), *lines[at + 1 : at + 3]])
                    broken.update({law for _, law in verdict})
            readers.read(line)
    assert len(broken) > 15, "the forgeries break few laws"


def gone_on(line: Line, books: Any, name: str) -> Line:
    """The line as if the group, whose last block is full or whose tokens are made, had gone on in the slots behind."""
    size, slots = books.config.block_size, []
    at = 0
    for one in line["decodes"]:
        g = books.groups[one]
        behind = [g.tables[branch][-1] * size + (g.known - 2) % size + 1 for branch in g.branches]
        slots += behind if one == name else line["slots"][at : at + g.live]
        at += g.live
    counts = [*books.blocks, len(books.members)]
    return {
        **{key: value for key, value in line.items() if key not in ("log", "logged")},
        "slots": slots,
        "mid": {"counts": [*counts, books.work]},
        "after": {"known": [end + 1 for end in line["ends"]], "counts": [*counts, books.work - len(slots)]},
    }


def test_a_lane_goes_on_no_further_than_its_blocks_and_its_tokens() -> None:
    """A decode that got a block, or came to its last token, is said to have gone on without."""
    seen = Counter[str]()
    for seed in range(40):
        readers = Readers()
        for line in recorded(seed):
            what, log = kind(line), [*line.get("log", ()), *line.get("logged", ())]
            if what in ("grows", "finishes") and readers.lanes and len(log) == 1 and not line["run"]:
                short, full, name = readers.short.books, readers.full.books, log[0][1]
                assert short is not None
                assert full is not None
                g = full.groups[name]
                stopped = what == "finishes" and g.known + 1 - g.prompt_len < g.max_tokens  # it might have gone on
                if name in short.lanes.by_name and not stopped:
                    assert readers.keep().verdict([gone_on(line, full, name)]), f"{what}: {line}"
                    seen[what] += 1
            readers.read(line)
    assert seen["grows"] > 5
    assert seen["finishes"] > 5


def test_another_seniority_beside_lanes_is_seen_in_both_ways_or_none() -> None:
    """Of a group that is looked at, among lanes that are not: its neighbours in the queue are compared with it."""
    broken = 0
    for kept, line in islice(moments("grows"), 20):
        names = [name for name in line["mid"].get("groups", ()) if name in line["decodes"]]
        at = line["decodes"].index(names[0])
        for arrival in range(14):
            for part in ("mid", "after"):
                other = json.loads(json.dumps(line))
                stated = other[part].setdefault("groups", {}).setdefault(names[0], {})
                stated["arrival"] = arrival
                if part == "after":
                    stated["known"], other["after"]["known"][at] = other["after"]["known"][at], 0
                broken += bool(kept.verdict([other]))
    assert broken > 50


def test_lawful_runs_are_read_alike_and_mostly_by_lanes() -> None:
    rows = counted = quiet = 0
    for seed in range(12):
        readers = Readers()
        for line in recorded(seed, 0.0):
            readers.read(line)
            books = readers.short.books
            assert books is not None
            rows += len(line.get("slots", ())) + len(line.get("rows", ()))
            counted += books.lanes.live
            quiet += books.lanes.settled
        short, full = readers.short.seen, readers.full.seen
        assert short.findings == full.findings == []
        for name in ("lines", "steps", "groups", "tokens", "failed_steps", "verbs"):
            assert getattr(short, name) == getattr(full, name)
    assert counted > rows / 2
    assert quiet


def test_lanes_leave_the_books_as_if_each_had_been_looked_at() -> None:
    """When all lanes end, groups, contents and counts are those of the auditor that has none."""
    for seed in range(6):
        readers = Readers()
        for at, line in enumerate(recorded(seed)):
            readers.read(line)
            if at % 7 or "end" in line:
                continue
            short, full = (pickle.loads(state) for state in readers.keep().states)
            short.books.lanes.end_all()
            assert (short.books.lanes.live, short.books.lanes.held) == (0, 0)
            for name in ("groups", "queues", "home", "works", "work", "verified"):
                assert getattr(short.books, name) == getattr(full.books, name), name
            for name in full.books.groups:
                full.books.contents([name])
                short.books.verified[name] = [0] * len(short.books.verified.get(name, ()))
            short.books.contents(list(full.books.groups))  # every position from the first


def test_a_group_with_the_name_of_the_ghost_is_audited_without_lanes(tmp_path: Path) -> None:
    s = Scheduler(SchedulerConfig(num_gpu_blocks=20, num_cpu_blocks=0, block_size=4, max_model_len=64))
    trace = TraceWriter(s, tmp_path / "trace")
    s.add(SequenceGroup("a", 5, 1, 20))
    for i in range(40):
        if i == 6:
            s.add(SequenceGroup(GHOST, 5, 2, 20))
        s.update(s.schedule())
    trace.close()
    assert audit(tmp_path / "trace").lawful


def test_departures_state_nothing_of_those_between() -> None:
    """Two that leave are two splices: the others are not taken out and put back."""
    a, b, c, d, e = "abcde"
    assert list(_splices([a, b, c, d, e], [b, c, e])) == [(0, 1, []), (3, 1, [])]
    assert list(_splices([a, b], [a, b, c, d])) == [(2, 0, [c, d])]
    assert list(_splices([a, b, c], [a, d, c])) == [(1, 1, [d])]
    assert list(_splices([a, b, c], [a, c, b])) == [(1, 2, [c, b])]
    assert list(_splices([a], [a, a])) == [(1, 0, [a])]
    assert list(_splices([a, b], [a, b])) == []
