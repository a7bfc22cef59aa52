"""Throughput on synthetic lengths: all requests at once, end tokens ignored."""

from __future__ import annotations

import random
import time
from typing import Any

from engine.config import EngineArgs
from engine.llm import LLM, build_core
from engine.sampling import SamplingParams


def throughput(
    args: EngineArgs,
    *,
    num_prompts: int,
    input_len: int,
    output_len: int,
    n: int = 1,
    temperature: float = 1.0,
    progress: bool = True,
) -> dict[str, Any]:
    """Run the load once, after one short warm-up, and report rates and what the scheduler did.

    Prompts are random token ids from a fixed seed.  Raises ValueError when any request is refused: a rate over what is
    left would be another load's.
    """
    started = time.perf_counter()
    core = build_core(args)
    llm = LLM.from_core(core)
    load_s = time.perf_counter() - started
    rng = random.Random(0)
    prompts = [[rng.randrange(core.vocab_size) for _ in range(input_len)] for _ in range(num_prompts)]
    params = SamplingParams(n=n, temperature=temperature, max_tokens=output_len, ignore_eos=True, detokenize=True)
    llm.generate([prompts[0]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    before = llm.stats
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=progress)
    elapsed = time.perf_counter() - started
    refused = [output.error for output in outputs if output.error]
    if refused:
        raise ValueError(f"{len(refused)} of {num_prompts} requests were not served: {refused[0]}")
    generated = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    after = llm.stats
    counted = ("steps", "preemptions", "demotions", "blocks_swapped_out", "blocks_swapped_in", "recomputed_tokens")
    return {
        "model": args.model,
        "dtype": _dtype(args),
        "num_prompts": num_prompts,
        "input_len": input_len,
        "output_len": output_len,
        "n": n,
        "load_s": round(load_s, 3),
        "elapsed_s": round(elapsed, 4),
        "requests_per_s": num_prompts / elapsed,
        "output_tokens_per_s": generated / elapsed,
        "total_tokens_per_s": (generated + num_prompts * input_len) / elapsed,
        **{name: int(after[name]) - int(before[name]) for name in counted},  # type: ignore[call-overload]
    }


def _dtype(args: EngineArgs) -> str:
    """The one that was computed in, where the argument is "auto" too."""
    from engine.models.load import load_config, resolve_dtype

    return str(resolve_dtype(args.dtype, load_config(args.model), args.resolve_device())).removeprefix("torch.")
