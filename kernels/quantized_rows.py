"""A few rows times the weights of a GGUF file as they are stored, on a CPU.

    y[t, r] = sum over k of x[t, k] * (scale[r, k // 32] * code[r, k] + offset[r, k // 32]) + bias[r]

x (tokens, K) and y (tokens, R) float32, code (R, K) whole numbers of 4 or 8 bits, scale and offset (R, K / 32) float16,
bias (R,) or none: types Q4_0, Q4_1 and Q8_0 of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.

With one row a product does little but read weights, and 4 bits are an eighth of float32: torch has no such kernel for
CPUs without AVX-512.  This one is in LLVM's language, compiled for the machine it runs on when it is first asked for;
its threads are those of torch.  Nothing is rounded but sums, in float32, and their order depends on neither the number
of tokens nor that of threads: the same row has the same result to the last bit.

A tile is 16 rows of the weight; a block, 32 of its columns.  Where a tile and a block meet lie, without a gap, the
codes (column by column, 16 bytes each; of 4 bits, columns j and j + 16 share a byte), 16 scales and 16 offsets.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.dispatch import refuse_unless

try:
    import llvmlite.binding as llvm
except ImportError:  # it is asked for by name, and missed then
    llvm = None

TILE, BLOCK = 16, 32
MAX_TOKENS = 16  # of one call: their sums lie on the stack


class QuantizedWeight(NamedTuple):
    """A matrix (R, K) in blocks of 32 columns, as a GGUF file has it.

    codes: (R, K / 32, 16) uint8, a byte for columns j (low half) and j + 16, or (R, K / 32, 32) int8.
    scale: (R, K / 32) float16.  offset: the same, or None for 0.
    """

    codes: Tensor
    scale: Tensor
    offset: Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        """(R, K)"""
        return self.codes.shape[0], self.codes.shape[1] * BLOCK

    @classmethod
    def stack(cls, parts: list[QuantizedWeight]) -> QuantizedWeight | None:
        """One under the other; None if they are of different kinds."""
        if len({(part.codes.dtype, part.codes.shape[1:], part.offset is None) for part in parts}) != 1:
            return None
        offsets = [part.offset for part in parts if part.offset is not None]
        return cls(
            torch.cat([part.codes for part in parts]),
            torch.cat([part.scale for part in parts]),
            torch.cat(offsets) if offsets else None,
        )

    def rows(self, order: Tensor) -> QuantizedWeight:
        """These rows, in this order."""
        return QuantizedWeight(
            self.codes[order], self.scale[order], None if self.offset is None else self.offset[order]
        )


def dequantize(weight: QuantizedWeight) -> Tensor:
    """(R, K) float32: what the numbers mean."""
    codes = weight.codes
    if codes.dtype == torch.uint8:
        codes = torch.cat((codes & 15, codes >> 4), -1)
    wide = codes.float() * weight.scale.float()[:, :, None]
    if weight.offset is not None:
        wide += weight.offset.float()[:, :, None]
    return wide.flatten(1)


def multiply_reference(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """The meaning, in float64: (tokens, R)."""
    return x.double() @ dequantize(weight).double().T


class QuantizedProduct:
    """The kernel, with a weight laid out for it.  Called with (tokens, K), up to `MAX_TOKENS` of them."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None = None) -> None:
        """Raises ValueError for a weight that is not what `QuantizedWeight` says, RuntimeError as `compiled` does."""
        rows, self.columns = weight.shape
        wide = {torch.uint8: BLOCK // 2, torch.int8: BLOCK}.get(weight.codes.dtype)
        refuse_unless(
            weight.codes.ndim == 3 and weight.codes.shape[2] == wide and min(weight.codes.shape) > 0,
            lambda: (
                f"codes are {weight.codes.dtype} {list(weight.codes.shape)}: uint8 (R, K/32, 16) or int8 (R, K/32, 32)"
            ),
        )
        for numbers in (weight.scale, weight.offset):
            refuse_unless(
                numbers is None or (numbers.dtype == torch.float16 and numbers.shape == weight.codes.shape[:2]),
                lambda: f"scale and offset must be float16 of shape {list(weight.codes.shape[:2])}",
            )
        refuse_unless(bias is None or bias.shape == (rows,), lambda: f"bias must be of shape [{rows}]")
        self.rows = rows
        self._bias = None if bias is None else bias.float()
        self._packed = _pack(weight)
        self._padded = len(self._packed) * TILE
        self._run = compiled(weight.codes.dtype == torch.uint8, weight.offset is not None)
        self._task = (ctypes.c_int64 * 7)(
            self._packed.data_ptr(), 0, 0, 0, self.columns // BLOCK, len(self._packed), self._padded
        )

    def __call__(self, x: Tensor) -> Tensor:
        """(tokens, R) float32 of x (tokens, K) float32.  Not for two threads at once."""
        refuse_unless(
            x.dtype == torch.float32 and x.ndim == 2 and x.shape[1] == self.columns and 0 < x.shape[0] <= MAX_TOKENS,
            lambda: f"x is {x.dtype} {list(x.shape)}; it must be float32 of 1 to {MAX_TOKENS} rows of {self.columns}",
        )
        x = x.contiguous()
        y = torch.empty((x.shape[0], self._padded))
        self._task[1], self._task[2], self._task[3] = x.data_ptr(), y.data_ptr(), x.shape[0]
        self._run(self._task, torch.get_num_threads())
        y = y[:, : self.rows]
        return y if self._bias is None else y + self._bias


def _pack(weight: QuantizedWeight) -> Tensor:
    """(tiles, blocks, bytes) uint8, rows filled up with zeros to whole tiles."""
    rows, blocks = weight.codes.shape[:2]
    tiles = -(-rows // TILE)

    def tiled(numbers: Tensor) -> Tensor:
        """(tiles, blocks, bytes) of (rows, blocks, n): for each of the n the 16 rows of the tile."""
        numbers = numbers.reshape(rows, blocks, -1)
        whole = numbers.new_zeros((tiles * TILE, *numbers.shape[1:]))
        whole[:rows] = numbers
        dealt = whole.view(tiles, TILE, blocks, -1).permute(0, 2, 3, 1).contiguous()
        return dealt.view(torch.uint8).flatten(2)

    parts = [tiled(weight.codes), tiled(weight.scale)]
    if weight.offset is not None:
        parts.append(tiled(weight.offset))
    return torch.cat(parts, 2)


# the kernel

Run = Callable[[Any, int], None]


def why_not() -> str | None:
    """Why the kernel cannot be had here; None if it can."""
    if llvm is None:
        return "the package llvmlite is not installed"
    try:
        compiled(True, True)
    except RuntimeError as error:
        return str(error)
    return None


@functools.cache
def compiled(four_bits: bool, offset: bool) -> Run:
    """run(task, threads).  Raises RuntimeError if llvmlite is missing or does not compile it for this machine."""
    if llvm is None:
        raise RuntimeError("the package llvmlite is not installed")
    parallel = _share_threads()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features()
    target = llvm.Target.from_default_triple()
    if "x86_64" in target.triple:
        for needed in ("fma", "f16c"):  # else LLVM calls functions that are nowhere, and ends the process
            if not features.get(needed):
                raise RuntimeError(f"the processor has no {needed.upper()} instructions")
    machine = target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features.flatten(), opt=3, jit=True)
    module = llvm.parse_assembly(source(four_bits, offset, parallel))
    module.verify()
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    run: Any = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32)(engine.get_function_address("run"))
    run.engine = engine  # owns the code
    kept: Run = run
    return kept


def _share_threads() -> bool:
    """Whether torch's OpenMP is there to be called: GNU's, which wheels for Linux bring along."""
    for library in Path(torch.__file__).parent.glob("lib/libgomp*"):
        llvm.load_library_permanently(str(library))
    return all(llvm.address_of_symbol(name) for name in ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"))


def source(four_bits: bool, offset: bool, parallel: bool) -> str:
    """The kernel in LLVM's language.  parallel: its threads are torch's; else there is one."""
    size = block_bytes(four_bits, offset)
    return "\n".join([_HEAD, *_product(four_bits, offset), _share(size), _PARALLEL if parallel else _ALONE])


def block_bytes(four_bits: bool, offset: bool) -> int:
    """Bytes of a tile's codes, scales and offsets for one block."""
    return TILE * ((16 if four_bits else 32) + 2 + 2 * offset)


_HEAD = """
declare <8 x float> @llvm.fma.v8f32(<8 x float>, <8 x float>, <8 x float>)
declare float @llvm.vector.reduce.fadd.v32f32(float, <32 x float>)
"""


def _product(four_bits: bool, offset: bool) -> Iterator[str]:
    """16 numbers of the result: one row of x times one tile, two vectors of 8 rows side by side."""
    size = block_bytes(four_bits, offset)
    scales = TILE * (16 if four_bits else 32)
    yield f"""
define internal void @product(ptr %tile, ptr %x, ptr %sums, ptr %y, i64 %blocks) {{
entry:
  br label %block
block:
  %b = phi i64 [ 0, %entry ], [ %next, %block ]
  %total0 = phi <8 x float> [ zeroinitializer, %entry ], [ %done0, %block ]
  %total1 = phi <8 x float> [ zeroinitializer, %entry ], [ %done1, %block ]
  %begin = mul i64 %b, {size}
  %codes = getelementptr i8, ptr %tile, i64 %begin
  %column = mul i64 %b, {BLOCK}
  %xs = getelementptr float, ptr %x, i64 %column"""
    sums = {(half, part): "zeroinitializer" for half in (0, 1) for part in (0, 1)}
    for j in range(BLOCK):
        yield f"""
  %x{j}_at = getelementptr float, ptr %xs, i64 {j}
  %x{j}_one = load float, ptr %x{j}_at, align 4
  %x{j}_in = insertelement <8 x float> poison, float %x{j}_one, i64 0
  %x{j} = shufflevector <8 x float> %x{j}_in, <8 x float> poison, <8 x i32> zeroinitializer"""
    for j in range(16 if four_bits else 32):
        for half in (0, 1):
            name = f"{j}_{half}"
            yield f"""
  %at{name} = getelementptr i8, ptr %codes, i64 {TILE * j + 8 * half}
  %bytes{name} = load <8 x i8>, ptr %at{name}, align 8
  %wide{name} = {"zext" if four_bits else "sext"} <8 x i8> %bytes{name} to <8 x i32>"""
            if four_bits:
                yield f"""
  %low{name} = and <8 x i32> %wide{name}, {_splat(15)}
  %high{name} = lshr <8 x i32> %wide{name}, {_splat(4)}"""
                columns = [(j, f"%low{name}"), (j + 16, f"%high{name}")]
            else:
                columns = [(j, f"%wide{name}")]
            for k, whole in columns:
                chain = half, k // 16  # two sums a vector: neither waits for the other
                yield f"""
  %code{k}_{half} = sitofp <8 x i32> {whole} to <8 x float>
{_fma(f"%sum{k}_{half}", f"%code{k}_{half}", f"%x{k}", sums[chain])}"""
                sums[chain] = f"%sum{k}_{half}"
    for half in (0, 1):
        yield f"""
  %scale_at{half} = getelementptr i8, ptr %codes, i64 {scales + 16 * half}
  %scale_half{half} = load <8 x half>, ptr %scale_at{half}, align 16
  %scale{half} = fpext <8 x half> %scale_half{half} to <8 x float>
  %sum{half} = fadd <8 x float> {sums[half, 0]}, {sums[half, 1]}
{_fma(f"%{'scaled' if offset else 'done'}{half}", f"%sum{half}", f"%scale{half}", f"%total{half}")}"""
    if offset:
        yield """
  %of_x_at = getelementptr float, ptr %sums, i64 %b
  %of_x_one = load float, ptr %of_x_at, align 4
  %of_x_in = insertelement <8 x float> poison, float %of_x_one, i64 0
  %of_x = shufflevector <8 x float> %of_x_in, <8 x float> poison, <8 x i32> zeroinitializer"""
        for half in (0, 1):
            yield f"""
  %offset_at{half} = getelementptr i8, ptr %codes, i64 {scales + 32 + 16 * half}
  %offset_half{half} = load <8 x half>, ptr %offset_at{half}, align 16
  %offset{half} = fpext <8 x half> %offset_half{half} to <8 x float>
{_fma(f"%done{half}", f"%offset{half}", "%of_x", f"%scaled{half}")}"""
    yield """
  %next = add i64 %b, 1
  %more = icmp slt i64 %next, %blocks
  br i1 %more, label %block, label %end
end:
  store <8 x float> %done0, ptr %y, align 4
  %y1 = getelementptr float, ptr %y, i64 8
  store <8 x float> %done1, ptr %y1, align 4
  ret void
}"""


def _fma(result: str, a: str, b: str, c: str) -> str:
    """a * b + c, rounded once"""
    v = "<8 x float>"
    return f"  {result} = call {v} @llvm.fma.v8f32({v} {a}, {v} {b}, {v} {c})"


def _splat(value: int) -> str:
    return "<" + ", ".join([f"i32 {value}"] * 8) + ">"


# task: i64 tile bytes' address, x's, y's, tokens, blocks of a row, tiles, floats of a row of y.
# The sum of x over each block, then every tile of this thread's share times every row: a tile stays in cache for all.
def _share(size: int) -> str:
    """One thread's share.  size: bytes of a block of a tile."""
    return f"""
define internal void @share(ptr %task, i64 %thread, i64 %threads) {{
entry:
  %packed = load ptr, ptr %task
  %task1 = getelementptr i64, ptr %task, i64 1
  %x = load ptr, ptr %task1
  %task2 = getelementptr i64, ptr %task, i64 2
  %y = load ptr, ptr %task2
  %task3 = getelementptr i64, ptr %task, i64 3
  %tokens = load i64, ptr %task3
  %task4 = getelementptr i64, ptr %task, i64 4
  %blocks = load i64, ptr %task4
  %task5 = getelementptr i64, ptr %task, i64 5
  %tiles = load i64, ptr %task5
  %task6 = getelementptr i64, ptr %task, i64 6
  %width = load i64, ptr %task6
  %columns = mul i64 %blocks, {BLOCK}
  %tile_bytes = mul i64 %blocks, {size}
  %count = mul i64 %tokens, %blocks
  %sums = alloca float, i64 %count
  %to_first = mul i64 %tiles, %thread
  %first = sdiv i64 %to_first, %threads
  %after = add i64 %thread, 1
  %to_last = mul i64 %tiles, %after
  %last = sdiv i64 %to_last, %threads
  %any = icmp slt i64 %first, %last
  br i1 %any, label %sum, label %end
sum:
  %i = phi i64 [ 0, %entry ], [ %i_next, %sum ]
  %i_column = mul i64 %i, {BLOCK}
  %i_at = getelementptr float, ptr %x, i64 %i_column
  %i_x = load <{BLOCK} x float>, ptr %i_at, align 4
  %i_sum = call reassoc float @llvm.vector.reduce.fadd.v32f32(float 0.0, <{BLOCK} x float> %i_x)
  %i_to = getelementptr float, ptr %sums, i64 %i
  store float %i_sum, ptr %i_to, align 4
  %i_next = add i64 %i, 1
  %i_more = icmp slt i64 %i_next, %count
  br i1 %i_more, label %sum, label %tile
tile:
  %t = phi i64 [ %first, %sum ], [ %t_next, %tile_end ]
  %t_begin = mul i64 %t, %tile_bytes
  %t_at = getelementptr i8, ptr %packed, i64 %t_begin
  %t_row = mul i64 %t, {TILE}
  br label %row
row:
  %r = phi i64 [ 0, %tile ], [ %r_next, %row ]
  %r_column = mul i64 %r, %columns
  %r_x = getelementptr float, ptr %x, i64 %r_column
  %r_block = mul i64 %r, %blocks
  %r_sums = getelementptr float, ptr %sums, i64 %r_block
  %r_begin = mul i64 %r, %width
  %r_to = add i64 %r_begin, %t_row
  %r_y = getelementptr float, ptr %y, i64 %r_to
  call void @product(ptr %t_at, ptr %r_x, ptr %r_sums, ptr %r_y, i64 %blocks)
  %r_next = add i64 %r, 1
  %r_more = icmp slt i64 %r_next, %tokens
  br i1 %r_more, label %row, label %tile_end
tile_end:
  %t_next = add i64 %t, 1
  %t_more = icmp slt i64 %t_next, %last
  br i1 %t_more, label %tile, label %end
end:
  ret void
}}"""


_PARALLEL = """
declare void @GOMP_parallel(ptr, ptr, i32, i32)
declare i32 @omp_get_thread_num()
declare i32 @omp_get_num_threads()
define internal void @one(ptr %task) {
  %thread32 = call i32 @omp_get_thread_num()
  %threads32 = call i32 @omp_get_num_threads()
  %thread = zext i32 %thread32 to i64
  %threads = zext i32 %threads32 to i64
  call void @share(ptr %task, i64 %thread, i64 %threads)
  ret void
}
define void @run(ptr %task, i32 %threads) {
  call void @GOMP_parallel(ptr @one, ptr %task, i32 %threads, i32 0)
  ret void
}"""

_ALONE = """
define void @run(ptr %task, i32 %threads) {
  call void @share(ptr %task, i64 0, i64 1)
  ret void
}"""
