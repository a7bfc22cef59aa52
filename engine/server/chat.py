"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from engine.outputs import RequestOutput
from engine.sampling import SamplingParams
from engine.server.answers import LogprobWriter, usage, usage_of
from engine.server.encoding import JsonResponse, event
from engine.server.errors import ApiError, Names, named
from engine.server.prompts import refuse_unsupported, sampling_params, width_name
from engine.server.protocol import ChatRequest, ChatResponse, ErrorResponse, now
from engine.server.service import Service, service_of
from engine.server.streaming import EventStream, unless_disconnected
from engine.stream import Delta, RequestStream

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    response_model=ChatResponse,
    responses={400: {"model": ErrorResponse}, 429: {"model": ErrorResponse}, 503: {"model": ErrorResponse}},
)
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    service = service_of(request)
    model = service.check_model(body.model)
    refuse_unsupported(body)
    logprobs = body.top_logprobs or 0 if body.logprobs else None
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError("top_logprobs needs logprobs: true", param="top_logprobs")
    limit = next((name for name in ("max_completion_tokens", "max_tokens") if getattr(body, name) is not None), None)
    ready = asyncio.Event()
    with named(Names("messages", limit, "top_logprobs", width_name(body))):
        most = None if limit is None else getattr(body, limit)
        params = sampling_params(body, most, logprobs, body.best_of, service.llm.core.vocab_size)
        answer = _Answer(service, body, model, service.public_id(request, body.request_id, "chatcmpl"), params)
        prompt = await service.prompts.of_chat(body)
        streams = service.submit(request, answer.id, [prompt], params, deltas=bool(body.stream), ready=ready)
    if body.stream:
        return EventStream(
            answer.events(streams[0]), lambda: service.close(answer.id, streams), service.options.write_timeout
        )
    try:
        outputs = await unless_disconnected(request, service.results(streams))
    finally:
        service.close(answer.id, streams)
    return Response(status_code=499) if outputs is None else JsonResponse(answer.whole(outputs[0]))


class _Answer:
    """Builds the answer to one request, whole or in chunks."""

    def __init__(self, service: Service, body: ChatRequest, model: str, name: str, params: SamplingParams) -> None:
        self.service = service
        self.body = body
        self.id = name
        self.params = params
        self._base = {"id": name, "object": "chat.completion", "created": now(), "model": model}
        self._logprobs = LogprobWriter(service.llm.core.tokenizer, params.logprobs or 0)

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """The answer when all is done."""
        choices: list[dict[str, Any]] = []
        for completion in output.outputs:
            choice: dict[str, Any] = {
                "index": completion.index,
                "message": {"role": "assistant", "content": completion.text, "refusal": None},
                "logprobs": None,
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
            }
            if completion.logprobs is not None:
                choice["logprobs"] = self._logprobs.chat(completion.token_ids, completion.logprobs)
            if self.body.return_token_ids:
                choice["token_ids"] = completion.token_ids
            choices.append(choice)
        answer = {**self._base, "choices": choices, "usage": usage_of([output])}
        if self.body.return_token_ids:
            answer["prompt_token_ids"] = output.prompt_token_ids
        return answer

    async def events(self, stream: RequestStream) -> AsyncIterator[bytes]:
        """The answer in chunks.  The role comes first, with the first text of a choice, not before."""
        base = {**self._base, "object": "chat.completion.chunk"}
        options = self.body.stream_options
        wants_usage = options is not None and bool(options.include_usage)
        no_usage = {"usage": None} if wants_usage else {}
        begun: set[int] = set()
        made = 0
        async for deltas in stream:
            chunks: list[bytes] = []
            for delta in deltas:
                made += len(delta.token_ids)
                if delta.index not in begun:
                    begun.add(delta.index)
                    first = self._choice(delta.index, {"role": "assistant", "content": ""})
                    chunks.append(event({**base, "choices": [first], **no_usage}))
                choice = self._piece(delta)
                if delta.text or delta.finish_reason or choice["logprobs"] or self.body.return_token_ids:
                    chunks.append(event({**base, "choices": [choice], **no_usage}))
            if chunks:
                yield b"".join(chunks)
        if wants_usage:
            yield event({**base, "choices": [], "usage": usage(len(stream.prompt_token_ids), made)})

    def _piece(self, delta: Delta) -> dict[str, Any]:
        choice = self._choice(delta.index, {"content": delta.text} if delta.text else {})
        choice["finish_reason"], choice["stop_reason"] = delta.finish_reason, delta.stop_reason
        if delta.logprobs:
            choice["logprobs"] = self._logprobs.chat(delta.token_ids, delta.logprobs)
        if self.body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _choice(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
