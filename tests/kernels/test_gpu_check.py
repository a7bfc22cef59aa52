"""The check for a GPU runs to its end without one: every part, at toy sizes, through the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def form() -> None:
    """In place of the folder's: the script chooses."""


def test_a_dry_run_finds_nothing_wrong_and_writes_every_figure(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = ["bash", "benchmarks/gpu_check.sh", str(tmp_path / "out"), "--dry-run", "--no-tests"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert done.stdout.rstrip().endswith("wrong: nothing")
    figures = json.loads((tmp_path / "out" / "figures.json").read_text())
    for what in ("limit: device copy", "decode attention", "prefill attention", "write_kv", "copy_blocks", "swap out"):
        assert any(name.startswith(what) for name in figures), what
    for what in ("swap in", "rms_norm", "sample 2 x 300, top-p 0.9", "decode step, batch 3"):
        assert any(name.startswith(what) for name in figures), what
    assert all(line["good"] is not False for line in figures.values() if isinstance(line, dict) and "good" in line)
