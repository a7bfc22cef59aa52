"""Log lines of programs that have set up no logging: they are shown, so that nobody wonders what the engine does.

Guarantees: a program that has its own handlers never sees a line twice, whenever it installs them.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

FORMAT = "%(levelname)s %(asctime)s %(message)s"
SWITCH = "LAWFUL_CONFIGURE_LOGGING"  # 0 leaves the logger alone

refusals = logging.getLogger("lawful.refused")  # of requests in a list, apart for callers who tell of them themselves


@contextlib.contextmanager
def refusals_are_told() -> Iterator[None]:
    """Within it a refusal is no log line: the caller shows it."""
    refusals.disabled = True
    try:
        yield
    finally:
        refusals.disabled = False


class DefaultHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to standard error while the root logger has no handler of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def formatter() -> logging.Formatter:
    """How a line looks."""
    return logging.Formatter(FORMAT, datefmt="%H:%M:%S")


def speak_by_default() -> None:
    """Give the logger "lawful" a handler and the level INFO, unless it or the root logger was set up by somebody."""
    logger = logging.getLogger("lawful")
    if os.environ.get(SWITCH, "1") == "0" or logger.handlers or logging.getLogger().handlers:
        return
    handler = DefaultHandler()
    handler.setFormatter(formatter())
    logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
