"""Planted faults: each a small change of the production scheduler, with the laws that it breaks.

A mutant names the classes that stand in for the production ones.  `build(config)` makes its scheduler and
`new_group` its groups, so that it runs wherever the production scheduler does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from engine.scheduler import PreemptionMode, Scheduler, SchedulerConfig, SequenceGroup, Status
from engine.scheduler.blocks import BlockManager
from engine.scheduler.calendar import DecodeCalendar
from engine.scheduler.phases import Step
from spec.logic import cdiv


@dataclass(frozen=True)
class Mutant:
    """A planted fault.  breaks: the laws seen to be broken by it; text: what was changed."""

    id: str
    text: str
    breaks: tuple[str, ...]
    scheduler: type[Scheduler] = Scheduler
    blocks: type[BlockManager] = BlockManager
    group: type[SequenceGroup] = SequenceGroup

    def build(self, config: SchedulerConfig) -> Scheduler:
        s = self.scheduler(config)
        if self.blocks is not BlockManager:
            s.blocks = self.blocks(config.block_size, config.num_gpu_blocks, config.num_cpu_blocks)
        return s

    def new_group(self, request_id: str, p: int, n: int, m: int) -> SequenceGroup:
        return self.group(request_id, p, n, m)


MUTANTS: list[Mutant] = []


def mutant(*breaks: str) -> Callable[[type], type]:
    """Register the class: its name is the id, its docstring the text, its base says what it stands in for."""

    def register(kind: type) -> type:
        role = next(
            role
            for base, role in ((Scheduler, "scheduler"), (BlockManager, "blocks"), (SequenceGroup, "group"))
            if issubclass(kind, base)
        )
        parts: dict[str, Any] = {role: kind}
        MUTANTS.append(Mutant(kind.__name__, " ".join((kind.__doc__ or "").split()), breaks, **parts))
        return kind

    return register


# the order of the phases


@mutant("S1", "Q2")
class AdmitsWhileSwapped(Scheduler):
    """the report's old rule: newcomers are admitted though groups are swapped"""

    def _decodes_first(self, step: Step) -> None:
        self._decodes(step)
        self._catch_up(step)
        if not step.plan.preempted:
            self._swap_in(step)
            self._admit(step)


@mutant("S2", "S3")
class ReturnsAfterPreemption(Scheduler):
    """the head's last token preempts another group for good measure, and swap-in goes on in the same step"""

    def _decodes_first(self, step: Step) -> None:
        if len(self.running) > 1 and all(group.is_decode for group in self.running) and not self.swapped:
            self._preempt(self.running.pop(), step)
        self._decodes(step)
        self._catch_up(step)
        self._swap_in(step)
        if not self.swapped:
            self._admit(step)


@mutant("L1", "S4")
class PrefillsFirstInChunked(Scheduler):
    """the running prefill is served before the decodes"""

    def _decodes_first(self, step: Step) -> None:
        self._catch_up(step)
        if not step.plan.groups:
            self._decodes(step)
        if not step.plan.preempted:
            self._swap_in(step)
            if not self.swapped:
                self._admit(step)


@mutant("S4", "L1")
class NoCatchUp(Scheduler):
    """a running prefill is never continued"""

    def _catch_up(self, step: Step) -> None:
        pass


@mutant("S11s")
class NeverSwapsIn(Scheduler):
    """swapped groups never return"""

    def _swap_in(self, step: Step) -> None:
        pass


@mutant("S11w")
class NeverAdmitsTwo(Scheduler):
    """at most one group is admitted in a step"""

    def _admit(self, step: Step) -> None:
        if self.waiting:
            self._admit_head(step)


@mutant("S17", "L1p")
class DecodesNeverOwed(Scheduler):
    """prefill-first: newcomers go before decodes for as long as they come"""

    def _prefills_first(self, step: Step) -> None:
        super()._prefills_first(step)
        self.decodes_owed = False


@mutant("S4p")
class MixesPrefillsAndDecodes(Scheduler):
    """prefill-first: a step that admitted runs decodes too"""

    def _prefills_first(self, step: Step) -> None:
        self._catch_up(step)
        if not self.swapped:
            self._admit(step)
        served = {group for group, _ in step.plan.groups}
        kept = [group for group in self.running if group in served]
        self.running = deque(group for group in self.running if group not in served)
        self._decodes(step)
        self.running.extend(kept)


# preemption


@mutant("Q2", "L1", "S6")
class VictimIsMostSenior(Scheduler):
    """the victim is the asker, the most senior group not yet served"""

    def _decode_head(self, step: Step) -> bool:
        group = step.rest[0]
        if group.is_decode and self.blocks.need(group) > self.blocks.gpu_free:
            self._preempt(step.rest.popleft(), step)
            return True
        return super()._decode_head(step)


@mutant("S13")
class PreemptsOneBlockEarly(Scheduler):
    """a decode preempts although the last block has room for it"""

    def _decode_head(self, step: Step) -> bool:
        group = step.rest[0]
        if group.is_decode and len(step.rest) > 1 and self.blocks.need(group) == self.blocks.gpu_free:
            self._preempt(step.rest.pop(), step)
        return super()._decode_head(step)


@mutant("Q2", "S15")
class RecomputesPastSwapped(Scheduler):
    """recompute is open although others are swapped"""

    def _preempt(self, victim: SequenceGroup, step: Step) -> None:
        if victim.prefers(self.config.mode) is PreemptionMode.RECOMPUTE:
            self._recompute(victim, step)
        else:
            super()._preempt(victim, step)


@mutant("S8")
class NoDemotion(Scheduler):
    """a full swap area is an error, as in the report"""

    def _make_room(self, size: int, step: Step) -> bool:
        if size > self.blocks.cpu_free:
            raise RuntimeError("Aborted due to the lack of CPU swap space")
        return True


@mutant("S14")
class DemotesOneTooMany(Scheduler):
    """making room on the CPU drops one swapped group more than needed"""

    def _make_room(self, size: int, step: Step) -> bool:
        if self.swapped and size <= self.blocks.cpu_free:
            self._demote(step)
        return super()._make_room(size, step)


@mutant("S15")
class AlwaysRecomputes(Scheduler):
    """the preferred mode is ignored while nothing is swapped"""

    def _preempt(self, victim: SequenceGroup, step: Step) -> None:
        if self.swapped:
            super()._preempt(victim, step)
        else:
            self._recompute(victim, step)


@mutant("S9")
class KeepsDemotedSwapOut(Scheduler):
    """the plan still swaps out a group that was demoted in the same step"""

    def _demote(self, step: Step) -> None:
        kept = dict(step.swapped_out)
        super()._demote(step)
        step.swapped_out = kept


@mutant("S20", "Q7", "B7")
class RecomputeKeepsProgress(Scheduler):
    """a recomputed group still counts its KV as computed"""

    def _recompute(self, victim: SequenceGroup, step: Step) -> None:
        deficit = victim.deficit
        super()._recompute(victim, step)
        victim.deficit = deficit


@mutant("Q2")
class VictimGoesToTheEnd(Scheduler):
    """a recomputed group queues behind everyone who waits"""

    def _recompute(self, victim: SequenceGroup, step: Step) -> None:
        super()._recompute(victim, step)
        self.waiting.append(self.waiting.popleft())


@mutant("S19", "Q1")
class DropsVictim(Scheduler):
    """a recomputed group is in no queue"""

    def _recompute(self, victim: SequenceGroup, step: Step) -> None:
        super()._recompute(victim, step)
        self.waiting.popleft()


# admission and swap-in


@mutant("S18", "L1")
class AdmitsNobody(Scheduler):
    """nobody is ever admitted"""

    def _admit(self, step: Step) -> None:
        pass


@mutant("S10", "M5")
class AdmitsWithoutTokens(Scheduler):
    """admission does not ask whether tokens are left"""

    def _admit(self, step: Step) -> None:
        super()._admit(step)
        if self.waiting and not step.tokens and self.config.enable_chunked_prefill:
            group = self.waiting[0]
            if self.blocks.cover(group) <= self.blocks.gpu_free and self._sequences() + group.live <= self.config.seqs:
                self.blocks.admit(group)
                step.note("admit", group, group.held)
                step.serve(group, 0)
                group.status = Status.RUNNING
                self.running.append(self.waiting.popleft())


@mutant("S11", "M3", "Q4")
class ChunkIsHalved(SequenceGroup):
    """a prefill takes half of what it could, so that newcomers get the rest"""

    __slots__ = ()

    def piece(self, budget: int) -> int:
        whole = super().piece(budget)
        return whole if self.is_decode or whole < 2 else whole // 2


@mutant("S7", "Q2", "L4")
class SmallestFirst(Scheduler):
    """the shortest prompt is admitted first"""

    def _admit(self, step: Step) -> None:
        self.waiting = deque(sorted(self.waiting, key=lambda group: group.known))
        super()._admit(step)


@mutant("S16")
class IgnoresWatermark(Scheduler):
    """admission ignores the watermark"""

    def _admit_head(self, step: Step) -> bool:
        others, self.running = self.running, deque()
        owed = sum(group.live for group in others)
        if owed + self.waiting[0].live > self.config.seqs:
            self.running = others
            return False
        went_on = super()._admit_head(step)
        others.extend(self.running)
        self.running = others
        return went_on


@mutant("S5s")
class SwappedAreNotCounted(Scheduler):
    """admission counts one sequence a group, not its branches"""

    def _sequences(self) -> int:
        return len(self.running)


@mutant("S5")
class ChunkIgnoresBudget(SequenceGroup):
    """a prefill takes its whole deficit whatever the budget"""

    __slots__ = ()

    def piece(self, budget: int) -> int:
        return self.deficit


@mutant("S10", "Q5")
class ChunkTakesLastToken(SequenceGroup):
    """a piece of a rebuild takes some branch's last token"""

    __slots__ = ()

    def piece(self, budget: int) -> int:
        return min(budget, self.deficit)


@mutant("Q3")
class RefusesNothing(Scheduler):
    """requests that can never finish alone are accepted"""

    def _fit(self, group: SequenceGroup) -> int:
        return group.max_tokens


# the plan


@mutant("S10r")
class RowsBeginAtZero(SequenceGroup):
    """every piece of a prompt is written as if it were the first"""

    __slots__ = ()

    def rows(self, tokens: int) -> Iterator[tuple[int, int, int]]:
        for index, start, end in super().rows(tokens):
            yield index, 0, end - start


@mutant("S12r")
class DrawsEveryChunk(Scheduler):
    """a piece of a prompt that is not the last draws a token"""

    def _close(self, step: Step) -> None:
        super()._close(step)
        step.plan.scheduled = [row._replace(draws=row.draws or (row.branch,)) for row in step.plan.scheduled]


@mutant("S21")
class CountsDecodesAsPrefill(Scheduler):
    """decodes are counted as prefill tokens"""

    def _close(self, step: Step) -> None:
        super()._close(step)
        step.plan.num_prefill_tokens += step.plan.num_decode_tokens
        step.plan.num_decode_tokens = 0


@mutant("M4")
class TokensNotRecorded(Scheduler):
    """the groups do not carry the tokens they were given"""

    def _close(self, step: Step) -> None:
        super()._close(step)
        for group, _ in step.plan.groups:
            group.tokens = 0


# update


@mutant("N1", "Q1")
class FinishedStay(Scheduler):
    """a finished group is taken out of the queue but not out of the books"""

    def _leave(self, group: SequenceGroup, status: Status) -> None:
        super()._leave(group, status)
        if status is Status.FINISHED:
            self.groups[group.request_id] = group


@mutant("Q6", "L2")
class OneTokenTooMany(Scheduler):
    """max_tokens is tested one token late"""

    def _sample(self, group: SequenceGroup, stopped: Any) -> None:
        group.max_tokens += 1
        super()._sample(group, stopped)
        group.max_tokens -= 1


@mutant("S12")
class SamplesEveryChunk(Scheduler):
    """a prompt in pieces samples after each of them"""

    def update(self, plan: Any, stopped: Any = (), failed: Any = ()) -> list[SequenceGroup]:
        for group, tokens in plan.groups:
            group.deficit = tokens
        return super().update(plan, stopped, failed)


@mutant("N3")
class FinishedBranchReturns(Scheduler):
    """after a branch stopped, another number goes on in its place"""

    def _sample(self, group: SequenceGroup, stopped: Any) -> None:
        alone = group.forked and group.live == 1 and group.n > 1
        super()._sample(group, stopped)
        if alone and group.branches == [0]:
            group.branches[0] = 1
            group.tables[0], group.tables[1] = group.tables[1], group.tables[0]


@mutant("N2", "Q2")
class UpdateRotates(Scheduler):
    """update moves the head of running to its end"""

    def update(self, plan: Any, stopped: Any = (), failed: Any = ()) -> list[SequenceGroup]:
        gone = super().update(plan, stopped, failed)
        self.running.rotate(-1)
        return gone


@mutant("Q9")
class TokensStay(Scheduler):
    """a served group's tokens are not cleared"""

    def update(self, plan: Any, stopped: Any = (), failed: Any = ()) -> list[SequenceGroup]:
        gone = super().update(plan, stopped, failed)
        for group, tokens in plan.groups:
            group.tokens = tokens
        return gone


@mutant("Q5b")
class StoppedStayListed(Scheduler):
    """a branch that stopped is still listed"""

    def _sample(self, group: SequenceGroup, stopped: Any) -> None:
        branches = list(range(group.n)) if not group.forked else group.branches
        super()._sample(group, stopped)
        if group.live < len(branches):
            group.branches = branches


@mutant("Q8")
class SharesAllOfThePrompt(Scheduler):
    """the partly filled last prompt block counts as shared for good"""

    def add(self, group: SequenceGroup) -> SequenceGroup:
        super().add(group)
        group.shared_tokens = group.prompt_len
        return group


# blocks


@mutant("B3")
class LeaksAtFinish(BlockManager):
    """a finished branch keeps its last block"""

    __slots__ = ()

    def finish_branch(self, group: SequenceGroup, branch: int) -> None:
        group.tables[branch] = group.tables[branch][:-1]
        super().finish_branch(group, branch)


@mutant("M1", "B4", "B6")
class NeedsOneLess(BlockManager):
    """a decode's copy of the shared last block is not counted or made"""

    __slots__ = ()

    def _part_tail(self, group: SequenceGroup) -> list[tuple[int, int]]:
        return []


@mutant("B7", "S9")
class ForgetsCopies(BlockManager):
    """copies are made in the tables and not listed"""

    __slots__ = ()

    def _part_tail(self, group: SequenceGroup) -> list[tuple[int, int]]:
        super()._part_tail(group)
        return []


@mutant("M2", "B4")
class SwapLosesSharing(BlockManager):
    """swap-out moves a shared block once for each branch"""

    __slots__ = ()

    def swap_out(self, group: SequenceGroup) -> list[tuple[int, int]]:
        moves = []
        tables: list[list[int]] = [[] for _ in group.tables]
        for branch, computed in zip(group.branches, group.computed(), strict=True):
            for block in group.tables[branch][: cdiv(computed, self.block_size)]:
                tables[branch].append(self.cpu.take())
                moves.append((block, tables[branch][-1]))
        self._release(group, self.gpu)
        group.tables = tables
        group.held = len(moves)
        return moves


@mutant("B4", "B4t")
class SwapsReservedToo(BlockManager):
    """swap-out takes CPU blocks for reserved tokens too"""

    __slots__ = ()

    def swap_out(self, group: SequenceGroup) -> list[tuple[int, int]]:
        deficit, group.deficit = group.deficit, 0
        moves = super().swap_out(group)
        group.deficit = deficit
        return moves


@mutant("B4", "M1")
class CoversOneBranch(BlockManager):
    """a group with several branches asks for one branch's blocks"""

    __slots__ = ()

    def cover(self, group: SequenceGroup) -> int:
        return cdiv(group.known, self.block_size)


@mutant("S9")
class TablesReversed(BlockManager):
    """swap-in gives the blocks back in reverse order"""

    __slots__ = ()

    def swap_in(self, group: SequenceGroup) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        moves, copies = super().swap_in(group)
        for branch in group.branches:
            group.tables[branch].reverse()
        return moves, copies


@mutant("B5t", "B1")
class SharesAcrossGroups(BlockManager):
    """a newcomer's first block is the one that another group was just given"""

    __slots__ = ()

    def admit(self, group: SequenceGroup) -> None:
        foreign = next((block for block, refs in enumerate(self.gpu.refs) if refs), None)
        super().admit(group)
        if foreign is not None:
            table = group.tables[group.branches[0]]
            self.gpu.drop(table[0])
            self.gpu.share(foreign)
            table[0] = foreign


@mutant("Q8t")
class TailStaysShared(BlockManager):
    """after copy-on-write the last prompt block still counts as shared"""

    __slots__ = ()

    def _part_tail(self, group: SequenceGroup) -> list[tuple[int, int]]:
        shared = group.tail_shared
        copies = super()._part_tail(group)
        group.tail_shared = shared
        return copies


@mutant("B5")
class WaitingStillHold(BlockManager):
    """a group that gave its blocks back still counts them"""

    __slots__ = ()

    def drop_gpu(self, group: SequenceGroup) -> None:
        held = group.held
        super().drop_gpu(group)
        group.held = held


@mutant("B2", "B2g", "B4t")
class CountsSharedTwice(BlockManager):
    """a shared block counts once for each branch, on both devices"""

    __slots__ = ()

    def fork(self, group: SequenceGroup) -> None:
        super().fork(group)
        group.held *= group.n

    def swap_out(self, group: SequenceGroup) -> list[tuple[int, int]]:
        moves = super().swap_out(group)
        group.held = sum(len(table) for table in group.tables)
        return moves


# the calendar of decodes


class _OneBeatLate(DecodeCalendar):
    __slots__ = ()

    def file(self, group: SequenceGroup, beats: int) -> None:
        super().file(group, beats + 1)


@mutant("Q10")
class DueOneBeatLate(Scheduler):
    """a decode is filed under the beat after the one at which it needs blocks"""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.calendar = _OneBeatLate()
