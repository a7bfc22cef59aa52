"""Error bodies in OpenAI's form: {"error": {"message", "type", "param", "code"}}, with the right status."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from engine.errors import (
    DuplicateError,
    InvalidParameterError,
    InvalidPromptError,
    QueueFullError,
    RefusedError,
    RequestFailedError,
    TokenizerError,
    UnavailableError,
)
from engine.server.encoding import JsonResponse

logger = logging.getLogger("lawful")

RETRY_AFTER = 1  # seconds: a queue of this engine moves in steps, not in minutes


class ApiError(Exception):
    """An answer that is an error.  param: the request's field it is about.  code: a word for programs."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return JsonResponse(self.body(), self.status, self.headers)


_KINDS = {429: "rate_limit_error", 503: "service_unavailable_error"}
_PARAMS = {  # field of the request that a refusal is about
    "max_model_len": "prompt",
    "max_num_seqs": "n",
    "num_gpu_blocks": "max_tokens",
    "priority": "priority",
    "duplicate_id": "request_id",
    "empty_prompt": "prompt",
}


def as_api_error(error: Exception) -> ApiError:
    """What a client is told about an exception of the engine."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, DuplicateError):
        return ApiError(str(error), param="request_id", code="duplicate_request_id")
    if isinstance(error, RefusedError):
        code = "context_length_exceeded" if error.reason == "max_model_len" else error.reason
        return ApiError(str(error), param=_PARAMS.get(error.reason), code=code)
    if isinstance(error, InvalidParameterError):
        return ApiError(str(error), param=error.parameter, code="invalid_value")
    if isinstance(error, InvalidPromptError | TokenizerError):
        return ApiError(str(error), param="prompt", code="invalid_prompt")
    if isinstance(error, UnavailableError):
        full = isinstance(error, QueueFullError)
        headers = {"Retry-After": str(RETRY_AFTER if full else 5)}
        return ApiError(str(error), 429 if full else 503, code=error.reason, headers=headers)
    if isinstance(error, RequestFailedError):
        return ApiError(str(error), 500, code="request_failed")
    logger.error("an answer failed", exc_info=error)
    return ApiError("internal error; the server's log says more", 500, code="internal_error")


def install(app: FastAPI) -> None:
    """Give every error of the application this form."""

    async def on_error(_: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    async def on_validation(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return validation_error(error).response()

    async def on_http(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return ApiError(str(error.detail), error.status_code, headers=error.headers).response()

    app.add_exception_handler(Exception, on_error)  # whatever it is, the body has this form
    app.add_exception_handler(ApiError, on_error)
    app.add_exception_handler(ValueError, on_error)
    app.add_exception_handler(UnavailableError, on_error)
    app.add_exception_handler(RequestFailedError, on_error)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)


def validation_error(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body, in one sentence."""
    problems = error.errors()
    if not problems:
        return ApiError("the request is not valid")
    first = problems[0]
    place = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    kind = first["type"]
    if kind == "json_invalid":
        reason = (first.get("ctx") or {}).get("error", "it cannot be parsed")
        return ApiError(f"the body is not valid JSON: {reason}", code="invalid_json")
    param = place[0] if place else None
    if kind == "extra_forbidden":
        return ApiError(f"unknown parameter: {'.'.join(place)}", param=param, code="unknown_parameter")
    if kind == "missing":
        what = param or "the body (as application/json)"
        return ApiError(f"missing: {what}", param=param, code="missing_required_parameter")
    message = str(first["msg"]).removeprefix("Value error, ")
    return ApiError(f"{param}: {message}" if param else message, param=param, code="invalid_value")
