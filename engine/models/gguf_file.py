"""A GGUF file (versions 2 and 3): metadata, and tensors dequantized on demand.

The header is parsed here, since it must be quick and must tell a truncated file from a whole one; the arithmetic of
the quantized types is the `gguf` package's.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from engine.models.errors import ModelLoadError

_PIECE = 1 << 16  # values dequantized at a time: 256 KiB, with its temporaries about the size of an L2 cache
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
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
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{path} cannot be read: {error}") from error
        self._at = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            self._parse()
        except (struct.error, UnicodeDecodeError, OverflowError, MemoryError) as error:
            raise self._broken(f"header cannot be read at byte {self._at}: {error}") from error

    def _broken(self, why: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path} is damaged or truncated: {why}")

    def _parse(self) -> None:
        if self._data[:4] != b"GGUF":
            raise ModelLoadError(f"{self.path} is not a GGUF file (its first bytes are {self._data[:4]!r})")
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise ModelLoadError(f"{self.path} is GGUF version {version}; supported: 2 and 3, little-endian")
        num_tensors, num_entries = self._scalar("Q"), self._scalar("Q")
        for _ in range(num_entries):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        found: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(num_tensors):
            name, dims = self._string(), self._scalar("I")
            if dims > 8:
                raise self._broken(f"tensor '{name}' has {dims} dimensions")
            shape = tuple(reversed([self._scalar("Q") for _ in range(dims)]))
            found.append((name, shape, self._scalar("I"), self._scalar("Q")))
        alignment = int(self.metadata.get("general.alignment", 32))
        if alignment < 1:
            raise self._broken(f"alignment {alignment}")
        start = -(-self._at // alignment) * alignment
        for name, shape, kind, offset in found:
            self.tensors[name] = self._locate(name, shape, kind, start + offset)

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

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        size = self._scalar("Q")
        if self._at + size > len(self._data):
            raise self._broken(f"a string of {size} bytes at byte {self._at}")
        text = self._data[self._at : self._at + size]
        self._at += size
        return text.decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise self._broken(f"metadata of unknown type {kind} at byte {self._at}")
        inner, count = self._scalar("I"), self._scalar("Q")
        if self._at + count > len(self._data):
            raise self._broken(f"an array of {count} entries at byte {self._at}")
        if inner in _SCALARS:
            code = f"<{count}{_SCALARS[inner]}"
            values = struct.unpack_from(code, self._data, self._at)
            self._at += struct.calcsize(code)
            return list(values)
        if inner != _STRING:
            raise self._broken(f"an array of type {inner} at byte {self._at}")
        return [self._string() for _ in range(count)]
