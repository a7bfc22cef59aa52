"""The server's life: listen, serve, drain on a signal, exit with a status that says how it went.

first SIGTERM or SIGINT   new requests get 503, unfinished ones have `drain_timeout` seconds, then status 0
second one                what is unfinished is told so and ends now, status 0
one before it listens     it ends at once, status 0
the engine cannot go on   every client is told so, status 1
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import uvicorn

from engine.async_llm import AsyncLLM
from engine.core import EngineCore
from engine.errors import ConfigError
from engine.server.app import create_app
from engine.server.connections import Connection
from engine.server.options import ServerOptions
from engine.server.signals import SIGNALS, leave

logger = logging.getLogger("lawful")

LAST_WORDS = 1.0  # seconds that final events have to reach their clients
WORKERS = "lawful-text"  # threads that tokenize


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: it would close the socket at once and tell nobody."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Lifecycle:
    """Runs one server until it is told to end, or has to."""

    def __init__(self, core: EngineCore, options: ServerOptions, model_name: str) -> None:
        core.dump_dir = options.dump_dir
        self.llm = AsyncLLM.from_core(
            core,
            max_queued_requests=options.max_queued_requests,
            stall_timeout=options.stall_timeout,
            max_failed_steps=options.max_failed_steps,
        )
        self.options = options
        self._model_name = model_name
        self.status = 0
        self._signals = 0
        self._ending = asyncio.Event()
        self._now = asyncio.Event()
        config = uvicorn.Config(
            create_app(self.llm, options, model_name),
            http=Connection,
            ws="none",
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=30,
            timeout_graceful_shutdown=1,
            server_header=False,
        )
        self._server = _Server(config)

    async def run(self, listener: socket.socket) -> bool:
        """Serve until the end; whether the engine's thread has stopped too."""
        loop = asyncio.get_running_loop()
        self.llm.engine.on_death = self._on_death
        await self.llm.start()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        serving = asyncio.create_task(self._server.serve([listener]))
        while not (self._server.started or serving.done()):
            await asyncio.sleep(0.01)
        host, port = listener.getsockname()[:2]
        where = f"[{host}]" if ":" in host else host
        logger.info("serving %s on http://%s:%d", self._model_name, where, port)  # from here on signals are heard
        ending = asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait({serving, ending}, return_when=asyncio.FIRST_COMPLETED)
            await self._drain()
        finally:
            stopped = await self.llm.shutdown(timeout=0.0 if self._now.is_set() else LAST_WORDS)
            await self._flush()
            self._server.should_exit = True
            await serving
            for number in SIGNALS:
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)  # it is ending: one more changes nothing
            ending.cancel()
        return stopped

    async def _drain(self) -> None:
        if self.llm.engine.dead is not None:
            return
        draining = asyncio.create_task(self.llm.drain(self.options.drain_timeout))
        hurry = asyncio.create_task(self._now.wait())
        await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
        for task in (draining, hurry):
            task.cancel()

    async def _flush(self) -> None:
        """Let the last events reach their clients."""
        waited = 0.0
        while self._server.server_state.tasks and waited < LAST_WORDS:
            await asyncio.sleep(0.02)
            waited += 0.02

    def _on_signal(self, number: int) -> None:
        self._signals += 1
        name = signal.Signals(number).name
        if self._signals == 1:
            unfinished = len(self.llm.engine.streams)
            logger.info("%s: no new requests; %d unfinished have %g s", name, unfinished, self.options.drain_timeout)
            self._ending.set()
        else:
            logger.warning("%s again: ending now", name)
            self._now.set()

    def _on_death(self, error: BaseException) -> None:
        self.status = 1
        self._ending.set()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket.  Raises ConfigError when there can be none."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None
    return listener


def serve(core: EngineCore, options: ServerOptions, model_name: str, listener: socket.socket | None = None) -> int:
    """Serve until a signal ends it; the exit status."""
    listener = listener or listen(options.host, options.port)
    gc.collect()
    gc.freeze()  # the model's objects live as long as the server: no collection needs to look at them again

    async def main() -> tuple[int, bool]:
        loop = asyncio.get_running_loop()
        workers = ThreadPoolExecutor(thread_name_prefix=WORKERS)
        loop.set_default_executor(workers)
        lifecycle = Lifecycle(core, options, model_name)
        stopped = await lifecycle.run(listener)
        workers.shutdown(wait=False, cancel_futures=True)
        loop.set_default_executor(ThreadPoolExecutor())  # the loop waits for its own one, however long a template runs
        return lifecycle.status, stopped

    status, stopped = asyncio.run(main())
    core.close()
    logger.info("the server has ended with status %d", status)
    busy = any(thread.name.startswith(WORKERS) for thread in threading.enumerate())
    if busy or not stopped:  # a thread hangs in a step or in a text: the interpreter would wait for what it holds
        leave(status)
    return status
