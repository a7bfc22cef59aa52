"""A refuted claim about a kernel, replayed on the kernel itself: its values become tensors, its programs run for real.

Only the programs of the counterexample run, in Triton's interpreter, on memory laid out as its world says; a watch on
every access tells whether one leaves its tensor, or whether two programs meet at one address.
"""

from __future__ import annotations

import importlib.util
import itertools
import mmap
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor as TorchTensor
from triton import language as tl

from spec.check.kernel import Refuted, Tensor
from spec.check.terms import SymInt, value_of
from tests.kernels.guard import AccessError, Log, Region, watched

NORESERVE = 0x4000  # Linux: no memory is set aside for the mapping
_numbers = itertools.count()


def planted(module: Any, old: str, new: str, directory: Path) -> Any:
    """The module with one place of its source changed."""
    source = Path(module.__file__).read_text()
    assert source.count(old) >= 1, f"{module.__name__} has no {old!r}"
    return loaded(source.replace(old, new, 1), directory)


def loaded(source: str, directory: Path) -> Any:
    """A module of this source."""
    name = f"planted_{next(_numbers)}"
    path = directory / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


def _memory(count: int, dtype: torch.dtype) -> TorchTensor:
    """So many numbers that take room only where they are touched."""
    size = max(count, 1) * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=dtype)


class Case:
    """The tensors and arguments of a counterexample."""

    def __init__(self, refuted: Refuted, large: str | None = None) -> None:
        """large: a stride that is made 2^30."""
        self.refuted = refuted
        self.values = refuted.values
        world = refuted.world
        tensors = {n: t for n, t in world.arguments.items() if isinstance(t, Tensor)}
        self.strides = self._strides(list(tensors.values()), large)
        self.arguments: dict[str, Any] = {}
        self.regions: list[Region] = []
        memories: dict[str, TorchTensor] = {}
        for name, tensor in tensors.items():
            shape, steps = self._layout(tensor)
            count = sum((n - 1) * step for n, step in zip(shape, steps, strict=True)) + 1
            dtype = {0: torch.float32, 32: torch.int32, 64: torch.int64}[tensor.holds]
            if tensor.where not in memories:
                memories[tensor.where] = _memory(count, dtype)
                if tensor.filled:
                    memories[tensor.where].fill_(tensor.filled)
            memory = memories[tensor.where]
            self.arguments[name] = memory
            if shape[-1] > 0:
                self.regions.append(Region(name, memory.data_ptr(), dtype.itemsize, shape, steps))
        for access in refuted.accesses:
            if access.value is None or not value_of(access.mask, self.values) or not value_of(access.fits, self.values):
                continue
            _, steps = self._layout(access.tensor)
            at = sum(i * step for i, step in zip(value_of(access.index, self.values), steps, strict=True))
            self.arguments[access.tensor.name][at] = value_of(access.value, self.values)
        for name, value in world.arguments.items():
            if isinstance(value, SymInt):
                self.arguments[name] = value_of(value, self.values)
            elif isinstance(value, tuple):
                self.arguments[name] = self.strides[value[1]]
            elif not isinstance(value, Tensor):
                self.arguments[name] = tl.float32 if value == "float32" else value

    def _extent(self, value: Any) -> int:
        return int(value_of(value, self.values))

    def _strides(self, tensors: list[Tensor], large: str | None) -> dict[str, int]:
        """Each stride large enough for what lies inside it in every tensor, with a gap behind."""
        out: dict[str, int] = {}
        named = {v[1] for v in self.refuted.world.arguments.values() if isinstance(v, tuple)}
        for tensor in tensors:
            inside = self._extent(tensor.inner)
            for stride, (factor, extent) in reversed(tensor.outer.items()):
                if stride not in named:
                    out[stride] = self._extent(self.refuted.world.arguments[stride])
                else:
                    out[stride] = max(out.get(stride, 0), 2**30 if stride == large else 0, inside + 1)
                inside = out[stride] * factor * self._extent(extent)
        return out

    def _layout(self, tensor: Tensor) -> tuple[list[int], list[int]]:
        shape = [self._extent(extent) for _, extent in tensor.outer.values()] + [self._extent(tensor.inner)]
        steps = [self.strides[stride] * factor for stride, (factor, _) in tensor.outer.items()] + [1]
        return shape, steps

    def run(self, kernel: Any) -> str | None:
        """What is wrong when these programs of the kernel run; None when nothing is."""
        logs: list[Log] = []
        for program in self.refuted.programs:
            try:
                with watched(self.regions, strict=True, program=program) as log:
                    kernel[(1,)](**self.arguments)
            except AccessError as error:
                return str(error)
            logs.append(log)
        if len(logs) == 2:
            met = (logs[0].written() & logs[1].touched()) | (logs[1].written() & logs[0].touched())
            if met:
                return f"two programs meet at {len(met)} addresses"
        return None
