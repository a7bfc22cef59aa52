"""The application inside another: middleware of any kind in front of it, its own server, its own loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import Response

from engine.async_llm import AsyncLLM
from engine.http_client import Connection
from engine.server.app import create_app
from engine.server.lifecycle import listen
from engine.server.options import ServerOptions
from tests.oracle import World

pytestmark = pytest.mark.timeout(60)


async def _pass_on(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    return await call_next(request)


async def with_app(world: World, app_of: Callable[[AsyncLLM], Any], test: Callable[[str], Awaitable[None]]) -> None:
    async with AsyncLLM.from_core(world.core) as llm:
        listener = listen("127.0.0.1", 0)
        config = uvicorn.Config(app_of(llm), log_level="warning", lifespan="off")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server._serve([listener]))
        try:
            await test(f"http://127.0.0.1:{listener.getsockname()[1]}")
        finally:
            server.should_exit = True
            await serving


def in_front(llm: AsyncLLM) -> FastAPI:
    app = create_app(llm)
    app.add_middleware(BaseHTTPMiddleware, dispatch=_pass_on)
    return app


def mounted(llm: AsyncLLM) -> FastAPI:
    outer = FastAPI()
    outer.mount("/llm", create_app(llm))
    return outer


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("app_of", "path"), [(create_app, ""), (in_front, ""), (mounted, "/llm")])
def test_middleware_does_not_hide_that_a_client_has_gone(
    app_of: Callable[[AsyncLLM], Any], path: str, stream: bool
) -> None:
    """Case 60: gone from the queues within two steps of the engine hearing of it, and no block is left."""
    world = World(gpu=1200, length=4000)

    async def leave(url: str) -> None:
        body = {"prompt": [1, 2, 3], "max_tokens": 3900, "ignore_eos": True, "stream": stream, "return_token_ids": True}
        connection = Connection(url, f"{path}/v1/completions", body)
        if stream:
            async with connection as answer:
                assert answer.status == 200
                async for _ in answer.events():
                    break
        else:
            opening = asyncio.create_task(connection.__aenter__())
            while not world.scheduler.running:
                await asyncio.sleep(0.005)
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
        while world.core.has_unfinished_requests():
            await asyncio.sleep(0.01)
        async with Connection(url, f"{path}/v1/completions", {"prompt": [1], "max_tokens": 1}) as answer:
            assert answer.status == 200

    asyncio.run(with_app(world, app_of, leave))
    world.check_drained()
    assert world.core.stats.finished_by["abort"] == 1
    assert world.core.stats.steps < 3900


def test_a_key_protects_a_mounted_application_too() -> None:
    """What is open is listed; everything else, wherever it is mounted, needs the key."""
    world = World(gpu=64)

    def with_key(llm: AsyncLLM) -> FastAPI:
        outer = FastAPI()
        outer.mount("/llm", create_app(llm, ServerOptions(api_keys=("secret",), enable_ui=True)))
        return outer

    async def ask(url: str) -> None:
        for path, status in (
            ("/llm/v1/models", 401),
            ("/llm/debug/scheduler", 401),
            ("/llm/nothing", 401),
            ("/llm/health", 200),
            ("/llm/metrics", 200),
            ("/llm/ui", 200),
        ):
            async with Connection(url, path) as answer:
                assert answer.status == status, path
        async with Connection(url, "/llm/v1/models", key="secret") as answer:
            assert answer.status == 200

    asyncio.run(with_app(world, with_key, ask))


def test_an_error_that_nobody_foresaw_has_the_same_form(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(gpu=64)

    def broken(self: object, *_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("engine.server.service.Service.check_model", broken)

    async def ask(url: str) -> None:
        async with Connection(url, "/v1/completions", {"prompt": [1]}) as answer:
            assert answer.status == 500
            error = (await answer.json())["error"]
            assert (error["type"], error["code"]) == ("server_error", "internal_error")
            assert "a bug" not in error["message"]

    asyncio.run(with_app(world, create_app, ask))
