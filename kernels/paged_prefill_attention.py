"""Causal attention of rows of several tokens over the paged cache of one layer, contexts included.

The formula, the shapes and the reference are those of `kernels.paged_attention`.  Rows of any lengths go in one launch,
cut into tiles of query tokens (`PagedRows.tiles`); decodes may ride along as rows of one token.  A tile stacks the
query heads that share a key head, so that keys and values are read once for all of them.

Keys are taken in tiles that start at position 0 whatever the row, and a tile in which a token sees nothing leaves its
result as it is, to the bit: so what a token gets does not depend on how its prompt was cut into chunks.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kernels.dispatch import architecture, matrix_type, next_power_of_2, refuse_unless, tl, triton
from kernels.paged_rows import PagedRows

LOG2_E = 1.4426950408889634  # exp2 is one instruction, exp is two: the scale takes the factor in


@triton.jit
def paged_prefill_kernel(
    query,
    key_cache,
    value_cache,
    block_tables,
    query_starts,
    starts,
    ends,
    tile_rows,
    tile_firsts,
    out,
    scale_log2,
    query_token,
    query_head,
    table_row,
    block_stride,
    slot_stride,
    GROUP: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    STACKED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    NUMBER: tl.constexpr,
):
    """A program makes TOKENS tokens of one row, for HEADS of the heads that share a key head."""
    tile = tl.program_id(0)
    kv_head = (tl.program_id(1) // HEAD_TILES).to(tl.int64)
    row = tl.load(tile_rows + tile).to(tl.int64)
    at = tl.load(tile_firsts + tile).to(tl.int64)
    start = tl.load(starts + row).to(tl.int64)
    end = tl.load(ends + row).to(tl.int64)
    token0 = tl.load(query_starts + row).to(tl.int64) + at
    m = tl.arange(0, STACKED)  # token after token, each with its heads
    ahead = m // HEADS
    g = tl.program_id(1) % HEAD_TILES * HEADS + m % HEADS
    d = tl.arange(0, DIM_PADDED)
    position = start + at + ahead
    live = (ahead < TOKENS) & (position < end) & (g < GROUP)
    shown = live[:, None] & (d[None, :] < DIM)
    head = kv_head * GROUP + g
    where = (token0 + ahead)[:, None] * query_token + head[:, None] * query_head + d[None, :]
    q = tl.load(query + where, mask=shown, other=0.0).to(NUMBER)
    best = tl.full((STACKED,), float("-inf"), tl.float32)
    weight = tl.zeros((STACKED,), tl.float32)
    acc = tl.zeros((STACKED, DIM_PADDED), tl.float32)
    last = tl.minimum(start + at + TOKENS, end)
    seen_by_all = (start + at + 1) // TILE * TILE  # below it every token of the tile sees every key
    for begin in range(0, seen_by_all, TILE):
        p = begin + tl.arange(0, TILE)
        block = tl.load(block_tables + row * table_row + p // BLOCK_SIZE).to(tl.int64)
        base = block * block_stride + p % BLOCK_SIZE * slot_stride + kv_head * DIM
        k = tl.load(key_cache + base[None, :] + d[:, None], mask=d[:, None] < DIM, other=0.0).to(NUMBER)
        scores = tl.dot(q, k, input_precision="ieee") * scale_log2
        better = tl.maximum(best, tl.max(scores, 1))
        shrink = tl.exp2(best - better)
        share = tl.exp2(scores - better[:, None])
        weight = weight * shrink + tl.sum(share, 1)
        v = tl.load(value_cache + base[:, None] + d[None, :], mask=d[None, :] < DIM, other=0.0).to(NUMBER)
        acc = acc * shrink[:, None] + tl.dot(share.to(NUMBER), v, input_precision="ieee")
        best = better
    for begin in range(seen_by_all, last, TILE):
        p = begin + tl.arange(0, TILE)
        known = p < last  # entries of the table and slots beyond the context may be anything
        block = tl.load(block_tables + row * table_row + p // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
        base = block * block_stride + p % BLOCK_SIZE * slot_stride + kv_head * DIM
        k_mask = known[None, :] & (d[:, None] < DIM)
        k = tl.load(key_cache + base[None, :] + d[:, None], mask=k_mask, other=0.0).to(NUMBER)
        scores = tl.dot(q, k, input_precision="ieee") * scale_log2
        scores = tl.where(known[None, :] & (p[None, :] <= position[:, None]), scores, float("-inf"))
        better = tl.maximum(best, tl.max(scores, 1))
        shrink = tl.exp2(best - better)
        share = tl.exp2(scores - better[:, None])
        weight = weight * shrink + tl.sum(share, 1)
        v_mask = known[:, None] & (d[None, :] < DIM)
        v = tl.load(value_cache + base[:, None] + d[None, :], mask=v_mask, other=0.0).to(NUMBER)
        acc = acc * shrink[:, None] + tl.dot(share.to(NUMBER), v, input_precision="ieee")
        best = better
    to = (token0 + ahead)[:, None] * (KV_HEADS * GROUP * DIM) + head[:, None] * DIM + d[None, :]
    tl.store(out + to, (acc / weight[:, None]).to(out.dtype.element_ty), mask=shown)


class PrefillSizes(NamedTuple):
    """stacked: rows of the matrix, tokens times heads.  tile: keys at a time."""

    stacked: int
    tile: int
    num_warps: int
    num_stages: int


def prefill_sizes(dim: int, itemsize: int, architecture: int) -> PrefillSizes:
    """Two warpgroups of 64 rows each, the shape of Hopper's matrix instruction, and 64 keys: no register spills.

    Heads of 128 in half precision: 32 KB of queries, and two tiles of keys and of values, 16 KB each, in flight (the
    stages also count the load from the table that a key's address comes from).  A head of 256 halves rows and keys, or
    the sums alone would fill the registers; so does Ampere, which holds matrix operands in registers too.
    """
    padded = max(16, next_power_of_2(dim))
    if itemsize == 4:  # no matrix instruction takes these in full: sums lie in plain registers
        return PrefillSizes(32, 16, 8, 3) if padded <= 128 else PrefillSizes(16, 16, 8, 2)
    if padded > 128:
        return PrefillSizes(64, 32, 8, 4)
    return PrefillSizes(128, 64 if architecture >= 90 or padded < 128 else 32, 8, 5)


def launch_paged_prefill_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    rows: PagedRows,
    scale: float,
    out: Tensor,
    decodes_ride: bool = False,
) -> None:
    """Start the kernel on checked arguments, for rows of two tokens and more, or all; writes their tokens of `out`."""
    num_heads, dim = query.shape[1:]
    kv_heads = key_cache.shape[2]
    group = num_heads // kv_heads
    sizes = prefill_sizes(dim, query.element_size(), architecture(query.device))
    heads = min(group, sizes.stacked)
    tokens = sizes.stacked // heads
    head_tiles = -(-group // heads)
    if rows.max_query < (1 if decodes_ride else 2):
        return
    tiles = rows.tiles(tokens, decodes_ride)
    if len(tiles.rows) == 0:
        return
    refuse_unless(kv_heads * head_tiles < 1 << 16, lambda: f"paged_attention: {kv_heads} KV heads of {group} heads")
    paged_prefill_kernel[(len(tiles.rows), kv_heads * head_tiles)](
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=rows.block_tables,
        query_starts=rows.query_starts,
        starts=rows.starts,
        ends=rows.ends,
        tile_rows=tiles.rows,
        tile_firsts=tiles.firsts,
        out=out,
        scale_log2=scale * LOG2_E,
        query_token=query.stride(0),
        query_head=query.stride(1),
        table_row=rows.block_tables.stride(0),
        block_stride=key_cache.stride(0),
        slot_stride=key_cache.stride(1),
        GROUP=group,
        HEAD_TILES=head_tiles,
        HEADS=heads,
        TOKENS=tokens,
        STACKED=sizes.stacked,
        KV_HEADS=kv_heads,
        DIM=dim,
        DIM_PADDED=max(16, next_power_of_2(dim)),
        BLOCK_SIZE=rows.block_size,
        TILE=sizes.tile,
        NUMBER=matrix_type(paged_prefill_kernel, query.dtype),
        num_warps=sizes.num_warps,
        num_stages=sizes.num_stages,
    )
