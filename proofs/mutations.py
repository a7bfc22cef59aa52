"""Every small change of the scheduler's source: the mutants that `make mutants` plants one by one.

Scope: the six modules that decide or keep books.  Left out are texts of messages, annotations, docstrings, `__slots__`,
the protocol class without bodies, imports and decorators: nothing there changes what a step does.  The contracts, the
recorder and the replay of dumps have tests of their own (tests/test_contracts.py).

A mutant is one node of one module replaced.  Its id is made from the text of the statement before and after, not from
its place in the file, so it stays the same while other lines move.
"""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODULES = ("sequence", "plan", "config", "blocks", "calendar", "phases", "scheduler")
COMPOUND = (ast.If, ast.While, ast.For, ast.Try, ast.With, ast.FunctionDef, ast.ClassDef)

_COMPARE: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE, ast.Eq),
    ast.LtE: (ast.Lt, ast.Gt, ast.Eq),
    ast.Gt: (ast.GtE, ast.LtE, ast.Eq),
    ast.GtE: (ast.Gt, ast.Lt, ast.Eq),
    ast.Eq: (ast.NotEq, ast.LtE, ast.GtE),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_ARITHMETIC: dict[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Add, ast.FloorDiv),
    ast.FloorDiv: (ast.Mult, ast.Mod),
    ast.Mod: (ast.FloorDiv,),
}
_SWAPPED_NAMES = {
    "gpu": ("cpu",),
    "cpu": ("gpu",),
    "gpu_free": ("cpu_free",),
    "cpu_free": ("gpu_free",),
    "num_gpu_blocks": ("num_cpu_blocks",),
    "num_cpu_blocks": ("num_gpu_blocks",),
    "drop_gpu": ("drop_cpu",),
    "drop_cpu": ("drop_gpu",),
    "running": ("swapped", "waiting"),
    "swapped": ("running", "waiting"),
    "waiting": ("running", "swapped"),
    "RUNNING": ("SWAPPED",),
    "SWAPPED": ("WAITING",),
    "WAITING": ("RUNNING",),
    "SWAP": ("RECOMPUTE",),
    "RECOMPUTE": ("SWAP",),
    "known": ("prompt_len", "deficit"),
    "deficit": ("known", "tokens"),
    "live": ("n",),
    "n": ("live",),
    "shared_blocks": ("shared_tokens",),
    "shared_tokens": ("shared_blocks", "prompt_len"),
    "pop": ("popleft",),
    "popleft": ("pop",),
    "append": ("appendleft",),
    "appendleft": ("append",),
    "need": ("cover",),
    "cover": ("need",),
    "blocks_to_swap_in": ("blocks_to_copy",),
    "least": ("most",),
    "most": ("least",),
    "min": ("max",),
    "max": ("min",),
    "conj": ("disj",),
    "tokens": ("seqs",),
    "seqs": ("tokens",),
}
_SYMMETRIC = ("min", "max", "least", "most", "conj", "disj")  # their arguments can be exchanged


@dataclass(frozen=True)
class Mutation:
    """One node of one module's tree replaced by another."""

    id: str
    module: str
    where: str  # the function or class
    before: str  # the statement's first line
    after: str
    digest: str  # of the function that it changes: what a result depends on most
    node: int  # its number in ast.walk order
    by: ast.AST

    def __str__(self) -> str:
        return f"{self.module}.{self.where}: `{self.before}` -> `{self.after}`"


def source(module: str) -> Path:
    return ROOT / "engine" / "scheduler" / f"{module}.py"


@functools.cache
def text(module: str) -> str:
    """The module as it was when this process first looked: a run is not disturbed by whoever edits it meanwhile."""
    return source(module).read_text()


def mutated(mutation: Mutation) -> ast.Module:
    """The module's tree with the mutation in it."""
    tree = ast.parse(text(mutation.module))
    node = list(ast.walk(tree))[mutation.node]
    _replace(tree, node, copy.deepcopy(mutation.by))
    return ast.fix_missing_locations(tree)


def mutations(module: str) -> list[Mutation]:
    """All mutants of a module, in the order of its lines."""
    return list(_Mutator(module).all())


def everything() -> list[Mutation]:
    return [one for module in MODULES for one in mutations(module)]


def _replace(tree: ast.AST, node: ast.AST, by: ast.AST) -> None:
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if value is node:
                setattr(parent, name, by)
                return
            if isinstance(value, list):
                for i, item in enumerate(value):
                    if item is node:
                        value[i] = by
                        return
    raise LookupError


def _digest(node: ast.AST) -> str:
    return hashlib.sha256(ast.unparse(node).encode()).hexdigest()[:12]


def _first_line(node: ast.AST) -> str:
    text = ast.unparse(ast.fix_missing_locations(node)).splitlines()
    while text[0].startswith("@"):
        text.pop(0)
    return text[0] + (" ..." if isinstance(node, COMPOUND) else "")


class _Mutator:
    def __init__(self, module: str) -> None:
        self.module = module
        self.tree = ast.parse(text(module))
        self.numbers = {node: i for i, node in enumerate(ast.walk(self.tree))}
        self.seen: Counter[str] = Counter()
        self.digest = ""

    def all(self) -> Iterator[Mutation]:
        for one in self._statements(self.tree.body, []):
            if one.before != one.after or one.after.endswith("..."):
                yield one

    # statements

    def _statements(self, body: list[ast.stmt], path: list[str], *, inside: str = "") -> Iterator[Mutation]:
        for node in body:
            yield from self._statement(node, path, inside)

    def _statement(self, node: ast.stmt, path: list[str], inside: str) -> Iterator[Mutation]:
        if isinstance(node, ast.Import | ast.ImportFrom) or self._is_text(node):
            return
        if isinstance(node, ast.ClassDef):
            if any("Protocol" in ast.unparse(base) for base in node.bases):
                return
            yield from self._statements(node.body, [*path, node.name], inside="class")
            return
        if isinstance(node, ast.FunctionDef):
            here = [*path, node.name]
            self.digest = _digest(node)
            for default in (*node.args.defaults, *node.args.kw_defaults):
                if default is not None:
                    yield from self._expressions(default, node, here)
            yield from self._statements(node.body, here, inside=ast.unparse(node.returns) if node.returns else "-")
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if not path:
            return  # aliases of types
        if inside == "class":
            if (isinstance(node, ast.AnnAssign) and node.value is not None) or (
                isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) != "__slots__"
            ):
                yield from self._expressions(node.value, node, path)
            return
        if not isinstance(node, ast.Pass):
            yield self._make(node, node, ast.Pass(), path)
        if isinstance(node, ast.If | ast.While):
            for value in (True, False) if isinstance(node, ast.If) else (False,):
                yield self._make(node, node.test, ast.Constant(value), path)
            if not isinstance(node.test, ast.Compare):
                yield self._make(node, node.test, ast.UnaryOp(ast.Not(), node.test), path)
            yield from self._expressions(node.test, node, path)
        elif isinstance(node, ast.For):
            yield from self._expressions(node.iter, node, path)
        elif isinstance(node, ast.Return) and node.value is not None:
            yield from self._returns(node, path, inside)
            yield from self._expressions(node.value, node, path)
        elif isinstance(node, ast.AugAssign):
            swapped: type[ast.operator] = ast.Sub if isinstance(node.op, ast.Add) else ast.Add
            yield self._make(node, node, ast.AugAssign(node.target, swapped(), node.value), path)
            yield self._make(node, node, ast.Assign([node.target], node.value), path)
            yield from self._expressions(node.value, node, path)
            yield from self._names(node.target, node, path)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            if node.value is not None:
                yield from self._expressions(node.value, node, path)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                yield from self._names(target, node, path)
        elif isinstance(node, ast.Raise):
            pass  # which error, and its text: only whether it is raised
        else:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    yield from self._expressions(child, node, path)
        for name in ("body", "orelse", "finalbody"):
            yield from self._statements(getattr(node, name, []), path, inside=inside)
        for handler in getattr(node, "handlers", []):
            yield from self._statements(handler.body, path, inside=inside)

    def _returns(self, node: ast.Return, path: list[str], kind: str) -> Iterator[Mutation]:
        assert node.value is not None
        if isinstance(node.value, ast.Constant):
            return
        if kind in ("Int", "int"):
            for op in (ast.Add(), ast.Sub()):
                yield self._make(node, node.value, ast.BinOp(node.value, op, ast.Constant(1)), path)
        elif kind in ("Bool", "bool"):
            for value in (True, False):
                yield self._make(node, node.value, ast.Constant(value), path)
        elif kind.startswith("list") and not isinstance(node.value, ast.List):
            yield self._make(node, node.value, ast.List([], ast.Load()), path)

    @staticmethod
    def _is_text(node: ast.stmt) -> bool:
        return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)

    # expressions

    def _expressions(self, top: ast.expr, statement: ast.stmt, path: list[str]) -> Iterator[Mutation]:
        for node in self._walk(top):
            for by in self._others(node):
                yield self._make(statement, node, by, path)

    def _names(self, target: ast.expr, statement: ast.stmt, path: list[str]) -> Iterator[Mutation]:
        for node in self._walk(target):
            if isinstance(node, ast.Attribute):
                for by in self._others(node):
                    yield self._make(statement, node, by, path)

    def _walk(self, node: ast.AST) -> Iterator[ast.AST]:
        """Every node below, texts left out."""
        if isinstance(node, ast.JoinedStr):
            return
        yield node
        for child in ast.iter_child_nodes(node):
            yield from self._walk(child)

    def _others(self, node: ast.AST) -> Iterator[ast.AST]:
        if isinstance(node, ast.Compare):
            for i, op in enumerate(node.ops):
                for other in _COMPARE[type(op)]:
                    by = copy.copy(node)
                    by.ops = [other() if j == i else one for j, one in enumerate(node.ops)]
                    yield by
        elif isinstance(node, ast.BoolOp):
            yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
            for i in range(len(node.values)):
                rest = [value for j, value in enumerate(node.values) if j != i]
                yield rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            yield node.operand
        elif isinstance(node, ast.IfExp):
            yield node.body
            yield node.orelse
        elif isinstance(node, ast.BinOp):
            for operator in _ARITHMETIC.get(type(node.op), ()):
                yield ast.BinOp(node.left, operator(), node.right)
            if type(node.op) in _ARITHMETIC:
                yield node.left
                yield node.right
        elif isinstance(node, ast.Constant):
            if node.value is True or node.value is False:
                yield ast.Constant(not node.value)
            elif isinstance(node.value, int):
                yield ast.Constant(node.value + 1)
                yield ast.Constant(node.value - 1)
        elif isinstance(node, ast.Attribute):
            for name in _SWAPPED_NAMES.get(node.attr, ()):
                yield ast.Attribute(node.value, name, node.ctx)
        elif isinstance(node, ast.Name):
            for name in _SWAPPED_NAMES.get(node.id, ()):
                if node.id in ("least", "most", "min", "max", "conj"):
                    yield ast.Name(name, node.ctx)
        elif isinstance(node, ast.Call):
            either_way = isinstance(node.func, ast.Name) and node.func.id in _SYMMETRIC
            if len(node.args) >= 2 and not either_way and not any(isinstance(one, ast.Starred) for one in node.args):
                for i in range(len(node.args) - 1):
                    swapped = list(node.args)
                    swapped[i], swapped[i + 1] = swapped[i + 1], swapped[i]
                    yield ast.Call(node.func, swapped, node.keywords)
        elif isinstance(node, ast.comprehension):
            for i in range(len(node.ifs)):
                by = copy.copy(node)
                by.ifs = [one for j, one in enumerate(node.ifs) if j != i]
                yield by
        elif isinstance(node, ast.Slice):
            for name in ("lower", "upper"):
                if getattr(node, name) is not None:
                    by = copy.copy(node)
                    setattr(by, name, None)
                    yield by

    def _make(self, statement: ast.stmt, node: ast.AST, by: ast.AST, path: list[str]) -> Mutation:
        before = _first_line(statement)
        number = self.numbers[node]
        if node is statement:
            after = "pass" if isinstance(by, ast.Pass) else _first_line(by)
        else:
            twin = copy.deepcopy(statement)
            inside = list(ast.walk(statement)).index(node)
            _replace(twin, list(ast.walk(twin))[inside], copy.deepcopy(by))
            after = _first_line(twin)
        where = ".".join(path)
        key = f"{self.module}.{where}|{before}|{after}"
        self.seen[key] += 1
        name = hashlib.sha256(f"{key}|{self.seen[key]}".encode()).hexdigest()[:10]
        return Mutation(name, self.module, where, before, after, self.digest, number, by)
