"""The KV cache in 8 bits: float8_e4m3fn, and what torch must be told of it."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # the cast does not saturate by itself: what passes it becomes NaN


def to_cache_type(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in the type of the cache; values beyond an fp8 cache's largest are held at it."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8) if dtype == FP8 and x.dtype != FP8 else x.to(dtype)


def movable(x: Tensor) -> Tensor:
    """The same memory in a type that torch's index operations take: fp8 as bytes."""
    return x.view(torch.uint8) if x.dtype == FP8 else x


def gathered(x: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """x[rows] in a wider type; only these rows are widened."""
    return movable(x).index_select(0, rows).view(x.dtype).to(dtype)
