"""Symbolic execution of real code: run a function on symbols that stand for every int, once for each path through it.

Guarantees: the paths that `Executor.paths` yields are exactly the feasible ones under the hypothesis, so that a claim
which holds at the end of each holds for every input; whatever the solver cannot decide raises, it is never skipped.

A symbol is a `SymInt` or `SymBool`.  Arithmetic and comparison build Z3 terms; only a truth test (`if`, `while`, `and`)
forks.  The function is run again for each path: a run follows the decisions taken before and goes on from there, while
one solver keeps the path's conditions on its stack.  The last model tells which side of a new branch is feasible, so
a branch costs one query, for its other side.

    source -> build(source) -> state -> body(state) -> outcome -> claims(outcome)

`prove` runs this with symbols and then, for every path, once more with the ints of a model of that path: the plain
code on plain ints must go the same way and come to the same outcome.  The executor checks itself.

Its signals derive from BaseException so that no handler in the code under test can eat them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import z3

from spec.check.patience import EndlessError, patience
from spec.check.terms import Blocked, Signal, Source, Symbols, SymBool, SymInt, Valuation, ask, value_of
from spec.logic import Bool, conj

__all__ = [
    "Blocked",
    "Branch",
    "Cut",
    "DisagreementError",
    "Executor",
    "Failure",
    "Infeasible",
    "Lengthy",
    "Path",
    "Report",
    "Source",
    "SymBool",
    "SymInt",
    "Symbols",
    "Undecided",
    "Valuation",
    "assume",
    "prove",
    "value_of",
]


class Undecided(Signal):
    """The solver answered `unknown`: nothing is proved."""


class Cut(Signal):
    """A run is cut short at a point where an invariant takes over, such as a loop head; `at` names the point."""

    def __init__(self, at: str) -> None:
        super().__init__(at)
        self.at = at


class Infeasible(Signal):
    """An assumption in the middle of a run cannot hold there: the path does not exist."""


class Lengthy(Signal):
    """More paths, or more decisions on one of them, than were granted: most likely a loop over a number of tokens."""


class DisagreementError(AssertionError):
    """A symbolic path and the plain run of its own model differ: the executor or the model of the world is wrong."""


State = TypeVar("State")
Outcome = TypeVar("Outcome")

PATIENCE = 20_000  # milliseconds for a query that takes a few as a rule
AGAIN = (2, 6, 2)  # Z3's arithmetic solvers, tried in turn when one finds no end

_active: list[Executor] = []  # the executor whose run is under way is the last


class Branch(NamedTuple):
    """One decision of a path: the condition asked for, the answer, and whether the other answer was possible too."""

    condition: SymBool
    taken: bool
    free: bool


class _Decision:
    __slots__ = ("condition", "other", "taken")

    def __init__(self, condition: SymBool, taken: bool, other: Valuation | None) -> None:
        self.condition = condition
        self.taken = taken
        self.other = other  # values for the side not gone yet


class Executor:
    """Runs a function once for each feasible path, under a hypothesis.

    granted: most paths, and most decisions on one; Lengthy beyond.
    """

    def __init__(self, hypothesis: Iterable[Bool] = (), granted: tuple[int, int] | None = None) -> None:
        self.granted = granted
        self.asked = 0  # times that a solver was begun or came to an end: the work of a proof
        self.solver = z3.SimpleSolver()
        self.solver.set("arith.solver", 2)  # on quotients steadier than what SolverFor("QF_LIA") takes
        self.solver.set("timeout", PATIENCE)
        self.queries = 0
        for part in hypothesis:
            self.solver.add(part if isinstance(part, bool) else part.term)
        self.values = self._check()  # satisfy the conditions on the solver's stack
        self._decided: list[_Decision] = []
        self._followed = 0  # decisions that this run has repeated so far

    @property
    def satisfiable(self) -> bool:
        """Some input satisfies the hypothesis; without one every proof is empty."""
        return self.values is not None

    def paths(self, function: Callable[[], Any]) -> Iterator[Path]:
        """Every feasible path of `function`, depth first.  Each is live (can be asked) until the next is drawn."""
        if self.values is None:
            return
        paths = 0
        while True:
            paths += 1
            if self.granted is not None and paths > self.granted[0]:
                raise Lengthy(f"more than {self.granted[0]} paths")
            self._followed = 0
            _active.append(self)
            ask.append(self.decide)
            result, raised, feasible = None, None, True
            try:
                result = function()
            except Infeasible:
                feasible = False
            except Cut as cut:
                result = cut
            except (Exception, SystemExit) as error:  # of the code under test: an outcome, to be judged by the claims
                raised = error
            finally:
                _active.pop()
                ask.pop()
            if self._followed < len(self._decided):
                raise DisagreementError("the function is not deterministic: a repeated run took fewer decisions")
            if feasible:
                assert self.values is not None
                branches = tuple(Branch(d.condition, d.taken, d.other is not None) for d in self._decided)
                yield Path(self, result, raised, branches, self.values)
            while self._decided and self._decided[-1].other is None:
                self._decided.pop()
                self.solver.pop()
            if not self._decided:
                return
            last = self._decided[-1]
            self.solver.pop()
            self.values, last.other, last.taken = last.other, None, not last.taken
            self._push(last)

    def decide(self, condition: SymBool) -> bool:
        """The truth of a condition on this path; notes the other side for later if it is feasible."""
        if self._followed < len(self._decided):
            decision = self._decided[self._followed]
            if decision.condition is not condition:
                raise DisagreementError(f"the function is not deterministic: {decision.condition} became {condition}")
            self._followed += 1
            return decision.taken
        assert self.values is not None
        if self.granted is not None and len(self._decided) >= self.granted[1]:
            raise Lengthy(f"more than {self.granted[1]} decisions in one run")
        taken = condition.value(self.values)
        decision = _Decision(condition, taken, self._check(condition.negated() if taken else condition))
        self._push(decision)
        self._decided.append(decision)
        self._followed += 1
        return taken

    def assume(self, condition: SymBool) -> None:
        """Add a condition to this path without a fork; the path ends here if that is impossible."""
        if self._followed < len(self._decided):
            self._followed += 1
            return
        values = self._check(condition)
        if values is None:
            raise Infeasible
        self.values = values
        decision = _Decision(condition, True, None)
        self._push(decision)
        self._decided.append(decision)
        self._followed += 1

    def refute(self, claim: Bool) -> Valuation | None:
        """Values of the current path for which the claim is false; None if it holds."""
        if claim is True:
            return None
        if claim is False or not claim.value(self.values):
            return self.values
        return self._check(claim.negated())

    def _push(self, decision: _Decision) -> None:
        self.solver.push()
        self.solver.add((decision.condition if decision.taken else decision.condition.negated()).term)

    def _check(self, also: SymBool | None = None) -> Valuation | None:
        self.queries += 1
        self.solver.push()
        try:
            if also is not None:
                self.solver.add(also.term)
            self.asked += 1
            answer, solver = self.solver.check(), self.solver
            self.asked += 1
            for arithmetic in AGAIN:
                if answer != z3.unknown:
                    break
                # what a query costs depends on all that the process asked before: a context of its own forgets that
                solver = self.solver.translate(z3.Context())
                solver.set("arith.solver", arithmetic)
                solver.set("timeout", 6 * PATIENCE)
                answer = solver.check()
                self.asked += 1
            if answer == z3.unknown:
                raise Undecided(solver.reason_unknown())
            return Valuation.of(solver.model()) if answer == z3.sat else None
        finally:
            self.solver.pop()


@dataclass(slots=True)
class Path:
    """One path: what came out, the decisions on the way, and values that lead down it."""

    executor: Executor
    result: Any
    raised: BaseException | None
    branches: tuple[Branch, ...]
    values: Valuation

    def refute(self, claim: Bool) -> Valuation | None:
        """Values of this path for which the claim is false; None if there are none."""
        return self.executor.refute(claim)


# proofs


@dataclass(slots=True)
class Failure:
    """A claim that does not hold: its name, values that break it, and the branches of the path to it.

    story: the run on these values in words.
    """

    claim: str
    values: Valuation
    branches: tuple[Branch, ...]
    error: BaseException | None = None
    story: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.claim} is broken" + (f": {self.error!r}" if self.error else "")]
        lines += [f"    {line}" for line in self.story]
        numbers = [f"{name} = {value}" for name, value in sorted(self.values.items())]
        if self.story:
            lines.append("    all numbers: " + ", ".join(numbers))
        else:
            lines += [f"    {number}" for number in numbers]
        decisions = [f"    {'  ' if b.taken else 'not '}{_cut(str(b.condition))}" for b in self.branches if b.free]
        if decisions:
            lines += ["    the decisions on the way, where both were possible:", *decisions]
        return "\n".join(lines)


def _cut(text: str, most: int = 160) -> str:
    return text if len(text) <= most else text[:most] + " ..."


@dataclass(slots=True)
class Report:
    """What a proof did."""

    paths: int = 0
    branches: int = 0
    queries: int = 0
    seconds: float = 0.0
    satisfiable: bool = False
    failures: list[Failure] = field(default_factory=list)
    reached: Counter[str] = field(default_factory=Counter)

    @property
    def proved(self) -> bool:
        """Every claim holds on every path, there is a path, and every path was repeated on plain ints."""
        return self.satisfiable and self.paths > 0 and not self.failures

    def broken(self) -> set[str]:
        """Names of the claims that do not hold."""
        return {failure.claim for failure in self.failures}

    def absorb(self, other: Report) -> None:
        """Add up the figures of another proof."""
        self.paths += other.paths
        self.branches += other.branches
        self.queries += other.queries
        self.seconds += other.seconds
        self.satisfiable = self.satisfiable or other.satisfiable
        self.failures += other.failures
        self.reached += other.reached

    def __str__(self) -> str:
        head = f"{self.paths} paths, {self.branches} branches, {self.queries} queries, {self.seconds:.2f} s"
        if not self.satisfiable:
            head += "; the hypothesis is not satisfiable"
        return "\n".join([head, *map(str, self.failures)])


def prove(
    build: Callable[[Source], State],
    hypothesis: Callable[[State], Iterable[Bool]],
    body: Callable[[State], Outcome],
    claims: Callable[[Outcome], Mapping[str, Bool]],
    observe: Callable[[Outcome], Any],
    reached: Callable[[Outcome], Iterable[str]] = lambda outcome: (),
    max_failures: int = 1,
    explain: Callable[[str, Valuation], list[str]] | None = None,
    granted: tuple[int, int] | None = None,
) -> Report:
    """Show that from every state that satisfies the hypothesis, `body` never raises and ends where all claims hold.

    build: makes a state from a source of numbers; called anew for each run, so `body` may change it.
    claims: by name, predicates made with the connectives of spec.logic; they are conjoined, and split on failure.  They
        are read at the end of a run, as part of it, so that one may also ask for the truth of a symbol.
    observe: what must be equal between a symbolic path and the plain run of its model: tuples, lists and numbers.
    reached: names of the places that a path went through, counted for proofs of non-vacuity.
    max_failures: stop after so many broken claims.
    explain: tells the plain run of a broken claim, by its name and values, line by line.
    granted: most paths, and most decisions on one.

    Raises DisagreementError when a path or a counterexample does not repeat on plain ints, Lengthy when it would take
    more than what is granted.  A run that does not return breaks "returns" if the plain one does not either.
    """
    start = time.perf_counter()
    report = Report()
    symbols = Symbols()
    executor = Executor(hypothesis(build(symbols)), granted)
    report.satisfiable = executor.satisfiable

    def run(state: State) -> tuple[Any, Mapping[str, Bool]]:
        try:
            outcome: Any = body(state)
        except Cut as cut:
            outcome = cut
        return outcome, claims(outcome)

    def plainly(values: Valuation) -> tuple[Any, Mapping[str, Bool], BaseException | None]:
        state = build(values)
        if not all(part is True for part in hypothesis(state)):
            raise DisagreementError(f"a model of the hypothesis does not satisfy it on plain ints: {values}")
        try:
            return *run(state), None
        except (Exception, SystemExit) as error:
            return None, {}, error

    def fail(claim: str, values: Valuation, path: tuple[Branch, ...], error: BaseException | None = None) -> None:
        story: list[str] = []
        if explain is not None:
            try:
                story = explain(claim, values)
            except Exception as trouble:  # the failure itself matters more
                story = [f"it cannot be told: {trouble!r}"]
        report.failures.append(Failure(claim, values, path, error, tuple(story)))

    def every_path() -> None:
        for path in executor.paths(lambda: run(build(symbols))):
            judge(path)
            if len(report.failures) >= max_failures:
                break

    def judge(path: Path) -> None:
        report.paths += 1
        report.branches += len(path.branches)
        values = path.values
        plain, _, error = plainly(values)
        if type(error) is not type(path.raised):
            raise DisagreementError(f"symbols raise {path.raised!r}, plain ints {error!r}: {values}") from path.raised
        if path.raised is not None:
            fail("returns", values, path.branches, path.raised)
        else:
            outcome, named = path.result
            seen, expected = value_of(observe(outcome), values), value_of(observe(plain), values)
            if seen != expected:
                raise DisagreementError(f"symbols come to {seen}, plain ints to {expected}: {values}")
            report.reached.update(set(reached(outcome)))
            if path.refute(conj(*named.values())) is not None:
                for name, claim in named.items():
                    broken = path.refute(claim)
                    if broken is None:
                        continue
                    if plainly(broken)[1][name] is not False:
                        raise DisagreementError(f"{name} is broken on symbols only: {broken}")
                    fail(name, broken, path.branches)

    try:
        with patience(lambda: (executor.asked, report.paths, len(report.failures))):
            every_path()
    except (EndlessError, Lengthy) as lengthy:
        values = executor.values
        assert values is not None
        try:
            with patience(lambda: None):  # does it go on for ever on ints too?
                plainly(values)
        except EndlessError as endless:
            fail("returns", values, (), endless)
        else:
            raise Lengthy(f"a run {lengthy}" if isinstance(lengthy, EndlessError) else str(lengthy)) from None
    report.queries = executor.queries
    report.seconds = time.perf_counter() - start
    return report


def assume(condition: Bool) -> None:
    """Restrict the run under way to inputs for which this holds: a fact about numbers made up in the middle of it."""
    if condition is True:
        return
    if condition is False:
        raise Infeasible
    _active[-1].assume(condition)
