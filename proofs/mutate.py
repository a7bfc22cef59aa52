"""Plant every small change of the scheduler's source, one at a time, and see that something fails.   make mutants

Nothing is written to the sources: a process that has imported everything but the scheduler is forked for each mutant,
and the child imports the module under test from its changed tree.  Stages come from `proofs.killers`, cheapest first;
all mutants go through one stage before the next begins.  Results are appended to `out/mutants.jsonl` as they come, with
the digest of the function they change, so an interrupted run goes on where it was and a changed function starts anew.

    python -m proofs.mutate              go on with the run
    python -m proofs.mutate --again      run the survivors once more (after a test or a law was added)
    python -m proofs.mutate --report     write the tables from what is known
    python -m proofs.mutate --show ID    print the change and what came of it
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib
import importlib.abc
import importlib.util
import json
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from proofs.mutations import MODULES, ROOT, Mutation, everything, mutated, source

RESULTS = ROOT / "out" / "mutants.jsonl"
SUMMARY = ROOT / "benchmarks" / "results" / "mutants.md"
EQUIVALENT = ROOT / "proofs" / "equivalent_mutants.md"
STAGES = ("soak", "books", "laws", "tests", "deep")
CPU_SECONDS = {"soak": 3, "books": 20, "laws": 20, "tests": 120, "deep": 600}  # more means that it goes round for ever
MEMORY = 3 << 30  # a mutant may fill a list for ever
HEAVY = ("z3", "icontract", "numpy", "pytest", "torch", "spec.check.explore",
         "spec.check.refine", "spec.check.symbolic", "spec.check.report", "spec.plain")  # fmt: skip


# one mutant in a child


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds one module of the scheduler in its changed form."""

    def __init__(self, mutation: Mutation, tree: ast.Module) -> None:
        self.name = f"engine.scheduler.{mutation.module}"
        self.file = str(source(mutation.module))
        self.tree = tree

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self, origin=self.file) if name == self.name else None

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = self.file
        exec(compile(self.tree, self.file, "exec"), module.__dict__)


def _child(mutation: Mutation | None, stage: str, out: int) -> None:
    """Run one stage on one mutant, write the verdict, and end this process."""
    limit = CPU_SECONDS[stage]
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    verdict: dict[str, Any] = {"killed": False, "by": ""}
    dumps = tempfile.mkdtemp(prefix="lawful-mutants-")
    try:
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        os.environ["LAWFUL_CONTRACTS"] = "on" if stage == "tests" else "off"
        os.environ["LAWFUL_DUMP_DIR"] = dumps
        assert not any(name.startswith("engine.") for name in sys.modules), "the scheduler is already there"
        if mutation is not None:
            sys.meta_path.insert(0, _Changed(mutation, mutated(mutation)))
        killers = importlib.import_module("proofs.killers")
        verdict["by"] = str(getattr(killers, f"stage_{stage}")() or "")
    except BaseException as error:
        verdict = {"killed": True, "by": _reason(error)}
    shutil.rmtree(dumps, ignore_errors=True)  # this process ends without clearing up
    usage = resource.getrusage(resource.RUSAGE_SELF)
    verdict["cpu"] = round(usage.ru_utime + usage.ru_stime, 3)
    os.write(out, json.dumps(verdict).encode())
    os._exit(0)


def _reason(error: BaseException) -> str:
    """The error in a line, with the place of a check that has no text of its own."""
    text = f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, AssertionError) and not str(error) and frames:
        text += f"{frames[-1].name}: {frames[-1].line}"
    return " ".join(text.split())[:200]


class Child:
    """A stage under way."""

    def __init__(self, mutation: Mutation | None, stage: str) -> None:
        self.mutation, self.stage = mutation, stage
        self.out, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.out)
            _child(mutation, stage, write)
        os.close(write)
        self.until = time.monotonic() + 20 * CPU_SECONDS[stage]

    def done(self) -> bool:
        if time.monotonic() > self.until:
            os.kill(self.pid, 9)
            os.waitpid(self.pid, 0)
            return True
        return os.waitpid(self.pid, os.WNOHANG)[0] != 0

    def verdict(self) -> dict[str, Any]:
        text = os.read(self.out, 1 << 16)
        os.close(self.out)
        return json.loads(text) if text else {"killed": True, "by": "no end", "cpu": CPU_SECONDS[self.stage]}


# all of them


class Known:
    """The results so far: for each mutant the last verdict of each stage, of its function as it is now."""

    def __init__(self) -> None:
        self.verdicts: dict[str, dict[str, dict[str, Any]]] = {}
        digests = {one.id: one.digest for one in everything()}
        if RESULTS.exists():
            for line in RESULTS.read_text().splitlines():
                entry = json.loads(line)
                if entry["digest"] == digests.get(entry["id"]):
                    self.verdicts.setdefault(entry["id"], {})[entry["stage"]] = entry

    def add(self, mutation: Mutation, stage: str, verdict: dict[str, Any]) -> None:
        entry = {"id": mutation.id, "digest": mutation.digest, "stage": stage, **verdict}
        self.verdicts.setdefault(mutation.id, {})[stage] = entry
        RESULTS.parent.mkdir(exist_ok=True)
        with RESULTS.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def killer(self, mutation: Mutation) -> tuple[str, dict[str, Any]] | None:
        """The first stage that kills it."""
        of = self.verdicts.get(mutation.id, {})
        return next(((stage, of[stage]) for stage in STAGES if of.get(stage, {}).get("killed")), None)

    def survived(self, mutation: Mutation, stage: str) -> bool:
        return self.verdicts.get(mutation.id, {}).get(stage, {}).get("killed") is False


def run(stages: Iterable[str], jobs: int, again: bool, only: str) -> None:
    """Every mutant through each stage that it has not passed yet."""
    known = Known()
    mutants = [one for one in everything() if only in str(one) or only == one.id]
    for name in HEAVY:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    for stage in stages:
        if stage not in STAGES:
            raise SystemExit(f"no stage {stage}; there are {', '.join(STAGES)}")
        todo = deque(m for m in mutants if known.killer(m) is None and (again or not known.survived(m, stage)))
        print(f"{stage}: {len(todo)} mutants", flush=True)
        gc.freeze()
        sound = Child(None, stage)
        while not sound.done():
            time.sleep(0.01)
        verdict = sound.verdict()
        if verdict["killed"]:
            raise SystemExit(f"{stage} fails without a mutant: {verdict['by']}")
        print(f"{stage}: {verdict['cpu']:.1f} s of CPU without a mutant", flush=True)
        _stage(stage, todo, jobs, known)


def _stage(stage: str, todo: deque[Mutation], jobs: int, known: Known) -> None:
    under_way: list[Child] = []
    counts: Counter[str] = Counter()
    said = time.monotonic()
    while todo or under_way:
        while todo and len(under_way) < jobs:
            under_way.append(Child(todo.popleft(), stage))
        for child in [one for one in under_way if one.done()]:
            under_way.remove(child)
            verdict = child.verdict()
            assert child.mutation is not None
            known.add(child.mutation, stage, verdict)
            counts["killed" if verdict["killed"] else "alive"] += 1
        if time.monotonic() - said > 30:
            said = time.monotonic()
            print(f"{stage}: {dict(counts)}, {len(todo)} to go", flush=True)
        time.sleep(0.002)
    print(f"{stage}: {dict(counts)}", flush=True)


# what came of it


def explained() -> dict[str, str]:
    """Mutants that are listed as equivalent: id and reason."""
    if not EQUIVALENT.exists():
        return {}
    out = {}
    for line in EQUIVALENT.read_text().splitlines():
        if line.startswith("| `"):
            name, _, rest = line[3:].partition("`")
            out[name] = rest.strip().strip("|").split("|")[-1].strip()
    return out


def report() -> None:
    """The summary table, from what is known."""
    known, mutants, listed = Known(), everything(), explained()
    rows, unexplained = [], []
    totals: Counter[str] = Counter()
    cpu = sum(entry["cpu"] for of in known.verdicts.values() for entry in of.values())
    for module in MODULES:
        counts: Counter[str] = Counter()
        for mutation in (one for one in mutants if one.module == module):
            killer = known.killer(mutation)
            if killer:
                counts[killer[0]] += 1
            elif mutation.id in listed:
                counts["equivalent"] += 1
            elif mutation.id not in known.verdicts:
                counts["not run"] += 1
            else:
                counts["open"] += 1
                unexplained.append(mutation)
        totals += counts
        rows.append((module, counts))
    columns = (*STAGES, "equivalent", "open", "not run")
    lines = [
        "# Mutants of the scheduler",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, {os.cpu_count()} cores shared with other work, Python "
        f"{platform.python_version()}, {cpu / 60:.0f} minutes of CPU in all.  `make mutants` runs it, "
        "`python -m proofs.mutate --report` writes this table.",
        "",
        "| module | mutants | " + " | ".join(_HEAD.get(c, c) for c in columns) + " |",
        "|---|" + "---|" * (len(columns) + 1),
    ]
    for module, counts in [*rows, ("all", totals)]:
        lines.append(f"| {module} | {sum(counts.values())} | " + " | ".join(str(counts[c]) for c in columns) + " |")
    lines += ["", _LEGEND]
    if unexplained:
        lines += ["", "Open:", ""]
        lines += [f"- `{one.id}` {one}" for one in unexplained]
    SUMMARY.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


_HEAD = {stage: f"killed by {stage}" for stage in STAGES}
_LEGEND = """\
Each column counts the mutants that no stage before it killed. *soak*: 23 random worlds, the tests' own checks after
every step. *books*: test_books.py, test_door.py and test_plans.py of tests/scheduler. *laws*: every reachable state of
small worlds, all laws, each round replayed in the spec. *tests*: tests/scheduler/test_determinism.py and tests/cases,
contracts on. *deep*: larger worlds, a long soak, symbolic proofs of schedule(), update(), add, abort and fail.
*equivalent*: explained one by one in proofs/equivalent_mutants.md. Out of scope: texts of messages, annotations,
`__slots__`, imports and decorators; contracts, recorder, replay and trace, which have tests of their own."""


def show(name: str) -> None:
    known = Known()
    for mutation in everything():
        if mutation.id == name:
            print(mutation)
            for stage, entry in known.verdicts.get(name, {}).items():
                print(f"  {stage}: {'killed by ' + entry['by'] if entry['killed'] else 'survived'}")


def survivors() -> list[Mutation]:
    """Those that some stage has seen and none has killed, and that no line explains."""
    known, listed = Known(), explained()
    return [m for m in everything() if m.id in known.verdicts and known.killer(m) is None and m.id not in listed]


def skeleton() -> None:
    """Lines for the list of equivalent mutants; the last cell is to be written by hand."""
    for mutation in survivors():
        print(f"| `{mutation.id}` | {mutation.module}.{mutation.where} | {change(mutation)} | |")


def _common(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def change(mutation: Mutation) -> str:
    """The statement before and after, without what both have in common at their ends."""
    a, b = mutation.before, mutation.after
    begin = _common(a, b)
    end = _common(a[begin:][::-1], b[begin:][::-1])
    while begin and (a[begin - 1].isalnum() or a[begin - 1] in "._ "):
        begin -= 1
    while end and (a[-end].isalnum() or a[-end] in "_=<>"):
        end -= 1
    a, b = a[begin : len(a) - end], b[begin : len(b) - end]
    return f"`{a.strip()}` -> `{b.strip()}` in `{mutation.before[:60]}`"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m proofs.mutate", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--stages", default=",".join(STAGES), help="comma separated; default: all")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="run survivors again")
    parser.add_argument("--only", default="", help="an id, or a part of the mutant's line")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--survivors", action="store_true")
    parser.add_argument("--skeleton", action="store_true", help="lines for the list of equivalent mutants")
    parser.add_argument("--show", default="")
    args = parser.parse_args()
    if args.show:
        show(args.show)
    elif args.report:
        report()
    elif args.skeleton:
        skeleton()
    elif args.survivors:
        for mutation in survivors():
            print(f"{mutation.id} {mutation}")
    else:
        run(args.stages.split(","), args.jobs, args.again, args.only)


if __name__ == "__main__":
    main()
