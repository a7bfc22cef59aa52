"""Traces: what a scheduler did, recorded and audited; every tampering is found at its line.

A recorded run is lawful; a line changed, dropped, doubled, moved or cut off is reported where it is, with the law where
one is broken, also when whoever changed it computed all digests again.
"""

from __future__ import annotations

import functools
import gc
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cli import main
from engine.core import EngineCore
from engine.llm import LLM
from engine.models.oracle import OracleRunner
from engine.sampler import Sampler
from engine.sampling import SamplingParams
from engine.scheduler import RefusedError, Scheduler, SchedulerConfig, SequenceGroup
from engine.scheduler.contracts import lifted
from engine.scheduler.trace import TraceWriter
from proofs.mutants import MUTANTS
from proofs.scopes import SMALL
from spec.check.explore import explore
from spec.check.report import Replayed
from spec.check.trace import Audit, Auditor, Finding, audit
from tests.oracle import World
from tests.test_soak import large_request
from tests.test_soak import step as soak_step
from tests.worlds import Run, random_request, random_world, world

MODES = (None, "swap", "recompute")


# recorded runs


def record_world(path: Path, seed: int) -> Audit:
    """A random scheduler world of the soak, aborts and failures included, recorded and audited."""
    rng = random.Random(seed)
    s = random_world(rng)
    trace = TraceWriter(s, path)
    rate = rng.choice([0.0, 0.01, 0.1])
    run = Run(s, stop=lambda group, branch: rng.random() < rate)
    trouble, burst = rng.choice([0.0, 0.02, 0.2]), rng.choice([1, 4, 16])
    seen: Any = Counter()
    for i in range(30):
        try:
            s.add(random_request(rng, s) if rng.random() < 0.2 else large_request(rng, s))
        except RefusedError:
            continue
        if i % burst == 0:
            soak_step(run, rng, trouble, seen)
    while s.has_unfinished():
        soak_step(run, rng, trouble, seen)
    trace.close()
    return audit(path)


def test_recorded_soaks_are_lawful(tmp_path: Path) -> None:
    """Random configurations of both orders and all modes, with aborts and failed steps at any moment."""
    verbs: dict[str, int] = {}
    failed = 0
    for seed in range(24):
        seen = record_world(tmp_path / "trace", seed)
        assert seen.lawful, [seed, *map(str, seen.findings)]
        assert seen.lines == seen.steps + 2
        failed += seen.failed_steps
        for verb, count in seen.verbs.items():
            verbs[verb] = verbs.get(verb, 0) + count
    for verb in (
        *("add", "admit", "grow", "preempt", "swap_out", "swap_in", "demote", "fork", "finish", "finish_branch"),
        *("abort", "fail"),
    ):
        assert verbs[verb], f"{verb} never happened"
    assert failed


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunked", [True, False])
def test_traces_of_the_engine_are_lawful(tmp_path: Path, chunked: bool, mode: str | None) -> None:
    """The KV oracle under memory pressure, with aborts, in both orders and all modes."""
    oracle = World(
        gpu=24, cpu=8, bs=4, t=16 if chunked else 48, s=12, length=48, enable_chunked_prefill=chunked,
        preemption_mode=mode,
    )  # fmt: skip
    trace = TraceWriter(oracle.scheduler, tmp_path / "trace")
    rng = random.Random(f"{chunked}{mode}")
    for i in range(30):
        oracle.add(f"r{i}", p=rng.randint(1, 20), n=rng.choice([1, 2, 3]), m=rng.randint(1, 16))
        if i % 7 == 6:
            oracle.step()
            oracle.abort(f"r{i - 3}")
    oracle.drain()
    trace.close()
    seen = audit(tmp_path / "trace")
    assert seen.lawful, list(map(str, seen.findings))
    assert seen.steps == len(oracle.plans)
    assert seen.groups == 30
    assert seen.verbs["preempt"]


def test_a_recorded_scheduler_decides_as_any_other(tmp_path: Path) -> None:
    def plans(recorded: bool) -> list[dict[str, Any]]:
        rng = random.Random(5)
        s = world(14, 5, 2, 6, 6, 24)
        trace = TraceWriter(s, tmp_path / "trace") if recorded else None
        for _ in range(10):
            group = large_request(rng, s)
            group.request_id = f"g{rng.random()}"
            s.add(group)
        made = []
        while s.has_unfinished():
            plan = s.schedule()
            made.append(plan.to_dict())
            s.update(plan)
        if trace is not None:
            trace.close()
        return made

    assert plans(True) == plans(False)


# the engine's switch


def oracle_llm(record_trace: Path | None) -> LLM:
    config = SchedulerConfig(num_gpu_blocks=16, num_cpu_blocks=8, block_size=4, max_model_len=48)
    runner = OracleRunner(64, 16, 8, 4, Sampler(64, frozenset()), num_layers=2)
    return LLM.from_core(EngineCore(config, runner, None, vocab_size=64, record_trace=record_trace))


def test_llm_records_when_asked_and_holds_no_prompt(tmp_path: Path) -> None:
    llm = oracle_llm(tmp_path / "deep" / "trace")
    llm.generate([[61, 62, 63]] * 5, SamplingParams(n=2, max_tokens=6, ignore_eos=True), use_tqdm=False)
    llm.close()
    llm.close()
    text = (tmp_path / "deep" / "trace").read_text()
    assert audit(tmp_path / "deep" / "trace").lawful
    keys = {key for line in text.splitlines() for key in json.loads(line)}
    assert keys <= {
        *("trace", "format", "scheduler", "config", "arrivals", "steps", "owed", "counts", "digest", "end"),
        *("step", "events", "before", "log", "decodes", "ends", "slots", "run", "rows", "computes"),
        *("out", "in", "copy", "mid"),
        *("outcome", "logged", "after"),
    }
    llm.generate([[1]], SamplingParams(max_tokens=2), use_tqdm=False)  # the engine goes on without a trace
    assert (tmp_path / "deep" / "trace").read_text() == text


def test_nothing_is_in_the_way_when_off() -> None:
    s = oracle_llm(None).core.scheduler
    assert not {"schedule", "update", "fail"} & set(vars(s))
    assert type(s) is Scheduler


def test_the_trace_ends_with_its_engine(tmp_path: Path) -> None:
    llm = oracle_llm(tmp_path / "trace")
    llm.generate([[1, 2]], SamplingParams(max_tokens=3), use_tqdm=False)
    assert not audit(tmp_path / "trace").lawful, "not ended yet"
    del llm
    gc.collect()
    assert audit(tmp_path / "trace").lawful


@pytest.mark.parametrize(("leave", "whole"), [("sys.exit(0)", True), ("os._exit(0)", False)])
def test_an_exit_ends_the_trace_and_a_crash_leaves_whole_lines(tmp_path: Path, leave: str, whole: bool) -> None:
    program = f"""
import os, sys
from pathlib import Path
from engine.sampling import SamplingParams
from tests.test_trace import oracle_llm
llm = oracle_llm(Path({str(tmp_path / "trace")!r}))
llm.core.add_request("a", [1, 2, 3], SamplingParams(max_tokens=9))
llm.core.step()
llm.core.step()
llm.core.add_request("b", [1, 2, 3], SamplingParams(max_tokens=9))
{leave}
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parent.parent)
    seen = audit(tmp_path / "trace")
    assert seen.steps == 2
    assert seen.lawful is whole
    if not whole:
        assert [str(one) for one in seen.findings] == [
            "line 3: the trace is cut off after line 3: the trailer is missing"
        ]


def test_a_busy_scheduler_is_not_recorded(tmp_path: Path) -> None:
    s = world(8)
    s.add(large_request(random.Random(0), s))
    with pytest.raises(ValueError, match="before the first request"):
        TraceWriter(s, tmp_path / "trace")


def test_a_group_that_comes_back_under_its_name_is_another(tmp_path: Path) -> None:
    s = world(8, 2, 2)
    trace = TraceWriter(s, tmp_path / "trace")
    for moment in range(4):
        s.add(SequenceGroup("a", 3, 2, 4))
        s.abort("a")
        s.add(SequenceGroup("a", 4, 1, 4))
        plan = s.schedule()
        s.abort("a") if moment % 2 else None
        s.update(plan)
        s.abort("a")
    trace.close()
    seen = audit(tmp_path / "trace")
    assert seen.lawful, list(map(str, seen.findings))
    assert seen.groups == 8


def test_a_step_under_way_at_the_end_is_audited_up_to_its_plan(tmp_path: Path) -> None:
    s = world(8)
    trace = TraceWriter(s, tmp_path / "trace")
    s.add(large_request(random.Random(0), s))
    s.schedule()
    trace.close()
    seen = audit(tmp_path / "trace")
    assert seen.lines == 3
    assert not seen.lawful or seen.steps == 1


# tampering


@functools.cache
def recorded(chunked: bool, mode: str | None, seed: int = 3) -> tuple[str, ...]:
    """The lines of a short run in which everything happens."""
    rng = random.Random(seed)
    s = world(14, 5, 2, 6 if chunked else None, 6, 24, enable_chunked_prefill=chunked, preemption_mode=mode)
    with tempfile.TemporaryDirectory() as folder, lifted():
        path = Path(folder) / "trace"
        trace = TraceWriter(s, path)
        run = Run(s, stop=lambda group, branch: rng.random() < 0.05)
        seen: Any = Counter()
        for i in range(10):
            s.add(large_request(rng, s))
            if i % 3 == 0:
                soak_step(run, rng, 0.1, seen)
        while s.has_unfinished():
            soak_step(run, rng, 0.1, seen)
        trace.close()
        return tuple(path.read_text().splitlines(keepends=True))


def read(lines: Any) -> list[Finding]:
    """What is wrong with the lines: the same laws at the same line as when all is evaluated."""
    short, full = (read_as(lines, in_full) for in_full in (False, True))
    assert [(one.line, one.law) for one in short] == [(one.line, one.law) for one in full]
    return short


def read_as(lines: Any, in_full: bool) -> list[Finding]:
    auditor = Auditor(in_full)
    for line in lines:
        findings = auditor.line(line)
        if findings:
            return findings
    return auditor.end()


def chained(contents: list[dict[str, Any]]) -> list[str]:
    """Lines of these contents with digests computed again, as a careful forger would."""
    digest, lines = "", []
    for content in contents:
        body = json.dumps({key: value for key, value in content.items() if key != "digest"}, separators=(",", ":"))
        digest = blake2b((digest + body).encode(), digest_size=16).hexdigest()
        lines.append(f'{body[:-1]},"digest":"{digest}"}}\n')
    return lines


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every number, word and flag of a line, with the way to it."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            if key != "digest":
                yield from leaves(inner, (*path, key))
    else:
        yield path, value


def put(content: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    copy = json.loads(json.dumps(content))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return copy


RUNS = st.sampled_from([(chunked, mode) for chunked in (True, False) for mode in MODES])


def test_the_recorded_runs_are_lawful_as_they_are() -> None:
    for chunked in (True, False):
        for mode in MODES:
            lines = recorded(chunked, mode)
            assert read(lines) == []
            assert read(chained([json.loads(line) for line in lines])) == []


@settings(max_examples=300, deadline=None)
@given(RUNS, st.data())
def test_a_forged_number_word_or_flag_is_found_at_its_line(run: tuple[bool, str | None], data: st.DataObject) -> None:
    """One value changed anywhere after the header, all digests computed again: laws and counters find it."""
    contents = [json.loads(line) for line in recorded(*run)]
    at = data.draw(st.integers(1, len(contents) - 1))
    path, value = data.draw(st.sampled_from(list(leaves(contents[at]))))
    if isinstance(value, bool):
        other: Any = not value
    elif isinstance(value, int):
        other = value + data.draw(st.integers(-3, 9).filter(bool))
    else:
        words = ["a", "swap", "recompute", "admit", "grow", "finish", "abort", "fail", "update", f"{value}x"]
        other = data.draw(st.sampled_from(words).filter(lambda word: word != value))
    if path == ("outcome",):
        other = "else"  # an update that served nobody's last token may as well have been a failure
    contents[at] = put(contents[at], path, other)
    findings = read(chained(contents))
    assert findings, f"{path} of line {at + 1} changed from {value} to {other}, and nobody saw"
    assert findings[0].line == at + 1, f"{path} of line {at + 1}: {value} to {other}: {findings[0]}"


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("what", ["decodes", "swaps", "forks"])
def test_every_number_of_a_line_is_forged(chunked: bool, what: str) -> None:
    """One by one, up and down, in a line that only decodes, one that moves blocks and one that makes branches."""

    def fits(line: dict[str, Any]) -> bool:
        if what == "swaps":
            return "out" in line or "in" in line
        if what == "forks":
            return any(entry[0] == "fork" for entry in line.get("logged", ()))
        return line["computes"][0] == 0 and len(line.get("decodes", ())) > 1

    runs = ([json.loads(line) for line in recorded(chunked, "swap", seed)] for seed in range(3, 20))
    contents, at = next((run, i) for run in runs for i, line in enumerate(run) if "run" in line and fits(line))
    contents = contents[: at + 1]
    for path, value in leaves(contents[at]):
        if isinstance(value, int) and not isinstance(value, bool):
            for other in (value - 1, value + 1):
                forged = [*contents[:at], put(contents[at], path, other)]
                findings = read(chained(forged))
                assert findings[0].line == at + 1, f"{path} of line {at + 1}: {value} to {other}"


@settings(max_examples=100, deadline=None)
@given(RUNS, st.data())
def test_a_changed_line_is_found_by_its_digest(run: tuple[bool, str | None], data: st.DataObject) -> None:
    lines = list(recorded(*run))
    at = data.draw(st.integers(0, len(lines) - 1))
    place = data.draw(st.integers(0, len(lines[at]) - 2))
    lines[at] = lines[at][:place] + ("7" if lines[at][place] != "7" else "3") + lines[at][place + 1 :]
    findings = read(lines)
    assert findings
    assert findings[0].line == at + 1


@settings(max_examples=100, deadline=None)
@given(RUNS, st.data(), st.booleans())
def test_a_line_dropped_doubled_moved_or_cut_off_is_found(
    run: tuple[bool, str | None], data: st.DataObject, forged: bool
) -> None:
    """At the first line that is out of place; with digests computed again too, for steps are numbered."""
    lines = list(recorded(*run))
    at = data.draw(st.integers(0, len(lines) - 2))
    how = data.draw(st.sampled_from(["drop", "double", "swap", "cut", "cut in the line"]))
    expected = at + 1
    if how == "drop":
        del lines[at]
    elif how == "double":
        lines.insert(at, lines[at])
        expected = at + 2
    elif how == "swap":
        lines[at], lines[at + 1] = lines[at + 1], lines[at]
    elif how == "cut":
        lines = lines[: at + 1]
    else:
        lines = [*lines[:at], lines[at][: data.draw(st.integers(1, len(lines[at]) - 1))]]
        forged = False
    if forged:
        lines = chained([json.loads(line) for line in lines])
    findings = read(lines)
    assert findings
    assert findings[0].line == expected, f"{how} {at + 1}: {findings[0]}"


def test_a_line_after_the_trailer_and_an_empty_file_are_found() -> None:
    lines = list(recorded(True, None))
    assert [str(one) for one in read([*lines, lines[-1]])] == [
        f"line {len(lines) + 1}: there is a line after the trailer"
    ]
    assert read([])[0].text.startswith("the trace is cut off after line 0")
    assert "header" in read(lines[1:])[-1].text


def test_an_action_dropped_from_the_log_is_found_though_the_rest_is_lawful() -> None:
    contents = [json.loads(line) for line in recorded(True, None)]
    for at, content in enumerate(contents):
        for key in ("events", "log", "logged"):
            for i in range(len(content.get(key, ()))):
                forged = contents[:]
                forged[at] = {**content, key: content[key][:i] + content[key][i + 1 :]}
                assert read(chained(forged))[0].line == at + 1


# planted faults

SCOPES = {  # the first small scope in which the fault breaks a law, for those that the first one does not show
    "AdmitsWhileSwapped": "chunked-n2-cpu4",
    "NeverSwapsIn": "chunked-n2-cpu4",
    "MixesPrefillsAndDecodes": "prefill-first-n2-swap",
    "RecomputesPastSwapped": "chunked-n2-cpu3-failures",
    "NoDemotion": "chunked-n2-cpu3-failures",
    "AlwaysRecomputes": "chunked-n2-cpu4",
    "KeepsDemotedSwapOut": "chunked-n2-cpu3-failures",
    "SwappedAreNotCounted": "chunked-n2-cpu4",
    "ForgetsCopies": "chunked-n2-cpu4",
    "LeaksAtFinish": "chunked-n2-cpu4",
    "SwapLosesSharing": "chunked-n2-cpu4",
}
TRACED = (
    *SCOPES,
    *("PrefillsFirstInChunked", "VictimIsMostSenior", "RecomputeKeepsProgress", "DropsVictim", "SmallestFirst"),
    *("IgnoresWatermark", "RowsBeginAtZero", "DrawsEveryChunk", "TokensNotRecorded", "FinishedStay", "UpdateRotates"),
    *("OneTokenTooMany", "WaitingStillHold"),
)


@pytest.mark.parametrize("name", TRACED)
def test_the_trace_of_a_planted_fault_names_the_law(tmp_path: Path, name: str) -> None:
    """The shortest run to a broken law, recorded from the faulty scheduler: the audit names that law at its line."""
    mutant = next(one for one in MUTANTS if one.id == name)
    config = SMALL[SCOPES.get(name, "chunked-n1-watermark")].world
    with lifted():
        violation = explore(config, lambda: mutant.build(config.config), mutant.new_group).violation
        assert violation is not None
        traces: list[TraceWriter] = []

        def make() -> Scheduler:
            s = mutant.build(config.config)
            traces.append(TraceWriter(s, tmp_path / "trace"))
            return s

        run = Replayed(make, mutant.new_group)
        for event in violation.run:
            run.carry_out(event)
        traces[0].close()
    seen = audit(tmp_path / "trace")
    assert violation.law.id in seen.laws, list(map(str, seen.findings))
    assert seen.findings[0].line == run.steps + 1


# the command


def test_audit_says_what_it_saw_and_its_status_says_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = list(recorded(True, "swap"))
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_text("".join(lines))
    assert main(["audit", str(good)]) == 0
    out = capsys.readouterr().out
    assert "lawful, from the header to the trailer" in out
    assert f"{len(lines)} lines" in out
    contents = [json.loads(line) for line in lines]
    at, key = next((i, key) for i, one in enumerate(contents) for key in ("out", "in", "copy") if key in one)
    del contents[at][key]
    bad.write_text("".join(chained(contents)))
    assert main(["audit", str(bad)]) == 1
    assert f"line {at + 1}: S9 plan_is_delta: " in capsys.readouterr().out
    assert main(["audit", "--json", str(bad)]) == 1
    seen = json.loads(capsys.readouterr().out)
    assert seen["findings"][0]["law"] == "S9"
    assert seen["lawful"] is False


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00", b"", b"hello\n", b'{"a": 1}\n', b'[1, 2, 3]"}\n' * 9])
def test_what_is_no_trace_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    assert main(["audit", str(path)]) == 1
    output = capsys.readouterr()
    assert str(path) in output.out + output.err
