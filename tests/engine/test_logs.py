"""Log lines: shown by default, never twice, and never in the middle of a progress bar."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import logging
from engine.logs import speak_by_default
{before}
speak_by_default()
speak_by_default()
{after}
logging.getLogger("lawful").info("moving")
logging.getLogger("lawful").warning("slow")
"""
BASIC = "logging.basicConfig(level=logging.{level})"


def lines(before: str = "", after: str = "", **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before=before, after=after)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=True,
    )
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_a_program_without_logging_sees_what_the_engine_says() -> None:
    shown = lines()
    assert [line.split()[0] for line in shown] == ["INFO", "WARNING"]
    assert [line.split()[-1] for line in shown] == ["moving", "slow"]


def test_the_environment_turns_it_off() -> None:
    assert lines(LAWFUL_CONFIGURE_LOGGING="0") == ["slow"], "what Python itself shows of any library"


@pytest.mark.parametrize("level", ["INFO", "WARNING"])
def test_a_program_with_its_own_logging_sees_every_line_once(level: str) -> None:
    own = ["INFO:lawful:moving", "WARNING:lawful:slow"][level == "WARNING" :]
    assert lines(before=BASIC.format(level=level)) == own
    assert lines(after=BASIC.format(level=level))[-1:] == own[-1:], "also if it sets it up later"
    assert len(lines(after=BASIC.format(level=level))) == 2


def test_a_line_while_a_bar_is_shown_stands_above_it() -> None:
    program = """
import sys
from tests.oracle import World
world = World(gpu=32)
from engine import SamplingParams
from engine.logs import speak_by_default
import logging
speak_by_default()
world.before = lambda plan: logging.getLogger("lawful").info("a step")
world.llm().generate([1, 2, 3], SamplingParams(max_tokens=2))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    for line in done.stderr.replace("\r", "\n").splitlines():
        assert not ("a step" in line and "Processed" in line), done.stderr
    assert done.stderr.count("a step") >= 2
