"""Connectives and arithmetic that mean the same on ints and on Z3 terms.

A Python `and`, `if` or `min` asks a symbol for its truth and so forks a symbolic run; these build one term instead.
On plain values they are ordinary functions, cheap enough for the scheduler's own arithmetic.
A value is symbolic when its class says how to build one: pick, negated, conjoined, disjoined.  A truth of any other
kind (another tool's symbol, say) is simply asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Int = Any  # an int, or a symbol that stands for one
Bool = Any  # a bool, or a symbol that stands for one


def pick(condition: Bool, then: Int, otherwise: Int) -> Int:
    """`then if condition else otherwise`, without a fork."""
    if condition is True:
        return then
    if condition is False:
        return otherwise
    choose = getattr(condition, "pick", None)
    if choose is None:
        return then if condition else otherwise
    return choose(then, otherwise)


def least(a: Int, b: Int) -> Int:
    """min(a, b), without a fork."""
    return pick(a <= b, a, b)


def most(a: Int, b: Int) -> Int:
    """max(a, b), without a fork."""
    return pick(a >= b, a, b)


def cdiv(a: Int, b: int) -> Int:
    """a / b rounded up; b is a positive constant."""
    return -(-a // b)


def neg(a: Bool) -> Bool:
    """not a."""
    if a is True or a is False:
        return not a
    negated = getattr(a, "negated", None)
    return not a if negated is None else negated()


def conj(*parts: Bool) -> Bool:
    """All of the parts hold."""
    symbols = []
    for part in parts:
        if part is False:
            return False
        if part is not True:
            symbols.append(part)
    if not symbols:
        return True
    conjoined = getattr(symbols[0], "conjoined", None)
    return all(symbols) if conjoined is None else conjoined(symbols[1:])


def disj(*parts: Bool) -> Bool:
    """At least one of the parts holds."""
    symbols = []
    for part in parts:
        if part is True:
            return True
        if part is not False:
            symbols.append(part)
    if not symbols:
        return False
    disjoined = getattr(symbols[0], "disjoined", None)
    return any(symbols) if disjoined is None else disjoined(symbols[1:])


def implies(a: Bool, b: Bool) -> Bool:
    """b holds wherever a does."""
    return disj(neg(a), b)


def every(parts: Iterable[Bool]) -> Bool:
    """conj over an iterable."""
    return conj(*parts)


def some(parts: Iterable[Bool]) -> Bool:
    """disj over an iterable."""
    return disj(*parts)


def total(parts: Iterable[Int]) -> Int:
    """Their sum, 0 for none."""
    return sum(parts)
