"""Engine arguments: what a user may set, checked, and turned into capacities for scheduler and cache."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError
from engine.scheduler import SchedulerConfig

if TYPE_CHECKING:
    from engine.models.config import ModelConfig


GIB = 1 << 30
CPU_POOL_LIMIT = 4 * GIB  # a pool in main memory beyond this only postpones preemption
DEVICES = ("auto", "cpu", "cuda")
QUANTIZATIONS = (None, "gguf")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")


@dataclass(kw_only=True)
class EngineArgs:
    """Arguments of `LLM` and of the command line, with vLLM's names.

    model: a Hugging Face directory, a .gguf file, or "smollm2-135m" (the embedded model).
    tokenizer: where the tokenizer lies, if not with the model.  skip_tokenizer_init: token ids in and out, no text.
    dtype: auto, float32, float16 or bfloat16.
    kv_cache_dtype: auto for that of the model; fp8 or fp8_e4m3 (the same) for 8 bits: twice or four times the blocks in
        the same memory, and keys and values rounded to 3 bits behind the first.
    seed: of the engine; requests without a seed of their own draw theirs from it, each a fresh one.
    max_model_len: most tokens of a sequence; default what the model was made for.
    block_size: tokens a KV cache block holds.
    max_num_batched_tokens, max_num_seqs: budgets of a step; default 2048 (at least max_model_len with chunking off)
        and min(256, max_num_batched_tokens).
    enable_chunked_prefill: decodes first and prompts in pieces (default), or whole prompts first.
    preemption_mode: "swap", "recompute" or None: recompute for one sequence, swap for several.
    swap_space: GiB of main memory for swapped groups; 0 for none.
    gpu_memory_utilization: part of the device's free memory that the KV pool may take, above 0 and at most 1.
    num_gpu_blocks_override, num_cpu_blocks_override: sizes of the pool and of the swap area in blocks, instead of the
        two above.
    watermark: part of the pool that an admission leaves free while others run, from 0 to below 1.
    device: auto, cpu or cuda.  load_format: auto, safetensors, pt, gguf or dummy (random weights).
    disable_log_stats: no log line every five seconds.
    record_trace: a file that the scheduler's trace is written to, one line a step, for `lawful audit`.
    quantization: None, or "gguf": on a CPU, multiply a few rows with the 4 or 8 bits of a .gguf file as they are.
    tensor_parallel_size, trust_remote_code: only 1 and False are supported.
    """

    model: str = "smollm2-135m"
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    seed: int | None = 0
    max_model_len: int | None = None
    block_size: int = 16
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    enable_chunked_prefill: bool = True
    preemption_mode: str | None = None
    swap_space: float = 4
    gpu_memory_utilization: float = 0.9
    num_gpu_blocks_override: int | None = None
    num_cpu_blocks_override: int | None = None
    watermark: float = 0.01
    device: str = "auto"
    load_format: str = "auto"
    disable_log_stats: bool = False
    record_trace: str | None = None
    tensor_parallel_size: int = 1
    quantization: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model is {self.model!r}; it must be a path or the name of an embedded model")
        if self.quantization not in QUANTIZATIONS:
            raise ConfigError(f"quantization is {self.quantization!r}; allowed are None and 'gguf'")
        for name, only in (("tensor_parallel_size", 1), ("trust_remote_code", False)):
            if getattr(self, name) != only:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; only {only!r} is supported")
        if self.device not in DEVICES:
            raise ConfigError(f"device is {self.device!r}; allowed are {', '.join(DEVICES)}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ConfigError(f"kv_cache_dtype is {self.kv_cache_dtype!r}; allowed are {', '.join(KV_CACHE_DTYPES)}")
        if not _is_number(self.swap_space) or not 0 <= self.swap_space < float("inf"):
            raise ConfigError(f"swap_space is {self.swap_space!r} GiB; it must be a number of 0 or more")
        if not _is_number(self.gpu_memory_utilization) or not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization!r}; it must be above 0 and at most 1"
            )
        if not _is_number(self.watermark) or not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark is {self.watermark!r}; it must be at least 0 and below 1")
        for name, low in (
            ("block_size", 1),
            ("max_model_len", 2),
            ("max_num_batched_tokens", 1),
            ("max_num_seqs", 1),
            ("num_gpu_blocks_override", 1),
            ("num_cpu_blocks_override", 0),
        ):
            value = getattr(self, name)
            if value is None and name != "block_size":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ConfigError(f"{name} is {value!r}; it must be an int of at least {low}")
        for name in ("skip_tokenizer_init", "enable_chunked_prefill", "disable_log_stats"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        if self.seed is not None and (not isinstance(self.seed, int) or isinstance(self.seed, bool)):
            raise ConfigError(f"seed is {self.seed!r}; it must be an int or None")

    @classmethod
    def names(cls) -> list[str]:
        """The accepted argument names."""
        return [item.name for item in fields(cls)]

    def resolve_device(self) -> str:
        """cpu or cuda.  Raises ConfigError when cuda was asked for and there is none."""
        if self.device == "cpu":
            return "cpu"
        import torch

        if torch.cuda.is_available():
            return "cuda"
        if self.device == "cuda":
            raise ConfigError("device is 'cuda' but torch sees no CUDA device; use 'cpu' or 'auto'")
        return "cpu"

    def scheduler_config(
        self, model: ModelConfig, block_bytes: int, device: str, memory: int | None = None
    ) -> SchedulerConfig:
        """Capacities from memory or from the overrides.

        block_bytes: bytes of one block, keys and values of all layers.
        memory: free bytes on the device; None to ask it.
        Raises ConfigError when the pool holds no block or cannot hold one sequence of an explicit max_model_len.
        """
        try:
            max_model_len = model.check_max_model_len(self.max_model_len)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        served = max_model_len  # lowered to the pool below, unless it was asked for
        if self.num_gpu_blocks_override is not None and self.max_model_len is None:
            served = min(served, max(2, self.num_gpu_blocks_override * self.block_size))
        config = SchedulerConfig(  # checks the rest of the arguments before any memory is counted
            num_gpu_blocks=1,
            block_size=self.block_size,
            max_model_len=served,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            enable_chunked_prefill=self.enable_chunked_prefill,
            preemption_mode=self.preemption_mode,
        )
        most = config.seqs * -(-max_model_len // self.block_size)  # what all sequences at full length would fill
        gpu = self.num_gpu_blocks_override
        if gpu is None:
            budget = int((free_memory(device) if memory is None else memory) * self.gpu_memory_utilization)
            if device == "cpu":
                budget = min(budget, CPU_POOL_LIMIT)
            gpu = min(budget // block_bytes, most)
            if gpu < 1:
                raise ConfigError(
                    f"the KV cache pool has no block: {budget} bytes are available and a block takes {block_bytes}; "
                    "raise gpu_memory_utilization or set num_gpu_blocks_override"
                )
        cpu = self.num_cpu_blocks_override
        if cpu is None:
            cpu = min(int(self.swap_space * GIB) // block_bytes, most)
        capacity = gpu * self.block_size
        if max_model_len > capacity:
            if self.max_model_len is not None:
                raise ConfigError(
                    f"max_model_len is {max_model_len} but the KV cache pool holds {capacity} tokens ({gpu} blocks of "
                    f"{self.block_size}): a sequence of that length could never run; lower max_model_len to "
                    f"{capacity} or enlarge the pool"
                )
            max_model_len = max(2, capacity)
        return SchedulerConfig(
            num_gpu_blocks=gpu,
            num_cpu_blocks=cpu,
            block_size=self.block_size,
            max_model_len=max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            enable_chunked_prefill=self.enable_chunked_prefill,
            preemption_mode=self.preemption_mode,
            watermark_blocks=int(self.watermark * gpu),
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def free_memory(device: str) -> int:
    """Bytes that are free on the device."""
    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0])
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
