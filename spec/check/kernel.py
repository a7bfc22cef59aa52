"""Symbolic execution of a Triton kernel's own source: every access in bounds, no two programs write one address.

Guarantees: what is proved holds for every program of the grid, every lane, every iteration, every size and stride that
the world leaves open, and every content of memory that meets the world's conditions on ids.  Nothing is assumed of
numbers (floats): any comparison of them may go either way.

A kernel's Python source runs with `tl` replaced by `Language`.  An int is a sum of coefficients times strides: an
address `row * stride + i` is kept as {stride: row, (): i}, so that no product of two symbols ever reaches the solver,
and an address is in bounds when each coefficient is within the extent of its dimension.  That is enough whatever the
strides are.  Two accesses touch different addresses when some coefficient differs: this needs what holds of every
tensor that is written, that different indices are different addresses.

Lanes.  `tl.arange` is one symbol with its range: what is proved of it holds of every lane.  Reductions are left free.

Loops.  A loop runs once, for an arbitrary iteration: its variable is any value of the range, and every variable that
its body assigns is left free before.  The run ends after the body.  A second run passes the loop by and goes on with
the same variables left free.  So what holds on these runs holds however often the loop turns, no count is needed and
no invariant is asked for; what a proof needs of a variable that a loop changes, a mask in the kernel must say.

Widths.  Ints are 32 or 64 bits wide as Triton has it (ids of programs, lanes and small arguments 32, what is loaded as
loaded).  A 32-bit sum or product must provably fit; times a stride, which may be anything below 2^31, it fits when its
factor is -1, 0 or 1.  64-bit arithmetic is taken as exact: no pool has 2^63 bytes.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import z3

from spec.check.symbolic import Executor
from spec.check.terms import Signal, Source, Symbols, SymBool, SymInt, Valuation, value_of
from spec.logic import Bool, Int, conj, disj, implies, neg, pick

Strides = tuple[str, ...]


class _BodyDone(Signal):
    """The arbitrary iteration of a loop is over."""


# values of a kernel


class Opaque:
    """A number, or whatever is not an address: nothing is known of it."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def _other(self, *_: Any, **__: Any) -> Opaque:
        return self

    def _either(self, *_: Any) -> Flag:
        return Flag(self.run, self.run.boolean("number"))

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _other
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __rshift__ = __lshift__ = __neg__ = _other
    __floordiv__ = __mod__ = __getitem__ = to = _other
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _either  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]
    dtype = element_ty = property(_other)


class Flag:
    """A condition of a kernel."""

    def __init__(self, run: Run, value: Bool) -> None:
        self.run, self.value = run, value

    def __and__(self, other: Any) -> Flag:
        return Flag(self.run, conj(self.value, _bool(other)))

    def __or__(self, other: Any) -> Flag:
        return Flag(self.run, disj(self.value, _bool(other)))

    __rand__, __ror__ = __and__, __or__

    def __invert__(self) -> Flag:
        return Flag(self.run, neg(self.value))

    def __bool__(self) -> bool:
        return bool(self.value)

    def __getitem__(self, index: Any) -> Flag:
        return self

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        return Whole(self.run, {(): pick(self.value, 1, 0)}, 64 if dtype == "int64" else 32)


class Whole:
    """An int: coefficients by stride, and its width."""

    def __init__(self, run: Run, parts: Mapping[Strides, Int], bits: int) -> None:
        self.run = run
        self.parts = {key: n for key, n in parts.items() if not (isinstance(n, int) and n == 0)}
        self.bits = bits

    @property
    def plain(self) -> Int:
        """Its value where no stride takes part."""
        if any(self.parts.keys() - {()}):
            raise TypeError(f"{self.parts} has a stride in it")
        return self.parts.get((), 0)

    def _made(self, parts: Mapping[Strides, Int], other: Any) -> Whole:
        bits = max(self.bits, other.bits) if isinstance(other, Whole) else self.bits
        made = Whole(self.run, parts, bits)
        if bits == 32:
            for key, n in made.parts.items():
                if key:
                    self.run.must("fits in 32 bits", conj(n >= -1, n <= 1))
                elif not isinstance(n, int) or not -(2**31) <= n < 2**31:
                    self.run.must("fits in 32 bits", conj(n >= -(2**31), n < 2**31))
        return made

    def __add__(self, other: Any) -> Any:
        if isinstance(other, Opaque | Pointer):
            return other + self
        parts = dict(self.parts)
        for key, n in _parts(other).items():
            parts[key] = parts.get(key, 0) + n
        return self._made(parts, other)

    def __neg__(self) -> Any:
        return self * -1

    def __sub__(self, other: Any) -> Any:
        return other if isinstance(other, Opaque) else self + other * -1

    def __rsub__(self, other: Any) -> Any:
        return self * -1 + other

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, Opaque):
            return other
        parts: dict[Strides, Int] = {}
        for key, n in self.parts.items():
            for stride, m in _parts(other).items():
                at, product = _times(key, n, stride, m)
                parts[at] = parts.get(at, 0) + product
        return self._made(parts, other)

    __radd__, __rmul__ = __add__, __mul__

    def __floordiv__(self, other: int) -> Any:
        return self._made({(): self.plain // other}, other)

    def __mod__(self, other: int) -> Any:
        return self._made({(): self.plain % other}, other)

    def _blur(self, *_: Any) -> Opaque:
        return Opaque(self.run)

    __rshift__ = __lshift__ = __xor__ = __rxor__ = __truediv__ = __rtruediv__ = __rand__ = __ror__ = _blur
    __and__ = __or__ = _blur

    def _compared(self, other: Any, how: Callable[[Int, Int], Bool]) -> Any:
        if isinstance(other, Opaque):
            return other._either()
        return Flag(self.run, how(self.plain, _parts(other).get((), 0)))

    def __lt__(self, other: Any) -> Any:
        return self._compared(other, lambda a, b: a < b)

    def __le__(self, other: Any) -> Any:
        return self._compared(other, lambda a, b: a <= b)

    def __gt__(self, other: Any) -> Any:
        return self._compared(other, lambda a, b: a > b)

    def __ge__(self, other: Any) -> Any:
        return self._compared(other, lambda a, b: a >= b)

    def __eq__(self, other: Any) -> Any:
        return self._compared(other, lambda a, b: a == b)

    def __ne__(self, other: Any) -> Any:
        return self._compared(other, lambda a, b: a != b)

    __hash__ = None  # type: ignore[assignment]

    def __getitem__(self, index: Any) -> Whole:
        return self

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        if dtype not in ("int32", "int64") or bitcast:
            return Opaque(self.run)
        bits = 64 if dtype == "int64" else 32
        made = Whole(self.run, self.parts, bits)
        return made._made(self.parts, made) if bits == 32 else made


def _parts(value: Any) -> Mapping[Strides, Int]:
    if isinstance(value, Whole):
        return value.parts
    if isinstance(value, int):
        return {(): int(value)}
    raise TypeError(f"{value!r} is no int")


def _bool(value: Any) -> Bool:
    return value.value if isinstance(value, Flag) else value


def _times(key: Strides, n: Int, other: Strides, m: Int) -> tuple[Strides, Int]:
    """A product of two summands; one of two symbols that is a bare variable becomes a stride of that name."""
    strides = tuple(sorted(key + other))
    if isinstance(n, int) or isinstance(m, int):
        return strides, n * m
    for one, rest in ((m, n), (n, m)):
        leaves = list(one.parts.items())
        if one.const == 0 and len(leaves) == 1 and leaves[0][1] == 1:
            return tuple(sorted((*strides, leaves[0][0].text))), rest
    raise TypeError(f"({n}) * ({m}) is a product of two sums of symbols")


@dataclass(frozen=True)
class Tensor:
    """A tensor argument: what an address in it must look like.

    outer: stride -> (factor, extent): the dimensions whose stride is a symbol (times a factor).  inner: the extent of
    what is left, which lies together.  holds: the width of its ints; 0 for numbers.
    facts(index, value): what is known of an int in it.  between(index, value, other index, other value): of two.
    memory: tensors of one memory have one name here.  filled: what cells hold that no proof asked for.
    """

    name: str
    inner: Int
    outer: Mapping[str, tuple[int, Int]] = field(default_factory=dict)
    holds: int = 0
    facts: Callable[[tuple[Int, ...], Int], Iterable[Bool]] = lambda index, value: ()
    between: Callable[[tuple[Int, ...], Int, tuple[Int, ...], Int], Iterable[Bool]] = lambda i, a, j, b: ()
    memory: str = ""
    filled: int = 0

    @property
    def where(self) -> str:
        return self.memory or self.name

    def index(self, parts: Mapping[Strides, Int]) -> tuple[Bool, tuple[Int, ...]]:
        """Whether an offset has the form of an address of this tensor, and the index it stands for."""
        index: list[Int] = []
        fits: list[Bool] = [key == () or ".".join(key) in self.outer for key in parts]
        for stride, (factor, extent) in self.outer.items():
            n = parts.get(tuple(stride.split(".")), 0)
            at = n // factor
            index.append(at)
            fits += [at * factor == n, at >= 0, at < extent]
        at = parts.get((), 0)
        return conj(*fits, at >= 0, at < self.inner), (*index, at)


class Pointer:
    """Where a tensor begins, plus an offset."""

    def __init__(self, run: Run, tensor: Tensor, offset: Whole) -> None:
        self.run, self.tensor, self.offset = run, tensor, offset

    def __add__(self, other: Any) -> Pointer:
        if isinstance(other, Opaque):
            raise TypeError(f"an address in {self.tensor.name} depends on a number")
        return Pointer(self.run, self.tensor, Whole(self.run, self.offset.parts, 64) + other)

    __radd__ = __add__

    def __getitem__(self, index: Any) -> Pointer:
        return self

    @property
    def dtype(self) -> Opaque:
        return Opaque(self.run)


@dataclass(frozen=True)
class World:
    """The arguments of a kernel: tensors, ints, constants; the grid; what is known of sizes."""

    arguments: Mapping[str, Any]  # a Tensor; an int or symbol; ("stride", name); anything else is a constant
    grid: tuple[Int, Int, Int]
    given: list[Bool]
    extents: list[Int] = field(default_factory=list)  # what a counterexample should keep small
    known: Callable[[Run], list[Bool]] = lambda run: []  # of what one run loaded from several tensors
    across: Callable[[Run, Run], list[Bool]] = lambda run, other: []  # of what two programs loaded


@dataclass(frozen=True)
class Access:
    """One load or store of one run."""

    kind: str  # load or store
    tensor: Tensor
    mask: Bool
    fits: Bool
    index: tuple[Int, ...]
    line: int
    value: Int | None = None  # of a loaded int


class Run:
    """One run of a kernel along one path."""

    def __init__(self, source: Source, prefix: str, world: World) -> None:
        self.source, self.prefix, self.world = source, prefix, world
        self.facts: list[Bool] = []
        self.accesses: list[Access] = []
        self.musts: list[tuple[str, int, Bool]] = []
        self.pids: dict[int, Int] = {}
        self._count = 0
        self.lines = (0, "")

    def _name(self, what: str) -> str:
        self._count += 1
        return f"{self.prefix}.{what}{self._count}"

    def integer(self, what: str) -> Int:
        return self.source.integer(self._name(what))

    def boolean(self, what: str) -> Bool:
        return self.source.boolean(self._name(what))

    def loaded(self, name: str) -> list[tuple[tuple[Int, ...], Int, Bool]]:
        """(index, value, mask) of every int that was loaded from a tensor."""
        return [(a.index, a.value, a.mask) for a in self.accesses if a.tensor.name == name and a.value is not None]

    def know(self, *facts: Bool) -> None:
        self.facts += facts

    def must(self, what: str, claim: Bool) -> None:
        if claim is not True:
            self.musts.append((what, _line(), claim))

    def program(self, axis: int) -> Int:
        if axis not in self.pids:
            self.pids[axis] = self.source.integer(f"{self.prefix}.program{axis}")
        return self.pids[axis]

    def free(self, value: Any) -> Any:
        """The like of a value, with nothing known of it."""
        if isinstance(value, bool | Flag):
            return Flag(self, self.boolean("free"))
        if isinstance(value, Whole | int):
            bits = value.bits if isinstance(value, Whole) else 32
            fresh = self.integer("free")
            if bits == 32:
                self.know(fresh >= -(2**31), fresh < 2**31)
            return Whole(self, {(): fresh}, bits)
        if isinstance(value, Pointer):
            raise TypeError("a loop moves a pointer: compute it from the loop's variable instead")
        return value


def _line() -> int:
    """The line of the kernel's source that is running."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith("<kernel"):
            return frame.f_lineno
        frame = frame.f_back
    return 0


class Loop:
    """An arbitrary iteration of a loop, or none."""

    def __init__(self, run: Run, *bounds: Any) -> None:
        first, last, step = {1: (0, *bounds, 1), 2: (*bounds, 1), 3: bounds}[len(bounds)]
        self.run = run
        self.enters = Flag(run, run.boolean("enters"))
        turn = run.integer("turn")
        whole = [b if isinstance(b, Whole) else Whole(run, {(): b}, 32) for b in (first, last)]
        value = whole[0].plain + turn * step
        self.value = Whole(run, {(): value}, max(b.bits for b in whole))
        self._range = conj(turn >= 0, value < whole[1].plain)

    def enter(self) -> bool:
        if self.enters:
            self.run.know(self._range)
            return True
        return False

    def leave(self) -> None:
        raise _BodyDone


class Language:
    """What stands for `tl`."""

    int32, int64, float32, float64, float16, bfloat16 = "int32", "int64", "float32", "float64", "float16", "bfloat16"
    constexpr = Any

    def __init__(self, run: Run) -> None:
        self.run = run

    def program_id(self, axis: int) -> Whole:
        return Whole(self.run, {(): self.run.program(axis)}, 32)

    def arange(self, first: int, last: int) -> Whole:
        lane = self.run.integer("lane")
        self.run.know(lane >= first, lane < last)
        return Whole(self.run, {(): lane}, 32)

    def load(self, pointer: Pointer, mask: Any = True, other: Any = None) -> Any:
        access = self._access("load", pointer, mask)
        tensor = pointer.tensor
        if not tensor.holds:
            self.run.accesses.append(access)
            return Opaque(self.run)
        value = self.run.integer(tensor.name)
        before = [a for a in self.run.accesses if a.tensor.name == tensor.name and a.kind == "load"]
        self.run.accesses.append(Access(**{**access.__dict__, "value": value}))
        if tensor.holds == 32:
            self.run.know(value >= -(2**31), value < 2**31)
        self.run.know(*(implies(access.mask, fact) for fact in tensor.facts(access.index, value)))
        for old in before:
            self.run.know(*alike(tensor, old, self.run.accesses[-1]))
        if access.mask is not True:
            value = pick(access.mask, value, other if isinstance(other, int) else self.run.integer("masked"))
        return Whole(self.run, {(): value}, tensor.holds)

    def store(self, pointer: Pointer, value: Any, mask: Any = True) -> None:
        self.run.accesses.append(self._access("store", pointer, mask))

    def _access(self, kind: str, pointer: Pointer, mask: Any) -> Access:
        fits, index = pointer.tensor.index(pointer.offset.parts)
        return Access(kind, pointer.tensor, _bool(mask), fits, index, _line())

    def where(self, condition: Any, then: Any, otherwise: Any) -> Any:
        if isinstance(then, Opaque | float) or isinstance(otherwise, Opaque | float):
            return Opaque(self.run)
        bits = max((v.bits for v in (then, otherwise) if isinstance(v, Whole)), default=32)
        if isinstance(condition, Opaque):
            condition = condition._either()
        values = (Whole(self.run, _parts(v), bits).plain for v in (then, otherwise))
        return Whole(self.run, {(): pick(_bool(condition), *values)}, bits)

    def minimum(self, a: Any, b: Any) -> Any:
        return self.where(a <= b, a, b)

    def maximum(self, a: Any, b: Any) -> Any:
        return self.where(a >= b, a, b)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return self.full(shape, 0, dtype)

    def full(self, shape: tuple[int, ...], value: Any, dtype: Any) -> Any:
        if dtype == "int64" and not shape:
            return Whole(self.run, {(): value}, 64)
        return Opaque(self.run)

    def sum(self, x: Any, axis: Any = None) -> Any:
        return self.run.free(x) if isinstance(x, Whole) else Opaque(self.run)

    max = min = cumsum = sum

    def dot(self, *_: Any, **__: Any) -> Any:
        return Opaque(self.run)

    exp = exp2 = log = sqrt = rsqrt = erf = ceil = abs = dot

    def debug_barrier(self) -> None:
        pass


def alike(tensor: Tensor, a: Access, b: Access) -> list[Bool]:
    """What is known of two loads from a tensor of ints: the same cell holds the same, and what the world says."""
    assert a.value is not None
    assert b.value is not None
    same = conj(*(i == j for i, j in zip(a.index, b.index, strict=True)))
    known = [implies(same, a.value == b.value), *tensor.between(a.index, a.value, b.index, b.value)]
    return [implies(conj(a.mask, b.mask), fact) for fact in known]


# the source, with its loops rewritten


class _Loops(ast.NodeTransformer):
    """for i in range(...): body   becomes   loop = Loop(...); if loop.enter(): free; body; loop.leave()   and free."""

    def __init__(self) -> None:
        self.count = 0

    def visit_For(self, node: ast.For) -> list[ast.stmt]:
        self.generic_visit(node)
        self.count += 1
        name = f"__loop{self.count}"
        assert isinstance(node.target, ast.Name)
        assert isinstance(node.iter, ast.Call)
        changed = sorted(
            {n.id for s in node.body for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            - {node.target.id}
        )
        free = [ast.parse(f"if {n!r} in locals(): {n} = __run.free({n})").body[0] for n in changed]
        bounds = ", ".join(ast.unparse(a) for a in node.iter.args)
        head = ast.parse(f"{name} = __Loop(__run, {bounds})").body
        body = [
            *free,
            *ast.parse(f"{node.target.id} = {name}.value").body,
            *node.body,
            *ast.parse(f"{name}.leave()").body,
        ]
        entered = ast.If(ast.parse(f"{name}.enter()", mode="eval").body, body, [])
        out: list[ast.stmt] = [*head, entered, *free]
        for made in out:
            for part in ast.walk(made):
                if not hasattr(part, "lineno") or part.lineno < node.lineno:
                    ast.copy_location(part, node)
        return out


@functools.cache
def _compiled(function: Callable[..., Any]) -> CodeType:
    """A kernel's definition with its loops rewritten.  Line numbers stay those of its file."""
    lines, first = inspect.getsourcelines(function)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    ast.increment_lineno(tree, first - 1)
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    for argument in definition.args.args:
        argument.annotation = None
    tree = ast.fix_missing_locations(_Loops().visit(tree))
    return compile(tree, f"<kernel {definition.name}>", "exec")


def runnable(function: Callable[..., Any], environment: Mapping[str, Any]) -> Callable[..., Any]:
    """A kernel's function, loops rewritten, over other globals."""
    scope: dict[str, Any] = dict(environment)
    exec(_compiled(function), scope)
    made: Callable[..., Any] = scope[function.__name__]
    return made


def execute(kernel: Any, run: Run) -> None:
    """Run a kernel (a Triton function, or what has its `fn`) once along the current path."""
    tl = Language(run)
    names = kernel.fn.__globals__
    environment: dict[str, Any] = {"tl": tl, "__run": run, "__Loop": Loop}
    for name in kernel.fn.__code__.co_names:
        value = names.get(name)
        if name not in environment and hasattr(value, "fn"):
            environment[name] = runnable(value.fn, environment)
        elif name not in environment and isinstance(value, int):
            environment[name] = value
    arguments: dict[str, Any] = {}
    for name, value in run.world.arguments.items():
        if isinstance(value, Tensor):
            arguments[name] = Pointer(run, value, Whole(run, {}, 64))
        elif isinstance(value, SymInt):
            arguments[name] = Whole(run, {(): value}, 32)
        elif isinstance(value, tuple):
            arguments[name] = Whole(run, {(value[1],): 1}, 32)
        else:
            arguments[name] = Opaque(run) if isinstance(value, float) else value
    for axis in range(3):
        program = run.program(axis)
        run.know(program >= 0, program < run.world.grid[axis])
    with contextlib.suppress(_BodyDone):
        runnable(kernel.fn, environment)(**arguments)


# proofs


@dataclass
class Refuted:
    """A claim that fails: what, where, and values that break it."""

    claim: str
    line: int
    values: Valuation
    accesses: list[Access]
    programs: list[tuple[int, int, int]]
    world: World

    def __str__(self) -> str:
        shown = ", ".join(f"{k} = {v}" for k, v in sorted(self.values.items()))
        return f"line {self.line}: {self.claim}, at {shown}"


@dataclass
class Proof:
    """What was proved of a kernel in a world."""

    paths: int = 0
    claims: int = 0
    accesses: set[tuple[str, str, int]] = field(default_factory=set)
    reached: set[tuple[str, str, int]] = field(default_factory=set)
    refuted: Refuted | None = None


def _conditions(run: Run, branches: Iterable[Any]) -> list[Bool]:
    return [*run.facts, *(b.condition if b.taken else b.condition.negated() for b in branches)]


def _term(value: Bool) -> Any:
    return z3.BoolVal(value) if isinstance(value, bool) else value.term


class _Asker:
    """One solver for a world."""

    def __init__(self, given: Iterable[Bool]) -> None:
        self.solver = z3.SolverFor("QF_LIA")
        self.solver.set("timeout", 60_000)
        for part in given:
            self.solver.add(_term(part))

    def model(self, parts: Iterable[Bool], small: Iterable[Int] = ()) -> Valuation | None:
        """Values that satisfy them; the smallest of a few bounds on the sizes for which there are any."""
        self.solver.push()
        try:
            for part in parts:
                self.solver.add(_term(part))
            answer = self.solver.check()
            if answer == z3.unsat:
                return None
            if answer == z3.unknown:
                raise TimeoutError(self.solver.reason_unknown())
            best = Valuation.of(self.solver.model())
            sizes = [size for size in small if isinstance(size, SymInt)]
            for bound in (1, 2, 3, 5, 9, 40, 300, 5000):
                self.solver.push()
                for size in sizes:
                    self.solver.add(_term(size <= bound))
                found = self.solver.check() == z3.sat
                if found:
                    best = Valuation.of(self.solver.model())
                self.solver.pop()
                if found:
                    break
            return best
        finally:
            self.solver.pop()


def prove_kernel(
    kernel: Any,
    build: Callable[[Source], World],
    races: bool = True,
    also: Callable[[World], Iterable[Bool]] = lambda world: (),
) -> Proof:
    """Loads and stores in bounds, 32-bit arithmetic exact, no address written by one program and touched by another.

    Tensors that are only read, or that each program reads where it alone writes, raise no question.
    also: more conditions, for a counterexample that a machine can hold.
    """
    source = Symbols()
    proof = Proof()
    kept: dict[str, list[tuple[Run, tuple[Any, ...]]]] = {"p": [], "q": []}
    world = build(source)
    asker = _Asker([*world.given, *also(world)])
    if asker.model([]) is None:
        raise ValueError("the world's conditions cannot be met")
    for prefix, runs in kept.items():

        def one(prefix: str = prefix) -> Run:
            run = Run(source, prefix, build(source))
            execute(kernel, run)
            run.know(*run.world.known(run))
            return run

        for path in Executor(world.given).paths(one):
            if path.raised is not None:
                raise path.raised
            runs.append((path.result, path.branches))
    for run, branches in kept["p"]:
        proof.paths += 1
        known = _conditions(run, branches)
        claims = [(f"{what}", line, claim) for what, line, claim in run.musts]
        for a in run.accesses:
            key = (a.kind, a.tensor.name, a.line)
            proof.accesses.add(key)
            claims.append((f"{a.kind} of {a.tensor.name} in bounds", a.line, implies(a.mask, a.fits)))
            if key not in proof.reached and asker.model([*known, a.mask]) is not None:
                proof.reached.add(key)
        proof.claims += len(claims)
        every = conj(*(claim for _, _, claim in claims))
        if every is True or asker.model([*known, neg(every)]) is None:
            continue
        for what, line, claim in claims:
            values = None if claim is True else asker.model([*known, neg(claim)], world.extents)
            if values is not None:
                proof.refuted = Refuted(what, line, values, run.accesses, [_program(run, values)], world)
                return proof
    if races:
        proof.refuted = _race(kept, asker, proof, world)
    return proof


def _program(run: Run, values: Valuation) -> tuple[int, int, int]:
    return tuple(value_of(run.program(axis), values) for axis in range(3))


def _race(
    kept: Mapping[str, list[tuple[Run, tuple[Any, ...]]]], asker: _Asker, proof: Proof, world: World
) -> Refuted | None:
    written = {a.tensor.where for run, _ in kept["p"] for a in run.accesses if a.kind == "store"}
    seen: set[Any] = set()
    for run, branches in kept["p"]:
        stores = [a for a in run.accesses if a.kind == "store"]
        if not stores:
            continue
        known = _conditions(run, branches)
        for other, other_branches in kept["q"]:
            touched = [a for a in other.accesses if a.tensor.where in written]
            if not touched:
                continue
            differ = disj(*(run.program(axis) != other.program(axis) for axis in range(3)))
            both: list[Bool] | None = None
            for a in stores:
                for b in touched:
                    if a.tensor.where != b.tensor.where:
                        continue
                    same = conj(a.mask, b.mask, *(i == j for i, j in zip(a.index, b.index, strict=True)))
                    if both is None:
                        both = [*known, *_conditions(other, other_branches), differ, *_across(run, other)]
                    key = (a.line, b.line, *(repr(part) for part in (same, *both)))
                    if key in seen:
                        continue
                    seen.add(key)
                    proof.claims += 1
                    values = asker.model([*both, same], world.extents)
                    if values is not None:
                        claim = f"store of {a.tensor.name} and {b.kind} of another program touch one address"
                        programs = [_program(run, values), _program(other, values)]
                        return Refuted(claim, a.line, values, [*run.accesses, *other.accesses], programs, world)
    return None


def _across(run: Run, other: Run) -> list[Bool]:
    out = list(run.world.across(run, other))
    for a in run.accesses:
        for b in other.accesses:
            if a.tensor.name == b.tensor.name and a.value is not None and b.value is not None:
                out += alike(a.tensor, a, b)
    return out


def bool_value(value: Bool, values: Valuation) -> bool:
    """The truth of a bool, symbol or not, where the variables are these."""
    return value.value(values) if isinstance(value, SymBool) else bool(value)
