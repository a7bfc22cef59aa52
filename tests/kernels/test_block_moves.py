"""copy_blocks and swap_blocks against a loop over pairs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.copy_blocks import copy_blocks
from kernels.swap_blocks import swap_blocks


def pool(blocks: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """3 layers, keys and values, `blocks` blocks of 4 tokens, 2 heads of 8."""
    return torch.randn(3, 2, blocks, 4, 2, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_reach_every_layer_and_leave_the_rest_alone(dtype: torch.dtype) -> None:
    before = pool(6, 0, dtype)
    after = before.clone()
    copy_blocks(after, [(0, 5), (0, 3), (4, 1)])
    for target, source in {5: 0, 3: 0, 1: 4, 0: 0, 2: 2, 4: 4}.items():
        assert torch.equal(after[:, :, target], before[:, :, source])


def test_a_chain_of_copies_reads_everything_before_it_writes() -> None:
    before = pool(4, 1)
    after = before.clone()
    copy_blocks(after, [(0, 1), (1, 2), (2, 0)])
    for target, source in {1: 0, 2: 1, 0: 2, 3: 3}.items():
        assert torch.equal(after[:, :, target], before[:, :, source])


def test_a_swap_round_trip_restores_blocks_bit_for_bit_and_keeps_its_source() -> None:
    device, host = pool(6, 2), pool(5, 3)
    before, host_before = device.clone(), host.clone()
    swap_blocks(device, host, [(5, 0), (1, 4)], "swap out")
    assert torch.equal(device, before)
    assert torch.equal(host[:, :, 1:4], host_before[:, :, 1:4])
    swap_blocks(host, device, [(0, 2), (4, 3)], "swap in")
    assert torch.equal(device[:, :, 2], before[:, :, 5])
    assert torch.equal(device[:, :, 3], before[:, :, 1])
    assert torch.equal(device[:, :, [0, 1, 4, 5]], before[:, :, [0, 1, 4, 5]])


def test_no_pairs_move_nothing_even_between_empty_pools() -> None:
    empty = pool(0, 0)
    swap_blocks(pool(2, 0), empty, [])
    copy_blocks(empty, [])


@pytest.mark.parametrize(
    ("pairs", "name"), [([(0, 1), (6, 0)], "source block 6"), ([(0, 0), (1, 5)], "target block 5"), ([(-1, 0)], "-1")]
)
def test_a_block_outside_its_pool_is_named_before_anything_moves(pairs: list[tuple[int, int]], name: str) -> None:
    device, host = pool(6, 4), pool(5, 5)
    before = host.clone()
    with pytest.raises(IndexError, match=f"swap out: .*{name}"):
        swap_blocks(device, host, pairs, "swap out")
    assert torch.equal(host, before)


def test_a_copy_outside_the_pool_or_onto_one_target_twice_changes_nothing() -> None:
    blocks = pool(3, 6)
    before = blocks.clone()
    with pytest.raises(IndexError, match="target block 3"):
        copy_blocks(blocks, [(0, 1), (0, 3)])
    with pytest.raises(ValueError, match="target block 1 is named twice"):
        copy_blocks(blocks, [(0, 1), (2, 1)])
    assert torch.equal(blocks, before)


def test_pools_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="do not match"):
        swap_blocks(pool(2, 0), pool(2, 0)[:2], [(0, 0)])
    with pytest.raises(ValueError, match="float32"):
        swap_blocks(pool(2, 0), pool(2, 0, torch.float16), [(0, 0)])
