"""The worlds in which kernels are proved: what each argument is, and which conditions of `spec.kernels` it meets.

Sizes, strides, pools and contents are symbols.  What a kernel is compiled for (heads, head size, block size, tile) are
numbers, several of each; those of the launchers among them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spec import kernels as need
from spec.check.kernel import Run, Tensor, World
from spec.check.terms import Source
from spec.logic import Bool, conj, disj, implies

Build = Callable[[Source], World]

LARGE = 2**30  # no argument but a pool passes it; so 32 bits hold a sum of two


def padded(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def strides(*names: str) -> dict[str, tuple[str, str]]:
    return {name: ("stride", name) for name in names}


def sizes(source: Source, *names: str) -> list[Any]:
    return [source.integer(name) for name in names]


def positive(*values: Any) -> list[Bool]:
    return [conj(value >= 1, value <= LARGE) for value in values]


def write_kv(heads: int, dim: int, block_size: int) -> Build:
    def build(source: Source) -> World:
        tokens, blocks = sizes(source, "tokens", "blocks")
        slots = Tensor(
            "slots",
            tokens,
            holds=64,
            facts=lambda index, slot: [need.slot_in_pool(slot, blocks, block_size)],
            between=lambda i, a, j, b: [need.slots_differ(i[-1], a, j[-1], b)],
            filled=-1,
        )
        new = {n: Tensor(n, dim, {f"{n}_token": (1, tokens), f"{n}_head": (1, heads)}) for n in ("key", "value")}
        cache = {
            n: Tensor(n, heads * dim, {"block_stride": (1, blocks), "slot_stride": (1, block_size)})
            for n in ("key_cache", "value_cache")
        }
        names = ("key_token", "key_head", "value_token", "value_head", "block_stride", "slot_stride")
        constants = {
            "BLOCK_SIZE": block_size,
            "HEADS": heads,
            "DIM": dim,
            "HEADS_PADDED": padded(heads),
            "DIM_PADDED": padded(dim),
            "IS_FP8": True,
            "ROUND": True,
        }
        arguments = {**new, **cache, "slots": slots, **strides(*names), **constants}
        return World(arguments, (tokens, 1, 1), [*positive(tokens), blocks >= 1], [tokens, blocks])

    return build


def move_blocks(chunk: int, within_one_pool: bool) -> Build:
    """A copy inside one pool, without a chain; or between pools, one of which may be staging memory."""

    def build(source: Source) -> World:
        pairs, layers, words, there = sizes(source, "pairs", "layers", "words", "target_blocks")
        here = there if within_one_pool else source.integer("source_blocks")

        def ids(name: str, blocks: Any, differ: bool) -> Tensor:
            return Tensor(
                name,
                pairs,
                holds=64,
                facts=lambda index, block: [need.entry_in_pool(block, blocks)],
                between=lambda i, a, j, b: [need.targets_differ(i[-1], a, j[-1], b)] if differ else [],
            )

        def pool(name: str, blocks: Any) -> Tensor:
            prefix = "target" if within_one_pool else name
            outer = {f"{prefix}_layer": (1, layers), f"{prefix}_part": (1, 2), f"{prefix}_block": (1, blocks)}
            return Tensor(name, words, outer, memory="pool" if within_one_pool else name)

        def across(run: Run, other: Run) -> list[Bool]:
            if not within_one_pool:
                return []
            return [
                need.no_chain(a, b)
                for one, two in ((run, other), (other, run))
                for _, a, _ in one.loaded("source_ids")
                for _, b, _ in two.loaded("target_ids")
            ]

        used = {
            f"{n}_{part}": ("stride", f"{'target' if within_one_pool else n}_{part}")
            for n in ("source", "target")
            for part in ("layer", "part", "block")
        }
        arguments = {
            "source": pool("source", here),
            "target": pool("target", there),
            "source_ids": ids("source_ids", here, differ=False),
            "target_ids": ids("target_ids", there, differ=True),
            **used,
            "words": words,
            "CHUNK": chunk,
        }
        given = [*positive(pairs, layers, words), there >= 1, here >= 1]
        grid = ((words + (chunk - 1)) // chunk, pairs, layers * 2)
        return World(arguments, grid, given, [pairs, layers, words, there, here], across=across)

    return build


def rms_norm(width: int, residual: bool) -> Build:
    def build(source: Source) -> World:
        (tokens,) = sizes(source, "tokens")
        arguments = {
            "x": Tensor("x", width, {"x_token": (1, tokens)}),
            "residual": Tensor("residual", width, {"residual_token": (1, tokens)}),
            "weight": Tensor("weight", width),
            "summed": Tensor("summed", tokens * width),
            "out": Tensor("out", tokens * width),
            **strides("x_token", "residual_token"),
            "eps": 1e-5,
            "WIDTH": width,
            "PADDED": padded(width),
            "HAS_RESIDUAL": residual,
        }
        return World(arguments, (tokens, 1, 1), positive(tokens), [tokens])

    return build


def layer_norm(width: int, affine: bool) -> Build:
    def build(source: Source) -> World:
        (tokens,) = sizes(source, "tokens")
        arguments = {
            "x": Tensor("x", width, {"x_token": (1, tokens)}),
            "weight": Tensor("weight", width),
            "bias": Tensor("bias", width),
            "out": Tensor("out", tokens * width),
            **strides("x_token"),
            "eps": 1e-5,
            "WIDTH": width,
            "PADDED": padded(width),
            "HAS_WEIGHT": affine,
            "HAS_BIAS": affine,
        }
        return World(arguments, (tokens, 1, 1), positive(tokens), [tokens])

    return build


def rotary(dim: int, half: int, interleaved: bool, at_once: int = 16) -> Build:
    def build(source: Source) -> World:
        tokens, heads = sizes(source, "tokens", "heads")
        arguments = {
            "x": Tensor("x", dim, {"x_token": (1, tokens), "x_head": (1, heads)}),
            "cos": Tensor("cos", tokens * half),
            "sin": Tensor("sin", tokens * half),
            "out": Tensor("out", heads * dim, {"heads": (dim, tokens)}),
            **strides("x_token", "x_head"),
            "heads": heads,
            "DIM": dim,
            "HALF": half,
            "HALF_PADDED": padded(half),
            "REST_PADDED": padded(dim - 2 * half),
            "HEADS_AT_ONCE": at_once,
            "INTERLEAVED": interleaved,
        }
        grid = (tokens, (heads + (at_once - 1)) // at_once, 1)
        return World(arguments, grid, positive(tokens, heads), [tokens, heads])

    return build


def gated(chunk: int, **constants: Any) -> Build:
    """silu_mul, and activation with its gate."""

    def build(source: Source) -> World:
        tokens, width = sizes(source, "tokens", "width")
        arguments = {
            "x": Tensor("x", 2 * width, {"x_token": (1, tokens)}),
            "out": Tensor("out", width, {"width": (1, tokens)}),
            **strides("x_token"),
            "width": width,
            "CHUNK": chunk,
            **constants,
        }
        grid = ((width + (chunk - 1)) // chunk, tokens, 1)
        return World(arguments, grid, positive(tokens, width), [tokens, width])

    return build


def _cache(name: str, blocks: Any, block_size: int, inner: int) -> Tensor:
    return Tensor(name, inner, {"block_stride": (1, blocks), "slot_stride": (1, block_size)})


def _reached(run: Run, blocks: Any, block_size: int) -> list[Bool]:
    """A table's entries that its row's context reaches name blocks; nothing is said of the others."""
    return [
        implies(conj(row == at[0], at[1] * block_size < end), need.entry_in_pool(block, blocks))
        for at, block, _ in run.loaded("block_tables")
        for (row,), end, _ in run.loaded("ends")
    ]


def paged_decode(
    group: int, kv_heads: int, dim: int, block_size: int, heads: int, tile: int, partition: int, direct: bool
) -> Build:
    def build(source: Source) -> World:
        rows, tokens, decodes, blocks, width = sizes(source, "rows", "tokens", "decodes", "blocks", "width")
        splits = 1 if direct else source.integer("splits")
        every = kv_heads * group
        part = "splits"

        def parts(name: str, each: int) -> Tensor:
            if direct:
                return Tensor(name, 0)
            return Tensor(name, splits * each, {part: (each, decodes * every)})

        ends = Tensor(
            "ends",
            rows,
            holds=64,
            facts=lambda index, end: [end >= 0, end <= splits * partition, need.table_covers(width, end, block_size)],
        )
        row = Tensor(
            "decode_rows",
            decodes,
            holds=64,
            facts=lambda index, r: [r >= 0, r < rows],
            between=lambda i, a, j, b: [need.targets_differ(i[-1], a, j[-1], b)],
        )
        starts = Tensor(
            "query_starts",
            rows + 1,
            holds=64,
            facts=lambda index, token: [token >= 0, token < tokens],
            # Rows of one token each: two that begin at one token are one.
            between=lambda i, a, j, b: [implies(a == b, i[-1] == j[-1])],
        )
        head_tiles = -(-group // heads)
        arguments = {
            "query": Tensor("query", dim, {"query_token": (1, tokens), "query_head": (1, every)}),
            "key_cache": _cache("key_cache", blocks, block_size, kv_heads * dim),
            "value_cache": _cache("value_cache", blocks, block_size, kv_heads * dim),
            "block_tables": Tensor("block_tables", width, {"table_row": (1, rows)}, holds=64),
            "query_starts": starts,
            "ends": ends,
            "decode_rows": row,
            "out": Tensor("out", tokens * every * dim),
            "part_out": parts("part_out", dim),
            "part_max": parts("part_max", 1),
            "part_sum": parts("part_sum", 1),
            "scale_log2": 1.0,
            **strides("query_token", "query_head", "table_row", "block_stride", "slot_stride"),
            "splits": splits,
            "GROUP": group,
            "HEAD_TILES": head_tiles,
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "DIM": dim,
            "DIM_PADDED": max(16, padded(dim)),
            "BLOCK_SIZE": block_size,
            "TILE": tile,
            "NUMBER": "float32",
            "PARTITION": partition,
            "DIRECT": direct,
        }
        given = [*positive(rows, tokens, decodes, blocks, width), *([] if direct else [splits >= 1, splits <= 32])]
        sizes_ = [rows, tokens, decodes, blocks, width, *([] if direct else [splits])]
        grid = (decodes, kv_heads * head_tiles, splits)
        return World(arguments, grid, given, sizes_, known=lambda run: _reached(run, blocks, block_size))

    return build


def paged_reduce(num_heads: int, dim: int, partition: int, most: int) -> Build:
    def build(source: Source) -> World:
        rows, tokens, decodes, splits = sizes(source, "rows", "tokens", "decodes", "splits")
        base = paged_decode(num_heads, 1, dim, 16, num_heads, 16, partition, False)(source).arguments
        arguments = {
            **{n: base[n] for n in ("part_out", "part_max", "part_sum", "query_starts", "decode_rows", "out")},
            "ends": Tensor("ends", rows, holds=64, facts=lambda index, end: [end >= 0, end <= splits * partition]),
            "splits": splits,
            "NUM_HEADS": num_heads,
            "DIM": dim,
            "DIM_PADDED": max(16, padded(dim)),
            "PARTITION": partition,
            "SPLITS_PADDED": most,
        }
        given = [*positive(rows, tokens, decodes), splits >= 1, splits <= most]
        return World(arguments, (decodes, num_heads, 1), given, [rows, tokens, decodes, splits])

    return build


def paged_prefill(group: int, kv_heads: int, dim: int, block_size: int, stacked: int, tile: int) -> Build:
    heads = min(group, stacked)
    per_tile = stacked // heads
    head_tiles = -(-group // heads)

    def build(source: Source) -> World:
        rows, tokens, tiles, blocks, width = sizes(source, "rows", "tokens", "tiles", "blocks", "width")
        every = kv_heads * group

        def row_of(run: Run) -> list[tuple[Any, ...]]:
            """(tile, row, first, start, end, query start) of the tile that a run makes."""
            found = [run.loaded(n) for n in ("tile_rows", "tile_firsts", "starts", "ends", "query_starts")]
            if not all(found):
                return []
            return [(found[0][0][0][0], *(part[0][1] for part in found))]

        def known(run: Run) -> list[Bool]:
            out = _reached(run, blocks, block_size)
            for _, _, first, start, end, at in row_of(run):
                out += [first >= 0, start >= 0, start + first < end, at >= 0, at + (end - start) <= tokens]
            return out

        def across(run: Run, other: Run) -> list[Bool]:
            out: list[Bool] = []
            for tile_a, row_a, first_a, start_a, end_a, at_a in row_of(run):
                for tile_b, row_b, first_b, start_b, end_b, at_b in row_of(other):
                    same = row_a == row_b
                    apart = disj(at_a + (end_a - start_a) <= at_b, at_b + (end_b - start_b) <= at_a)
                    # A row's tokens are its own; its tiles begin at multiples of their size, each once.
                    out.append(disj(same, apart))
                    out.append(implies(conj(same, first_a == first_b), tile_a == tile_b))
            return out

        def of_rows(name: str, count: Any) -> Tensor:
            return Tensor(name, count, holds=64)

        arguments = {
            "query": Tensor("query", dim, {"query_token": (1, tokens), "query_head": (1, every)}),
            "key_cache": _cache("key_cache", blocks, block_size, kv_heads * dim),
            "value_cache": _cache("value_cache", blocks, block_size, kv_heads * dim),
            "block_tables": Tensor("block_tables", width, {"table_row": (1, rows)}, holds=64),
            "query_starts": of_rows("query_starts", rows + 1),
            "starts": of_rows("starts", rows),
            "ends": Tensor(
                "ends", rows, holds=64, facts=lambda index, end: [need.table_covers(width, end, block_size)]
            ),
            "tile_rows": Tensor("tile_rows", tiles, holds=64, facts=lambda index, r: [r >= 0, r < rows]),
            "tile_firsts": Tensor("tile_firsts", tiles, holds=64, facts=lambda index, first: [first % per_tile == 0]),
            "out": Tensor("out", tokens * every * dim),
            "scale_log2": 1.0,
            **strides("query_token", "query_head", "table_row", "block_stride", "slot_stride"),
            "GROUP": group,
            "HEAD_TILES": head_tiles,
            "HEADS": heads,
            "TOKENS": per_tile,
            "STACKED": stacked,
            "KV_HEADS": kv_heads,
            "DIM": dim,
            "DIM_PADDED": max(16, padded(dim)),
            "BLOCK_SIZE": block_size,
            "TILE": tile,
            "NUMBER": "float32",
        }
        sizes_ = [rows, tokens, tiles, blocks, width]
        grid = (tiles, kv_heads * head_tiles, 1)
        return World(arguments, grid, positive(*sizes_), sizes_, known=known, across=across)

    return build


def penalize(chunk: int) -> Build:
    def build(source: Source) -> World:
        rows, vocab, entries = sizes(source, "rows", "vocab", "entries")
        starts = Tensor(
            "row_starts",
            rows + 1,
            holds=64,
            facts=lambda index, at: [at >= 0, at <= entries],
            between=lambda i, a, j, b: [implies(i[-1] <= j[-1], a <= b), implies(j[-1] <= i[-1], b <= a)],
        )
        ids = Tensor("ids", entries, holds=64, facts=lambda index, token: [token >= 0, token < vocab])
        arguments = {
            "logits": Tensor("logits", vocab, {"logits_row": (1, rows)}),
            "ids": ids,
            "counts": Tensor("counts", entries, holds=64),
            "row_starts": starts,
            **{n: Tensor(n, rows) for n in ("repetition", "presence", "frequency")},
            **strides("logits_row"),
            "CHUNK": chunk,
        }
        return World(arguments, (rows, 1, 1), [*positive(rows, vocab), entries >= 1], [rows, vocab, entries])

    return build


def sample(lanes: int, room: int) -> Build:
    def build(source: Source) -> World:
        rows, vocab = sizes(source, "rows", "vocab")
        arguments = {
            "logits": Tensor("logits", vocab, {"logits_row": (1, rows)}),
            **{n: Tensor(n, rows) for n in ("temperature", "top_p", "min_p")},
            "top_k": Tensor("top_k", rows, holds=64, facts=lambda index, k: [k >= 1, k <= vocab]),
            "keys": Tensor("keys", rows, holds=64),
            "list_logits": Tensor("list_logits", rows * room),
            "list_ids": Tensor("list_ids", rows * room, holds=32),
            "out": Tensor("out", rows),
            **strides("logits_row"),
            "vocab": vocab,
            "LANES": lanes,
            "NUCLEUS": 1024,
            "CANDIDATES": room,
            "GOLDEN": 3,
            "FIRST": 5,
            "SECOND": 7,
        }
        return World(arguments, (rows, 1, 1), positive(rows, vocab), [rows, vocab])

    return build
