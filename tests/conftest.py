"""Settings for every test: contracts on, one thread."""

from __future__ import annotations

import os

os.environ.setdefault("LAWFUL_CONTRACTS", "on")  # before anything of the engine is imported
os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported; TRITON_INTERPRET=0 for tests on a GPU
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_configure() -> None:
    import torch

    torch.set_num_threads(1)  # small tensors: more threads only get in each other's way
