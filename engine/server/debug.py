"""GET /debug/scheduler and the page /ui: what the scheduler holds, in order, and why the heads wait."""

from __future__ import annotations

from importlib import resources
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from engine.core import EngineCore
from engine.scheduler import Scheduler, SequenceGroup, contracts
from engine.server.encoding import JsonResponse
from engine.server.errors import ApiError
from engine.server.service import service_of
from engine.why import reasons

debug_router = APIRouter()
ui_router = APIRouter()

BOUNDARY_WAIT = 1.0  # seconds to wait for a step to end before the state is read in the midst of it
MOST_GROUPS = 500  # of each queue that are listed


@debug_router.get("/debug/scheduler")
async def scheduler_state(request: Request, blocks: bool = False) -> Response:
    """The three queues in order, and for each head the reason why it is not moving.

    blocks: also who holds each block of both devices.
    """
    service = service_of(request)
    llm = service.llm
    try:
        state = await llm.call(lambda core: describe(core, blocks), BOUNDARY_WAIT)
        state["at_boundary"] = True
    except TimeoutError:  # a step is under way and does not end: the state stands still meanwhile
        try:
            state = describe(llm.core, blocks)
        except (RuntimeError, LookupError):  # it ended this very moment
            raise ApiError("the state changed while it was read; ask again", 503, code="busy") from None
        state["at_boundary"] = False
    state["health"] = llm.health() or "ok"
    state["model"] = service.model_names[0]
    state["queued_limit"] = llm.max_queued_requests
    state["refused_by"] = llm.refusals()
    state["totals"]["requests_refused"] = sum(state["refused_by"].values())
    return JsonResponse(state)


def describe(core: EngineCore, blocks: bool) -> dict[str, Any]:
    """The scheduler's state as plain values."""
    scheduler = core.scheduler
    config, counts, stats = scheduler.config, scheduler.counts(), core.stats
    gaps = stats.histograms.inter_token_latency
    state: dict[str, Any] = {
        "steps": stats.steps,
        "queues": {
            name: {
                "length": len(queue),
                "groups": [_group(group) for group in list(queue)[:MOST_GROUPS]],
                "head_waits_for": why,
            }
            for (name, why), queue in zip(
                reasons(scheduler).items(), (scheduler.running, scheduler.swapped, scheduler.waiting), strict=True
            )
        },
        "gpu": _device(config.num_gpu_blocks, counts.gpu_blocks_used),
        "cpu": _device(config.num_cpu_blocks, counts.cpu_blocks_used),
        "config": {
            "block_size": config.block_size,
            "max_model_len": config.max_model_len,
            "max_num_batched_tokens": config.tokens,
            "max_num_seqs": config.seqs,
            "enable_chunked_prefill": config.enable_chunked_prefill,
            "preemption_mode": config.mode.value if config.mode else None,
            "watermark_blocks": config.watermark_blocks,
        },
        "totals": stats.to_dict(),
        "finished_by": dict(stats.finished_by),
        "mean_inter_token_s": gaps.total / n if (n := sum(gaps.counts)) else None,
        "laws": laws(),
    }
    if blocks:
        state["gpu"]["owners"] = _owners(scheduler, config.num_gpu_blocks, "running")
        state["cpu"]["owners"] = _owners(scheduler, config.num_cpu_blocks, "swapped")
    return state


def laws() -> dict[str, Any]:
    """Whether the laws are checked while serving.  A broken one stops the engine, so there is no other news of it."""
    return {"contracts": contracts.MODE, "checked": contracts.ON}


def _device(blocks: int, used: int) -> dict[str, Any]:
    return {"blocks": blocks, "referenced": used, "cached": 0, "free": blocks - used}


def _group(group: SequenceGroup) -> dict[str, Any]:
    homes = {"running": "gpu", "swapped": "cpu", "waiting": "none"}
    return {
        "request_id": group.request_id,
        "arrival": group.arrival,
        "kind": "decode" if group.is_decode else "rebuild" if group.forked else "prefill",
        "prompt_tokens": group.prompt_len,
        "generated_tokens": group.generated,
        "max_tokens": group.max_tokens,
        "deficit": group.deficit,
        "live": group.live,
        "n": group.n,
        "blocks": group.held,
        "home": homes.get(group.status.value, group.status.value),
        "preemptions": group.num_preemptions,
    }


def _owners(scheduler: Scheduler, capacity: int, queue: str) -> list[int]:
    """For each block the place of its group in the queue, -1 for a free one."""
    owners = [-1] * capacity
    for place, group in enumerate(list(getattr(scheduler, queue))):
        for table in group.tables:
            for block in table:
                owners[block] = place
    return owners


@ui_router.get("/ui", include_in_schema=False)
async def ui() -> Response:
    """The page that shows it."""
    page = resources.files("engine.server").joinpath("ui.html").read_bytes()
    return Response(page, media_type="text/html; charset=utf-8", headers={"Content-Security-Policy": _POLICY})


# Everything is in the page itself: nothing is fetched from anywhere but this server.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
