"""Why the head of a queue is not moving, in the numbers that bind: the guards of the scheduler's phases, told.

Computed from a scheduler at a step boundary; it changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from engine.scheduler import Scheduler, SequenceGroup

MOVING = "it gets tokens in every step"
NEXT = "nothing: the next step takes it, if no decode needs its blocks first"


def reasons(scheduler: Scheduler) -> dict[str, str | None]:
    """For the head of each queue what keeps it there; None for an empty queue."""
    return {
        "running": running_reason(scheduler) if scheduler.running else None,
        "swapped": swapped_reason(scheduler) if scheduler.swapped else None,
        "waiting": waiting_reason(scheduler) if scheduler.waiting else None,
    }


def running_reason(scheduler: Scheduler) -> str:
    """The head of running moves in every step of the chunked order (law L1)."""
    head = scheduler.running[0]
    if scheduler.config.enable_chunked_prefill or not head.is_decode:
        return MOVING
    if scheduler.waiting and not scheduler.swapped and not scheduler.decodes_owed:
        return "whole prompts come first; it gets a token in the step after them at the latest"
    return MOVING


def swapped_reason(scheduler: Scheduler) -> str:
    """The guards of swap-in, in the order in which they are tried."""
    head = scheduler.swapped[0]
    if not scheduler.config.enable_chunked_prefill and scheduler.running and not _has_decodes(scheduler):
        return "a step that computes prompts swaps nobody in"
    cover = scheduler.blocks.cover(head)
    grows = _decode_blocks(scheduler)
    free = scheduler.blocks.gpu_free
    if cover > free - grows:
        return _blocks(cover, free, grows, 0, scheduler)
    return _tokens(scheduler, head) or _sequences(scheduler, head) or NEXT


def waiting_reason(scheduler: Scheduler) -> str:
    """The guards of admission, in the order in which they are tried."""
    head = scheduler.waiting[0]
    if scheduler.swapped:
        first = scheduler.swapped[0]
        return (
            f"{len(scheduler.swapped)} swapped out (first {first.request_id!r}) come back before anyone is admitted "
            "(law S1)"
        )
    watermark = scheduler.config.watermark_blocks if scheduler.running else 0
    cover = scheduler.blocks.cover(head)
    grows = _decode_blocks(scheduler) if scheduler.config.enable_chunked_prefill else 0
    free = scheduler.blocks.gpu_free
    if cover + watermark > free - grows:
        return _blocks(cover, free, grows, watermark, scheduler)
    if not scheduler.config.enable_chunked_prefill and scheduler.decodes_owed:
        return "the next step is owed to the decodes that the last one left out"
    return _tokens(scheduler, head) or _sequences(scheduler, head) or NEXT


def taken_next(scheduler: Scheduler, arrivals: Iterable[SequenceGroup]) -> int:
    """How many of those that wait, and of `arrivals` behind them, the next step admits if nothing else happens.

    It may be asked in the midst of a step: what the step has given out counts as given.
    """
    if scheduler.swapped:
        return 0
    config, running = scheduler.config, list(scheduler.running)
    free, tokens = int(scheduler.blocks.gpu_free), config.tokens
    seqs = config.seqs - sum(int(group.live) for group in running)
    for group in running:
        if group.is_decode and not config.enable_chunked_prefill:
            continue  # whole prompts come before it
        lacks = int(group.deficit - group.tokens)
        tokens -= lacks if lacks > 0 else int(group.live)
        if group.is_decode and not group.tokens:
            free -= int(scheduler.blocks.need(group))
    taken = 0
    for group in (*list(scheduler.waiting), *arrivals):
        piece, cover = int(group.piece(tokens)), int(scheduler.blocks.cover(group))
        watermark = config.watermark_blocks if running or taken else 0
        whole = config.enable_chunked_prefill or piece == group.deficit
        if piece <= 0 or not whole or cover + watermark > free or group.live > seqs:
            break
        tokens, free, seqs, taken = tokens - piece, free - cover, seqs - int(group.live), taken + 1
    return taken


def _has_decodes(scheduler: Scheduler) -> bool:
    return any(group.is_decode for group in scheduler.running)


def _decode_blocks(scheduler: Scheduler) -> int:
    """Blocks that the decodes take first in the next step."""
    return sum(int(scheduler.blocks.need(group)) for group in scheduler.running if group.is_decode)


def _blocks(cover: Any, free: Any, grows: int, watermark: int, scheduler: Scheduler) -> str:
    text = f"it needs {cover} GPU blocks and {free} of {scheduler.config.num_gpu_blocks} are free"
    if grows:
        text += f", of which {grows} go to decodes first"
    if watermark:
        text += f", and {watermark} must stay free (watermark)"
    return text


def _tokens(scheduler: Scheduler, head: SequenceGroup) -> str | None:
    """The token budget that decodes and the running prefill leave."""
    budget = scheduler.config.tokens
    decodes = sum(int(group.live) for group in scheduler.running if group.is_decode)
    left = budget - decodes
    behind = next((group for group in scheduler.running if not group.is_decode), None)
    if behind is not None:
        left -= int(behind.piece(left))
    if head.piece(left) > 0:
        return None
    prefill = f" and the prefill of {behind.request_id!r}" if behind is not None else ""
    return f"the step's {budget} tokens are used up by {decodes} decoding sequences{prefill}"


def _sequences(scheduler: Scheduler, head: SequenceGroup) -> str | None:
    live = sum(int(group.live) for group in scheduler.running)
    if live + head.live <= scheduler.config.seqs:
        return None
    return f"{live} sequences run, it brings {head.live}, and max_num_seqs is {scheduler.config.seqs}"
