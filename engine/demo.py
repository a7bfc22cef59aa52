"""Real answers to real prompts on a pool too small for them, and a table of what the scheduler did about it."""

from __future__ import annotations

import json
import time
from importlib import resources

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from engine.config import EngineArgs
from engine.llm import LLM, build_core
from engine.logs import refusals_are_told
from engine.sampling import SamplingParams


def sample_prompts(count: int) -> list[str]:
    """The first `count` of the sample prompts, repeated if there are fewer.  Raises ValueError for a count below 1."""
    if count < 1:
        raise ValueError(f"num_prompts is {count}; it must be at least 1")
    lines = resources.files("engine").joinpath("data/prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    return [prompts[i % len(prompts)] for i in range(count)]


def demo(args: EngineArgs, num_prompts: int, n: int, max_tokens: int, *, progress: bool = True) -> int:
    """Answer the prompts, print answers and table; 0 if every accepted request finished, else 1."""
    prompts = sample_prompts(num_prompts)
    params = SamplingParams(n=n, temperature=0.7, top_p=0.95, max_tokens=max_tokens, seed=0)
    console = Console(highlight=False)
    core = build_core(args)
    llm = LLM.from_core(core)
    started = time.perf_counter()
    with refusals_are_told():
        outputs = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params, use_tqdm=progress)
    elapsed = time.perf_counter() - started
    core.stats.maybe_log(core.scheduler.counts(), force=True)
    for prompt, output in zip(prompts, outputs, strict=True):
        console.print(Text(f"\n{prompt}", style="bold"))
        if output.error:
            console.print(Text(f"  refused: {output.error}", style="red"))
        for completion in output.outputs:
            text = " ".join(completion.text.split())
            ending = "" if completion.finish_reason == "stop" else " …"
            console.print(Text(f"  [{completion.index}] {text}{ending}"))
    stats = core.stats
    table = Table(
        title=f"\n{num_prompts} prompts, n={n}, {core.scheduler.config.num_gpu_blocks} GPU blocks", box=box.SIMPLE
    )
    table.add_column("what")
    table.add_column("count", justify="right")
    for name, value in (
        ("generated tokens/s", f"{stats.generation_tokens / elapsed:.1f}"),
        ("generated tokens", stats.generation_tokens),
        ("steps", stats.steps),
        ("preemptions", stats.preemptions),
        ("  by swap", stats.actions["preempt:swap"]),
        ("  by recompute", stats.actions["preempt:recompute"]),
        ("demotions", stats.demotions),
        ("blocks swapped out / in", f"{stats.blocks_swapped_out} / {stats.blocks_swapped_in}"),
        ("blocks copied on write", stats.blocks_copied),
        ("tokens recomputed", stats.recomputed_tokens),
        ("requests finished = accepted", f"{stats.finished} = {stats.received}"),
    ):
        table.add_row(name, str(value))
    console.print(table)
    return 0 if stats.finished == stats.received == num_prompts else 1
