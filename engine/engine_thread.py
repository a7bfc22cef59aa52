"""The engine's thread: commands in between steps, outputs out to streams, and what is known of its progress.

Guarantees: a stream that was handed in ends, whatever happens to the engine: with its output, or with an error when the
thread dies.  The thread waits for nobody but new work; it never touches an event loop except to wake it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from engine.core import EngineCore
from engine.dump import dump_step
from engine.errors import DuplicateError, EngineDeadError
from engine.outputs import RequestOutput
from engine.scheduler import SequenceGroup
from engine.stats import Snapshot
from engine.stream import RequestStream
from engine.why import taken_next

logger = logging.getLogger("lawful")

Command = Callable[[], None]
Ended = tuple[RequestStream, RequestOutput | None, Exception | None]


class EngineThread:
    """Steps an engine; nobody else may call that engine any more.

    max_failed_steps: that many failed steps in a row, and the engine gives up: its device is taken to be broken.
    snapshot: the counts after the last step or command, for any thread.
    dead: why the thread has ended, if by itself.  on_death: called with it in the event loop.
    progress: when the last step ended, or when work came to an idle engine, on the monotonic clock.
    lock: of streams and what they have gathered; held for moments only.
    """

    def __init__(self, core: EngineCore, max_failed_steps: int) -> None:
        self.core = core
        self.max_failed_steps = max_failed_steps
        self.snapshot: Snapshot = core.stats.snapshot(core.scheduler.counts())
        self.dead: BaseException | None = None
        self.on_death: Callable[[BaseException], None] | None = None
        self.progress = time.monotonic()
        self.lock = threading.Lock()
        self._streams: dict[str, RequestStream] = {}  # unfinished
        self._dirty: list[RequestStream] = []
        self._waking = False  # a call of `_wake` is on its way
        self._inbox: deque[tuple[Command, SequenceGroup | None]] = deque()  # what to do between two steps; what it adds
        self._bell = threading.Event()
        self._stop = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # for the event loop

    def start(self) -> None:
        """Once; streams wake in the running event loop."""
        if self._thread is not None:
            raise RuntimeError("the engine was started before")
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="lawful-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Let the thread end after the step under way."""
        self._stop = True
        self._bell.set()

    @property
    def started(self) -> bool:
        return self._thread is not None

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def busy(self) -> bool:
        """There is something to do."""
        return bool(self._inbox) or self.core.scheduler.has_unfinished()

    def num_waiting(self, limit: int) -> int:
        """Requests that wait for a step, handed in or on their way; exact from `limit` on.

        Those that the next step takes do not wait: they are only on their way.
        """
        arrivals = [group for _, group in list(self._inbox) if group is not None]
        waiting = len(self.core.scheduler.waiting) + len(arrivals)
        if waiting < limit:
            return waiting
        try:
            return waiting - taken_next(self.core.scheduler, arrivals)
        except (RuntimeError, LookupError):  # the state changed while it was read
            return waiting

    @property
    def streams(self) -> list[RequestStream]:
        """Those that have not ended."""
        with self.lock:
            return list(self._streams.values())

    def find(self, request_id: str) -> RequestStream | None:
        """The unfinished stream of this id."""
        return self._streams.get(request_id)

    def add(self, stream: RequestStream, command: Command) -> None:
        """Hand a request in: `command` adds it.  Raises DuplicateError."""
        with self.lock:
            if stream.request_id in self._streams:
                raise DuplicateError(stream.request_id)
            self._streams[stream.request_id] = stream
        self.post(command, SequenceGroup(stream.request_id, len(stream.prompt_token_ids), stream.width))

    def post(self, command: Command, adds: SequenceGroup | None = None) -> None:
        """Do something between two steps, in order."""
        if not self.busy:
            self.progress = time.monotonic()
        self._inbox.append((command, adds))
        self._bell.set()

    def abort(self, stream: RequestStream) -> None:
        """End a request wherever it is."""
        self.post(lambda: self._abort(stream))

    def fail_all(self, error: Exception) -> None:
        """End every stream now, whatever the engine does."""
        streams = self.streams
        for stream in streams:
            self.abort(stream)
        self.end([(stream, None, error) for stream in streams])

    def end(self, ended: Sequence[Ended]) -> None:
        """Give streams their last output or an error, and wake whoever has something to take.  From any thread."""
        with self.lock:
            for stream, output, error in ended:
                stream.end(output, error)
                if self._streams.get(stream.request_id) is stream:
                    del self._streams[stream.request_id]
                if not stream.dirty:
                    stream.dirty = True
                    self._dirty.append(stream)
            wake = bool(self._dirty) and not self._waking
            self._waking = self._waking or wake
        if wake and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        with self.lock:
            dirty, self._dirty, self._waking = self._dirty, [], False
            for stream in dirty:
                stream.dirty = False
        for stream in dirty:
            stream.ready.set()

    # the thread

    def _run(self) -> None:
        try:
            while not self._stop:
                self._bell.clear()
                self._serve_inbox()
                if self.core.has_unfinished_requests():
                    self._step()
                else:
                    self._publish()
                    self._bell.wait()
            self._serve_inbox()  # the aborts of what was unfinished
            if not self.core.scheduler.has_unfinished():
                self._step()
        except BaseException as error:
            self._die(error)

    def _serve_inbox(self) -> None:
        while self._inbox:
            self._inbox[0][0]()  # it leaves the queue only when done, so that `num_waiting` never misses it
            self._inbox.popleft()

    def _step(self) -> None:
        had_work = self.core.scheduler.has_unfinished()  # else there are only last outputs of what was aborted
        outputs = self.core.step(finished_only=True)
        if had_work:
            self.progress = time.monotonic()
        self._deliver(outputs)
        if self.core.failures >= self.max_failed_steps:
            raise RuntimeError(f"the last {self.core.failures} steps failed: the device seems to be broken")

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        self._publish()
        ended: list[Ended] = []
        with self.lock:
            for name, branches in self.core.moved:
                stream = self._streams.get(name)
                if stream is not None and stream.gather(branches) and not stream.dirty:
                    stream.dirty = True
                    self._dirty.append(stream)
            for output in outputs:
                stream = self._streams.get(output.request_id)
                if stream is not None:
                    ended.append((stream, output, None))
        self.end(ended)

    def _publish(self) -> None:
        self.snapshot = self.core.stats.snapshot(self.core.scheduler.counts())

    def _abort(self, stream: RequestStream) -> None:
        """Commands come in order, so a later request of the same id is not there yet."""
        if self._streams.get(stream.request_id) is stream or stream.error is not None:
            self.core.abort_request(stream.request_id)

    def _die(self, error: BaseException) -> None:
        """The engine cannot go on: say so, write the state down, and end everything that is pending."""
        self.dead = error
        path = dump_step(self.core.dump_dir, self.core.scheduler, None, error)
        where = f"; its state is in {path}" if path else ""
        logger.critical("the engine cannot go on: %s%s", said(error), where, exc_info=error)
        failure = EngineDeadError(f"the engine has stopped: {said(error)}")
        self.end([(stream, None, failure) for stream in self.streams])
        if self.on_death is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.on_death, error)


def said(error: BaseException) -> str:
    """Kind and first line of an error: a broken law's message goes on with the whole state."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
