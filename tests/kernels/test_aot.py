"""Kernels compile for sm_80, sm_90 and sm_100 without a GPU, and the committed table is of these kernels."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "benchmarks" / "results" / "kernels_aot.md"
COMPILED = (
    "direct bf16 32/8 heads of 128, blocks",
    "prefill bf16 9/3 heads of 64",
    "rms_norm bf16 width 4096",
    "move_blocks",
    "sample vocabulary 128256",
)


@pytest.fixture(autouse=True)
def form() -> None:
    """In place of the folder's: nothing runs here."""


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: what the interpreter replaced cannot be compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def test_default_sizes_compile_for_every_architecture_without_spills() -> None:
    code = f"""
import json, sys
sys.path.insert(0, "benchmarks")
import kernels_aot as aot
out = []
for name in [n for n in aot.variants() if n.startswith({COMPILED!r})]:
    out += [(name, f.arch, f.kernel, f.spills, f.registers) for f in aot.compile_variant(name, aot.ARCHITECTURES)]
print(json.dumps(out))
"""
    done = script("-c", code)
    assert done.returncode == 0, done.stderr[-2000:]
    made = json.loads(done.stdout.strip().splitlines()[-1])
    assert {name for name, *_ in made} >= {"move_blocks *", "rms_norm bf16 width 4096 *"}
    assert len({name for name, *_ in made}) == len(COMPILED)
    for name, arch, _, spills, registers in made:
        assert spills == 0, (name, arch)
        assert 0 < registers <= 255
    for name in {name for name, *_ in made}:
        assert {arch for n, arch, *_ in made if n == name} == {80, 90, 100}


def rows() -> list[list[str]]:
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_the_committed_table_holds_every_variant_and_no_spill_where_none_may_be() -> None:
    listed = script(
        "-c", "import sys; sys.path.insert(0, 'benchmarks'); import kernels_aot as a; print(*a.variants(), sep='\\n')"
    )
    assert listed.returncode == 0, listed.stderr[-2000:]
    found = rows()
    assert {row[0] for row in found} == set(listed.stdout.strip().splitlines())
    sources = "".join(path.read_text() for path in (ROOT / "kernels").glob("*.py"))
    assert {row[1] for row in found} == set(re.findall(r"\ndef (\w+)_kernel\(", sources))
    for name, kernel, arch, *_, spills, _ in found:
        assert arch in ("80", "90", "100")
        if name.endswith("*") and (kernel.startswith(("paged_", "sample")) or "norm" in kernel):
            assert spills == "0", (name, arch)
    assert re.search(r"nothing here was measured on a device", TABLE.read_text())
