"""Every small step there is, lawful or not, for theorems that say what a law's own text lets through.

Two groups, one of two branches and one of one, over three GPU and two CPU blocks.  Tables, plan and the pools' books
are any at all, ids outside the pools among them; nothing has to be reachable.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

from spec.laws import BY_ID
from spec.views import Blocks, Group, Served, State, Step

GPU, CPU, SIZE = 3, 2, 2
IDS = {"gpu": range(-1, GPU + 1), "cpu": range(-1, CPU + 1), "none": ()}
CONFIG = SimpleNamespace(block_size=SIZE, num_gpu_blocks=GPU, num_cpu_blocks=CPU)
Tables = tuple[tuple[int, ...], ...]
Broken = Callable[[str], bool]


def holds(law: str, view: Any) -> bool:
    """A law that stumbles over an id does not hold."""
    try:
        return bool(BY_ID[law](view))
    except (IndexError, ValueError):
        return False


def group(name: str, tables: Tables, known: int) -> Group:
    """A decode: of each branch all but the newest token is computed."""
    n = len(tables)
    return Group(
        request_id=name, arrival=0, prompt_len=1, n=n, max_tokens=9, shared_blocks=0, shared_tokens=0, live=n,
        known=known, deficit=n, forked=True, tail_shared=False, held=len({b for table in tables for b in table}),
        tokens=0, branches=tuple(range(n)), tables=tables, status=None,
    )  # fmt: skip


class Place(NamedTuple):
    """Where a group is: gpu, cpu, or none (it waits), and its tables."""

    home: str
    tables: Tables


@functools.cache
def booked(device: str, tables: tuple[Tables, ...]) -> bool:
    """Some books of the device's pool, references and free blocks, satisfy B3 with these tables."""
    capacity = GPU if device == "gpu" else CPU
    idle = SimpleNamespace(capacity=0, refs=[], free=[])
    groups = [SimpleNamespace(tables=each) for each in tables]
    for refs in product(range(1 + sum(len(table) for each in tables for table in each)), repeat=capacity):
        pool = SimpleNamespace(capacity=capacity, refs=list(refs), free=[b for b, n in enumerate(refs) if not n])
        pools = SimpleNamespace(**{"gpu": idle, "cpu": idle, device: pool})
        queues = {"running": (), "swapped": (), ("running" if device == "gpu" else "swapped"): groups}
        if holds("B3", SimpleNamespace(blocks=pools, **queues)):
            return True
    return False


def states(homes: Sequence[str], lengths: Sequence[int] = (1,), b3: bool = True) -> list[tuple[Place, Place]]:
    """Both groups at home there, with any tables of these lengths; with `b3` only those that some books agree with."""

    def places(home: str, branches: int) -> list[Place]:
        rows = [row for length in lengths for row in product(IDS[home], repeat=length if home != "none" else 0)]
        return [Place(home, tables) for tables in product(dict.fromkeys(rows), repeat=branches)]

    found = []
    for both in product(places(homes[0], 2), places(homes[1], 1)):
        on = {d: tuple(p.tables for p in both if p.home == d) for d in ("gpu", "cpu")}
        if not b3 or all(booked(d, on[d]) for d in ("gpu", "cpu")):
            found.append(both)
    return found


def state(both: tuple[Place, Place], known: int = 2) -> State:
    at: dict[str, list[Group]] = {"gpu": [], "cpu": [], "none": []}
    for name, place in zip("ab", both, strict=True):
        at[place.home].append(group(name, place.tables, known))
    return State(CONFIG, tuple(at["gpu"]), tuple(at["cpu"]), tuple(at["none"]), ("a", "b"), Blocks(0, 0), False)


def step(before: State, mid: State, plan: Any, served: tuple[Served, ...] = ()) -> Step:
    was, now = ({g.request_id: g for q in (s.running, s.swapped, s.waiting) for g in q} for s in (before, mid))
    return Step(before, plan, mid, served, (), (), (), (), (), {}, was, now)


class Moves(NamedTuple):
    """A plan's lists."""

    blocks_to_swap_out: list[tuple[int, int]]
    blocks_to_swap_in: list[tuple[int, int]]
    blocks_to_copy: list[tuple[int, int]]
    scheduled: list[Any]


MOVES = [  # from where to where each of the two groups goes
    (("gpu", "gpu"), ("gpu", "gpu")),
    (("gpu", "gpu"), ("cpu", "gpu")),
    (("gpu", "gpu"), ("cpu", "cpu")),
    (("gpu", "gpu"), ("gpu", "none")),
    (("cpu", "gpu"), ("gpu", "gpu")),
    (("cpu", "cpu"), ("gpu", "gpu")),
    (("none", "gpu"), ("gpu", "cpu")),
]


def lists(before: tuple[Place, Place], after: tuple[Place, Place]) -> Iterator[Moves]:
    """What may have moved, in any selection, and with one entry more: any pair of ids at all, or one that is there."""
    out, back, copies = [], [], []
    for was, now in zip(before, after, strict=True):
        pairs = [pair for a, b in zip(was.tables, now.tables, strict=True) for pair in zip(a, b, strict=False)]
        if (was.home, now.home) == ("gpu", "cpu"):
            out += pairs
        elif (was.home, now.home) == ("cpu", "gpu"):
            back += pairs
            copies += [(a, b) for a, b in product({b for _, b in pairs}, repeat=2) if a != b]
        elif (was.home, now.home) == ("gpu", "gpu"):
            copies += [(a, b) for a, b in pairs if a != b]
    found = [list(dict.fromkeys(pairs)) for pairs in (out, back, copies)]
    ends = (("gpu", "cpu"), ("cpu", "gpu"), ("gpu", "gpu"))
    for keep in product((False, True), repeat=sum(map(len, found))):
        at = iter(keep)
        kept = [[pair for pair in pairs if next(at)] for pairs in found]
        yield Moves(*kept, [])
        for which, (a, b) in enumerate(ends):
            for more in product(IDS[a], IDS[b]):
                yield Moves(*([*pairs, more] if i == which else pairs for i, pairs in enumerate(kept)), [])


class Row(NamedTuple):
    """A row of a plan, as the laws and the conditions read it."""

    group: Group
    branch: int
    start: int
    end: int
    block_table: tuple[int, ...]
    slots: list[int]


def rows(g: Group, known: int) -> Iterator[Moves]:
    """A token for each of two branches: tables whole or cut, slots any."""
    slots = range(-1, GPU * SIZE + SIZE)
    for cut in (None, -1):
        tables = [table[:cut] for table in g.tables]
        for pair in product(slots, repeat=2):
            made = [Row(g, i, known - 1, known, tables[i], [slot]) for i, slot in enumerate(pair)]
            yield Moves([], [], [], made)
