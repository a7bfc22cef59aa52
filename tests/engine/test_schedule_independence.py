"""Law E1: what a request gets does not depend on what else ran, in which pieces, or what became of its KV on the way.

With the KV oracle the outputs must be equal to the last bit.  With a real model in float32 two schedules may differ
where the best two scores are closer than the arithmetic's error, which is measured here and must be small.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.core import EngineCore
from engine.outputs import RequestOutput
from engine.request import RequestState, Sampled
from engine.sampler import Sampler, draw_keys, uniforms
from engine.tokenizer import ByteTokenizer
from tests.oracle import World, result

UNLIMITED = 4096
CONFIGS = [(True, 16), (True, 64), (True, UNLIMITED), (False, 64), (False, UNLIMITED)]  # chunked, token budget
SWAP = [0, 6, 64]
MODES = [None, "swap", "recompute"]

# (prompt, n, max_tokens) and how to sample.  21 blocks are what r0 takes alone, at its end.
TIGHT = 21
REQUESTS: list[tuple[int, int, int, dict[str, Any]]] = [
    (13, 2, 36, {"logprobs": 2}),
    (7, 3, 20, {"temperature": 0.7, "top_p": 0.9, "best_of": 3, "n": 2, "logprobs": 0}),
    (4, 1, 10, {"temperature": 0}),
    (20, 4, 11, {"top_k": 9, "presence_penalty": 0.7, "repetition_penalty": 1.2}),
    (14, 1, 26, {"temperature": 0, "repetition_penalty": 1.4, "frequency_penalty": 0.2, "logprobs": 3}),
    (4, 2, 24, {"min_p": 0.2, "seed": -5, "frequency_penalty": 1.5, "logit_bias": {70: 3.0}}),
]


def crowd(gpu: int, cpu: int, **config: Any) -> World:
    world = World(gpu, cpu, length=64, tokenizer=ByteTokenizer(), **config)
    for i, (p, n, m, params) in enumerate(REQUESTS):
        world.add(f"r{i}", **{"p": p, "n": n, "m": m, **params})
    return world


@cache
def alone() -> dict[str, tuple[Any, ...]]:
    """Every request by itself, with memory for everything."""
    world = crowd(UNLIMITED, 0)
    return {name: result(world.alone(name)) for name in world.asked}


@pytest.mark.parametrize(("chunked", "t"), CONFIGS)
def test_outputs_under_the_tightest_memory_are_those_of_each_request_alone(chunked: bool, t: int) -> None:
    """Every group but the most senior is preempted at least once, in every one of these runs."""
    seen: Counter[str] = Counter()
    for cpu in SWAP:
        for mode in MODES:
            world = crowd(TIGHT, cpu, t=t, enable_chunked_prefill=chunked, preemption_mode=mode)
            world.drain()
            preempted = {name: output.metrics.num_preemptions for name, output in world.ended.items()}
            assert preempted["r0"] == 0
            assert all(preempted[f"r{i}"] > 0 for i in range(1, len(REQUESTS)))
            for name, output in world.ended.items():
                assert result(output) == alone()[name], (name, cpu, mode)
            seen += world.verbs
    assert all(seen[verb] for verb in ("preempt:swap", "preempt:recompute", "demote", "swap_in", "fork"))


@pytest.mark.parametrize("seed", range(4))
def test_random_requests_in_random_worlds_get_what_they_get_alone(seed: int) -> None:
    """Branches that end at tokens of their own, stop strings, arrivals at any time, every block size and order."""
    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    for _ in range(8):
        chunked = rng.random() < 0.6
        bs = rng.choice([1, 2, 4, 16])
        t = rng.choice([4, 9, 16, 64]) if chunked else 64
        world = World(
            rng.randint(40, 64) // bs,
            rng.choice([0, 3, 10, 64]),
            bs,
            t=t,
            s=min(t, rng.choice([3, 6, 12])),
            length=40,
            tokenizer=ByteTokenizer(),
            eos=(7, 21, 56, 130),
            enable_chunked_prefill=chunked,
            preemption_mode=rng.choice(MODES),
            watermark_blocks=rng.choice([0, 1, 3]),
        )
        for i in range(7):
            params = {
                "ignore_eos": rng.random() < 0.4,
                "temperature": rng.choice([0, 0.5, 1]),
                "stop": rng.choice([None, ["e", "x"], ["\n", "A", "ab"]]),
                "min_tokens": rng.choice([0, 3]),
                "presence_penalty": rng.choice([0, 0.9]),
            }
            n = rng.randint(1, min(4, world.scheduler.config.seqs))
            room = world.scheduler.config.num_gpu_blocks * bs - 2 * bs * n
            p = rng.randint(1, max(1, min(14, room // 2)))
            try:
                world.add(f"r{seed}.{i}", p=p, n=n, m=rng.randint(3, max(4, min(20, (room - p) // n))), **params)
            except ValueError:
                continue
            for _ in range(rng.choice([0, 0, 1, 5])):
                world.step()
        world.drain()
        assert world.all_same_as_alone()
        seen += world.verbs
    assert seen["preempt:swap"] + seen["preempt:recompute"] > 5
    assert seen["finish_branch"]


@pytest.mark.parametrize("cpu", [0, 64])
def test_requests_without_a_seed_do_not_depend_on_the_schedule_either(cpu: int) -> None:
    """The engine's seed gives each its own, in the order of arrival."""
    runs = []
    for gpu, t in ((TIGHT, 16), (UNLIMITED, UNLIMITED), (TIGHT, UNLIMITED)):
        world = World(gpu, cpu, length=64, t=t, seed=9)
        for i, (p, n, m, _) in enumerate(REQUESTS):
            world.add(f"r{i}", p=p, n=n, m=m, seed=None)
        world.drain()
        runs.append([result(world.ended[name]) for name in world.asked])
    assert runs[0] == runs[1] == runs[2]


# a real model

SHAPES = [(10, 2, 14), (5, 1, 12), (3, 2, 12), (4, 1, 6)]  # prompt tokens, n, max_tokens; 10 blocks of 4 are tight
PROMPTS = [
    "Once upon a time there was a small engine that",
    "The capital of France is",
    "Water boils at",
    "List three colours:",
]
PARAMS = [
    SamplingParams(n=2, max_tokens=14, temperature=0.8, seed=7, ignore_eos=True),
    SamplingParams(max_tokens=12, temperature=0, ignore_eos=True),
    SamplingParams(n=2, max_tokens=12, temperature=0.6, seed=11, ignore_eos=True),
    SamplingParams(max_tokens=6, temperature=0, ignore_eos=True),
]
LARGEST_ERROR = 1e-4  # of a logit, against the largest in its row: what float32 may be off between two schedules


class Recorder:
    """Stands before a sampler and keeps the logits of every draw."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.logits: dict[tuple[int, int, tuple[int, ...]], torch.Tensor] = {}

    def sample(self, logits: torch.Tensor, draws: list[tuple[RequestState, int]]) -> list[Sampled | Exception]:
        for row, (request, branch) in zip(logits, draws, strict=True):
            key = (len(request.prompt_token_ids), branch, tuple(request.outputs[branch]))
            self.logits[key] = row.clone()
        return self.sampler.sample(logits, draws)


def margin(logits: torch.Tensor, params: SamplingParams, branch: int, position: int) -> float:
    """How far the best two of the race are apart, in logits: greedy takes them as they are, a draw adds its noise."""
    scores = logits.double()
    scale = 1.0
    if params.temperature > 0:
        scale = params.temperature
        key = draw_keys(*(torch.tensor([x]) for x in (params.seed, branch, position)))
        noise = -torch.log(-torch.log(uniforms(key[:, None], torch.arange(len(scores)))))[0]
        scores = scores / scale + noise
    best = scores.topk(2).values
    return float(best[0] - best[1]) * scale


@pytest.mark.model
def test_a_real_model_gives_the_same_under_pressure_up_to_the_measured_error(
    monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    import engine.models.load

    monkeypatch.setattr(engine.models.load, "load_model", cache(engine.models.load.load_model))

    def run(gpu: int, cpu: int, one_by_one: bool, **more: Any) -> tuple[list[RequestOutput], Recorder, EngineCore]:
        llm = LLM(
            "smollm2-135m",
            dtype="float32",
            device="cpu",
            block_size=4,
            max_model_len=40,
            num_gpu_blocks_override=gpu,
            num_cpu_blocks_override=cpu,
            **more,
        )
        core = llm.core
        core.runner.sampler = recorder = Recorder(core.runner.sampler)  # type: ignore[attr-defined,arg-type]
        if one_by_one:
            pairs = zip(PROMPTS, PARAMS, strict=True)
            outputs = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt, params in pairs]
        else:
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        return outputs, recorder, core

    reference, known, _ = run(400, 0, one_by_one=True)
    assert [(len(o.prompt_token_ids), p.n, p.max_tokens) for o, p in zip(reference, PARAMS, strict=True)] == SHAPES
    seen: Counter[str] = Counter()
    worst, differences, compared = 0.0, [], 0
    for gpu, cpu, more in (
        (10, 3, {"max_num_batched_tokens": 16}),
        (10, 0, {"max_num_batched_tokens": 64, "enable_chunked_prefill": False}),
        (10, 40, {"preemption_mode": "swap"}),
    ):
        outputs, got, core = run(gpu, cpu, one_by_one=False, **more)
        assert all(output.metrics.num_preemptions > 0 for output in outputs[1:])
        seen += core.stats.actions
        for key in got.logits.keys() & known.logits.keys():
            one, other = got.logits[key], known.logits[key]
            worst = max(worst, float((one - other).abs().max() / other.abs().max()))
            compared += 1
        differences += first_differences(reference, outputs, known)
    record_property("largest relative difference of a logit", worst)
    record_property("first differences", str(differences))
    print(f"\n{compared} draws compared: logits differ by at most {worst:.1e}; first differences: {differences}")
    assert all(seen[verb] for verb in ("preempt:swap", "preempt:recompute", "demote", "swap_in"))
    assert compared > 3 * 60
    assert worst < LARGEST_ERROR
    for _, _, _, gap, largest in differences:
        assert gap <= 2 * worst * largest, "outputs differ where the best two were well apart"


def first_differences(
    reference: list[RequestOutput], outputs: list[RequestOutput], known: Recorder
) -> list[tuple[int, int, int, float, float]]:
    """(prompt, branch, position, gap of the best two, largest logit) where two outputs part."""
    found = []
    for i, (want, have) in enumerate(zip(reference, outputs, strict=True)):
        for branch, (a, b) in enumerate(zip(want.outputs, have.outputs, strict=True)):
            assert len(a.token_ids) == len(b.token_ids)
            at = next(
                (k for k, pair in enumerate(zip(a.token_ids, b.token_ids, strict=True)) if len(set(pair)) > 1), None
            )
            if at is None:
                assert a.text == b.text
                continue
            logits = known.logits[len(want.prompt_token_ids), branch, tuple(a.token_ids[:at])]
            found.append((i, branch, at, margin(logits, PARAMS[i], branch, at), float(logits.abs().max())))
    return found


def test_the_margin_of_a_draw_is_that_of_the_race_the_sampler_runs() -> None:
    """The token that `margin` sees ahead is the one drawn: it measures the right gap."""
    rng = torch.Generator().manual_seed(3)
    logits = torch.randn(40, 300, generator=rng) * 3
    params = SamplingParams(temperature=0.8, seed=21)
    requests = [RequestState("r", [1], params, 21, [[0] * position]) for position in range(40)]
    drawn = [sampled.token_id for sampled in Sampler(300, ()).sample(logits, [(request, 0) for request in requests])]
    for position, token in enumerate(drawn):
        gap = margin(logits[position], params, 0, position)
        less = logits[position].clone()
        less[token] -= gap * 1.001 + 1e-6
        more = logits[position].clone()
        more[token] -= gap * 0.999
        again = Sampler(300, ()).sample(torch.stack([less, more]), [(requests[position], 0)] * 2)
        assert again[0].token_id != token
        assert again[1].token_id == token
