"""The documents say what is there: generated parts are fresh, links lead somewhere, programs in them run."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    file.relative_to(ROOT) for file in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("spec/*.md")])
]


def load_build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = load_build()


@pytest.mark.parametrize("path", build.GENERATED)
def test_generated_parts_are_fresh(path: str) -> None:
    assert build.built(path) == (ROOT / path).read_text(encoding="utf-8"), "stale: run python docs/build.py"


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_and_named_files_exist(document: Path) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert ((ROOT / document).parent / target).exists(), f"{document} links to {target}"
    for named in re.findall(r"`((?:spec|engine|kernels|proofs|tests|docs|examples|benchmarks)/[\w./]*)`", text):
        assert (ROOT / named).exists(), f"{document} names {named}"


def test_every_source_file_says_what_it_is() -> None:
    for package in build.PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            if file.name != "__init__.py":
                assert re.match(r'"""\S', file.read_text(encoding="utf-8")), f"{file} has no docstring"


def python_blocks(document: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), re.DOTALL)


def test_the_drive_loop_of_the_readme_runs() -> None:
    loop = next(block for block in python_blocks("README.md") if "scheduler.schedule()" in block)
    scope: dict[str, object] = {}
    exec(loop, scope)
    assert not scope["scheduler"].has_unfinished()  # type: ignore[attr-defined]


@pytest.mark.model
def test_the_first_program_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(python_blocks("README.md")[0], {})
    assert "The capital of France is" in capsys.readouterr().out


def test_the_scheduler_example_runs_without_torch() -> None:
    program = f"""
import runpy, sys
runpy.run_path({str(ROOT / "examples" / "drive_the_scheduler.py")!r}, run_name="__main__")
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "left ['c']" in done.stdout
