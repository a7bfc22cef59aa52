"""`lawful replay`: a dumped violation, run again from the command line; its exit statuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.cli import main
from engine.scheduler.contracts import lifted
from engine.scheduler.recorder import dump_state
from proofs.mutants import MUTANTS
from proofs.scopes import SMALL
from spec.check.explore import explore
from spec.check.report import Replayed


@pytest.fixture
def dump() -> dict[str, Any]:
    """What contracts would write when the old admission rule breaks S1: the state before the step, and the call."""
    mutant = next(one for one in MUTANTS if one.id == "AdmitsWhileSwapped")
    world = SMALL["chunked-n2-cpu4"].world
    with lifted():
        violation = explore(world, lambda: mutant.build(world.config), mutant.new_group, laws={"S1"}).violation
        assert violation is not None
        run = Replayed(lambda: mutant.build(world.config), mutant.new_group)
        for event in violation.run[:-1]:
            run.carry_out(event)
    return {
        "law": "S1",
        "message": "",
        "scheduler": "proofs.mutants:AdmitsWhileSwapped",
        "state": dump_state(run.s),
        "calls": [{"call": "schedule"}],
        "plans": [],
    }


def test_a_violation_is_run_again_and_its_law_named(
    dump: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "dump.json"
    path.write_text(json.dumps(dump))
    assert main(["replay", str(path)]) == 1
    out = capsys.readouterr().out
    assert "S1 no_prefill_while_swapped" in out
    assert ">> schedule" in out
    assert out.endswith(f"{path}: S1 is broken again\n")


def test_the_production_scheduler_goes_on_lawfully_from_the_same_state(
    dump: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "dump.json"
    path.write_text(json.dumps({**dump, "scheduler": "engine.scheduler.scheduler:Scheduler"}))
    assert main(["replay", str(path)]) == 0
    assert "S1 was broken then; now every law holds" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("not json", "is not a dump"),
        ("{}", "is not a dump"),
        ('{"scheduler": "no.such.module:X", "state": {}, "calls": [], "law": "S1"}', "cannot be imported"),
    ],
)
def test_what_is_no_dump_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str
) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_text(content)
    assert main(["replay", str(path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("lawful: error: ")
    assert message in error


def test_the_class_of_a_script_is_said_where_it_is(
    dump: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, script = tmp_path / "dump.json", tmp_path / "mine.py"
    path.write_text(json.dumps({**dump, "scheduler": "__main__:Mine"}))
    script.write_text("from proofs.mutants import AdmitsWhileSwapped\n\n\nclass Mine(AdmitsWhileSwapped):\n    pass\n")
    assert main(["replay", str(path)]) != 0
    assert "--policy path.py:Class" in capsys.readouterr().err
    assert main(["replay", str(path), "--policy", f"{script}:Mine"]) == 1
    assert capsys.readouterr().out.endswith(f"{path}: S1 is broken again\n")
