"""paged_attention against attention written as loops, in pools where everything outside a context is NaN."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kernels.paged_attention import PagedRows, paged_attention


def plain_attention(query: Tensor, keys: Tensor, values: Tensor, position: int, scale: float) -> Tensor:
    """One token: query (heads, dim), keys and values (context, kv_heads, dim), in float64."""
    group = query.shape[0] // keys.shape[1]
    out = torch.zeros_like(query, dtype=torch.float64)
    for head in range(query.shape[0]):
        k, v = keys[: position + 1, head // group].double(), values[: position + 1, head // group].double()
        out[head] = torch.softmax(scale * (k @ query[head].double()), 0) @ v
    return out


def check(
    spans: list[tuple[int, int]],
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 8,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    tolerance: float = 1e-5,
) -> None:
    """Rows (start, end) over scrambled tables in a pool of NaN."""
    rng = random.Random(len(spans) * 1000 + heads)
    needed = [-(-end // block_size) for _, end in spans]
    blocks = sum(needed) + 3
    free = rng.sample(range(blocks), blocks)
    tables = [[free.pop() for _ in range(n)] for n in needed]
    key_cache, value_cache = (torch.full((blocks, block_size, kv_heads, dim), math.nan, dtype=dtype) for _ in range(2))
    contexts = []
    for (_, end), table in zip(spans, tables, strict=True):
        contexts.append((torch.randn(end, kv_heads, dim).to(dtype), torch.randn(end, kv_heads, dim).to(dtype)))
        for position in range(end):
            place = table[position // block_size], position % block_size
            key_cache[place], value_cache[place] = (part[position] for part in contexts[-1])
    rows = PagedRows([s for s, _ in spans], [e for _, e in spans], tables, block_size)
    query = torch.randn(sum(end - start for start, end in spans), heads, dim).to(dtype)
    scale = dim**-0.5
    out = paged_attention(query, key_cache, value_cache, rows, scale)
    assert out.dtype == dtype
    at = 0
    for (start, end), (keys, values) in zip(spans, contexts, strict=True):
        for position in range(start, end):
            expected = plain_attention(query[at], keys, values, position, scale)
            torch.testing.assert_close(out[at].double(), expected, rtol=tolerance, atol=tolerance)
            at += 1


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (9, 3), (5, 1)])
def test_decodes_prefills_and_chunks_mix_for_any_head_ratio(heads: int, kv_heads: int) -> None:
    check([(0, 7), (4, 5), (9, 10), (3, 9), (0, 1), (0, 2), (6, 7)], heads, kv_heads)


@pytest.mark.parametrize("block_size", [1, 3, 16, 32])
def test_any_block_size(block_size: int) -> None:
    check([(0, 33), (32, 33), (15, 16), (16, 17), (7, 40)], block_size=block_size)


def test_decodes_of_very_different_lengths() -> None:
    check([(0, 1), (1, 2), (299, 300), (63, 64), (64, 65), (129, 130), (700, 701)], block_size=16)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
def test_half_types(dtype: torch.dtype, tolerance: float) -> None:
    check([(0, 7), (9, 10), (3, 9), (4, 5)], dtype=dtype, tolerance=tolerance)


def test_odd_head_sizes() -> None:
    check([(0, 5), (6, 7), (2, 6)], heads=2, kv_heads=1, dim=5)
    check([(0, 5), (6, 7)], heads=2, kv_heads=1, dim=1)


def test_nothing_scheduled_gives_nothing() -> None:
    cache = torch.zeros(2, 4, 1, 8)
    out = paged_attention(torch.zeros(0, 2, 8), cache, cache, PagedRows([], [], [], 4), 1.0)
    assert out.shape == (0, 2, 8)


def test_rows_of_no_tokens_take_no_part() -> None:
    cache = torch.randn(3, 4, 1, 8)
    query = torch.randn(2, 2, 8)
    alone = paged_attention(query, cache, cache, PagedRows([3], [5], [[2, 0]], 4), 1.0)
    among = paged_attention(query, cache, cache, PagedRows([0, 3, 6], [0, 5, 6], [[], [2, 0], [1, 2]], 4), 1.0)
    assert torch.equal(alone, among)


def test_a_prompt_in_pieces_equals_the_prompt_at_once() -> None:
    cache = torch.randn(2, 8, 4, 2, 16)
    table, query = [5, 1, 7, 2, 0], torch.randn(19, 4, 16)
    whole = paged_attention(query, cache[0], cache[1], PagedRows([0], [19], [table], 4), 0.25)
    cuts = [0, 1, 6, 7, 15, 19]
    pieces = [
        paged_attention(query[a:b], cache[0], cache[1], PagedRows([a], [b], [table], 4), 0.25)
        for a, b in pairwise(cuts)
    ]
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=1e-5, atol=1e-5)


def test_block_ids_near_the_end_of_a_large_pool_do_not_wrap() -> None:
    # Only the index arithmetic is large: a slot past 2**31 must stay what it is.
    rows = PagedRows([0], [3], [[2**28, 7]], 16)
    assert rows.chunks[0].slots.tolist() == [2**32, 2**32 + 1, 2**32 + 2]
    rows = PagedRows([16], [17], [[1, 2**40]], 16)
    assert rows.decodes[0].slots.tolist()[-1] == 2**44


def test_arguments_that_do_not_fit_are_refused() -> None:
    cache = torch.zeros(2, 4, 2, 8)
    rows = PagedRows([0], [1], [[0]], 4)
    with pytest.raises(ValueError, match="cannot share"):
        paged_attention(torch.zeros(1, 3, 8), cache, cache, rows, 1.0)
    with pytest.raises(ValueError, match="query tokens"):
        paged_attention(torch.zeros(2, 2, 8), cache, cache, rows, 1.0)
    with pytest.raises(ValueError, match="do not cover"):
        PagedRows([0], [5], [[0]], 4)
    with pytest.raises(ValueError, match="blocks of 4"):
        paged_attention(torch.zeros(1, 2, 8), cache, cache, PagedRows([0], [1], [[0]], 2), 1.0)
    with pytest.raises(IndexError):
        paged_attention(torch.zeros(1, 2, 8), cache, cache, PagedRows([0], [1], [[9]], 4), 1.0)
