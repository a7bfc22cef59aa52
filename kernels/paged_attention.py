"""Causal attention of mixed rows over the paged cache of one layer.

    out[t, h] = sum_p softmax_p(scale * query[t, h] . K[p, g]) V[p, g]       p = 0 .. position of t,  g = h // group

with group = heads / kv_heads (Ainslie et al. 2023) and K[p], V[p] found at block_table[p // block_size], offset
p % block_size (Kwon et al. 2023, equation 4).  A row is a run of query tokens at positions start .. end - 1 of one
sequence; a decode is a row of one token.  Keys and values at positions end and beyond are never used: what lies in
the rest of the last block, or in blocks of others, may be anything, NaN included.

query (tokens, heads, head_dim)    key_cache, value_cache (blocks, block_size, kv_heads, head_dim), contiguous
out (tokens, heads, head_dim), type of query
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.dispatch import matrix_type, next_power_of_2, refuse_unless, same_device, tl, triton, uses_triton
from kernels.fp8 import FP8, gathered
from kernels.paged_prefill_attention import launch_paged_prefill_attention
from kernels.paged_rows import MOST_SPLITS, PagedRows

__all__ = ["PagedRows", "paged_attention", "paged_attention_reference"]

LOG2_E = 1.4426950408889634  # exp2 is one instruction, exp is two: the scale takes the factor in


def paged_attention_reference(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, rows: PagedRows, scale: float
) -> Tensor:
    """The meaning, also the CPU path: gather exactly the context, then dense attention."""
    kv_heads, head_dim = key_cache.shape[2:]
    group = query.shape[1] // kv_heads
    keys, values = (cache.view(-1, kv_heads, head_dim) for cache in (key_cache, value_cache))
    query = query.reshape(-1, kv_heads, group, head_dim)
    out = torch.empty_like(query)
    for some in rows.decodes:
        shape = (-1, some.longest, kv_heads, head_dim)
        # (rows, kv_heads, longest, head_dim)
        k, v = (gathered(x, some.slots, query.dtype).view(shape).transpose(1, 2) for x in (keys, values))
        # The heads that share a key head stand where the query tokens usually are.
        out[some.tokens] = F.scaled_dot_product_attention(query[some.tokens], k, v, attn_mask=some.mask, scale=scale)
    for row in rows.chunks:
        q = query[row.first : row.last].permute(2, 1, 0, 3)  # (group, kv_heads, tokens, head_dim)
        k, v = (gathered(x, row.slots, query.dtype).transpose(0, 1) for x in (keys, values))
        k, v = (x.expand(group, -1, -1, -1) for x in (k, v))
        done = F.scaled_dot_product_attention(q, k, v, attn_mask=row.mask, is_causal=row.mask is None, scale=scale)
        out[row.first : row.last] = done.permute(2, 1, 0, 3)
    return out.view(-1, kv_heads * group, head_dim)


@triton.jit
def paged_decode_kernel(
    query,
    key_cache,
    value_cache,
    block_tables,
    query_starts,
    ends,
    decode_rows,
    out,
    part_out,
    part_max,
    part_sum,
    scale_log2,
    query_token,
    query_head,
    table_row,
    block_stride,
    slot_stride,
    splits,
    GROUP: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    NUMBER: tl.constexpr,
    PARTITION: tl.constexpr,
    DIRECT: tl.constexpr,
):
    """A program reads one partition of one row's context for all query heads that share a key head.

    DIRECT: no context has more than one partition, and the result is written at once; else as a partial result.
    """
    i = tl.program_id(0).to(tl.int64)
    kv_head = (tl.program_id(1) // HEAD_TILES).to(tl.int64)
    partition = tl.program_id(2)
    row = tl.load(decode_rows + i).to(tl.int64)
    end = tl.load(ends + row).to(tl.int64)
    token = tl.load(query_starts + row).to(tl.int64)
    first = partition * PARTITION
    if first < end or DIRECT:
        last = tl.minimum(end, first + PARTITION)
        g = tl.program_id(1) % HEAD_TILES * HEADS + tl.arange(0, HEADS)
        head = kv_head * GROUP + g
        d = tl.arange(0, DIM_PADDED)
        shown = (g[:, None] < GROUP) & (d[None, :] < DIM)  # heads are padded to what a matrix instruction takes
        at = token * query_token + head[:, None] * query_head + d[None, :]
        q = tl.load(query + at, mask=shown, other=0.0).to(NUMBER)
        best = tl.full((HEADS,), float("-inf"), tl.float32)
        weight = tl.zeros((HEADS,), tl.float32)
        acc = tl.zeros((HEADS, DIM_PADDED), tl.float32)
        for start in range(first, last, TILE):
            p = start + tl.arange(0, TILE)
            known = p < last  # entries of the table and slots beyond the context may be anything
            block = tl.load(block_tables + row * table_row + p // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
            base = block * block_stride + p % BLOCK_SIZE * slot_stride + kv_head * DIM
            k_mask = known[None, :] & (d[:, None] < DIM)
            k = tl.load(key_cache + base[None, :] + d[:, None], mask=k_mask, other=0.0).to(NUMBER)
            scores = tl.dot(q, k, input_precision="ieee") * scale_log2
            scores = tl.where(known[None, :], scores, float("-inf"))
            better = tl.maximum(best, tl.max(scores, 1))
            shrink = tl.exp2(best - better)
            share = tl.exp2(scores - better[:, None])
            weight = weight * shrink + tl.sum(share, 1)
            v_mask = known[:, None] & (d[None, :] < DIM)
            v = tl.load(value_cache + base[:, None] + d[None, :], mask=v_mask, other=0.0).to(NUMBER)
            acc = acc * shrink[:, None] + tl.dot(share.to(NUMBER), v, input_precision="ieee")
            best = better
        if DIRECT:
            result = acc / tl.where(weight > 0.0, weight, 1.0)[:, None]  # an empty row gives zeros
            to = token * (KV_HEADS * GROUP * DIM) + head[:, None] * DIM + d[None, :]
            tl.store(out + to, result.to(out.dtype.element_ty), mask=shown)
        else:
            part = (i * (KV_HEADS * GROUP) + head) * splits + partition
            tl.store(part_out + part[:, None] * DIM + d[None, :], acc, mask=shown)
            tl.store(part_max + part, best, mask=g < GROUP)
            tl.store(part_sum + part, weight, mask=g < GROUP)


@triton.jit
def paged_reduce_kernel(
    part_out,
    part_max,
    part_sum,
    query_starts,
    ends,
    decode_rows,
    out,
    splits,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    PARTITION: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
):
    """A program puts the partial results of one head of one row together, in order of the context."""
    i = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = tl.load(decode_rows + i).to(tl.int64)
    end = tl.load(ends + row).to(tl.int64)
    token = tl.load(query_starts + row).to(tl.int64)
    s = tl.arange(0, SPLITS_PADDED)
    d = tl.arange(0, DIM_PADDED)
    made = s * PARTITION < end  # the other partial results were not written
    part = (i * NUM_HEADS + head) * splits + s
    best = tl.load(part_max + part, mask=made, other=float("-inf"))
    weight = tl.load(part_sum + part, mask=made, other=0.0)
    shown = made[:, None] & (d[None, :] < DIM)
    acc = tl.load(part_out + part[:, None] * DIM + d[None, :], mask=shown, other=0.0)
    top = tl.max(best)
    top = tl.where(top > float("-inf"), top, 0.0)  # an empty row has no partial result at all
    shrink = tl.where(made, tl.exp2(best - top), 0.0)
    whole = tl.sum(weight * shrink)
    result = tl.sum(acc * shrink[:, None], 0) / tl.where(whole > 0.0, whole, 1.0)  # an empty row gives zeros
    to = token * (NUM_HEADS * DIM) + head * DIM + d
    tl.store(out + to, result.to(out.dtype.element_ty), mask=d < DIM)


class DecodeSizes(NamedTuple):
    """heads: query heads of a program.  tile: tokens of context at a time."""

    heads: int
    tile: int
    num_warps: int
    num_stages: int


def decode_sizes(group: int, dim: int, itemsize: int, cache_itemsize: int) -> DecodeSizes:
    """Query heads fill a matrix instruction's 16 rows at least; a tile of keys, and one of values, is about 16 KB.

    A key's address comes out of the table, so two of the five stages go to that load and two tiles of each are in
    flight: 64 KB of shared memory, three programs to a multiprocessor, twice what the memory's latency asks for.
    """
    padded = max(16, next_power_of_2(dim))
    heads = min(64, max(16, next_power_of_2(group)))
    if itemsize == 4:  # no matrix instruction takes these in full: sums lie in plain registers, so more threads
        return DecodeSizes(16, 16, 8, 3)
    # Half as many bytes of fp8 leave room for more programs in place of stages, whose copies would spill registers.
    return DecodeSizes(heads, max(16, min(64, 8192 // padded)), 4, 5 if cache_itemsize > 1 else 4)


def launch_paged_decode(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, rows: PagedRows, scale: float, out: Tensor
) -> None:
    """Start the kernels on checked arguments, for the rows of one token; writes their tokens of `out`."""
    num_rows = len(rows.decode_rows)
    if num_rows == 0:
        return
    num_heads, dim = query.shape[1:]
    kv_heads = key_cache.shape[2]
    group, splits = num_heads // kv_heads, rows.num_splits
    refuse_unless(splits <= MOST_SPLITS, lambda: f"paged_attention: {splits} partitions pass {MOST_SPLITS}")
    sizes = decode_sizes(group, dim, query.element_size(), key_cache.element_size())
    head_tiles = -(-group // sizes.heads)
    direct = splits == 1
    shape = (0,) if direct else (num_rows, num_heads, splits)
    part_max, part_sum = (torch.empty(shape, dtype=torch.float32, device=query.device) for _ in range(2))
    part_out = torch.empty((*shape, dim), dtype=torch.float32, device=query.device)
    shared = {
        "query_starts": rows.query_starts,
        "ends": rows.ends,
        "decode_rows": rows.decode_rows,
        "out": out,
        "part_out": part_out,
        "part_max": part_max,
        "part_sum": part_sum,
        "splits": splits,
        "DIM": dim,
        "DIM_PADDED": max(16, next_power_of_2(dim)),
        "PARTITION": rows.partition,
    }
    paged_decode_kernel[(num_rows, kv_heads * head_tiles, splits)](
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=rows.block_tables,
        scale_log2=scale * LOG2_E,
        query_token=query.stride(0),
        query_head=query.stride(1),
        table_row=rows.block_tables.stride(0),
        block_stride=key_cache.stride(0),
        slot_stride=key_cache.stride(1),
        GROUP=group,
        HEAD_TILES=head_tiles,
        HEADS=sizes.heads,
        KV_HEADS=kv_heads,
        BLOCK_SIZE=rows.block_size,
        TILE=sizes.tile,
        NUMBER=matrix_type(paged_decode_kernel, query.dtype),
        DIRECT=direct,
        num_warps=sizes.num_warps,
        num_stages=sizes.num_stages,
        **shared,
    )
    if not direct:
        paged_reduce_kernel[(num_rows, num_heads)](
            NUM_HEADS=num_heads, SPLITS_PADDED=next_power_of_2(splits), num_warps=4, **shared
        )


def launch_paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, rows: PagedRows, scale: float
) -> Tensor:
    """Start the kernels on checked arguments: decodes split over their context, other rows in tiles."""
    same_device("paged_attention", query=query, key_cache=key_cache, value_cache=value_cache, tables=rows.block_tables)
    heads_dim = key_cache.shape[2:].numel()
    for name, cache in (("keys", key_cache), ("values", value_cache)):
        if cache.stride() != (key_cache.stride(0), heads_dim, key_cache.shape[3], 1):
            raise ValueError(f"paged_attention: the slots of the {name} have strides {cache.stride()}")
    if not query.is_cuda:
        rows.check_blocks(key_cache.shape[0])  # free to ask on the CPU
    query = query if query.stride(2) == 1 else query.contiguous()
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    launch_paged_decode(query, key_cache, value_cache, rows, scale, out)
    launch_paged_prefill_attention(query, key_cache, value_cache, rows, scale, out)
    return out


def paged_attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, rows: PagedRows, scale: float) -> Tensor:
    """Attention of every query token over the context of its row.  See the head of this file for shapes.

    Raises ValueError where shapes do not fit, and IndexError (on the CPU) for a block outside the cache.
    """
    if key_cache.shape != value_cache.shape or query.shape[2] != key_cache.shape[3]:
        raise ValueError(f"paged_attention: query {tuple(query.shape)} does not fit cache {tuple(key_cache.shape)}")
    if query.shape[1] % key_cache.shape[2]:
        raise ValueError(f"paged_attention: {query.shape[1]} heads cannot share {key_cache.shape[2]} KV heads evenly")
    if query.shape[0] != rows.num_tokens:
        raise ValueError(f"paged_attention: {query.shape[0]} query tokens, but the rows have {rows.num_tokens}")
    if key_cache.shape[1] != rows.block_size:
        raise ValueError(f"paged_attention: blocks of {key_cache.shape[1]}, but the rows have {rows.block_size}")
    if query.dtype != key_cache.dtype and key_cache.dtype != FP8:
        raise ValueError(f"paged_attention: queries are {query.dtype} and the cache is {key_cache.dtype}")
    if uses_triton(query):
        return launch_paged_attention(query, key_cache, value_cache, rows, scale)
    return paged_attention_reference(query, key_cache, value_cache, rows, scale)
