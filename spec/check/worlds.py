"""Small worlds in which any scheduler can be checked: capacities and budgets, and what the environment may ask for.

They are written down without a scheduler's own classes; `worlds` makes them for one, given what builds a configuration.
Each is small enough to be searched whole in seconds, and together they reach every phase, every way to preempt and
every way to leave, in both orders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from spec.check.explore import World


class Sketch(NamedTuple):
    """A world: blocks of `size` tokens on both devices, budgets of a step, requests (p, n, m), most of them at once."""

    gpu: int
    cpu: int
    size: int
    tokens: int
    seqs: int
    menu: tuple[tuple[int, int, int], ...]
    groups: int
    chunked: bool = True
    mode: str | None = None
    watermark: int = 0
    fails: bool = False

    def world(self, make_config: Callable[..., Any]) -> World:
        """The same for a scheduler; make_config takes the fields of its configuration by name."""
        config = make_config(
            num_gpu_blocks=self.gpu,
            num_cpu_blocks=self.cpu,
            block_size=self.size,
            max_num_batched_tokens=self.tokens,
            max_num_seqs=self.seqs,
            max_model_len=16 if self.chunked else self.tokens,
            enable_chunked_prefill=self.chunked,
            preemption_mode=self.mode,
            watermark_blocks=self.watermark,
        )
        return World(config=config, menu=self.menu, groups=self.groups, mid_aborts=self.fails, fails=self.fails)


SKETCHES: dict[str, Sketch] = {
    "one branch, watermark": Sketch(5, 2, 1, 3, 3, ((2, 1, 3), (1, 1, 4)), 3, watermark=1),
    "long prompts": Sketch(8, 8, 1, 3, 3, ((6, 2, 2), (1, 1, 5)), 3, mode="swap"),
    "two branches, little swap": Sketch(7, 4, 2, 4, 4, ((1, 2, 4), (3, 1, 4), (3, 2, 3)), 3),
    "two branches, failures": Sketch(7, 3, 1, 4, 4, ((1, 2, 3), (1, 1, 4)), 3, fails=True),
    "two branches, no swap": Sketch(6, 0, 2, 5, 5, ((3, 2, 4), (2, 1, 5)), 3, mode="recompute"),
    "three branches": Sketch(8, 4, 2, 6, 6, ((3, 3, 3), (2, 1, 3)), 2),
    "four at once": Sketch(6, 2, 1, 4, 4, ((1, 1, 3), (2, 1, 2)), 4),
    "prefill-first, two branches": Sketch(6, 3, 2, 6, 6, ((1, 2, 3), (3, 1, 4)), 3, chunked=False),
    "prefill-first, one branch": Sketch(5, 1, 1, 5, 4, ((1, 1, 4), (2, 1, 3)), 3, chunked=False, watermark=1),
    "prefill-first, no swap": Sketch(6, 0, 2, 6, 6, ((1, 2, 4), (3, 1, 4)), 2, chunked=False, mode="recompute"),
}


def worlds(make_config: Callable[..., Any]) -> dict[str, World]:
    """All of them, by name."""
    return {name: sketch.world(make_config) for name, sketch in SKETCHES.items()}
