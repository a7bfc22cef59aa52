"""rms_norm, layer_norm, rotary and silu_mul against their formulas, spelled out in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.layer_norm import layer_norm
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary
from kernels.silu_mul import silu_mul

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
each_dtype = pytest.mark.parametrize("dtype", list(TOLERANCE))


def close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@each_dtype
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (5, 48), (3, 577)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, weight = (5 * torch.randn(shape)).to(dtype), torch.randn(shape[1]).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    close(rms_norm(x, weight, 1e-5), expected)


@each_dtype
@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm(dtype: torch.dtype, affine: bool) -> None:
    x = (5 * torch.randn(5, 48) + 3).to(dtype)
    weight, bias = (torch.randn(48).to(dtype), torch.randn(48).to(dtype)) if affine else (None, None)
    wide = x.double()
    expected = (wide - wide.mean(-1, keepdim=True)) / (wide.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
    if weight is not None and bias is not None:
        expected = expected * weight.double() + bias.double()
    close(layer_norm(x, weight, bias, 1e-5), expected)


def test_half_precision_does_not_overflow_inside_rms_norm() -> None:
    x = torch.full((1, 16), 30000.0, dtype=torch.float16)
    close(rms_norm(x, torch.ones(16, dtype=torch.float16), 1e-5), torch.ones(1, 16, dtype=torch.float64))


@each_dtype
def test_rotary_turns_each_pair_by_its_angle(dtype: torch.dtype) -> None:
    x = torch.randn(3, 4, 6).to(dtype)[:, 1:]  # a strided view, as the fused projection gives it
    angle = torch.tensor([0, 1, 4000])[:, None] * torch.tensor([1.0, 0.1, 0.01])
    expected = x.double().clone()
    for token in range(3):
        for pair in range(3):
            a, b = x[token, :, pair].double(), x[token, :, pair + 3].double()
            c, s = math.cos(angle[token, pair]), math.sin(angle[token, pair])
            expected[token, :, pair], expected[token, :, pair + 3] = a * c - b * s, b * c + a * s
    close(rotary(x, angle.cos(), angle.sin()), expected)


@each_dtype
def test_silu_mul(dtype: torch.dtype) -> None:
    x = (4 * torch.randn(5, 14)).to(dtype)
    gate, up = x.double().chunk(2, -1)
    close(silu_mul(x), gate / (1 + torch.exp(-gate)) * up)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="rms_norm"):
        rms_norm(torch.ones(2, 4), torch.ones(5), 1e-5)
    with pytest.raises(ValueError, match="bias"):
        layer_norm(torch.ones(2, 4), torch.ones(4), torch.ones(3), 1e-5)
    with pytest.raises(ValueError, match="rotary"):
        rotary(torch.ones(2, 1, 4), torch.ones(2, 4), torch.ones(2, 4))
    with pytest.raises(ValueError, match="odd"):
        silu_mul(torch.ones(2, 3))
