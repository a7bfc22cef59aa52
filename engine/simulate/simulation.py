"""The clock around the scheduler: requests arrive, a step is planned, it takes as long as its work costs.

Work is counted from what changes.  In a steady decode the KV that a step reads is the last step's and one token for
each branch, so such a step costs the simulation no loop over what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from engine.scheduler import Plan, RefusedError, Scheduler, SequenceGroup
from engine.simulate.cost import CostModel, Work, query_key_pairs
from engine.simulate.tally import ABORTED, CUT_OFF, STUCK, Tally
from engine.simulate.workload import Request

Answer = TypeVar("Answer")

IDLE_STEPS = 1000  # in a row, with work there and nothing moved, after which a policy is stuck


class _PolicyError(Exception):
    """The scheduler under test raised."""


def _ask(call: Callable[[], Answer]) -> Answer:
    try:
        return call()
    except Exception as error:
        raise _PolicyError(f"{type(error).__name__}: {error}") from error


class _Record:
    """A request that the scheduler has accepted, from its arrival to its departure.

    begun: tokens of the prompt computed at least once.  decoding: it is among those whose KV is read in every step.
    stalled_since: when it was preempted, until it draws again.
    """

    __slots__ = ("arrival", "begun", "decoding", "first_token", "group", "scheduled", "stalled_since")

    def __init__(self, group: SequenceGroup, arrival: float) -> None:
        self.group = group
        self.arrival = arrival
        self.scheduled = False
        self.first_token: float | None = None
        self.stalled_since: float | None = None
        self.begun = 0
        self.decoding = False


class Simulation:
    """One scheduler, one cost model, one clock.  It runs once.

    n: branches of every request.  max_steps: stop after so many.
    note: is told after every step how many requests have left or were refused, and the time.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cost: CostModel,
        *,
        n: int = 1,
        max_steps: int | None = None,
        note: Callable[[int, float], None] = lambda done, now: None,
    ) -> None:
        self.scheduler = scheduler
        self.cost = cost
        self.n = n
        self.max_steps = max_steps
        self.note = note
        self.tally = Tally(scheduler.config)
        self._records: dict[str, _Record] = {}
        self._kv = 0  # tokens of KV that a step reads in which every decode runs
        self._width = 0  # live branches of all decodes that run
        self._almost: list[_Record] = []  # rebuilds that a piece left with what a decode lacks: they draw as decodes
        self._idle = 0  # steps in a row that did nothing

    def run(self, requests: Iterable[Request]) -> Tally:
        """Serve them to the end, or to whatever end the policy comes to; every request must arrive in order.

        A request that the scheduler refuses is counted and the run goes on.  So does an error of the policy end the run
        and not the program.
        """
        scheduler, tally = self.scheduler, self.tally
        coming = iter(requests)
        request = next(coming, None)
        now = 0.0
        if request is not None:
            now = tally.begun = tally.ended = request.arrival
            tally.timeline.begin(now)
        while True:
            while request is not None and request.arrival <= now:
                self._arrive(request)
                request = next(coming, None)
            if not scheduler.has_unfinished():
                if request is None:
                    return tally
                now = request.arrival
                continue
            if self.max_steps is not None and tally.steps >= self.max_steps:
                return self._end(CUT_OFF, tally.steps)
            try:
                plan = _ask(scheduler.schedule)
                now = self._step(plan, now)
            except _PolicyError as error:  # such as the old rule's for lack of swap space
                return self._end(ABORTED, tally.steps, str(error))
            if self._idle >= IDLE_STEPS:
                return self._end(STUCK, tally.steps - self._idle)
            self.note(tally.finished + tally.refused.total(), now)

    def _end(self, outcome: str, step: int, error: str = "") -> Tally:
        self.tally.outcome, self.tally.outcome_step, self.tally.error = outcome, step, error
        return self.tally

    def _arrive(self, request: Request) -> None:
        tally = self.tally
        name = str(tally.arrived)
        tally.arrived += 1
        group = SequenceGroup(name, request.prompt_tokens, self.n, request.output_tokens)
        try:
            self.scheduler.add(group)
        except RefusedError as error:
            tally.refused[error.reason] += 1
            return
        tally.shortened += group.max_tokens < request.output_tokens
        self._records[name] = _Record(group, request.arrival)

    def _step(self, plan: Plan, now: float) -> float:
        """Count the plan, let it take its time, update; the moment it ends."""
        scheduler, tally = self.scheduler, self.tally
        drawn: list[_Record] = []
        planned = len(plan.log)
        self._read_log(plan, now, drawn)
        if self._almost:
            self._sort_almost(plan, drawn)
        pairs = self._prefills(plan, drawn) if plan.num_prefill_tokens else 0
        size = scheduler.config.block_size
        moved_out, moved_in, copied = map(len, (plan.blocks_to_swap_out, plan.blocks_to_swap_in, plan.blocks_to_copy))
        work = Work(
            plan.num_prefill_tokens,
            plan.num_decode_tokens,
            pairs,
            self._kv_read(plan),
            (moved_out + moved_in) * size,
            copied * size,
        )
        seconds = self.cost.seconds(work)
        tally.timeline.add(now, seconds, scheduler.counts())
        departed = _ask(lambda: scheduler.update(plan))
        end = now + seconds
        for action in plan.log[planned:]:
            tally.actions[action.verb] += 1
        tally.steps += 1
        tally.decode_tokens += work.decode_tokens
        tally.generated_tokens += work.decode_tokens
        tally.blocks_swapped_out += moved_out
        tally.blocks_swapped_in += moved_in
        tally.blocks_copied += copied
        tally.ended = end
        self._kv += work.decode_tokens  # each branch that decoded knows a token more
        for record in drawn:
            self._draw(record, end)
        for group in departed:
            self._depart(group, end)
        for record in self._almost:
            self._start_decoding(record)
        self._idle = 0 if plan.groups or plan.preempted else self._idle + 1
        return end

    def _read_log(self, plan: Plan, now: float, drawn: list[_Record]) -> None:
        """Count actions; keep track of who decodes, in the order in which it changed."""
        actions = self.tally.actions
        for verb, name, _, detail in plan.log:
            if verb == "preempt":
                actions[f"preempt:{detail}"] += 1
                record = self._records[name]
                self._stop_decoding(record)
                if record.first_token is not None and record.stalled_since is None:
                    record.stalled_since = now
                continue
            actions[verb] += 1
            if verb == "admit":
                record = self._records[name]
                if not record.scheduled:
                    record.scheduled = True
                    self.tally.queue.append(now - record.arrival)
            elif verb == "swap_in":
                record = self._records[name]
                if record.group.is_decode:
                    self._start_decoding(record)
                    drawn.append(record)  # a decode that comes back runs in the same step

    def _prefills(self, plan: Plan, drawn: list[_Record]) -> int:
        """Count the prefills of a plan; their query-key pairs.  They are few, and stand behind the decodes."""
        left, pairs = plan.num_prefill_tokens, 0
        for group, tokens in reversed(plan.groups):
            if group.is_decode:
                continue
            pairs += query_key_pairs(group, tokens)
            record = self._records[group.request_id]
            self._count_tokens(record, tokens)
            if tokens == group.deficit:
                drawn.append(record)
                self.tally.generated_tokens += group.live
            elif group.forked and group.deficit - tokens == group.live:
                self._almost.append(record)
            left -= tokens
            if left <= 0:
                break
        return pairs

    def _sort_almost(self, plan: Plan, drawn: list[_Record]) -> None:
        """Those that were preempted since are no longer almost there; those that run as decodes draw."""
        served = {group.request_id for group, _ in plan.groups}
        left = [record for record in self._almost if record.decoding]
        drawn += [record for record in left if record.group.request_id in served]
        self._almost = [record for record in left if record.group.request_id not in served]

    def _count_tokens(self, record: _Record, tokens: int) -> None:
        """Tell tokens computed for the first time from those computed again."""
        group, tally = record.group, self.tally
        if group.forked:  # a rebuild: all but the last token of each branch had been computed
            tally.recomputed_tokens += tokens - (group.live if tokens == group.deficit else 0)
            return
        end = group.known - group.deficit + tokens
        new = max(0, min(tokens, end - record.begun))
        tally.prompt_tokens += new
        tally.recomputed_tokens += tokens - new
        record.begun = max(record.begun, end)

    def _kv_read(self, plan: Plan) -> int:
        """KV tokens that the decodes of a plan read: of all that decode, unless some were left out."""
        if plan.num_decode_tokens == self._width:
            return self._kv
        if not plan.num_decode_tokens:
            return 0
        return sum(group.live * group.known for group, _ in plan.groups if group.is_decode)

    def _start_decoding(self, record: _Record) -> None:
        if not record.decoding:
            record.decoding = True
            self._kv += record.group.live * record.group.known
            self._width += record.group.live

    def _stop_decoding(self, record: _Record) -> None:
        if record.decoding:
            record.decoding = False
            self._kv -= record.group.live * record.group.known
            self._width -= record.group.live

    def _draw(self, record: _Record, end: float) -> None:
        """The request drew a token in every branch and was behind, or away, before."""
        if record.first_token is None:
            record.first_token = end
            self.tally.ttft.append(end - record.arrival)
        if record.stalled_since is not None:
            self.tally.stall.append(end - record.stalled_since)
            record.stalled_since = None
        if not record.decoding and record.group.request_id in self.scheduler.groups:
            self._start_decoding(record)

    def _depart(self, group: SequenceGroup, end: float) -> None:
        record = self._records.pop(group.request_id)
        self._stop_decoding(record)
        tally = self.tally
        tally.finished += 1
        tally.e2e.append(end - record.arrival)
        if record.first_token is not None and group.generated > 1:
            tally.tpot.append((end - record.first_token) / (group.generated - 1))
