"""Planted faults for the symbolic proofs: the production scheduler with one thing wrong, and the laws that say so.

Each comes with the smallest shape on which it shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.scheduler import Plan, PreemptionMode, Scheduler, SequenceGroup, Status
from engine.scheduler.phases import Step
from proofs.worlds import Shape
from spec.logic import Int


@dataclass(frozen=True)
class Fault:
    """A scheduler with a fault, the smallest shape that shows it, and the laws of which at least one must break."""

    policy: type[Scheduler]
    shape: Shape
    laws: frozenset[str]


class AdmitsWhileSwapped(Scheduler):
    """The reported fault: new prompts go ahead of swapped groups."""

    def _decodes_first(self, step: Step) -> None:
        self._decodes(step)
        self._catch_up(step)
        if not step.plan.preempted:
            self._swap_in(step)
            self._admit(step)


class SwapsOutIntoNothing(Scheduler):
    """A victim is swapped out whether or not the CPU has room."""

    def _make_room(self, size: Int, step: Step) -> bool:
        return True


class PreemptsTheMostSenior(Scheduler):
    """The victim is the wrong one."""

    def _decode_head(self, step: Step) -> bool:
        group = step.rest[0]
        if not group.is_decode:
            return False
        need = self.blocks.need(group)
        if need > self.blocks.gpu_free:
            self._preempt(step.rest.popleft(), step)
            return bool(step.rest)
        return super()._decode_head(step)


class GrowsOneBlockTooEarly(Scheduler):
    """Growth asks for a block that it does not need yet."""

    def _decode_head(self, step: Step) -> bool:
        group = step.rest[0]
        if not group.is_decode:
            return False
        need = self.blocks.need(group) + 1
        while need > self.blocks.gpu_free:
            victim = step.rest.pop()
            self._preempt(victim, step)
            if victim is group:
                return False
        if need > 1:
            self.blocks.grow(group)
            step.note("grow", group, need - 1)
        step.serve(group, group.live)
        self.running.append(step.rest.popleft())
        return True


class RecomputesBehindSwapped(Scheduler):
    """The preferred mode is taken though others are swapped: the victim falls behind its juniors."""

    def _preempt(self, victim: SequenceGroup, step: Step) -> None:
        mode = victim.prefers(self.config.mode)
        if mode is PreemptionMode.RECOMPUTE or not self._make_room(self.blocks.swap_size(victim), step):
            self._recompute(victim, step)
        else:
            self._swap_out(victim, step)


class NeverDemotes(Scheduler):
    """A full CPU ends in recompute at once: the older victim goes behind the younger swapped ones."""

    def _make_room(self, size: Int, step: Step) -> bool:
        return bool(size <= self.blocks.cpu_free)


class KeepsADemotedSwapOut(Scheduler):
    """A swap-out that was taken back stays in the plan."""

    def _demote(self, step: Step) -> None:
        kept = dict(step.swapped_out)
        super()._demote(step)
        step.swapped_out.update(kept)


class SwapsInForNothing(Scheduler):
    """Swap-in is not charged for its tokens."""

    def _swap_in_head(self, step: Step) -> bool:
        before = step.tokens
        done = super()._swap_in_head(step)
        step.tokens = before
        return done


class ForgetsTheSequenceLimit(Scheduler):
    """Admission does not look at max_num_seqs."""

    def _sequences(self) -> Int:
        return 0


class ServesNothingToTheLast(Scheduler):
    """The running prefill waits for an idle step: the head of all may starve."""

    def _catch_up(self, step: Step) -> None:
        if len(self.running) > 1:
            super()._catch_up(step)


class IgnoresTheWatermark(Scheduler):
    """Admission fills the pool to the last block."""

    def _admit_head(self, step: Step) -> bool:
        config = self.config
        self.config: Any = _Without(config)
        try:
            return super()._admit_head(step)
        finally:
            self.config = config


class _Without:
    """A configuration with no watermark."""

    watermark_blocks = 0

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


class OvertakesInWaiting(Scheduler):
    """When the head does not fit, the next one is tried."""

    def _admit(self, step: Step) -> None:
        super()._admit(step)
        if len(self.waiting) > 1:
            head = self.waiting.popleft()
            super()._admit(step)
            self.waiting.appendleft(head)


class LosesTheLastVictim(Scheduler):
    """A recomputed group is not put back into any queue."""

    def _recompute(self, victim: SequenceGroup, step: Step) -> None:
        super()._recompute(victim, step)
        self.waiting.popleft()


class OwesNoDecodes(Scheduler):
    """Prefill-first without the memory of whom it left out: newcomers may hold a stream up for ever."""

    def _prefills_first(self, step: Step) -> None:
        super()._prefills_first(step)
        self.decodes_owed = False


class FinishesTooLate(Scheduler):
    """One token more than max_tokens."""

    def _sample(self, group: SequenceGroup, stopped: Any) -> None:
        group.max_tokens += 1
        super()._sample(group, stopped)
        group.max_tokens -= 1


class CountsTokensTwice(Scheduler):
    """What was planned is taken off twice when it was not all."""

    def update(self, plan: Plan, stopped: Any = (), failed: Any = ()) -> list[SequenceGroup]:
        for group, tokens in plan.groups:
            if tokens < group.deficit:
                group.deficit -= 1
        return super().update(plan, stopped, failed)


class KeepsBlocksOfAFinishedBranch(Scheduler):
    """A finished branch's table is not dropped."""

    def _sample(self, group: SequenceGroup, stopped: Any) -> None:
        blocks, self.blocks = self.blocks, _KeepsBranches(self.blocks)
        try:
            super()._sample(group, stopped)
        finally:
            self.blocks = blocks


class _KeepsBranches:
    """Block counts whose finished branches free nothing."""

    def __init__(self, blocks: Any) -> None:
        self._blocks = blocks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._blocks, name)

    def finish_branch(self, group: SequenceGroup, branch: int) -> None:
        pass


class LeavesWithoutItsBlocks(Scheduler):
    """A group that ends keeps what it held."""

    def _leave(self, group: SequenceGroup, status: Status) -> None:
        if group.status is Status.RUNNING:
            self.running.remove(group)
            group.status = status
            del self.groups[group.request_id]
            self._departed.append(group)
            self._note(status.verb, group)
        else:
            super()._leave(group, status)


class ForgetsTheSharedTail(Scheduler):
    """After the fork nobody knows that the last prompt block is shared: no copy is made, no block asked for."""

    def _fork(self, group: SequenceGroup) -> None:
        super()._fork(group)
        group.tail_shared = False


def _fault(policy: type[Scheduler], shape: Shape, *laws: str) -> Fault:
    return Fault(policy, shape, frozenset(laws))


IN_SCHEDULE = [
    _fault(AdmitsWhileSwapped, Shape(0, 2, 1, forked=2), "S1"),
    _fault(SwapsOutIntoNothing, Shape(2, 0, 0, mode=PreemptionMode.SWAP, forked=2), "B2"),
    _fault(PreemptsTheMostSenior, Shape(2, 0, 0, forked=2), "S6", "Q2", "L1"),
    _fault(GrowsOneBlockTooEarly, Shape(2, 0, 0, forked=2), "S13"),
    _fault(RecomputesBehindSwapped, Shape(2, 1, 0, forked=3), "Q2"),
    _fault(NeverDemotes, Shape(2, 1, 0, forked=3), "Q2"),
    _fault(KeepsADemotedSwapOut, Shape(3, 0, 0, mode=PreemptionMode.SWAP, forked=3), "S9"),
    _fault(SwapsInForNothing, Shape(0, 1, 1, forked=1), "S5"),
    _fault(ForgetsTheSequenceLimit, Shape(1, 0, 1, forked=1), "S5s"),
    _fault(ServesNothingToTheLast, Shape(1, 0, 0), "L1", "S4", "S18"),
    _fault(IgnoresTheWatermark, Shape(1, 0, 1, forked=1), "S16"),
    _fault(OvertakesInWaiting, Shape(1, 0, 2, forked=1), "S7", "Q2"),
    _fault(LosesTheLastVictim, Shape(2, 0, 0, mode=PreemptionMode.RECOMPUTE, forked=2), "Q1"),
    _fault(OwesNoDecodes, Shape(1, 0, 1, chunked=False, forked=1), "S17", "L1p"),
]

_ONE = Shape(1, 0, 0, branches=((2, 2),), block_size=4)
IN_UPDATE = [
    _fault(FinishesTooLate, _ONE._replace(forked=1), "Q6"),
    _fault(CountsTokensTwice, _ONE, "S12"),
    _fault(KeepsBlocksOfAFinishedBranch, _ONE._replace(forked=1), "B4", "M2"),
    _fault(LeavesWithoutItsBlocks, _ONE._replace(forked=1), "B1"),
    _fault(ForgetsTheSharedTail, _ONE, "B4", "M2"),
]
