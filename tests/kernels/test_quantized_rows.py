"""Products with the blocks of a GGUF file: what they mean, to the last bit where it can be told, what they touch."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from kernels import quantized_rows
from kernels.quantized_rows import (
    BLOCK,
    MAX_TOKENS,
    TILE,
    QuantizedProduct,
    QuantizedWeight,
    block_bytes,
    dequantize,
    multiply_reference,
    why_not,
)

KINDS = [(True, True), (True, False), (False, True), (False, False)]  # four bits, offset
SHAPES = [(1, 32), (16, 32), (17, 64), (37, 96), (192, 576)]
needs_llvm = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def weight(rows: int, columns: int, four_bits: bool, offset: bool, seed: int = 0) -> QuantizedWeight:
    """Any codes, scales and offsets of about one."""
    generator = torch.Generator().manual_seed(seed)
    blocks = columns // BLOCK
    low, high, wide, dtype = (0, 256, 16, torch.uint8) if four_bits else (-128, 128, 32, torch.int8)
    codes = torch.randint(low, high, (rows, blocks, wide), dtype=dtype, generator=generator)
    scale, shift = (torch.randn(rows, blocks, generator=generator).half() for _ in range(2))
    return QuantizedWeight(codes, scale, shift if offset else None)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@needs_llvm
@pytest.mark.parametrize(("four_bits", "offset"), KINDS)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_it_is_the_product(rows: int, columns: int, four_bits: bool, offset: bool) -> None:
    w = weight(rows, columns, four_bits, offset)
    bias = torch.randn(rows)
    plain, biased = QuantizedProduct(w), QuantizedProduct(w, bias)
    for tokens in (1, 2, 5, MAX_TOKENS):
        x = torch.randn(tokens, columns)
        exact = multiply_reference(x, w)
        # Every term is rounded a few times on its way: the error is bounded by the sum of what the terms are made of.
        offsets = 0.0 if w.offset is None else w.offset.float().abs()[:, :, None]
        size = (dequantize(w).abs().view(rows, -1, BLOCK) + 2 * offsets).flatten(1)
        bound = (columns + 8) * 2**-24 * (x.abs() @ size.T)
        assert ((plain(x) - exact).abs() <= bound).all()
        assert torch.equal(biased(x), plain(x) + bias)


@needs_llvm
@pytest.mark.parametrize(("four_bits", "offset"), KINDS)
def test_unit_vectors_give_every_weight_to_the_last_bit(four_bits: bool, offset: bool) -> None:
    w = weight(37, 96, four_bits, offset)
    product = QuantizedProduct(w)
    found = torch.cat([product(part) for part in torch.eye(96).split(MAX_TOKENS)])
    assert torch.equal(found.T, dequantize(w))


@needs_llvm
@pytest.mark.usefixtures("threads")
def test_a_row_is_the_same_in_any_company_and_on_any_number_of_threads() -> None:
    product = QuantizedProduct(weight(200, 160, True, True))
    x = torch.randn(MAX_TOKENS, 160)
    torch.set_num_threads(1)
    whole = product(x)
    for count, tokens in itertools.product((1, 2, 3, 20), (1, 2, 3, 7)):
        torch.set_num_threads(count)
        for i in range(MAX_TOKENS - tokens + 1):
            assert torch.equal(product(x[i : i + tokens]), whole[i : i + tokens])


@needs_llvm
def test_rows_that_do_not_lie_together_are_taken() -> None:
    product = QuantizedProduct(weight(20, 64, False, False))
    wide = torch.randn(4, 128)
    assert torch.equal(product(wide[:, 64:]), product(wide[:, 64:].contiguous()))
    assert torch.equal(product(wide[::2, :64]), product(wide[:, :64])[::2])


def test_rows_and_stacks_are_those_of_the_matrix() -> None:
    a, b = weight(6, 64, True, True), weight(5, 64, True, True, seed=1)
    both = QuantizedWeight.stack([a, b])
    assert both is not None
    assert torch.equal(dequantize(both), torch.cat((dequantize(a), dequantize(b))))
    order = torch.tensor([3, 0, 10, 10])
    assert torch.equal(dequantize(both.rows(order)), dequantize(both)[order])
    assert QuantizedWeight.stack([a, weight(5, 64, True, False)]) is None
    assert QuantizedWeight.stack([a, weight(5, 64, False, True)]) is None
    assert QuantizedWeight.stack([a, weight(5, 96, True, True)]) is None


@needs_llvm
def test_what_does_not_fit_is_refused() -> None:
    good = weight(8, 64, True, True)
    product = QuantizedProduct(good)
    for x in (
        torch.zeros(1, 32),
        torch.zeros(64),
        torch.zeros(0, 64),
        torch.zeros(MAX_TOKENS + 1, 64),
        torch.zeros(1, 64).double(),
    ):
        with pytest.raises(ValueError, match=f"it must be float32 of 1 to {MAX_TOKENS} rows of 64"):
            product(x)
    with pytest.raises(ValueError, match=r"codes are torch\.uint8"):
        QuantizedProduct(good._replace(codes=good.codes[:, :, :8]))
    with pytest.raises(ValueError, match=r"codes are torch\.int32"):
        QuantizedProduct(good._replace(codes=good.codes.int()))
    with pytest.raises(ValueError, match="scale and offset must be float16"):
        QuantizedProduct(good._replace(scale=good.scale.float()))
    with pytest.raises(ValueError, match="scale and offset must be float16"):
        QuantizedProduct(good._replace(offset=good.scale[:4]))
    with pytest.raises(ValueError, match=r"bias must be of shape \[8\]"):
        QuantizedProduct(good, torch.zeros(7))


def test_without_llvmlite_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_rows, "llvm", None)
    assert why_not() == "the package llvmlite is not installed"
    quantized_rows.compiled.cache_clear()
    with pytest.raises(RuntimeError, match="llvmlite is not installed"):
        QuantizedProduct(weight(8, 64, True, True))
    quantized_rows.compiled.cache_clear()


@needs_llvm
@pytest.mark.skipif("x86_64" not in os.uname().machine, reason="instructions of x86_64")
@pytest.mark.parametrize("missing", ["fma", "f16c"])
def test_a_processor_that_cannot_is_told_before_llvm_ends_the_process(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = quantized_rows.llvm.get_host_cpu_features()
    features[missing] = False
    monkeypatch.setattr(quantized_rows.llvm, "get_host_cpu_features", lambda: features)
    quantized_rows.compiled.cache_clear()
    assert why_not() == f"the processor has no {missing.upper()} instructions"
    quantized_rows.compiled.cache_clear()


# Every buffer ends, then begins, at a page that nobody may touch: a byte beyond it ends the process.
GUARDED = """
import ctypes, mmap, sys
import torch
from kernels.quantized_rows import compiled

libc = ctypes.CDLL(None, use_errno=True)
PAGE = mmap.PAGESIZE
kept = []

def guarded(size, at_end):
    pages = -(-size // PAGE)
    memory = mmap.mmap(-1, (pages + 2) * PAGE)
    kept.append(memory)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (0, pages + 1):
        assert libc.mprotect(ctypes.c_void_p(base + page * PAGE), PAGE, 0) == 0
    return base + PAGE + (pages * PAGE - size if at_end else 0)

tile_block, four_bits, offset, extra, which = (int(word) for word in sys.argv[1:])
run = compiled(bool(four_bits), bool(offset))
for threads in (1, 2, 5):
    torch.set_num_threads(threads)
    for at_end in (False, True):
        for tokens, blocks, tiles in ((1, 1, 1), (2, 3, 1), (3, 2, 4)):
            sizes = [tiles * blocks * tile_block, tokens * blocks * 32 * 4, tokens * tiles * 16 * 4]
            if extra:
                sizes[which] -= 64
            places = [guarded(size, at_end) for size in sizes]
            task = (ctypes.c_int64 * 7)(*places, tokens, blocks, tiles, tiles * 16)
            run(task, threads)
print("done")
"""


@needs_llvm
@pytest.mark.skipif(sys.platform != "linux", reason="guards pages with mprotect")
@pytest.mark.parametrize(("four_bits", "offset"), KINDS)
def test_it_touches_nothing_beyond_its_tensors(four_bits: bool, offset: bool) -> None:
    def run(short: int | None) -> subprocess.CompletedProcess[str]:
        numbers = [block_bytes(four_bits, offset), four_bits, offset, short is not None, short or 0]
        words = [str(int(number)) for number in numbers]
        return subprocess.run(
            [sys.executable, "-c", GUARDED, *words],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONFAULTHANDLER": "", "OMP_NUM_THREADS": "2"},
        )

    assert run(None).stdout == "done\n"
    if (four_bits, offset) == (True, True):  # the guard works: a buffer that is too short ends the process
        assert all(run(which).returncode < 0 for which in range(3))


def test_a_tile_is_what_the_file_stores_for_its_rows() -> None:
    """Q4_1 takes 20 bytes for 32 weights, Q4_0 18 (its offset follows from its scale), Q8_0 34."""
    assert [block_bytes(*kind) // TILE for kind in KINDS] == [20, 18, 36, 34]
