"""The header of a GGUF file, read in a fraction of a second, and never past the end of the file.

`gguf.GGUFReader` also maps every tensor and keeps numpy views of every string: seconds for a vocabulary.  Here only the
header is read, as plain values (the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def is_gguf(path: Path) -> bool:
    """Whether `path` is a file that begins as a GGUF file does."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """Every key of the file's header: numbers, booleans, strings and lists of these.

    Raises ValueError when the file cannot be read, is not a little-endian GGUF file of version 2 or 3, or is cut off.
    """
    return GGUFHeader(path).metadata


class GGUFHeader:
    """A GGUF file's header, and its bytes through a memory map.

    metadata: key -> int, float, bool, str or a list of these.
    num_tensors: how many descriptions of tensors follow.  `scalar` and `string` take these, from byte `at` on.
    """

    def __init__(self, path: Path) -> None:
        """Raises ValueError, naming the file, as every method does when the file is damaged or truncated."""
        self.path = path
        try:
            with path.open("rb") as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read as GGUF: {error}") from error
        if self.data[:4] != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file (its first bytes are {self.data[:4]!r})")
        self.at = 4
        version = self.scalar("I")
        if version not in (2, 3):
            raise ValueError(f"{path} is GGUF version {version}; supported: 2 and 3, little-endian")
        self.num_tensors: int = self.scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(self.scalar("Q")):
            key = self.string()
            self.metadata[key] = self._value(self.scalar("I"))

    def broken(self, why: str) -> ValueError:
        return ValueError(f"the GGUF file {self.path} is damaged or truncated: {why}")

    def scalar(self, code: str) -> Any:
        """The next number, by its letter in `struct`."""
        return self._numbers(code, 1)[0]

    def string(self) -> str:
        size = self.scalar("Q")
        self._room(size, f"a string of {size} bytes")
        text = self.data[self.at : self.at + size]
        self.at += size
        return text.decode("utf-8", errors="replace")

    def _numbers(self, code: str, count: int) -> tuple[Any, ...]:
        size = count * struct.calcsize("<" + code)
        self._room(size, f"{count} numbers")
        values = struct.unpack_from(f"<{count}{code}", self.data, self.at)
        self.at += size
        return values

    def _room(self, size: int, what: str) -> None:
        if self.at + size > len(self.data):
            raise self.broken(f"{what} at byte {self.at} of {len(self.data)}")

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise self.broken(f"metadata of unknown type {kind} at byte {self.at}")
        inner, count = self.scalar("I"), self.scalar("Q")
        if inner in _SCALARS:
            return list(self._numbers(_SCALARS[inner], count))
        if inner != _STRING:
            raise self.broken(f"an array of type {inner} at byte {self.at}")
        return self._strings(count)

    def _strings(self, count: int) -> list[str]:
        """What `string` would read, one after the other, in fewer calls: a vocabulary has a hundred thousand."""
        data, end, at = self.data, len(self.data), self.at
        length, texts = struct.Struct("<Q").unpack_from, []
        for _ in range(count):
            begin = at + 8
            if begin > end:
                break
            at = begin + length(data, at)[0]
            if at > end:
                break
            texts.append(data[begin:at].decode("utf-8", "replace"))
            self.at = at
        if len(texts) < count:
            self.string()  # says what is wrong
        return texts
