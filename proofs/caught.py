"""How each planted fault is caught: the law, the method and the smallest scope that shows it.   python -m proofs.caught

The table in proofs/mutants.md is the record: `test_8_mutants` reads the scope of each row from it, runs that search or
proof once more, and compares.  Run this module to make the table anew, which looks for the scopes.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from typing import Any

from proofs import faults_symbolic, killers, steps
from proofs.mutants import MUTANTS, Mutant
from proofs.planted import PLANTED
from proofs.scopes import SMALL
from proofs.worlds import Shape
from spec.check.explore import World, explore
from spec.laws import BY_ID

DOCUMENT = "proofs/mutants.md"
LIMIT = 3000  # states


@functools.cache
def worlds() -> dict[str, World]:
    """Where faults are looked for, small ones first."""
    pinned = {name: scope.world for name, scope in sorted(SMALL.items(), key=lambda item: item[1].edges)}
    return {
        **killers.worlds(),
        "too large a request": killers.small(3, 0, 1, 4, 3, 8, ((1, 2, 3), (1, 1, 2))),
        **pinned,
    }


@dataclass(frozen=True)
class Catch:
    """One law that a fault breaks: found where, by which method, and by how long a run."""

    fault: str
    text: str
    law: str
    method: str
    where: str
    run: int = 0

    def __str__(self) -> str:
        found = f"{self.method}, {self.where}" + (f", a run of {self.run}" if self.run else "")
        return f"| {self.fault} | {self.text} | {self.law} | {found} |"


FAULTS: dict[str, Mutant] = {one.id: one for one in (*MUTANTS, *PLANTED)}
SYMBOLIC: dict[str, tuple[faults_symbolic.Fault, str]] = {
    **{f"{one.policy.__name__} (symbolic)": (one, "schedule") for one in faults_symbolic.IN_SCHEDULE},
    **{f"{one.policy.__name__} (symbolic)": (one, "update") for one in faults_symbolic.IN_UPDATE},
}


def by_search(fault: str, law: str, where: str) -> Catch | None:
    """The shortest run that breaks the law in this world; some faults only show among all laws."""
    mutant, world = FAULTS[fault], worlds()[where]
    for laws in ([law], None):
        found = explore(world, lambda: mutant.build(world.config), mutant.new_group, limit=LIMIT, laws=laws)
        if found.violation is not None and found.violation.law.id == law:
            return Catch(fault, mutant.text, law, "search", where, len(found.violation.run))
    return None


def by_proof(fault: str, law: str) -> Catch | None:
    """The law does not follow on the smallest shape that shows it."""
    planted, place = SYMBOLIC[fault]
    prove: Any = steps.prove_schedule if place == "schedule" else functools.partial(_update)
    report = prove(planted.shape, planted.policy, max_failures=99)
    if law not in report.broken():
        return None
    text = " ".join((planted.policy.__doc__ or "").split()).rstrip(".")
    return Catch(fault, text[0].lower() + text[1:], law, f"proof of {place}()", _shape(planted.shape))


def _update(shape: Shape, policy: Any, max_failures: int) -> Any:
    return steps.prove_update(shape, 0, policy, max_failures)


def _shape(shape: Shape) -> str:
    return f"{shape.running}/{shape.swapped}/{shape.waiting}, any sizes"


def claims() -> list[tuple[str, str]]:
    """(fault, law) of everything that the table must show."""
    planted = [(one.id, law) for one in FAULTS.values() for law in one.breaks]
    return planted + [(name, law) for name, (one, _) in SYMBOLIC.items() for law in sorted(one.laws)]


def look(fault: str, law: str) -> Catch | None:
    if fault in SYMBOLIC:
        return by_proof(fault, law)
    for where in worlds():
        try:
            catch = by_search(fault, law, where)
        except (IndexError, KeyError, ValueError, TypeError):
            continue  # a state that this fault makes and that cannot be written down
        if catch is not None:
            return catch
    return None


HEAD = """# Planted faults

Each is a small change of the production scheduler; `proofs/mutants.py`, `proofs/planted.py` and
`proofs/faults_symbolic.py` hold them.  A row says which law it breaks, by which method that was found and where: the
name of a world that is searched whole, with the length of the shortest run, or the shape (groups running, swapped,
waiting) of a symbolic proof.  Written by `python -m proofs.caught`; `proofs/test_8_mutants.py` runs every row again.

| fault | what is changed | law | caught by |
|---|---|---|---|
"""


def read() -> list[Catch]:
    """The rows of the table."""
    from proofs.mutations import ROOT

    rows = []
    for line in (ROOT / DOCUMENT).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[2] in BY_ID:
            method, _, rest = cells[3].partition(", ")
            where, _, run = rest.partition(", a run of ")
            rows.append(Catch(cells[0], cells[1], cells[2], method, where, int(run or 0)))
    return rows


def main() -> None:
    from engine.scheduler.contracts import lifted
    from proofs.mutations import ROOT

    known = {}
    if (ROOT / DOCUMENT).exists() and "--anew" not in sys.argv:
        known = {(row.fault, row.law): row for row in read()}
    rows, missing = [], []
    with lifted():
        for fault, law in claims():
            row = known.get((fault, law)) or look(fault, law)
            if row is None and fault not in SYMBOLIC:  # of those, one law is enough
                missing.append(f"{fault} does not break {law}")
            if row is not None:
                rows.append(str(row))
            (ROOT / DOCUMENT).write_text(HEAD + "\n".join(rows) + "\n")
    print(f"{len(rows)} rows", *missing, sep="\n")


if __name__ == "__main__":
    main()
