"""What serves on a CPU: packed products, attention in few operations, rotary as a product; against the plain forms."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from engine.allocator import keep_freed_memory
from engine.cache import KVCache
from engine.models.config import ModelConfig, RopeConfig
from engine.models.cpu_attention import CpuAttention
from engine.models.linear import HalfLinear, PackedLinear, PlainLinear, packing
from engine.models.llama import _neighbours
from engine.models.rope import Turns, angles, inverse_frequencies
from kernels.dispatch import choose
from kernels.paged_attention import PagedRows, paged_attention_reference
from kernels.rotary import rotary_reference
from kernels.write_kv import write_kv_reference
from tests.engine.paged import make_checkpoint, model_runner, request, row, run

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    "LlamaForCausalLM", 10, 48, 8, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8, max_position=400
)


@pytest.mark.parametrize(
    ("form", "exact"), [(PlainLinear, 1e-5), (PackedLinear, 1e-5), (HalfLinear, 3e-3)], ids=["plain", "packed", "half"]
)
@pytest.mark.parametrize("biased", [False, True])
def test_every_form_is_the_product(form: type, exact: float, biased: bool) -> None:
    weight, bias = torch.randn(70, 33), torch.randn(70, 2)[:, 0] if biased else None
    linear = form(weight, bias)
    for rows in (1, 2, 5, 64):
        x = torch.randn(rows, 33)
        torch.testing.assert_close(linear(x), F.linear(x, weight, bias), rtol=exact, atol=exact * 10)


def test_a_packed_product_of_a_row_is_the_same_in_any_company() -> None:
    if packing(torch.float32, CPU)[0] is not PackedLinear:
        pytest.skip("this torch packs nothing in float32")
    for columns, rows in ((96, 130), (576, 200)):
        linear = PackedLinear(torch.randn(rows, columns), None)
        x = torch.randn(40, columns)
        together = linear(x)
        for count in (1, 2, 3, 7, 16):
            assert all(torch.equal(linear(x[i : i + count]), together[i : i + count]) for i in range(20))


def test_bfloat16_weights_are_taken_over_without_loss() -> None:
    """Down to 2^-17: the product with the unit vectors gives the weights back."""
    exponents = torch.arange(-17, 15)
    weight = (torch.randint(128, 256, (16, 32)) * 2.0 ** (exponents - 7)).bfloat16()
    assert torch.equal(HalfLinear(weight, None)(torch.eye(32)).T, weight.float())


def test_which_form_serves() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        pack, rows = packing(dtype, CPU)
        assert rows == (torch.float32 if pack is HalfLinear else dtype)
    with choose("triton"):
        assert packing(torch.bfloat16, CPU) == (PlainLinear, torch.bfloat16)


def test_turning_neighbours_is_turning_halves_in_another_order() -> None:
    turns = Turns(CONFIG)
    heads, last = 5, 300
    for positions in (torch.tensor([0, 3, 3, last]), torch.tensor([2]), torch.tensor([], dtype=torch.int64)):
        x = torch.randn(len(positions), heads, 8)
        dealt = _neighbours(x.flatten(1).T, heads, 8).T.reshape(x.shape).contiguous()
        expected = rotary_reference(x, *angles(positions, inverse_frequencies(RopeConfig(), 8)))
        turned = turns.at(positions)(dealt)
        back = turned.unflatten(-1, (4, 2)).transpose(-1, -2).flatten(-2)
        torch.testing.assert_close(back, expected)


def test_attention_of_mixed_rows_is_the_references() -> None:
    """Decodes of like and unlike lengths, pieces of prompts, in any order, over a pool that is NaN where unwritten."""
    rng = random.Random(4)
    for _ in range(25):
        cache = KVCache(CONFIG, 120, 0, 4)
        cache.device_pool.fill_(float("nan"))
        spans = []
        for _ in range(rng.randint(1, 6)):
            end = rng.choice([1, 3, 4, 9, 17, 60])
            spans.append((max(0, end - rng.choice([1, 1, 1, 2, end])), end))
        ids = rng.sample(range(120), 120)
        tables = [[ids.pop() for _ in range(-(-end // 4))] for _, end in spans]
        known = [
            (table[p // 4] * 4 + p % 4) for (start, _), table in zip(spans, tables, strict=True) for p in range(start)
        ]
        keys, values = cache.layer(1)
        for pool in (keys, values):
            pool.view(-1, 2, 8)[known] = torch.randn(len(known), 2, 8)
        slots = [table[p // 4] * 4 + p % 4 for (s, e), table in zip(spans, tables, strict=True) for p in range(s, e)]
        query = torch.randn(len(slots), 6, 8)
        key, value = torch.randn(2, len(slots), 2, 8)
        starts, ends = [s for s, _ in spans], [e for _, e in spans]
        out = CpuAttention(starts, ends, tables, slots, cache, torch.float32).attend(query, key, value, 1, 0.3)
        write_kv_reference(key, value, torch.tensor(slots), keys, values)
        expected = paged_attention_reference(query, keys, values, PagedRows(starts, ends, tables, 4), 0.3)
        torch.testing.assert_close(out, expected.flatten(1))


def test_attention_refuses_what_lies_outside() -> None:
    cache = KVCache(CONFIG, 10, 0, 4)

    def rows(start: int, end: int, table: list[int], slots: list[int]) -> None:
        CpuAttention([start], [end], [table], slots, cache, torch.float32)

    with pytest.raises(IndexError, match="block 10 is outside a cache of 10 blocks"):
        rows(4, 5, [1, 10], [39])
    with pytest.raises(IndexError, match="block -1 is outside"):
        rows(4, 6, [1, -1], [38, 39])
    with pytest.raises(IndexError, match="slots 40 to 40 pass the pool of 40"):
        rows(4, 5, [1, 2], [40])
    with pytest.raises(ValueError, match="1 blocks of 4 do not cover 5 tokens"):
        rows(3, 5, [1], [38, 39])
    with pytest.raises(ValueError, match="too short"):
        CpuAttention([8, 4], [9, 5], [[1, 2, 3], [4]], [1, 2], cache, torch.float32)
    with pytest.raises(ValueError, match="positions"):
        rows(5, 4, [1, 2], [])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types_keep_a_cache_of_their_own_type(dtype: str, tmp_path: Path) -> None:
    make_checkpoint("qwen2").save_pretrained(tmp_path)
    runner = model_runner(tmp_path, dtype=dtype)
    assert runner.cache.device_pool.dtype == runner.model.dtype == getattr(torch, dtype)  # type: ignore[attr-defined]
    state = request([5, 88, 14, 3, 77])
    run(runner, state, scheduled=[row(state, 0, 5, [8, 2], 4, draws=(0,))])
    whole = runner.sampler.logits[0]  # type: ignore[attr-defined]
    assert whole.isfinite().all()
    again = request([5, 88, 14, 3, 77])
    run(runner, again, scheduled=[row(again, 0, 3, [9], 4)])
    run(runner, again, scheduled=[row(again, 3, 5, [9, 4], 4, draws=(0,))])
    torch.testing.assert_close(runner.sampler.logits[0], whole, rtol=2e-2, atol=2e-2)  # type: ignore[attr-defined]


def test_asking_for_freed_memory_to_be_kept_can_be_repeated() -> None:
    assert keep_freed_memory() == keep_freed_memory()
