"""JSON and server-sent events as bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

DONE = b"data: [DONE]\n\n"


def encode(value: Any) -> bytes:
    """Compact JSON in UTF-8.

    NaN and infinities are refused, since JSON has none.  A lone surrogate, which a client can put into a message by an
    escape, goes back as the escape that it came as: backslashreplace writes exactly that.
    """
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(
        errors="backslashreplace"
    )


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(value) + b"\n\n"


class JsonResponse(Response):
    """A JSON body."""

    media_type = "application/json"

    def __init__(self, content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(encode(content), status, headers)
