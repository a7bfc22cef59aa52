"""The rule of the report: newcomers are admitted while groups sit in the swap area, and a full swap area is fatal.

lawful check --policy examples.policies.old_rule:OldRule
"""

from __future__ import annotations

from engine.scheduler import Scheduler
from engine.scheduler.phases import Step


class OldRule(Scheduler):
    """Admission does not ask who is swapped out."""

    def _decodes_first(self, step: Step) -> None:
        self._decodes(step)
        self._catch_up(step)
        if not step.plan.preempted:
            self._swap_in(step)
            self._admit(step)  # also while somebody remains swapped

    def _make_room(self, size: int, step: Step) -> bool:
        if size > self.blocks.cpu_free:
            raise RuntimeError("Aborted due to the lack of CPU swap space")
        return True
