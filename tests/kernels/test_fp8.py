"""The fp8 cache: what is written is the nearest value that the type holds, and moves keep every byte."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.copy_blocks import copy_blocks
from kernels.fp8 import FP8, FP8_MAX, to_cache_type
from kernels.swap_blocks import host_blocks, swap_blocks
from kernels.write_kv import write_kv

HELD = torch.arange(256, dtype=torch.uint8).view(FP8).float()
HELD = HELD[HELD.isfinite()].unique()


def written(numbers: Tensor) -> Tensor:
    """What the cache holds of these numbers, as float32."""
    each = 16
    padded = torch.cat((numbers, numbers.new_zeros(-len(numbers) % each))).view(-1, 1, each)
    caches = [torch.zeros(len(padded), 1, 1, each).to(FP8) for _ in range(2)]
    write_kv(padded, -padded, torch.arange(len(padded)), *caches)
    keys, values = (cache.float().view(-1)[: len(numbers)] for cache in caches)
    assert torch.equal(keys, -values)
    return keys


def numbers() -> Tensor:
    """Every value of the type, every middle between two with its neighbours, and others of all sizes."""
    middles = (HELD[1:] + HELD[:-1]) / 2
    near = [middles, *(torch.nextafter(middles, torch.full_like(middles, end)) for end in (-math.inf, math.inf))]
    spread = torch.randn(3000) * torch.exp2(torch.randint(-12, 10, (3000,)).float())
    return torch.cat((HELD, *near, spread))


def test_every_number_becomes_the_nearest_that_the_type_holds() -> None:
    x = numbers()
    nearest = (x.clamp(-FP8_MAX, FP8_MAX)[:, None] - HELD).abs().min(1).values
    held = written(x)
    assert torch.equal((x.clamp(-FP8_MAX, FP8_MAX) - held).abs(), nearest)
    assert torch.equal(held, to_cache_type(x, FP8).float())  # ties too: reference and kernel write the same bytes
    inside = x.abs() <= FP8_MAX
    error = (x - held).abs()[inside]
    # Half a unit of 3 bits behind the first; below 2^-6 half of 2^-9.
    assert (error <= torch.maximum(x[inside].abs() * 2.0**-4, torch.tensor(2.0**-10))).all()
    assert torch.equal(held[~inside], FP8_MAX * x[~inside].sign())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    x = numbers().clamp(-60000, 60000).to(dtype)
    assert torch.equal(written(x), to_cache_type(x.float(), FP8).float())


def pool(blocks: int) -> Tensor:
    """Any bytes, NaN among them, in blocks of 36 bytes."""
    return torch.randint(0, 256, (3, 2, blocks, 4, 1, 9), dtype=torch.uint8).view(FP8)


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_copies_of_fp8_blocks_keep_every_byte() -> None:
    after = pool(6)
    before = after.clone()
    copy_blocks(after, [(0, 5), (4, 1), (1, 2)])
    for target, source in {5: 0, 1: 4, 2: 1, 0: 0, 3: 3, 4: 4}.items():
        assert same(after[:, :, target], before[:, :, source])


@pytest.mark.parametrize("by_block", [False, True])
def test_swaps_of_fp8_blocks_there_and_back_keep_every_byte(by_block: bool) -> None:
    device = pool(5)
    before = device.clone()
    host = host_blocks(3, 4, device.shape[3:], FP8, pin_memory=False, by_block=by_block)
    swap_blocks(device, host, [(4, 0), (1, 3)], "swap out")
    device.view(torch.uint8).zero_()
    swap_blocks(host, device, [(0, 2), (3, 0)], "swap in")
    assert same(device[:, :, 2], before[:, :, 4])
    assert same(device[:, :, 0], before[:, :, 1])
    assert not device[:, :, [1, 3, 4]].view(torch.uint8).any()
