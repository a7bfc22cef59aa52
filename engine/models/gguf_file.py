"""A GGUF file (versions 2 and 3): metadata, and tensors dequantized on demand.

Where the tensors lie is read here, since a truncated file must be told from a whole one; the arithmetic of the
quantized types is the `gguf` package's.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from engine.gguf_metadata import GGUFHeader
from engine.models.errors import ModelLoadError
from engine.models.fields import Fields
from kernels.quantized_rows import QuantizedWeight

_PIECE = 1 << 16  # values dequantized at a time: 256 KiB, with its temporaries about the size of an L2 cache
_BLOCKS = {GGMLQuantizationType.Q4_0: 1, GGMLQuantizationType.Q4_1: 2, GGMLQuantizationType.Q8_0: 1}  # scale, offset
_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
    GGMLQuantizationType.F64: torch.float64,
}


class TensorInfo(NamedTuple):
    """Where one tensor lies.  shape: rows first.  offset, num_bytes: in the file."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int


class GGUFFile:
    """The parsed header of a GGUF file, and its data through a memory map.

    metadata: key -> int, float, bool, str or a list of these.
    tensors: name -> TensorInfo.
    """

    def __init__(self, path: Path) -> None:
        """Raises ModelLoadError if the file is not GGUF, damaged or truncated."""
        self.path = path
        self.tensors: dict[str, TensorInfo] = {}
        try:
            header = GGUFHeader(path)
            self._data, self.metadata = header.data, header.metadata
            self._parse(header)
        except ModelLoadError:
            raise
        except ValueError as error:
            raise ModelLoadError(str(error)) from error

    def _parse(self, header: GGUFHeader) -> None:
        found: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(header.num_tensors):
            name, dims = header.string(), header.scalar("I")
            if dims > 8:
                raise header.broken(f"tensor '{name}' has {dims} dimensions")
            shape = tuple(reversed([header.scalar("Q") for _ in range(dims)]))
            found.append((name, shape, header.scalar("I"), header.scalar("Q")))
        alignment = Fields(self.metadata, str(self.path)).integer("general.alignment", 1, 2**31, 32)
        start = -(-header.at // alignment) * alignment
        for name, shape, kind, offset in found:
            self.tensors[name] = self._locate(name, shape, kind, start + offset)

    def _broken(self, why: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path} is damaged or truncated: {why}")

    def _locate(self, name: str, shape: tuple[int, ...], kind_id: int, offset: int) -> TensorInfo:
        try:
            kind = GGMLQuantizationType(kind_id)
        except ValueError:
            raise ModelLoadError(f"{self.path}: tensor '{name}' has unknown type {kind_id}") from None
        elements, block_bytes = GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % elements:
            raise self._broken(f"tensor '{name}' of shape {list(shape)} is not made of whole blocks of {elements}")
        num_bytes = math.prod(shape) // elements * block_bytes
        if offset + num_bytes > len(self._data):
            raise self._broken(f"tensor '{name}' ends at byte {offset + num_bytes}, the file at {len(self._data)}")
        return TensorInfo(shape, kind, offset, num_bytes)

    def blocks(self, name: str) -> QuantizedWeight | None:
        """A matrix of type Q4_0, Q4_1 or Q8_0 as it is stored, copied; None for another type, or no matrix."""
        info = self.tensors[name]
        if info.kind not in _BLOCKS or len(info.shape) != 2:
            return None
        raw = np.frombuffer(self._data, dtype=np.uint8, count=info.num_bytes, offset=info.offset)
        numbers = torch.from_numpy(raw.copy()).view(info.shape[0], info.shape[1] // 32, -1)
        halves = _BLOCKS[info.kind]
        scale, codes = numbers[..., :2].contiguous().view(torch.float16).squeeze(-1), numbers[..., 2 * halves :]
        if info.kind == GGMLQuantizationType.Q8_0:
            return QuantizedWeight(codes.contiguous().view(torch.int8), scale, None)
        if info.kind == GGMLQuantizationType.Q4_1:
            offset = numbers[..., 2:4].contiguous().view(torch.float16).squeeze(-1)
        else:
            offset = scale * -8  # codes of Q4_0 are 8 too large
            if not torch.equal(offset.float(), scale.float() * -8):
                return None  # beyond float16: the file is like no other
        return QuantizedWeight(codes.contiguous(), scale, offset)

    def tensor(self, name: str) -> Tensor:
        """The tensor on the CPU, in its own float type, or float32 if it is quantized.  A copy.

        Raises ModelLoadError for a quantized type that cannot be dequantized.
        """
        info = self.tensors[name]
        raw = np.frombuffer(self._data, dtype=np.uint8, count=info.num_bytes, offset=info.offset)
        if info.kind in _PLAIN:
            return torch.from_numpy(raw.copy()).view(_PLAIN[info.kind]).view(info.shape)
        elements, block_bytes = GGML_QUANT_SIZES[info.kind]
        values = np.empty(math.prod(info.shape), dtype=np.float32)
        # Quantized blocks do not care for rows, and pieces that stay in cache are several times quicker than rows.
        piece = _PIECE // elements
        try:
            for first in range(0, info.num_bytes // block_bytes, piece):
                part = raw[first * block_bytes : (first + piece) * block_bytes]
                values[first * elements : (first + piece) * elements] = dequantize(part[None], info.kind)[0]
        except NotImplementedError:
            raise ModelLoadError(
                f"{self.path}: tensor '{name}' has type {info.kind.name}; supported are F32, F16, BF16, Q8_0, Q4_0, "
                "Q4_1, Q5_0, Q5_1 and the K types"
            ) from None
        return torch.from_numpy(values).view(info.shape)
