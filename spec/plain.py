"""The laws at full speed on ints: the same source text, with Python's own operators in place of the connectives.

`conj(a, b)` becomes `a and b`, `every(...)` `all(...)`, and so on, so nothing is stated twice.  A symbol must not come
here: an `and` would ask it for its truth.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from spec import law, laws_ids, laws_round, laws_state, laws_step, words
from spec.law import Kind, Law, Tier

_JOINS: dict[str, type[ast.boolop]] = {"conj": ast.And, "disj": ast.Or}
_LOOPS = {"every": "all", "some": "any", "total": "sum", "least": "min", "most": "max"}


class _Plain(ast.NodeTransformer):
    """Rewrites calls of connectives."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.func, ast.Name):
            return node
        name, args = node.func.id, node.args
        if name in _JOINS and not any(isinstance(arg, ast.Starred) for arg in args):
            return ast.BoolOp(_JOINS[name](), args) if len(args) > 1 else args[0]
        if name in _LOOPS:
            return ast.Call(ast.Name(_LOOPS[name], ast.Load()), args, [])
        if name == "neg":
            return ast.UnaryOp(ast.Not(), args[0])
        if name == "implies":
            return ast.BoolOp(ast.Or(), [ast.UnaryOp(ast.Not(), args[0]), args[1]])
        if name == "pick":
            return ast.IfExp(*args)
        if name == "cdiv":
            return ast.UnaryOp(ast.USub(), ast.BinOp(ast.UnaryOp(ast.USub(), args[0]), ast.FloorDiv(), args[1]))
        return node


def _rewritten(module: ModuleType, names: dict[str, Any]) -> dict[str, Any]:
    """The names a module defines, compiled from its rewritten text; `names` replace what it imports."""
    tree = ast.parse(inspect.getsource(module))
    tree.body = [node for node in tree.body if not isinstance(node, ast.ImportFrom | ast.Expr)]
    tree = ast.fix_missing_locations(_Plain().visit(tree))
    space = {**vars(module), **names, "law": _undeclared, "over_runs": lambda *_, **__: None}
    exec(compile(tree, f"<plain {module.__name__}>", "exec"), space)
    return {name: value for name, value in space.items() if getattr(value, "__module__", None) == module.__name__}


def _undeclared(*_: Any, **__: Any) -> Callable[[Any], Any]:
    return lambda predicate: predicate


def _compile() -> dict[str, Callable[[Any], Any]]:
    names = _rewritten(words, {})
    names["measure"].__globals__["_MEASURES"] = {}
    plain: dict[str, Any] = {}
    for module in (laws_state, laws_step, laws_round, laws_ids):
        plain |= _rewritten(module, names)
    return {one.id: plain[one.name] for one in law.LAWS if one.predicate is not None}


PLAIN = _compile()


def checker(laws: tuple[Law, ...]) -> Callable[[Any], list[Law]]:
    """A function that returns the laws that a concrete view breaks, usually none.

    A predicate that raises counts as broken: it met a state that no law foresees.
    """
    pairs = [(PLAIN[one.id], one) for one in laws]
    predicates = tuple(PLAIN[one.id] for one in laws)

    def check(view: Any) -> list[Law]:
        try:
            for holds in predicates:
                if not holds(view):
                    break
            else:
                return []
        except Exception:
            pass
        return [one for holds, one in pairs if not _holds(holds, view)]

    return check


def _holds(predicate: Callable[[Any], Any], view: Any) -> bool:
    try:
        return bool(predicate(view))
    except Exception:
        return False


def of(kind: Kind, tier: Tier, mid: bool = False) -> tuple[Law, ...]:
    """The laws of one kind and tier, or those of them that hold in mid-step too."""
    return tuple(one for one in law.LAWS if one.kind is kind and one.tier is tier and (one.mid or not mid))


check_state = checker(of(Kind.STATE, Tier.COUNTS))
check_state_in_mid = checker(of(Kind.STATE, Tier.COUNTS, mid=True))
check_mid = checker(of(Kind.MID, Tier.COUNTS))
check_step = checker(of(Kind.STEP, Tier.COUNTS))
check_round = checker(of(Kind.ROUND, Tier.COUNTS))
check_ids = checker(of(Kind.STATE, Tier.IDS))
check_ids_in_mid = checker(of(Kind.STATE, Tier.IDS, mid=True))
check_ids_step = checker(of(Kind.STEP, Tier.IDS))

__all__ = [name for name in vars(sys.modules[__name__]) if name.startswith("check")] + ["PLAIN"]
