"""How the process ends before and after the server listens for signals.  Light: it comes before all other imports."""

from __future__ import annotations

import logging
import os
import signal
import sys
from types import FrameType

logger = logging.getLogger("lawful")

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def end_on_signal() -> None:
    """Until the server listens for signals itself, one ends the process at once: nothing is lost that could be kept."""

    def end(number: int, _: FrameType | None) -> None:
        logger.info("%s before the server was ready: it has ended with status 0", signal.Signals(number).name)
        leave(0)

    for number in SIGNALS:
        signal.signal(number, end)


def leave(status: int) -> None:
    """End the process now, without waiting for its threads."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
