"""All laws, in one list: proofs, contracts, the trace audit and the README's table read this one.

STATE, MID, STEP and ROUND are the count laws of each kind, which run on symbols too; the laws on ids are in IDS_STATE
and IDS_STEP.  B7 needs the shadow pool of `spec.check.shadow`.
"""

from __future__ import annotations

from spec import laws_ids, laws_round, laws_state, laws_step
from spec.law import LAWS, Kind, Law, Tier, over_runs
from spec.laws_round import steps_bound

over_runs(
    "B7",
    "contents_follow",
    "(ghost) after swap-out, swap-in, copies, writes, in that order, every computed position of every table holds its "
    "own token",
    origin="swap lost block sharing; copies missed pairs",
)

BY_ID: dict[str, Law] = {one.id: one for one in LAWS}
assert len(BY_ID) == len(LAWS), "two laws have one id"


def of(kind: Kind, tier: Tier = Tier.COUNTS) -> tuple[Law, ...]:
    """The laws of one kind and tier."""
    return tuple(one for one in LAWS if one.kind is kind and one.tier is tier)


STATE = of(Kind.STATE)
STATE_IN_MID = tuple(one for one in STATE if one.mid)
MID = of(Kind.MID)
STEP = of(Kind.STEP)
ROUND = of(Kind.ROUND)
IDS_STATE = of(Kind.STATE, Tier.IDS)
IDS_STEP = of(Kind.STEP, Tier.IDS)

__all__ = [
    "BY_ID",
    "IDS_STATE",
    "IDS_STEP",
    "LAWS",
    "MID",
    "ROUND",
    "STATE",
    "STATE_IN_MID",
    "STEP",
    "Kind",
    "Law",
    "Tier",
    "laws_ids",
    "laws_round",
    "laws_state",
    "laws_step",
    "of",
    "steps_bound",
]
