"""Move whole blocks between the device's pool and host memory, keys and values of all layers.

    target_pool[:, :, target] = source_pool[:, :, source]      for every pair (source, target)

both pools (layers, 2, blocks, block_size, kv_heads, head_dim), equal but for the number of blocks

On a GPU a block takes two hops.  Between pool and staging memory on the device a kernel gathers or scatters, at the
device's own bandwidth; between staging and pinned memory runs of neighbouring host blocks go as one copy each, large
enough for the link when the host pool keeps a block's layers together (`host_blocks`).  The second hop is the slow one
and runs on a stream of its own, beside the step's compute; `Swapper` holds that stream and the order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kernels.copy_blocks import as_words, launch_move_blocks
from kernels.dispatch import uses_triton
from kernels.fp8 import movable
from kernels.pairs import BlockPair, check_pairs, pair_indices

STAGING_BYTES = 256 << 20  # beyond a few MB a copy runs at the link's full speed; this holds the victims of most steps


def swap_blocks_reference(source_pool: Tensor, target_pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    """The meaning, also the CPU path.  Index tensors lie on the CPU."""
    source_pool, target_pool = movable(source_pool), movable(target_pool)
    moved = source_pool.index_select(2, sources.to(source_pool.device))
    target_pool.index_copy_(2, targets.to(target_pool.device), moved.to(target_pool.device))


def host_blocks(
    layers: int, blocks: int, inner: Sequence[int], dtype: torch.dtype, pin_memory: bool, by_block: bool
) -> Tensor:
    """An empty host pool (layers, 2, blocks, *inner).

    by_block: in memory a block's layers lie together, so that a run of blocks is one contiguous piece.
    """
    if not by_block:
        return torch.empty((layers, 2, blocks, *inner), dtype=dtype, pin_memory=pin_memory)
    memory = torch.empty((blocks, layers, 2, *inner), dtype=dtype, pin_memory=pin_memory)
    return memory.permute(1, 2, 0, *range(3, memory.dim()))


def runs(ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first index, length) of each maximal run of ids that follow each other: 3 4 5 9 gives (0, 3), (3, 1)."""
    first = 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or ids[i] != ids[i - 1] + 1:
            yield first, i - first
            first = i


class Swapper:
    """Swaps between one device pool and one host pool, in the plan's order, as far as possible beside the compute.

    Guarantees, whatever the streams do:
    - a block that is swapped out is read before anything that the current stream is given later can overwrite it;
    - a block that is swapped in is there for everything that the current stream is given later;
    - moves reach the host pool in the order of the calls, so what went out comes back as it was.
    """

    def __init__(self, device_pool: Tensor, host_pool: Tensor, staging_bytes: int = STAGING_BYTES) -> None:
        """Raises ValueError for pools that differ."""
        check_pools(device_pool, host_pool, "swap")
        self.device_pool = device_pool
        self.host_pool = host_pool
        self._device = as_words(device_pool)
        self._host = as_words(host_pool)
        if self._device.dtype != self._host.dtype:  # one of the two is not aligned as the other
            raise ValueError(f"swap: pools of strides {device_pool.stride()} and {host_pool.stride()} do not match")
        layers, _, _, words = self._device.shape
        block_bytes = max(1, layers * 2 * words * self._device.itemsize)
        blocks = max(1, min(staging_bytes // block_bytes, host_pool.shape[2]))
        memory = self._device.new_empty((blocks, layers, 2, words))
        self._staging = memory.permute(1, 2, 0, 3)
        self._places = torch.arange(blocks, device=device_pool.device)
        self._stream = torch.cuda.Stream() if device_pool.is_cuda else None
        self._busy: torch.cuda.Event | None = None  # the last use of the staging memory

    def swap_out(self, pairs: Sequence[BlockPair]) -> None:
        """Copy (device block, host block) pairs.  Only the gather holds the current stream up."""
        check_pairs(pairs, self.device_pool.shape[2], self.host_pool.shape[2], "swap out")
        for chunk in self._chunks(sorted(pairs, key=lambda pair: pair[1])):
            sources, _ = pair_indices(chunk)
            self._wait_for_staging()
            launch_move_blocks(self._device, self._staging, self._on_device(sources), self._places)
            with self._side():
                self._copy_runs([target for _, target in chunk], out=True)

    def swap_in(self, pairs: Sequence[BlockPair]) -> None:
        """Copy (host block, device block) pairs.  What the current stream does next waits for them."""
        check_pairs(pairs, self.host_pool.shape[2], self.device_pool.shape[2], "swap in")
        for chunk in self._chunks(sorted(pairs)):
            _, targets = pair_indices(chunk)
            with self._side():  # the last scatter out of the staging memory is done before it is filled again
                self._copy_runs([source for source, _ in chunk], out=False)
            self._wait_for_staging()
            launch_move_blocks(self._staging, self._device, self._places[: len(chunk)], self._on_device(targets))

    def synchronize(self) -> None:
        """Returns when every move is done; raises what the device has to say against one."""
        if self._stream is not None:
            self._stream.synchronize()

    def _chunks(self, pairs: list[BlockPair]) -> Iterator[list[BlockPair]]:
        size = len(self._places)
        return (pairs[i : i + size] for i in range(0, len(pairs), size))

    def _on_device(self, ids: Tensor) -> Tensor:
        return ids.pin_memory().to(self._device.device, non_blocking=True) if self._stream is not None else ids

    def _wait_for_staging(self) -> None:
        if self._busy is not None:
            torch.cuda.current_stream().wait_event(self._busy)

    def _side(self) -> _Side:
        return _Side(self)

    def _copy_runs(self, host_ids: list[int], out: bool) -> None:
        """Host blocks, in order, to or from the staging memory."""
        for first, length in runs(host_ids):
            at = host_ids[first]
            for host, staged in pieces(self._host[:, :, at : at + length], self._staging[:, :, first : first + length]):
                target, source = (host, staged) if out else (staged, host)
                target.copy_(source, non_blocking=True)


def pieces(host: Tensor, staged: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The same blocks in both, (layers, 2, blocks, words), cut so that each piece of the host is contiguous."""
    by_block = host.permute(2, 0, 1, 3)
    if by_block.is_contiguous():
        yield by_block, staged.permute(2, 0, 1, 3)
        return
    for layer in range(host.shape[0]):
        for part in range(2):
            yield host[layer, part], staged[layer, part]


class _Side:
    """The side stream, after all that the current stream was given; notes when it is done."""

    def __init__(self, swapper: Swapper) -> None:
        self._swapper = swapper
        self._context = torch.cuda.stream(swapper._stream) if swapper._stream is not None else None

    def __enter__(self) -> None:
        if self._context is not None:
            assert self._swapper._stream is not None
            self._swapper._stream.wait_stream(torch.cuda.current_stream())
            self._context.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._context is not None:
            assert self._swapper._stream is not None
            self._swapper._busy = self._swapper._stream.record_event()
            self._context.__exit__(*error)


def check_pools(source_pool: Tensor, target_pool: Tensor, move: str) -> None:
    """Raises ValueError for pools that differ in more than the number of blocks."""
    if source_pool.shape[:2] != target_pool.shape[:2] or source_pool.shape[3:] != target_pool.shape[3:]:
        raise ValueError(f"{move}: pools {tuple(source_pool.shape)} and {tuple(target_pool.shape)} do not match")
    if source_pool.dtype != target_pool.dtype:
        raise ValueError(f"{move}: pools hold {source_pool.dtype} and {target_pool.dtype}")


def swap_blocks(source_pool: Tensor, target_pool: Tensor, pairs: Sequence[BlockPair], move: str = "swap") -> None:
    """Copy block `source` of one pool to block `target` of the other for every pair.  No pairs: nothing happens.

    move: the word for error messages ("swap out" or "swap in").  Contents of the source stay as they are.
    This is the whole swap in one call; an engine keeps a `Swapper`, which leaves the copies running beside its compute.
    Raises IndexError for a block outside its pool and ValueError for pools that differ or a repeated target, before
    anything is copied.
    """
    check_pools(source_pool, target_pool, move)
    if not pairs:
        return
    check_pairs(pairs, source_pool.shape[2], target_pool.shape[2], move)
    on_device = [uses_triton(pool) for pool in (source_pool, target_pool)]
    if not any(on_device):
        swap_blocks_reference(source_pool, target_pool, *pair_indices(pairs))
    elif on_device[0] and not target_pool.is_cuda:
        swapper = Swapper(source_pool, target_pool)
        swapper.swap_out(pairs)
        swapper.synchronize()
    elif on_device[1]:
        swapper = Swapper(target_pool, source_pool)
        swapper.swap_in(pairs)
        swapper.synchronize()
    else:
        raise ValueError(f"{move}: one of the pools must lie in host memory")
