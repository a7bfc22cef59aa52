"""What the symbolic proofs cost on one core: paths and queries a second, and how much of the time is the solver's.

    python -m benchmarks.proofs [--write]              a set of shapes of proofs/test_1_inductive.py, both orders
    python -m benchmarks.proofs --mutants [--write]    mutants a minute, from the records of the last `make mutants`

Each proof runs in a process of its own, since what a query costs depends on all that a process asked before, and the
time is that process's processor time.  A path is run twice, on symbols and on the ints of a model of it, and all laws
are claimed at its end.  A query asks the solver whether one side of a branch can be taken, or whether a path can break
a law.  The time of a proof is that of
    solver: Z3's answers.
    terms: handing it conditions, and reading its models.
    code: the scheduler, the views and the laws, on symbols and on ints: everything else.
--write puts the table into benchmarks/results, where docs/build.py finds it.  `python -m benchmarks.explorer` does the
same for the search of every reachable state.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import z3

from engine.scheduler.contracts import lifted
from proofs import mutate, steps
from proofs.worlds import Shape
from spec.check.symbolic import Executor, Report

RESULTS = Path(__file__).parent / "results"
CLOCK: Callable[[], float] = time.thread_time  # that of the process runs in leaps while a timer watches it
ORDERS = {"chunked": True, "prefill-first": False}
COLUMNS = ["proof", "shape", "order", "paths", "queries", "s", "paths/s", "queries/s", "solver", "terms", "code"]


class Proof(NamedTuple):
    """One row.  shape: running/swapped/waiting.  make: the proof of an order (chunked or not)."""

    name: str
    shape: str
    make: Callable[[bool], Report]


def any_size(running: int, swapped: int, waiting: int) -> Proof:
    """schedule() with block needs as symbols, for every number of groups that can have forked."""

    def make(chunked: bool) -> Report:
        return steps.prove_every_schedule(Shape(running, swapped, waiting, chunked))

    return Proof("schedule(), any block size, any n", f"{running}/{swapped}/{waiting}", make)


def every_fork(
    prove: Callable[[Shape], Report], running: int, swapped: int, waiting: int, n: int, size: int
) -> Callable[[bool], Report]:
    """A proof with the production formulas, n branches each, for every number of groups that can have forked."""

    def make(chunked: bool) -> Report:
        groups, report = running + swapped + waiting, Report()
        for forked in steps.forked_counts(running, swapped, waiting):
            report.absorb(prove(Shape(running, swapped, waiting, chunked, None, forked, ((n, n),) * groups, size)))
        return report

    return make


def by_formulas(*shape: int) -> Proof:
    """schedule() with the production formulas: blocks of 16, two branches each."""
    make = every_fork(steps.prove_schedule, *shape, n=2, size=16)
    return Proof("schedule(), blocks of 16, n=2", "/".join(map(str, shape)), make)


def turn(running: int, swapped: int, waiting: int) -> Proof:
    """One turn of update()'s loop, on the most senior group: two branches, any stop, abort or failure."""

    def make(chunked: bool) -> Report:
        groups, report = running + swapped + waiting, Report()
        for forked in range(1, groups + 1):
            branches = ((2, 2), *[None] * (groups - 1))
            report.absorb(steps.prove_update(Shape(running, swapped, waiting, chunked, None, forked, branches, 16), 0))
        return report

    return Proof("update(), one group's turn, n=2", f"{running}/{swapped}/{waiting}", make)


def whole_step(*shape: int) -> Proof:
    """schedule() and update() in one run, blocks of 4, one branch each."""
    make = every_fork(steps.prove_step, *shape, n=1, size=4)
    return Proof("a whole step in one run, blocks of 4, n=1", "/".join(map(str, shape)), make)


PROOFS = (
    any_size(1, 1, 1),
    any_size(3, 0, 0),
    any_size(2, 2, 2),
    any_size(3, 2, 2),
    by_formulas(2, 0, 0),
    by_formulas(1, 1, 1),
    by_formulas(2, 1, 0),
    turn(1, 0, 0),
    turn(2, 0, 0),
    whole_step(1, 0, 1),
)


class Cost(NamedTuple):
    """What a proof, or several, took.  Times are processor seconds."""

    paths: int
    queries: int
    seconds: float
    solver: float
    terms: float

    def cells(self) -> list[str]:
        code = self.seconds - self.solver - self.terms
        return [
            f"{self.paths:,}",
            f"{self.queries:,}",
            f"{self.seconds:.2f}",
            f"{self.paths / self.seconds:,.0f}",
            f"{self.queries / self.seconds:,.0f}",
            *(f"{part / self.seconds:.0%}" for part in (self.solver, self.terms, code)),
        ]


@contextmanager
def watched() -> Iterator[Counter[str]]:
    """Processor time in the solver, and in the executor's dealings with it, the solver's own included (`asking`)."""
    spent: Counter[str] = Counter()
    inside: set[str] = set()
    clock = CLOCK

    def around(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **more: Any) -> Any:
            if part in inside:
                return function(*args, **more)
            inside.add(part)
            begun = clock()
            try:
                return function(*args, **more)
            finally:
                spent[part] += clock() - begun  # type: ignore[assignment]
                inside.discard(part)

        return timed

    places = [("solver", z3.Solver, "check"), *(("asking", Executor, name) for name in ("__init__", "_check", "_push"))]
    kept = [(holder, name, vars(holder)[name]) for _, holder, name in places]
    try:
        for part, holder, name in places:
            setattr(holder, name, around(part, getattr(holder, name)))
        yield spent
    finally:
        for holder, name, function in kept:
            setattr(holder, name, function)


def measure(proof: Proof, chunked: bool) -> Cost:
    """Run one proof.  Raises AssertionError when it does not hold."""
    with lifted(), watched() as spent:
        begun = CLOCK()
        report = proof.make(chunked)
        seconds = CLOCK() - begun
    assert report.proved, str(report)
    return Cost(report.paths, report.queries, seconds, spent["solver"], spent["asking"] - spent["solver"])


def _row(at: tuple[int, str]) -> Cost:
    return measure(PROOFS[at[0]], ORDERS[at[1]])


def symbolic() -> dict[str, Any]:
    """The table of all proofs, each in a process of its own."""
    at = [(i, order) for i in range(len(PROOFS)) for order in ORDERS]
    rows, costs = [], []
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for (i, order), cost in zip(at, pool.imap(_row, at), strict=True):
            costs.append(cost)
            rows.append([PROOFS[i].name, PROOFS[i].shape, order, *cost.cells()])
            print("  ".join(rows[-1]), flush=True)
    rows.append(["all", "", "", *Cost(*map(sum, zip(*costs, strict=True))).cells()])  # type: ignore[arg-type]
    print("  ".join(rows[-1]))
    return {
        "title": "every law on every path, from any lawful state; shape: groups running/swapped/waiting",
        "columns": COLUMNS,
        "rows": rows,
    }


def mutants() -> dict[str, Any]:
    """Mutants a minute and core by stage, from the verdicts on the sources as they are.

    Raises SystemExit where no run has left any.
    """
    known = mutate.Known()
    if not known.verdicts:
        raise SystemExit(f"{mutate.RESULTS} holds no verdicts on these sources; `make mutants` makes them")
    rows = []
    verdicts = [(stage, entry) for of in known.verdicts.values() for stage, entry in of.items()]
    for name in (*mutate.STAGES, "all"):
        entries = [entry for stage, entry in verdicts if name in (stage, "all")]
        if entries:
            tried = len(entries) if name != "all" else len(known.verdicts)
            killed = sum(entry["killed"] for entry in entries)
            seconds = sum(entry["cpu"] for entry in entries)
            rows.append([name, f"{tried:,}", f"{killed:,}", f"{seconds:,.0f}", f"{tried / seconds * 60:,.0f}"])
    for row in rows:
        print("  ".join(row))
    columns = ["stage", "mutants tried", "killed", "s", "mutants a minute"]
    return {
        "title": "verdicts on the sources as they are, by stage; s is processor time",
        "columns": columns,
        "rows": rows,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", action="store_true", help="read the records of make mutants instead")
    parser.add_argument(
        "--write", action="store_true", help="write benchmarks/results/proofs.json or proofs_mutants.json"
    )
    args = parser.parse_args()
    result = {
        "section": "proofs",
        "title": "Mutants of the scheduler" if args.mutants else "Symbolic proofs",
        "command": " ".join(["python -m benchmarks.proofs", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, processor time of one process, "
        f"Python {platform.python_version()}, Z3 {z3.get_version_string()}",
        "date": datetime.now(UTC).date().isoformat(),
        "tables": [mutants() if args.mutants else symbolic()],
    }
    if args.write:
        name = "proofs_mutants.json" if args.mutants else "proofs.json"
        (RESULTS / name).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
