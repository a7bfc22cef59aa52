"""What all endpoints share: the engine, the options, the names of models and requests."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence

from fastapi import Request

from engine.async_llm import AsyncLLM
from engine.errors import DuplicateError
from engine.outputs import RequestOutput
from engine.sampling import SamplingParams, check_token_ids
from engine.server.errors import ApiError
from engine.server.options import ServerOptions
from engine.server.prompts import PromptReader, PromptTokens
from engine.server.protocol import ID_PATTERN, random_id
from engine.stream import RequestStream

ACCEPTED = "accepted"  # key of a request's state: the engine has it, so whatever goes wrong is no refusal


class Service:
    """The engine behind the endpoints.

    model_names: what requests may call the model; answers say which they used.
    """

    def __init__(self, llm: AsyncLLM, options: ServerOptions, model_name: str) -> None:
        self.llm = llm
        self.options = options
        self.model_names = options.served_model_names or (model_name,)
        self.model_root = model_name
        self.prompts = PromptReader(llm, options)
        self.started = time.time()
        self._ids: set[str] = set()  # of requests under way

    @property
    def max_model_len(self) -> int:
        return self.llm.core.scheduler.config.max_model_len

    def check_model(self, model: str | None) -> str:
        """The model's name as it was asked for, the first one by default.  Raises ApiError for another model."""
        if model is None:
            return self.model_names[0]
        if model not in self.model_names:
            known = ", ".join(self.model_names)
            raise ApiError(
                f"the model {model!r:.100} does not exist; there is {known}", 404, param="model", code="model_not_found"
            )
        return model

    def public_id(self, request: Request, given: str | None, kind: str) -> str:
        """The id of an answer, after the caller's: the body's request_id, or the header X-Request-Id."""
        name: str = given or request.scope["state"]["request_id"]
        return f"{kind}-{name}"

    def check_token_ids(self, field: str, token_ids: list[int]) -> None:
        """Raise InvalidParameterError, naming the field, unless the model has all of them."""
        check_token_ids(field, token_ids, self.llm.core.vocab_size)

    def submit(
        self,
        request: Request,
        name: str,
        prompts: Sequence[PromptTokens],
        params: SamplingParams,
        *,
        deltas: bool,
        ready: asyncio.Event,
    ) -> list[RequestStream]:
        """Hand all prompts of a request to the engine, or none of them.  `close` must be called afterwards."""
        self.llm.check_available(len(prompts))
        if name in self._ids:
            raise DuplicateError(name)
        if len(prompts) > 1:
            for prompt in prompts:  # before the first of them is on its way
                self.llm.core.check_request(prompt.token_ids, params)
        arrival = time.monotonic()
        streams: list[RequestStream] = []
        try:
            for i, prompt in enumerate(prompts):
                # Engine ids with a space cannot clash with a caller's own, which have none.
                part = name if len(prompts) == 1 else f"{name} {i}"
                streams.append(
                    self.llm.submit(
                        prompt.token_ids,
                        params,
                        part,
                        prompt_text=prompt.text,
                        deltas=deltas,
                        ready=ready,
                        arrival_time=arrival,
                    )
                )
        except Exception:
            for stream in streams:
                stream.abort()
            raise
        self._ids.add(name)
        request.scope["state"][ACCEPTED] = True
        return streams

    async def results(self, streams: Sequence[RequestStream]) -> list[RequestOutput]:
        """The results of all streams, which share one event.  Raises the error of the first that failed."""
        for stream in streams:
            while not stream.ended:
                await stream.ready.wait()
                stream.ready.clear()
            if stream.error is not None:
                raise stream.error
        return [stream.output for stream in streams if stream.output is not None]

    def close(self, name: str, streams: Sequence[RequestStream]) -> None:
        """Forget a request: whatever of it is unfinished ends now."""
        self._ids.discard(name)
        for stream in streams:
            stream.abort()


def service_of(request: Request) -> Service:
    """The service of the application that a request came to."""
    service: Service = request.app.state.service
    return service


def request_id_of(header: str | None) -> str:
    """The caller's X-Request-Id, or one that nobody else has.  Raises ApiError for one that cannot be used."""
    if header is None:
        return random_id()
    if not re.fullmatch(ID_PATTERN, header):
        message = "X-Request-Id must be 1 to 256 visible ASCII characters"
        raise ApiError(message, param="X-Request-Id", code="invalid_value")
    return header
