"""What happens to every request before an endpoint sees it: its id, its key, its body; and to every answer: its id.

Plain ASGI: nothing stands between an endpoint and the news that its client has gone.
"""

from __future__ import annotations

import asyncio
import hmac
import logging

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.async_llm import AsyncLLM
from engine.server.errors import ApiError, as_api_error
from engine.server.options import ServerOptions
from engine.server.protocol import random_id
from engine.server.service import ACCEPTED, request_id_of
from engine.server.streaming import CUT_OFF

logger = logging.getLogger("lawful")

OPEN = frozenset({"/health", "/version", "/metrics", "/ui", "/openapi.json"})  # what needs no key, if keys are set
GENERATING = frozenset({"/v1/completions", "/v1/chat/completions"})  # what is refused here is a refused request
BODY_TIMEOUT = 60.0  # seconds that a client may take to send its body
DISCARDED = 64 << 20  # bytes of a body that is too large which are read all the same,
DISCARD_TIME = 2.0  # for so many seconds


class Gate:
    """Checks id, key and size; reads the body whole, so that the limit holds for chunked ones too.

    Every answer leaves through it: with its id, in the API's form whatever went wrong, and counted if it is a refusal.
    """

    def __init__(self, app: ASGIApp, llm: AsyncLLM, options: ServerOptions) -> None:
        self.app = app
        self.llm = llm
        self.limit = options.max_body_bytes
        self.keys = [key.encode() for key in options.api_keys]
        self._reading: set[asyncio.Timeout] = set()  # the limits of bodies that are being read
        llm.when_closing(self._stop_reading)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        cycle = getattr(send, "__self__", None)  # uvicorn's; other servers close slow connections themselves
        transport = getattr(cycle, "transport", None)
        if transport is not None:
            scope[CUT_OFF] = transport.abort
        state = scope.setdefault("state", {})
        state["request_id"] = random_id()
        path = scope["path"].removeprefix(scope.get("root_path", ""))  # mounted, or not
        counted = path in GENERATING and scope["method"] == "POST"
        head = scope["method"] == "HEAD"
        if head:
            scope = {**scope, "method": "GET"}
        started = False

        async def answer(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["X-Request-Id"] = state["request_id"]
                if counted and message["status"] >= 400 and not state.get(ACCEPTED):
                    self.llm.refuse(state.get("refusal", "invalid_request"))
            elif head:
                message = {**message, "body": b""}
            await send(message)

        try:
            await self._pass(path, scope, receive, answer)
        except asyncio.CancelledError:  # uvicorn waits no longer
            if not self.llm.closing:
                raise
            if started:
                await _hang_up(scope)
            else:
                await _shutting_down().response()(scope, receive, answer)
        except Exception as error:
            response = as_api_error(error).response()
            if started:
                await _hang_up(scope)
            else:
                await response(scope, receive, answer)

    async def _pass(self, path: str, scope: Scope, receive: Receive, answer: Send) -> None:
        headers = Headers(scope=scope)
        scope["state"]["request_id"] = request_id_of(headers.get("x-request-id"))
        self._check_key(path, headers)
        body = await self._read(headers, receive)
        if body is None:
            return
        rest: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_body() -> Message:
            return rest.pop() if rest else await receive()

        await self.app(scope, receive_body, answer)

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
        limit = asyncio.timeout(DISCARD_TIME if too_large else BODY_TIMEOUT)
        self._reading.add(limit)
        try:
            async with limit:
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
            if self.llm.closing:
                raise _shutting_down() from None
            text = f"the body did not arrive within {BODY_TIMEOUT:g} s"
            raise ApiError(text, 408, code="request_timeout", headers={"Connection": "close"}) from None
        finally:
            self._reading.discard(limit)
        if too_large:
            raise self._too_large()
        return b"".join(parts)

    def _stop_reading(self) -> None:
        """Nothing that is not here yet will be served."""
        for limit in self._reading:
            limit.reschedule(0.0)

    def _too_large(self) -> ApiError:
        return ApiError(
            f"the body has more than {self.limit} bytes",
            413,
            code="body_too_large",
            headers={"Connection": "close"},
        )


def _shutting_down() -> ApiError:
    headers = {"Retry-After": "5", "Connection": "close"}
    return ApiError("the server is shutting down", 503, code="shutdown", headers=headers)


async def _hang_up(scope: Scope) -> None:
    """Half an answer cannot be mended: the client learns of it by the end of the connection."""
    if CUT_OFF in scope:
        scope[CUT_OFF]()
        await asyncio.sleep(0)  # the server notes it before this request counts as done
