"""The small scopes that are explored whole: configuration, what the environment may do, how many states there are.

A count that changes means that the scheduler's behaviour changed: say why where the number is changed.
"""

from __future__ import annotations

from dataclasses import replace
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

# the bulk of the states: many groups out of a small menu, so that most of them wait
LARGE: dict[str, Scope] = {
    "chunked-n3-cpu6": scope(
        43327, 85782, gpu=9, cpu=6, size=1, tokens=6, seqs=6, groups=6, menu=((2, 2, 4), (1, 1, 5), (1, 3, 3)), **QUIET
    ),
    "chunked-swap-bs3-watermark": scope(
        54296, 107995, gpu=7, cpu=2, size=3, tokens=5, seqs=5, groups=6, mode="swap", watermark=1,
        menu=((2, 2, 5), (4, 1, 7), (1, 2, 4)), **QUIET,
    ),
    "chunked-recompute-cpu0-nine-groups": scope(
        67178, 133981, gpu=8, cpu=0, size=2, tokens=5, seqs=5, groups=9, mode="recompute",
        menu=((3, 2, 5), (2, 1, 6)), **QUIET,
    ),
    "chunked-n2-every-stop": scope(
        9519, 84926, gpu=7, cpu=4, size=2, tokens=5, seqs=5, groups=5, menu=((1, 2, 4), (3, 1, 4)), aborts=False
    ),
    "prefill-first-n2-every-stop": scope(
        17602, 118704, gpu=7, cpu=4, size=2, tokens=8, seqs=5, groups=5, chunked=False, menu=((1, 2, 4), (3, 1, 4)),
        aborts=False,
    ),
    "prefill-first-swap-cpu3": scope(
        64654, 127665, gpu=8, cpu=3, size=2, tokens=8, seqs=5, groups=6, chunked=False, mode="swap",
        menu=((2, 2, 4), (1, 1, 6), (5, 1, 3)), **QUIET,
    ),
    "prefill-first-bs3": scope(
        34002, 66641, gpu=7, cpu=3, size=3, tokens=10, seqs=6, groups=7, chunked=False, menu=((4, 2, 5), (2, 1, 6)),
        **QUIET,
    ),
    "chunked-n3-bs2-cpu3": scope(
        46490, 92017, gpu=9, cpu=3, size=2, tokens=6, seqs=6, groups=6, menu=((3, 3, 3), (1, 2, 4), (2, 1, 5)), **QUIET
    ),
    "prefill-first-watermark": scope(
        37467, 74375, gpu=9, cpu=3, size=2, tokens=9, seqs=5, groups=6, chunked=False, watermark=1,
        menu=((1, 2, 4), (3, 1, 5), (2, 2, 3)), **QUIET,
    ),
    "chunked-cpu4-seven-groups": scope(
        71161, 142083, gpu=8, cpu=4, size=1, tokens=5, seqs=5, groups=7, menu=((1, 2, 4), (2, 1, 6), (3, 1, 4)), **QUIET
    ),
    "chunked-swap-cpu6-seven-groups": scope(
        58478, 116785, gpu=8, cpu=6, size=1, tokens=4, seqs=4, groups=7, mode="swap",
        menu=((1, 2, 4), (2, 1, 5), (3, 1, 3)), **QUIET,
    ),
}  # fmt: skip


def larger(name: str, groups: int, states: int, edges: int) -> Scope:
    """A large scope with more groups at once."""
    return Scope(replace(LARGE[name].world, groups=groups), states, edges)


# more than twelve million states: large scopes with more groups at once, and of stops and aborts with more groups
DEEP: dict[str, Scope] = {
    "chunked-cpu4-ten-groups": larger("chunked-cpu4-seven-groups", 10, 1924441, 3848643),
    "chunked-swap-cpu6-ten-groups": larger("chunked-swap-cpu6-seven-groups", 10, 1581116, 3162061),
    "chunked-swap-bs3-watermark-nine-groups": larger("chunked-swap-bs3-watermark", 9, 1473740, 2946883),
    "chunked-n3-cpu6-nine-groups": larger("chunked-n3-cpu6", 9, 1181152, 2361432),
    "chunked-n3-bs2-cpu3-eight-groups": larger("chunked-n3-bs2-cpu3", 8, 422258, 843553),
    "chunked-recompute-cpu0-thirteen-groups": larger("chunked-recompute-cpu0-nine-groups", 13, 1080458, 2160541),
    "chunked-n2-every-stop-six-groups": larger("chunked-n2-every-stop", 6, 20403, 185894),
    "prefill-first-n2-every-stop-six-groups": larger("prefill-first-n2-every-stop", 6, 38326, 263908),
    "prefill-first-swap-cpu3-nine-groups": larger("prefill-first-swap-cpu3", 9, 1767004, 3532365),
    "prefill-first-watermark-nine-groups": larger("prefill-first-watermark", 9, 1018863, 2037167),
    "prefill-first-n2-cpu4-eleven-groups": scope(
        1075387, 2147376, gpu=9, cpu=4, size=2, tokens=9, seqs=6, groups=11, chunked=False,
        menu=((2, 2, 5), (1, 1, 7)), **QUIET,
    ),
    "prefill-first-bs3-twelve-groups": larger("prefill-first-bs3", 12, 1130286, 2259209),
    "prefill-first-swap-cpu5-seven-groups": scope(
        87834, 167173, gpu=10, cpu=5, size=2, tokens=8, seqs=8, groups=7, chunked=False, mode="swap",
        menu=((2, 2, 4), (1, 1, 7)), **QUIET,
    ),
}  # fmt: skip


def new_group(request_id: str, p: int, n: int, m: int) -> SequenceGroup:
    return SequenceGroup(request_id, p, n, m)


def explored(world: World, **more: Any) -> Found:
    """The world of the production scheduler."""
    return explore(world, lambda: Scheduler(world.config), new_group, **more)
