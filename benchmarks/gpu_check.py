"""Is the device path right, and how near is each kernel to what the hardware allows?  One table, in six minutes.

    python benchmarks/gpu_check.py out/gpu              on a GPU
    python benchmarks/gpu_check.py out/dry --dry-run    on a CPU: the same code at toy sizes; its times mean nothing

Floors are measured in the same run: bytes over the bandwidth of a large device copy (read and written), operations over
the rate of a large bf16 matrix product, swaps over a pinned copy.  A figure is floor / time: 1.00 is the hardware's own
limit.  Everything that was measured goes to figures.json in the folder.  Exit status 1: a check of correctness failed;
an aim that is missed is marked and changes nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["LAWFUL_KERNELS"] = "triton"

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from engine.cache import KVCache  # noqa: E402
from engine.gpu_runner import GpuRunner  # noqa: E402
from engine.models.config import ModelConfig  # noqa: E402
from engine.models.linear import PlainLinear  # noqa: E402
from engine.models.llama import LlamaModel  # noqa: E402
from engine.models.weights import RandomWeights  # noqa: E402
from engine.request import RequestState, Sampled  # noqa: E402
from engine.sampler import Sampler, draw_keys  # noqa: E402
from engine.sampling import SamplingParams  # noqa: E402
from engine.scheduler.plan import Plan, ScheduledSequence  # noqa: E402
from kernels.copy_blocks import as_words, launch_move_blocks  # noqa: E402
from kernels.fp8 import FP8, to_cache_type  # noqa: E402
from kernels.layer_norm import layer_norm  # noqa: E402
from kernels.paged_attention import PagedRows, paged_attention, paged_attention_reference  # noqa: E402
from kernels.penalize import penalize, penalize_reference  # noqa: E402
from kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_reference  # noqa: E402
from kernels.rotary import rotary, rotary_reference  # noqa: E402
from kernels.sample import sample, sample_reference  # noqa: E402
from kernels.silu_mul import silu_mul, silu_mul_reference  # noqa: E402
from kernels.swap_blocks import Swapper, host_blocks  # noqa: E402
from kernels.write_kv import write_kv, write_kv_reference  # noqa: E402


@dataclass(frozen=True)
class Sizes:
    """What is measured.  The toy sizes of a dry run keep every code path."""

    copy_bytes: int = 4 << 30
    matrix: int = 8192
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    block_size: int = 16
    decode_rows: int = 64
    decode_context: int = 4096
    prefill_rows: int = 4
    prefill_tokens: int = 8192
    written_tokens: int = 65536
    copied_blocks: int = 2048
    layers: int = 32
    vocab: int = 128 * 1024
    sampled_rows: int = 256
    hidden: int = 4096
    intermediate: int = 14336
    norm_rows: int = 16384
    swapped_blocks: int = 1024
    batches: tuple[int, ...] = (1, 16, 64, 128)
    model_context: int = 1024
    seconds: float = 0.3  # of each measurement


TOY = Sizes(
    copy_bytes=1 << 16,
    matrix=64,
    heads=4,
    kv_heads=2,
    dim=16,
    decode_rows=3,
    decode_context=40,
    prefill_rows=2,
    prefill_tokens=24,
    written_tokens=6,
    copied_blocks=3,
    layers=2,
    vocab=300,
    sampled_rows=2,
    hidden=64,
    intermediate=96,
    norm_rows=3,
    swapped_blocks=5,
    batches=(1, 3),
    model_context=12,
    seconds=0.0,
)


@dataclass
class Line:
    """One row of the table."""

    what: str
    value: str
    note: str = ""
    good: bool | None = None  # None: nothing was asked of it


@dataclass
class Report:
    """Lines as they come, and every number behind them."""

    lines: list[Line] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def add(self, what: str, value: str, note: str = "", good: bool | None = None, **figures: Any) -> None:
        line = Line(what, value, note, good)
        self.lines.append(line)
        self.figures[what] = {**asdict(line), **figures}
        print(_text(line), flush=True)


def _text(line: Line) -> str:
    mark = "  " if line.good is None else "ok" if line.good else "!!"
    return f"{mark} {line.what:58} {line.value:>16}  {line.note}"


class Bench:
    """The device, its measured limits, and what was found."""

    def __init__(self, dry: bool) -> None:
        self.dry = dry
        self.sizes = TOY if dry else Sizes()
        self.device = torch.device("cpu" if dry else "cuda")
        self.dtype = torch.float32 if dry else torch.bfloat16
        self.report = Report()
        self.bandwidth = self.rate = self.link_out = self.link_in = math.nan
        torch.manual_seed(0)

    def time(self, run: Callable[[], Any], repeat: int | None = None) -> float:
        """Median seconds of one run, by the device's own clock."""
        if self.dry:
            start = time.perf_counter()
            run()
            return max(time.perf_counter() - start, 1e-9)
        run()
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        once = max(time.perf_counter() - start, 1e-5)
        count = repeat or max(5, min(100, int(self.sizes.seconds / once)))
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        torch.cuda.synchronize()
        times = sorted(a.elapsed_time(b) / 1e3 for a, b in pairwise(events))
        return times[len(times) // 2]

    def rand(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.float32).to(self.dtype)

    def bytes_line(self, what: str, seconds: float, moved: int, aim: float | None = None, beside: str = "") -> None:
        """Time against the floor of a kernel that is bound by memory."""
        share = moved / seconds / self.bandwidth
        good = None if aim is None or self.dry else share >= aim
        note = (
            f"{seconds * 1e6:.0f} us, {moved / seconds / 1e9:.0f} GB/s" + (f"; aim {aim:.2f}" if aim else "") + beside
        )
        self.report.add(what, f"{share:.2f} of copy", note, good, seconds=seconds, bytes=moved, share=share)

    def close(self, what: str, actual: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
        """Largest difference, against the largest value."""
        tolerance = tolerance if tolerance is not None else 2e-2 if self.dtype == torch.bfloat16 else 2e-5
        worst = float((actual.float() - expected.float()).abs().max() / expected.float().abs().max().clamp(min=1e-9))
        good = math.isfinite(worst) and worst <= tolerance
        self.report.add(f"right: {what}", f"{worst:.1e}", f"at most {tolerance:.0e}", good, worst=worst)


def limits(b: Bench) -> None:
    """What the hardware does at best in this run."""
    s = b.sizes
    one = torch.zeros(s.copy_bytes, dtype=torch.uint8, device=b.device)
    other = torch.empty_like(one)
    seconds = b.time(lambda: other.copy_(one))
    b.bandwidth = 2 * s.copy_bytes / seconds
    b.report.add("limit: device copy", f"{b.bandwidth / 1e9:.0f} GB/s", "bytes read and written", bandwidth=b.bandwidth)
    x, y = b.rand(s.matrix, s.matrix), b.rand(s.matrix, s.matrix)
    seconds = b.time(lambda: x @ y)
    b.rate = 2 * s.matrix**3 / seconds
    b.report.add("limit: matrix product", f"{b.rate / 1e12:.1f} TFLOP/s", str(b.dtype), rate=b.rate)
    size = min(s.copy_bytes, 1 << 30)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=not b.dry)
    device = torch.empty(size, dtype=torch.uint8, device=b.device)
    b.link_out = size / b.time(lambda: host.copy_(device, non_blocking=True))
    b.link_in = size / b.time(lambda: device.copy_(host, non_blocking=True))
    b.report.add("limit: pinned copy out, in", f"{b.link_out / 1e9:.1f}, {b.link_in / 1e9:.1f}", "GB/s")


def paged(b: Bench, rows: int, start: int, end: int) -> tuple[Tensor, Tensor, Tensor, PagedRows]:
    """Queries, keys, values and rows of equal length over scrambled blocks."""
    s = b.sizes
    each = -(-end // s.block_size)
    order = torch.randperm(rows * each, generator=torch.Generator().manual_seed(1)).view(rows, each)
    caches = [b.rand(rows * each, s.block_size, s.kv_heads, s.dim) for _ in range(2)]
    query = b.rand(rows * (end - start), s.heads, s.dim)
    tables = order.tolist()
    return query, *caches, PagedRows([start] * rows, [end] * rows, tables, s.block_size, b.device)


def attention(b: Bench) -> None:
    s = b.sizes
    scale = s.dim**-0.5
    few = min(2, s.decode_rows)
    for name, rows, start, end in (
        ("decode", few, s.decode_context - 1, s.decode_context),
        ("prefill", few, 0, min(777, s.prefill_tokens)),
        ("chunk with context", few, 13, min(300, s.prefill_tokens)),
    ):
        q, k, v, r = paged(b, rows, start, end)
        expected = paged_attention_reference(q.float(), k.float(), v.float(), r, scale)
        b.close(f"attention, {name}", paged_attention(q, k, v, r, scale), expected)
    q, k, v, r = paged(b, s.decode_rows, s.decode_context - 1, s.decode_context)
    seconds = b.time(lambda: paged_attention(q, k, v, r, scale))
    moved = (
        2 * s.decode_rows * s.decode_context * s.kv_heads * s.dim * k.element_size() + 2 * q.numel() * q.element_size()
    )
    group = s.heads // s.kv_heads
    # torch attends over dense keys that are already gathered, which a paged cache does not give it.
    dense = [c[r.block_tables].flatten(1, 2)[:, : s.decode_context].transpose(1, 2).contiguous() for c in (k, v)]
    dq = q.view(s.decode_rows, s.heads, 1, s.dim)
    theirs = b.time(lambda: F.scaled_dot_product_attention(dq, *dense, scale=scale, enable_gqa=group > 1))
    what = f"decode attention {s.decode_rows} x {s.decode_context}"
    b.bytes_line(what, seconds, moved, 0.85, f"; torch on dense keys {theirs * 1e6:.0f} us")
    if b.dry or torch.cuda.get_device_capability() >= (8, 9):
        k, v = (to_cache_type(c, FP8) for c in (k, v))
        seconds = b.time(lambda: paged_attention(q, k, v, r, scale))
        moved = 2 * s.decode_rows * s.decode_context * s.kv_heads * s.dim + 2 * q.numel() * q.element_size()
        b.bytes_line(f"{what}, fp8 cache", seconds, moved)
        q, k, v, r = paged(b, few, s.decode_context - 1, s.decode_context)
        k, v = (to_cache_type(c, FP8) for c in (k, v))
        expected = paged_attention_reference(q.float(), k.float(), v.float(), r, scale)
        b.close("attention, decode, fp8 cache", paged_attention(q, k, v, r, scale), expected)
    q, k, v, r = paged(b, s.prefill_rows, 0, s.prefill_tokens)
    seconds = b.time(lambda: paged_attention(q, k, v, r, scale))
    operations = 4 * s.heads * s.dim * s.prefill_rows * s.prefill_tokens * (s.prefill_tokens + 1) / 2
    dq = q.view(s.prefill_rows, s.prefill_tokens, s.heads, s.dim).transpose(1, 2)
    dk, dv = (b.rand(s.prefill_rows, s.kv_heads, s.prefill_tokens, s.dim) for _ in range(2))
    theirs = b.time(
        lambda: F.scaled_dot_product_attention(dq, dk, dv, is_causal=True, scale=scale, enable_gqa=group > 1)
    )
    share = operations / seconds / b.rate
    b.report.add(
        f"prefill attention {s.prefill_rows} x {s.prefill_tokens}",
        f"{share:.2f} of matrix",
        f"{seconds * 1e3:.2f} ms, {operations / seconds / 1e12:.0f} TFLOP/s; aim 0.60; torch {theirs * 1e3:.2f} ms",
        None if b.dry else share >= 0.60,
        seconds=seconds,
        share=share,
        torch_seconds=theirs,
    )


def cache_moves(b: Bench) -> None:
    s = b.sizes
    blocks = -(-s.written_tokens // s.block_size) + 1
    caches = [torch.zeros(blocks, s.block_size, s.kv_heads, s.dim, device=b.device, dtype=b.dtype) for _ in range(2)]
    new = [b.rand(s.written_tokens, s.kv_heads, s.dim) for _ in range(2)]
    slots = torch.randperm(blocks * s.block_size, device=b.device)[: s.written_tokens].contiguous()
    slots[::7] = -1
    write_kv(*new, slots, *caches)
    again = [torch.zeros_like(c) for c in caches]
    write_kv_reference(*new, slots, *again)
    for name, one, other in zip(("keys", "values"), caches, again, strict=True):
        b.close(f"write_kv, {name}, with padding", one, other, 0.0)
    slots = torch.randperm(blocks * s.block_size, device=b.device)[: s.written_tokens].contiguous()
    moved = 4 * new[0].numel() * new[0].element_size()
    seconds = b.time(lambda: write_kv(*new, slots, *caches))
    theirs = b.time(lambda: write_kv_reference(*new, slots, *caches))
    b.bytes_line(f"write_kv {s.written_tokens} tokens", seconds, moved, 0.85, f"; torch {theirs * 1e6:.0f} us")
    shape = (s.layers, 2, 2 * s.copied_blocks, s.block_size, s.kv_heads, s.dim)
    pool = torch.zeros(shape, device=b.device, dtype=b.dtype)
    pool[:, :, : s.copied_blocks] = b.rand(s.layers, 2, s.copied_blocks, *shape[3:])
    sources = torch.randperm(s.copied_blocks, device=b.device)
    targets = torch.randperm(s.copied_blocks, device=b.device) + s.copied_blocks
    words = as_words(pool)
    launch_move_blocks(words, words, sources, targets)
    b.close("copy_blocks", pool[:, :, targets[:4]], pool[:, :, sources[:4]], 0.0)
    moved = pool.numel() * pool.element_size()
    seconds = b.time(lambda: launch_move_blocks(words, words, sources, targets))
    few = max(1, s.copied_blocks // 16)  # torch needs room for a gathered copy
    theirs = b.time(lambda: pool.index_copy_(2, targets[:few], pool.index_select(2, sources[:few])))
    theirs *= s.copied_blocks / few
    b.bytes_line(f"copy_blocks {s.copied_blocks} blocks", seconds, moved, 0.85, f"; torch {theirs * 1e6:.0f} us")


def swaps(b: Bench) -> None:
    s = b.sizes
    inner = (s.block_size, s.kv_heads, s.dim)
    device = b.rand(s.layers, 2, s.swapped_blocks, *inner)
    before = device.clone() if b.dry else device[:, :, :8].clone()
    host = host_blocks(s.layers, s.swapped_blocks, inner, b.dtype, pin_memory=not b.dry, by_block=True)
    swapper = Swapper(device, host)
    pairs = [((i * 7 + 3) % s.swapped_blocks if s.swapped_blocks % 7 else i, i) for i in range(s.swapped_blocks)]
    back = [(target, source) for source, target in pairs]
    moved = device.numel() * device.element_size()

    def timed(run: Callable[[], None]) -> float:
        times = []
        for _ in range(1 if b.dry else 5):
            _wait(b)
            start = time.perf_counter()
            run()
            swapper.synchronize()
            _wait(b)
            times.append(time.perf_counter() - start)
        return sorted(times)[len(times) // 2]

    swapper.swap_out(pairs)
    swapper.synchronize()
    device.zero_()
    swapper.swap_in(back)
    _wait(b)
    b.close("swap out and in", device[:, :, : before.shape[2]], before, 0.0)
    for name, run, link in (
        ("out", lambda: swapper.swap_out(pairs), b.link_out),
        ("in", lambda: swapper.swap_in(back), b.link_in),
    ):
        seconds = timed(run)
        share = moved / seconds / link
        note = f"{moved / seconds / 1e9:.1f} GB/s; aim 0.90"
        good = None if b.dry else share >= 0.9
        b.report.add(f"swap {name} {s.swapped_blocks} blocks", f"{share:.2f} of pinned", note, good, seconds=seconds)


def _wait(b: Bench) -> None:
    if not b.dry:
        torch.cuda.synchronize()


def small_kernels(b: Bench) -> None:
    s = b.sizes
    item = torch.empty(0, dtype=b.dtype).element_size()
    x, residual, weight = b.rand(s.norm_rows, s.hidden), b.rand(s.norm_rows, s.hidden), b.rand(s.hidden)
    b.close("rms_norm", rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))
    b.close(
        "layer_norm",
        layer_norm(x, weight, weight, 1e-5),
        F.layer_norm(x.float(), (s.hidden,), weight.float(), weight.float(), 1e-5),
    )
    moved = s.norm_rows * s.hidden * item
    b.bytes_line(f"rms_norm {s.norm_rows} x {s.hidden}", b.time(lambda: rms_norm(x, weight, 1e-5)), 2 * moved)
    seconds = b.time(lambda: add_rms_norm(x, residual, weight, 1e-5))
    b.bytes_line("rms_norm with residual", seconds, 4 * moved)
    b.bytes_line("layer_norm", b.time(lambda: layer_norm(x, weight, weight, 1e-5)), 2 * moved)
    gate = b.rand(s.norm_rows // 2, 2 * s.intermediate)
    b.close("silu_mul", silu_mul(gate), silu_mul_reference(gate.float()))
    b.bytes_line("silu_mul", b.time(lambda: silu_mul(gate)), 3 * gate.numel() // 2 * item)
    heads = s.heads + s.kv_heads
    q = b.rand(s.norm_rows, heads + s.kv_heads, s.dim)[:, :heads]
    angle = torch.rand(s.norm_rows, s.dim // 2, device=b.device) * 6
    cos, sin = angle.cos(), angle.sin()
    b.close("rotary", rotary(q, cos, sin), rotary_reference(q, cos, sin))
    b.bytes_line("rotary", b.time(lambda: rotary(q, cos, sin)), 2 * s.norm_rows * heads * s.dim * item)


def sampling(b: Bench) -> None:
    s = b.sizes
    rows = s.sampled_rows
    logits = torch.randn(rows, s.vocab, device=b.device) * 4

    def arguments(heat: float, k: int, p: float) -> tuple[Tensor, ...]:
        real = [torch.full((rows,), x, dtype=torch.float64, device=b.device) for x in (heat, p, 0.0)]
        each = torch.arange(rows, device=b.device)
        keys = draw_keys(each, each * 0, each * 3)
        return real[0], torch.full((rows,), min(k, s.vocab), device=b.device), real[1], real[2], keys

    floor = rows * s.vocab * 4
    for name, heat, k, p in (
        ("greedy", 0.0, s.vocab, 1.0),
        ("temperature", 1.0, s.vocab, 1.0),
        ("top-k 50", 1.0, 50, 1.0),
        ("top-p 0.9", 0.5, s.vocab, 0.9),
        ("top-k 50, top-p 0.9", 0.8, 50, 0.9),
    ):
        given = arguments(heat, k, p)
        few = min(rows, 8)
        drawn = sample(logits[:few], *(a[:few].contiguous() for a in given))
        expected = sample_reference(logits[:few], *(a[:few] for a in given))
        wrong = int((drawn != expected).sum())
        b.report.add(f"right: sample, {name}", f"{wrong} of {few}", "draws that differ", wrong == 0)
        seconds = b.time(lambda given=given: sample(logits, *given))  # type: ignore[misc]
        passes = seconds * b.bandwidth / floor
        good = None if b.dry else passes <= 3
        b.report.add(
            f"sample {rows} x {s.vocab}, {name}", f"{passes:.1f} passes", f"{seconds * 1e6:.0f} us; aim 3", good
        )
    ids = torch.arange(rows * 4, device=b.device).view(rows, 4) % s.vocab
    starts = torch.arange(rows + 1, device=b.device) * 4
    factors = [torch.full((rows,), f, device=b.device) for f in (1.2, 0.3, 0.1)]
    one, other = logits.clone(), logits.clone()
    penalize(one, ids.flatten(), ids.flatten() % 3, starts, *factors)
    penalize_reference(other, ids.flatten(), ids.flatten() % 3, starts, *factors)
    b.close("penalize", one, other, 1e-6)


class FirstToken(Sampler):
    """Greedy, without what an answer to a user needs: the step's own time is asked for."""

    def sample(self, logits: Tensor, draws: Any) -> list[Sampled | Exception]:
        return [Sampled(token) for token in logits.argmax(-1).tolist()]


def model_steps(b: Bench) -> None:
    """Decode steps of a model shaped like Llama 3 8B, random weights."""
    s = b.sizes
    config = ModelConfig(
        "LlamaForCausalLM",
        s.vocab,
        s.hidden,
        s.intermediate,
        num_layers=s.layers,
        num_heads=s.heads,
        num_kv_heads=s.kv_heads,
        head_dim=s.dim,
        max_position=2 * s.model_context,
    )
    model = LlamaModel(config, RandomWeights(0, b.dtype, b.device))
    most = max(s.batches)
    each = -(-2 * s.model_context // s.block_size)
    cache = KVCache(config, most * each, 0, s.block_size, b.dtype, b.device)
    cache.device_pool.normal_()
    sampler = FirstToken(s.vocab, ())
    runner = GpuRunner(model, config, cache, b.device, sampler, most, 2 * s.model_context)
    weights = sum(t.numel() * t.element_size() for t in _tensors(model))
    for batch in s.batches:
        params = SamplingParams(temperature=0)
        states = {str(i): RequestState(str(i), [1] * s.model_context, params, 0, [[2]]) for i in range(batch)}
        steps = 2 if b.dry else 24
        times: list[float] = []
        runner.times.prepare = runner.times.launch = 0.0
        for step in range(steps):
            if step == steps // 2:  # the first half captures and warms
                runner.times.prepare = runner.times.launch = 0.0
                times.clear()
            _wait(b)
            start = time.perf_counter()
            plan = _decode_plan(states, each, s.block_size, s.model_context + step)
            planned = time.perf_counter() - start
            output = runner.execute(plan, states)
            times.append(time.perf_counter() - start - planned)
            for (name, branch), drawn in output.samples.items():
                states[name].outputs[branch].append(drawn.token_id)
        seconds = sorted(times)[len(times) // 2]
        host = (runner.times.prepare + runner.times.launch) / len(times)
        kv = 2 * s.layers * batch * s.model_context * s.kv_heads * s.dim * torch.empty(0, dtype=b.dtype).element_size()
        floor = (weights + kv) / b.bandwidth
        note = f"{seconds * 1e3:.2f} ms, host {host / seconds:.0%} of it, floor {floor / seconds:.2f}"
        good = None if b.dry or batch != 64 else host / seconds <= 0.10
        name = f"decode step, batch {batch}, context {s.model_context}"
        if batch == 64:
            note += "; aim host <= 10%"
        b.report.add(name, f"{1 / seconds:.1f} steps/s", note, good, seconds=seconds, host_seconds=host, floor=floor)


def _tensors(model: LlamaModel) -> list[Tensor]:
    """What a decode step reads of the weights: all but the embedding."""
    parts = [*(value for layer in model.layers for value in vars(layer).values()), model.head]
    parts += [inner for part in parts if isinstance(part, PlainLinear) for inner in (part.weight, part.bias)]
    return [part for part in parts if isinstance(part, Tensor)]


def _decode_plan(states: dict[str, RequestState], blocks: int, block_size: int, end: int) -> Plan:
    """Every request computes position `end`; its blocks are its own."""

    class Group:
        def __init__(self, request_id: str) -> None:
            self.request_id = request_id

    rows = []
    for i, name in enumerate(states):
        table = list(range(i * blocks, i * blocks + end // block_size + 1))
        slot = table[end // block_size] * block_size + end % block_size
        rows.append(ScheduledSequence(Group(name), 0, end, end + 1, table, [slot], (0,)))  # type: ignore[arg-type]
    return Plan.of_rows(rows)


def device_tests(b: Bench, seconds: int) -> None:
    """The tests of kernels and runner, compiled for the device."""
    environment = {**os.environ, "TRITON_INTERPRET": "1" if b.dry else "0"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        "tests/kernels/test_on_device.py",
        *(["-k", "swaps or writes"] if b.dry else []),  # the interpreter takes minutes for the rest
    ]
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        b.report.add("right: tests on the device", "no end", f"after {seconds} s", False)
        return
    last = (done.stdout.strip().splitlines() or [done.stderr[-200:]])[-1]
    b.report.add(
        "right: tests on the device", "passed" if done.returncode == 0 else "FAILED", last, done.returncode == 0
    )


PARTS: tuple[Callable[[Bench], None], ...] = (
    limits,
    attention,
    cache_moves,
    swaps,
    small_kernels,
    sampling,
    model_steps,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where figures.json goes")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, at toy sizes")
    parser.add_argument(
        "--budget", type=float, default=330.0, help="seconds; a part that would start later is left out"
    )
    parser.add_argument("--no-tests", action="store_true", help="figures alone")
    arguments = parser.parse_args()
    if not arguments.dry_run and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --dry-run runs the same code on the CPU")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    b = Bench(arguments.dry_run)
    name = "CPU, dry run: times mean nothing" if b.dry else torch.cuda.get_device_name()
    b.report.figures["device"] = {"name": name, "torch": torch.__version__}
    print(name)
    for part in PARTS:
        spent = time.perf_counter() - started
        if spent > arguments.budget:
            b.report.add(part.__name__, "left out", f"after {spent:.0f} s", None)
            continue
        try:
            with torch.inference_mode():
                part(b)
        except Exception as error:  # one part that fails must not cost the others their figures
            b.report.add(part.__name__, "FAILED", f"{type(error).__name__}: {error}"[:200], False)
        if not b.dry:
            torch.cuda.empty_cache()
        _save(b, arguments.folder, started)
    if not arguments.no_tests:
        device_tests(b, max(20, int(arguments.budget - (time.perf_counter() - started))))
    _save(b, arguments.folder, started)
    print()
    print("\n".join(_text(line) for line in b.report.lines))
    wrong = [
        line.what
        for line in b.report.lines
        if line.good is False and (line.what.startswith("right") or line.value == "FAILED")
    ]
    print(f"{time.perf_counter() - started:.0f} s; wrong: {', '.join(wrong) or 'nothing'}")
    return 1 if wrong else 0


def _save(b: Bench, folder: Path, started: float) -> None:
    """After every part: a run that is cut short keeps what it has."""
    b.report.figures["seconds"] = time.perf_counter() - started
    (folder / "figures.json").write_text(json.dumps(b.report.figures, indent=1))


if __name__ == "__main__":
    sys.exit(main())
