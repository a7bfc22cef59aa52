"""Settings for the proofs: they check the laws themselves, so contracts are lifted while they run."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from engine.scheduler.contracts import lifted

os.environ.setdefault("TRITON_INTERPRET", "1")  # counterexamples of kernels run there; before Triton is imported


@pytest.fixture(autouse=True)
def without_contracts() -> Iterator[None]:
    with lifted():
        yield
