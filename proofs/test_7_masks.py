"""Masks: no kernel has one that could be left out, and no kernel is left out of the proofs.

Each mask of each kernel's source is dropped in turn, and the proof must find what then goes wrong.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from kernels import paged_attention
from proofs import kernel_worlds as worlds
from proofs.kernel_replay import loaded
from proofs.test_7_kernels import FAULTS, SMALL, WORLDS
from spec.check.kernel import prove_kernel

KERNELS = {
    **SMALL,
    "decode-direct": (paged_attention, "paged_decode_kernel", worlds.paged_decode(3, 2, 20, 4, 16, 16, 32, True)),
}
# Where penalize's mask is off, its token is 0: in bounds, and of the program's own row.
HARMLESS = {"penalize": 2}


def without_each_mask(source: str, kernel: str) -> list[tuple[int, str]]:
    """(line, source) for each load or store of the kernel, with that mask true."""
    function = next(n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == kernel)
    calls = sorted((n for n in ast.walk(function) if isinstance(n, ast.Call)), key=lambda n: (n.lineno, n.col_offset))
    masks = [word.value for call in calls for word in call.keywords if word.arg == "mask"]
    lines = source.encode().splitlines(keepends=True)
    out = []
    for mask in masks:
        assert mask.end_lineno is not None
        assert mask.end_col_offset is not None
        first = sum(map(len, lines[: mask.lineno - 1])) + mask.col_offset
        last = sum(map(len, lines[: mask.end_lineno - 1])) + mask.end_col_offset
        out.append((mask.lineno, (source.encode()[:first] + b"True" + source.encode()[last:]).decode()))
    return out


@pytest.mark.parametrize("of", KERNELS)
def test_without_any_one_of_its_masks_a_kernel_is_refuted(of: str, tmp_path: Path) -> None:
    module, kernel, build = KERNELS[of]
    assert module.__file__ is not None
    changed = without_each_mask(Path(module.__file__).read_text(), kernel)
    assert changed
    proved = [
        line
        for line, source in changed
        if prove_kernel(getattr(loaded(source, tmp_path), kernel), build).refuted is None
    ]
    if kernel == "paged_decode_kernel":  # each of its two ways to store runs in one of the two worlds
        lines = Path(module.__file__).read_text().splitlines()
        other = "tl.store(part_" if of == "decode-direct" else "tl.store(out + "
        proved = [line for line in proved if other not in lines[line - 1]]
    assert len(proved) == HARMLESS.get(of, 0), f"lines {proved}"


def test_every_kernel_is_proved_and_has_planted_faults() -> None:
    """Functions that a launcher starts are called kernels, and no others."""
    found = {
        (f"kernels.{path.stem}", part.name)
        for path in Path(str(paged_attention.__file__)).parent.glob("*.py")
        for part in ast.parse(path.read_text()).body
        if isinstance(part, ast.FunctionDef) and part.name.endswith("_kernel")
    }
    assert len(found) == 12
    assert {(module.__name__, kernel) for module, kernel, _ in WORLDS.values()} == found
    assert {(module.__name__, kernel) for module, kernel, _ in SMALL.values()} == found
    planted = {of: {fault.what for fault in FAULTS if fault.of == of} for of in SMALL}
    for of, faults in planted.items():
        assert {"mask off by one", "wrong stride", "32-bit offset"} <= faults, of
        assert any("unmasked" in what for what in faults), of
    assert "slot -1" in planted["write_kv"]
