"""Watches the memory accesses of kernels that run in Triton's interpreter: an address that is not allowed raises first.

With `watched(...)` a launch is checked lane by lane: in `strict` mode every active lane must lie in one of the regions;
otherwise only lanes that fall into a `fenced` tensor must, and there only on elements that are named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.runtime import interpreter


class AccessError(Exception):
    """A lane touched what it must not."""


@dataclass
class Region:
    """The elements of a strided tensor whose dimensions nest: outermost first."""

    name: str
    base: int
    itemsize: int
    shape: Sequence[int]
    strides: Sequence[int]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Region:
        return cls(name, tensor.data_ptr(), tensor.itemsize, tuple(tensor.shape), tensor.stride())

    def holds(self, addresses: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        off = addresses.astype(np.int64) - self.base
        good = (off >= 0) & (off % self.itemsize == 0)
        off = off // self.itemsize
        for extent, stride in sorted(zip(self.shape, self.strides, strict=True), key=lambda d: -d[1]):
            at = off // max(stride, 1)
            good &= at < extent
            off = off - at * stride
        return good & (off == 0)


@dataclass
class Fence:
    """A tensor of which only some elements may be touched: `allowed` is a bool tensor of its shape."""

    name: str
    tensor: Tensor
    allowed: Tensor

    def wrong(self, addresses: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        start = self.tensor.data_ptr()
        off = addresses.astype(np.int64) - start
        inside = (off >= 0) & (off < self.tensor.numel() * self.tensor.itemsize)
        flat = self.allowed.reshape(-1).numpy()
        at = np.where(inside, off // self.tensor.itemsize, 0)
        return inside & ~flat[at]


@dataclass
class Log:
    """Addresses that were written, by program."""

    stores: list[np.ndarray[Any, Any]] = field(default_factory=list)
    loads: list[np.ndarray[Any, Any]] = field(default_factory=list)

    def written(self) -> set[int]:
        return {int(a) for addresses in self.stores for a in addresses}

    def touched(self) -> set[int]:
        return self.written() | {int(a) for addresses in self.loads for a in addresses}


@contextmanager
def watched(
    regions: Sequence[Region] = (),
    fences: Sequence[Fence] = (),
    strict: bool = False,
    program: tuple[int, int, int] | None = None,
) -> Iterator[Log]:
    """Check every access.  program: what `program_id` answers, for a launch with a grid of one."""
    log = Log()
    builder = interpreter.InterpreterBuilder
    kept = {name: getattr(builder, name) for name in ("create_masked_load", "create_masked_store")}
    program_id, restore = builder.create_get_program_id, interpreter.GridExecutor._restore_args_dev

    def check(kind: str, ptrs: Any, mask: Any) -> np.ndarray[Any, Any]:
        lanes, active = np.broadcast_arrays(ptrs.data, mask.data)
        addresses = lanes[active.astype(bool)]
        if strict:
            good = np.zeros(addresses.shape, dtype=bool)
            for region in regions:
                good |= region.holds(addresses)
            if not good.all():
                nearest = min(regions, key=lambda r: abs(int(addresses[~good][0]) - r.base))
                off = (int(addresses[~good][0]) - nearest.base) // nearest.itemsize
                raise AccessError(f"{kind} out of bounds, at element {off} of {nearest.name}")
        for fence in fences:
            wrong = fence.wrong(addresses)
            if wrong.any():
                off = (int(addresses[wrong][0]) - fence.tensor.data_ptr()) // fence.tensor.itemsize
                raise AccessError(f"{kind} of element {off} of {fence.name}, which nobody may touch")
        return addresses

    def load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        log.loads.append(check("load", ptrs, mask))
        return kept["create_masked_load"](self, ptrs, mask, *rest)

    def store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        log.stores.append(check("store", ptrs, mask))
        return kept["create_masked_store"](self, ptrs, value, mask, *rest)

    def chosen(self: Any, axis: int) -> Any:
        if program is None:
            return program_id(self, axis)
        return interpreter.TensorHandle(np.array([program[axis]], dtype=np.int32), interpreter.tl.int32)

    try:
        builder.create_masked_load, builder.create_masked_store = load, store
        builder.create_get_program_id = chosen
        if program is not None:  # tensors larger than the memory: nothing is copied back, it is all in place
            interpreter.GridExecutor._restore_args_dev = lambda *_: None
        yield log
    except interpreter.InterpreterError as error:
        if "AccessError" in str(error):
            raise AccessError(str(error)) from error
        raise
    finally:
        for name, method in kept.items():
            setattr(builder, name, method)
        builder.create_get_program_id = program_id
        interpreter.GridExecutor._restore_args_dev = restore


def fence_of_blocks(name: str, pool: Tensor, slots: Sequence[int]) -> Fence:
    """Of a cache (blocks, block_size, ...) only these slots."""
    allowed = torch.zeros(pool.shape, dtype=torch.bool)
    allowed.view(-1, *pool.shape[2:])[torch.tensor(list(slots), dtype=torch.int64)] = True
    return Fence(name, pool, allowed)
