"""The rule of the report: newcomers are admitted while groups sit in the swap area, and a full swap area is fatal.

Since a newcomer may run while a senior group is away, several groups can be in mid-prompt at once; as in the engine of
the report, every queue is taken in order of arrival, and all that run are served.

    lawful check --policy examples.policies.old_rule:OldRule
    lawful simulate --policy old --n 4
"""

from __future__ import annotations

from collections import deque

from engine.scheduler import Scheduler
from engine.scheduler.phases import Step


class OldRule(Scheduler):
    """Admission does not ask who is swapped out."""

    def _decodes_first(self, step: Step) -> None:
        self._sort()
        self._decodes(step)
        self._catch_up(step)
        if not step.plan.preempted:
            self._swap_in(step)
            self._admit(step)  # also while somebody remains swapped

    def _sort(self) -> None:
        """Decodes before prompts, each in order of arrival, since newcomers have gone past those who were away."""
        self.running = deque(sorted(self.running, key=lambda group: (not group.is_decode, group.arrival)))
        self.swapped = deque(sorted(self.swapped, key=lambda group: group.arrival))

    def _catch_up(self, step: Step) -> None:
        for group in self.running:
            if not group.is_decode and group.piece(step.tokens) > 0:
                step.serve(group, group.piece(step.tokens))

    def _make_room(self, size: int, step: Step) -> bool:
        if size > self.blocks.cpu_free:
            raise RuntimeError("Aborted due to the lack of CPU swap space")
        return True
