"""Read the fields of a checkpoint's own description: each has its kind and range, or is refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from engine.models.errors import ModelLoadError


class Fields:
    """A mapping that came from a file.  A field that is absent or null has its default, or is asked for.

    where: what messages call the file.  prefix: what stands before every key.
    Every method raises ModelLoadError with the file, the field, its value and what is allowed.
    """

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.values = values
        self.where = where
        self.prefix = prefix

    def get(self, key: str) -> Any:
        """The field as it is, or None."""
        return self.values.get(self.prefix + key)

    def has(self, key: str) -> bool:
        return self.get(key) is not None

    def refuse(self, key: str, allowed: str) -> ModelLoadError:
        """The error that refuses the field's value."""
        return ModelLoadError(f"{self.where}: '{self.prefix}{key}' is {_shown(self.get(key))}; it must be {allowed}")

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """From `low` to `high`.  8192.0 is an integer too, as JSON has it."""
        value = self._given(key, default)
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or not low <= value <= high:
            raise self.refuse(key, f"an integer from {low} to {high}")
        return int(value)

    def number(self, key: str, high: float, default: float | None = None, *, least: float = 0.0) -> float:
        """At most `high` and at least `least`, or above 0 where that is 0."""
        value = self._given(key, default)
        real = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not real or not least <= value <= high or value == 0 or math.isnan(value):
            raise self.refuse(key, f"a number {f'from {least:g}' if least else 'above 0'} to {high:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._given(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def choice(self, key: str, allowed: Sequence[str], default: str) -> str:
        value = self._given(key, default)
        if not isinstance(value, str) or value not in allowed:
            raise self.refuse(key, f"one of {', '.join(allowed)}")
        return value

    def inner(self, key: str) -> Fields:
        """The fields of a mapping inside this one; of an empty one if there is none."""
        value = self._given(key, {})
        if not isinstance(value, Mapping):
            raise self.refuse(key, "a mapping")
        return Fields(value, f"{self.where}, {self.prefix}{key}")

    def token_ids(self, key: str, vocab_size: int) -> list[int]:
        """One id or a list of them, each in the vocabulary; none when the field is absent."""
        value = self._given(key, [])
        ids = value if isinstance(value, list) else [value]
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise self.refuse(key, f"made of token ids from 0 to {vocab_size - 1}, as vocab_size is {vocab_size}")
        return ids

    def _given(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None and default is None:
            raise ModelLoadError(f"{self.where} has no '{self.prefix}{key}'")
        return default if value is None else value


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return "an integer of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."
