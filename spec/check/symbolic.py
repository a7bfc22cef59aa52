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

What code may do on symbols: + - * (by a constant), // and % by a positive constant, comparison, min, max, sum, any,
all, f-strings without a format.  What it may not: range, index or slice by a symbol, a symbol as a key, int(), /.
Those raise `Blocked`.  Both signals derive from BaseException so that no handler in the code under test can eat them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import z3

from spec.logic import Bool, Int, conj


class Signal(BaseException):
    """Raised through the code under test, past its `except Exception`."""


class Blocked(Signal):
    """The code asked a symbol for what only an int has."""


class Undecided(Signal):
    """The solver answered `unknown`: nothing is proved."""


class Cut(Signal):
    """A run is cut short at a point where an invariant takes over, such as a loop head; `at` names the point."""

    def __init__(self, at: str) -> None:
        super().__init__(at)
        self.at = at


class Infeasible(Signal):
    """An assumption in the middle of a run cannot hold there: the path does not exist."""


class DisagreementError(AssertionError):
    """A symbolic path and the plain run of its own model differ: the executor or the model of the world is wrong."""


State = TypeVar("State")
Outcome = TypeVar("Outcome")

_active: list[Executor] = []  # the executor whose run is under way is the last


def _term(value: Any) -> Any:
    return value.term if isinstance(value, SymInt | SymBool) else value


def _int(term: z3.ArithRef) -> Int:
    return term.as_long() if z3.is_int_value(term) else SymInt(term)


def _bool(term: z3.BoolRef) -> Bool:
    if z3.is_true(term):
        return True
    if z3.is_false(term):
        return False
    return SymBool(term)


class SymInt:
    """An int that is not known."""

    __slots__ = ("term",)

    def __init__(self, term: z3.ArithRef) -> None:
        self.term = term

    def __repr__(self) -> str:
        return str(self.term)

    def __add__(self, other: Int) -> Int:
        if isinstance(other, SymInt):
            return SymInt(self.term + other.term)
        return SymInt(self.term + other) if other else self  # sum() starts with a plain 0

    __radd__ = __add__

    def __sub__(self, other: Int) -> Int:
        if isinstance(other, SymInt):
            return 0 if other.term.eq(self.term) else SymInt(self.term - other.term)
        return SymInt(self.term - other) if other else self

    def __rsub__(self, other: Int) -> Int:
        return SymInt(_term(other) - self.term)

    def __mul__(self, other: Int) -> Int:
        if isinstance(other, SymInt):
            raise Blocked("a product of two symbols is not linear")
        if other == 0 or other == 1:
            return self if other else 0
        return SymInt(self.term * other)

    __rmul__ = __mul__

    def __floordiv__(self, other: int) -> Int:
        if isinstance(other, SymInt) or other <= 0:
            raise Blocked("// needs a positive constant")
        return self if other == 1 else SymInt(self.term / other)  # Z3 rounds as Python does for a positive divisor

    def __mod__(self, other: int) -> Int:
        if isinstance(other, SymInt) or other <= 0:
            raise Blocked("% needs a positive constant")
        return 0 if other == 1 else SymInt(self.term % other)

    def __neg__(self) -> Int:
        return SymInt(-self.term)

    def __lt__(self, other: Int) -> Bool:
        return _bool(z3.simplify(self.term < _term(other)))

    def __le__(self, other: Int) -> Bool:
        return _bool(z3.simplify(self.term <= _term(other)))

    def __gt__(self, other: Int) -> Bool:
        return _bool(z3.simplify(self.term > _term(other)))

    def __ge__(self, other: Int) -> Bool:
        return _bool(z3.simplify(self.term >= _term(other)))

    def __eq__(self, other: object) -> Bool:
        if not isinstance(other, int | SymInt):
            return NotImplemented
        return _bool(z3.simplify(self.term == _term(other)))

    def __ne__(self, other: object) -> Bool:
        if not isinstance(other, int | SymInt):
            return NotImplemented
        return _bool(z3.simplify(self.term != _term(other)))

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __hash__(self) -> int:
        raise Blocked("a symbol cannot be a key")

    def __index__(self) -> int:
        raise Blocked("a symbol cannot be an index or a range")

    def __int__(self) -> int:
        raise Blocked("a symbol has no int")

    def __float__(self) -> float:
        raise Blocked("a symbol has no float")

    def __truediv__(self, other: Int) -> Int:
        raise Blocked("/ makes a float")

    def __format__(self, spec: str) -> str:
        if spec:
            raise Blocked("a symbol has no width")
        return str(self)


class SymBool:
    """A bool that is not known.  Asking for its truth forks the run."""

    __slots__ = ("term",)

    def __init__(self, term: z3.BoolRef) -> None:
        self.term = term

    def __repr__(self) -> str:
        return str(self.term)

    def __bool__(self) -> bool:
        if not _active:
            raise Blocked("the truth of a symbol is asked outside a run; use conj, disj, implies, neg, pick")
        return _active[-1].decide(self.term)

    def __hash__(self) -> int:
        raise Blocked("a symbol cannot be a key")

    def __eq__(self, other: object) -> Bool:
        if not isinstance(other, bool | SymBool):
            return NotImplemented
        return _bool(z3.simplify(self.term == _term(other)))

    def __ne__(self, other: object) -> Bool:
        if not isinstance(other, bool | SymBool):
            return NotImplemented
        return _bool(z3.simplify(self.term != _term(other)))

    # what spec.logic asks for

    def pick(self, then: Any, otherwise: Any) -> Any:
        """`then` where this holds, else `otherwise`."""
        if then is otherwise:
            return then
        if isinstance(then, bool | SymBool) and isinstance(otherwise, bool | SymBool):
            return _bool(z3.simplify(z3.If(self.term, _bool_term(then), _bool_term(otherwise))))
        return _int(z3.If(self.term, _int_term(then), _int_term(otherwise)))

    def negated(self) -> Bool:
        """not this."""
        return _bool(z3.simplify(z3.Not(self.term)))

    def conjoined(self, others: Sequence[SymBool]) -> Bool:
        """This and all the others."""
        return SymBool(z3.And(self.term, *(other.term for other in others))) if others else self

    def disjoined(self, others: Sequence[SymBool]) -> Bool:
        """This or one of the others."""
        return SymBool(z3.Or(self.term, *(other.term for other in others))) if others else self


def _bool_term(value: Bool) -> z3.BoolRef:
    return z3.BoolVal(value) if isinstance(value, bool) else value.term


def _int_term(value: Int) -> z3.ArithRef:
    return z3.IntVal(value) if isinstance(value, int) else value.term


class Source(Protocol):
    """Where a world takes its numbers from: symbols, or the values of a model."""

    def integer(self, name: str) -> Int: ...
    def boolean(self, name: str) -> Bool: ...


class Symbols:
    """A source of symbols: the same name is the same symbol."""

    def integer(self, name: str) -> Int:
        return SymInt(z3.Int(name))

    def boolean(self, name: str) -> Bool:
        return SymBool(z3.Bool(name))


class Valuation(dict[str, Any]):
    """A source of plain values, read off a model.  What the model left open is 0 or False."""

    def __init__(self, model: z3.ModelRef) -> None:
        super().__init__()
        for declaration in model.decls():
            if declaration.arity() == 0:
                value = model[declaration]
                self[declaration.name()] = value.as_long() if z3.is_int_value(value) else z3.is_true(value)

    def integer(self, name: str) -> int:
        return int(self.get(name, 0))

    def boolean(self, name: str) -> bool:
        return bool(self.get(name, False))


class Branch(NamedTuple):
    """One decision of a path: the condition asked for, the answer, and whether the other answer was possible too."""

    condition: z3.BoolRef
    taken: bool
    free: bool


class _Decision:
    __slots__ = ("condition", "other", "taken")

    def __init__(self, condition: z3.BoolRef, taken: bool, other: z3.ModelRef | None) -> None:
        self.condition = condition
        self.taken = taken
        self.other = other  # a model of the side not gone yet


class Executor:
    """Runs a function once for each feasible path, under a hypothesis."""

    def __init__(self, hypothesis: Iterable[Bool] = (), logic: str = "QF_LIA") -> None:
        self.solver = z3.SolverFor(logic)
        self.queries = 0
        for part in hypothesis:
            self.solver.add(_term(part))
        self.model = self._check()  # of the conditions on the solver's stack
        self._decided: list[_Decision] = []
        self._followed = 0  # decisions that this run has repeated so far

    @property
    def satisfiable(self) -> bool:
        """Some input satisfies the hypothesis; without one every proof is empty."""
        return self.model is not None

    def paths(self, function: Callable[[], Any]) -> Iterator[Path]:
        """Every feasible path of `function`, depth first.  Each is live (can be asked) until the next is drawn."""
        if self.model is None:
            return
        while True:
            self._followed = 0
            _active.append(self)
            result, raised, feasible = None, None, True
            try:
                result = function()
            except Infeasible:
                feasible = False
            except Cut as cut:
                result = cut
            except Exception as error:  # an error of the code under test is an outcome, to be judged by the claims
                raised = error
            finally:
                _active.pop()
            if self._followed < len(self._decided):
                raise DisagreementError("the function is not deterministic: a repeated run took fewer decisions")
            branches = tuple(Branch(d.condition, d.taken, d.other is not None) for d in self._decided)
            if feasible:
                yield Path(self, result, raised, branches, self.model)
            while self._decided and self._decided[-1].other is None:
                self._decided.pop()
                self.solver.pop()
            if not self._decided:
                return
            last = self._decided[-1]
            self.solver.pop()
            self.model, last.other, last.taken = last.other, None, not last.taken
            self._push(last)

    def decide(self, condition: z3.BoolRef) -> bool:
        """The truth of a condition on this path; notes the other side for later if it is feasible."""
        if self._followed < len(self._decided):
            decision = self._decided[self._followed]
            if not decision.condition.eq(condition):
                raise DisagreementError(f"the function is not deterministic: {decision.condition} became {condition}")
            self._followed += 1
            return bool(decision.taken)
        assert self.model is not None
        taken: bool = z3.is_true(self.model.eval(condition, model_completion=True))
        decision = _Decision(condition, taken, self._check(z3.Not(condition) if taken else condition))
        self._push(decision)
        self._decided.append(decision)
        self._followed += 1
        return taken

    def assume(self, condition: z3.BoolRef) -> None:
        """Add a condition to this path without a fork; the path ends here if that is impossible."""
        if self._followed < len(self._decided):
            self._followed += 1
            return
        model = self._check(condition)
        if model is None:
            raise Infeasible
        self.model = model
        decision = _Decision(condition, True, None)
        self._push(decision)
        self._decided.append(decision)
        self._followed += 1

    def refute(self, claim: Bool) -> z3.ModelRef | None:
        """A model of the current path in which the claim is false; None if it holds."""
        if claim is True:
            return None
        if claim is False:
            return self.model
        return self._check(z3.Not(claim.term))

    def _push(self, decision: _Decision) -> None:
        self.solver.push()
        self.solver.add(decision.condition if decision.taken else z3.Not(decision.condition))

    def _check(self, *also: z3.BoolRef) -> z3.ModelRef | None:
        self.queries += 1
        self.solver.push()
        self.solver.add(*also)
        try:
            answer = self.solver.check()
            if answer == z3.unknown:
                raise Undecided(self.solver.reason_unknown())
            return self.solver.model() if answer == z3.sat else None
        finally:
            self.solver.pop()


@dataclass(slots=True)
class Path:
    """One path: what came out, the decisions on the way, and a model of its conditions."""

    executor: Executor
    result: Any
    raised: Exception | None
    branches: tuple[Branch, ...]
    model: Any

    def refute(self, claim: Bool) -> Valuation | None:
        """Values of this path for which the claim is false; None if there are none."""
        model = self.executor.refute(claim)
        return None if model is None else Valuation(model)

    def valuation(self) -> Valuation:
        """Values that lead down this path."""
        return Valuation(self.model)


def evaluate(model: z3.ModelRef, value: Any) -> Any:
    """The value that a structure of symbols, tuples, lists and dictionaries has in a model."""
    if isinstance(value, SymInt):
        return model.eval(value.term, model_completion=True).as_long()
    if isinstance(value, SymBool):
        return z3.is_true(model.eval(value.term, model_completion=True))
    if isinstance(value, tuple | list):
        return [evaluate(model, item) for item in value]
    if isinstance(value, dict):
        return {key: evaluate(model, item) for key, item in value.items()}
    return value


# proofs


@dataclass(slots=True)
class Failure:
    """A claim that does not hold: its name, values that break it, and the branches of the path to it."""

    claim: str
    values: Valuation
    branches: tuple[Branch, ...]
    error: Exception | None = None

    def __str__(self) -> str:
        lines = [f"{self.claim} is broken" + (f": {self.error!r}" if self.error else "")]
        lines += [f"    {name} = {value}" for name, value in sorted(self.values.items())]
        lines += [f"    {'  ' if b.taken else 'not '}{b.condition}" for b in self.branches if b.free]
        return "\n".join(lines)


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
) -> Report:
    """Show that from every state that satisfies the hypothesis, `body` never raises and ends where all claims hold.

    build: makes a state from a source of numbers; called anew for each run, so `body` may change it.
    claims: by name, predicates made with the connectives of spec.logic; they are conjoined, and split on failure.  They
        are read at the end of a run, as part of it, so that one may also ask for the truth of a symbol.
    observe: what must be equal between a symbolic path and the plain run of its model: tuples, lists and numbers.
    reached: names of the places that a path went through, counted for proofs of non-vacuity.
    max_failures: stop after so many broken claims.

    Raises DisagreementError when a path or a counterexample does not repeat on plain ints.
    """
    start = time.perf_counter()
    report = Report()
    symbols = Symbols()
    executor = Executor(hypothesis(build(symbols)))
    report.satisfiable = executor.satisfiable

    def run(state: State) -> tuple[Any, Mapping[str, Bool]]:
        try:
            outcome: Any = body(state)
        except Cut as cut:
            outcome = cut
        return outcome, claims(outcome)

    def plainly(values: Valuation) -> tuple[Any, Mapping[str, Bool], Exception | None]:
        state = build(values)
        if not all(part is True for part in hypothesis(state)):
            raise DisagreementError(f"a model of the hypothesis does not satisfy it on plain ints: {values}")
        try:
            return *run(state), None
        except Exception as error:
            return None, {}, error

    for path in executor.paths(lambda: run(build(symbols))):
        report.paths += 1
        report.branches += len(path.branches)
        values = path.valuation()
        plain, _, error = plainly(values)
        if type(error) is not type(path.raised):
            raise DisagreementError(f"symbols raise {path.raised!r}, plain ints {error!r}: {values}") from path.raised
        if path.raised is not None:
            report.failures.append(Failure("returns", values, path.branches, path.raised))
        else:
            outcome, named = path.result
            seen, expected = evaluate(path.model, observe(outcome)), evaluate(path.model, observe(plain))
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
                    report.failures.append(Failure(name, broken, path.branches))
        if len(report.failures) >= max_failures:
            break
    report.queries = executor.queries
    report.seconds = time.perf_counter() - start
    return report


def assume(condition: Bool) -> None:
    """Restrict the run under way to inputs for which this holds: a fact about numbers made up in the middle of it."""
    if condition is True:
        return
    if condition is False:
        raise Infeasible
    _active[-1].assume(condition.term)
