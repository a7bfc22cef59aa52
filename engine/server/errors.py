"""Error bodies in OpenAI's form: {"error": {"message", "type", "param", "code"}}, with the right status."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.errors import (
    DuplicateError,
    InvalidParameterError,
    InvalidPromptError,
    QueueFullError,
    RefusedError,
    RequestFailedError,
    TokenizerError,
    UnavailableError,
    reason_of,
)
from engine.server.encoding import JsonResponse

logger = logging.getLogger("lawful")

RETRY_AFTER = 1  # seconds: a queue of this engine moves in steps, not in minutes


class ApiError(Exception):
    """An answer that is an error.

    param: the request's field it is about.  code: a word for programs.  reason: the word for metrics; default the code.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code
        self.headers = dict(headers or {})
        self.reason = reason or code or "invalid_request"

    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return _ErrorResponse(self)


class _ErrorResponse(JsonResponse):
    """Leaves in the scope why the request is refused, for whoever counts."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.body(), error.status, error.headers)
        self._reason = error.reason

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["refusal"] = self._reason
        await super().__call__(scope, receive, send)


_KINDS = {429: "rate_limit_error", 503: "service_unavailable_error"}


@dataclass(frozen=True)
class Names:
    """What the client calls the things that the engine has one name for.

    prompt: "prompt" or "messages".  max_tokens: None if the client named no such limit.  width: "n" or "best_of".
    """

    prompt: str = "prompt"
    max_tokens: str | None = "max_tokens"
    logprobs: str = "logprobs"
    width: str = "n"

    def of_limit(self, reason: str) -> str | None:
        """The field that a refusal by the scheduler is about."""
        return {
            "max_model_len": self.prompt,
            "empty_prompt": self.prompt,
            "max_num_seqs": self.width,
            "num_gpu_blocks": self.max_tokens or self.prompt,
            "priority": "priority",
            "duplicate_id": "request_id",
        }.get(reason)

    def of_parameter(self, error: InvalidParameterError) -> tuple[str, str]:
        """The field that a value stood in, and the message with the client's own names."""
        limit = self.max_tokens or "max_tokens"
        renamed = {"prompt_token_ids": self.prompt, "logprobs": self.logprobs, "max_tokens": limit}
        name = renamed.get(error.parameter, error.parameter)
        allowed = error.allowed.replace("max_tokens", limit)
        return name, str(InvalidParameterError(name, error.value, allowed))


@contextlib.contextmanager
def named(names: Names) -> Iterator[None]:
    """Within it the engine's refusals become errors that name the client's own fields."""
    try:
        yield
    except (ValueError, UnavailableError) as error:
        raise as_api_error(error, names) from error


_PLAIN = Names()


def as_api_error(error: Exception, names: Names = _PLAIN) -> ApiError:
    """What a client is told about an exception of the engine."""
    if isinstance(error, ApiError):
        return error
    reason = reason_of(error)
    if isinstance(error, DuplicateError):
        return ApiError(str(error), param="request_id", code="duplicate_request_id", reason=reason)
    if isinstance(error, RefusedError):
        code = "context_length_exceeded" if error.reason == "max_model_len" else error.reason
        return ApiError(str(error), param=names.of_limit(error.reason), code=code, reason=reason)
    if isinstance(error, InvalidParameterError):
        param, message = names.of_parameter(error)
        return ApiError(message, param=param, code="invalid_value")
    if isinstance(error, InvalidPromptError | TokenizerError):
        return ApiError(str(error), param=names.prompt, code="invalid_prompt")
    if isinstance(error, UnavailableError):
        full = isinstance(error, QueueFullError)
        headers = {"Retry-After": str(RETRY_AFTER if full else 5)}
        return ApiError(str(error), 429 if full else 503, code=error.reason, headers=headers)
    if isinstance(error, RequestFailedError):
        return ApiError(str(error), 500, code="request_failed")
    logger.error("an answer failed", exc_info=error)
    return ApiError("internal error; the server's log says more", 500, code="internal_error")


def install(app: FastAPI) -> None:
    """Give every error of the application this form.  What is not named here reaches the gate, which does the same."""

    async def on_error(_: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return (wrong_content_type(request, error) or validation_error(error)).response()

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return http_error(request, error).response()

    for kind in (ApiError, ValueError, UnavailableError, RequestFailedError):
        app.add_exception_handler(kind, on_error)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)


def http_error(request: Request, error: HTTPException) -> ApiError:
    """No such path, no such method, a body that is not even text; each in the API's words."""
    asked = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return ApiError(f"there is no {asked:.200}", 404, code="unknown_url")
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{asked:.200} is not allowed; allowed here: {allowed}"
        return ApiError(message, 405, code="method_not_allowed", headers=error.headers)
    cause = error.__cause__
    if error.status_code == 400 and isinstance(cause, ValueError | RecursionError):  # raised while JSON was read
        if isinstance(cause, UnicodeDecodeError):
            why = f"it is not UTF-8 (byte {cause.start})"
        elif isinstance(cause, RecursionError):
            why = "it is nested too deeply"
        else:
            why = str(cause)
        return ApiError(f"the body is not valid JSON: {why}", code="invalid_json")
    return ApiError(str(error.detail), error.status_code, headers=error.headers)


def wrong_content_type(request: Request, error: RequestValidationError) -> ApiError | None:
    """A body of another type was not read as JSON, whatever is in it.

    It is not read as JSON all the same, since a browser sends forms and plain text to any server for any page.
    """
    given = request.headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    if error.body is None or kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return None
    what = f"has the Content-Type {given!r:.80}" if given else "has no Content-Type"
    return ApiError(
        f"the body {what}; send JSON with the header Content-Type: application/json "
        "(curl: -H 'Content-Type: application/json')",
        415,
        code="unsupported_media_type",
    )


def validation_error(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body, in one sentence."""
    problems = error.errors()
    if not problems:
        return ApiError("the request is not valid")
    first = problems[0]
    kind = first["type"]
    if kind == "json_invalid":
        reason = (first.get("ctx") or {}).get("error", "it cannot be parsed")
        return ApiError(f"the body is not valid JSON: {reason}", code="invalid_json")
    param = _place(first["loc"])
    if kind == "extra_forbidden":
        return ApiError(f"unknown parameter: {param}", param=param, code="unknown_parameter")
    if kind == "missing":
        what = param or "the body (as application/json)"
        return ApiError(f"missing: {what}", param=param, code="missing_required_parameter")
    message = str(first["msg"]).removeprefix("Value error, ")
    return ApiError(f"{param}: {message}" if param else message, param=param, code="invalid_value")


def _place(loc: tuple[str | int, ...]) -> str | None:
    """Where a value stood, as OpenAI writes it: messages[0].role.

    Of a field that may have several types only the field is named: pydantic goes on with the types it tried.
    """
    parts = [part for part in loc if part not in ("body", "query", "path")]
    if not parts:
        return None
    place = str(parts[0])
    for part in parts[1:] if place in ("messages", "stream_options", "response_format") else ():
        if isinstance(part, int):
            place += f"[{part}]"
        elif part.isidentifier() and part != "str":
            place += f".{part}"
        if part == "content":
            break
    return place
