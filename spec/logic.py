"""Connectives and arithmetic that mean the same on ints and on Z3 terms.

A Python `and`, `if` or `min` asks a symbol for its truth and so forks a symbolic run; these build one term instead.
On plain values they are ordinary functions, cheap enough for the scheduler's own arithmetic.
A value is symbolic when it carries a Z3 term in its attribute `term`; its class says how to build one.
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
    return condition.pick(then, otherwise)


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
    return a.negated()


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
    return symbols[0].conjoined(symbols[1:])


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
    return symbols[0].disjoined(symbols[1:])


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
