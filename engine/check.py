"""`lawful check`: proves the laws of a scheduler at small scope, and shows how each broken one breaks.

A policy is a class like `engine.scheduler.Scheduler`, most easily a subclass (docs/policies.md).  Every world of
`spec.check.worlds` is searched whole: laws on states, steps and rounds on all of them, each plan's log replayed in the
spec (refinement), then the graph looked at for runs without end (L5) and for the longest wait (L3).  Then schedule() is
run on symbols from every lawful state of some small shapes (`engine.shapes`), for numbers of any size.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.scheduler import Scheduler, SchedulerConfig, SequenceGroup
from engine.scheduler.contracts import lifted
from engine.shapes import LAWS_OF_SHAPES, SHAPES, prove_shapes
from spec.check.codec import Codec, UnusableError
from spec.check.explore import REFINES, Found, Graph, Violation, World, explore
from spec.check.liveness import analyse, arrivals, lap
from spec.check.patience import told
from spec.check.refine import replay
from spec.check.report import Replayed, in_parts, of_state, table, timeline
from spec.check.symbolic import Report as SymbolicReport
from spec.check.worlds import SKETCHES, worlds
from spec.laws import BY_ID, LAWS, Kind, Law, Tier, steps_bound

SEARCH, GRAPH, TESTS = "search", "search, graph", "tests"
_GRAPH_LAWS = ("L3", "L5")
_ELSEWHERE = {"E1": "tests with the KV oracle"}
MOST_SEARCHES = 30  # of one world: each goes on without the laws broken so far


@dataclass
class Broken:
    """A law that the policy breaks, by its shortest run in the first world that shows it.

    parts: the run, what is said of the law, and the values.
    """

    law: Law
    world: str
    steps: int
    parts: tuple[str, str, str]

    @property
    def timeline(self) -> str:
        return "\n\n".join(self.parts[:2]) + (f"\n{self.parts[2]}" if self.parts[2] else "")


@dataclass
class Report:
    """What a check saw.  worlds: states, transitions and seconds of each.

    refused: requests of a world that `add` refuses.  twice: steps made twice from one state, which went alike.
    endless: the world in which a call did not return; nothing behind it was looked at.
    """

    policy: str
    worlds: dict[str, tuple[int, int, float]] = field(default_factory=dict)
    broken: dict[str, Broken] = field(default_factory=dict)
    refinement: str = ""  # the first plan whose log does not replay in the spec
    plans: int = 0  # replayed
    longest_wait: tuple[int, int] = (0, 0)  # L3: most steps of any group, and the bound in that case
    shapes: SymbolicReport = field(default_factory=SymbolicReport)
    unshaped: str = ""  # why the policy cannot be run on symbols, or not on all shapes
    refused: dict[str, tuple[tuple[int, int, int], ...]] = field(default_factory=dict)
    twice: int = 0
    endless: str = ""

    @property
    def holds(self) -> bool:
        if self.broken or self.refinement or self.shapes.failures:
            return False
        return self.shapes.proved or bool(self.unshaped)

    @property
    def not_kept(self) -> dict[str, str]:
        """Laws that schedule() does not keep from some state in which all hold, with its numbers: by law."""
        failed = {"S8" if one.claim == "returns" else one.claim: str(one) for one in reversed(self.shapes.failures)}
        return {id: text for id, text in failed.items() if id not in self.broken}

    @property
    def not_kept_at_once(self) -> list[tuple[list[str], str]]:
        """The same, with the laws that one run breaks together: their ids, and the text of the first."""
        shown = self.not_kept
        runs: dict[str, tuple[list[str], str]] = {}
        for failure in self.shapes.failures:
            id = "S8" if failure.claim == "returns" else failure.claim
            if shown.get(id) == str(failure):
                ids, _ = runs.setdefault(str(failure.story[1:]), ([], shown[id]))
                ids.append(id)
        return list(runs.values())

    @property
    def states(self) -> int:
        return sum(states for states, _, _ in self.worlds.values())


class PolicyError(ValueError):
    """What was named is no policy, or none that can be checked; the message says why, and what is allowed."""


def load_policy(name: str) -> type[Scheduler]:
    """The class that `module:Class` or `path.py:Class` names.  Raises PolicyError, saying what is wrong with it."""
    place, _, kind = name.rpartition(":")
    if not place or not kind:
        raise PolicyError(f"--policy is {name!r}; it must be module:Class or path.py:Class")
    try:
        if place.endswith(".py"):
            module = _module_of(place)
        else:
            sys.path.insert(0, str(Path.cwd()))
            module = importlib.import_module(place)
    except (ImportError, OSError, SyntaxError) as error:
        raise PolicyError(f"{place} cannot be imported: {type(error).__name__}: {error}") from None
    except (Exception, SystemExit) as error:  # whatever its own code does
        trace = error.__traceback__
        lines = [f"line {one.lineno}" for one in traceback.extract_tb(trace) if _is_of(one.filename, place)]
        where = f" (in its {lines[-1]})" if lines else ""
        raise PolicyError(f"{place} cannot be imported: {type(error).__name__}: {error}{where}") from None
    policy: Any = getattr(module, kind, None)
    if not isinstance(policy, type):
        own = [
            one
            for one, value in vars(module).items()
            if isinstance(value, type) and value.__module__ == module.__name__
        ]
        known = f"; its classes are {', '.join(own)}" if own else ""
        raise PolicyError(f"{place} has no class {kind!r}{known}")
    missing = [method for method in ("add", "schedule", "update", "abort", "fail") if not hasattr(policy, method)]
    if missing:
        raise PolicyError(
            f"{name} is no scheduler: it has no method {missing[0]}(); derive from engine.scheduler.Scheduler"
        )
    if inspect.isabstract(policy):
        raise PolicyError(
            f"{name} is abstract: it does not say {', '.join(sorted(vars(policy)['__abstractmethods__']))}"
        )
    return policy


def _module_of(path: str) -> Any:
    """The module in a file, known by its name for as long as it is whole."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module.__name__]
        if before is not None:
            sys.modules[module.__name__] = before
        raise
    return module


def _is_of(file: str, place: str) -> bool:
    return Path(file).stem == (Path(place).stem if place.endswith(".py") else place.rpartition(".")[2])


def new_group(request_id: str, p: int, n: int, m: int) -> SequenceGroup:
    """A request of a world."""
    return SequenceGroup(request_id, p, n, m)


def check(policy: type[Scheduler], note: Callable[[str], None] = lambda text: None) -> Report:
    """Search every world and prove every shape; `note` is told which one is next.

    Raises PolicyError when the policy cannot be searched: it cannot be made, keeps a state that the search cannot know,
    or does not decide by its state alone.
    """
    report = Report(f"{policy.__module__}:{policy.__qualname__}")
    with lifted():
        for name, world in worlds(SchedulerConfig).items():
            note(name)
            begun = time.perf_counter()
            found = _search(policy, name, world, report)
            report.worlds[name] = found.states, found.edges, time.perf_counter() - begun
            if found.refused:
                report.refused[name] = found.refused
            if found.endless:
                report.endless = name
                return report
        if all(states == 1 for states, _, _ in report.worlds.values()) and not report.broken:
            raise PolicyError(f"{report.policy} refuses every request of every world: there is nothing to check")
        report.shapes, not_run = prove_shapes(policy, note)
        if not_run:
            shape, why = next(iter(not_run.items()))
            report.unshaped = f"{why}; so in the shape: {shape}"
    return report


def _search(policy: type[Scheduler], name: str, world: World, report: Report) -> Found:
    """One world: again and again without the laws found broken, until nothing new breaks."""

    def make() -> Scheduler:
        try:
            return policy(world.config)
        except (Exception, SystemExit) as error:
            raise UnusableError(
                f"{policy.__qualname__}(config) raises {told(error)}; a policy is made with one argument, a "
                "SchedulerConfig, and must take every one"
            ) from None

    def hook(step: Any, turn: Any, event: Any) -> str | None:
        report.plans += 1
        if report.refinement or report.broken:
            return None
        mismatch = replay(turn)
        return None if mismatch is None else str(mismatch)

    for _ in range(MOST_SEARCHES):
        laws = set(BY_ID) - set(report.broken)
        try:
            found = explore(world, make, new_group, laws=laws, graph=not report.broken, step_hook=hook, twice=True)
        except UnusableError as error:
            raise PolicyError(_unusable(error, name, make)) from None
        report.twice += found.twice
        if found.violation is None:
            break
        if found.violation.law is REFINES:
            report.refinement = f"in the world {name!r}; the shortest run:\n\n" + timeline(
                found.violation, make, new_group
            )
            continue
        _note_broken(report, name, found.violation, make)
        if found.endless:
            break
    if found.complete and found.graph is not None and not report.broken:
        _look_at_graph(found, world, name, make, report)
    return found


def _unusable(error: UnusableError, name: str, make: Callable[[], Scheduler]) -> str:
    """What makes a policy one that cannot be searched, with the run to where it was seen."""
    if not error.run:
        return str(error)
    run = Replayed(make, new_group)
    for event in error.run:
        run.carry_out(event)
    return "\n".join([str(error), f"Seen in the world {name!r}, at the end of this run:", "", *table(run.rows)])


def _note_broken(report: Report, name: str, violation: Violation, make: Callable[[], Scheduler]) -> None:
    steps = sum(event.kind == "step" for event in violation.run)
    shown, told_of, values = in_parts(violation, make, new_group)
    astray = _astray(violation, make)
    if astray is not None and report.broken:
        told_of += "\n   (carried out again, the run is in another state than in the search before its event "
        told_of += f"{astray + 1}: the search goes on from states that are as the laws broken above ask)"
    elif astray is not None:
        raise PolicyError(
            f"{report.policy} does not repeat itself: it broke {violation.law.id} in the world {name!r}, and the same "
            f"run on a fresh scheduler is in another state before event {astray + 1}.  A policy may read nothing but "
            f"its own fields and its arguments.  What the run came to this time:\n\n{shown}\n\n{told_of}"
        )
    report.broken[violation.law.id] = Broken(violation.law, name, steps, (shown, told_of, values))


def _astray(violation: Violation, make: Callable[[], Scheduler]) -> int | None:
    """The first event before which a run, carried out again, is not in the state in which the search met it."""
    run, codec = Replayed(make, new_group), Codec(make, new_group)
    for place, (event, key) in enumerate(zip(violation.run, violation.keys, strict=True)):
        try:
            if codec.encode(run.s) != key:
                return place
        except Exception:  # no state that the search keeps
            return place
        if place < len(violation.run) - 1:
            run.carry_out(event)
    return None


def _look_at_graph(found: Found, world: World, name: str, make: Callable[[], Scheduler], report: Report) -> None:
    """L5 and L3 over all runs of a world at once."""
    graph = found.graph
    assert graph is not None
    worst = analyse(graph)
    codec = Codec(make, new_group)
    if worst.lasso is not None:
        state, place = worst.lasso
        said = f"{BY_ID['L5']}\n   from here it can go on for ever, and the group marked >> stays:\n"
        said += f"{_state_text(codec.restore(graph.keys[state]), place)}\n\n{_lap_text(graph, codec, state, place)}"
        report.broken["L5"] = Broken(BY_ID["L5"], name, 0, (_run_text(graph, state, make), said, ""))
        return
    for state, place in arrivals(graph):
        s = codec.restore(graph.keys[state])
        groups = [*s.running, *s.swapped, *s.waiting]
        bound = steps_bound(groups[place], groups[:place], world.config.enable_chunked_prefill)
        waits = worst.at(state, place)
        if waits > bound and "L3" not in report.broken:
            law = BY_ID["L3"]
            said = f"{law}\n   from here the group marked >> may take {waits} steps; the bound is {bound}:\n"
            said += _state_text(s, place)
            report.broken["L3"] = Broken(law, name, 0, (_run_text(graph, state, make), said, ""))
        if waits > report.longest_wait[0]:
            report.longest_wait = waits, bound


def _run_text(graph: Graph, state: int, make: Callable[[], Scheduler]) -> str:
    """The shortest run to a state of the graph."""
    run = Replayed(make, new_group)
    for event in graph.run_to(state):
        run.carry_out(event)
    return "\n".join(line.rstrip() for line in table(run.rows))


def _lap_text(graph: Graph, codec: Codec, state: int, place: int) -> str:
    """One way round from a state to itself, state by state; names are by place in the queues, not by arrival."""
    rows = [of_state("here", codec.restore(graph.keys[state]))]
    for number, (there, is_step) in enumerate(lap(graph, state, place), 1):
        rows.append(of_state(f"{number}. {'step' if is_step else 'event'}", codec.restore(graph.keys[there])))
    return "\n".join(line.rstrip() for line in table(rows))


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
            yield Line(law, TESTS, _ELSEWHERE[law.id], 0.0, "not checked")
        elif broken is not None:
            where = f"{broken.world!r}" + (f", {broken.steps} steps" if broken.steps else "")
            yield Line(law, _method(law), where, seconds, "BROKEN")
        elif law.id in report.not_kept:
            yield Line(law, "symbols", f"one of {len(SHAPES)} shapes, any size", report.shapes.seconds, "NOT KEPT")
        elif report.endless:
            yield Line(law, _method(law), "a call does not return", 0.0, "not reached")
        elif law.id in _GRAPH_LAWS and report.broken:
            yield Line(law, _method(law), "other laws are broken", 0.0, "not reached")
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


def _are(ids: Iterable[str]) -> str:
    """`S1 is`, or `S1, S2 and S3 are`."""
    *first, last = ids
    return f"{', '.join(first)} and {last} are" if first else f"{last} is"


def run(policy_name: str | None, as_json: bool, progress: bool) -> int:
    """The command: the table and the counterexamples; 0 if every law holds, 1 if not, 2 for what cannot be checked."""
    from rich.console import Console

    console = Console(stderr=True)
    try:
        policy = Scheduler if policy_name is None else load_policy(policy_name)
        if progress and not as_json:
            with console.status("") as status:
                report = check(policy, lambda name: status.update(f"searching: {name}"))
        else:
            report = check(policy)
    except PolicyError as error:
        print(f"lawful: error: {error}", file=sys.stderr)
        return 2
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
        "twice": report.twice,
        "refused": report.refused,
        "endless": report.endless or None,
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
        if report.endless and line.verdict == "not reached":
            continue
        style = "bold red" if line.verdict in ("BROKEN", "NOT KEPT") else "green" if line.verdict == "holds" else "dim"
        took = f"{line.seconds:.1f}" if line.seconds else ""
        table.add_row(line.law.id, line.law.name, line.method, line.scope, took, Text(line.verdict, style=style))
    console.print(table)
    total = sum(seconds for _, _, seconds in report.worlds.values())
    print()
    for name, (states, edges, seconds) in report.worlds.items():
        print(f"{name}: {states:,} states, {edges:,} transitions, {seconds:.1f} s")
    shapes = report.shapes
    if report.shapes.paths:
        print(
            f"{len(SHAPES)} symbolic shapes: {shapes.paths:,} paths, {shapes.queries:,} queries, {shapes.seconds:.1f} s"
        )
    if report.unshaped:
        print(f"the policy is not proved on symbols: {report.unshaped}")
    for name, refused in report.refused.items():
        shown = ", ".join(f"prompt {p}, n {n}, max_tokens {m}" for p, n, m in refused)
        print(f"not searched, since the policy refuses it in {name!r}: {shown}")
    if report.twice:
        print(f"{report.twice:,} steps were made twice from the same state, and went alike")
    if report.endless:
        print(
            f"a call in {report.endless!r} does not return: the check ends there, and no other law was tried to its end"
        )
    if report.refinement:
        print(f"\nrefinement: a plan's log does not replay in the spec, {report.refinement}")
    elif not report.broken:
        waits, bound = report.longest_wait
        print(f"refinement: {report.plans:,} plans replayed in the spec, action by action")
        print(f"longest wait of any group, over all runs: {waits} steps (its bound by L3: {bound})")
    alike: dict[tuple[str, str, str], list[Broken]] = {}
    for one in report.broken.values():
        alike.setdefault((one.world, one.parts[0], one.parts[2]), []).append(one)
    for number, ((world, run, values), laws) in enumerate(alike.items(), 1):
        print(f"\n{number}. {_are(one.law.id for one in laws)} broken in the world {world!r}; the shortest run:\n")
        print("\n".join([run, "", *(one.parts[1] for one in laws), values]).rstrip())
    for ids, text in report.not_kept_at_once:
        print(f"\n{_are(ids)} not kept from this state, in which every law holds, though no search came to it:\n{text}")
    wrong = [*report.broken, *report.not_kept]
    count = "1 law is" if len(wrong) == 1 else f"{len(wrong)} laws are"
    verdict = f"{count} broken: {', '.join(wrong)}" if wrong else "every law holds"
    if report.refinement:
        verdict += "; but the log of a plan does not replay in the spec"
    total += report.shapes.seconds
    print(f"\n{verdict} ({report.states:,} states, {total:.1f} s)")
    if not wrong:
        print(scope())
