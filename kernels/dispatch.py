"""Which of an operation's two forms runs: the torch reference, or the Triton kernel.

    LAWFUL_KERNELS=reference | triton        read once, at import; absent: Triton for CUDA tensors, reference for others

With LAWFUL_KERNELS=triton and TRITON_INTERPRET=1 the launchers run on CPU tensors, through Triton's interpreter.
Where Triton is not installed the references serve alone, and asking for Triton says so.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # no wheel for this platform

    class _Missing:
        """Lets a kernel's definition pass; nothing calls it."""

        def __getattr__(self, name: str) -> Any:
            return _Missing()

        def jit(self, function: Callable[..., Any]) -> Callable[..., Any]:
            return function

    triton, tl = _Missing(), _Missing()
    HAS_TRITON = False
else:
    HAS_TRITON = True

__all__ = [
    "HAS_TRITON",
    "architecture",
    "choose",
    "is_interpreted",
    "matrix_type",
    "next_power_of_2",
    "refuse_unless",
    "same_device",
    "tl",
    "triton",
    "uses_triton",
]

CHOICES = ("reference", "triton")


def _checked(choice: str | None) -> str | None:
    if choice is not None and choice not in CHOICES:
        raise ValueError(f"LAWFUL_KERNELS is {choice!r}; allowed are {', '.join(CHOICES)}")
    if choice == "triton" and not HAS_TRITON:
        raise ValueError("LAWFUL_KERNELS is 'triton' but Triton is not installed")
    return choice


_choice = _checked(os.environ.get("LAWFUL_KERNELS") or None)


def uses_triton(tensor: Tensor) -> bool:
    """The kernel runs for tensors that lie where this one lies."""
    if _choice is None:
        return HAS_TRITON and tensor.is_cuda
    return _choice == "triton"


@contextmanager
def choose(choice: str | None) -> Iterator[None]:
    """Inside, the choice is this one; None for the default."""
    global _choice
    before, _choice = _choice, _checked(choice)
    try:
        yield
    finally:
        _choice = before


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least n; 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()


def is_interpreted(kernel: Any) -> bool:
    """The kernel runs in Triton's interpreter."""
    return type(kernel).__name__ == "InterpretedFunction"


def matrix_type(kernel: Any, dtype: torch.dtype) -> Any:
    """Triton's name of the type in which a kernel multiplies matrices of `dtype`.

    The interpreter keeps bfloat16 as bare bits, which it does not multiply as numbers: there it is float32.
    """
    if dtype == torch.bfloat16 and not is_interpreted(kernel):
        return tl.bfloat16
    return tl.float16 if dtype == torch.float16 else tl.float32


@functools.cache
def architecture(device: torch.device) -> int:
    """90 for a device of compute capability 9.0; 90 for the interpreter too."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def refuse_unless(condition: bool, message: Callable[[], str]) -> None:
    """Raises ValueError with the message, which is made only then."""
    if not condition:
        raise ValueError(message())


def same_device(operation: str, **tensors: Tensor | None) -> torch.device:
    """The device that all of them share.  Raises ValueError naming those that differ."""
    places = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(places.values())) > 1:
        raise ValueError(f"{operation}: tensors lie on " + ", ".join(f"{place} ({n})" for n, place in places.items()))
    return next(iter(places.values()))
