"""Worlds for runner tests: plans written by hand, small checkpoints written by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from engine.cache import KVCache
from engine.models.load import load_model
from engine.request import RequestState, Sampled, StepOutput
from engine.runner import Draw, ModelRunner, Runner
from engine.scheduler.plan import Plan, ScheduledSequence


class Greedy:
    """The most likely token; keeps the logits of the last step."""

    logits: Tensor

    def sample(self, logits: Tensor, draws: list[Draw]) -> list[Sampled | Exception]:
        assert logits.dtype == torch.float32
        assert len(logits) == len(draws)
        self.logits = logits.clone()
        return [Sampled(token) for token in logits.argmax(-1).tolist()]


def request(prompt: Sequence[int], name: str = "r", branches: int = 1) -> RequestState:
    return RequestState(name, list(prompt), None, 0, [[] for _ in range(branches)])  # type: ignore[arg-type]


def row(
    state: RequestState,
    start: int,
    end: int,
    table: list[int],
    block_size: int,
    branch: int = 0,
    draws: tuple[int, ...] = (),
) -> ScheduledSequence:
    slots = [table[t // block_size] * block_size + t % block_size for t in range(start, end)]
    group: Any = SimpleNamespace(request_id=state.request_id)
    return ScheduledSequence(group, branch, start, end, list(table), slots, draws)


def run(runner: Runner, *states: RequestState, **plan: Any) -> StepOutput:
    """Execute one plan and append its draws to the requests."""
    output = runner.execute(
        Plan.of_rows(plan.pop("scheduled", []), **plan), {state.request_id: state for state in states}
    )
    for state in states:
        for branch, tokens in enumerate(state.outputs):
            if (state.request_id, branch) in output.samples:
                tokens.append(output.samples[state.request_id, branch].token_id)
    return output


def model_runner(path: Path | str, gpu: int = 40, cpu: int = 8, block_size: int = 4, **load: Any) -> ModelRunner:
    """A model over pools that are NaN wherever nothing was written."""
    model = load_model(str(path), **load)
    cache = KVCache(model.config, gpu, cpu, block_size, model.embedding.dtype)
    cache.device_pool.fill_(float("nan"))
    cache.host_pool.fill_(float("nan"))
    return ModelRunner(model, model.config, cache, "cpu", Greedy())


SMALL = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
LLAMA_LIKE = {**SMALL, "intermediate_size": 56, "max_position_embeddings": 96, "pad_token_id": 0, "eos_token_id": 2}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
OPT_LIKE = {**SMALL, "ffn_dim": 56, "max_position_embeddings": 64, "word_embed_proj_dim": 32, "pad_token_id": 1}

# name: (transformers' class, arguments of its config)
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**LLAMA_LIKE, "num_key_value_heads": 2}),
    "llama_tied_with_biases": (
        "Llama",
        {**LLAMA_LIKE, "num_key_value_heads": 4, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama3_rope_wide_heads": (
        "Llama",
        {**LLAMA_LIKE, "num_key_value_heads": 1, "head_dim": 12, "rope_parameters": LLAMA3_ROPE},
    ),
    "llama_linear_rope": (
        "Llama",
        {**LLAMA_LIKE, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "mistral": ("Mistral", {**LLAMA_LIKE, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": None}),
    "qwen2": ("Qwen2", {**LLAMA_LIKE, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "opt": ("OPT", OPT_LIKE),
    "opt_norm_after": ("OPT", {**OPT_LIKE, "do_layer_norm_before": False, "word_embed_proj_dim": 20}),
    "opt_without_biases": ("OPT", {**OPT_LIKE, "enable_bias": False, "layer_norm_elementwise_affine": False}),
}


def make_checkpoint(name: str, **changes: Any) -> Any:
    """A random model of transformers, weights large enough that its logits are well apart."""
    import transformers

    kind, arguments = CHECKPOINTS[name]
    config = getattr(transformers, f"{kind}Config")(**{**arguments, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(5)
    for parameter_name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.2 * noise if parameter_name.endswith("norm.weight") else 0.25 * noise
    model.tie_weights()
    return model
