"""uvicorn's side of a connection, with limits of time and errors in the API's own form.

Guarantees: whoever connects and does not send a whole request head within HEAD_TIMEOUT seconds is let go, and so is
whoever trickles a body that nobody reads any more; what is no HTTP at all is answered as every other mistake.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from engine.server.errors import ApiError
from engine.server.protocol import random_id

HEAD_TIMEOUT = 20.0  # seconds from the first byte of a request, or from connecting, to the end of its headers


class Connection(H11Protocol):
    """One client's connection."""

    _clock: asyncio.TimerHandle | None = None
    _begun = False  # a request has come, or a part of one

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        self._begun = True
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """The clock runs while the client owes bytes that no endpoint waits for: those waits have limits of their own.

        A connection that is kept alive and silent is uvicorn's to close.
        """
        state = self.conn.their_state
        owes = (state is h11.IDLE and (not self._begun or bool(self.conn.trailing_data[0]))) or (
            state is h11.SEND_BODY and self.cycle is not None and self.cycle.response_complete
        )
        if not owes or self.transport.is_closing():
            self._stop_clock()
        elif self._clock is None:
            self._clock = self.loop.call_later(HEAD_TIMEOUT, self._on_late)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _on_late(self) -> None:
        self._clock = None
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            text = f"the request's headers did not arrive within {HEAD_TIMEOUT:g} s"
            self._answer(ApiError(text, 408, code="request_timeout"))
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP, at the begin of a request or in the midst of a body."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            started = cycle.response_started
            cycle.disconnected = True  # its endpoint has nobody to answer any more
            cycle.message_event.set()
            if started:
                self.transport.abort()
                return
        self._answer(
            ApiError("this is not a valid HTTP/1.1 request, or its headers are too large", code="invalid_http")
        )

    def _answer(self, error: ApiError) -> None:
        """Answer what never became a request, and hang up."""
        response = error.response()
        headers = [*response.raw_headers, (b"x-request-id", random_id().encode()), (b"connection", b"close")]
        try:
            for part in (
                h11.Response(
                    status_code=error.status, headers=headers, reason=HTTPStatus(error.status).phrase.encode()
                ),
                h11.Data(data=bytes(response.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(part) or b"")
        except h11.LocalProtocolError:  # an answer is under way: there is no place for another one
            self.transport.abort()
        else:
            self.transport.close()

    def _should_upgrade(self) -> bool:
        return False  # this server speaks HTTP/1.1 alone; clients that offer more go on with it
