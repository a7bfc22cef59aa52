"""The paged KV cache: one pool of blocks on the device, one in host memory, and the moves between them.

Block ids are the scheduler's.  Nothing here decides anything; a move outside a pool is an error before it starts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.models.config import ModelConfig
from engine.scheduler.plan import BlockPair
from kernels.copy_blocks import copy_blocks
from kernels.dispatch import architecture, uses_triton
from kernels.fp8 import FP8
from kernels.swap_blocks import Swapper, host_blocks, swap_blocks


def cache_type(kv_cache_dtype: str, dtype: torch.dtype, device: torch.device | str) -> torch.dtype:
    """The type of the cache of a model that computes in `dtype`.  kv_cache_dtype: see `EngineArgs`.

    Raises ConfigError for fp8 on a GPU that cannot convert it.
    """
    if kv_cache_dtype == "auto":
        return dtype
    place = torch.device(device)
    if place.type == "cuda" and architecture(place) < 89:
        raise ConfigError(
            f"kv_cache_dtype is {kv_cache_dtype!r}, but {torch.cuda.get_device_name(place)} has no fp8 (that takes "
            "compute capability 8.9); only 'auto' is allowed there"
        )
    return FP8


def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes, keys and values of all layers."""
    return 2 * config.num_layers * block_size * config.num_kv_heads * config.head_dim * dtype.itemsize


class KVCache:
    """Keys and values of every layer, in blocks of `block_size` tokens.

    dtype: of what is kept; that of the model, or float8_e4m3fn whatever the model computes in.
    device_pool, host_pool: (layers, 2, blocks, block_size, kv_heads, head_dim), keys at 0 and values at 1 of the
        second dimension.  The host pool is the swap area; where kernels serve, it is pinned, and in memory a block's
        layers lie together.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Raises ValueError for negative counts or an empty block; torch's own error when memory does not suffice."""
        if num_gpu_blocks < 0 or num_cpu_blocks < 0 or block_size < 1:
            raise ValueError(f"KV cache of {num_gpu_blocks} GPU and {num_cpu_blocks} CPU blocks of {block_size} tokens")
        self.num_layers = config.num_layers
        self.num_gpu_blocks = num_gpu_blocks
        self.num_cpu_blocks = num_cpu_blocks
        self.block_size = block_size
        self.bytes_per_block = bytes_per_block(config, block_size, dtype)
        place = torch.device(device)
        inner = (block_size, config.num_kv_heads, config.head_dim)
        # Not zeroed: no kernel reads a slot that was not written, and memory that is never used is never touched.
        self.device_pool = torch.empty((config.num_layers, 2, num_gpu_blocks, *inner), dtype=dtype, device=place)
        kernels_serve = uses_triton(self.device_pool)
        pinned = place.type == "cuda" and num_cpu_blocks > 0
        self.host_pool = host_blocks(config.num_layers, num_cpu_blocks, inner, dtype, pinned, by_block=kernels_serve)
        swaps = kernels_serve and num_cpu_blocks > 0 and num_gpu_blocks > 0
        self._swapper = Swapper(self.device_pool, self.host_pool) if swaps else None
        self._layers = [(layer[0], layer[1]) for layer in self.device_pool]
        self._flat: list[Tensor] = list(self.device_pool.flatten(1, 3).flatten(2))

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer on the device, each (blocks, block_size, kv_heads, head_dim)."""
        return self._layers[index]

    def flat_layer(self, index: int) -> Tensor:
        """The same memory by slots, (2 * blocks * block_size, kv_heads * head_dim): keys, then values."""
        return self._flat[index]

    def swap_out(self, pairs: Sequence[BlockPair]) -> None:
        """Copy (GPU block, CPU block) pairs to the host.  Raises IndexError, naming the id, before anything moves."""
        if self._swapper is not None:
            self._swapper.swap_out(pairs)
        else:
            swap_blocks(self.device_pool, self.host_pool, pairs, "swap out")

    def swap_in(self, pairs: Sequence[BlockPair]) -> None:
        """Copy (CPU block, GPU block) pairs to the device.  Raises IndexError, naming the id, before anything moves."""
        if self._swapper is not None:
            self._swapper.swap_in(pairs)
        else:
            swap_blocks(self.host_pool, self.device_pool, pairs, "swap in")

    def copy(self, pairs: Sequence[BlockPair]) -> None:
        """Copy (GPU block, GPU block) pairs, all reads before any write.  Raises IndexError likewise."""
        copy_blocks(self.device_pool, pairs)
