"""The small scopes that are explored whole: configuration, what the environment may do, how many states there are.

A count that changes means that the scheduler's behaviour changed: say why where the number is changed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from engine.scheduler import Scheduler, SchedulerConfig, SequenceGroup
from spec.check.explore import Found, World, explore

Menu = tuple[tuple[int, int, int], ...]


class Scope(NamedTuple):
    """A world with its pinned numbers of states and transitions."""

    world: World
    states: int
    edges: int


def scope(
    states: int,
    edges: int,
    *,
    gpu: int,
    cpu: int,
    size: int,
    tokens: int,
    seqs: int,
    menu: Menu,
    groups: int,
    chunked: bool = True,
    mode: str | None = None,
    watermark: int = 0,
    **environment: bool,
) -> Scope:
    """A scope: blocks of `size` tokens, budgets, the requests (p, n, m) that arrive, at most `groups` at once."""
    config = SchedulerConfig(
        num_gpu_blocks=gpu,
        num_cpu_blocks=cpu,
        block_size=size,
        max_num_batched_tokens=tokens,
        max_num_seqs=seqs,
        max_model_len=16 if chunked else tokens,
        enable_chunked_prefill=chunked,
        preemption_mode=mode,
        watermark_blocks=watermark,
    )
    return Scope(World(config=config, menu=menu, groups=groups, **environment), states, edges)


QUIET = {"stops": False, "aborts": False}  # everybody runs to max_tokens: fewer transitions, so more groups

# small enough for every check, with everything the environment can do
SMALL: dict[str, Scope] = {
    "chunked-n1-watermark": scope(
        175, 978, gpu=5, cpu=2, size=1, tokens=3, seqs=3, menu=((2, 1, 3), (1, 1, 4)), groups=3, watermark=1
    ),
    "chunked-n2-cpu4": scope(
        2256, 18965, gpu=7, cpu=4, size=2, tokens=4, seqs=4, menu=((1, 2, 4), (3, 1, 4), (3, 2, 3)), groups=3
    ),
    "chunked-n2-cpu3-failures": scope(
        604, 11166, gpu=7, cpu=3, size=1, tokens=4, seqs=4, menu=((1, 2, 3), (1, 1, 4)), groups=3,
        mid_aborts=True, fails=True,
    ),
    "chunked-n2-swap": scope(
        655, 5478, gpu=5, cpu=8, size=1, tokens=4, seqs=4, menu=((1, 1, 4), (1, 2, 2)), groups=4, mode="swap"
    ),
    "chunked-n2-recompute-cpu0": scope(
        3105, 27298, gpu=8, cpu=0, size=2, tokens=5, seqs=5, menu=((3, 2, 5), (2, 1, 6)), groups=3, mode="recompute"
    ),
    "chunked-n3-bs2": scope(
        1363, 13222, gpu=10, cpu=5, size=2, tokens=4, seqs=4, menu=((3, 3, 4), (1, 2, 5)), groups=3
    ),
    "chunked-n2-bs3": scope(
        2698, 23151, gpu=6, cpu=3, size=3, tokens=4, seqs=4, menu=((4, 2, 5), (2, 2, 6)), groups=3, mode="swap"
    ),
    "chunked-one-token-a-step": scope(
        43, 203, gpu=4, cpu=1, size=1, tokens=1, seqs=1, menu=((2, 1, 2), (1, 1, 3)), groups=3
    ),
    "prefill-first-n2-swap": scope(
        883, 7333, gpu=6, cpu=3, size=2, tokens=6, seqs=6, menu=((1, 2, 3), (3, 1, 4)), groups=3, chunked=False,
        mode="swap",
    ),
    "prefill-first-n1-watermark": scope(
        242, 1375, gpu=5, cpu=1, size=1, tokens=5, seqs=4, menu=((1, 1, 4), (2, 1, 3)), groups=3, chunked=False,
        watermark=1,
    ),
    "prefill-first-n2-failures": scope(
        1021, 16864, gpu=6, cpu=2, size=2, tokens=6, seqs=4, menu=((1, 2, 3), (3, 1, 4)), groups=3, chunked=False,
        mid_aborts=True, fails=True,
    ),
    "prefill-first-n2-recompute-cpu0": scope(
        1850, 15756, gpu=6, cpu=0, size=2, tokens=6, seqs=6, menu=((1, 2, 4), (3, 1, 4)), groups=3, chunked=False,
        mode="recompute",
    ),
}  # fmt: skip

# the bulk of the states
LARGE: dict[str, Scope] = {
    "chunked-n3-cpu6-five-groups": scope(
        49819, 97970, gpu=9, cpu=6, size=1, tokens=6, seqs=6, groups=5,
        menu=((2, 2, 4), (1, 1, 5), (1, 3, 3), (3, 1, 4)), **QUIET,
    ),
    "chunked-swap-bs3-watermark": scope(
        68423, 135650, gpu=7, cpu=2, size=3, tokens=5, seqs=5, groups=5, mode="swap", watermark=1,
        menu=((2, 2, 5), (4, 1, 7), (1, 2, 4), (5, 1, 4)), **QUIET,
    ),
    "chunked-recompute-cpu0": scope(
        42621, 80615, gpu=8, cpu=0, size=2, tokens=5, seqs=5, groups=5, mode="recompute",
        menu=((3, 2, 5), (2, 1, 6), (1, 1, 7)), **QUIET,
    ),
    "chunked-n2-every-stop": scope(
        33495, 361465, gpu=9, cpu=4, size=2, tokens=5, seqs=5, groups=4,
        menu=((1, 2, 4), (3, 1, 4), (2, 2, 5)), aborts=False,
    ),
    "prefill-first-n2-every-stop": scope(
        42241, 362514, gpu=9, cpu=4, size=2, tokens=8, seqs=6, groups=4, chunked=False,
        menu=((1, 2, 4), (3, 1, 4), (2, 1, 6)), aborts=False,
    ),
    "prefill-first-swap-cpu5": scope(
        39533, 72172, gpu=10, cpu=5, size=2, tokens=8, seqs=8, groups=5, chunked=False, mode="swap",
        menu=((2, 2, 4), (1, 1, 7), (5, 1, 4)), **QUIET,
    ),
    "prefill-first-bs3": scope(
        22985, 44332, gpu=7, cpu=3, size=3, tokens=10, seqs=6, groups=5, chunked=False,
        menu=((4, 2, 5), (2, 1, 6), (3, 3, 3)), **QUIET,
    ),
    "chunked-n3-bs2-cpu3": scope(
        53755, 105306, gpu=9, cpu=3, size=2, tokens=6, seqs=6, groups=5,
        menu=((3, 3, 3), (1, 2, 4), (2, 1, 5), (4, 1, 3)), **QUIET,
    ),
    "prefill-first-n2-cpu4": scope(
        40631, 76645, gpu=9, cpu=4, size=2, tokens=9, seqs=6, groups=5, chunked=False,
        menu=((2, 2, 5), (1, 1, 7), (4, 2, 3)), **QUIET,
    ),
    "prefill-first-watermark": scope(
        39661, 78336, gpu=9, cpu=3, size=2, tokens=9, seqs=5, groups=5, chunked=False, watermark=1,
        menu=((1, 2, 4), (3, 1, 5), (2, 2, 3), (5, 1, 3)), **QUIET,
    ),
    "chunked-cpu4-six-groups": scope(
        23641, 47043, gpu=8, cpu=4, size=1, tokens=5, seqs=5, groups=6,
        menu=((1, 2, 4), (2, 1, 6), (3, 1, 4)), **QUIET,
    ),
    "chunked-swap-cpu6": scope(
        45188, 89379, gpu=8, cpu=6, size=1, tokens=4, seqs=4, groups=5, mode="swap",
        menu=((1, 2, 4), (2, 1, 5), (3, 1, 3), (1, 1, 6)), **QUIET,
    ),
}  # fmt: skip


# some ten million states, an hour on one core; -1: not counted yet
DEEP: dict[str, Scope] = {
    "prefill-first-swap-five-groups": scope(
        -1, -1, gpu=10, cpu=5, size=2, tokens=8, seqs=8, groups=5, chunked=False, mode="swap",
        menu=((2, 2, 4), (1, 1, 7), (1, 3, 3), (5, 1, 4)), **QUIET,
    ),
    **{
        f"{order}-{mode or 'any'}-bs{size}-six-groups": scope(
            -1, -1, gpu=11, cpu=5, size=size, tokens=9, seqs=7, groups=6, chunked=order == "chunked", mode=mode,
            menu=((2, 2, 4), (1, 1, 7), (5, 1, 4), (3, 2, 3)), **QUIET,
        )
        for order in ("chunked", "prefill-first")
        for mode in (None, "swap")
        for size in (1, 2)
    },
}  # fmt: skip


def new_group(request_id: str, p: int, n: int, m: int) -> SequenceGroup:
    return SequenceGroup(request_id, p, n, m)


def explored(world: World, **more: Any) -> Found:
    """The world of the production scheduler."""
    return explore(world, lambda: Scheduler(world.config), new_group, **more)
