"""Small symbolic shapes for `lawful check`: a few groups in the queues, and a symbol for every number.

One call of schedule() is run on symbols from any state that satisfies the state laws: token counts, capacities and
budgets are unbounded, block size and branches are fixed.  The scheduler is the policy itself; only its block keeper
counts without ids, by the production formulas, and the plan's rows are not written out.  What is proved here is a small
part of `pytest proofs/`, which also covers update(), any block size, any n and any number of groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.scheduler import Scheduler, SequenceGroup, Status
from engine.scheduler.blocks import BlockManager
from spec import views
from spec.check.patience import EndlessError
from spec.check.report import in_words
from spec.check.symbolic import DisagreementError, Report, Source, Valuation, prove
from spec.check.terms import Signal
from spec.laws import BY_ID, MID, STATE, STATE_IN_MID, STEP
from spec.logic import Bool, Int, conj

BLOCK_SIZE = 4
MOST_NOT_RUN = 3
GRANTED = 1000, 400  # paths of a shape, and decisions on one: the production scheduler takes a few dozen of each


class Shape(NamedTuple):
    """Lengths of the queues, the order of phases, branches of each group, how many of the most senior have forked."""

    running: int
    swapped: int
    waiting: int
    chunked: bool
    n: int
    forked: int

    def __str__(self) -> str:
        order = "chunked" if self.chunked else "prefill-first"
        wide = f", n {self.n}" if self.n > 1 else ""
        return (
            f"{self.running} running, {self.swapped} swapped, {self.waiting} waiting{wide}, "
            f"{self.forked} beyond their first token, {order}"
        )


# every number of forked groups that the laws allow is tried: all inside but the last must have
SHAPES = tuple(
    Shape(*queues, chunked, n, forked)
    for chunked in (True, False)
    for queues, n in (((0, 0, 2), 1), ((1, 0, 1), 2), ((0, 1, 1), 1), ((1, 1, 1), 1), ((2, 0, 1), 1), ((2, 1, 0), 1))
    for forked in range(max(queues[0] + queues[1] - 1, 0), sum(queues) + 1)
)


@dataclass(frozen=True)
class _Config:
    num_gpu_blocks: Int
    num_cpu_blocks: Int
    max_model_len: Int
    tokens: Int
    seqs: Int
    watermark_blocks: Int
    enable_chunked_prefill: bool
    block_size: int = BLOCK_SIZE
    mode: None = None


class _Counters(BlockManager):
    """The production formulas over counters."""

    __slots__ = ("_cpu", "_gpu")

    def __init__(self, gpu: Int, cpu: Int) -> None:
        self.block_size = BLOCK_SIZE
        self._gpu, self._cpu = gpu, cpu

    @property
    def gpu_free(self) -> Int:
        return self._gpu

    @property
    def cpu_free(self) -> Int:
        return self._cpu

    def beats(self, group: SequenceGroup) -> int:
        return 1 << 30  # without tables the calendar cannot tell, and is not asked

    def _hold(self, group: SequenceGroup, blocks: Int) -> None:
        self._gpu += group.held - blocks
        group.held = blocks

    def admit(self, group: SequenceGroup) -> None:
        self._hold(group, self.cover(group))

    def grow(self, group: SequenceGroup) -> list[Any]:
        self._hold(group, self.cover(group))
        group.tail_shared = False
        return []

    def swap_out(self, group: SequenceGroup) -> list[Any]:
        size = self.swap_size(group)
        self._hold(group, 0)
        self._cpu -= size
        group.held = size
        return []

    def swap_in(self, group: SequenceGroup) -> tuple[list[Any], list[Any]]:
        self._cpu += group.held
        group.held = 0
        self._hold(group, self.cover(group))
        group.tail_shared = False
        return [], []

    def drop_gpu(self, group: SequenceGroup) -> None:
        self._hold(group, 0)

    def drop_cpu(self, group: SequenceGroup) -> None:
        self._cpu += group.held
        group.held = 0


def _build(shape: Shape, source: Source, policy: type[Scheduler]) -> Any:
    integer = source.integer
    names = ("gpu_blocks", "cpu_blocks", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "watermark")
    gpu, cpu, length, tokens, seqs, watermark = map(integer, names)
    config: Any = _Config(gpu, cpu, length, tokens, seqs, watermark, shape.chunked)

    class Rowless(policy):  # type: ignore[valid-type, misc]
        def _all_grow(self, step: Any) -> bool:
            return False  # a look at every decode

        def _count(self, plan: Any) -> None:
            pass

        def _write_rows(self, group: SequenceGroup, tokens: Int, plan: Any) -> None:
            pass

    s: Any = Rowless(config, _Counters(integer("gpu_free"), integer("cpu_free")))
    homes = [Status.RUNNING] * shape.running + [Status.SWAPPED] * shape.swapped + [Status.WAITING] * shape.waiting
    for rank, home in enumerate(homes):
        name = "abcd"[rank]
        shared, rest = integer(f"{name}.shared_blocks"), integer(f"{name}.prompt_rest")
        g = SequenceGroup(name, shared * BLOCK_SIZE + rest, shape.n)
        g.shared_blocks, g.shared_tokens = shared, shared * BLOCK_SIZE
        g.arrival, g.status, g.forked = rank, home, rank < shape.forked
        g.max_tokens = integer(f"{name}.max_tokens")
        if g.forked:
            g.known = g.prompt_len + integer(f"{name}.generated")
            g.branches, g.tables = list(range(shape.n)), [[] for _ in range(shape.n)]
            g.tail_shared = source.boolean(f"{name}.tail_shared") if shape.n > 1 else False
        g.deficit, g.held = integer(f"{name}.deficit"), integer(f"{name}.held")
        getattr(s, home.value).append(g)
        s.groups[name] = g
    s.num_arrivals = len(homes)
    s.decodes_owed = False if shape.chunked else source.boolean("decodes_owed")
    return s


def _lawful(s: Any) -> list[Bool]:
    c = s.config
    facts = conj(
        c.num_gpu_blocks >= 1,
        c.num_cpu_blocks >= 0,
        c.max_model_len >= 2,
        c.seqs >= 1,
        c.seqs <= c.tokens,
        c.watermark_blocks >= 0,
        c.enable_chunked_prefill or c.tokens >= c.max_model_len,
        *(g.shared_blocks >= 0 for g in s.groups.values()),
    )
    view = views.snapshot(s)
    return [facts, *(law(view) for law in STATE)]


def _schedule(s: Any) -> views.Step:
    before = views.snapshot(s)
    plan = s.schedule()
    return views.observe(before, plan, views.snapshot(s))


def _claims(step: views.Step) -> dict[str, Bool]:
    return {law.id: law(step.mid) for law in STATE_IN_MID} | {law.id: law(step) for law in (*MID, *STEP)}


def _numbers(step: views.Step) -> list[Any]:
    queues = (step.mid.running, step.mid.swapped, step.mid.waiting)
    counts = [[(g.request_id, g.known, g.deficit, g.held, g.tokens) for g in queue] for queue in queues]
    return [counts, [(v.was.request_id, v.tokens) for v in step.served], list(step.mid.blocks), list(step.verbs)]


def prove_shapes(
    policy: type[Scheduler], note: Callable[[str], None] = lambda text: None
) -> tuple[Report, dict[Shape, str]]:
    """schedule() from any lawful state of each shape keeps every law; failures tell the law and the run.

    It gives up after MOST_NOT_RUN shapes that do not run on symbols, or one in which a call does not return.

    A policy that raises or does not return fails the claim "returns".  Returned beside the report: the shapes that
    could not be proved or refuted, since the policy asks for more than symbols can tell, such as an index, and why.
    """
    report = Report()
    not_run: dict[Shape, str] = {}
    for shape in SHAPES:
        note(f"{shape}, any size")
        if len(not_run) >= MOST_NOT_RUN:
            break

        def build(source: Source, shape: Shape = shape) -> Any:
            return _build(shape, source, policy)

        def explain(claim: str, values: Valuation, shape: Shape = shape) -> list[str]:
            return _told(claim, shape, _build(shape, values, policy))

        try:
            proof = prove(
                build, _lawful, _schedule, _claims, _numbers, max_failures=100, explain=explain, granted=GRANTED
            )
        except (Signal, DisagreementError) as error:
            not_run[shape] = f"{type(error).__name__}: {error}"
        else:
            report.absorb(proof)
            if any(isinstance(failure.error, EndlessError) for failure in proof.failures):
                not_run[shape] = "a call does not return, and no further shape was tried"
                break
    return report, not_run


def _told(claim: str, shape: Shape, s: Any) -> list[str]:
    """The broken claim, where it broke, and the run."""
    law = BY_ID["S8" if claim == "returns" else claim]
    return [str(law), f"shape: {shape}", *in_words(s, s.schedule)]


LAWS_OF_SHAPES = frozenset(law.id for law in (*STATE_IN_MID, *MID, *STEP))
