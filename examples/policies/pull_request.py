"""The rule that the pull request asks for: strict order of running, swapped and waiting, and nothing else changed.

Admission waits for the swapped groups, but it is optimistic about growth, so the swap area can still fill up; and a
group that was swapped out in the middle of its prompt comes back only if all the rest fits in one step.

    lawful check --policy examples.policies.pull_request:PullRequest
"""

from __future__ import annotations

from engine.scheduler import Scheduler
from engine.scheduler.phases import Step


class PullRequest(Scheduler):
    """Strict admission; a full swap area is still fatal, and a swapped group still returns whole or not at all."""

    def _make_room(self, size: int, step: Step) -> bool:
        if size > self.blocks.cpu_free:
            raise RuntimeError("Aborted due to the lack of CPU swap space")
        return True

    def _swap_in_head(self, step: Step) -> bool:
        if step.tokens < self.swapped[0].deficit:
            return False
        return super()._swap_in_head(step)
