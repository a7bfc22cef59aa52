"""The key-value part of a GGUF file, read in a fraction of a second.

`gguf.GGUFReader` also maps every tensor and keeps numpy views of every string: seconds for a vocabulary.  Here only the
header is read, as plain values (the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_LIMIT = 1 << 31  # no count or length in a sound header is larger


def is_gguf(path: Path) -> bool:
    """Whether `path` is a file that begins as a GGUF file does."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """Every key of the file's header: numbers, booleans, strings and lists of these.

    Raises ValueError when the file is not a little-endian GGUF file of version 2 or 3, or is cut off.
    """
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file")
        version = _scalar(file, "<I")
        if version not in (2, 3):
            raise ValueError(f"{path}: GGUF version {version} is not supported, only 2 and 3")
        _scalar(file, "<Q")  # the number of tensors
        return {_string(file): _value(file, _scalar(file, "<I")) for _ in range(_count(file))}


def _read(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise ValueError("the GGUF file ends inside its header")
    return data


def _scalar(file: BinaryIO, layout: str) -> Any:
    return struct.unpack(layout, _read(file, struct.calcsize(layout)))[0]


def _count(file: BinaryIO) -> int:
    count: int = _scalar(file, "<Q")
    if count > _LIMIT:
        raise ValueError(f"the GGUF header is damaged: a count of {count}")
    return count


def _string(file: BinaryIO) -> str:
    return _read(file, _count(file)).decode("utf-8", errors="replace")


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind == _ARRAY:
        of = _scalar(file, "<I")
        count = _count(file)
        if of in _SCALARS:
            code = _SCALARS[of][1]
            return list(struct.unpack(f"<{count}{code}", _read(file, count * struct.calcsize(_SCALARS[of]))))
        return [_value(file, of) for _ in range(count)]
    if kind not in _SCALARS:
        raise ValueError(f"the GGUF header is damaged: a value of type {kind}")
    return _scalar(file, _SCALARS[kind])
