"""`lawful check`: proves the laws of a scheduler at small scope, and shows how each broken one breaks.

A policy is a class like `engine.scheduler.Scheduler`, most easily a subclass (docs/policies.md).  Every world of
`spec.check.worlds` is searched whole: laws on states, steps and rounds on all of them, each plan's log replayed in the
spec (refinement), then the graph looked at for runs without end (L5) and for the longest wait (L3).  Then schedule() is
run on symbols from every lawful state of some small shapes (`engine.shapes`), for numbers of any size.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.scheduler import Scheduler, SchedulerConfig, SequenceGroup
from engine.scheduler.contracts import lifted
from engine.shapes import LAWS_OF_SHAPES, SHAPES, prove_shapes
from spec.check.codec import Codec
from spec.check.explore import Found, Violation, World, explore
from spec.check.liveness import analyse, arrivals
from spec.check.refine import replay
from spec.check.report import timeline
from spec.check.symbolic import DisagreementError
from spec.check.symbolic import Report as SymbolicReport
from spec.check.terms import Signal
from spec.check.worlds import SKETCHES, worlds
from spec.laws import BY_ID, LAWS, Kind, Law, Tier, steps_bound

SEARCH, GRAPH, TESTS = "search", "search, graph", "tests"
_GRAPH_LAWS = ("L3", "L5")
_ELSEWHERE = {"E1": "tests with the KV oracle"}
MOST_SEARCHES = 30  # of one world: each goes on without the laws broken so far


@dataclass
class Broken:
    """A law that the policy breaks, by its shortest run in the first world that shows it."""

    law: Law
    world: str
    steps: int
    timeline: str


@dataclass
class Report:
    """What a check saw.  worlds: states, transitions and seconds of each."""

    policy: str
    worlds: dict[str, tuple[int, int, float]] = field(default_factory=dict)
    broken: dict[str, Broken] = field(default_factory=dict)
    refinement: str = ""  # the first plan whose log does not replay in the spec
    plans: int = 0  # replayed
    longest_wait: tuple[int, int] = (0, 0)  # L3: most steps of any group, and the bound in that case
    shapes: SymbolicReport = field(default_factory=SymbolicReport)
    unshaped: str = ""  # why the policy cannot be run on symbols

    @property
    def holds(self) -> bool:
        return not self.broken and not self.refinement and (self.shapes.proved or bool(self.unshaped))

    @property
    def not_kept(self) -> dict[str, str]:
        """Laws that schedule() does not keep from some state in which all hold, with its numbers: by law."""
        failed = {"S8" if one.claim == "returns" else one.claim: str(one) for one in reversed(self.shapes.failures)}
        return {id: text for id, text in failed.items() if id not in self.broken}

    @property
    def states(self) -> int:
        return sum(states for states, _, _ in self.worlds.values())


def load_policy(name: str) -> type[Scheduler]:
    """The class that `module:Class` or `path.py:Class` names.  Raises ValueError, saying what is wrong with it."""
    place, _, kind = name.rpartition(":")
    if not place or not kind:
        raise ValueError(f"--policy is {name!r}; it must be module:Class or path.py:Class")
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[module.__name__] = module
            spec.loader.exec_module(module)
        else:
            sys.path.insert(0, str(Path.cwd()))
            module = importlib.import_module(place)
    except (ImportError, OSError, SyntaxError) as error:
        raise ValueError(f"{place} cannot be imported: {type(error).__name__}: {error}") from None
    policy: Any = getattr(module, kind, None)
    if not isinstance(policy, type):
        raise ValueError(f"{place} has no class {kind!r}")
    missing = [method for method in ("add", "schedule", "update", "abort", "fail") if not hasattr(policy, method)]
    if missing:
        raise ValueError(
            f"{name} is no scheduler: it has no method {missing[0]}(); derive from engine.scheduler.Scheduler"
        )
    return policy


def new_group(request_id: str, p: int, n: int, m: int) -> SequenceGroup:
    """A request of a world."""
    return SequenceGroup(request_id, p, n, m)


def check(policy: type[Scheduler], note: Callable[[str], None] = lambda text: None) -> Report:
    """Search every world and prove every shape; `note` is told which one is next."""
    report = Report(f"{policy.__module__}:{policy.__qualname__}")
    with lifted():
        for name, world in worlds(SchedulerConfig).items():
            note(name)
            begun = time.perf_counter()
            found = _search(policy, name, world, report)
            report.worlds[name] = found.states, found.edges, time.perf_counter() - begun
        try:
            report.shapes = prove_shapes(policy, note)
        except (Signal, DisagreementError) as error:  # it asks for more than symbols can tell, such as an index
            report.unshaped = f"{type(error).__name__}: {error}"
    return report


def _search(policy: type[Scheduler], name: str, world: World, report: Report) -> Found:
    """One world: again and again without the laws found broken, until nothing new breaks."""

    def make() -> Scheduler:
        return policy(world.config)

    def hook(step: Any, turn: Any, event: Any) -> None:
        report.plans += 1
        if not report.refinement and not report.broken:
            mismatch = replay(turn)
            if mismatch is not None:
                report.refinement = f"in the world {name!r}: {mismatch}"

    for _ in range(MOST_SEARCHES):
        laws = set(BY_ID) - set(report.broken)
        found = explore(world, make, new_group, laws=laws, graph=not report.broken, step_hook=hook)
        if found.violation is None:
            break
        _note_broken(report, name, found.violation, make)
    if found.complete and found.graph is not None and not report.broken:
        _look_at_graph(found, world, name, make, report)
    return found


def _note_broken(report: Report, name: str, violation: Violation, make: Callable[[], Scheduler]) -> None:
    steps = sum(event.kind == "step" for event in violation.run)
    shown = timeline(violation, make, new_group)
    report.broken[violation.law.id] = Broken(violation.law, name, steps, shown)


def _look_at_graph(found: Found, world: World, name: str, make: Callable[[], Scheduler], report: Report) -> None:
    """L5 and L3 over all runs of a world at once."""
    graph = found.graph
    assert graph is not None
    worst = analyse(graph)
    codec = Codec(make, new_group)
    if worst.lasso is not None:
        state, place = worst.lasso
        law, shown = BY_ID["L5"], _state_text(codec.restore(graph.keys[state]), place)
        report.broken["L5"] = Broken(law, name, 0, f"{law}\n   a run comes back to this state for ever:\n{shown}")
        return
    for state, place in arrivals(graph):
        s = codec.restore(graph.keys[state])
        groups = [*s.running, *s.swapped, *s.waiting]
        bound = steps_bound(groups[place], groups[:place], world.config.enable_chunked_prefill)
        waits = worst.at(state, place)
        if waits > bound and "L3" not in report.broken:
            law = BY_ID["L3"]
            text = f"{law}\n   the last group may take {waits} steps; the bound is {bound}:\n{_state_text(s, place)}"
            report.broken["L3"] = Broken(law, name, 0, text)
        if waits > report.longest_wait[0]:
            report.longest_wait = waits, bound


def _state_text(s: Any, place: int) -> str:
    groups = [(queue, g) for queue in ("running", "swapped", "waiting") for g in getattr(s, queue)]
    return "\n".join(
        f"   {'>>' if i == place else '  '} {queue} {g.request_id}: prompt {g.prompt_len}, n {g.n}, known {g.known}, "
        f"lacks {g.deficit}, holds {g.held}, max_tokens {g.max_tokens}"
        for i, (queue, g) in enumerate(groups)
    )


# what is shown


@dataclass
class Line:
    """One law's line of the table."""

    law: Law
    method: str
    scope: str
    seconds: float
    verdict: str


def lines(report: Report) -> Iterator[Line]:
    """Every law with how, where and how long it was checked, and what came of it."""
    seconds = sum(seconds for _, _, seconds in report.worlds.values())
    everywhere = f"{len(report.worlds)} worlds, {report.states:,} states"
    for law in sorted(LAWS, key=lambda one: ("BQNSMLE".index(one.id[0]), one.id[0:1], _number(one.id), one.id)):
        broken = report.broken.get(law.id)
        if law.id in _ELSEWHERE:
            yield Line(law, TESTS, _ELSEWHERE[law.id], 0.0, "not checked here")
        elif broken is not None:
            where = f"{broken.world!r}" + (f", {broken.steps} steps" if broken.steps else "")
            yield Line(law, _method(law), where, seconds, "BROKEN")
        elif law.id in report.not_kept:
            yield Line(law, "symbols", f"one of {len(SHAPES)} shapes, any size", report.shapes.seconds, "NOT KEPT")
        elif law.id in _GRAPH_LAWS and report.broken:
            yield Line(law, _method(law), "-", 0.0, "not reached: other laws are broken")
        elif law.id in LAWS_OF_SHAPES and not report.unshaped:
            where, took = f"{everywhere}; {len(SHAPES)} shapes", seconds + report.shapes.seconds
            yield Line(law, _method(law) + "; symbols", where, took, "holds")
        else:
            yield Line(law, _method(law), everywhere, seconds, "holds")


def _number(id: str) -> int:
    return int("".join(filter(str.isdigit, id)))


def _method(law: Law) -> str:
    if law.id in _GRAPH_LAWS:
        return GRAPH
    return SEARCH + {Kind.STATE: ", states", Kind.STEP: ", steps", Kind.MID: ", mid-steps"}.get(
        law.kind, ", ids" if law.tier is Tier.IDS else ", rounds"
    )


def run(policy_name: str | None, as_json: bool, progress: bool) -> int:
    """The command: the table and the counterexamples; 0 if every law holds."""
    policy = Scheduler if policy_name is None else load_policy(policy_name)
    from rich.console import Console

    console = Console(stderr=True)
    if progress and not as_json:
        with console.status("") as status:
            report = check(policy, lambda name: status.update(f"searching: {name}"))
    else:
        report = check(policy)
    if as_json:
        print(json.dumps(_as_json(report)))
    else:
        _show(report)
    return 0 if report.holds else 1


def _as_json(report: Report) -> dict[str, Any]:
    return {
        "policy": report.policy,
        "holds": report.holds,
        "laws": [
            {
                "id": line.law.id,
                "name": line.law.name,
                "statement": line.law.statement,
                "method": line.method,
                "scope": line.scope,
                "seconds": round(line.seconds, 2),
                "verdict": line.verdict,
            }
            for line in lines(report)
        ],
        "worlds": {
            name: {"states": states, "transitions": edges, "seconds": round(seconds, 2)}
            for name, (states, edges, seconds) in report.worlds.items()
        },
        "refinement": report.refinement or ("holds" if not report.broken else "not reached"),
        "plans_replayed": report.plans,
        "longest_wait": {"steps": report.longest_wait[0], "bound": report.longest_wait[1]},
        "shapes": {
            "number": len(SHAPES),
            "paths": report.shapes.paths,
            "seconds": round(report.shapes.seconds, 2),
            "not_kept": report.not_kept,
            "not_run": report.unshaped,
        },
        "counterexamples": {id: one.timeline for id, one in report.broken.items()},
    }


def scope() -> str:
    """How far the check looks: a policy that needs more to go wrong passes."""
    groups, branches = (
        max(one.groups for one in SKETCHES.values()),
        max(n for s in SKETCHES.values() for _, n, _ in s.menu),
    )
    in_shapes, wide = max(sum(one[:3]) for one in SHAPES), max(one.n for one in SHAPES)
    return (
        f"The worlds hold at most {groups} groups of at most {branches} branches, the shapes {in_shapes} of at most "
        f"{wide}: what needs more to go wrong is not seen here."
    )


def _show(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(title=f"{report.policy}: the laws at small scope", title_justify="left", box=None, pad_edge=False)
    for name in ("law", "name", "method", "scope"):
        table.add_column(name, no_wrap=True)
    table.add_column("s", justify="right")
    table.add_column("verdict")
    for line in lines(report):
        style = "bold red" if line.verdict in ("BROKEN", "NOT KEPT") else "green" if line.verdict == "holds" else "dim"
        took = f"{line.seconds:.1f}" if line.seconds else ""
        table.add_row(line.law.id, line.law.name, line.method, line.scope, took, Text(line.verdict, style=style))
    console.print(table)
    total = sum(seconds for _, _, seconds in report.worlds.values())
    print()
    for name, (states, edges, seconds) in report.worlds.items():
        print(f"{name}: {states:,} states, {edges:,} transitions, {seconds:.1f} s")
    shapes = report.shapes
    if report.unshaped:
        print(f"no symbolic shapes: the policy does not run on symbols ({report.unshaped})")
    else:
        print(
            f"{len(SHAPES)} symbolic shapes: {shapes.paths:,} paths, {shapes.queries:,} queries, {shapes.seconds:.1f} s"
        )
    if report.refinement:
        print(f"\nrefinement: a plan's log does not replay in the spec, {report.refinement}")
    elif not report.broken:
        waits, bound = report.longest_wait
        print(f"refinement: {report.plans:,} plans replayed in the spec, action by action")
        print(f"longest wait of any group, over all runs: {waits} steps (its bound by L3: {bound})")
    for number, one in enumerate(report.broken.values(), 1):
        print(f"\n{number}. {one.law.id} is broken in the world {one.world!r}; the shortest run:\n")
        print(one.timeline)
    for id, text in report.not_kept.items():
        print(f"\n{id} is not kept from this state, in which every law holds, though no search came to it:\n{text}")
    wrong = [*report.broken, *report.not_kept]
    verdict = f"{len(wrong)} laws are broken: {', '.join(wrong)}" if wrong else "every law holds"
    total += report.shapes.seconds
    print(f"\n{verdict} ({report.states:,} states, {total:.1f} s)")
    if not wrong:
        print(scope())
