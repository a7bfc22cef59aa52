"""ModelRunner: groups of several branches, rebuilds that share blocks, swaps, errors of one request."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.cache import KVCache, bytes_per_block
from engine.models.config import ModelConfig
from engine.request import RequestState, Sampled, StepOutput
from engine.runner import Draw, ModelRunner
from tests.engine.paged import Greedy, make_checkpoint, model_runner, request, row, run
from tests.worlds import R, world

PROMPT = [5, 88, 14, 3, 77, 41, 9, 62, 100, 23]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_checkpoint("llama").save_pretrained(path)
    return path


@pytest.fixture
def runner(checkpoint: Path) -> ModelRunner:
    return model_runner(checkpoint)


def logits_alone(checkpoint: Path, tokens: list[int]) -> Tensor:
    """Logits after `tokens`, computed at once with nobody beside them."""
    runner, state = model_runner(checkpoint), request(tokens)
    run(runner, state, scheduled=[row(state, 0, len(tokens), list(range(20)), 4, draws=(0,))])
    return runner.sampler.logits[0]


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_a_first_run_draws_for_every_branch_from_one_row(runner: ModelRunner, checkpoint: Path) -> None:
    state, other = request(PROMPT, branches=3), request(PROMPT[:6], "other")
    rows = [row(state, 0, 10, [8, 2, 5], 4, draws=(0, 1, 2)), row(other, 0, 6, [1, 30], 4, draws=(0,))]
    output = run(runner, state, other, scheduled=rows)
    assert sorted(output.samples) == [("other", 0), ("r", 0), ("r", 1), ("r", 2)]
    for i, tokens in enumerate([PROMPT, PROMPT, PROMPT, PROMPT[:6]]):
        close(runner.sampler.logits[i], logits_alone(checkpoint, tokens))


def test_branches_part_by_copy_on_write(runner: ModelRunner, checkpoint: Path) -> None:
    state = request(PROMPT, branches=3)
    run(runner, state, scheduled=[row(state, 0, 10, [8, 2, 5], 4, draws=(0, 1, 2))])
    state.outputs = [[11], [22], [33]]
    tables = [[8, 2, 19], [8, 2, 20], [8, 2, 5]]  # the last holder writes in place
    rows = [row(state, 10, 11, table, 4, branch, (branch,)) for branch, table in enumerate(tables)]
    run(runner, state, scheduled=rows, blocks_to_copy=[(5, 19), (5, 20)])
    for branch, token in enumerate((11, 22, 33)):
        close(runner.sampler.logits[branch], logits_alone(checkpoint, [*PROMPT, token]))


def test_a_rebuild_reads_a_prefix_that_another_row_writes_in_the_same_step(
    runner: ModelRunner, checkpoint: Path
) -> None:
    state = request(PROMPT, branches=2)
    state.outputs = [[11, 12, 13], [21, 22, 23]]
    # The prompt's two full blocks are shared; branch 1 comes first and reads what branch 0 only now writes.
    rows = [row(state, 8, 13, [8, 2, 7, 9], 4, 1, (1,)), row(state, 0, 13, [8, 2, 5, 6], 4, 0, (0,))]
    run(runner, state, scheduled=rows)
    close(runner.sampler.logits[0], logits_alone(checkpoint, [*PROMPT, 21, 22, 23]))
    close(runner.sampler.logits[1], logits_alone(checkpoint, [*PROMPT, 11, 12, 13]))


def test_blocks_swap_out_and_in_within_one_plan_in_the_plans_order(runner: ModelRunner, checkpoint: Path) -> None:
    first, second = request(PROMPT, "first"), request(PROMPT[::-1], "second")
    run(runner, first, scheduled=[row(first, 0, 10, [0, 1, 2], 4, draws=(0,))])
    run(runner, first, blocks_to_swap_out=[(0, 5), (1, 6), (2, 7)])
    run(runner, second, scheduled=[row(second, 0, 10, [2, 1, 0], 4, draws=(0,))])
    # `second` leaves for the CPU and `first` takes the very blocks it left, then one of them is copied.
    moves: dict[str, Any] = {
        "blocks_to_swap_out": [(2, 0), (1, 1), (0, 2)],
        "blocks_to_swap_in": [(5, 2), (6, 0), (7, 1)],
        "blocks_to_copy": [(1, 9)],
    }
    run(runner, first, scheduled=[row(first, 10, 11, [2, 0, 9], 4, draws=(0,))], **moves)
    close(runner.sampler.logits[0], logits_alone(checkpoint, PROMPT + first.outputs[0][:1]))
    decode = row(second, 10, 11, [20, 21, 22], 4, draws=(0,))
    run(runner, second, scheduled=[decode], blocks_to_swap_in=[(0, 20), (1, 21), (2, 22)])
    close(runner.sampler.logits[0], logits_alone(checkpoint, PROMPT[::-1] + second.outputs[0][:1]))


def test_one_step_mixes_decodes_chunks_and_rows_that_do_not_draw(runner: ModelRunner, checkpoint: Path) -> None:
    states = [request([(7 * i + j) % 101 for j in range(length)], f"r{i}") for i, length in enumerate((3, 9, 17, 6))]
    tables = [[3], [11, 4, 30], [7, 22, 1, 15, 9], [28, 2]]
    prompts = [row(states[0], 0, 3, tables[0], 4, draws=(0,)), row(states[1], 0, 9, tables[1], 4, draws=(0,))]
    run(runner, *states[:2], scheduled=prompts)
    rows = [
        row(states[0], 3, 4, tables[0], 4, draws=(0,)),
        row(states[2], 0, 10, tables[2], 4),
        row(states[1], 9, 10, tables[1], 4, draws=(0,)),
        row(states[3], 0, 6, tables[3], 4, draws=(0,)),
    ]
    output = run(runner, *states, scheduled=rows)
    assert sorted(output.samples) == [("r0", 0), ("r1", 0), ("r3", 0)]
    for i, state in enumerate((states[0], states[1], states[3])):
        known = state.prompt_token_ids + state.outputs[0][:-1]
        close(runner.sampler.logits[i], logits_alone(checkpoint, known))
    run(runner, states[2], scheduled=[row(states[2], 10, 17, tables[2], 4, draws=(0,))])
    close(runner.sampler.logits[0], logits_alone(checkpoint, states[2].prompt_token_ids))


class Ranked(Greedy):
    """Branch b takes the b-th most likely token, so that branches part."""

    def sample(self, logits: Tensor, draws: list[Draw]) -> list[Sampled | Exception]:
        order = logits.topk(4).indices.tolist()
        return [Sampled(tokens[branch]) for tokens, (_, branch) in zip(order, draws, strict=True)]


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_under_memory_pressure_every_request_gets_what_it_gets_alone(checkpoint: Path, mode: str) -> None:
    """The real scheduler: chunks, preemption, swap, copies and rebuilds over a pool that is NaN where not written."""
    lengths = {"a": (9, 2), "b": (14, 3), "c": (5, 1), "d": (11, 2), "e": (3, 4)}
    prompts = {name: [(17 * i + ord(name)) % 101 for i in range(p)] for name, (p, _) in lengths.items()}

    def serve(names: str, gpu: int, tokens: int) -> tuple[dict[str, list[list[int]]], Counter[str]]:
        runner = model_runner(checkpoint, gpu, cpu=10)
        runner.sampler = Ranked()
        scheduler = world(gpu, 10, 4, tokens, length=64, preemption_mode=mode)
        states = {name: request(prompts[name], name, lengths[name][1]) for name in names}
        verbs: Counter[str] = Counter()
        for name in names:
            scheduler.add(R(*lengths[name], m=12, id=name))
        while scheduler.has_unfinished():
            plan = scheduler.schedule()
            output = runner.execute(plan, states)
            for (name, branch), draw in output.samples.items():
                states[name].outputs[branch].append(draw.token_id)
            scheduler.update(plan, set())
            verbs.update(action.verb for action in plan.log)
            verbs["copy"] += len(plan.blocks_to_copy)
        return {name: state.outputs for name, state in states.items()}, verbs

    together, verbs = serve("abcde", gpu=22, tokens=13)
    assert verbs["preempt"] > 2
    assert verbs["copy"] > 2
    assert verbs["swap_in"] > 0 or mode == "recompute"
    for name in lengths:
        assert serve(name, gpu=60, tokens=64)[0] == {name: together[name]}


def test_an_exception_in_place_of_a_draw_fails_that_request_alone(runner: ModelRunner) -> None:
    class Picky(Greedy):
        def sample(self, logits: Tensor, draws: list[Draw]) -> list[Sampled | Exception]:
            return [ValueError("no") if state.request_id == "bad" else Sampled(branch) for state, branch in draws]

    runner.sampler = Picky()
    good, bad = request(PROMPT, "good"), request(PROMPT, "bad", branches=2)
    rows = [row(bad, 0, 10, [0, 1, 2], 4, draws=(0, 1)), row(good, 0, 10, [3, 4, 5], 4, draws=(0,))]
    output = run(runner, good, bad, scheduled=rows)
    assert list(output.samples) == [("good", 0)]
    assert list(output.errors) == ["bad"]


def test_a_plan_without_rows_still_moves_blocks(runner: ModelRunner) -> None:
    pool = runner.cache.device_pool
    pool[:, :, 3] = 1.5
    output = run(runner, blocks_to_swap_out=[(3, 0)], blocks_to_swap_in=[(0, 6)], blocks_to_copy=[(6, 7)])
    assert output == StepOutput()
    assert (pool[:, :, [6, 7]] == 1.5).all()


def test_a_step_where_nobody_draws_computes_no_logits(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.model, "compute_logits", None)
    state: RequestState = request(PROMPT)
    assert run(runner, state, scheduled=[row(state, 0, 4, [0], 4)]) == StepOutput()


def test_the_same_plan_twice_gives_the_same_logits(runner: ModelRunner) -> None:
    state = request(PROMPT)
    seen = []
    for _ in range(2):
        run(runner, state, scheduled=[row(state, 0, 10, [8, 2, 5], 4, draws=(0,))])
        seen.append(runner.sampler.logits)
    assert torch.equal(*seen)


def test_moves_outside_a_pool_are_refused_before_anything_moves(runner: ModelRunner) -> None:
    before = runner.cache.host_pool.clone()
    with pytest.raises(IndexError, match="swap out: target block 8 is outside the pool of 8"):
        run(runner, blocks_to_swap_out=[(0, 0), (1, 8)])
    torch.testing.assert_close(runner.cache.host_pool, before, equal_nan=True)
    with pytest.raises(IndexError, match="swap in: source block 8"):
        run(runner, blocks_to_swap_in=[(8, 0)])
    with pytest.raises(IndexError, match="copy: target block 40"):
        run(runner, blocks_to_copy=[(0, 40)])


def test_cache_sizes() -> None:
    config = ModelConfig(
        "LlamaForCausalLM", 10, 32, 8, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, max_position=9
    )
    assert bytes_per_block(config, 16, torch.bfloat16) == 2 * 3 * 16 * 2 * 8 * 2
    cache = KVCache(config, 5, 0, 16, torch.bfloat16)
    assert cache.bytes_per_block * 5 == cache.device_pool.numel() * 2
    assert cache.layer(2)[1].shape == (5, 16, 2, 8)
    assert cache.host_pool.numel() == 0
    with pytest.raises(ValueError, match="-1 CPU blocks"):
        KVCache(config, 5, -1, 16)
