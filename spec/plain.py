"""The laws at full speed on ints: the same source text, with Python's own operators in place of the connectives.

`conj(a, b)` becomes `a and b`, `every(...)` `all(...)`, and so on; small words are written out where they are used; and
the laws of one kind are fused into one function that leaves at the first that fails.  Nothing is stated twice.  A
symbol must not come here: an `and` would ask it for its truth.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

from spec import law, laws_ids, laws_round, laws_state, laws_step, words
from spec.law import Kind, Law, Tier

_JOINS: dict[str, type[ast.boolop]] = {"conj": ast.And, "disj": ast.Or}
_LOOPS = {"every": "all", "some": "any", "total": "sum", "least": "min", "most": "max"}
_SHARED = ("queued", "measure", "served_ids", "tokens_left", "chunked")  # computed once for all laws of a view
_MODULES = (words, laws_state, laws_step, laws_round, laws_ids)


def _body(function: ast.FunctionDef) -> list[ast.stmt]:
    """The statements of a function without its docstring."""
    first = function.body[0]
    return function.body[1:] if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) else function.body


class _Put(ast.NodeTransformer):
    """Puts expressions in place of names."""

    def __init__(self, values: dict[str, ast.expr]) -> None:
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.AST:
        value = self.values.get(node.id)
        if value is None:
            return node
        if isinstance(node.ctx, ast.Store):
            assert isinstance(value, ast.Name)
            return ast.Name(value.id, ast.Store())
        return copy.deepcopy(value)


class _Plain(ast.NodeTransformer):
    """Rewrites calls of connectives, and writes out the words that are one expression."""

    def __init__(self, words: dict[str, ast.FunctionDef]) -> None:
        self.words = words

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
        word = self.words.get(name)
        if word is not None and all(isinstance(arg, ast.Name | ast.Attribute | ast.BinOp) for arg in args):
            (only,) = _body(word)
            assert isinstance(only, ast.Return)
            assert only.value is not None
            names = [parameter.arg for parameter in word.args.args]
            put = _Put(dict(zip(names, args, strict=True)))
            return self.visit(put.visit(copy.deepcopy(only.value)))  # type: ignore[no-any-return]
        return node


def _functions() -> tuple[dict[str, ast.FunctionDef], dict[str, Any]]:
    """Every law and word, rewritten: as syntax, and compiled."""
    trees = [ast.parse(inspect.getsource(module)) for module in _MODULES]
    everything = {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)}
    short = {
        name: node
        for name, node in everything.items()
        if name not in _SHARED
        and not node.decorator_list
        and len(_body(node)) == 1
        and isinstance(_body(node)[0], ast.Return)
        and not any(isinstance(inner, ast.GeneratorExp | ast.ListComp) for inner in ast.walk(node))
    }
    space: dict[str, Any] = {}
    for module in _MODULES:
        space |= {name: value for name, value in vars(module).items() if not name.startswith("__")}
    space |= {"law": _undeclared, "over_runs": lambda *_, **__: None}
    rewritten: dict[str, ast.FunctionDef] = {}
    for tree, module in zip(trees, _MODULES, strict=True):
        tree.body = [node for node in tree.body if not isinstance(node, ast.ImportFrom | ast.Expr)]
        tree = ast.fix_missing_locations(_Plain(short).visit(tree))
        exec(compile(tree, f"<plain {module.__name__}>", "exec"), space)
        rewritten |= {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    return rewritten, space


def _undeclared(*_: Any, **__: Any) -> Callable[[Any], Any]:
    return lambda predicate: predicate


class _Fuser:
    """Turns laws into statements that return the law's id where it fails."""

    def __init__(self) -> None:
        self.count = 0

    def law(self, function: ast.FunctionDef, id: str) -> list[ast.stmt]:
        self.id = id
        (parameter,) = [one.arg for one in function.args.args]
        body = copy.deepcopy(_body(function))
        local = {
            node.id
            for statement in body
            for node in ast.walk(statement)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        names = {name: self._fresh(name) for name in local} | {parameter: ast.Name("view", ast.Load())}
        try:
            return self.block([_Put(names).visit(statement) for statement in body])
        except NotImplementedError:
            call = ast.Call(ast.Name(function.name, ast.Load()), [ast.Name("view", ast.Load())], [])
            return self.must(call)

    def _fresh(self, name: str) -> ast.expr:
        self.count += 1
        return ast.Name(f"{name}_{self.count}", ast.Load())

    def block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        first, rest = statements[0], statements[1:]
        if isinstance(first, ast.Return):
            assert first.value is not None
            return self.must(first.value)
        if isinstance(first, ast.Assign):
            return [first, *self.block(rest)]
        if isinstance(first, ast.If) and not first.orelse and isinstance(first.body[-1], ast.Return):
            return self._either(first.test, self.block(first.body), self.block(rest))
        raise NotImplementedError

    def _either(self, test: ast.expr, then: list[ast.stmt], otherwise: list[ast.stmt]) -> list[ast.stmt]:
        if not then:
            return [ast.If(ast.UnaryOp(ast.Not(), test), otherwise, [])] if otherwise else []
        return [ast.If(test, then, otherwise)]

    def must(self, claim: ast.expr) -> list[ast.stmt]:
        """Statements that return unless the claim holds."""
        if isinstance(claim, ast.Constant) and claim.value is True:
            return []
        if isinstance(claim, ast.BoolOp) and isinstance(claim.op, ast.And):
            return [statement for value in claim.values for statement in self.must(value)]
        if isinstance(claim, ast.BoolOp):
            rest = claim.values[1] if len(claim.values) == 2 else ast.BoolOp(ast.Or(), claim.values[1:])
            return self._either(claim.values[0], [], self.must(rest))
        if isinstance(claim, ast.IfExp):
            return self._either(claim.test, self.must(claim.body), self.must(claim.orelse))
        if isinstance(claim, ast.Call) and isinstance(claim.func, ast.Name) and claim.func.id == "all":
            (loop,) = claim.args
            if isinstance(loop, ast.GeneratorExp) and len(loop.generators) == 1:
                (over,) = loop.generators
                bound = [node.id for node in ast.walk(over.target) if isinstance(node, ast.Name)]
                put = _Put({name: self._fresh(name) for name in bound})
                body = self.must(put.visit(loop.elt))
                for condition in over.ifs:
                    body = [ast.If(put.visit(condition), body, [])]
                return [ast.For(put.visit(over.target), over.iter, body, [])] if body else []
        return [ast.If(ast.UnaryOp(ast.Not(), claim), [ast.Return(ast.Constant(self.id))], [])]


class _Hoist(ast.NodeTransformer):
    """Takes what depends on the view alone out of the laws: attributes of attributes, and the shared words."""

    def __init__(self) -> None:
        self.found: dict[str, ast.Name] = {}
        self.first: list[ast.stmt] = []

    def _is_path(self, node: ast.AST) -> bool:
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id == "view"

    def _out(self, node: ast.expr) -> ast.AST:
        text = ast.unparse(node)
        if text not in self.found:
            name = ast.Name(f"shared_{len(self.found)}", ast.Load())
            self.found[text] = name
            self.first.append(ast.Assign([ast.Name(name.id, ast.Store())], node))
        return copy.deepcopy(self.found[text])

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if self._is_path(node):
            return self._out(node)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id in _SHARED and self._is_path(node.args[0]):
            return self._out(node)
        return self.generic_visit(node)


_TREES, _SPACE = _functions()
PLAIN: dict[str, Callable[[Any], Any]] = {one.id: _SPACE[one.name] for one in law.LAWS if one.predicate is not None}


def _fused(laws: tuple[Law, ...]) -> Callable[[Any], str | None]:
    """One function that returns the id of the first law that fails, or None."""
    fuser, hoist = _Fuser(), _Hoist()
    statements = [statement for one in laws for statement in fuser.law(_TREES[one.name], one.id)]
    statements = [hoist.visit(statement) for statement in statements]
    tree = ast.parse("def fused(view):\n    pass")
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body = [*hoist.first, *statements, ast.Return(ast.Constant(None))]
    space = dict(_SPACE)
    exec(compile(ast.fix_missing_locations(tree), "<fused laws>", "exec"), space)
    return space["fused"]  # type: ignore[no-any-return]


@functools.cache
def checker(laws: tuple[Law, ...]) -> Callable[[Any], list[Law]]:
    """A function that returns the laws that a concrete view breaks, usually none.

    A predicate that raises counts as broken: it met a state that no law foresees.
    """
    if not laws:
        return lambda view: []
    fused = _fused(laws)
    predicates = [(PLAIN[one.id], one) for one in laws]

    def check(view: Any) -> list[Law]:
        try:
            if fused(view) is None:
                return []
        except Exception:
            pass
        return [one for holds, one in predicates if not _holds(holds, view)]

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
