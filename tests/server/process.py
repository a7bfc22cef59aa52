"""`lawful serve` as a process of its own over the KV oracle, with faults on demand.

    python -m tests.server.process '{"delay": 0.01}' serve --port 0

The first argument says how the runner behaves:
    delay      seconds that every step takes at least
    fail       a request with this many prompt tokens makes its step raise
    broken     every step raises
    stuck      a request with this many prompt tokens makes its step never end
    die        a request with this many prompt tokens makes the scheduler itself raise
    script     tokens that every request generates, in order, instead of random letters
    loading    seconds that the model takes to load
    head_timeout, body_timeout  limits of the server in seconds, which no user can set
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from engine.config import EngineArgs
from engine.core import EngineCore
from engine.models.oracle import OracleRunner
from engine.request import RequestState, StepOutput
from engine.sampler import Sampler
from engine.scheduler import Plan, SchedulerConfig
from engine.server import connections, middleware
from engine.tokenizer import ByteTokenizer

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</{{ message.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
VOCAB = 257


class FaultyRunner(OracleRunner):
    """The KV oracle, with the faults that were asked for."""

    faults: Mapping[str, Any]

    def execute(self, plan: Plan, requests: Mapping[str, RequestState]) -> StepOutput:
        faults = self.faults
        lengths = {group.prompt_len for group, _ in plan.groups}
        if faults.get("broken") or faults.get("fail") in lengths:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if faults.get("stuck") in lengths:
            time.sleep(faults.get("stuck_for", 3600))
        output = super().execute(plan, requests)
        if faults.get("delay"):
            time.sleep(faults["delay"])
        return output


class LetterSampler(Sampler):
    """Draws only printable ASCII: texts are texts, and only limits and stop strings end them."""

    def sample(self, logits: Any, draws: Any) -> Any:
        masked = logits.clone()
        masked[:, :32] = float("-inf")
        masked[:, 127:] = float("-inf")
        return super().sample(masked, draws)


def oracle_core(args: EngineArgs, faults: Mapping[str, Any]) -> EngineCore:
    """An engine over the KV oracle with these arguments."""
    gpu = args.num_gpu_blocks_override or 512
    cpu = 64 if args.num_cpu_blocks_override is None else args.num_cpu_blocks_override
    config = SchedulerConfig(
        num_gpu_blocks=gpu,
        num_cpu_blocks=cpu,
        block_size=args.block_size,
        max_model_len=args.max_model_len or 2048,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_num_seqs=args.max_num_seqs,
        enable_chunked_prefill=args.enable_chunked_prefill,
        preemption_mode=args.preemption_mode,
    )
    tokenizer = ByteTokenizer(chat_template=TEMPLATE)
    tokenizer.eos_token_ids, tokenizer.special_token_ids = frozenset({256}), frozenset({256})
    script = faults.get("script")
    sampler = (Sampler if script else LetterSampler)(VOCAB, frozenset({256}))
    runner = FaultyRunner(VOCAB, gpu, cpu, args.block_size, sampler, num_layers=2)
    if script:
        runner.favourites = lambda state, branch, position: script[position - len(state.prompt_token_ids)]
    runner.faults = faults
    core = EngineCore(
        config,
        runner,
        tokenizer,
        vocab_size=VOCAB,
        eos_token_ids={256},
        seed=args.seed,
        log_stats=not args.disable_log_stats,
        record_trace=args.record_trace,
    )
    if "die" in faults:
        schedule = core.scheduler.schedule

        def die() -> Plan:
            if any(group.prompt_len == faults["die"] for group in core.scheduler.groups.values()):
                raise ValueError("the scheduler has a bug")
            return schedule()

        core.scheduler.schedule = die  # type: ignore[method-assign]
    return core


def main() -> int:
    import engine.llm
    from engine.cli import main as lawful

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    faults = json.loads(sys.argv[1])
    if "head_timeout" in faults:
        connections.HEAD_TIMEOUT, middleware.BODY_TIMEOUT = faults["head_timeout"], faults["body_timeout"]

    def load(args: EngineArgs) -> EngineCore:
        print("loading", flush=True)
        time.sleep(faults.get("loading", 0))
        return oracle_core(args, faults)

    engine.llm.build_core = load
    return lawful(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
