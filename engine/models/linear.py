"""Linear layers in the form that a device multiplies fastest.

    y[t] = W x[t] + b            x (tokens, in), W (out, in), b (out,) or None, y (tokens, out)

On a GPU the weight stays as it is.  On a CPU it is packed once, when the model is loaded, and the plain tensor is not
kept.  Measured on two Zen cores without AVX-512 (docs/performance.md), against `F.linear`:

- `PackedLinear`, oneDNN's blocked weights, type in = type out: 1.2 to 1.5 times as fast from 4 rows on, and the result
  of a row is the same to the last bit in any batch, so nothing of a schedule shows in it.
- `HalfLinear`, FBGEMM's weights of 16 bits against rows of float32: a third to a half of the time, since the weights
  are half the bytes.  For float16 and bfloat16 on CPUs that have no product in these types; summed in float32.

`QuantizedLinear` keeps, beside one of these, the blocks of a GGUF file, and multiplies a few rows with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.dispatch import uses_triton
from kernels.quantized_rows import QuantizedProduct, QuantizedWeight

Linear = Callable[[Tensor], Tensor]
Pack = Callable[[Tensor, Tensor | None], Linear]


class PlainLinear:
    """The weight as it came.  Also where a CPU's torch can pack nothing."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class PackedLinear:
    """oneDNN's blocked weight.  Rows and result have the weight's type."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self._bias = None if bias is None else bias.contiguous()  # oneDNN reads it without its stride
        self._multiply: Any = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self._multiply(x, self._weight, self._bias, "none", [], "")
        return y


class HalfLinear:
    """A float16 weight against rows of float32, summed and returned in float32.

    A bfloat16 weight is taken over without loss from 2^-17 to 65504 in absolute value; below, it is off by at most
    2^-25, and above, it is held at 65504.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.quantized.linear_prepack_fp16(weight.float(), None if bias is None else bias.float())
        self._multiply: Any = torch.ops.quantized.linear_dynamic_fp16.default

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self._multiply(x, self._weight)
        return y


class QuantizedLinear:
    """Up to `few` rows by the blocks of the weight as its file has them, more by `many`, which holds the same weight.

    With one row the time is that of reading the weight, and 4 bits are read fastest; with many it is that of the sums.
    """

    def __init__(self, blocks: QuantizedWeight, bias: Tensor | None, many: Linear) -> None:
        """Raises RuntimeError where `kernels.quantized_rows` cannot be compiled."""
        self._few, self._many = QuantizedProduct(blocks, bias), many
        self.few = FEW[type(many)]

    def __call__(self, x: Tensor) -> Tensor:
        return self._few(x.float()).to(x.dtype) if x.shape[0] <= self.few else self._many(x)


# Measured: from one row more on the other form is the faster one (docs/performance.md).
FEW: dict[Any, int] = {PackedLinear: 6, HalfLinear: 2, PlainLinear: 6}


def packing(dtype: torch.dtype, device: torch.device) -> tuple[Pack, torch.dtype]:
    """How to pack weights of `dtype` on `device`, and the type of the rows they are multiplied with.

    A form is taken only if a small product in it comes out right here: torch may be built without it.
    """
    if device.type != "cpu" or uses_triton(torch.empty(0, device=device)):
        return PlainLinear, dtype
    native = dtype == torch.float32 or (
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
        if dtype == torch.bfloat16
        else torch.ops.mkldnn._is_mkldnn_fp16_supported()
    )
    if native and _works(PackedLinear, dtype, dtype):
        return PackedLinear, dtype
    if dtype != torch.float32 and _works(HalfLinear, dtype, torch.float32):
        return HalfLinear, torch.float32
    return PlainLinear, dtype


def _works(pack: Pack, dtype: torch.dtype, rows: torch.dtype) -> bool:
    weight = torch.arange(-8, 8).view(2, 8).to(dtype)
    x = torch.ones(3, 8, dtype=rows)
    try:
        y = pack(weight, weight[:, 0])(x)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return y.dtype == rows and y.tolist() == [[-44.0, 28.0]] * 3
