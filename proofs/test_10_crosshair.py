"""A second opinion: CrossHair on the smallest shapes of the small operations, with the same laws."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from proofs import second_opinion

ROOT = Path(__file__).parent.parent
deep = pytest.mark.slow
SOUND = [
    second_opinion.group_piece,
    second_opinion.one_prompt_keeps_every_law,
    pytest.param(second_opinion.one_decode_keeps_every_law, marks=deep),
    pytest.param(second_opinion.two_decodes_keep_every_law, marks=deep),
]
BROKEN = [
    pytest.param(second_opinion.broken_piece, 5),
    pytest.param(second_opinion.broken_growth, 60, marks=deep),
    pytest.param(second_opinion.broken_two_decodes, 60, marks=deep),
]


def opinion(function: object, seconds: int) -> tuple[int, str]:
    """CrossHair's exit status (0: nothing found, 1: a counterexample) and report, from a process of its own."""
    name = f"proofs.second_opinion.{function.__name__}"  # type: ignore[attr-defined]
    command = [sys.executable, "-m", "crosshair", "check", "--analysis_kind=asserts", "--report_all"]
    done = subprocess.run(
        [*command, f"--per_condition_timeout={seconds}", name],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60 + 4 * seconds,
        env={"PATH": "", "PYTHONPATH": str(ROOT), "LAWFUL_CONTRACTS": "off", "PYTHONHASHSEED": "0"},
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("function", SOUND, ids=lambda f: f.__name__)
def test_crosshair_confirms(function: object) -> None:
    status, report = opinion(function, 150)
    assert status == 0, report
    assert "Confirmed over all paths" in report, report


@pytest.mark.parametrize(("function", "seconds"), BROKEN, ids=lambda f: getattr(f, "__name__", ""))
def test_crosshair_refutes_a_planted_fault(function: object, seconds: int) -> None:
    status, report = opinion(function, seconds)
    assert status == 1, report
    assert "AssertionError" in report, report
