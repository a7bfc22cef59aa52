"""The arguments of `lawful simulate`.  Nothing heavy is imported before the command runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from engine.simulate.cost import DEFAULT, presets
from engine.simulate.policies import POLICIES


def add_simulate(command: Callable[[str, Any, str], argparse.ArgumentParser]) -> None:
    """`lawful simulate`."""
    text = "Run a trace of requests through the scheduler without a model, under a cost model: times, counts, a plot."
    parser = command("simulate", run, text)
    names = ", ".join(POLICIES)
    load = parser.add_argument_group("load")
    add = load.add_argument
    add(
        "--trace", metavar="FILE", help="CSV: prompt_tokens, output_tokens and, if known, arrival_s (default: a sample)"
    )
    add("--requests", type=int, metavar="N", help="only the first N")
    add("--n", type=int, default=1, metavar="N", help="branches of each request")
    add("--rate", type=float, default=1.0, metavar="X", help="arrivals X times as fast (without arrivals: X a second)")
    add("--scale", type=float, default=1.0, metavar="X", help="divide lengths by X, for a small pool")
    add("--spread", type=float, default=0.0, metavar="S", help="spread requests of one moment over S seconds")
    add("--repeat", type=int, default=1, metavar="N", help="play the trace N times")
    add("--seed", type=int, default=0, metavar="N", help="of the arrivals, where the trace has none")
    system = parser.add_argument_group("system")
    add = system.add_argument
    add("--policy", default="strict", metavar="NAME", help=f"{names}, or module:Class as for lawful check")
    add(
        "--cost-model",
        default=DEFAULT,
        metavar="C",
        help=f"{', '.join(presets())}, a .json file (see --fit), or step=0.01,...",
    )
    add("--gpu-blocks", type=int, default=2048, metavar="N", help="size of the KV pool")
    add("--swap", type=int, default=512, metavar="N", help="size of the swap area in blocks")
    add("--block-size", type=int, default=16, metavar="N", help="tokens of a block")
    add("--watermark", type=float, default=0.01, metavar="X", help="part of the pool that admissions leave free")
    add("--max-model-len", type=int, metavar="N", help="most tokens of a sequence (default: what the pool holds)")
    add("--max-num-seqs", type=int, metavar="N", help="most sequences of a step (default: 256)")
    add("--max-num-batched-tokens", type=int, metavar="N", help="most tokens of a step (default: 2048)")
    add("--preemption-mode", metavar="NAME", help="swap or recompute (default: by the number of sequences)")
    add(
        "--enable-chunked-prefill",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="decodes first, prompts in pieces; --no-... for whole prompts first",
    )
    output = parser.add_argument_group("output")
    add = output.add_argument
    add("--json", nargs="?", const="-", metavar="FILE", help="write everything as JSON; without FILE print it instead")
    add("--plot", metavar="FILE", help="queues and memory over time, as .png or .svg (needs lawful[plot])")
    add("--record-trace", metavar="FILE", help="write the scheduler's trace, one JSON line a step (see lawful audit)")
    add("--max-steps", type=int, metavar="N", help="stop after so many")
    fit = parser.add_argument_group("cost model")
    fit.add_argument(
        "--fit", metavar="FILE.json", help="measure --model on this machine, write its cost model, and simulate nothing"
    )
    fit.add_argument("--model", default="smollm2-135m", metavar="NAME", help="of --fit: as for lawful generate")
    fit.add_argument("--device", default="auto", metavar="NAME", help="of --fit: auto, cpu or cuda")
    fit.add_argument(
        "--fit-clock",
        default="wall",
        metavar="NAME",
        help="of --fit: wall, or processor for a CPU that others use too, with OMP_NUM_THREADS=1",
    )


def run(args: argparse.Namespace) -> int:
    """The command, imported when it is asked for."""
    from engine.simulate.command import run

    return run(args)
