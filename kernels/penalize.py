"""Penalties on tokens that occurred (Keskar et al. 2019, section 4.1, for the first), in place on the logits.

    x = logits[r, id] / repetition[r] if logits[r, id] > 0 else logits[r, id] * repetition[r]
    logits[r, id] = x - frequency[r] * count - presence[r] * (count > 0)

for every (id, count) of row r: ids that occurred in prompt or output, each once, and how often the output has them.

logits (rows, vocab) float32; ids, counts (total,) int64, the rows' entries one row after the other; row_starts
(rows + 1,) int64, where each row's begin; repetition, presence, frequency (rows,) float32
Presence and frequency are added up before they are taken off, as one rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dispatch import same_device, tl, triton, uses_triton

CHUNK = 1024  # entries at a time: the access is scattered, so only the number in flight counts


def penalize_reference(
    logits: Tensor,
    ids: Tensor,
    counts: Tensor,
    row_starts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """The meaning, also the CPU path."""
    rows = torch.repeat_interleave(torch.arange(len(logits), device=logits.device), row_starts.diff())
    x = logits[rows, ids]
    x = torch.where(x > 0, x / repetition[rows], x * repetition[rows])
    logits[rows, ids] = x - (frequency[rows] * counts + presence[rows] * (counts > 0))


@triton.jit
def penalize_kernel(
    logits,
    ids,
    counts,
    row_starts,
    repetition,
    presence,
    frequency,
    logits_row,
    CHUNK: tl.constexpr,
):
    """One program for each row."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(row_starts + row).to(tl.int64)
    last = tl.load(row_starts + row + 1).to(tl.int64)
    factor = tl.load(repetition + row)
    once = tl.load(presence + row)
    each = tl.load(frequency + row)
    for start in range(first, last, CHUNK):
        i = start + tl.arange(0, CHUNK)
        mine = i < last  # beyond are the next row's
        token = tl.load(ids + i, mask=mine, other=0).to(tl.int64)
        count = tl.load(counts + i, mask=mine, other=0).to(tl.float32)
        at = logits + row * logits_row + token
        x = tl.load(at, mask=mine, other=0.0)
        x = tl.where(x > 0.0, x / factor, x * factor)
        tl.store(at, x - (each * count + tl.where(count > 0.0, once, 0.0)), mask=mine)


def penalize(
    logits: Tensor,
    ids: Tensor,
    counts: Tensor,
    row_starts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Apply the penalties of every row.  See the head of this file for shapes; no id stands twice in a row's entries.

    Raises ValueError where shapes or types do not fit.
    """
    rows = logits.shape[0]
    per_row = {"repetition": repetition, "presence": presence, "frequency": frequency}
    same_device("penalize", logits=logits, ids=ids, counts=counts, row_starts=row_starts, **per_row)
    if logits.dim() != 2 or logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"penalize: logits must be float32 (rows, vocab), not {logits.dtype} {tuple(logits.shape)}")
    if ids.shape != counts.shape or row_starts.shape != (rows + 1,):
        raise ValueError(
            f"penalize: ids {tuple(ids.shape)}, counts {tuple(counts.shape)}, row_starts {tuple(row_starts.shape)} "
            f"for {rows} rows"
        )
    for name, tensor in {"ids": ids, "counts": counts, "row_starts": row_starts}.items():
        if tensor.dtype != torch.int64 or not tensor.is_contiguous():
            raise ValueError(
                f"penalize: {name} must be contiguous int64, not {tensor.dtype} of stride {tensor.stride()}"
            )
    for name, tensor in per_row.items():
        if tensor.shape != (rows,) or tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise ValueError(
                f"penalize: {name} must be contiguous float32 ({rows},), not {tensor.dtype} {tuple(tensor.shape)} of "
                f"stride {tensor.stride()}"
            )
    if not uses_triton(logits):
        penalize_reference(logits, ids, counts, row_starts, repetition, presence, frequency)
    elif rows:
        penalize_kernel[(rows,)](
            logits=logits,
            ids=ids,
            counts=counts,
            row_starts=row_starts,
            repetition=repetition,
            presence=presence,
            frequency=frequency,
            logits_row=logits.stride(0),
            CHUNK=CHUNK,
            num_warps=4,
        )
