"""A softer rule than "nothing swapped": newcomers are admitted while less than half of the CPU cache is used.

The pull request asks whether it would do.  A full swap area is no error here, as in the production scheduler, so what
it breaks is the order alone.

    lawful check --policy examples.policies.below_half:BelowHalf
    lawful simulate --policy below-half --n 4
"""

from __future__ import annotations

from collections import deque

from engine.scheduler import Scheduler
from engine.scheduler.phases import Step


class BelowHalf(Scheduler):
    """Admission asks how full the swap area is, and not whether anybody is in it."""

    def _decodes_first(self, step: Step) -> None:
        self._sort()
        self._decodes(step)
        self._catch_up(step)
        if not step.plan.preempted:
            self._swap_in(step)
            used = self.config.num_cpu_blocks - self.blocks.cpu_free
            if not self.swapped or 2 * used < self.config.num_cpu_blocks:
                self._admit(step)

    def _sort(self) -> None:
        """Decodes before prompts, each in order of arrival, since newcomers have gone past those who were away."""
        self.running = deque(sorted(self.running, key=lambda group: (not group.is_decode, group.arrival)))
        self.swapped = deque(sorted(self.swapped, key=lambda group: group.arrival))

    def _catch_up(self, step: Step) -> None:
        for group in self.running:
            if not group.is_decode and group.piece(step.tokens) > 0:
                step.serve(group, group.piece(step.tokens))
