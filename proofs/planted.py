"""More planted faults: what peers did wrong, and the places that `proofs.mutants` leaves alone.

add and refusal, abort and fail, the configuration, copy-on-write and the swap maps, the lists and rows of a plan.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from engine.scheduler import Plan, PreemptionMode, Scheduler, SchedulerConfig, SequenceGroup, Status
from engine.scheduler.blocks import BlockManager
from engine.scheduler.calendar import DecodeCalendar
from engine.scheduler.phases import Step
from proofs.mutants import Mutant
from spec.logic import cdiv

Pairs = list[tuple[int, int]]


@dataclass(frozen=True)
class Unchecked(Mutant):
    """A fault of the configuration: a value that the start-up check refuses, let through."""

    values: dict[str, Any] = field(default_factory=dict)

    def build(self, config: SchedulerConfig) -> Scheduler:
        let_through = copy.copy(config)
        for name, value in self.values.items():
            object.__setattr__(let_through, name, value)
        return super().build(let_through)


PLANTED: list[Mutant] = [
    Unchecked(
        "MoreSequencesThanTokens",
        "start-up accepts a token budget below max_num_seqs",
        ("S5",),
        values={"max_num_batched_tokens": 1},
    ),
    Unchecked(
        "PromptsLongerThanTheBudget",
        "start-up accepts, with whole prompts first, a token budget below max_model_len",
        ("S18",),
        values={"max_num_batched_tokens": 2, "enable_chunked_prefill": False, "max_num_seqs": 2},
    ),
]


def planted(*breaks: str) -> Callable[[type], type]:
    """Register the class under its name, as `proofs.mutants.mutant` does."""

    def register(kind: type) -> type:
        bases = ((Scheduler, "scheduler"), (BlockManager, "blocks"), (SequenceGroup, "group"))
        role = next(role for base, role in bases if issubclass(kind, base))
        parts: dict[str, Any] = {role: kind}
        PLANTED.append(Mutant(kind.__name__, " ".join((kind.__doc__ or "").split()), breaks, **parts))
        return kind

    return register


# add and refusal


@planted("Q3")
class LimitTestedOnTheChunk(Scheduler):
    """max_model_len is compared with the first piece of the prompt, not with the prompt"""

    def _fit(self, group: SequenceGroup) -> int:
        prompt, group.prompt_len = group.prompt_len, min(group.prompt_len, 1)
        try:
            return max(super()._fit(group), group.max_tokens)
        finally:
            group.prompt_len = prompt


@planted("Q3")
class PeakOfOneBranch(BlockManager):
    """the peak at add counts one branch"""

    __slots__ = ()

    def peak(self, prompt_len: int, n: int, max_tokens: int) -> int:
        return super().peak(prompt_len, 1, max_tokens)


@planted("Q2")
class SeniorityByNumberInside(Scheduler):
    """a newcomer's seniority is the number of unfinished groups, so two groups can have the same"""

    def add(self, group: SequenceGroup) -> SequenceGroup:
        super().add(group)
        group.arrival = len(self.groups) - 1
        if self.running and not self.running[0].is_decode:
            group.arrival -= 1
        return group


@planted("Q2")
class NewcomerGoesToTheHead(Scheduler):
    """a newcomer is put in front of those who wait"""

    def add(self, group: SequenceGroup) -> SequenceGroup:
        super().add(group)
        self.waiting.rotate(1)
        return group


@planted("Q8")
class SharedPartRoundedUp(Scheduler):
    """the partly filled prompt block counts as full"""

    def add(self, group: SequenceGroup) -> SequenceGroup:
        super().add(group)
        group.shared_blocks = cdiv(group.prompt_len, self.config.block_size)
        return group


@planted("S18", "L1")
class WatermarkBindsWhenIdle(Scheduler):
    """the watermark binds although nothing runs: a large group waits for ever"""

    def _admit_head(self, step: Step) -> bool:
        group = self.waiting[0]
        if not self.running and self.blocks.cover(group) + 2 > self.blocks.gpu_free:
            return False
        return super()._admit_head(step)


# limits


@planted("S10")
class SwapInCostsOneToken(Scheduler):
    """a swapped-in group is charged and given one token, whatever its width"""

    def _swap_in_head(self, step: Step) -> bool:
        count = len(step.plan.served)
        went_on = super()._swap_in_head(step)
        if len(step.plan.served) > count:
            group, tokens = step.plan.served[-1]
            group.tokens = 1
            step.plan.served[-1] = (group, 1)
            step.tokens += tokens - 1
        return went_on


@planted("S5s")
class AdmissionCountsOnlyItself(Scheduler):
    """admission compares the newcomer's branches alone with max_num_seqs"""

    def _admit_head(self, step: Step) -> bool:
        self._sequences = lambda: 0  # type: ignore[method-assign]
        try:
            return super()._admit_head(step)
        finally:
            del self._sequences


@planted("S11w")
class WaitersAreCounted(Scheduler):
    """sequences that wait are charged to those that run"""

    def _sequences(self) -> int:
        return super()._sequences() + sum(group.live for group in list(self.waiting)[1:])


@planted("S11s")
class NeedsTheWatermarkToReturn(Scheduler):
    """the watermark binds swap-in too"""

    def _swap_in_head(self, step: Step) -> bool:
        if self.blocks.cover(self.swapped[0]) + 1 > self.blocks.gpu_free:
            return False
        return super()._swap_in_head(step)


@planted("L1", "S18")
class WholeOrNotAtAll(Scheduler):
    """a half-prefilled group returns only if all it lacks fits the budget: the peer's hang"""

    def _swap_in_head(self, step: Step) -> bool:
        group = self.swapped[0]
        if group.deficit > step.tokens:
            return False
        return super()._swap_in_head(step)


@planted("L1", "S13")
class ChunkAsksForABlock(Scheduler):
    """a prefill in pieces preempts for a block that it does not need: the peer's livelock"""

    def _catch_up(self, step: Step) -> None:
        if self.running and not self.running[-1].is_decode and not self.blocks.gpu_free:
            self._preempt(self.running.pop(), step)
        super()._catch_up(step)


@planted("S17")
class DecodesAlwaysOwed(Scheduler):
    """prefill-first: whom the last step left out is not remembered; whoever decodes is owed nothing"""

    def _prefills_first(self, step: Step) -> None:
        owed = self.decodes_owed
        super()._prefills_first(step)
        self.decodes_owed = self.decodes_owed and not owed and not self.waiting


@planted("S17")
class DecodesOwedForEver(Scheduler):
    """prefill-first: once owed, always owed; newcomers wait until nobody decodes"""

    def _prefills_first(self, step: Step) -> None:
        owed = self.decodes_owed
        super()._prefills_first(step)
        self.decodes_owed = bool(self.running) and (owed or self.decodes_owed)


# preemption


@planted("Q2")
class SwapsToTheEnd(Scheduler):
    """a victim goes behind those swapped before it"""

    def _swap_out(self, victim: SequenceGroup, step: Step) -> None:
        super()._swap_out(victim, step)
        self.swapped.append(self.swapped.popleft())


@planted("Q2")
class DemotesTheMostSenior(Scheduler):
    """making room drops the most senior swapped group"""

    def _demote(self, step: Step) -> None:
        self.swapped.rotate(-1)
        super()._demote(step)


@planted("S8")
class RoomUndercounts(BlockManager):
    """the room check of a swap-out counts one branch"""

    __slots__ = ()

    def swap_size(self, group: SequenceGroup) -> int:
        return cdiv(group.computed()[0], self.block_size)


@planted("S8")
class SiblingGone(SequenceGroup):
    """after a sibling ended, the tokens with KV are listed for all branches: preemption fails"""

    __slots__ = ()

    def computed(self) -> list[int]:
        done = super().computed()
        return done + done[:1] * (self.n - self.live) if self.forked else done


@planted("Q7", "S20")
class ForgetsOneBranch(SequenceGroup):
    """recompute of several branches counts the tail of one"""

    __slots__ = ()

    def forget(self) -> None:
        super().forget()
        self.deficit = max(self.known, self.live)


@planted("Q7")
class TailStaysSharedAfterRecompute(SequenceGroup):
    """recompute forgets the blocks but not that the last prompt block was shared"""

    __slots__ = ()

    def forget(self) -> None:
        shared = self.tail_shared
        super().forget()
        self.tail_shared = shared


@planted("S15")
class WideGroupsRecompute(SequenceGroup):
    """several branches are recomputed, one is swapped"""

    __slots__ = ()

    def prefers(self, mode: PreemptionMode | None) -> PreemptionMode:
        return PreemptionMode.SWAP if self.live == 1 else PreemptionMode.RECOMPUTE


# abort and fail


@planted("B1", "B3")
class SwappedNeverFreed(Scheduler):
    """a swapped group that is aborted keeps its CPU blocks"""

    def _leave(self, group: SequenceGroup, status: Status) -> None:
        if group.status is Status.SWAPPED:
            self.swapped.remove(group)
            self.swapped.appendleft(SequenceGroup(group.request_id, 1))  # something with no blocks to give back
            self.swapped[0].status = group.status
            self.groups[group.request_id] = group = self.swapped[0]
        super()._leave(group, status)


@planted("S8")
class AbortInMidStepAtOnce(Scheduler):
    """an abort between schedule and update takes effect at once, under the hands of the executor"""

    def abort(self, request_id: str) -> bool:
        plan, self._plan = self._plan, None
        try:
            return super().abort(request_id)
        finally:
            self._plan = plan


@planted("Q1")
class AbortsAgain(Scheduler):
    """what was aborted in mid-step is not taken off the list"""

    def _settle(self) -> list[SequenceGroup]:
        aborting = list(self._aborting)
        departed = super()._settle()
        self._aborting = aborting
        return departed


@planted("Q2")
class FailsFromTheHead(Scheduler):
    """after a failed step those who run are put back in the wrong order"""

    def fail(self, plan: Plan, request_ids: Any = None) -> list[SequenceGroup]:
        self.running.reverse()
        return super().fail(plan, request_ids)


@planted("Q9")
class FailKeepsTokens(Scheduler):
    """after a failed step groups still carry the tokens that they were given"""

    def fail(self, plan: Plan, request_ids: Any = None) -> list[SequenceGroup]:
        departed = super().fail(plan, ())
        for group, tokens in plan.groups:
            group.tokens = tokens
        return departed


@planted("Q1")
class FailedKeepTheirPlace(Scheduler):
    """a group whose sampling raised is struck from the books but stays in its queue"""

    def _leave(self, group: SequenceGroup, status: Status) -> None:
        if status is Status.FAILED:
            del self.groups[group.request_id]
            self._note("fail", group)
        else:
            super()._leave(group, status)


# blocks


@planted("S8")
class DoubleFree(BlockManager):
    """a finished branch's blocks are dropped twice"""

    __slots__ = ()

    def finish_branch(self, group: SequenceGroup, branch: int) -> None:
        table = list(group.tables[branch])
        super().finish_branch(group, branch)
        for block in table:
            self.gpu.drop(block)


@planted("B3")
class FreedTooEarly(BlockManager):
    """the first of several owners to leave frees a shared block for all"""

    __slots__ = ()

    def finish_branch(self, group: SequenceGroup, branch: int) -> None:
        table = list(group.tables[branch])
        super().finish_branch(group, branch)
        for block in table[-1:]:
            if self.gpu.refs[block]:
                self.gpu.refs[block] = 0
                self.gpu.free.append(block)


@planted("S9")
class CopiesOnceTooOften(BlockManager):
    """copy-on-write lists a copy for the last holder too, which writes in place"""

    __slots__ = ()

    def _part_tail(self, group: SequenceGroup) -> Pairs:
        copies = super()._part_tail(group)
        return copies + copies[-1:]


@planted("S9")
class CopiesTheWrongWay(BlockManager):
    """copies are listed from the target to the source"""

    __slots__ = ()

    def _part_tail(self, group: SequenceGroup) -> Pairs:
        return [(b, a) for a, b in super()._part_tail(group)]


@planted("S8")
class ReturnLosesSharing(BlockManager):
    """swap-in gives each branch blocks of its own, more than were announced"""

    __slots__ = ()

    def swap_in(self, group: SequenceGroup) -> tuple[Pairs, Pairs]:
        moves, copies = super().swap_in(group)
        first = group.tables[group.branches[0]]
        for branch in group.branches[1:]:
            for i, block in enumerate(group.tables[branch]):
                if block in first:
                    group.tables[branch][i] = self.gpu.take()
                    self.gpu.drop(block)
                    moves.append((moves[0][0], group.tables[branch][i]))
        return moves, copies


@planted("S9", "B7")
class MissesAPair(BlockManager):
    """the list of a swap-out lacks its last pair"""

    __slots__ = ()

    def swap_out(self, group: SequenceGroup) -> Pairs:
        return super().swap_out(group)[:-1]


@planted("S9")
class PairsTurnedRound(BlockManager):
    """the list of a swap-in names the GPU block first"""

    __slots__ = ()

    def swap_in(self, group: SequenceGroup) -> tuple[Pairs, Pairs]:
        moves, copies = super().swap_in(group)
        return [(b, a) for a, b in moves], copies


@planted("B4")
class GrowsByOneMore(BlockManager):
    """a decode takes one block more than it needs"""

    __slots__ = ()

    def cover(self, group: SequenceGroup) -> int:
        return super().cover(group) + (1 if group.forked and group.known % self.block_size == 0 else 0)


@planted("B6")
class TailsOfARebuildInCommon(BlockManager):
    """the branches of a rebuild share the block that each writes its own tail to"""

    __slots__ = ()

    def admit(self, group: SequenceGroup) -> None:
        super().admit(group)
        for branch in group.branches[1:]:
            self.gpu.drop(group.tables[branch][-1])
            group.tables[branch][-1] = group.tables[group.branches[0]][-1]
            self.gpu.share(group.tables[branch][-1])


@planted("S9")
class ForkCopiesTheTail(BlockManager):
    """the fork gives the second branch a last block of its own, uncopied"""

    __slots__ = ()

    def fork(self, group: SequenceGroup) -> None:
        super().fork(group)
        if group.n > 1 and self.gpu.free:
            table = group.tables[1]
            self.gpu.drop(table[-1])
            table[-1] = self.gpu.take()
            group.held += 1


# the plan


@planted("S9")
class ListsOnlyTheLastReturn(Scheduler):
    """the swap-in list keeps the moves of the last group only"""

    def _swap_in_head(self, step: Step) -> bool:
        before, step.plan.blocks_to_swap_in = step.plan.blocks_to_swap_in, []
        went_on = super()._swap_in_head(step)
        if not step.plan.blocks_to_swap_in:
            step.plan.blocks_to_swap_in = before
        return went_on


@planted("S10r")
class SlotsOfTheFirstBlock(Scheduler):
    """slots are counted from the first block of the table, as if its blocks lay side by side"""

    def _write_rows(self, group: SequenceGroup, tokens: int, plan: Plan) -> None:
        count = len(plan.scheduled)
        super()._write_rows(group, tokens, plan)
        size = self.config.block_size
        for i, row in enumerate(plan.scheduled[count:], count):
            slots = [row.block_table[0] * size + t for t in range(row.start, row.end)]
            plan.scheduled[i] = row._replace(slots=slots)


@planted("S10r")
class SharedComputedByEach(SequenceGroup):
    """in a rebuild every branch computes the shared prompt blocks"""

    __slots__ = ()

    def rows(self, tokens: int) -> Iterator[tuple[int, int, int]]:
        for index, start, end in super().rows(tokens):
            yield index, 0 if index and start == self.shared_tokens else start, end


@planted("S12r")
class OnlyOneDraws(Scheduler):
    """at the end of the first run only branch 0 draws"""

    def _write_rows(self, group: SequenceGroup, tokens: int, plan: Plan) -> None:
        super()._write_rows(group, tokens, plan)
        row = plan.scheduled[-1]
        plan.scheduled[-1] = row._replace(draws=row.draws[:1])


@planted("S10")
class ServesTwice(Scheduler):
    """the running prefill is served a second time with what is left"""

    def _catch_up(self, step: Step) -> None:
        super()._catch_up(step)
        super()._catch_up(step)


# update


@planted("N1")
class FinishesWithoutAWord(Scheduler):
    """a group that ends leaves without an entry in the log"""

    def _leave(self, group: SequenceGroup, status: Status) -> None:
        count = len(self._log)
        super()._leave(group, status)
        del self._log[count:]


@planted("L2")
class GrowsWithoutComputing(Scheduler):
    """an aborted neighbour's tokens are taken for computed: the deficit is set back"""

    def update(self, plan: Plan, stopped: Any = (), failed: Any = ()) -> list[SequenceGroup]:
        gone = super().update(plan, stopped, failed)
        for group in self.running:
            if not group.forked and group.deficit < group.known:
                group.deficit = group.known
        return gone


@planted("Q5")
class SamplesForOneBranch(Scheduler):
    """after a sample the group lacks one token, however many branches it has"""

    def _sample(self, group: SequenceGroup, stopped: Any) -> None:
        super()._sample(group, stopped)
        group.deficit = 1


@planted("B4", "M2")
class TailForgottenAtTheFork(Scheduler):
    """after the fork the partly filled prompt block is not known to be shared"""

    def _fork(self, group: SequenceGroup) -> None:
        super()._fork(group)
        group.tail_shared = False


@planted("S9")
class CopiesOfTheLastReturn(Scheduler):
    """a swap-in's copies replace those listed before it in the step"""

    def _swap_in_head(self, step: Step) -> bool:
        before = list(step.plan.blocks_to_copy)
        went_on = super()._swap_in_head(step)
        if len(step.plan.blocks_to_copy) > len(before) > 0:
            step.plan.blocks_to_copy = step.plan.blocks_to_copy[len(before) :]
        return went_on


class _Chunked:
    """A configuration that says it is chunked."""

    enable_chunked_prefill = True

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


@planted("S4p")
class PromptsInPieces(Scheduler):
    """prefill-first: a prompt that does not fit the budget left is begun all the same"""

    def _admit_head(self, step: Step) -> bool:
        config = self.config
        self.config: Any = _Chunked(config)
        try:
            return super()._admit_head(step)
        finally:
            self.config = config


# the calendar of decodes


class _NeverStruck(DecodeCalendar):
    __slots__ = ()

    def strike(self, group: SequenceGroup) -> None:
        pass


class _OldRoll(DecodeCalendar):
    __slots__ = ()

    def strike(self, group: SequenceGroup) -> None:
        roll = self._roll
        super().strike(group)
        self._roll = roll


@planted("Q10")
class DepartedStayFiled(Scheduler):
    """who is preempted or leaves stays in the calendar"""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.calendar = _NeverStruck()


@planted("Q10")
class DepartedStayOnTheRoll(Scheduler):
    """the list of decodes is not made anew when one leaves"""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.calendar = _OldRoll()


@planted("Q10")
class EndedBranchStaysFiled(Scheduler):
    """the calendar is not told that a branch ended"""

    def _sample(self, group: SequenceGroup, stopped: Any) -> None:
        filed = self.calendar.filed.get(group)
        super()._sample(group, stopped)
        if filed is not None and group in self.calendar.filed:
            live = filed[1]
            self.calendar.branches += live - group.live
            self.calendar.filed[group] = self.calendar.filed[group][0], live


@planted("Q10")
class RebuiltIsNotFiled(Scheduler):
    """a rebuild that comes in pieces to lack only its common sample is not filed as the decode that it has become"""

    def _conclude(self, group: SequenceGroup, tokens: Any, *outcome: Any) -> None:
        known = group.known
        super()._conclude(group, tokens, *outcome)
        if group.status is Status.RUNNING and group.known == known:
            self.calendar.strike(group)


@planted("S8")
class GrowsWithoutRoom(Scheduler):
    """the short cut of the decode phase does not compare what is needed with what is free"""

    def _all_grow(self, step: Step) -> bool:
        for group in self.calendar.due():
            self._grow(group, self.blocks.need(group), step)
        step.serve_all(self.calendar.roll(self.running), self.calendar.branches)
        return True


@planted("S4", "S17")
class ServesOnlyWhoGrows(Scheduler):
    """only the decodes that need blocks get their tokens"""

    def _all_grow(self, step: Step) -> bool:
        due = self.calendar.due()
        if not super()._all_grow(step):
            return False
        for group in step.plan.decodes:
            group.tokens = group.live if group in due else 0
        step.plan.decodes = [group for group in step.plan.decodes if group in due]
        return True
