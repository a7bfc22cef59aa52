"""Kernels against float64 over the shapes that have gone wrong elsewhere, in pools of NaN, under a watch on memory.

The cases named [kernel] in the field record: large block ids, head sizes that are no power of two, unusual head ratios,
rows of no tokens, unwritten tails, slot -1, block moves.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from kernels.copy_blocks import copy_blocks
from kernels.fp8 import FP8, to_cache_type
from kernels.paged_attention import PagedRows, launch_paged_attention, paged_attention
from kernels.paged_prefill_attention import launch_paged_prefill_attention, prefill_sizes
from kernels.swap_blocks import Swapper, host_blocks, swap_blocks
from kernels.write_kv import write_kv
from tests.kernels.guard import fence_of_blocks, watched

NAN = math.nan
FP = torch.float32
DIMS = [16, 32, 64, 72, 80, 96, 112, 120, 128, 160, 192, 256]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Pool:
    """Rows (start, end) with contexts in scrambled blocks of a pool that is NaN elsewhere; the tables are padded with
    ids of NaN blocks, and beyond them with -1."""

    def __init__(
        self,
        spans: Sequence[tuple[int, int]],
        heads: int,
        kv_heads: int,
        dim: int,
        block_size: int,
        dtype: torch.dtype = FP,
        cache: torch.dtype | None = None,
    ) -> None:
        self.spans, self.heads, self.kv_heads, self.dim, self.block_size = spans, heads, kv_heads, dim, block_size
        self.scale = dim**-0.5
        rng = random.Random(heads * 100 + dim)
        needed = [-(-end // block_size) for _, end in spans]
        blocks = sum(needed) + 2
        free = rng.sample(range(blocks), blocks)
        self.tables = [[free.pop() for _ in range(n)] for n in needed]
        shape = (blocks, block_size, kv_heads, dim)
        self.caches = [torch.full(shape, NAN).to(cache or dtype) for _ in range(2)]
        self.contexts = [[torch.randn(end, kv_heads, dim).to(dtype) for _ in range(2)] for _, end in spans]
        self.slots: list[int] = []
        for table, parts in zip(self.tables, self.contexts, strict=True):
            slots = [table[p // block_size] * block_size + p % block_size for p in range(len(parts[0]))]
            self.slots += slots
            for pool, part in zip(self.caches, parts, strict=True):
                flat = pool.view(-1, kv_heads, dim)
                for slot, row in zip(slots, to_cache_type(part, pool.dtype), strict=True):
                    flat[slot] = row
        if cache is not None:
            self.contexts = [[part.to(cache).to(dtype) for part in parts] for parts in self.contexts]
        self.query = torch.randn(sum(end - start for start, end in spans), heads, dim).to(dtype)

    def rows(self) -> PagedRows:
        rows = PagedRows([s for s, _ in self.spans], [e for _, e in self.spans], self.tables, self.block_size)
        # Padding of the kernels' tables: a block of NaN right behind a row's last, then -1.
        unused = next(b for b in range(len(self.caches[0])) if all(b not in table for table in self.tables))
        padding = torch.tensor([[unused, -1, -1]]).expand(len(self.spans), 3)
        wide = torch.cat((rows.block_tables, padding), 1)
        for row, table in enumerate(self.tables):
            wide[row, len(table) :] = -1
            wide[row, len(table)] = unused
        if len(self.spans):
            rows.block_tables = wide
        return rows

    def expected(self) -> Tensor:
        out = []
        at = 0
        group = self.heads // self.kv_heads
        for (start, end), (k, v) in zip(self.spans, self.contexts, strict=True):
            for position in range(start, end):
                keys, values = (x[: position + 1].double().repeat_interleave(group, 1) for x in (k, v))
                scores = torch.einsum("hd,phd->hp", self.query[at].double(), keys) * self.scale
                out.append(torch.einsum("hp,phd->hd", scores.softmax(-1), values))
                at += 1
        return torch.stack(out) if out else torch.zeros(0, self.heads, self.dim, dtype=torch.float64)

    @contextmanager
    def watched(self, form: str) -> Iterator[None]:
        """Only slots of contexts may be touched."""
        if form == "reference":
            yield
            return
        fences = [fence_of_blocks(n, c, self.slots) for n, c in zip(("keys", "values"), self.caches, strict=True)]
        with watched(fences=fences):
            yield

    def check(self, form: str, tolerance: float | None = None) -> Tensor:
        with self.watched(form):
            out = paged_attention(self.query, *self.caches, self.rows(), self.scale)
        tolerance = tolerance or TOLERANCE[self.query.dtype]
        torch.testing.assert_close(out.double(), self.expected(), rtol=tolerance, atol=tolerance)
        return out


MIXED = [
    (0, 5),
    (36, 37),
    (5, 9),
    (37, 41),
    (0, 1),
]  # prompts, a decode, chunks with contexts of 5 and 37, a first token


@pytest.mark.parametrize("dim", DIMS)
def test_head_sizes(dim: int, form: str) -> None:
    Pool(MIXED, 4, 2, dim, 16).check(form)


@pytest.mark.parametrize("ratio", [(1, 1), (3, 1), (5, 1), (6, 2), (7, 7), (12, 4), (17, 1), (32, 1), (71, 1), (96, 6)])
def test_head_ratios(ratio: tuple[int, int], form: str) -> None:
    Pool([(0, 3), (17, 18), (5, 7)], *ratio, 16, 8).check(form)


def test_each_query_head_reads_its_own_key_head(form: str) -> None:
    pool = Pool([(0, 4), (20, 21)], 12, 4, 16, 16)
    for cache in pool.caches[1:]:
        for head in range(4):
            cache[:, :, head] = torch.where(cache[:, :, head].isnan(), NAN, float(head + 1))
    with pool.watched(form):
        out = paged_attention(pool.query, *pool.caches, pool.rows(), pool.scale)
    for head in range(12):
        torch.testing.assert_close(out[:, head], torch.full_like(out[:, head], head // 3 + 1))


@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 64])
def test_block_sizes(block_size: int, form: str) -> None:
    Pool([(0, 70), (64, 65), (63, 64), (15, 33)], 2, 1, 32, block_size).check(form)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(dtype: torch.dtype, form: str) -> None:
    Pool(MIXED, 4, 2, 80, 16, dtype).check(form)


def test_an_fp8_cache(form: str) -> None:
    Pool(MIXED, 4, 2, 32, 16, torch.float32, FP8).check(form)


def test_long_contexts_are_split_and_put_together(form: str) -> None:
    pool = Pool([(1299, 1300), (511, 512), (512, 513), (3, 4)], 4, 2, 16, 16)
    assert pool.rows().num_splits == 3
    pool.check(form)


def test_a_row_of_a_split_batch_has_the_bits_it_has_alone() -> None:
    """What a row gets does not depend on how long its neighbours are."""
    pool = Pool([(1099, 1100), (99, 100)], 2, 1, 16, 16)
    together = launch_paged_attention(pool.query, *pool.caches, pool.rows(), pool.scale)
    rows = PagedRows([99], [100], [pool.tables[1]], 16)
    assert rows.num_splits == 1
    alone = launch_paged_attention(pool.query[1:], *pool.caches, rows, pool.scale)
    assert torch.equal(together[1:], alone)


def test_the_last_chunk_of_a_prompt_does_not_depend_on_how_the_rest_was_cut() -> None:
    pool = Pool([(0, 150)], 2, 1, 16, 16)
    whole = launch_paged_attention(pool.query, *pool.caches, pool.rows(), pool.scale)
    for cut in (1, 64, 77):
        rows = PagedRows([cut], [150], pool.tables, 16)
        part = launch_paged_attention(pool.query[cut:], *pool.caches, rows, pool.scale)
        torch.testing.assert_close(part, whole[cut:], rtol=1e-6, atol=1e-6)


def test_decodes_may_ride_along_with_prefills() -> None:
    pool = Pool(MIXED, 4, 2, 32, 16)
    out = torch.full_like(pool.query, NAN)
    rows = pool.rows()
    with pool.watched("triton"):
        launch_paged_prefill_attention(pool.query, *pool.caches, rows, pool.scale, out, decodes_ride=True)
    torch.testing.assert_close(out.double(), pool.expected(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("end", [1, 5, 16, 17])
def test_nothing_past_the_end_is_read(block_size: int, end: int, form: str) -> None:
    Pool([(end - 1, end), (0, end)], 2, 1, 16, block_size).check(form)


def test_rows_of_no_tokens_give_zeros_and_change_nobody() -> None:
    """A batch padded to a captured size: empty rows stand among the others, or are all there is."""
    pool = Pool([(4, 5), (16, 17)], 2, 1, 16, 4)
    rows = pool.rows()
    ends = torch.tensor([5, 0, 17, 0])
    tables = torch.full((4, rows.block_tables.shape[1]), -1)
    tables[0], tables[2] = rows.block_tables[0], rows.block_tables[1]
    padded = PagedRows.of_decodes(ends, tables, torch.arange(5), 4, 17, 512)
    query = torch.full((4, 2, 16), NAN)
    query[[0, 2]] = pool.query
    with pool.watched("triton"):
        out = launch_paged_attention(query, *pool.caches, padded, pool.scale)
    alone = launch_paged_attention(pool.query, *pool.caches, rows, pool.scale)
    assert torch.equal(out[[0, 2]], alone)
    assert not out[[1, 3]].any()
    none = PagedRows.of_decodes(torch.zeros(2, dtype=torch.int64), tables[:2], torch.arange(3), 4, 0, 512)
    assert not launch_paged_attention(query[:2], *pool.caches, none, pool.scale).any()
    split = PagedRows.of_decodes(ends, tables, torch.arange(5), 4, 17, 16)  # two partitions, of which most are empty
    assert not launch_paged_attention(query, *pool.caches, split, pool.scale)[[1, 3]].any()


def test_no_launch_has_an_empty_grid(form: str) -> None:
    Pool([], 2, 1, 16, 4).check(form)
    caches = [torch.zeros(1, 4, 1, 16) for _ in range(2)]
    write_kv(torch.ones(0, 1, 16), torch.ones(0, 1, 16), torch.zeros(0, dtype=torch.int64), *caches)


# large block ids


def sparse(blocks: int, block_stride: int, inner: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A pool whose blocks are far apart, of memory that is there only where it is touched."""
    import mmap

    size = (blocks - 1) * block_stride + math.prod(inner)
    memory = mmap.mmap(-1, size * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    strides = [math.prod(inner[i + 1 :]) for i in range(len(inner))]
    return torch.frombuffer(memory, dtype=dtype).as_strided((blocks, *inner), (block_stride, *strides))


def test_offsets_beyond_32_bits() -> None:
    """The block ids are small and the stride is large: every product passes 2**31, as with many blocks."""
    near = Pool([(0, 9), (9, 10)], 2, 1, 16, 4)
    far = [sparse(len(cache), 2**30 + 64, tuple(cache.shape[1:]), FP) for cache in near.caches]
    slots = torch.tensor(near.slots)
    for pools in (near.caches, far):
        for part in (0, 1):
            assert pools[part].shape == near.caches[part].shape
    contexts = [torch.cat([parts[part] for parts in near.contexts]) for part in (0, 1)]
    from kernels.dispatch import choose

    with choose("triton"):
        write_kv(*contexts, slots, *far)
        out = paged_attention(near.query, *far, near.rows(), near.scale)
    torch.testing.assert_close(out.double(), near.expected(), rtol=2e-5, atol=2e-5)
    for block in range(len(far[0])):
        for part in (0, 1):
            # What was not written stays as it was: zeros here, NaN there.
            assert torch.equal(far[part][block], near.caches[part][block].nan_to_num(0.0))


@pytest.mark.parametrize("move", ["copy", "swap"])
def test_moved_blocks_beyond_32_bits(move: str) -> None:
    """Copies and swaps of a pool whose blocks are far apart: keys, then values, of one layer."""
    from kernels.dispatch import choose

    near = torch.randn(1, 2, 4, 3, 2, 8)
    far = sparse(8, 2**30 + 64, (3, 2, 8), FP).unflatten(0, (1, 2, 4))
    far.copy_(near)
    if move == "copy":
        pairs = [(0, 3), (2, 1)]
        with choose("triton"):
            copy_blocks(far, pairs)
        copied = near.clone()
        for source, target in pairs:
            copied[:, :, target] = near[:, :, source]
        assert torch.equal(far, copied)
        return
    host = host_blocks(1, 4, (3, 2, 8), FP, pin_memory=False, by_block=True)
    with choose("triton"):
        swap_blocks(far, host, [(3, 0), (1, 2)], "swap out")
        assert torch.equal(host[:, :, [0, 2]], near[:, :, [3, 1]])
        swap_blocks(host, far, [(0, 2), (2, 3)], "swap in")
    assert torch.equal(far, near[:, :, [0, 1, 3, 1]])


# slots


def test_a_negative_slot_writes_nothing_not_even_the_last_block() -> None:
    caches = [torch.full((3, 4, 2, 5), NAN) for _ in range(2)]
    for cache in caches:
        cache[2] = 7.0
    new = torch.randn(4, 2, 5)
    write_kv(new, new + 1, torch.tensor([0, 5, -1, -1]), *caches)
    for cache, value in zip(caches, (new, new + 1), strict=True):
        flat = cache.view(12, 2, 5)
        assert torch.equal(flat[[0, 5]], value[:2])
        assert flat[[1, 2, 3, 4, 6, 7]].isnan().all()
        assert (flat[8:] == 7.0).all()


@pytest.mark.parametrize("dim", DIMS)
def test_written_rows_do_not_touch_their_neighbours(dim: int) -> None:
    caches = [torch.full((2, 4, 3, dim), 5.0) for _ in range(2)]
    fused = torch.randn(2, 9, dim)
    write_kv(fused[:, 3:6], fused[:, 6:], torch.tensor([6, 1]), *caches)
    for cache, value in zip(caches, (fused[:, 3:6], fused[:, 6:]), strict=True):
        flat = cache.view(8, 3, dim)
        assert torch.equal(flat[[6, 1]], value)
        assert (flat[[0, 2, 3, 4, 5, 7]] == 5.0).all()


def test_an_fp8_cache_holds_the_nearest_value_and_its_largest() -> None:
    caches = [torch.zeros(1, 4, 1, 16).to(FP8) for _ in range(2)]
    new = torch.tensor([-600.0, -448, -208, -7.5, -0.875, 0, 0.0625, 1, 1.125, 15, 144, 352, 416, 448, 449, 1e6]).view(
        1, 1, 16
    )
    write_kv(new, new / 2, torch.tensor([2]), *caches)
    assert torch.equal(caches[0][0, 2, 0].float(), new.clamp(-448, 448)[0, 0])
    assert torch.equal(caches[1][0, 2, 0].float()[1:13], new[0, 0, 1:13] / 2)
    assert not caches[0].float()[0, [0, 1, 3]].any()


# moves


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_block", [False, True])
def test_swaps_there_and_back_restore_every_byte(dtype: torch.dtype, by_block: bool) -> None:
    inner = (4, 2, 9)  # 72 numbers: no power of two, and no multiple of eight bytes in half precision for one head
    device = torch.randn(3, 2, 8, *inner).to(dtype)
    host = host_blocks(3, 8, inner, dtype, pin_memory=False, by_block=by_block)
    host.copy_(torch.randn(host.shape).to(dtype))
    before, host_before = device.clone(), host.clone()
    swap_blocks(device, host, [(3, 0), (0, 7)], "swap out")
    assert torch.equal(host[:, :, 0], before[:, :, 3])
    assert torch.equal(host[:, :, 7], before[:, :, 0])
    assert torch.equal(host[:, :, 1:7], host_before[:, :, 1:7])
    device.fill_(NAN)
    swap_blocks(host, device, [(0, 5), (7, 1)], "swap in")
    assert torch.equal(device[:, :, 5], before[:, :, 3])
    assert torch.equal(device[:, :, 1], before[:, :, 0])
    assert device[:, :, [0, 2, 3, 4, 6, 7]].isnan().all()


def test_a_swap_larger_than_its_staging_memory_goes_in_pieces() -> None:
    from kernels.dispatch import choose

    device, host = torch.randn(2, 2, 9, 4, 1, 8), torch.zeros(2, 2, 9, 4, 1, 8)
    pairs = [(i, (4 * i + 1) % 9) for i in range(9)]
    with choose("triton"):
        swapper = Swapper(device, host, staging_bytes=2 * 2 * 2 * 4 * 8 * 4)
        swapper.swap_out(pairs)
        for source, target in pairs:
            assert torch.equal(host[:, :, target], device[:, :, source])
        other = torch.zeros_like(device)
        swapper = Swapper(other, host, staging_bytes=1)
        swapper.swap_in([(target, source) for source, target in pairs])
    assert torch.equal(other, device)


def test_pools_of_a_strided_layer_and_bad_ids() -> None:
    whole = torch.randn(3, 4, 6, 4, 1, 8)
    pool = whole[:, 1:3]  # keys and values are not the first of their layer
    before = whole.clone()
    copy_blocks(pool, [(1, 2), (2, 3), (5, 0)])
    for target, source in {2: 1, 3: 2, 0: 5, 1: 1, 4: 4, 5: 5}.items():
        assert torch.equal(pool[:, :, target], before[:, 1:3, source])
    assert torch.equal(whole[:, [0, 3]], before[:, [0, 3]])
    with pytest.raises(IndexError, match="target block 6"):
        copy_blocks(pool, [(1, 2), (0, 6)])
    copy_blocks(pool, [])
    host = torch.zeros(3, 2, 4, 4, 1, 8)
    kept = pool.clone()
    swap_blocks(pool, host, [(5, 0), (2, 3)], "swap out")
    swap_blocks(host, pool, [(0, 4), (3, 1)], "swap in")
    assert torch.equal(pool, kept[:, :, [0, 2, 2, 3, 5, 5]])
    assert torch.equal(whole[:, [0, 3]], before[:, [0, 3]])


def test_sizes_are_legal_for_every_head() -> None:
    for dim in range(1, 257):
        for itemsize in (2, 4):
            for arch in (80, 90, 100):
                sizes = prefill_sizes(dim, itemsize, arch)
                assert sizes.stacked >= 16
                assert sizes.tile >= 16
