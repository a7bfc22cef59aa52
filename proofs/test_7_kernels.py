"""Kernels: each one's own source keeps to its tensors and no two programs meet, by the laws of the scheduler.

For every batch, length, table width, pool, stride and content of memory that meets the conditions in `spec.kernels`.
The rule for loops, and what is taken as given, stand at the head of `spec.check.kernel`.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import kernels.activation
import kernels.copy_blocks
import kernels.layer_norm
import kernels.paged_attention
import kernels.paged_prefill_attention
import kernels.penalize
import kernels.rms_norm
import kernels.rotary
import kernels.sample
import kernels.silu_mul
import kernels.write_kv
from kernels.paged_attention import decode_sizes
from kernels.paged_prefill_attention import prefill_sizes
from proofs import kernel_worlds as worlds
from proofs.kernel_replay import Case, planted
from spec import kernels as need
from spec.check.kernel import prove_kernel
from spec.check.symbolic import prove
from spec.check.terms import Source
from spec.logic import cdiv, conj, most
from tests.worlds import R, world

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numbers of a kernel that has gone astray

HALF, WHOLE = 2, 4  # bytes of a number


def decode(group: int, kv_heads: int, dim: int, block_size: int, direct: bool, itemsize: int = HALF) -> worlds.Build:
    sizes = decode_sizes(group, dim, itemsize, itemsize)
    return worlds.paged_decode(group, kv_heads, dim, block_size, sizes.heads, sizes.tile, 512, direct)


def prefill(group: int, kv_heads: int, dim: int, block_size: int, itemsize: int = HALF) -> worlds.Build:
    sizes = prefill_sizes(dim, itemsize, 90)
    return worlds.paged_prefill(group, kv_heads, dim, block_size, sizes.stacked, sizes.tile)


WORLDS: dict[str, tuple[Any, str, worlds.Build]] = {
    "write_kv-8x128": (kernels.write_kv, "write_kv_kernel", worlds.write_kv(8, 128, 16)),
    "write_kv-3x80": (kernels.write_kv, "write_kv_kernel", worlds.write_kv(3, 80, 1)),
    "copy_blocks": (kernels.copy_blocks, "move_blocks_kernel", worlds.move_blocks(1024, True)),
    "swap_blocks": (kernels.copy_blocks, "move_blocks_kernel", worlds.move_blocks(1024, False)),
    "rms_norm-4096": (kernels.rms_norm, "rms_norm_kernel", worlds.rms_norm(4096, False)),
    "rms_norm-577-residual": (kernels.rms_norm, "rms_norm_kernel", worlds.rms_norm(577, True)),
    "layer_norm-768": (kernels.layer_norm, "layer_norm_kernel", worlds.layer_norm(768, True)),
    "layer_norm-577-plain": (kernels.layer_norm, "layer_norm_kernel", worlds.layer_norm(577, False)),
    "rotary-halves-128": (kernels.rotary, "rotary_kernel", worlds.rotary(128, 64, False)),
    "rotary-interleaved-80": (kernels.rotary, "rotary_kernel", worlds.rotary(80, 40, True)),
    "rotary-partial-96": (kernels.rotary, "rotary_kernel", worlds.rotary(96, 12, False)),
    "silu_mul": (kernels.silu_mul, "silu_mul_kernel", worlds.gated(1024)),
    "gelu_mul": (kernels.activation, "activation_kernel", worlds.gated(1024, KIND=1, GATED=True)),
    "decode-32_8x128": (kernels.paged_attention, "paged_decode_kernel", decode(4, 8, 128, 16, False)),
    "decode-71_1x72-direct": (kernels.paged_attention, "paged_decode_kernel", decode(71, 1, 72, 1, True)),
    "decode-6_2x256-float32": (kernels.paged_attention, "paged_decode_kernel", decode(3, 2, 256, 8, False, WHOLE)),
    "decode-17_1x64-blocks_of_64": (kernels.paged_attention, "paged_decode_kernel", decode(17, 1, 64, 64, False)),
    "reduce-6x80": (kernels.paged_attention, "paged_reduce_kernel", worlds.paged_reduce(6, 80, 512, 32)),
    "prefill-32_8x128": (kernels.paged_prefill_attention, "paged_prefill_kernel", prefill(4, 8, 128, 16)),
    "prefill-71_1x72": (kernels.paged_prefill_attention, "paged_prefill_kernel", prefill(71, 1, 72, 1)),
    "prefill-9_3x256-float32": (kernels.paged_prefill_attention, "paged_prefill_kernel", prefill(3, 3, 256, 8, WHOLE)),
    "penalize": (kernels.penalize, "penalize_kernel", worlds.penalize(1024)),
    "sample": (kernels.sample, "sample_kernel", worlds.sample(4096, 16384)),
}


@pytest.mark.parametrize("name", WORLDS)
def test_every_access_is_in_bounds_and_no_two_programs_meet(name: str) -> None:
    module, kernel, build = WORLDS[name]
    proof = prove_kernel(getattr(module, kernel), build)
    assert proof.refuted is None, str(proof.refuted)
    assert proof.claims > 0
    # No empty proof: some values lead to every load and store.
    assert proof.reached == proof.accesses
    assert {kind for kind, _, _ in proof.accesses} == {"load", "store"}


class Fault(NamedTuple):
    """A change of a kernel's source, and what it breaks.

    large: for a 32-bit offset, the stride that shows it.  least: of every size, where a smaller case is not a real one:
        a loop's variables are free in the proof, and in a run they must come about.
    """

    of: str
    what: str
    old: str
    new: str
    breaks: str
    large: str | None = None
    least: int = 1


SMALL: dict[str, tuple[Any, str, worlds.Build]] = {
    "write_kv": (kernels.write_kv, "write_kv_kernel", worlds.write_kv(3, 5, 4)),
    "copy_blocks": (kernels.copy_blocks, "move_blocks_kernel", worlds.move_blocks(16, True)),
    "rms_norm": (kernels.rms_norm, "rms_norm_kernel", worlds.rms_norm(13, True)),
    "layer_norm": (kernels.layer_norm, "layer_norm_kernel", worlds.layer_norm(13, True)),
    "rotary": (kernels.rotary, "rotary_kernel", worlds.rotary(12, 3, False, 4)),
    "silu_mul": (kernels.silu_mul, "silu_mul_kernel", worlds.gated(16)),
    "activation": (kernels.activation, "activation_kernel", worlds.gated(16, KIND=1, GATED=True)),
    "decode": (
        kernels.paged_attention,
        "paged_decode_kernel",
        worlds.paged_decode(3, 2, 20, 4, 16, 16, 32, False),
    ),
    "reduce": (kernels.paged_attention, "paged_reduce_kernel", worlds.paged_reduce(3, 20, 32, 8)),
    "prefill": (kernels.paged_prefill_attention, "paged_prefill_kernel", worlds.paged_prefill(3, 2, 20, 4, 16, 16)),
    "penalize": (kernels.penalize, "penalize_kernel", worlds.penalize(16)),
    "sample": (kernels.sample, "sample_kernel", worlds.sample(16, 32)),
}
BOUNDS, NARROW, MEET = "in bounds", "fits in 32 bits", "touch one address"
FAULTS = [
    Fault("write_kv", "mask off by one", "(d < DIM)", "(d <= DIM)", BOUNDS),
    Fault("write_kv", "wrong stride", "slot % BLOCK_SIZE * slot_stride", "slot % BLOCK_SIZE * block_stride", BOUNDS),
    Fault("write_kv", "32-bit offset", "(slots + token).to(tl.int64)", "(slots + token).to(tl.int32)", NARROW, "block"),
    Fault("write_kv", "unmasked tail", "key_head + d, mask=inside, other=0.0)", "key_head + d)", BOUNDS),
    Fault("write_kv", "slot -1", "if slot >= 0:", "if slot >= -1:", BOUNDS),
    Fault("copy_blocks", "mask off by one", "inside = i < words", "inside = i <= words", BOUNDS),
    Fault("copy_blocks", "wrong stride", "there * target_block", "there * target_layer", BOUNDS),
    Fault(
        "copy_blocks",
        "32-bit offset",
        "(source_ids + pair).to(tl.int64)",
        "(source_ids + pair).to(tl.int32)",
        NARROW,
        "target_block",
    ),
    Fault("copy_blocks", "unmasked tail", "here * source_block + i, mask=inside)", "here * source_block + i)", BOUNDS),
    Fault("copy_blocks", "values over keys", "target_layer + part * target_part", "target_layer", MEET),
    Fault("rms_norm", "mask off by one", "inside = i < WIDTH", "inside = i <= WIDTH", BOUNDS),
    Fault("rms_norm", "wrong stride", "summed + token * WIDTH", "summed + token * PADDED", BOUNDS),
    Fault("rms_norm", "32-bit offset", "tl.program_id(0).to(tl.int64)", "tl.program_id(0)", NARROW, "x_token"),
    Fault("rms_norm", "unmasked tail", "weight + i, mask=inside, other=0.0)", "weight + i)", BOUNDS),
    Fault("layer_norm", "mask off by one", "inside = i < WIDTH", "inside = i <= WIDTH", BOUNDS),
    Fault("layer_norm", "rows overlap", "out + token * WIDTH", "out + token * (WIDTH - 1)", MEET),
    Fault("layer_norm", "wrong stride", "out + token * WIDTH", "out + token * PADDED", BOUNDS),
    Fault("layer_norm", "32-bit offset", "tl.program_id(0).to(tl.int64)", "tl.program_id(0)", NARROW, "x_token"),
    Fault("layer_norm", "unmasked tail", "bias + i, mask=inside, other=0.0)", "bias + i)", BOUNDS),
    Fault("rotary", "mask off by one", "(head < heads) & (i", "(head <= heads) & (i", BOUNDS),
    Fault("rotary", "wrong stride", "token * x_token + head * x_head", "token * x_head + head * x_token", BOUNDS),
    Fault("rotary", "32-bit offset", "[:, None].to(tl.int64)", "[:, None]", NARROW, "x_head"),
    Fault(
        "rotary",
        "unmasked tail",
        "sin + token * HALF + i, mask=i < HALF, other=0.0)",
        "sin + token * HALF + i)",
        BOUNDS,
    ),
    Fault("silu_mul", "mask off by one", "inside = i < width", "inside = i <= width", BOUNDS),
    Fault(
        "silu_mul", "wrong stride", "x + token * x_token + width + i", "x + token * x_token + width + width + i", BOUNDS
    ),
    Fault("silu_mul", "32-bit offset", "tl.program_id(1).to(tl.int64)", "tl.program_id(1)", NARROW, "x_token"),
    Fault("silu_mul", "unmasked tail", "width + i, mask=inside, other=0.0)", "width + i)", BOUNDS),
    Fault("activation", "mask off by one", "inside = i < width", "inside = i <= width", BOUNDS),
    Fault("activation", "wrong stride", "token * x_token + width + i", "token * x_token + width + width + i", BOUNDS),
    Fault("activation", "32-bit offset", "tl.program_id(1).to(tl.int64)", "tl.program_id(1)", NARROW, "x_token"),
    Fault("activation", "unmasked tail", "width + i, mask=inside, other=0.0)", "width + i)", BOUNDS),
    Fault("decode", "mask off by one", "known = p < last", "known = p <= last", BOUNDS),
    Fault("decode", "head mask off by one", "mask=g < GROUP", "mask=g <= GROUP", "i"),
    Fault("decode", "wrong stride", "p % BLOCK_SIZE * slot_stride", "p % BLOCK_SIZE * block_stride", BOUNDS),
    Fault(
        "decode",
        "32-bit offset",
        "mask=known, other=0).to(tl.int64)",
        "mask=known, other=0).to(tl.int32)",
        NARROW,
        "block",
    ),
    Fault("decode", "unmasked table", "// BLOCK_SIZE, mask=known, other=0)", "// BLOCK_SIZE)", BOUNDS),
    Fault("decode", "padding id followed", "mask=known, other=0)", "mask=known, other=-1)", "proved"),
    Fault("decode", "partial results shared", "* splits + partition", "* splits", MEET),
    Fault("reduce", "mask off by one", "made = s * PARTITION < end", "made = s * PARTITION <= end", BOUNDS),
    Fault(
        "reduce",
        "wrong stride",
        "acc = tl.load(part_out + part[:, None] * DIM",
        "acc = tl.load(part_out + part[:, None] * DIM_PADDED",
        BOUNDS,
    ),
    Fault(
        "reduce",
        "32-bit offset",
        "(query_starts + row).to(tl.int64)\n    s =",
        "(query_starts + row).to(tl.int32)\n    s =",
        NARROW,
    ),
    Fault("reduce", "unmasked tail", "part_sum + part, mask=made, other=0.0)", "part_sum + part)", BOUNDS),
    Fault("prefill", "mask off by one", "known = p < last", "known = p <= last", BOUNDS),
    Fault(
        "prefill",
        "tile too long for all",
        "(start + at + 1) // TILE * TILE",
        "(start + at + TILE) // TILE * TILE",
        BOUNDS,
    ),
    Fault("prefill", "wrong stride", "p % BLOCK_SIZE * slot_stride", "p % BLOCK_SIZE * block_stride", BOUNDS),
    Fault("prefill", "tiles overlap", "(ahead < TOKENS) & (position", "(position", MEET),
    Fault(
        "prefill", "32-bit offset", "p // BLOCK_SIZE).to(tl.int64)", "p // BLOCK_SIZE).to(tl.int32)", NARROW, "block"
    ),
    Fault("prefill", "unmasked table", "// BLOCK_SIZE, mask=known, other=0)", "// BLOCK_SIZE)", BOUNDS),
    Fault("penalize", "mask off by one", "mine = i < last", "mine = i <= last", BOUNDS),
    Fault(
        "penalize",
        "32-bit offset",
        "row = tl.program_id(0).to(tl.int64)",
        "row = tl.program_id(0)",
        NARROW,
        "logits_row",
    ),
    Fault("penalize", "wrong stride", "row * logits_row + token", "token * logits_row + row", BOUNDS),
    Fault("penalize", "unmasked tail", "ids + i, mask=mine, other=0)", "ids + i)", BOUNDS),
    Fault("sample", "mask off by one", "(place < CANDIDATES)", "(place <= CANDIDATES)", BOUNDS, least=40),
    Fault(
        "sample", "unmasked tail", "x = tl.load(row + i, mask=i < vocab", "x = tl.load(row + i, mask=i <= vocab", BOUNDS
    ),
    Fault(
        "sample",
        "wrong stride",
        "list_logits + r * CANDIDATES + place",
        "list_logits + r * 2 * CANDIDATES + place",
        BOUNDS,
    ),
    Fault("sample", "32-bit offset", "r = tl.program_id(0).to(tl.int64)", "r = tl.program_id(0)", NARROW, "logits_row"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.of}-{f.what.replace(' ', '_')}")
def test_a_planted_fault_is_refuted_and_its_case_fails_in_the_interpreter(fault: Fault, tmp_path: Path) -> None:
    module, name, build = SMALL[fault.of]
    wrong = getattr(planted(module, fault.old, fault.new, tmp_path), name)
    large = "block_stride" if fault.large == "block" else fault.large
    # Offsets past 32 bits are looked for where few cells of a wide tensor show them, not where its pool is huge.
    least, largest = (3, 4) if large else (fault.least, worlds.LARGE)
    proof = prove_kernel(wrong, build, also=lambda w: [conj(n >= least, n <= largest) for n in w.extents])
    if fault.breaks == "proved":  # a mask still keeps the padding from being followed
        assert proof.refuted is None
        return
    assert proof.refuted is not None
    assert fault.breaks in proof.refuted.claim
    case = Case(proof.refuted, large)
    assert case.run(wrong) is not None
    assert case.run(getattr(module, name)) is None


def test_without_the_conditions_on_ids_nothing_could_be_proved() -> None:
    """Each condition is needed: a world that lacks it has a counterexample."""

    def lacking(name: str, of: str) -> Any:
        kept = getattr(need, name)
        try:
            setattr(need, name, lambda *_: True)
            module, kernel, build = SMALL[of]
            return prove_kernel(getattr(module, kernel), build).refuted
        finally:
            setattr(need, name, kept)

    broken = {
        ("slot_in_pool", "write_kv"): "key_cache in bounds",
        ("slots_differ", "write_kv"): MEET,
        ("entry_in_pool", "copy_blocks"): "source in bounds",
        ("targets_differ", "copy_blocks"): MEET,
        ("no_chain", "copy_blocks"): MEET,
        ("table_covers", "decode"): "block_tables in bounds",
        ("entry_in_pool", "decode"): "key_cache in bounds",
        ("table_covers", "prefill"): "block_tables in bounds",
        ("entry_in_pool", "prefill"): "key_cache in bounds",
    }
    for (name, of), claim in broken.items():
        refuted = lacking(name, of)
        assert refuted is not None, (name, of)
        assert claim in refuted.claim


# the conditions, from the laws


@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 64])
def test_the_conditions_follow_from_the_laws(block_size: int) -> None:
    """B2 and B3, B4 and B6, of one row's arbitrary position and another's, imply what the kernels ask for.

    B3 counts references by id over all blocks of the pool, so whatever a table names is an id of the pool; B4 gives a
    table's length; S10 gives a slot from its table; B6 says whose slots differ.
    """

    def build(source: Source) -> dict[str, Any]:
        names = (
            "pool",
            "computed",
            "reserved",
            "tokens",
            "length",
            "position",
            "block",
            "token",
            "other",
            "other_slot",
        )
        return {name: source.integer(name) for name in names}

    def laws(s: dict[str, Any]) -> list[Any]:
        slot = s["block"] * block_size + s["position"] % block_size  # S10: the table's own slot of the position
        return [
            conj(s["computed"] >= 0, s["reserved"] >= 0, s["tokens"] >= 1, s["pool"] >= 0),
            s["length"] == cdiv(most(s["computed"] + s["tokens"], s["reserved"]), block_size),  # B4, after this step
            conj(s["position"] >= 0, s["position"] < s["computed"] + s["tokens"]),
            conj(s["block"] >= 0, s["block"] < s["pool"]),  # B2, B3: an entry of the table below its length
            need.slots_differ(s["token"], slot, s["other"], s["other_slot"]),  # B6
        ]

    def claims(s: dict[str, Any]) -> dict[str, Any]:
        slot = s["block"] * block_size + s["position"] % block_size
        end = s["computed"] + s["tokens"]
        return {
            "the position's entry exists": s["position"] // block_size < s["length"],
            "table_covers": need.table_covers(s["length"], end, block_size),
            "entry_in_pool": need.entry_in_pool(s["block"], s["pool"]),
            "slot_in_pool": conj(slot >= 0, need.slot_in_pool(slot, s["pool"], block_size)),
            "slots_differ": need.slots_differ(s["token"], slot, s["other"], s["other_slot"]),
        }

    report = prove(build, laws, lambda s: s, claims, lambda s: list(s.values()))
    assert report.proved, str(report)

    def without_b4(s: dict[str, Any]) -> list[Any]:
        return [law for i, law in enumerate(laws(s)) if i != 1]

    assert not prove(build, without_b4, lambda s: s, claims, lambda s: list(s.values())).proved


@pytest.mark.parametrize(("chunked", "mode"), list(itertools.product([True, False], [None, "swap", "recompute"])))
def test_every_plan_of_the_real_scheduler_meets_the_conditions(chunked: bool, mode: str | None) -> None:
    """Swaps in both directions, copies, rebuilds and chunks, in a pool that is too small for all."""
    seen = {"blocks_to_swap_out": 0, "blocks_to_swap_in": 0, "blocks_to_copy": 0, "scheduled": 0}
    for gpu, cpu, size in itertools.product([22, 25], [0, 6, 40], [4]):
        scheduler = world(gpu, cpu, size, 64, length=64, preemption_mode=mode, enable_chunked_prefill=chunked)
        for i, (p, n) in enumerate([(9, 2), (14, 3), (5, 1), (11, 2), (3, 4)]):
            scheduler.add(R(p, n, m=12, id=str(i)))
        while scheduler.has_unfinished():
            plan = scheduler.schedule()
            assert need.broken_by(plan, gpu, cpu, size) == []
            for name in seen:
                seen[name] += len(getattr(plan, name))
            scheduler.update(plan, set())
    assert all(count or (mode == "recompute" and "swap" in name) for name, count in seen.items()), seen


def test_a_plan_that_breaks_a_condition_is_named() -> None:
    scheduler = world(22, 6, 4, 64, length=64)
    scheduler.add(R(9, 2, m=4, id="a"))
    plan = scheduler.schedule()
    row = plan.scheduled[0]
    plan.scheduled = [row._replace(slots=[*row.slots[:-1], row.slots[0]])]
    assert need.broken_by(plan, 22, 6, 4) == ["slots_differ"]
    plan.scheduled = [row._replace(block_table=row.block_table[:-1])]
    assert need.broken_by(plan, 22, 6, 4) == ["table_covers"]
    plan.scheduled = []
    plan.blocks_to_copy = [(1, 2), (2, 3), (5, 3), (22, 4)]
    assert need.broken_by(plan, 22, 6, 4) == ["no_chain", "pair_in_pools", "targets_differ"]
