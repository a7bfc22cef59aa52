"""Settings for the proofs: they check the laws themselves, so contracts are lifted while they run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.scheduler.contracts import lifted


@pytest.fixture(autouse=True)
def without_contracts() -> Iterator[None]:
    with lifted():
        yield
