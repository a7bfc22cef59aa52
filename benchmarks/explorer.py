"""Distinct states and transitions that the explorer gets through in a second on one core, and where the time goes.

python -m benchmarks.explorer [--deep] [--limit N] [--write] [scope ...]

--deep: the scopes of `pytest -m slow` too.  --limit: stop each scope at so many states.  --write: put the table into
benchmarks/results, as explorer.json, which docs/build.py shows, and explorer.md.  Times are processor time of one
process; every law is checked.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from engine.scheduler import Scheduler
from engine.scheduler.contracts import lifted
from proofs.scopes import DEEP, LARGE, SMALL, Scope, new_group
from spec.check import explore, forms
from spec.check.codec import Codec
from spec.check.explore import Checks
from spec.check.image import Image
from spec.check.shadow import Shadow

RESULTS = Path(__file__).parent / "results"
PARTS = ("scheduler", "laws", "compare", "load", "encode", "rest")
COLUMNS = ("scope", "states", "transitions", "steps run", "states/s", "transitions/s", *PARTS)
MEANING = """\
All laws are checked.  Processor time of one process; the shares are of a run of at most 10,000 states with a clock \
around every part, which shifts them somewhat towards the parts with many short calls.
steps run: outcomes of steps that the code that serves was run for; the other steps differ from one of these only in \
waiting groups that it never looked at, and are shown to go the same by running it with these sealed (counted here too).
scheduler: schedule, update, add, abort of the code that serves.  laws: predicates, views for them, shadow pools.  \
compare: the live scheduler against a step that was checked in full, and taking such images.  load: making the \
scheduler what it was.  encode: keys of states and back.
"""


class Stopwatch:
    """Time in each part, of calls that are not inside another part.

    Reading the clock costs about as much as the smaller calls, so the shares are read from a run of their own.
    """

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self.inside = False

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        clock, spent = time.perf_counter, self.spent

        def timed(*args: Any, **more: Any) -> Any:
            if self.inside:
                return function(*args, **more)
            self.inside = True
            begun = clock()
            try:
                return function(*args, **more)
            finally:
                spent[part] += clock() - begun
                self.inside = False

        return timed


def shares(scope: Scope, limit: int) -> dict[str, float]:
    """The share of each part in the time of a run."""
    watch = Stopwatch()
    places = [
        ("scheduler", Scheduler, ("schedule", "update", "add", "abort", "fail")),
        ("compare", Image, ("__init__", "same", "cut")),
        ("compare", forms, ("find",)),
        ("load", Image, ("frame",)),
        ("encode", Codec, ("parts", "restore")),
        ("encode", forms, ("parts",)),
        ("laws", explore.views, ("snapshot", "observe", "conclude")),
        ("laws", Shadow, ("execute", "agrees")),
    ]
    kept = [(holder, name, vars(holder)[name]) for _, holder, names in places for name in names]
    real = Checks.__init__

    def watched(self: Checks, ids: frozenset[str]) -> None:
        real(self, ids)
        for name, check in list(vars(self).items()):
            setattr(self, name, watch.around("laws", check))

    try:
        for part, holder, names in places:
            for name in names:
                setattr(holder, name, watch.around(part, getattr(holder, name)))
        Checks.__init__ = watched  # type: ignore[method-assign]
        begun = time.perf_counter()
        explore.explore(scope.world, lambda: Scheduler(scope.world.config), new_group, limit=limit)
        whole = time.perf_counter() - begun
    finally:
        Checks.__init__ = real  # type: ignore[method-assign]
        for holder, name, function in kept:
            setattr(holder, name, function)
    out = {part: watch.spent[part] / whole for part in PARTS[:-1]}
    return {**out, "rest": 1 - sum(out.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scope", nargs="*")
    parser.add_argument("--deep", action="store_true")
    parser.add_argument("--limit", type=int, default=100_000_000)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    scopes = {**LARGE, **SMALL, **(DEEP if options.deep else {})}
    if options.scope:
        scopes = {name: {**scopes, **DEEP}[name] for name in options.scope}
    rows: list[list[str]] = []
    states = edges = runs = 0
    seconds = 0.0
    for name, scope in scopes.items():
        with lifted():  # contracts look at every queue, and what a step looks at decides how often it is run
            found = explore.explore(
                scope.world, lambda scope=scope: Scheduler(scope.world.config), new_group, limit=options.limit
            )
            assert found.violation is None
            part = shares(scope, min(options.limit, 10_000))
        states, edges, seconds = states + found.states, edges + found.edges, seconds + found.seconds
        runs += found.runs
        title = name if found.complete else f"{name} (begun)"
        rates = (found.rate, found.edges / found.seconds)
        rows.append(
            [title, *counted(found.states, found.edges, found.runs, *rates), *(f"{part[p]:.0%}" for p in PARTS)]
        )
        print(line(rows[-1]), flush=True)
    rows.append(["all", *counted(states, edges, runs, states / seconds, edges / seconds), *[""] * len(PARTS)])
    print(line(rows[-1]))
    if options.write:
        write(rows, " ".join(["python -m benchmarks.explorer", *sys.argv[1:]]))


def counted(*numbers: float) -> list[str]:
    """Cells of counts and rates."""
    return [f"{number:,.0f}" for number in numbers]


def line(cells: Iterable[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def write(rows: list[list[str]], command: str) -> None:
    """The table as JSON, as every result that docs/build.py shows, and the same in Markdown."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores, processor time of one process, Python"
    result = {
        "section": "proofs",
        "title": "Explorer: every reachable state",
        "command": command,
        "machine": f"{machine} {platform.python_version()}",
        "date": datetime.date.today().isoformat(),
        "tables": [{"title": "all laws on every state, step and round", "columns": COLUMNS, "rows": rows}],
    }
    (RESULTS / "explorer.json").write_text(json.dumps(result, indent=1) + "\n")
    (RESULTS / "explorer.md").write_text(
        "# Explorer: states and transitions a second and core\n\n"
        f"`{command}`, {result['date']}, {result['machine']}.\n\n{MEANING}\n"
        + "\n".join([line(COLUMNS), "|" + "---|" * len(COLUMNS), *map(line, rows)])
        + "\n"
    )


if __name__ == "__main__":
    main()
