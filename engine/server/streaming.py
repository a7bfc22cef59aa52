"""Responses that end with their client: when the connection goes, so does the request.

Guarantees: whatever ends a response (its end, an error, a client that left, one that does not read), its clean-up is
called once; and no response keeps a socket that takes nothing for longer than the write timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.server.encoding import DONE, event
from engine.server.errors import as_api_error

logger = logging.getLogger("lawful")

T = TypeVar("T")

EARLY = 1.0  # seconds that a stream's first event may take and an error still becomes an HTTP status
CUT_OFF = "lawful.cut_off"  # key of the scope: a function that closes the connection without flushing it


async def until_disconnect(receive: Receive) -> None:
    """Wait until the client is gone.  The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T | None:
    """The work's result; None, with the work cancelled, as soon as the client is gone."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(until_disconnect(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await _cancel(task, watcher)


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


class EventStream(Response):
    """Server-sent events.

    events: yields whole events.  An exception of its first second becomes an HTTP error, a later one an error event.
    close: called once at the end, whatever that was.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None], write_timeout: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._write_timeout = write_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.ensure_future(self._send(scope, receive, send))
        watcher = asyncio.ensure_future(until_disconnect(receive))
        try:
            await asyncio.wait({sender, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
        except TimeoutError:
            logger.warning("a client read nothing for %g s and is cut off", self._write_timeout)
            if CUT_OFF in scope:
                scope[CUT_OFF]()
        finally:
            self._close()
            await _cancel(sender, watcher)

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = aiter(self._events)
        first = asyncio.ensure_future(anext(events, DONE))
        try:
            done, _ = await asyncio.wait({first}, timeout=EARLY)
            if done and (error := first.exception()) is not None:
                assert isinstance(error, Exception)
                await as_api_error(error).response()(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            chunk = await self._or_error(first)
            while chunk is not DONE:
                async with asyncio.timeout(self._write_timeout):
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                chunk = await self._or_error(anext(events, DONE))
            async with asyncio.timeout(self._write_timeout):
                await send({"type": "http.response.body", "body": DONE})
        finally:
            await _cancel(first)

    async def _or_error(self, chunk: Awaitable[bytes]) -> bytes:
        """The next event, or the one that says why there is none; after that one the iterator is at its end."""
        try:
            return await chunk
        except Exception as error:
            return event(as_api_error(error).body())
