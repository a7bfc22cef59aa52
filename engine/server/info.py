"""Health, version, models, and the tokenizer's endpoints."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

import engine
from engine.server.encoding import JsonResponse
from engine.server.errors import ApiError, Names, named
from engine.server.prompts import PromptTokens
from engine.server.protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    ErrorResponse,
    Model,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
)
from engine.server.service import Service, service_of

router = APIRouter()


@router.get("/health", responses={503: {"model": ErrorResponse}})
async def health(request: Request) -> Response:
    """200 while the engine moves or has nothing to do; 503, with the reason, when it does not or will not."""
    reason = service_of(request).llm.health()
    if reason is not None:
        raise ApiError(reason, 503, code="unhealthy")
    return JsonResponse({"status": "ok"})


@router.get("/version")
async def version() -> dict[str, str]:
    """The engine's version."""
    return {"version": engine.__version__}


@router.get("/v1/models", response_model=ModelList)
async def models(request: Request) -> Response:
    """The names by which requests may call the model."""
    service = service_of(request)
    return JsonResponse({"object": "list", "data": [_model(service, name) for name in service.model_names]})


@router.get("/v1/models/{name:path}", response_model=Model, responses={404: {"model": ErrorResponse}})
async def model(name: str, request: Request) -> Response:
    """One model."""
    service = service_of(request)
    return JsonResponse(_model(service, service.check_model(name)))


def _model(service: Service, name: str) -> dict[str, Any]:
    return Model(
        id=name, created=int(service.started), root=service.model_root, max_model_len=service.max_model_len
    ).model_dump()


@router.post("/tokenize", response_model=TokenizeResponse, responses={400: {"model": ErrorResponse}})
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Token ids of a prompt, or of a conversation through the chat template."""
    service = service_of(request)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError("give prompt or messages, and not both", param="prompt")
    with named(Names("prompt" if body.messages is None else "messages")):
        if body.messages is not None:
            prompt = await service.prompts.of_messages(
                body.messages,
                special=bool(body.add_special_tokens),
                add_generation_prompt=body.add_generation_prompt is not False,
                limited=False,
            )
        else:
            assert body.prompt is not None
            prompt = PromptTokens(await service.prompts.count(body.prompt, body.add_special_tokens is not False), None)
    answer: dict[str, Any] = {
        "count": len(prompt.token_ids),
        "max_model_len": service.max_model_len,
        "tokens": prompt.token_ids,
        "token_strs": None,
    }
    if body.return_token_strs:
        answer["token_strs"] = service.llm.tokenizer.convert_ids_to_tokens(prompt.token_ids)
    return JsonResponse(answer)


@router.post("/detokenize", response_model=DetokenizeResponse, responses={400: {"model": ErrorResponse}})
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids."""
    service = service_of(request)
    service.check_model(body.model)
    with named(Names("tokens")):
        service.check_token_ids("tokens", body.tokens)
        return JsonResponse({"prompt": await service.prompts.decode(body.tokens)})
