"""What is written down when a step could not be executed: the scheduler's state, the plan and the error, as JSON."""

from __future__ import annotations

import itertools
import json
import logging
import os
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from engine.scheduler.recorder import dump_state

if TYPE_CHECKING:
    from engine.scheduler import Plan, Scheduler

logger = logging.getLogger("lawful")

MOST_DUMPS = 20  # of one process: a device that fails in every step must not fill the disk
_numbers = itertools.count()


def dump_step(directory: Path | None, scheduler: Scheduler, plan: Plan | None, error: BaseException) -> Path | None:
    """Write a dump; None if there is no directory, it cannot be written, or there were enough already.

    It holds request ids, token counts and block ids, never token ids or text.
    """
    number = next(_numbers) if directory is not None else MOST_DUMPS
    if directory is None or number >= MOST_DUMPS:
        return None
    path = directory / f"step-{os.getpid()}-{number}.json"
    try:
        content = {
            "time": time.time(),
            "error": f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exception(error),
            "plan": None if plan is None else plan.to_dict(),
            "state": dump_state(scheduler),
        }
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, default=str))
    except Exception:  # the step's own error matters more
        logger.exception("the state of the failed step could not be written to %s", directory)
        return None
    return path
