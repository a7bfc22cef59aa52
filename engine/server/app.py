"""The application: every endpoint over one engine."""

from __future__ import annotations

from fastapi import FastAPI

import engine
from engine.async_llm import AsyncLLM
from engine.server import chat, completions, debug, errors, info, metrics
from engine.server.middleware import Gate
from engine.server.options import ServerOptions
from engine.server.service import Service


def create_app(llm: AsyncLLM, options: ServerOptions | None = None, model_name: str = "smollm2-135m") -> FastAPI:
    """An ASGI application over a started AsyncLLM; mount it where you like.  It installs no signal handlers."""
    options = options or ServerOptions()
    app = FastAPI(
        title="lawful",
        version=engine.__version__,
        docs_url=None,  # those pages load scripts from elsewhere
        redoc_url=None,
    )
    service = Service(llm, options, model_name)
    app.state.service = service
    app.state.registry = metrics.registry_of(llm, service.model_names[0])
    for router in (completions.router, chat.router, info.router, metrics.router):
        app.include_router(router)
    if options.enable_debug:
        app.include_router(debug.debug_router)
    if options.enable_ui:
        app.include_router(debug.ui_router)
    errors.install(app)
    app.add_middleware(Gate, llm=llm, options=options)
    return app
