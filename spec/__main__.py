"""`python -m spec` writes the table of laws into spec/README.md; with --check it only says whether it is up to date."""

from __future__ import annotations

import sys
from pathlib import Path

from spec.laws import LAWS, Kind, Tier

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- laws: written by python -m spec -->", "<!-- end of laws -->"


def table() -> str:
    """The laws as a Markdown table, in the order of declaration."""
    lines = ["| id | name | statement | kind | origin |", "|---|---|---|---|---|"]
    for law in LAWS:
        kind = law.kind.value
        if law.mid:
            kind += ", mid-step too"
        if law.tier is Tier.IDS and law.kind is not Kind.TEMPORAL:
            kind += ", ids"
        statement = law.statement.replace("|", "\\|")
        lines.append(f"| {law.id} | {law.name} | {statement} | {kind} | {law.origin} |")
    return "\n".join(lines)


def written(text: str) -> str:
    """The README with the table as it should be."""
    head, rest = text.split(BEGIN, 1)
    _, tail = rest.split(END, 1)
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


def main(arguments: list[str]) -> int:
    text = README.read_text()
    new = written(text)
    if "--check" in arguments:
        print("spec/README.md is up to date" if new == text else "spec/README.md is stale: run python -m spec")
        return int(new != text)
    README.write_text(new)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
