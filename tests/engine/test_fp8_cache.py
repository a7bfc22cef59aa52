"""kv_cache_dtype="fp8": outputs with both forms of the kernels, the memory that it takes, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.cache import KVCache, bytes_per_block, cache_type
from engine.config import EngineArgs
from engine.errors import ConfigError
from engine.gpu_runner import GpuRunner
from engine.models.load import load_config
from kernels.dispatch import choose
from kernels.fp8 import FP8
from tests.engine.paged import make_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # log(0) of a min_p of 0, in the interpreter

PROMPTS = [[5, 6, 7, 8, 9], [11, 12], [3, 4, 5, 6, 7, 8, 9, 10, 11], [40, 41, 42]]
PARAMS = [
    SamplingParams(n=n, temperature=t, max_tokens=m, seed=seed, ignore_eos=True, detokenize=False)
    for n, t, m, seed in [(2, 0.9, 8, 3), (1, 0.0, 9, None), (2, 0.0, 5, None), (3, 0.7, 6, 4)]
]


@pytest.fixture(scope="module", params=["llama", "opt"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    make_checkpoint(request.param, num_hidden_layers=2).save_pretrained(path)
    return path


def engine(checkpoint: Path, gpu: int, **arguments: Any) -> LLM:
    llm = LLM(
        str(checkpoint),
        skip_tokenizer_init=True,
        device="cpu",
        dtype="float32",
        block_size=4,
        max_model_len=24,
        num_gpu_blocks_override=gpu,
        num_cpu_blocks_override=8,
        **{"kv_cache_dtype": "fp8", **arguments},
    )
    cache = llm.core.runner.cache  # type: ignore[attr-defined]
    cache.device_pool.fill_(float("nan"))
    cache.host_pool.fill_(float("nan"))
    return llm


def tokens(llm: LLM) -> list[list[list[int]]]:
    results = llm.generate(prompt_token_ids=PROMPTS, sampling_params=PARAMS, use_tqdm=False)
    return [[c.token_ids for c in r.outputs] for r in results]


def test_both_forms_agree_and_a_pool_too_small_for_all_changes_nothing(checkpoint: Path) -> None:
    with choose("reference"):
        ample = tokens(engine(checkpoint, 60))
        pressed = engine(checkpoint, 8, max_num_batched_tokens=13)
        assert tokens(pressed) == ample
    with choose("triton"):
        kernels = engine(checkpoint, 8, kv_cache_dtype="fp8_e4m3", max_num_batched_tokens=13)
        assert isinstance(kernels.core.runner, GpuRunner)
        assert kernels.core.runner.cache.device_pool.dtype == FP8
        assert tokens(kernels) == ample
    for llm in (pressed, kernels):
        stats = llm.stats
        assert stats["preemptions"]
        assert stats["blocks_swapped_out"]
        assert stats["blocks_copied"]
    plain = tokens(engine(checkpoint, 60, kv_cache_dtype="auto"))
    assert plain != ample  # the rounding shows: the cache is not the model's
    assert [len(branch) for r in plain for branch in r] == [len(branch) for r in ample for branch in r]


def test_a_block_takes_a_byte_a_number_so_more_blocks_fit(checkpoint: Path) -> None:
    config = load_config(str(checkpoint))
    sizes = {}
    for name in ("auto", "fp8", "fp8_e4m3"):
        args = EngineArgs(model=str(checkpoint), kv_cache_dtype=name, max_num_seqs=64)
        kind = cache_type(name, torch.float16, "cpu")
        block = bytes_per_block(config, 16, kind)
        fits = args.scheduler_config(config, block, "cpu", memory=1 << 18).num_gpu_blocks
        cache = KVCache(config, fits, 3, 16, kind)
        assert cache.device_pool.numel() * cache.device_pool.itemsize == fits * block <= 0.9 * (1 << 18)
        assert cache.host_pool.dtype == kind
        sizes[name] = fits
    assert sizes["fp8"] == sizes["fp8_e4m3"]
    assert sizes["fp8"] in (2 * sizes["auto"], 2 * sizes["auto"] + 1)


@pytest.mark.parametrize("wrong", ["fp8_e5m2", "float16", "FP8", "", None, 8])
def test_another_type_is_refused_naming_what_is_allowed(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype is .*; allowed are auto, fp8, fp8_e4m3"):
        EngineArgs(kv_cache_dtype=wrong)


def test_a_gpu_without_fp8_refuses_it_and_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.cache.architecture", lambda device: 80)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "an older one")
    assert cache_type("auto", torch.bfloat16, "cuda") == torch.bfloat16
    with pytest.raises(ConfigError, match=r"'fp8', but an older one has no fp8 .*only 'auto' is allowed"):
        cache_type("fp8", torch.bfloat16, "cuda")
    monkeypatch.setattr("engine.cache.architecture", lambda device: 89)
    assert cache_type("fp8", torch.bfloat16, "cuda") == FP8
