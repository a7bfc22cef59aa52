"""Policies by name: the production scheduler, and the rules that others have, from the examples."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from engine.scheduler import Scheduler

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "policies"


class Policy(NamedTuple):
    """A rule.  example: `file:Class` in examples/policies, empty for the production scheduler.  mode: if forced."""

    meaning: str
    example: str = ""
    mode: str | None = None


POLICIES = {
    "strict": Policy("lawful's own: running, swapped, waiting, in that order"),
    "recompute": Policy("lawful's own, and every victim is computed again", mode="recompute"),
    "pull-request": Policy("strict admission, and a full swap area is fatal", "pull_request.py:PullRequest"),
    "old": Policy("admission while groups are swapped, and a full swap area is fatal", "old_rule.py:OldRule"),
    "below-half": Policy("admission while the CPU cache is used below 50 %", "below_half.py:BelowHalf"),
}


def policy_of(name: str) -> tuple[type[Scheduler], str | None]:
    """The class of a short name, `module:Class` or `path.py:Class`, and the preemption mode that it forces.

    Raises ValueError, saying what is allowed, for anything else.
    """
    from engine.check import load_policy
    from engine.scheduler import Scheduler

    known = POLICIES.get(name)
    if known is None:
        if ":" not in name:
            raise ValueError(
                f"--policy is {name!r}; it must be one of {', '.join(POLICIES)}, or module:Class or path.py:Class"
            )
        return load_policy(name), None
    if not known.example:
        return Scheduler, known.mode
    file, _, kind = known.example.partition(":")
    if not (EXAMPLES / file).exists():
        raise ValueError(f"the policy {name!r} is an example, and {EXAMPLES / file} is not there: run from a checkout")
    return load_policy(f"{EXAMPLES / file}:{kind}"), known.mode
