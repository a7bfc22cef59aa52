"""`lawful check`: the production scheduler keeps every law, the example policies are refuted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import engine.check
import spec.check.patience
from engine.check import load_policy
from engine.cli import main
from engine.scheduler import Scheduler, SchedulerConfig, SequenceGroup
from spec.check.worlds import SKETCHES
from spec.laws import LAWS


def checked(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    status = main(["check", "--json", *argv])
    return status, json.loads(capsys.readouterr().out)


def test_the_production_scheduler_keeps_every_law(capsys: pytest.CaptureFixture[str]) -> None:
    status, seen = checked(capsys)
    assert status == 0
    assert {line["id"] for line in seen["laws"]} == {law.id for law in LAWS}
    assert {line["id"] for line in seen["laws"] if line["verdict"] != "holds"} == {"E1"}
    assert seen["refinement"] == "holds"
    assert seen["plans_replayed"] > 10_000
    assert seen["worlds"].keys() == SKETCHES.keys()
    assert 0 < seen["longest_wait"]["steps"] <= seen["longest_wait"]["bound"]
    assert not seen["counterexamples"]
    assert seen["shapes"]["paths"] > 400
    assert not seen["shapes"]["not_kept"]


def test_the_old_rule_is_refuted(capsys: pytest.CaptureFixture[str]) -> None:
    """By admission while swapped (S1), the order it spoils (Q2) and the full swap area (S8), each with its run."""
    status, seen = checked(capsys, "--policy", "examples.policies.old_rule:OldRule")
    assert status == 1
    assert {"S1", "Q2", "S8"} <= seen["counterexamples"].keys()
    shown = seen["counterexamples"]["S8"]
    assert "Aborted due to the lack of CPU swap space" in shown
    (marked,) = [line for line in shown.splitlines() if line.startswith(">>")]
    assert "step 4" in marked


def test_the_pull_requests_rule_is_refuted(capsys: pytest.CaptureFixture[str]) -> None:
    """It keeps S1 and Q2, and yet aborts for lack of swap (S8), or hangs for ever (S18) behind half a prompt."""
    status, seen = checked(capsys, "--policy", "examples/policies/pull_request.py:PullRequest")
    assert status == 1
    assert not {"S1", "Q2"} & seen["counterexamples"].keys()
    assert {"S8", "S18", "L1"} <= seen["counterexamples"].keys()
    assert "run nobody" in seen["counterexamples"]["S18"]


@pytest.fixture
def one_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest world alone: for what is about the command and not about the laws."""
    name = "one branch, watermark"
    monkeypatch.setattr(engine.check, "worlds", lambda config: {name: SKETCHES[name].world(config)})


@pytest.mark.usefixtures("one_world")
def test_the_table_and_the_runs_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = tmp_path / "mine.py"
    policy.write_text(
        "from engine.scheduler import Scheduler\n\nclass Idle(Scheduler):\n    def _admit(self, step):\n        pass\n"
    )
    assert main(["check", "-q", "--policy", f"{policy}:Idle"]) == 1
    out = capsys.readouterr().out
    assert "mine:Idle: the laws at small scope" in out
    assert "S18" in next(line for line in out.splitlines() if "broken in the world" in line)
    assert ">> step 1" in out
    assert "broken: " in out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "must be module:Class"),
        ("no.such.module:Class", "cannot be imported"),
        ("no-such-file.py:Class", "cannot be imported"),
        ("examples.policies.old_rule:Other", "has no class 'Other'"),
        ("json:JSONDecoder", "is no scheduler: it has no method add()"),
    ],
)
def test_what_is_no_policy_is_explained(name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--policy", name]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("one_world")
def test_a_policy_that_symbols_cannot_follow_is_still_searched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "ranged.py"
    policy.write_text(
        "from engine.scheduler import Scheduler\n\n"
        "class Ranged(Scheduler):\n"
        "    def _catch_up(self, step):\n"
        "        for _ in range(step.tokens):\n"
        "            pass\n"
        "        super()._catch_up(step)\n"
    )
    status, seen = checked(capsys, "--policy", f"{policy}:Ranged")
    assert status == 0
    assert seen["shapes"]["not_run"]
    assert "symbols" not in {word for line in seen["laws"] for word in line["method"].split("; ")}


def test_every_world_accepts_its_whole_menu() -> None:
    for sketch in SKETCHES.values():
        s = Scheduler(sketch.world(SchedulerConfig).config)
        for i, (p, n, m) in enumerate(sketch.menu):
            s.add(SequenceGroup(str(i), p, n, m))


def test_the_examples_are_schedulers() -> None:
    assert issubclass(load_policy("examples.policies.old_rule:OldRule"), Scheduler)
    assert issubclass(load_policy("examples/policies/pull_request.py:PullRequest"), Scheduler)


def test_a_law_that_fails_only_on_symbols_is_told_with_its_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], one_world: None
) -> None:
    """Queue and place of every group, the numbers, what the code did, and the decisions on the way."""
    policy = tmp_path / "mine.py"
    policy.write_text(
        "from engine.scheduler import Scheduler\n\n"
        "class Half(Scheduler):\n"
        "    def _make_room(self, size, step):\n"
        "        return size <= self.blocks.cpu_free\n"
    )
    assert main(["check", "-q", "--policy", f"{policy}:Half"]) == 1
    out = capsys.readouterr().out
    text = out[out.index("not kept from this state") :]
    assert "    shape: 2 running, 1 swapped, 0 waiting, " in text
    assert "    config: GPU " in text
    assert "    before: running 2: b: known " in text
    assert "    before: swapped 1: c: known " in text
    assert "    the code: " in text
    assert "preempt b (by recompute)" in text
    assert "    after: waiting 1: b: known " in text
    assert "    all numbers: a.deficit = " in text
    assert "    the decisions on the way, where both were possible:" in text


def test_a_loop_over_tokens_is_not_followed_on_symbols_for_ever(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], one_world: None
) -> None:
    policy = tmp_path / "counting.py"
    policy.write_text(
        "from engine.scheduler import Scheduler\n\n"
        "class Counting(Scheduler):\n"
        "    def _admit(self, step):\n"
        "        left = step.tokens\n"
        "        while left > 0:\n"
        "            left -= 1\n"
        "        super()._admit(step)\n"
    )
    status, seen = checked(capsys, "--policy", f"{policy}:Counting")
    assert status == 0
    assert "Lengthy: more than " in seen["shapes"]["not_run"]


def test_a_call_that_never_returns_only_for_large_numbers_is_found_on_symbols(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], one_world: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spec.check.patience, "GRANTED", 0.5)
    policy = tmp_path / "stuck.py"
    policy.write_text(
        "from engine.scheduler import Scheduler\n\n"
        "class Stuck(Scheduler):\n"
        "    def _admit(self, step):\n"
        "        while step.tokens > 1000:\n"
        "            pass\n"
        "        super()._admit(step)\n"
    )
    status, seen = checked(capsys, "--policy", f"{policy}:Stuck")
    assert status == 1
    assert seen["shapes"]["not_kept"].keys() == {"S8"}
    assert "max_num_batched_tokens 100" in seen["shapes"]["not_kept"]["S8"]
