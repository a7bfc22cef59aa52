"""The plan of one step: everything an executor must do, and the log that proves it was allowed.

An executor carries a plan out in this order: swap out, swap in, copy, then write and compute the scheduled rows.
The lists are the net change of the block tables in this step (law S9), so nothing else may move.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.scheduler.errors import ProtocolError

if TYPE_CHECKING:
    from engine.scheduler.sequence import SequenceGroup

BlockPair = tuple[int, int]


class PreemptionMode(Enum):
    """How a victim gives its GPU blocks back: kept on the CPU, or dropped and computed again."""

    SWAP = "swap"
    RECOMPUTE = "recompute"

    def __str__(self) -> str:
        return f"PreemptionMode.{self.name}"


class Action(NamedTuple):
    """One entry of the log.

    verb: add, admit, grow, preempt, swap_out, swap_in, demote, fork, finish, finish_branch, abort or fail.
    blocks: how many blocks the action took (admit, grow, swap_in), moved (swap_out) or gave back (the others).
    detail: the mode of a preemption, the branch of a finished branch, the reason of a failure; else empty.
    """

    verb: str
    request_id: str
    blocks: int = 0
    detail: str = ""


class ScheduledSequence(NamedTuple):
    """Tokens `start` to `end` (exclusive) of one branch, to be computed in this step.

    block_table: block ids of the branch on the GPU, covering at least `end` tokens.  It is the scheduler's own list:
        read it before the next call of the scheduler, or copy it.
    slots: one slot for each token, `block_table[t // block_size] * block_size + t % block_size`.
    draws: the branches that each draw one next token from the logits of the last token of this row: none while the
        group is behind, the branch itself in a decode, all `n` branches at the end of the first run of a prompt.
    """

    group: SequenceGroup
    branch: int
    start: int
    end: int
    block_table: list[int]
    slots: list[int]
    draws: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Plan:
    """What one step does.  `Scheduler.update` must be told about every plan, in order, before the next is made.

    A step costs what changes in it, so what a plan says of every group and every row is written when it is first read:
    `groups` at any time, `scheduled` (one row for each branch that runs) before the plan is given to `update`.

    decodes: groups that go on decoding, each with a token for every live branch; the same list object as in the plan
        before if the set of them is the same.  Do not change it.
    served: the groups that were looked at one by one, and the tokens each was given.
    beat: the running decodes had their turn in this step.
    """

    step: int
    decodes: list[SequenceGroup] = field(default_factory=list)
    served: list[tuple[SequenceGroup, int]] = field(default_factory=list)
    blocks_to_swap_out: list[BlockPair] = field(default_factory=list)  # (GPU block, CPU block)
    blocks_to_swap_in: list[BlockPair] = field(default_factory=list)  # (CPU block, GPU block)
    blocks_to_copy: list[BlockPair] = field(default_factory=list)  # (GPU block, GPU block); all reads before writes
    log: list[Action] = field(default_factory=list)
    preempted: list[SequenceGroup] = field(default_factory=list)
    finished: list[SequenceGroup] = field(default_factory=list)  # all that left since the plan before: free their state
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    beat: bool = False
    write_rows: Callable[[SequenceGroup, int, Plan], None] | None = None
    _groups: list[tuple[SequenceGroup, int]] | None = None
    _rows: list[ScheduledSequence] | None = None

    @property
    def groups(self) -> list[tuple[SequenceGroup, int]]:
        """Every group that the step serves, most senior first, and the tokens it is given."""
        if self._groups is not None:
            return self._groups
        groups = [*((group, group.live) for group in self.decodes), *self.served]
        if self.write_rows is not None:  # the step is planned to its end
            self._groups = groups
        return groups

    @property
    def scheduled(self) -> list[ScheduledSequence]:
        """The rows of the step, in the order of `groups`.  Raises ProtocolError if first read after `update`."""
        if self._rows is None:
            self._rows = []
            if self.write_rows is not None:
                for group, tokens in self.groups:
                    self.write_rows(group, tokens, self)
            elif not self.is_empty:
                self._rows = None
                raise ProtocolError(f"the rows of step {self.step} were not read before update(), and are gone")
        return self._rows

    @scheduled.setter
    def scheduled(self, rows: list[ScheduledSequence]) -> None:
        self._rows = rows

    @classmethod
    def of_rows(cls, rows: list[ScheduledSequence], **fields: Any) -> Plan:
        """A plan made by hand, for an executor alone."""
        plan = cls(0, **fields)
        plan._rows = rows
        return plan

    def __eq__(self, other: object) -> bool:
        """The same decisions about the same groups."""
        if not isinstance(other, Plan):
            return NotImplemented
        return bool(_DECISIONS(self) == _DECISIONS(other))

    __hash__ = None  # type: ignore[assignment]

    def seal(self, branches_end: bool = False) -> None:
        """The groups are about to change: no more rows.  If branches end, it is written down now who had which."""
        if branches_end:
            self._groups = self.groups
        self.write_rows = None

    @property
    def num_tokens(self) -> int:
        return self.num_prefill_tokens + self.num_decode_tokens

    @property
    def is_empty(self) -> bool:
        return not self.decodes and not self.served

    def to_dict(self) -> dict[str, Any]:
        """A copy made of plain values: equal plans give equal dictionaries."""
        return {
            "step": self.step,
            "scheduled": [
                (
                    row.group.request_id,
                    row.branch,
                    row.start,
                    row.end,
                    list(row.block_table),
                    list(row.slots),
                    row.draws,
                )
                for row in self.scheduled
            ],
            "blocks_to_swap_out": list(self.blocks_to_swap_out),
            "blocks_to_swap_in": list(self.blocks_to_swap_in),
            "blocks_to_copy": list(self.blocks_to_copy),
            "log": list(self.log),
            "groups": [(group.request_id, tokens) for group, tokens in self.groups],
            "preempted": [group.request_id for group in self.preempted],
            "finished": [group.request_id for group in self.finished],
        }


_DECISIONS = attrgetter(
    "step",
    "scheduled",
    "groups",
    "blocks_to_swap_out",
    "blocks_to_swap_in",
    "blocks_to_copy",
    "log",
    "preempted",
    "finished",
    "num_prefill_tokens",
    "num_decode_tokens",
    "beat",
)
