"""Compile every kernel variant ahead of time, without a GPU, and tell its registers, spills and shared memory.

    python benchmarks/kernels_aot.py                    writes benchmarks/results/kernels_aot.md
    python benchmarks/kernels_aot.py --check            the default sizes alone; fails if attention or norms spill
    --arch 90   one architecture, written nowhere    --jobs 2   processes
    --only decode   variants whose name holds this; the others keep their lines in the table

The variants are what the launchers launch: each launcher runs with its kernel replaced by a recorder, so block sizes,
warps and stages in the table are those of serving.  Must not run under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

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
from kernels.paged_rows import PagedRows

ARCHITECTURES = (80, 90, 100)
TABLE = Path(__file__).resolve().parent / "results" / "kernels_aot.md"
BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
TYPE_NAMES = {
    BF16: "bf16",
    FP16: "fp16",
    FP32: "fp32",
    FP8: "fp8e4nv",
    torch.float64: "fp64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
}


@dataclass(frozen=True)
class Launch:
    """What a launcher asked for."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]

    def source(self) -> Any:
        """The kernel specialised as a real launch would: multiples of 16 and ones are known to the compiler."""
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        attributes: dict[tuple[int, ...], list[list[Any]]] = {}
        for i, parameter in enumerate(self.kernel.params):
            value = self.arguments[parameter.name]
            if parameter.is_constexpr or (isinstance(value, int) and value == 1):
                signature[parameter.name], constants[parameter.name] = "constexpr", value
            elif isinstance(value, Tensor):
                signature[parameter.name] = "*" + TYPE_NAMES[value.dtype]
                attributes[(i,)] = [["tt.divisibility", 16]]
            elif isinstance(value, int):
                signature[parameter.name] = "i32" if abs(value) < 1 << 31 else "i64"
                if value % 16 == 0:
                    attributes[(i,)] = [["tt.divisibility", 16]]
            else:
                signature[parameter.name] = "fp32"
        return triton.compiler.ASTSource(self.kernel, signature, constants, attributes)


class _Recorder:
    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(**arguments: Any) -> None:
            options = {name: arguments.pop(name) for name in ("num_warps", "num_stages") if name in arguments}
            self.launches.append(Launch(self.kernel, arguments, options))

        return launch


KERNELS = (
    (kernels.write_kv, "write_kv_kernel"),
    (kernels.copy_blocks, "move_blocks_kernel"),
    (kernels.rms_norm, "rms_norm_kernel"),
    (kernels.layer_norm, "layer_norm_kernel"),
    (kernels.rotary, "rotary_kernel"),
    (kernels.silu_mul, "silu_mul_kernel"),
    (kernels.activation, "activation_kernel"),
    (kernels.paged_attention, "paged_decode_kernel"),
    (kernels.paged_attention, "paged_reduce_kernel"),
    (kernels.paged_prefill_attention, "paged_prefill_kernel"),
    (kernels.penalize, "penalize_kernel"),
    (kernels.sample, "sample_kernel"),
)


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Inside, launchers launch nothing and what they would have launched is in the list."""
    launches: list[Launch] = []
    kept = [(module, name, getattr(module, name)) for module, name in KERNELS]
    try:
        for module, name, kernel in kept:
            setattr(module, name, _Recorder(kernel, launches))
        yield launches
    finally:
        for module, name, kernel in kept:
            setattr(module, name, kernel)


def attention(
    spans: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, block_size: int, dtype: Any, cache: Any
) -> None:
    """One launch of paged attention over rows (start, end)."""
    blocks = [-(-end // block_size) for _, end in spans]
    pool = torch.zeros(max(blocks), block_size, kv_heads, dim, dtype=cache)
    rows = PagedRows([s for s, _ in spans], [e for _, e in spans], [list(range(n)) for n in blocks], block_size)
    query = torch.zeros(rows.num_tokens, heads, dim, dtype=dtype)
    kernels.paged_attention.launch_paged_attention(query, pool, pool, rows, dim**-0.5)


def variants() -> dict[str, Callable[[], Any]]:
    """Name -> a call of a launcher.  Names that end in * are the default sizes."""
    out: dict[str, Callable[[], Any]] = {}
    kinds = {"direct": [(99, 100)], "split": [(2047, 2048)], "prefill": [(16, 64)]}
    for kind, spans in kinds.items():

        def add(name: str, *shape: Any, kind: str = kind, spans: Any = spans) -> None:
            out[f"{kind} {name}"] = lambda: attention(spans, *shape)

        add("bf16 32/8 heads of 128, blocks of 16 *", 32, 8, 128, 16, BF16, BF16)
        add("fp16 32/8 heads of 128, blocks of 16 *", 32, 8, 128, 16, FP16, FP16)
        add("bf16 9/3 heads of 64, blocks of 16 *", 9, 3, 64, 16, BF16, BF16)
        add("fp32 32/8 heads of 128, blocks of 16 *", 32, 8, 128, 16, FP32, FP32)
        add("bf16 16/8 heads of 256, blocks of 16 *", 16, 8, 256, 16, BF16, BF16)
        add("bf16 32/8 heads of 128, fp8 cache *", 32, 8, 128, 16, BF16, FP8)
        if kind == "direct":  # differs from split in its last lines alone
            continue
        for dim in (16, 32, 72, 80, 96, 112, 120, 160, 192):
            add(f"bf16 32/8 heads of {dim}", 32, 8, dim, 16, BF16, BF16)
        for dim in (64, 256):
            add(f"fp32 32/8 heads of {dim}", 32, 8, dim, 16, FP32, FP32)
        for heads, kv_heads in ((8, 8), (17, 1), (71, 1), (96, 6)):
            add(f"bf16 {heads}/{kv_heads} heads of 64", heads, kv_heads, 64, 16, BF16, BF16)
        for block_size in (1, 8, 32, 64):
            add(f"bf16 32/8 heads of 128, blocks of {block_size}", 32, 8, 128, block_size, BF16, BF16)
    for dtype, cache in ((BF16, BF16), (FP32, FP32), (BF16, FP8)):
        for dim in (128, 80):

            def write(dtype: Any = dtype, cache: Any = cache, dim: int = dim) -> None:
                new, pool = torch.zeros(2, 8, dim, dtype=dtype), torch.zeros(2, 16, 8, dim, dtype=cache)
                kernels.write_kv.launch_write_kv(new, new, torch.tensor([0, 1]), pool, pool)

            default = " *" if dim == 128 and cache != FP32 else ""
            out[f"write_kv {TYPE_NAMES[dtype]}, cache {TYPE_NAMES[cache]}, 8 heads of {dim}{default}"] = write

    def move() -> None:
        words = kernels.copy_blocks.as_words(torch.zeros(2, 2, 3, 16, 8, 128, dtype=BF16))
        kernels.copy_blocks.launch_move_blocks(words, words, torch.tensor([0]), torch.tensor([1]))

    out["move_blocks *"] = move
    for width, dtype in ((576, BF16), (4096, BF16), (8192, BF16), (16384, BF16), (32768, FP32), (4096, FP32)):
        x, w = torch.zeros(2, width, dtype=dtype), torch.zeros(width, dtype=dtype)
        name = f"{TYPE_NAMES[dtype]} width {width}" + (" *" if width <= 8192 else "")
        out[f"rms_norm {name}"] = lambda x=x, w=w: kernels.rms_norm.launch_rms_norm(x, w, 1e-5, None)
        out[f"rms_norm and sum {name}"] = lambda x=x, w=w: kernels.rms_norm.launch_rms_norm(x, w, 1e-5, x)
        out[f"layer_norm {name}"] = lambda x=x, w=w: kernels.layer_norm.launch_layer_norm(x, w, w, 1e-5)
    for name, half, interleaved in (("halves *", 64, False), ("interleaved", 64, True), ("partial", 16, False)):
        x, c = torch.zeros(2, 40, 128, dtype=BF16), torch.zeros(2, half)
        out[f"rotary bf16 40 heads of 128, {name}"] = lambda x=x, c=c, i=interleaved: kernels.rotary.launch_rotary(
            x, c, c, i
        )
    x = torch.zeros(2, 2 * 14336, dtype=BF16)
    out["silu_mul bf16 width 14336 *"] = lambda x=x: kernels.silu_mul.launch_silu_mul(x)
    for name in kernels.activation.KINDS:
        out[f"{name} gated bf16"] = lambda name=name, x=x: kernels.activation.launch_activation(x, name, True)

    def penalize() -> None:
        ids, ones = torch.zeros(2, dtype=torch.int64), torch.ones(2)
        starts = torch.tensor([0, 1, 2])
        arguments = (torch.zeros(2, 64), ids, ids, starts, ones, ones, ones)
        with kernels.dispatch.choose("triton"):
            kernels.penalize.penalize(*arguments)

    def sample() -> None:
        wide, whole = torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.int64)
        kernels.sample.launch_sample(torch.zeros(2, 128256), wide, whole, wide, wide, whole)

    out["penalize *"] = penalize
    out["sample vocabulary 128256 *"] = sample
    return out


@dataclass(frozen=True)
class Figures:
    """What the assembler says of one compiled kernel."""

    kernel: str
    arch: int
    warps: int
    stages: int
    registers: int
    spills: int  # bytes stored and loaded
    shared: int  # bytes
    seconds: float


def compiled(launch: Launch, arch: int) -> Figures:
    """Compile for one architecture and read the assembler's report."""
    triton.knobs.nvidia.dump_ptxas_log = True
    triton.knobs.compilation.always_compile = True  # one found in the cache comes without the assembler's report
    log = io.StringIO()
    start = time.perf_counter()
    with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        target = triton.backends.compiler.GPUTarget("cuda", arch, 32)
        made = triton.compile(launch.source(), target=target, options=launch.options)
    text = log.getvalue()
    registers = re.findall(r"Used (\d+) registers", text)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    if not registers or not spills:
        raise RuntimeError(f"the assembler's report was not understood: {text!r:.400}")
    return Figures(
        launch.kernel.__name__,
        arch,
        made.metadata.num_warps,
        made.metadata.num_stages,
        max(map(int, registers)),
        sum(int(a) + int(b) for a, b in spills),
        made.metadata.shared,
        time.perf_counter() - start,
    )


def compile_variant(name: str, archs: tuple[int, ...]) -> list[Figures]:
    """Every kernel that the variant launches, for every architecture that has its types."""
    torch.set_num_threads(1)
    figures = []
    for arch in archs:
        kernels.paged_prefill_attention.architecture = lambda device, arch=arch: arch  # sizes are those of the device
        with recorded() as launches:
            variants()[name]()
        tensors = [a for launch in launches for a in launch.arguments.values() if isinstance(a, Tensor)]
        if arch >= 89 or all(tensor.dtype != FP8 for tensor in tensors):
            figures += [compiled(launch, arch) for launch in launches]
    return figures


def keeps_registers(kernel: str) -> bool:
    """An attention or norm kernel, or the sampler: at default sizes it must not spill."""
    return kernel.startswith(("paged_", "sample")) or "norm" in kernel


def kept_lines(header: list[str]) -> dict[str, list[str]]:
    """Lines of the committed table by variant; none where other versions compiled it."""
    old = TABLE.read_text().splitlines() if TABLE.exists() else []
    kept: dict[str, list[str]] = {}
    for line in old[len(header) :] if old[: len(header)] == header else []:
        kept.setdefault(line.split("|")[1].strip(), []).append(line)
    return kept


def table(results: dict[str, list[Figures]]) -> str:
    """Markdown: what was compiled now, and the lines of the table for what was not."""
    lines = [
        "# Kernels compiled ahead of time",
        "",
        "Written by `python benchmarks/kernels_aot.py`; nothing here was measured on a device.",
        f"torch {torch.__version__.partition('+')[0]}, triton {triton.__version__}.  * = a default size.  "
        "Spills are bytes stored and loaded; fp8 needs sm_89 or later.",
        "",
        "| variant | kernel | sm | warps | stages | registers | spills | shared memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    kept = kept_lines(lines)
    for name in variants():
        lines += kept.get(name, []) if name not in results else ()
        for f in results.get(name, ()):
            lines.append(
                f"| {name} | {f.kernel.removesuffix('_kernel')} | {f.arch} | {f.warps} | {f.stages} | {f.registers} "
                f"| {f.spills} | {f.shared} |"
            )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="default sizes alone; write nothing")
    parser.add_argument("--arch", type=int, choices=ARCHITECTURES)
    parser.add_argument("--only", default="", help="variants whose name holds this")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("unset TRITON_INTERPRET: the interpreter compiles nothing")
    archs = (arguments.arch,) if arguments.arch else ARCHITECTURES
    names = [n for n in variants() if arguments.only in n and (n.endswith("*") or not arguments.check)]
    results: dict[str, list[Figures]] = {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        with ProcessPoolExecutor(arguments.jobs) as pool:
            tasks = {name: pool.submit(compile_variant, name, archs) for name in names}
            for name, task in tasks.items():
                results[name] = task.result()
                for f in results[name]:
                    print(
                        f"{name:55} {f.kernel:22} sm_{f.arch} {f.registers:4} registers {f.spills:5} spilled "
                        f"{f.shared:7} shared {f.seconds:5.1f} s",
                        flush=True,
                    )
    spilled = [
        f"{name} on sm_{f.arch}"
        for name, figures in results.items()
        for f in figures
        if f.spills and name.endswith("*") and keeps_registers(f.kernel)
    ]
    if not arguments.check and not arguments.arch:
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text(table(results))
    if spilled:
        print("spilled at a default size: " + "; ".join(spilled))
    return 1 if spilled else 0


if __name__ == "__main__":
    sys.exit(main())
