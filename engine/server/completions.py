"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from engine.outputs import CompletionOutput, RequestOutput
from engine.sampling import SamplingParams
from engine.server.answers import LogprobWriter, usage, usage_of
from engine.server.encoding import JsonResponse, event
from engine.server.errors import ApiError, Names, named
from engine.server.prompts import PromptTokens, refuse_unsupported, sampling_params, width_name
from engine.server.protocol import CompletionRequest, CompletionResponse, ErrorResponse, now
from engine.server.service import Service, service_of
from engine.server.streaming import EventStream, unless_disconnected
from engine.stream import Delta, RequestStream

router = APIRouter()


@router.post(
    "/v1/completions",
    response_model=CompletionResponse,
    responses={400: {"model": ErrorResponse}, 429: {"model": ErrorResponse}, 503: {"model": ErrorResponse}},
)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Complete one or several prompts."""
    service = service_of(request)
    model = service.check_model(body.model)
    refuse_unsupported(body)
    logprobs = body.logprobs
    if body.echo and logprobs is not None:
        raise ApiError(
            "logprobs with echo are not supported: those of prompt tokens are not computed", param="logprobs"
        )
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    scoring = max_tokens == 0 and bool(body.echo)
    ready = asyncio.Event()
    names = Names("prompt", None if body.max_tokens is None else "max_tokens", width=width_name(body))
    with named(names):
        params = sampling_params(
            body, 1 if scoring else max_tokens, logprobs, body.best_of, service.llm.core.vocab_size
        )
        answer = _Answer(service, body, model, service.public_id(request, body.request_id, "cmpl"), params)
        answer.prompts = await service.prompts.of_completion(body)
        if scoring:
            return answer.echo_alone()
        streams = service.submit(request, answer.id, answer.prompts, params, deltas=bool(body.stream), ready=ready)
    if body.stream:
        return EventStream(
            answer.events(streams, ready), lambda: service.close(answer.id, streams), service.options.write_timeout
        )
    try:
        outputs = await unless_disconnected(request, service.results(streams))
    finally:
        service.close(answer.id, streams)
    return Response(status_code=499) if outputs is None else JsonResponse(answer.whole(outputs))


class _Answer:
    """Builds the answer to one request, whole or in chunks."""

    def __init__(
        self, service: Service, body: CompletionRequest, model: str, name: str, params: SamplingParams
    ) -> None:
        self.service = service
        self.body = body
        self.id = name
        self.params = params
        self.prompts: list[PromptTokens] = []
        self._base = {"id": name, "object": "text_completion", "created": now(), "model": model}
        self._logprobs = LogprobWriter(service.llm.core.tokenizer, params.logprobs or 0)

    def echo_alone(self) -> Response:
        """max_tokens 0 with echo: the prompts, and nothing is computed."""
        for prompt in self.prompts:
            limit = self.service.max_model_len
            if len(prompt.token_ids) > limit:
                message = f"the prompt has {len(prompt.token_ids)} tokens; max_model_len is {limit}"
                raise ApiError(message, param="prompt", code="context_length_exceeded")
            self.service.check_token_ids("prompt", prompt.token_ids)
        choices = [
            self._choice(i * self.params.n + k, self._text_of(prompt), finish_reason="length")
            for i, prompt in enumerate(self.prompts)
            for k in range(self.params.n)
        ]
        counts = usage(sum(len(prompt.token_ids) for prompt in self.prompts), 0)
        if not self.body.stream:
            return JsonResponse({**self._base, "choices": choices, "usage": counts})

        async def events() -> AsyncIterator[bytes]:
            for choice in choices:
                yield event({**self._base, "choices": [choice], **self._no_usage()})
            if self._wants_usage():
                yield event({**self._base, "choices": [], "usage": counts})

        return EventStream(events(), lambda: None, self.service.options.write_timeout)

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The answer when all is done."""
        choices = []
        for i, (prompt, output) in enumerate(zip(self.prompts, outputs, strict=True)):
            for completion in output.outputs:
                index = i * self.params.n + completion.index
                choices.append(self._finished(index, prompt, completion))
        return {**self._base, "choices": choices, "usage": usage_of(outputs)}

    def _finished(self, index: int, prompt: PromptTokens, completion: CompletionOutput) -> dict[str, Any]:
        choice = self._choice(
            index,
            (self._text_of(prompt) if self.body.echo else "") + completion.text,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
        )
        if completion.logprobs is not None:
            choice["logprobs"] = self._logprobs.completion(completion.token_ids, completion.logprobs, 0)
        if self.body.return_token_ids:
            choice |= {"token_ids": completion.token_ids, "prompt_token_ids": prompt.token_ids}
        return choice

    async def events(self, streams: list[RequestStream], ready: asyncio.Event) -> AsyncIterator[bytes]:
        """The answer in chunks: one for every delta of every choice, whatever prompt it belongs to."""
        made = 0
        offsets = [0] * (len(streams) * self.params.n)
        echoed = [not self.body.echo] * len(offsets)
        left = set(range(len(streams)))
        while left:
            ready.clear()  # before looking: what comes from here on sets it again
            chunks: list[bytes] = []
            settled = True
            for i in sorted(left):
                ended = streams[i].ended
                deltas = streams[i].take()
                if ended and not deltas:  # not before: an error is raised only when all that came before it is taken
                    left.discard(i)
                settled = settled and not deltas
                for delta in deltas:
                    index = i * self.params.n + delta.index
                    made += len(delta.token_ids)
                    text = delta.text
                    if not echoed[index]:
                        echoed[index] = True
                        text = self._text_of(self.prompts[i]) + text
                    choice = self._piece(index, text, delta, offsets[index])
                    offsets[index] += sum(map(len, (choice["logprobs"] or {}).get("tokens", ())))
                    if text or delta.finish_reason or choice["logprobs"] or self.body.return_token_ids:
                        chunks.append(event({**self._base, "choices": [choice], **self._no_usage()}))
            if chunks:
                yield b"".join(chunks)
            if left and settled:
                await ready.wait()
        if self._wants_usage():
            prompt_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
            yield event({**self._base, "choices": [], "usage": usage(prompt_tokens, made)})

    def _piece(self, index: int, text: str, delta: Delta, offset: int) -> dict[str, Any]:
        choice = self._choice(index, text, finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)
        if delta.logprobs:
            choice["logprobs"] = self._logprobs.completion(delta.token_ids, delta.logprobs, offset)
        if self.body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _choice(
        self, index: int, text: str, *, finish_reason: str | None = None, stop_reason: str | int | None = None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }

    def _text_of(self, prompt: PromptTokens) -> str:
        """The prompt as `echo` shows it."""
        if prompt.text is not None:
            return prompt.text
        tokenizer = self.service.llm.core.tokenizer
        return "" if tokenizer is None else tokenizer.decode(prompt.token_ids, skip_special_tokens=False)

    def _wants_usage(self) -> bool:
        return self.body.stream_options is not None and bool(self.body.stream_options.include_usage)

    def _no_usage(self) -> dict[str, None]:
        return {"usage": None} if self._wants_usage() else {}
