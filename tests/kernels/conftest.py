from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.dispatch import choose

collect_ignore = ["guard.py"]


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, params=["reference", "triton"])
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test of this folder runs twice: on the torch reference, and on the Triton kernel in the interpreter."""
    with choose(request.param):
        yield request.param
