"""GpuRunner through Triton's interpreter: the outputs of the reference, under pressure, with padding; graphs off."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import LLM, SamplingParams
from engine.cache import KVCache
from engine.gpu_runner import DecodeBatch, GpuRunner, padded_size
from engine.models.load import load_model
from engine.request import RequestState, Sampled
from engine.runner import Draw, ModelRunner
from engine.sampler import Sampler
from engine.scheduler.plan import Plan
from kernels.dispatch import choose
from tests.engine.paged import make_checkpoint, request, row
from tests.worlds import R, world

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # log(0) of a min_p of 0, in the interpreter

LENGTHS = {"a": (5, 2, 6), "b": (9, 2, 5), "c": (5, 1, 6), "d": (3, 2, 4)}  # prompt, branches, tokens to generate


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_checkpoint("llama", num_hidden_layers=2).save_pretrained(path)
    return path


class Recorder(Sampler):
    """Keeps the logits of every draw."""

    seen: dict[tuple[str, int, int], Tensor]

    def sample(self, logits: Tensor, draws: Any) -> list[Sampled | Exception]:
        for scores, (state, branch) in zip(logits, draws, strict=True):
            self.seen[state.request_id, branch, len(state.outputs[branch])] = scores.clone()
        return super().sample(logits, draws)


class Checked(GpuRunner):
    """After every decode step the device's batch must be exactly the plan's rows."""

    decodes = 0

    def _logits(self, plan: Plan, requests: Any) -> tuple[Tensor, list[Draw]]:
        steps = self.times.steps
        out = super()._logits(plan, requests)
        if self.times.steps > steps:
            self.decodes += 1
            rows = {(r.group.request_id, r.branch): r for r in plan.scheduled}
            assert sorted(self.batch.keys) == sorted(rows)
            for place, key in enumerate(self.batch.keys):
                row = rows[key]
                tables = self.batch.tables[place, : len(row.block_table)]
                assert tables.tolist() == list(row.block_table)
                assert (int(self.batch.slots[place]), int(self.batch.ends[place])) == (row.slots[0], row.end)
                token = requests[key[0]].tokens(key[1], row.start, row.end)
                assert [int(self.batch.tokens[place])] == token
            padding = slice(len(rows), padded_size(len(rows)))
            assert (self.batch.slots[padding] == -1).all()
            assert not self.batch.ends[padding].any()
        return out


def serve(checkpoint: Path, names: str, gpu: int, triton: bool, mode: str | None, chunk: int = 13) -> Any:
    """Outputs, logits by draw, what the scheduler did, and the runner."""
    with choose("triton" if triton else "reference"):
        model = load_model(str(checkpoint))
        cache = KVCache(model.config, gpu, 10, 4)
        cache.device_pool.fill_(float("nan"))
        cache.host_pool.fill_(float("nan"))
        sampler = Recorder(model.config.vocab_size, ())
        sampler.seen = {}
        runner: ModelRunner
        if triton:
            runner = Checked(model, model.config, cache, "cpu", sampler, max_num_seqs=16, max_model_len=64)
        else:
            runner = ModelRunner(model, model.config, cache, "cpu", sampler)
        scheduler = world(gpu, 10, 4, chunk, length=64, preemption_mode=mode)
        states: dict[str, RequestState] = {}
        for i, name in enumerate(names):
            p, n, m = LENGTHS[name]
            params = [
                SamplingParams(temperature=0.9, seed=i),
                SamplingParams(temperature=0.7, top_k=20, seed=i, repetition_penalty=1.2, presence_penalty=0.5),
                SamplingParams(temperature=0),
                SamplingParams(temperature=1.0, min_p=0.05, seed=i, frequency_penalty=0.3),
            ]["abcd".index(name)]
            prompt = [(17 * k + ord(name)) % 101 for k in range(p)]
            states[name] = RequestState(name, prompt, params, ord(name), [[] for _ in range(n)])
            scheduler.add(R(p, n, m=m, id=name))
        verbs: Counter[str] = Counter()
        while scheduler.has_unfinished():
            plan = scheduler.schedule()
            output = runner.execute(plan, states)
            assert not output.errors
            for (name, branch), draw in output.samples.items():
                states[name].outputs[branch].append(draw.token_id)
            scheduler.update(plan, set())
            verbs.update(f"{a.verb}:{a.detail}" if a.verb == "preempt" else a.verb for a in plan.log)
            verbs["copy"] += len(plan.blocks_to_copy)
    return {name: state.outputs for name, state in states.items()}, sampler.seen, verbs, runner


@pytest.mark.parametrize(("mode", "gpu", "chunk"), [(None, 8, 13), ("recompute", 9, 7)])
def test_interpreted_kernels_under_pressure_give_what_the_reference_gives_alone(
    checkpoint: Path, mode: str | None, gpu: int, chunk: int
) -> None:
    """Law E1 through the Triton path: a pool of NaN too small for all, chunks, swaps or rebuilds, copies, padding."""
    together, logits, verbs, runner = serve(checkpoint, "abcd", gpu, True, mode, chunk)
    assert verbs["preempt:recompute"] > 0
    assert verbs["copy"] > 0
    if mode is None:
        assert verbs["preempt:swap"] > 0
        assert verbs["swap_in"] > 0
    assert runner.decodes > 3
    assert runner.times.graphs == 0
    worst = 0.0
    for name in LENGTHS:
        alone, known, _, _ = serve(checkpoint, name, 60, False, mode, chunk=64)
        assert alone[name] == together[name]
        for key, scores in known.items():
            worst = max(worst, float((logits[key] - scores).abs().max() / scores.abs().max()))
    assert worst < 1e-4


def test_the_batch_follows_the_plan_and_sends_only_what_changed() -> None:
    rng = random.Random(3)
    batch = DecodeBatch(16, 32, 4, torch.device("cpu"))
    tables: dict[tuple[str, int], list[int]] = {}
    lengths: dict[tuple[str, int], int] = {}
    states = {name: request([1], name, 2) for name in "abcdefgh"}
    for state in states.values():
        state.outputs = [[7] * 200, [8] * 200]
    steady = 0
    for _ in range(200):
        touched = set()
        for key in [(name, branch) for name in "abcdefgh" for branch in (0, 1)]:
            if key not in tables and rng.random() < 0.2:
                lengths[key] = rng.randint(1, 60)
                tables[key] = [rng.randrange(99) for _ in range(-(-(lengths[key] + 1) // 4))]
                touched.add(key[0])
            elif key in tables and rng.random() < 0.05:
                del tables[key]
            elif key in tables and lengths[key] < 120:
                lengths[key] += 1
                if lengths[key] % 4 == 0:
                    tables[key].append(rng.randrange(99))
                    touched.add(key[0])
                if rng.random() < 0.05:  # a copy on write, or a swap
                    at = rng.randrange(len(tables[key]))
                    tables[key][at:] = [rng.randrange(99) for _ in tables[key][at:]]
                    touched.add(key[0])
        rows = [
            row(states[name], lengths[name, b], lengths[name, b] + 1, table, 4, b, (b,))
            for (name, b), table in tables.items()
            if lengths[name, b] < len(table) * 4
        ]
        rng.shuffle(rows)
        sent = batch.entries_sent
        batch.update(rows, states, touched)
        steady += not touched and sent == batch.entries_sent
        assert len(batch) == len(rows)
        by_key = {(r.group.request_id, r.branch): r for r in rows}
        for place, key in enumerate(batch.keys):
            assert batch.tables[place, : len(tables[key])].tolist() == tables[key]
            r = by_key[key]
            numbers = (int(batch.positions[place]), int(batch.slots[place]), int(batch.ends[place]))
            assert numbers == (r.start, r.slots[0], r.end)
        padding = slice(len(rows), padded_size(len(rows)))
        assert (batch.slots[padding] == -1).all()
        assert not batch.ends[padding].any()


def test_a_padded_batch_writes_only_its_own_slots(checkpoint: Path) -> None:
    with choose("triton"):
        model = load_model(str(checkpoint))
        cache = KVCache(model.config, 12, 0, 4)
        cache.device_pool.fill_(3.0)
        sampler = Sampler(model.config.vocab_size, ())
        runner = GpuRunner(model, model.config, cache, "cpu", sampler, max_num_seqs=16, max_model_len=40)
        states = {n: RequestState(n, [1, 2, 3], SamplingParams(temperature=0), 0, [[4]]) for n in "abc"}
        rows = [row(state, 3, 4, [5 + 2 * i], 4, 0, (0,)) for i, state in enumerate(states.values())]
        output = runner.execute(Plan.of_rows(rows), states)
        assert len(output.samples) == 3
        assert runner.times.steps == 1
    written = {5 * 4 + 3, 7 * 4 + 3, 9 * 4 + 3}
    flat = cache.device_pool.flatten(2, 3)
    for slot in range(48):
        assert bool((flat[:, :, slot] == 3.0).all()) == (slot not in written)


def test_the_engine_takes_the_kernels_when_asked(checkpoint: Path) -> None:
    """LLM end to end: LAWFUL_KERNELS=triton puts the GPU's runner behind the same call, with equal outputs."""
    outputs = []
    for form in ("reference", "triton"):
        with choose(form):
            llm = LLM(
                str(checkpoint),
                skip_tokenizer_init=True,
                device="cpu",
                dtype="float32",
                block_size=4,
                max_model_len=24,
                num_gpu_blocks_override=9,
                num_cpu_blocks_override=6,
            )
            assert isinstance(llm.core.runner, GpuRunner) == (form == "triton")
            params = [SamplingParams(n=2, max_tokens=5, seed=3, ignore_eos=True, detokenize=False, logprobs=2)] * 2
            results = llm.generate(prompt_token_ids=[[5, 6, 7, 8, 9], [11, 12]], sampling_params=params, use_tqdm=False)
            outputs.append([[c.token_ids for c in r.outputs] for r in results])
    assert outputs[0] == outputs[1]


def test_sizes_of_padded_batches() -> None:
    assert [padded_size(n) for n in (1, 2, 3, 5, 9, 16, 17, 256, 300)] == [1, 2, 4, 8, 16, 16, 24, 256, 300]
