"""Who may import whom:  spec <- engine.scheduler <- engine -> kernels;  nothing imports proofs or tests."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STDLIB = set(sys.stdlib_module_names)
OURS = {"spec", "engine", "kernels", "proofs", "tests", "benchmarks", "examples"}

# layer -> what of ours, and what of others beside the standard library, it may import
ALLOWED: dict[str, tuple[set[str], set[str] | None]] = {
    "spec": ({"spec"}, {"z3", "icontract"}),
    "engine.scheduler": ({"spec", "engine.scheduler"}, {"icontract"}),
    "engine": ({"spec", "engine", "engine.scheduler", "kernels"}, None),
    "kernels": ({"kernels"}, {"torch", "triton", "llvmlite"}),
}


def layer(module: str) -> str:
    """The layer that a dotted name belongs to: engine.scheduler is one of its own."""
    for name in sorted(ALLOWED, key=len, reverse=True):
        if module == name or module.startswith(name + "."):
            return name
    return module.partition(".")[0]


def imports(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, wherever it stands; relative ones made absolute."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                longer = f"{start}.{alias.name}"
                yield node.lineno, longer if is_module(longer) else start
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return name.partition(".")[0] in OURS and (path.with_suffix(".py").exists() or (path / "__init__.py").exists())


def wrong(source: str, module: str, is_package: bool = False) -> list[str]:
    """The arrows of one file that are not allowed."""
    ours, others = ALLOWED[layer(module)]
    found = []
    for line, name in imports(source, module, is_package):
        top = name.partition(".")[0]
        if top in OURS:
            good = layer(name) in ours
        else:
            good = others is None or top in STDLIB or top in others
        if not good:
            found.append(f"{module}:{line} imports {name}")
    return found


def files() -> list[tuple[str, bool, Path]]:
    found = []
    for top in ("spec", "engine", "kernels"):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            found.append((".".join(parts[:-1] if is_package else parts), is_package, path))
    return found


def test_every_import_follows_the_arrows() -> None:
    found = files()
    assert len(found) > 30
    assert {layer(module) for module, _, _ in found} == set(ALLOWED)
    assert [line for module, package, path in found for line in wrong(path.read_text(), module, package)] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("spec.laws", "import engine.scheduler"),
        ("spec.laws", "from torch import Tensor"),
        ("spec.check.explore", "def f():\n    from engine import core"),
        ("engine.scheduler.blocks", "import torch"),
        ("engine.scheduler.blocks", "import numpy as np"),
        ("engine.scheduler.blocks", "from engine.request import RequestState"),
        ("engine.scheduler.blocks", "from engine import request"),
        ("engine.scheduler.blocks", "from .. import request"),
        ("engine.scheduler.blocks", "from ..request import RequestState"),
        ("engine.scheduler.blocks", "import importlib\nimportlib.import_module('kernels.pairs')"),
        ("kernels.pairs", "from engine.scheduler.plan import BlockPair"),
        ("kernels.pairs", "import numpy"),
        ("engine.core", "from tests.worlds import R"),
        ("engine.core", "from proofs import worlds"),
    ],
)
def test_a_wrong_arrow_is_noticed(module: str, source: str) -> None:
    assert len(wrong(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("spec.laws", "from spec.logic import conj\nimport z3\nimport dataclasses"),
        ("engine.scheduler.blocks", "from engine.scheduler.plan import Plan\nfrom .plan import Plan\nimport icontract"),
        ("engine.core", "from engine.scheduler import Plan\nimport tqdm\nfrom kernels.pairs import check_pairs"),
        ("kernels.pairs", "import torch\nfrom triton import language as tl"),
    ],
)
def test_right_arrows_are_accepted(module: str, source: str) -> None:
    assert wrong(source, module) == []


def test_the_scheduler_and_the_spec_are_loaded_without_torch() -> None:
    code = """
import sys, importlib, pkgutil
import engine.scheduler
for module in pkgutil.iter_modules(engine.scheduler.__path__):
    importlib.import_module(f"engine.scheduler.{module.name}")
others = {name.partition(".")[0] for name in sys.modules}
print(sorted(others & {"torch", "numpy", "triton", "transformers", "kernels"}))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


def test_importing_engine_alone_loads_no_torch() -> None:
    code = "import sys, engine; print('torch' in sys.modules, engine.__version__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split()[0] == "False"
