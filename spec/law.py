"""What a law is: one rule, declared once, with the text a person reads and the predicate that every checker runs.

A predicate runs on ints and on symbols alike: it uses the connectives of `spec.logic` on whatever may be a symbol
(token counts, capacities, budgets, block counts) and plain Python only on what is always concrete (queues, the number
of groups, `n`, `live`, `forked`, statuses, ids, the log's verbs, block_size).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Kind(Enum):
    """What a predicate is about, and so what it is given."""

    STATE = "state"  # law(state): holds at every step boundary
    MID = "mid"  # law(step): holds between schedule() and update()
    STEP = "step"  # law(step): relates the state before schedule(), the plan and the state after it
    ROUND = "round"  # law(round): relates a step and what update() made of it
    TEMPORAL = "temporal"  # about whole runs: no predicate here, the checkers state it


class Tier(Enum):
    """What a predicate looks at."""

    COUNTS = "counts"  # ints only: runs on symbols too
    IDS = "ids"  # block ids, slots, contents: concrete states only


@dataclass(frozen=True, slots=True)
class Law:
    """One rule.  `statement` is the sentence that a violation shows; `origin` says what made the rule necessary."""

    id: str
    name: str
    statement: str
    origin: str
    kind: Kind
    tier: Tier
    mid: bool  # a state law that also holds between schedule() and update()
    predicate: Callable[..., Any] | None

    def __call__(self, view: Any) -> Any:
        """Whether it holds of the view: a bool, or a symbol that stands for one."""
        assert self.predicate is not None, f"{self.id} is about whole runs"
        return self.predicate(view)

    def __str__(self) -> str:
        return f"{self.id} {self.name}: {self.statement}"


LAWS: list[Law] = []

Predicate = Callable[..., Any]


def law(
    id: str, kind: Kind, *, origin: str, tier: Tier = Tier.COUNTS, mid: bool = False
) -> Callable[[Predicate], Predicate]:
    """Declare the decorated predicate as a law; its docstring is the statement."""

    def declare(predicate: Predicate) -> Predicate:
        statement = " ".join((predicate.__doc__ or "").split())
        assert statement, f"{id} has no statement"
        LAWS.append(Law(id, predicate.__name__, statement, origin, kind, tier, mid, predicate))
        return predicate

    return declare


def over_runs(id: str, name: str, statement: str, *, origin: str) -> None:
    """Declare a law about whole runs."""
    LAWS.append(Law(id, name, statement, origin, Kind.TEMPORAL, Tier.COUNTS, False, None))
