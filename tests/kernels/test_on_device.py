"""What only a GPU can show: kernels as compiled, graphs, streams.  `TRITON_INTERPRET=0 pytest -m gpu`.

Without a GPU the same tests run through the interpreter when they are asked for by `-m gpu`.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from engine.cache import KVCache
from engine.gpu_runner import GpuRunner
from engine.models.config import ModelConfig
from engine.models.llama import LlamaModel
from engine.models.weights import RandomWeights
from engine.request import RequestState
from engine.runner import ModelRunner
from engine.sampler import Sampler
from engine.sampling import SamplingParams
from kernels.copy_blocks import copy_blocks
from kernels.dispatch import choose
from kernels.fp8 import FP8, to_cache_type
from kernels.paged_attention import PagedRows, paged_attention, paged_attention_reference
from kernels.rms_norm import add_rms_norm
from kernels.swap_blocks import Swapper, host_blocks
from kernels.write_kv import write_kv
from tests.worlds import R, world

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def form() -> None:
    """In place of the folder's: each test names its form itself."""


def attend(heads: int, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype, cache: torch.dtype) -> None:
    spans = [(0, 5), (36, 37), (5, 30), (700, 701), (130, 191), (0, 1)]
    needed = [-(-end // block_size) for _, end in spans]
    order = torch.randperm(sum(needed) + 2).tolist()
    tables = [[order.pop() for _ in range(n)] for n in needed]
    shape = (len(needed) and sum(needed) + 2, block_size, kv_heads, dim)
    pools = [torch.full(shape, math.nan, device=DEVICE, dtype=torch.float32) for _ in range(2)]
    for (_, end), table in zip(spans, tables, strict=True):
        slots = torch.tensor([table[p // block_size] * block_size + p % block_size for p in range(end)], device=DEVICE)
        for pool in pools:
            pool.view(-1, kv_heads, dim)[slots] = torch.randn(end, kv_heads, dim, device=DEVICE)
    keys, values = (to_cache_type(pool.to(dtype), cache) for pool in pools)
    query = torch.randn(sum(end - start for start, end in spans), heads, dim, device=DEVICE).to(dtype)
    starts, ends = [s for s, _ in spans], [e for _, e in spans]
    with choose("triton"):
        rows = PagedRows(starts, ends, tables, block_size, DEVICE)
        out = paged_attention(query, keys, values, rows, dim**-0.5)
    expected = paged_attention_reference(query.float(), keys.float(), values.float(), rows, dim**-0.5)
    torch.testing.assert_close(out.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dim", [16, 72, 80, 96, 112, 120, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_attention_of_every_head_size(dim: int, dtype: torch.dtype) -> None:
    attend(4, 2, dim, 16, dtype, dtype)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (5, 1), (32, 8), (71, 1), (96, 6)])
@pytest.mark.parametrize("block_size", [1, 8, 32, 64])
def test_attention_of_head_ratios_and_block_sizes(heads: int, kv_heads: int, block_size: int) -> None:
    attend(heads, kv_heads, 64, block_size, HALF, HALF)


def test_attention_over_an_fp8_cache() -> None:
    if DEVICE.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this device has no fp8")
    attend(8, 2, 128, 16, HALF, FP8)


def test_writes_copies_and_norms() -> None:
    new = torch.randn(300, 8, 128, device=DEVICE).to(HALF)
    slots = torch.randperm(640, device=DEVICE)[:300]
    slots[::9] = -1
    for cache in (HALF, FP8):
        if cache == FP8 and DEVICE.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
            continue
        outs: list[list[Tensor]] = []
        for form in ("reference", "triton"):
            caches = [torch.zeros(40, 16, 8, 128, device=DEVICE).to(cache) for _ in range(2)]
            with choose(form):
                write_kv(new, new * 0.5, slots, *caches)
            outs.append([c.float() for c in caches])
        for one, other in zip(*outs, strict=True):
            assert torch.equal(one, other)  # the device's cast and torch's round alike
    pools = [torch.randn(3, 2, 50, 16, 2, 72, device=DEVICE).to(HALF)]
    pools.append(pools[0].clone())
    for form, pool in zip(("reference", "triton"), pools, strict=True):
        with choose(form):
            copy_blocks(pool, [(1, 2), (2, 3), (40, 49), (7, 0)])
    assert torch.equal(*pools)
    x, residual = (torch.randn(70, 4096, device=DEVICE).to(HALF) for _ in range(2))
    weight = torch.randn(4096, device=DEVICE).to(HALF)
    results = []
    for form in ("reference", "triton"):
        with choose(form):
            results.append(add_rms_norm(x, residual, weight, 1e-5))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=2e-2, atol=2e-2)


def test_swaps_keep_their_order_beside_a_busy_stream() -> None:
    """Blocks go out while the stream overwrites them at once, and come back while it reads: nothing is lost."""
    inner = (16, 2, 64)
    device = torch.randn(4, 2, 60, *inner, device=DEVICE).to(HALF)
    before = device.clone()
    host = host_blocks(4, 40, inner, HALF, pin_memory=DEVICE.type == "cuda", by_block=True)
    with choose("triton"):
        swapper = Swapper(device, host, staging_bytes=4 * 2 * 16 * 2 * 64 * 2 * 5)
        pairs = [(i, (i * 11 + 3) % 40) for i in range(40)]
        for _ in range(3):
            swapper.swap_out(pairs)
            device[:, :, :40] = math.nan  # on the current stream, which did not wait for the copies
            swapper.swap_in([(target, 59 - source) for source, target in pairs[:20]])
            assert torch.equal(device[:, :, 40:60].flip(2), before[:, :, :20])
            device.copy_(before)
        swapper.synchronize()


def test_the_runner_with_graphs_gives_what_the_plain_one_gives() -> None:
    config = ModelConfig(
        "LlamaForCausalLM", 131, 64, 96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, max_position=256
    )
    model = LlamaModel(config, RandomWeights(1, torch.float32, DEVICE))
    outputs = []
    shape = (
        [(5, 2, 6), (9, 2, 5), (5, 1, 6), (3, 2, 4)] if DEVICE.type == "cpu" else [(5, 2, 40), (9, 3, 30), (5, 1, 60)]
    )
    for form, gpu in (("reference", 200), ("triton", 8 if DEVICE.type == "cpu" else 40)):
        with choose(form):
            cache = KVCache(config, gpu, 60, 4, torch.float32, DEVICE)
            cache.device_pool.fill_(math.nan)
            sampler = Sampler(config.vocab_size, ())
            runner: ModelRunner
            if form == "triton":
                runner = GpuRunner(model, config, cache, DEVICE, sampler, max_num_seqs=16, max_model_len=128)
            else:
                runner = ModelRunner(model, config, cache, DEVICE, sampler)
            scheduler = world(gpu, 60, 4, 16, length=128)
            states = {}
            for i, (p, n, m) in enumerate(shape):
                scheduler.add(R(p, n, m=m, id=str(i)))
                params = SamplingParams(temperature=0.8 * (i != 2), seed=i, presence_penalty=0.1 * i)
                states[str(i)] = RequestState(str(i), list(range(i, i + p)), params, i, [[] for _ in range(n)])
            while scheduler.has_unfinished():
                plan = scheduler.schedule()
                for (name, branch), drawn in runner.execute(plan, states).samples.items():
                    states[name].outputs[branch].append(drawn.token_id)
                scheduler.update(plan, set())
            outputs.append([state.outputs for state in states.values()])
            if form == "triton" and DEVICE.type == "cuda":
                assert 0 < runner.times.graphs < runner.times.steps  # type: ignore[attr-defined]
    same = [a == b for a, b in zip(*(itertools.chain(*out) for out in outputs), strict=True)]
    assert sum(same) >= len(same) - (DEVICE.type == "cuda")  # float32 in another order: the best two may be that close
