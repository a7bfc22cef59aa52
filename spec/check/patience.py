"""Code under test that never returns is ended; and where in it something happened is told.

What is bounded is work, not time: processor time in which nothing gets done.  A busy machine, a sleep or a debugger's
prompt take nothing from it, and a step of the worlds takes a thousandth of what is granted.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType

GRANTED = 5.0  # seconds of processor time for one call
_TICKS = 10  # looks at the progress in that time

_HERE = str(Path(__file__).parent)
_under_watch = False


class EndlessError(BaseException):
    """A call has not returned.  No `except Exception` of the code under test can eat it.

    where: the chain of calls in which it was ended.
    """

    def __init__(self, where: str) -> None:
        super().__init__(f"has not returned after {GRANTED:g} s of work, and was ended in {where}")
        self.where = where


@contextmanager
def patience(progress: Callable[[], object]) -> Iterator[None]:
    """EndlessError in the block once GRANTED seconds of work have not changed what `progress` returns.

    Only the main thread of a system that has interval timers can be watched, and one watch serves for all inside it;
    elsewhere the block just runs.
    """
    global _under_watch
    if (
        _under_watch
        or not hasattr(signal, "setitimer")
        or threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGPROF) is not signal.SIG_DFL  # a profiler's
    ):
        yield
        return
    seen, since = progress(), time.process_time()

    def look(number: int, frame: FrameType | None) -> None:
        nonlocal seen, since
        now = progress()
        if now != seen:
            seen, since = now, time.process_time()
        elif time.process_time() - since >= GRANTED:
            since = time.process_time()
            raise EndlessError(_chain(_outwards(frame)))

    _under_watch = True
    signal.signal(signal.SIGPROF, look)
    signal.setitimer(signal.ITIMER_PROF, GRANTED / _TICKS, GRANTED / _TICKS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        _under_watch = False


def told(error: BaseException) -> str:
    """An error of code under test: its type, its words, and the calls that led to it."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    where = _chain(_inwards(error.__traceback__))
    return f"{text} ({where})" if where else text


def _outwards(frame: FrameType | None) -> list[tuple[str, str, int]]:
    calls = []
    while frame is not None:
        calls.append((frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno))
        frame = frame.f_back
    return calls[::-1]


def _inwards(trace: TracebackType | None) -> list[tuple[str, str, int]]:
    calls = []
    while trace is not None:
        code = trace.tb_frame.f_code
        calls.append((code.co_filename, code.co_name, trace.tb_lineno))
        trace = trace.tb_next
    return calls


def _chain(calls: list[tuple[str, str, int]]) -> str:
    """The calls after those of the checkers, the last of each file in a row: `step mine.py:7 > admit blocks.py:9`."""
    inside = [name.startswith(_HERE) for name, _, _ in calls]
    while inside and inside[-1]:  # a symbol, or a seal
        inside.pop()
    first = len(inside) - inside[::-1].index(True) if True in inside else 0
    shown: list[tuple[str, str]] = []
    for file, function, line in calls[first : len(inside)]:
        one = (file, f"{function} {Path(file).name}:{line}")
        if shown and shown[-1][0] == file:
            shown.pop()
        shown.append(one)
    return " > ".join(text for _, text in shown)
