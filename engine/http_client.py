"""A small HTTP/1.1 client for asyncio: enough to load a server with streams at little cost, and to hang up on it.

One connection a request, so that closing it is what a client that leaves does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit


class HttpError(RuntimeError):
    """The server's answer is not what was hoped for.  status: 0 if there was none."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Connection:
    """One request on one connection.

        async with Connection(url, "/v1/completions", body) as answer:
            async for event in answer.events(): ...

    status, headers: of the answer, when the block begins.
    """

    def __init__(
        self, url: str, path: str, body: Any = None, key: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname:
            raise HttpError(f"the URL {url!r} is not http://host:port")
        self._host, self._port = parts.hostname, parts.port or 80
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [
            f"{'GET' if body is None else 'POST'} {parts.path.rstrip('/')}{path} HTTP/1.1",
            f"Host: {parts.netloc}",
            "Connection: close",
            *([f"Authorization: Bearer {key}"] if key else []),
            *(["Content-Type: application/json", f"Content-Length: {len(data)}"] if body is not None else []),
            *(f"{name}: {value}" for name, value in (headers or {}).items()),
        ]
        self._request = "\r\n".join(lines).encode() + b"\r\n\r\n" + data
        self._writer: asyncio.StreamWriter | None = None
        self.status = 0
        self.headers: dict[str, str] = {}

    async def __aenter__(self) -> Connection:
        self._reader, writer = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
        self._writer = writer
        try:
            writer.write(self._request)
            await writer.drain()
            first = (await self._reader.readline()).decode("latin-1").split(" ", 2)
            if len(first) < 2:
                raise HttpError("the server closed the connection without an answer")
            self.status = int(first[1])
            while (line := (await self._reader.readline()).decode("latin-1").strip()) != "":
                name, _, value = line.partition(":")
                self.headers[name.lower()] = value.strip()
        except BaseException:
            self.hang_up()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hang_up()

    def hang_up(self) -> None:
        """Leave without another word."""
        if self._writer is not None:
            self._writer.transport.abort()

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        if self.headers.get("transfer-encoding") == "chunked":
            while (size := int((await self._reader.readline()).split(b";")[0] or b"0", 16)) > 0:
                yield await self._reader.readexactly(size)
                await self._reader.readexactly(2)
            return
        left = int(self.headers.get("content-length", "-1"))
        while left != 0 and (data := await self._reader.read(1 << 16)):
            left -= len(data) if left > 0 else 0
            yield data

    async def body(self) -> bytes:
        """The whole body."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def json(self) -> Any:
        """The whole body, parsed."""
        return json.loads(await self.body())

    async def events(self) -> AsyncIterator[Any]:
        """Parsed server-sent events up to [DONE].  Raises HttpError for an error status, an error event, no [DONE]."""
        if self.status != 200:
            raise HttpError(_message(await self.body()), self.status)
        rest = b""
        async for chunk in self.chunks():
            *events, rest = (rest + chunk).split(b"\n\n")
            for event in events:
                data = event.removeprefix(b"data: ")
                if data == b"[DONE]":
                    return
                value = json.loads(data)
                if "error" in value:
                    raise HttpError(value["error"]["message"], self.status)
                yield value
        raise HttpError("the stream ended without [DONE]", self.status)


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace") or "no body"


async def get_json(url: str, path: str, key: str | None = None) -> Any:
    """GET; raises HttpError for a status other than 200."""
    async with Connection(url, path, key=key) as answer:
        body = await answer.body()
        if answer.status != 200:
            raise HttpError(_message(body), answer.status)
        return json.loads(body)
