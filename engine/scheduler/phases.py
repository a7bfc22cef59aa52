"""The phases of a step: each takes groups from one queue in order of seniority and stops at the first it cannot serve.

Guarantees: queues stay in order of seniority (law Q2); whoever is served in a step is never preempted in it (S6), since
victims come from `rest`, the running groups not served yet; lack of CPU room is an outcome, never an error (S8).
Every loop body is one method that returns whether to go on, so that it can be proved by itself.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from engine.scheduler import contracts
from engine.scheduler.blocks import BlockCounts
from engine.scheduler.calendar import DecodeCalendar
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.plan import Action, BlockPair, Plan, PreemptionMode
from engine.scheduler.sequence import SequenceGroup, Status
from spec.logic import Int


class Step:
    """What one step has used up and decided so far.

    tokens: token budget left.  rest: running groups that the decode phase has not served.
    swapped_out: the moves of each group swapped out in this step, so that a demotion can take them back.
    """

    __slots__ = ("plan", "rest", "swapped_out", "tokens")

    def __init__(self, plan: Plan, tokens: Int) -> None:
        self.plan = plan
        self.tokens = tokens
        self.rest: deque[SequenceGroup] = deque()
        self.swapped_out: dict[SequenceGroup, list[BlockPair]] = {}

    def serve(self, group: SequenceGroup, tokens: Int) -> None:
        """Give the group some of the budget."""
        group.tokens = tokens
        self.tokens -= tokens
        self.plan.served.append((group, tokens))

    def serve_all(self, decodes: list[SequenceGroup], tokens: Int) -> None:
        """Give every decode a token for each live branch, `tokens` in all."""
        for group in decodes:
            group.tokens = group.live
        self.tokens -= tokens
        self.plan.decodes = decodes

    def preempt(self, victim: SequenceGroup, mode: PreemptionMode) -> None:
        """Log that the group gives its GPU blocks back."""
        victim.num_preemptions += 1
        self.plan.preempted.append(victim)
        self.note("preempt", victim, victim.held, mode.value)

    def note(self, verb: str, group: SequenceGroup, blocks: Int, detail: str = "") -> None:
        """Log an action of the spec."""
        self.plan.log.append(Action(verb, group.request_id, blocks, detail))


class Phases:
    """The loops over the three queues; `Scheduler` puts them in order."""

    config: SchedulerConfig
    blocks: BlockCounts
    calendar: DecodeCalendar
    running: deque[SequenceGroup]
    swapped: deque[SequenceGroup]
    waiting: deque[SequenceGroup]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """A policy that judges decodes by a rule of its own is asked about each of them: no short cut."""
        super().__init_subclass__(**kwargs)
        if "_decode_head" in vars(cls) and "_all_grow" not in vars(cls):
            cls._all_grow = lambda self, step: False  # type: ignore[method-assign]

    # decodes

    def _decodes(self, step: Step) -> None:
        """Every decode gets a token for each live branch, most senior first; memory comes from the most junior."""
        step.plan.beat = True
        if self._all_grow(step):
            return
        step.rest, self.running = self.running, deque()
        while step.rest and self._decode_head(step):
            pass
        self.running.extend(step.rest)
        step.rest = deque()

    @contracts.all_grow
    def _all_grow(self, step: Step) -> bool:
        """What the loop over all decodes comes to if nobody must be preempted, with a look only at those that grow."""
        due = self.calendar.due()
        needs = [self.blocks.need(group) for group in due]
        if sum(needs) > self.blocks.gpu_free:
            return False
        for group, need in zip(due, needs, strict=True):
            self._grow(group, need, step)
        step.serve_all(self.calendar.roll(self.running), self.calendar.branches)
        return True

    @contracts.decode_head
    def _decode_head(self, step: Step) -> bool:
        group = step.rest[0]
        if not group.is_decode:
            return False
        need = self.blocks.need(group)
        while need > self.blocks.gpu_free:
            victim = step.rest.pop()
            self._preempt(victim, step)
            if victim is group:
                return False
        if need > 0:
            self._grow(group, need, step)
        step.serve(group, group.live)
        self.running.append(step.rest.popleft())
        return True

    def _grow(self, group: SequenceGroup, need: Int, step: Step) -> None:
        step.plan.blocks_to_copy += self.blocks.grow(group)
        step.note("grow", group, need)
        self.calendar.file(group, self.blocks.beats(group))

    # running prefills

    @contracts.catch_up
    def _catch_up(self, step: Step) -> None:
        """The running prefill, of which there is at most one, the most junior (law Q4), gets what budget is left."""
        if self.running and not self.running[-1].is_decode:
            group = self.running[-1]
            step.serve(group, group.piece(step.tokens))

    # swap-in

    def _swap_in(self, step: Step) -> None:
        """Bring swapped groups back, most senior first, while blocks, tokens and sequence slots allow."""
        while self.swapped and self._swap_in_head(step):
            pass

    @contracts.swap_in_head
    def _swap_in_head(self, step: Step) -> bool:
        group = self.swapped[0]
        tokens = group.piece(step.tokens)
        cover = self.blocks.cover(group)
        if tokens <= 0 or cover > self.blocks.gpu_free or self._sequences() + group.live > self.config.seqs:
            return False
        moves, copies = self.blocks.swap_in(group)
        step.plan.blocks_to_swap_in += moves
        step.plan.blocks_to_copy += copies
        step.note("swap_in", group, cover)
        step.serve(group, tokens)
        group.status = Status.RUNNING
        self.running.append(self.swapped.popleft())
        return True

    # admission

    def _admit(self, step: Step) -> None:
        """Start waiting groups, most senior first, while blocks less watermark, tokens and sequence slots allow."""
        while self.waiting and self._admit_head(step):
            pass

    @contracts.admit_head
    def _admit_head(self, step: Step) -> bool:
        group = self.waiting[0]
        tokens = group.piece(step.tokens)
        if not self.config.enable_chunked_prefill and not group.forked and tokens < group.deficit:
            return False  # prefill-first runs a prompt whole; only rebuilds come in pieces
        cover = self.blocks.cover(group)
        watermark = self.config.watermark_blocks if self.running else 0
        if tokens <= 0 or cover + watermark > self.blocks.gpu_free:
            return False
        if self._sequences() + group.live > self.config.seqs:
            return False
        self.blocks.admit(group)
        step.note("admit", group, cover)
        step.serve(group, tokens)
        group.status = Status.RUNNING
        self.running.append(self.waiting.popleft())
        return True

    def _sequences(self) -> Int:
        """Live sequences of running, all n of a group that has not forked yet."""
        return sum(group.live for group in self.running)

    # preemption

    @contracts.preempt
    def _preempt(self, victim: SequenceGroup, step: Step) -> None:
        """Take the GPU blocks of the most junior running group.

        Recompute is open only while nothing is swapped: else the victim would fall behind groups junior to it.
        """
        mode = PreemptionMode.SWAP if self.swapped else victim.prefers(self.config.mode)
        if mode is PreemptionMode.SWAP and not self._make_room(self.blocks.swap_size(victim), step):
            mode = PreemptionMode.RECOMPUTE
        if mode is PreemptionMode.RECOMPUTE:
            self._recompute(victim, step)
        else:
            self._swap_out(victim, step)

    @contracts.swap_out
    def _swap_out(self, victim: SequenceGroup, step: Step) -> None:
        step.preempt(victim, PreemptionMode.SWAP)
        self.calendar.strike(victim)
        step.swapped_out[victim] = self.blocks.swap_out(victim)
        step.note("swap_out", victim, victim.held)
        victim.status = Status.SWAPPED
        self.swapped.appendleft(victim)

    @contracts.recompute
    def _recompute(self, victim: SequenceGroup, step: Step) -> None:
        step.preempt(victim, PreemptionMode.RECOMPUTE)
        self.calendar.strike(victim)
        self.blocks.drop_gpu(victim)
        victim.forget()
        victim.status = Status.WAITING
        self.waiting.appendleft(victim)

    @contracts.make_room
    def _make_room(self, size: Int, step: Step) -> bool:
        """Demote the most junior swapped groups until `size` CPU blocks are free; False if that takes more than all."""
        while self.swapped and size > self.blocks.cpu_free:
            self._demote(step)
        return bool(size <= self.blocks.cpu_free)

    @contracts.demote
    def _demote(self, step: Step) -> None:
        """Drop the KV of the most junior swapped group; a swap-out of this very step is taken back."""
        group = self.swapped.pop()
        step.note("demote", group, group.held)
        step.swapped_out.pop(group, None)
        self.blocks.drop_cpu(group)
        group.forget()
        group.status = Status.WAITING
        self.waiting.appendleft(group)
