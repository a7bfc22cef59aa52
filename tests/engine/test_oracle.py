"""The KV oracle: right plans give the outputs of the tokens alone, and every planted mistake changes them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from engine.models.oracle import POISON, OracleRunner, oracle_logits
from engine.request import RequestState
from engine.scheduler.plan import ScheduledSequence
from tests.engine.paged import Greedy, request, row, run

PROMPT = [5, 88, 14, 3, 77, 41, 9, 62, 13, 23]
TABLE = [8, 2, 5, 7]


def oracle(layers: int = 2, **more: Any) -> OracleRunner:
    return OracleRunner(100, 12, 4, 4, Greedy(), num_layers=layers, **more)


def seen(runner: OracleRunner) -> list[list[float]]:
    return runner.sampler.logits.tolist()  # type: ignore[attr-defined]


def expected(*sequences: list[int], layers: int = 2) -> list[list[float]]:
    return [oracle_logits(tokens, 100, layers).tolist() for tokens in sequences]


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_outputs_are_those_of_the_tokens_however_the_steps_are_cut(layers: int) -> None:
    for cuts in ([0, 10], [0, 1, 4, 9, 10], list(range(11))):
        runner, state = oracle(layers), request(PROMPT)
        for start, end in pairwise(cuts):
            run(runner, state, scheduled=[row(state, start, end, TABLE, 4, draws=(0,) if end == 10 else ())])
        assert seen(runner) == expected(PROMPT, layers=layers)


def test_every_token_and_its_place_matter() -> None:
    outputs = {tuple(oracle_logits(tokens, 64).tolist()) for tokens in ([1, 2], [2, 1], [1], [1, 2, 0], [1, 3], [1, 1])}
    assert len(outputs) == 6
    values = oracle_logits(PROMPT, 1000)
    assert values.dtype == np.float32
    assert 0 <= values.min() < 0.05
    assert 0.95 < values.max() < 1
    assert len(set(values.tolist())) > 990


def test_branches_swaps_copies_and_shared_rebuilds_come_out_right() -> None:
    runner, state = oracle(), request(PROMPT, branches=2)
    run(runner, state, scheduled=[row(state, 0, 10, TABLE, 4, draws=(0, 1))])
    assert seen(runner) == expected(PROMPT, PROMPT)
    state.outputs = [[11], [22]]
    rows = [row(state, 10, 11, [8, 2, 9], 4, 0, (0,)), row(state, 10, 11, TABLE, 4, 1, (1,))]
    run(runner, state, scheduled=rows, blocks_to_copy=[(5, 9)])
    assert seen(runner) == expected([*PROMPT, 11], [*PROMPT, 22])
    run(runner, state, blocks_to_swap_out=[(8, 3), (2, 0), (9, 1), (5, 2)])
    rows = [row(state, 11, 12, [1, 4, 0], 4, 0, (0,)), row(state, 11, 12, [1, 4, 3], 4, 1, (1,))]
    run(runner, state, scheduled=rows, blocks_to_swap_in=[(3, 1), (0, 4), (1, 0), (2, 3)])
    assert seen(runner) == expected(PROMPT + state.outputs[0][:2], PROMPT + state.outputs[1][:2])
    length = 10 + 3
    rows = [row(state, 8, length, [6, 7, 11, 10], 4, 1, (1,)), row(state, 0, length, [6, 7, 8, 9], 4, 0, (0,))]
    run(runner, state, scheduled=rows)
    assert seen(runner) == expected(PROMPT + state.outputs[1][:3], PROMPT + state.outputs[0][:3])


def decode_after(runner: OracleRunner, state: RequestState, table: list[int], **moves: Any) -> bool:
    """Whether one decode through `table` gives what the tokens alone give."""
    run(runner, state, scheduled=[row(state, 10, 11, table, 4, draws=(0,))], **moves)
    return seen(runner) == expected(PROMPT + state.outputs[0][:1])


def after_prompt() -> tuple[OracleRunner, RequestState]:
    """A prompt is computed in blocks 8, 2, 5; another request wrote to blocks 0, 1 and 3."""
    runner, state, other = oracle(), request(PROMPT), request(PROMPT[::-1], "other")
    run(runner, other, scheduled=[row(other, 0, 10, [0, 1, 3], 4, draws=(0,))])
    run(runner, state, scheduled=[row(state, 0, 10, TABLE, 4, draws=(0,))])
    assert seen(runner) == expected(PROMPT)
    return runner, state


def test_the_right_table_is_accepted() -> None:
    assert decode_after(*after_prompt(), TABLE)


@pytest.mark.parametrize("table", [[2, 8, 5], [0, 2, 5], [8, 2, 3], [8, 8, 5], [8, 2, 10], [8, 4, 5]])
def test_a_wrong_table_is_noticed(table: list[int]) -> None:
    assert not decode_after(*after_prompt(), table)


def test_a_missing_copy_is_noticed() -> None:
    assert not decode_after(*after_prompt(), [8, 2, 9])
    assert decode_after(*after_prompt(), [8, 2, 9], blocks_to_copy=[(5, 9)])


def test_a_missing_or_wrong_swap_is_noticed() -> None:
    out, table = [(8, 0), (2, 1), (5, 2)], [10, 9, 6]
    back = [(0, 10), (1, 9), (2, 6)]
    for pairs, right in ((back, True), (back[1:], False), ([(0, 9), (1, 10), (2, 6)], False)):
        runner, state = after_prompt()
        run(runner, state, blocks_to_swap_out=out)
        assert decode_after(runner, state, table, blocks_to_swap_in=pairs) is right


def test_a_block_taken_by_another_is_noticed() -> None:
    runner, state = after_prompt()
    thief = request([1, 2, 3], "thief")
    run(runner, thief, scheduled=[row(thief, 0, 3, [2], 4)])
    assert not decode_after(runner, state, TABLE)


def test_the_same_tokens_after_another_prefix_are_noticed_from_the_second_layer_on() -> None:
    runner, state = after_prompt()
    twin = request([99, *PROMPT[1:]], "twin")
    run(runner, twin, scheduled=[row(twin, 0, 10, [4, 6, 9], 4)])
    assert not decode_after(runner, state, [8, 6, 5])


def test_a_wrong_slot_and_a_skipped_position_are_noticed() -> None:
    runner, state = after_prompt()
    good = row(state, 10, 11, TABLE, 4, draws=(0,))
    run(runner, state, scheduled=[good._replace(slots=[good.slots[0] + 1])])
    assert seen(runner) != expected(PROMPT + state.outputs[0][:1])
    runner, state = after_prompt()
    state.outputs[0].append(4)
    run(runner, state, scheduled=[row(state, 11, 12, TABLE, 4, draws=(0,))])
    assert seen(runner) != expected(PROMPT + state.outputs[0][:2])


def test_pools_start_poisoned_and_freed_blocks_keep_what_they_held() -> None:
    runner, state = after_prompt()
    assert (runner.device_pool[:, [4, 6, 7, 9, 10, 11]] == POISON).all()
    assert (runner.host_pool == POISON).all()
    before = runner.device_pool.copy()
    run(runner, state, blocks_to_swap_out=[(8, 0)])
    assert (runner.device_pool == before).all()
    assert (runner.host_pool[:, 0] == before[:, 8]).all()


def test_favourites_decide_the_draw() -> None:
    asked = []

    def favourite(state: RequestState, branch: int, position: int) -> int | None:
        asked.append((state.request_id, branch, position))
        return 42 if branch == 1 else None

    runner, state = oracle(favourites=favourite), request(PROMPT, branches=2)
    run(runner, state, scheduled=[row(state, 0, 10, TABLE, 4, draws=(0, 1))])
    assert asked == [("r", 0, 10), ("r", 1, 10)]
    assert state.outputs[1] == [42]
    assert state.outputs[0] == [int(oracle_logits(PROMPT, 100, 2).argmax())]


def test_what_lies_outside_a_pool_is_refused() -> None:
    runner, state = oracle(), request(PROMPT)
    good: ScheduledSequence = row(state, 0, 10, TABLE, 4)
    for bad in (good._replace(block_table=[8, 2, 12]), good._replace(slots=[48] * 10)):
        with pytest.raises(IndexError):
            run(runner, state, scheduled=[bad])
    with pytest.raises(IndexError, match="swap out: target block 4"):
        run(runner, state, blocks_to_swap_out=[(0, 4)])
    with pytest.raises(ValueError, match="do not cover"):
        run(runner, state, scheduled=[good._replace(block_table=[8, 2])])
    with pytest.raises(ValueError, match="known ones"):
        run(runner, state, scheduled=[good._replace(end=11, slots=[*good.slots, 22])])
