"""Write the generated parts of the documents: python docs/build.py.  A test fails when they are stale.

Generated text stands between `<!-- NAME: begin -->` and `<!-- NAME: end -->`.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("spec", "engine", "kernels")


def source_files(package: str) -> list[Path]:
    """The package's files as they are committed; all there are where there is no checkout."""
    listed = subprocess.run(["git", "ls-files", f"{package}/*.py"], cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.split()
    return [ROOT / name for name in names] if names else list((ROOT / package).rglob("*.py"))


def files_table() -> str:
    """One line for each source file: the first sentence of its docstring."""
    rows = []
    for package in PACKAGES:
        for file in sorted(source_files(package)):
            docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
            if docstring:
                rows.append(f"| `{file.relative_to(ROOT)}` | {docstring.splitlines()[0]} |")
    return "\n".join(["| file | |", "|---|---|", *rows])


def laws_table() -> str:
    """The laws as the README shows them."""
    from spec.laws import LAWS

    order = "BQNSMLE"
    laws = sorted(LAWS, key=lambda law: (order.index(law.id[0]), int("".join(filter(str.isdigit, law.id))), law.id))
    rows = [f"| {law.id} | {law.name} | {law.statement} | {law.kind.value} |" for law in laws]
    return "\n".join(["| id | name | statement | kind |", "|---|---|---|---|", *rows])


def results(section: str) -> Callable[[], str]:
    """The tables of every result of this section, as their benchmarks left them in benchmarks/results.

    A result is a JSON object: section, title, command, machine, date, and tables with title, columns and rows of text.
    """

    def make() -> str:
        parts = []
        for file in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
            found = json.loads(file.read_text(encoding="utf-8"))
            if isinstance(found, dict) and found.get("section") == section:
                parts.append(f"### {found['title']}\n\n`{found['command']}`, {found['date']}, {found['machine']}.")
                for table in found["tables"]:
                    numbers = ["---" if i == 0 else "---:" for i, _ in enumerate(table["columns"])]
                    rows = [table["columns"], numbers, *table["rows"]]
                    lines = "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)
                    parts.append(f"{sentence(table['title'])}\n\n{lines}")
        return "\n\n".join(parts) or "No result yet."

    return make


def sentence(text: str) -> str:
    """The text with a capital at its beginning, unless that is a symbol: n=4 stays what it is."""
    return text if text[1:2] == "=" else text[:1].upper() + text[1:]


GENERATED = {
    "docs/architecture.md": {"files": files_table},
    "README.md": {"laws": laws_table},
    "docs/performance.md": {
        name: results(name) for name in ("scheduler-step", "proofs", "cpu-engine", "server", "simulation")
    },
}


def built(path: str) -> str:
    """The document with its generated parts made anew."""
    text = (ROOT / path).read_text(encoding="utf-8")
    for name, make in GENERATED[path].items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"{path} has no part {name!r}")
        content = f"{begin}\n{make()}\n{end}"
        text = pattern.sub(lambda _, content=content: content, text)
    return text


def main() -> None:
    for path in GENERATED:
        (ROOT / path).write_text(built(path), encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
