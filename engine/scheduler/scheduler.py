"""The scheduler: who computes what in the next step, and where every block lies.

Memory follows seniority: the GPU for the most senior groups, the CPU for the next, nothing for the rest, so that
running ++ swapped ++ waiting is always sorted by arrival.  It decides on counts alone: no tokens, clock or randomness,
so equal inputs give equal plans.  Drive it with `add`, then `schedule` and `update` in turn while `has_unfinished`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from engine.scheduler import contracts
from engine.scheduler.blocks import BlockCounts, BlockManager
from engine.scheduler.calendar import DecodeCalendar
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.errors import DuplicateError, ProtocolError, RefusedError
from engine.scheduler.phases import Phases, Step
from engine.scheduler.plan import Action, Plan, ScheduledSequence
from engine.scheduler.sequence import SequenceGroup, Status
from spec.logic import Int


@dataclass(frozen=True, slots=True)
class QueueCounts:
    """Lengths of the queues and blocks in use, for log lines and gauges."""

    running: int
    swapped: int
    waiting: int
    gpu_blocks_used: int
    cpu_blocks_used: int


class Scheduler(Phases):
    """Strict order of seniority over a paged KV cache with a swap area.

    blocks: keeps the tables; a proof brings one that only counts.
    """

    def __init__(self, config: SchedulerConfig, blocks: BlockCounts | None = None) -> None:
        self.config = config
        if blocks is None:
            blocks = BlockManager(config.block_size, config.num_gpu_blocks, config.num_cpu_blocks)
        self.blocks = blocks
        self.calendar = DecodeCalendar()
        self.running: deque[SequenceGroup] = deque()
        self.swapped: deque[SequenceGroup] = deque()
        self.waiting: deque[SequenceGroup] = deque()
        self.groups: dict[str, SequenceGroup] = {}
        self.num_arrivals = 0
        self.num_steps = 0
        self.decodes_owed = False  # prefill-first: the last step left decodes out
        self._plan: Plan | None = None  # the step under way
        self._log: list[Action] = []  # of the step under way, or of what happens before the next
        self._departed: list[SequenceGroup] = []  # since the last plan
        self._aborting: list[SequenceGroup] = []  # until the step under way is updated

    # requests

    @contracts.add
    def add(self, group: SequenceGroup) -> SequenceGroup:
        """Accept a group at the end of waiting.  It is sure to finish, whatever else arrives.

        Raises RefusedError when it never could: the message names the two numbers that do not fit.
        """
        if group.request_id in self.groups:
            raise DuplicateError(group.request_id)
        if group.arrival >= 0:
            raise RefusedError(f"the group {group.request_id!r} was added before; make a new one", "used_group")
        group.max_tokens = self._fit(group)
        group.shared_blocks = group.prompt_len // self.config.block_size
        group.shared_tokens = group.shared_blocks * self.config.block_size
        group.arrival = self.num_arrivals
        self.num_arrivals += 1
        self.groups[group.request_id] = group
        self.waiting.append(group)
        self._note("add", group)
        return group

    def check(self, group: SequenceGroup) -> Int:
        """The max_tokens that `add` would give the group; it changes nothing.  Raises RefusedError as `add` does."""
        return self._fit(group)

    def _fit(self, group: SequenceGroup) -> Int:
        """The group's max_tokens under max_model_len, and under the pool if it named none."""
        limit = self.config.max_model_len
        for name, value in (("prompt_len", group.prompt_len), ("n", group.n), ("max_tokens", group.max_tokens)):
            if isinstance(value, bool | float | str):  # a symbol is neither, and welcome
                raise RefusedError(f"{name} is {value!r}; it must be an int", name)
        if group.prompt_len < 1:
            raise RefusedError("the prompt is empty; it must have at least 1 token", "empty_prompt")
        if group.n < 1:
            raise RefusedError(f"n is {group.n}; it must be at least 1", "n")
        if group.max_tokens is not None and group.max_tokens < 1:
            raise RefusedError(f"max_tokens is {group.max_tokens}; it must be at least 1", "max_tokens")
        if group.prompt_len >= limit:
            raise RefusedError(
                f"the prompt has {group.prompt_len} tokens, which leaves no room for one more under max_model_len "
                f"({limit}); at most {limit - 1} are allowed",
                "max_model_len",
            )
        if group.n > self.config.seqs:
            raise RefusedError(f"n is {group.n} but max_num_seqs is {self.config.seqs}", "max_num_seqs")
        room = limit - group.prompt_len
        tokens = room if group.max_tokens is None else min(group.max_tokens, room)
        capacity = self.config.num_gpu_blocks
        if group.max_tokens is None:
            tokens = self._most_tokens(group, tokens)
        peak = self.blocks.peak(group.prompt_len, group.n, tokens)
        if peak > capacity:
            raise RefusedError(
                f"the request (prompt {group.prompt_len}, n {group.n}, max_tokens {tokens}) alone needs {peak} KV "
                f"cache blocks but the pool has {capacity}: it could never run to its end",
                "num_gpu_blocks",
            )
        return tokens

    def _most_tokens(self, group: SequenceGroup, limit: Int) -> Int:
        """The largest max_tokens up to `limit` with which the group alone fits the pool, at least 1.

        Peak: p//BS + n * (ceil((p + m - 1) / BS) - p//BS) blocks; solved for m.
        """
        size, shared = self.config.block_size, group.prompt_len // self.config.block_size
        tail = (self.config.num_gpu_blocks - shared) // group.n  # blocks each branch may own
        return max(1, min(limit, (shared + tail) * size - group.prompt_len + 1))

    @contracts.abort
    def abort(self, request_id: str) -> bool:
        """End a group wherever it is; False if no unfinished group has this id.

        At a step boundary it takes effect at once; between `schedule` and `update`, in `update`, which discards what
        that step computed for it.
        """
        group = self.groups.get(request_id)
        if group is None or group in self._aborting:
            return False
        if self._plan is None:
            self._leave(group, Status.ABORTED)
        else:
            self._aborting.append(group)
        return True

    def has_unfinished(self) -> bool:
        """Some accepted group has not left yet."""
        return bool(self.groups)

    def counts(self) -> QueueCounts:
        """Where the groups and the blocks are now."""
        blocks, config = self.blocks, self.config
        return QueueCounts(
            running=len(self.running),
            swapped=len(self.swapped),
            waiting=len(self.waiting),
            gpu_blocks_used=config.num_gpu_blocks - blocks.gpu_free,
            cpu_blocks_used=config.num_cpu_blocks - blocks.cpu_free,
        )

    # the step

    @contracts.schedule
    def schedule(self) -> Plan:
        """Plan one step.  It never fails for lack of memory; the plan is empty only when nothing is unfinished.

        Raises ProtocolError when the plan before has not been given to `update` or `fail`.
        """
        if self._plan is not None:
            raise ProtocolError(f"schedule() called before the plan of step {self._plan.step} was updated")
        step = Step(Plan(self.num_steps), self.config.tokens)
        self._open(step.plan)
        if self.config.enable_chunked_prefill:
            self._decodes_first(step)
        else:
            self._prefills_first(step)
        self._close(step)
        return step.plan

    def _decodes_first(self, step: Step) -> None:
        """The chunked order.  Read downwards: this is the order of preference."""
        self._decodes(step)  # 1. everyone who streams goes on
        self._catch_up(step)  # 2. then whoever has begun, with what budget is left
        if not step.plan.preempted:  # nobody comes in while somebody was thrown out for lack of room
            self._swap_in(step)  # 3. then those who were thrown out
            if not self.swapped:
                self._admit(step)  # 4. newcomers only when nobody is left outside (law S1)

    def _prefills_first(self, step: Step) -> None:
        """The order with whole prompts first: a step computes prefills or decodes, never decodes twice delayed."""
        if not (self.decodes_owed and self.running and self.running[0].is_decode):
            self._catch_up(step)  # 1. whoever is being rebuilt
            if not self.swapped:
                self._admit(step)  # 2. whole new prompts
        self.decodes_owed = bool(step.plan.served) and self.running[0].tokens == 0
        if not step.plan.served:
            self._decodes(step)  # 3. everyone who streams
            if not step.plan.preempted:
                self._swap_in(step)  # 4. those who were thrown out

    def _open(self, plan: Plan) -> None:
        plan.finished, self._departed = self._departed, []
        plan.log = self._log

    def _close(self, step: Step) -> None:
        """Write the net moves of the step and its totals into the plan; its rows are written when they are read."""
        plan = step.plan
        for moves in step.swapped_out.values():
            plan.blocks_to_swap_out += moves
        self._count(plan)
        plan.write_rows = self._write_rows
        self.num_steps += 1
        self._plan = plan

    def _count(self, plan: Plan) -> None:
        if plan.decodes:
            plan.num_decode_tokens = self.calendar.branches
        for group, tokens in plan.served:
            if group.is_decode:
                plan.num_decode_tokens += tokens
            else:
                plan.num_prefill_tokens += tokens

    def _write_rows(self, group: SequenceGroup, tokens: int, plan: Plan) -> None:
        """What the group's tokens are, row by row.  Called before `update`, while the group is what the plan saw."""
        size = self.config.block_size
        samples = tokens == group.deficit
        if group.is_decode:
            last, end = group.known - 1, group.known
            block, offset = last // size, last % size
            for branch in group.branches:
                table = group.tables[branch]
                slots = [table[block] * size + offset]
                plan.scheduled.append(ScheduledSequence(group, branch, last, end, table, slots, (branch,)))
            return
        for index, start, end in group.rows(tokens):
            branch = group.branches[index]
            table = group.tables[branch]
            slots = [table[t // size] * size + t % size for t in range(start, end)]
            draws = () if not samples else (branch,) if group.forked else tuple(range(group.n))
            plan.scheduled.append(ScheduledSequence(group, branch, start, end, table, slots, draws))

    # what came of it

    @contracts.update
    def update(
        self, plan: Plan, stopped: Collection[tuple[str, int]] = (), failed: Collection[str] = ()
    ) -> list[SequenceGroup]:
        """Take note that the plan was carried out.

        stopped: (request id, branch) of the branches whose token drawn in this step was their last, by an end token or
            a stop string; max_tokens needs no mention.  Names of branches that drew nothing are ignored.
        failed: request ids that end with an error though the step was carried out (their own sampling raised).

        Returns the groups that left: finished, aborted or failed.  Appends what happened to the plan's log.
        Raises ProtocolError when `plan` is not the one that the last `schedule` returned.
        """
        self._take(plan)
        stopped, failed = set(stopped), set(failed)
        plan.seal(bool(stopped))
        if plan.beat:
            self.calendar.advance()
        named = {name for name, _ in stopped} | failed | {group.request_id for group in self._aborting}
        for group in plan.decodes:
            if group.request_id in named or group.known - group.prompt_len + 1 >= group.max_tokens:
                self._conclude(group, group.live, stopped, failed)
            else:  # it goes on as it was, one token longer
                group.tokens = 0
                group.known += 1
        for group, tokens in plan.served:
            self._conclude(group, tokens, stopped, failed)
        return self._settle()

    def _conclude(
        self, group: SequenceGroup, tokens: Int, stopped: Collection[tuple[str, int]], failed: Collection[str]
    ) -> None:
        """What the tokens given to one group came to."""
        group.tokens = 0
        if group in self._aborting:
            return
        if group.request_id in failed:
            self._leave(group, Status.FAILED)
            return
        group.deficit -= tokens
        if group.deficit == 0:
            self._sample(group, stopped)
        elif group.is_decode:  # a rebuild that lacks nothing but the common sample
            self.calendar.file(group, self.blocks.beats(group))

    def _sample(self, group: SequenceGroup, stopped: Collection[tuple[str, int]]) -> None:
        """Every live branch has drawn a token: fork after the first, end the branches that are done."""
        if not group.forked:
            self._fork(group)
        group.known += 1
        ended = group.generated >= group.max_tokens
        left = [] if ended else [b for b in group.branches if (group.request_id, b) not in stopped]
        if not left:
            self._leave(group, Status.FINISHED)
            return
        if len(left) < group.live:
            for branch in group.branches:
                if branch not in left:
                    self.blocks.finish_branch(group, branch)
                    self._note("finish_branch", group, detail=str(branch))
            group.branches = left
            group.live = len(left)
            group.tail_shared = group.tail_shared and group.live > 1
        group.deficit = group.live
        self.calendar.file(group, self.blocks.beats(group))

    def _fork(self, group: SequenceGroup) -> None:
        group.forked = True
        group.branches = list(range(group.n))
        self.blocks.fork(group)
        group.tail_shared = group.n > 1 and group.shared_tokens < group.prompt_len
        if group.n > 1:
            self._note("fork", group, detail=str(group.n))

    @contracts.fail
    def fail(self, plan: Plan, request_ids: Iterable[str] | None = None) -> list[SequenceGroup]:
        """Take note that the plan was not carried out, wholly or in part: its KV cannot be trusted.

        The named groups (all that were scheduled in it, if None) leave with an error.  Every other group that has KV
        loses it and is computed again, in its place.  Returns the groups that left.
        """
        self._take(plan)
        plan.seal()
        for group, _ in plan.groups:
            group.tokens = 0
        named = {group.request_id for group, _ in plan.groups} if request_ids is None else set(request_ids)
        for group in [group for group in self.groups.values() if group.request_id in named]:
            if group not in self._aborting:
                self._leave(group, Status.FAILED)
        departed = self._settle()
        step = Step(plan, 0)
        while self.swapped:
            self._demote(step)
        while self.running:
            self._recompute(self.running.pop(), step)
        return departed

    def _take(self, plan: Plan) -> None:
        if self._plan is not plan:
            under_way = "none" if self._plan is None else f"step {self._plan.step}"
            raise ProtocolError(f"the plan of step {plan.step} is not under way ({under_way} is)")

    def _settle(self) -> list[SequenceGroup]:
        """Close the step under way: aborts that waited for it take effect."""
        for group in self._aborting:
            self._leave(group, Status.ABORTED)
        self._aborting = []
        self._plan = None
        self._log = []
        return list(self._departed)

    def _leave(self, group: SequenceGroup, status: Status) -> None:
        """The group is gone, with its blocks: the only way out of the queues."""
        blocks = group.held
        if group.status is Status.WAITING:
            self.waiting.remove(group)
        elif group.status is Status.SWAPPED:
            self.swapped.remove(group)
            self.blocks.drop_cpu(group)
        else:
            self.running.remove(group)
            self.calendar.strike(group)
            self.blocks.drop_gpu(group)
        group.status = status
        del self.groups[group.request_id]
        self._departed.append(group)
        self._note(status.verb, group, blocks)

    def _note(self, verb: str, group: SequenceGroup, blocks: int = 0, detail: str = "") -> None:
        self._log.append(Action(verb, group.request_id, blocks, detail))
