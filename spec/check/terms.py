"""Symbols that stand for ints and bools, as terms of linear arithmetic.

Guarantees: equal terms are one object for bools, so that a condition is translated for Z3 once, however often a proof
meets it; what follows by arithmetic alone is folded to a plain value, so that it never forks a run.

An int is a sum of leaves with coefficients; a leaf is a variable, `pick`, a quotient or a remainder.  A bool is a
variable, sum <= 0, sum == 0, or a combination of bools.  Both evaluate on a valuation in plain Python.

What code may do with them: + - * (by a constant), // and % by a positive constant, comparison, min, max, sum, any, all,
f-strings without a format.  What it may not: range, index or slice by a symbol, a symbol as a key, int(), /.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import z3
from z3 import z3core as core

from spec.logic import Bool, Int

Values = Mapping[str, Any]


class Signal(BaseException):
    """Raised through the code under test, past its `except Exception`."""


class Blocked(Signal):
    """The code asked a symbol for what only an int has."""


ask: list[Callable[[SymBool], bool]] = []  # who answers for the truth of a symbol: the last, the run under way


class Leaf:
    """A summand: a variable, or an int that is not linear in its parts."""

    __slots__ = ("choice", "eval", "index", "term", "text")
    known: ClassVar[dict[Any, Leaf]] = {}

    def __init__(
        self,
        text: str,
        term: z3.ArithRef,
        eval: Callable[[Values], int],
        choice: tuple[SymBool, Int, Int] | None = None,
    ) -> None:
        self.text = text
        self.choice = choice  # condition, then, otherwise
        self.term = term
        self.eval = eval
        self.index = len(Leaf.known)


def _leaf(key: Any, make: Callable[[], Leaf]) -> SymInt:
    leaf = Leaf.known.get(key)
    if leaf is None:
        leaf = make()
        leaf.index = len(Leaf.known)
        Leaf.known[key] = leaf
    return SymInt({leaf: 1}, 0)


def _make(parts: dict[Leaf, int], const: int) -> Int:
    return SymInt(parts, const) if parts else const


class SymInt:
    """An int that is not known."""

    __slots__ = ("const", "parts")

    def __init__(self, parts: dict[Leaf, int], const: int) -> None:
        self.parts = parts
        self.const = const

    @property
    def key(self) -> Any:
        """Equal for equal sums."""
        return tuple(sorted((leaf.index, n) for leaf, n in self.parts.items())), self.const

    @property
    def term(self) -> z3.ArithRef:
        """The sum for Z3."""
        summands = [leaf.term if n == 1 else n * leaf.term for leaf, n in self.parts.items()]
        if self.const:
            summands.append(z3.IntVal(self.const))
        return z3.Sum(summands) if len(summands) > 1 else summands[0]

    def value(self, values: Values) -> int:
        """What it is where the variables are these."""
        return self.const + sum(n * leaf.eval(values) for leaf, n in self.parts.items())

    def __repr__(self) -> str:
        return _sum_text([*self.parts.items()], self.const)

    def __add__(self, other: Int) -> Int:
        if isinstance(other, SymInt):
            parts = dict(self.parts)
            for leaf, n in other.parts.items():
                n += parts.get(leaf, 0)
                if n:
                    parts[leaf] = n
                else:
                    del parts[leaf]
            return _make(parts, self.const + other.const)
        return SymInt(self.parts, self.const + other) if other else self

    __radd__ = __add__

    def __sub__(self, other: Int) -> Int:
        if isinstance(other, SymInt):
            parts = dict(self.parts)
            for leaf, n in other.parts.items():
                n = parts.get(leaf, 0) - n
                if n:
                    parts[leaf] = n
                else:
                    del parts[leaf]
            return _make(parts, self.const - other.const)
        return SymInt(self.parts, self.const - other) if other else self

    def __rsub__(self, other: Int) -> Int:
        return -self + other

    def __neg__(self) -> Int:
        return SymInt({leaf: -n for leaf, n in self.parts.items()}, -self.const)

    def __mul__(self, other: Int) -> Int:
        if isinstance(other, SymInt):
            raise Blocked(f"({self}) * ({other}) is a product of two symbols")
        return SymInt({leaf: n * other for leaf, n in self.parts.items()}, self.const * other) if other else 0

    __rmul__ = __mul__

    def __floordiv__(self, other: int) -> Int:
        if isinstance(other, SymInt) or other <= 0:
            raise Blocked("// needs a positive constant")
        for leaf, n in self.parts.items():  # a quotient of a choice is a choice of quotients, which meet their likes
            if leaf.choice is not None:
                condition, then, otherwise = leaf.choice
                rest = self - SymInt({leaf: n}, 0)
                return condition.pick((then * n + rest) // other, (otherwise * n + rest) // other)
        outside = {leaf: n // other for leaf, n in self.parts.items() if n % other == 0}
        inside = {leaf: n for leaf, n in self.parts.items() if n % other}
        if not inside:
            return SymInt(outside, self.const // other)
        sum = SymInt(inside, self.const % other)
        quotient = _leaf(
            ("//", sum.key, other),
            lambda: Leaf(f"({sum}) // {other}", sum.term / other, lambda values: sum.value(values) // other),
        )  # Z3 rounds as Python does where the divisor is positive
        return quotient + SymInt(outside, self.const // other)

    def __mod__(self, other: int) -> Int:
        return self - self // other * other

    def __lt__(self, other: Int) -> Bool:
        return _at_most(self - other + 1)

    def __le__(self, other: Int) -> Bool:
        return _at_most(self - other)

    def __gt__(self, other: Int) -> Bool:
        return _at_most(other - self + 1)

    def __ge__(self, other: Int) -> Bool:
        return _at_most(other - self)

    def __eq__(self, other: object) -> Bool:
        if not isinstance(other, int | SymInt):
            return NotImplemented
        return _zero(self - other)

    def __ne__(self, other: object) -> Bool:
        if not isinstance(other, int | SymInt):
            return NotImplemented
        equal = _zero(self - other)
        return not equal if isinstance(equal, bool) else equal.negated()

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
    """A bool that is not known.  Asking for its truth forks the run.  Equal terms are one object."""

    __slots__ = ("_make", "_negation", "_term", "bound", "eval", "index", "text")
    known: ClassVar[dict[Any, SymBool]] = {}

    def __init__(
        self,
        text: Callable[[], str],
        make: Callable[[], z3.BoolRef],
        eval: Callable[[Values], bool],
        bound: SymInt | None = None,
    ) -> None:
        self.text = text
        self._make = make
        self._term: z3.BoolRef | None = None
        self._negation: SymBool | None = None
        self.eval = eval
        self.bound = bound  # the sum that is at most 0, where this says no more than that
        self.index = len(SymBool.known)

    @property
    def term(self) -> z3.BoolRef:
        """The condition for Z3."""
        if self._term is None:
            self._term = self._make()
        return self._term

    def value(self, values: Values) -> bool:
        """What it is where the variables are these."""
        return self.eval(values)

    def __repr__(self) -> str:
        return self.text()

    def __bool__(self) -> bool:
        if not ask:
            raise Blocked("the truth of a symbol is asked outside a run; use conj, disj, implies, neg, pick")
        return ask[-1](self)

    def __hash__(self) -> int:
        raise Blocked("a symbol cannot be a key")

    def __eq__(self, other: object) -> Bool:
        if not isinstance(other, bool | SymBool):
            return NotImplemented
        return self.pick(other, not other if isinstance(other, bool) else other.negated())

    def __ne__(self, other: object) -> Bool:
        if not isinstance(other, bool | SymBool):
            return NotImplemented
        return self.pick(not other if isinstance(other, bool) else other.negated(), other)

    # what spec.logic asks for

    def pick(self, then: Any, otherwise: Any) -> Any:
        """`then` where this holds, else `otherwise`."""
        if then is otherwise:
            return then
        if isinstance(then, bool | SymBool) and isinstance(otherwise, bool | SymBool):
            return _both(_either(self.negated(), then), _either(self, otherwise))
        if not isinstance(then, SymInt) and not isinstance(otherwise, SymInt):
            if then == otherwise:
                return then
        elif _key(then) == _key(otherwise):
            return then
        return _leaf(
            ("pick", self.index, _key(then), _key(otherwise)),
            lambda: Leaf(
                f"({then} if {self} else {otherwise})",
                z3.If(self.term, int_term(then), int_term(otherwise)),
                lambda values: value_of(then if self.eval(values) else otherwise, values),
                (self, then, otherwise),
            ),
        )

    def negated(self) -> SymBool:
        """not this."""
        if self._negation is None and self.bound is not None:
            self._negation = _at_most(1 - self.bound)
            self._negation._negation = self
        elif self._negation is None:
            self._negation = _bool(
                ("not", self.index),
                lambda: SymBool(
                    lambda: f"not ({self})", lambda: z3.Not(self.term), lambda values: not self.eval(values)
                ),
            )
            self._negation._negation = self
        return self._negation

    def conjoined(self, others: Sequence[SymBool]) -> Bool:
        """This and all the others."""
        return _together("and", [self, *others])

    def disjoined(self, others: Sequence[SymBool]) -> Bool:
        """This or one of the others."""
        return _together("or", [self, *others])


def _bool(key: Any, make: Callable[[], SymBool]) -> SymBool:
    found = SymBool.known.get(key)
    if found is None:
        found = make()
        found.index = len(SymBool.known)
        SymBool.known[key] = found
    return found


def _together(word: str, parts: list[SymBool]) -> SymBool:
    parts = list({part.index: part for part in parts}.values())
    if len(parts) == 1:
        return parts[0]
    join, meet = (z3.And, all) if word == "and" else (z3.Or, any)
    return _bool(
        (word, *(part.index for part in parts)),
        lambda: SymBool(
            lambda: f" {word} ".join(f"({part})" for part in parts),
            lambda: join([part.term for part in parts]),
            lambda values: meet(part.eval(values) for part in parts),
        ),
    )


def _both(a: Bool, b: Bool) -> Bool:
    if a is False or b is False:
        return False
    return b if a is True else a if b is True else _together("and", [a, b])


def _either(a: Bool, b: Bool) -> Bool:
    if a is True or b is True:
        return True
    return b if a is False else a if b is False else _together("or", [a, b])


def _at_most(total: Int) -> Bool:
    """total <= 0"""
    if isinstance(total, int):
        return total <= 0
    parts, const = total.key
    found = SymBool.known.get(("<=", parts, const))
    if found is not None:
        return found
    return _bool(
        ("<=", parts, const),
        lambda: SymBool(
            lambda: _relation(total, "<="), lambda: total.term <= 0, lambda values: total.value(values) <= 0, total
        ),
    )


def _zero(total: Int) -> Bool:
    """total == 0"""
    if isinstance(total, int):
        return total == 0
    if total.key[0][0][1] < 0:
        total = -total
    parts, const = total.key
    return _bool(
        ("==", parts, const),
        lambda: SymBool(
            lambda: _relation(total, "=="), lambda: total.term == 0, lambda values: total.value(values) == 0
        ),
    )


def _key(value: Int) -> Any:
    return value.key if isinstance(value, SymInt) else value


def int_term(value: Int) -> z3.ArithRef:
    """The Z3 term of an int, symbol or not."""
    return z3.IntVal(value) if isinstance(value, int) else value.term


def bool_term(value: Bool) -> z3.BoolRef:
    """The Z3 term of a bool, symbol or not."""
    return z3.BoolVal(value) if isinstance(value, bool) else value.term


def value_of(value: Any, values: Values) -> Any:
    """The value that a structure of symbols, tuples, lists and dictionaries has where the variables are these."""
    if isinstance(value, SymInt | SymBool):
        return value.value(values)
    if isinstance(value, tuple | list):
        return [value_of(item, values) for item in value]
    if isinstance(value, dict):
        return {key: value_of(item, values) for key, item in value.items()}
    return value


def _sum_text(parts: list[tuple[Leaf, int]], const: int) -> str:
    out = ""
    for leaf, n in parts:
        sign = (" + " if out else "") if n > 0 else (" - " if out else "-")
        out += sign + (leaf.text if abs(n) == 1 else f"{abs(n)} {leaf.text}")
    if const or not out:
        out += (f" + {const}" if const > 0 else f" - {-const}") if out else str(const)
    return out


def _relation(total: SymInt, sign: str) -> str:
    """sum <= 0 as a person writes it: no minus signs."""
    left = [(leaf, n) for leaf, n in total.parts.items() if n > 0]
    right = [(leaf, -n) for leaf, n in total.parts.items() if n < 0]
    const = total.const
    if const == 1 and sign == "<=":
        return f"{_sum_text(left, 0)} < {_sum_text(right, 0)}"
    return f"{_sum_text(left, max(const, 0))} {sign} {_sum_text(right, max(-const, 0))}"


class Source(Protocol):
    """Where a world takes its numbers from: symbols, or the values of a model."""

    def integer(self, name: str) -> Int: ...
    def boolean(self, name: str) -> Bool: ...


class Symbols:
    """A source of symbols: the same name is the same symbol."""

    def integer(self, name: str) -> Int:
        return _leaf(name, lambda: Leaf(name, z3.Int(name), lambda values: int(values.get(name, 0))))

    def boolean(self, name: str) -> Bool:
        return _bool(
            name, lambda: SymBool(lambda: name, lambda: z3.Bool(name), lambda values: bool(values.get(name, False)))
        )


class Valuation(dict[str, Any]):
    """A source of plain values, read off a model.  What the model left open is 0 or False."""

    @classmethod
    def of(cls, handle: z3.ModelRef) -> Valuation:
        """The values of a Z3 model."""
        out = cls()
        context, model = handle.ctx.ref(), handle.model
        for i in range(core.Z3_model_get_num_consts(context, model)):  # five times as fast as the public way
            declaration = core.Z3_model_get_const_decl(context, model, i)
            value = core.Z3_model_get_const_interp(context, model, declaration)
            name = core.Z3_get_symbol_string(context, core.Z3_get_decl_name(context, declaration))
            if core.Z3_is_numeral_ast(context, value):
                out[name] = int(core.Z3_get_numeral_string(context, value))
            else:
                out[name] = core.Z3_get_bool_value(context, value) == z3.Z3_L_TRUE
        return out

    def integer(self, name: str) -> int:
        return int(self.get(name, 0))

    def boolean(self, name: str) -> bool:
        return bool(self.get(name, False))
