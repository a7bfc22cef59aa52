"""What happens to every request before an endpoint sees it: its id, its key, its body.

Plain ASGI: nothing stands between an endpoint and the news that its client has gone.
"""

from __future__ import annotations

import asyncio
import hmac
import logging

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.server.errors import ApiError
from engine.server.options import ServerOptions
from engine.server.service import request_id_of
from engine.server.streaming import CUT_OFF

logger = logging.getLogger("lawful")

OPEN = frozenset({"/health", "/version", "/metrics", "/ui", "/openapi.json"})  # what needs no key, if keys are set
BODY_TIMEOUT = 60.0  # seconds that a client may take to send its body
DISCARDED = 64 << 20  # bytes of a body that is too large which are read all the same,
DISCARD_TIME = 2.0  # for so many seconds


class Gate:
    """Checks id, key and size; reads the body whole, so that the limit holds for chunked ones too."""

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self.app = app
        self.limit = options.max_body_bytes
        self.keys = [key.encode() for key in options.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        cycle = getattr(send, "__self__", None)  # uvicorn's; other servers close slow connections themselves
        transport = getattr(cycle, "transport", None)
        if transport is not None:
            scope[CUT_OFF] = transport.abort
        headers = Headers(scope=scope)
        try:
            name = request_id_of(headers.get("x-request-id"))
            scope.setdefault("state", {})["request_id"] = name
            self._check_key(scope["path"].removeprefix(scope.get("root_path", "")), headers)  # mounted, or not
            body = await self._read(headers, receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        if body is None:
            return

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = name
            await send(message)

        rest: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_body() -> Message:
            return rest.pop() if rest else await receive()

        await self.app(scope, receive_body, send_with_id)

    def _check_key(self, path: str, headers: Headers) -> None:
        if not self.keys or path in OPEN:
            return
        kind, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip().encode(errors="replace") if kind.lower() == "bearer" else b""
        matches = [hmac.compare_digest(given, known) for known in self.keys]
        if not any(matches):
            raise ApiError(
                "a valid API key is needed: Authorization: Bearer KEY",
                401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        """The body; None if the client has gone.

        Of one that is too large some more is read and thrown away: most clients look for an answer only when they
        have sent everything, and a connection that is closed before loses the answer.
        """
        length = headers.get("content-length", "0")
        too_large = length.isdigit() and int(length) > self.limit
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(DISCARD_TIME if too_large else BODY_TIMEOUT) as limit:
                while size <= self.limit + DISCARDED:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    size += len(message.get("body", b""))
                    if size > self.limit and not too_large:
                        too_large = True
                        limit.reschedule(asyncio.get_running_loop().time() + DISCARD_TIME)
                    if too_large:
                        parts.clear()
                    else:
                        parts.append(message.get("body", b""))
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            if too_large:
                raise self._too_large() from None
            text = f"the body did not arrive within {BODY_TIMEOUT:g} s"
            raise ApiError(text, 408, headers={"Connection": "close"}) from None
        if too_large:
            raise self._too_large()
        return b"".join(parts)

    def _too_large(self) -> ApiError:
        return ApiError(
            f"the body has more than {self.limit} bytes",
            413,
            code="body_too_large",
            headers={"Connection": "close"},
        )
