"""Symbolic worlds: a scheduler with a few groups in its queues and a symbol for every number.

A world is built from a `Source`, so the same lines make the symbolic state and the plain one that repeats a path.  The
scheduler is the production class; only two things are put in its place:

* the block keeper counts and hands out no ids.  `CountedBlocks` uses the production formulas with a concrete block size
  and concrete numbers of branches.  `AnyBlocks` knows no formula: what a group covers, fills and peaks at are symbols
  that obey the count protocol only, so that what is proved with it holds for every block size and every n.
* the plan's rows are not written out (their arithmetic has proofs of its own); `rowless` does this to any policy class.

The count protocol, for one group: 1 <= cover <= peak; 0 <= filled <= cover, and filled >= 1 once something is computed;
while branches share their last block, cover = filled + live - 1.  The tokens of all tails together, live * (known -
shared), are at least known - shared + live - 1.  `test_1_inductive` shows that the formulas obey it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine.scheduler import Scheduler, SequenceGroup, Status
from engine.scheduler.blocks import BlockManager
from engine.scheduler.plan import PreemptionMode
from spec import views
from spec.check.symbolic import Source, SymInt
from spec.logic import Bool, Int, cdiv, conj, disj, implies, pick
from spec.words import Measure, whole

MODES = {"any_mode": None, "swap": PreemptionMode.SWAP, "recompute": PreemptionMode.RECOMPUTE}


class Shape(NamedTuple):
    """Which world: lengths of the queues, order and preferred mode, and how far the groups are.

    forked: so many groups, the most senior, have generated a token (law L4: they are a prefix of the queues).
    branches: (n, live) of each group, or None for one of any n.  block_size: None for any; then every n is any as well.
    """

    running: int
    swapped: int
    waiting: int
    chunked: bool = True
    mode: PreemptionMode | None = None
    forked: int = 0
    branches: tuple[tuple[int, int] | None, ...] = ()
    block_size: int | None = None

    @property
    def groups(self) -> int:
        return self.running + self.swapped + self.waiting


@dataclass(frozen=True)
class AnyConfig:
    """A configuration of symbols; `lawful` says what `SchedulerConfig` makes sure of."""

    num_gpu_blocks: Int
    num_cpu_blocks: Int
    block_size: int | None
    max_model_len: Int
    tokens: Int
    seqs: Int
    watermark_blocks: Int
    enable_chunked_prefill: bool
    preemption_mode: PreemptionMode | None

    @property
    def mode(self) -> PreemptionMode | None:
        return self.preemption_mode

    @property
    def max_num_batched_tokens(self) -> Int:
        return self.tokens

    @property
    def max_num_seqs(self) -> Int:
        return self.seqs

    def lawful(self) -> Bool:
        return conj(
            self.num_gpu_blocks >= 1,
            self.num_cpu_blocks >= 0,
            self.max_model_len >= 2,
            self.tokens >= 1,
            self.seqs >= 1,
            self.watermark_blocks >= 0,
            self.seqs <= self.tokens,
            self.enable_chunked_prefill or self.tokens >= self.max_model_len,
        )


# branches: live * (known - shared) is a number of its own where live is a symbol


class AnyLive(SymInt):
    """Live branches, any number; its one product is known in advance."""

    __slots__ = ("tail", "tails")

    def __mul__(self, other: Int) -> Int:
        if isinstance(other, SymInt) and other.key == self.tail.key:
            return self.tails
        return super().__mul__(other)

    __rmul__ = __mul__


class PlainLive(int):
    """The same in the plain run of a path's model, where the product is what the model says."""

    tail: int
    tails: int

    def __mul__(self, other: Any) -> int:
        assert other == self.tail, "a product of live with something else than the tail"
        return self.tails

    __rmul__ = __mul__


def any_live(live: Int, tail: Int, tails: Int) -> Any:
    """`live` such that live * tail is `tails`."""
    out: Any = AnyLive(live.parts, live.const) if isinstance(live, SymInt) else PlainLive(live)
    out.tail, out.tails = tail, tails
    return out


# blocks

FAR = 1 << 30  # beats


class AnyMeasure:
    """What each group covers, fills and peaks at, by request id: the laws' measure of a world.

    A group that is not listed is measured by the laws' own formula.
    """

    def __init__(self, block_size: int | None) -> None:
        self.exact = Measure(block_size) if block_size else None
        self.covers: dict[str, Int] = {}
        self.fills: dict[str, Int] = {}
        self.peaks: dict[str, Int] = {}

    def cover(self, g: Any) -> Int:
        return self.covers[g.request_id] if g.request_id in self.covers else self.exact.cover(g)  # type: ignore[union-attr]

    def filled(self, g: Any) -> Int:
        """Nothing where nothing is computed."""
        if g.request_id not in self.fills:
            return self.exact.filled(g)  # type: ignore[union-attr]
        return pick(g.deficit >= whole(g), 0, self.fills[g.request_id])

    def peak(self, g: Any) -> Int:
        return self.peaks[g.request_id] if g.request_id in self.peaks else self.exact.peak(g)  # type: ignore[union-attr]


class CountedBlocks(BlockManager):
    """The production formulas over counters instead of ids."""

    __slots__ = ("_cpu", "_gpu")

    def __init__(self, block_size: int, gpu_free: Int, cpu_free: Int) -> None:
        self.block_size = block_size
        self._gpu = gpu_free
        self._cpu = cpu_free

    @property
    def gpu_free(self) -> Int:  # type: ignore[override]
        return self._gpu

    @property
    def cpu_free(self) -> Int:  # type: ignore[override]
        return self._cpu

    def beats(self, group: SequenceGroup) -> int:
        return FAR  # without tables the calendar cannot tell, and is not asked: see `rowless`

    def admit(self, group: SequenceGroup) -> None:
        group.held = self.cover(group)
        self._gpu -= group.held

    def grow(self, group: SequenceGroup) -> list[Any]:
        self._gpu -= self.need(group)
        group.held = self.cover(group)
        group.tail_shared = False
        return []

    def swap_out(self, group: SequenceGroup) -> list[Any]:
        size = self.swap_size(group)
        self._gpu += group.held
        self._cpu -= size
        group.held = size
        return [(group.request_id, "out")]

    def swap_in(self, group: SequenceGroup) -> tuple[list[Any], list[Any]]:
        self._cpu += group.held
        group.held = self.cover(group)
        self._gpu -= group.held
        group.tail_shared = False
        return [(group.request_id, "in")], []

    def drop_gpu(self, group: SequenceGroup) -> None:
        self._gpu += group.held
        group.held = 0

    def drop_cpu(self, group: SequenceGroup) -> None:
        self._cpu += group.held
        group.held = 0

    def fork(self, group: SequenceGroup) -> None:
        """All branches name the blocks of the first: nothing moves."""

    def finish_branch(self, group: SequenceGroup, branch: int) -> None:
        """Free what the branch holds alone, siblings remaining: its tail up to the token before the one just drawn."""
        if group.tail_shared:
            return
        alone = cdiv(group.known - 1 - group.shared_tokens, self.block_size)
        group.held -= alone
        self._gpu += alone


class AnyBlocks(CountedBlocks):
    """The count protocol alone, for the groups that the measure lists."""

    __slots__ = ("measure",)

    def __init__(self, measure: AnyMeasure, block_size: int | None, gpu_free: Int, cpu_free: Int) -> None:
        super().__init__(block_size or 0, gpu_free, cpu_free)
        self.measure = measure

    def cover(self, group: SequenceGroup) -> Int:
        listed = group.request_id in self.measure.covers
        return self.measure.cover(group) if listed else super().cover(group)

    def swap_size(self, group: SequenceGroup) -> Int:
        listed = group.request_id in self.measure.fills
        return self.measure.filled(group) if listed else super().swap_size(group)


# worlds


def rowless(policy: type[Scheduler]) -> type[Scheduler]:
    """The policy, deciding all it decides but writing no rows, with a look at every decode.

    That the calendar's short cut comes to the same is a theorem of its own (`test_12_calendar`).
    """

    class Deciding(policy):  # type: ignore[valid-type, misc]
        def _all_grow(self, step: Any) -> bool:
            return False

        def _count(self, plan: Any) -> None:
            pass

        def _write_rows(self, group: SequenceGroup, tokens: Int, plan: Any) -> None:
            pass

    Deciding.__name__ = policy.__name__
    return Deciding


@dataclass
class World:
    """A scheduler, and what is known of its numbers beside the laws."""

    shape: Shape
    source: Source
    scheduler: Any
    measure: AnyMeasure
    facts: list[Bool] = field(default_factory=list)

    def view(self) -> views.State:
        return views.snapshot(self.scheduler, self.measure)

    def groups(self) -> Iterator[SequenceGroup]:
        yield from (*self.scheduler.running, *self.scheduler.swapped, *self.scheduler.waiting)


def build(shape: Shape, source: Source, policy: type[Scheduler] = Scheduler) -> World:
    """The world of this shape: every number is the source's, nothing but the shape is fixed."""
    integer = source.integer
    config: Any = AnyConfig(
        integer("gpu_blocks"),
        integer("cpu_blocks"),
        shape.block_size,
        integer("max_model_len"),
        integer("max_num_batched_tokens"),
        integer("max_num_seqs"),
        integer("watermark"),
        shape.chunked,
        shape.mode,
    )
    gpu_free, cpu_free = integer("gpu_free"), integer("cpu_free")
    measure = AnyMeasure(shape.block_size)
    blocks = AnyBlocks(measure, shape.block_size, gpu_free, cpu_free)
    scheduler = rowless(policy)(config, blocks)
    world = World(shape, source, scheduler, measure, [config.lawful()])
    queues = [Status.RUNNING] * shape.running + [Status.SWAPPED] * shape.swapped + [Status.WAITING] * shape.waiting
    for index, status in enumerate(queues):
        group = place(world, "abcdefgh"[index], index, status, index < shape.forked)
        queue: deque[SequenceGroup] = getattr(scheduler, status.value)
        queue.append(group)
        scheduler.groups[group.request_id] = group
    scheduler.num_arrivals = shape.groups
    scheduler.decodes_owed = False if shape.chunked else source.boolean("decodes_owed")
    return world


def place(world: World, name: str, arrival: int, status: Status, forked: bool) -> SequenceGroup:
    """A group in this queue, of any size."""
    source, shape = world.source, world.shape

    def integer(what: str) -> Int:
        return source.integer(f"{name}.{what}")

    facts = world.facts
    if shape.block_size:  # the prompt in whole blocks and the rest of one, so that quotients by block size meet
        shared, rest = integer("shared_blocks"), integer("prompt_rest")
        facts.append(conj(rest >= 0, rest < shape.block_size, shared >= 0))
        group = SequenceGroup(name, shared * shape.block_size + rest)
        group.shared_blocks, group.shared_tokens = shared, shared * shape.block_size
    else:
        group = SequenceGroup(name, integer("prompt_len"))
        group.shared_blocks, group.shared_tokens = integer("shared_blocks"), integer("shared_tokens")
        facts.append(conj(group.shared_tokens >= 0, group.shared_tokens <= group.prompt_len))
    group.arrival = arrival
    group.status = status
    group.max_tokens = integer("max_tokens")
    group.forked = forked
    group.known = group.prompt_len + integer("generated") if forked else group.prompt_len
    group.deficit = integer("deficit")
    group.held = integer("held")
    branches = shape.branches[arrival] if shape.branches else None
    if branches is not None:
        group.n, group.live = branches
        group.branches = list(range(group.live)) if forked else [0]
        group.tail_shared = source.boolean(f"{name}.tail_shared") if forked and group.live > 1 else False
        return group
    group.n = integer("n")
    group.tail_shared = source.boolean(f"{name}.tail_shared") if forked else False
    if forked:
        tail, tails, live = group.known - group.shared_tokens, integer("tails"), integer("live")
        group.live = any_live(live, tail, tails)
        facts.append(conj(live >= 1, tail >= 1, tails >= tail + live - 1, implies(live == 1, tails == tail)))
    else:
        group.live = group.n
        facts.append(group.n >= 1)
    measure = world.measure
    cover, filled, peak = integer("cover"), integer("filled"), integer("peak")
    measure.covers[name], measure.fills[name], measure.peaks[name] = cover, filled, peak
    facts.append(conj(cover >= 1, cover <= peak, filled >= 0, filled <= cover))
    facts.append(disj(group.deficit >= group.whole, filled >= 1))
    facts.append(implies(group.tail_shared, cover == filled + group.live - 1))
    return group
