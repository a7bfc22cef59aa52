"""sample and penalize against the engine's sampler, which they stand in for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.sampler import draw, draw_keys, keep_most_likely, mix64
from kernels import sample as module
from kernels.activation import activation
from kernels.penalize import penalize
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rotary import rotary
from kernels.sample import sample

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # log(0) of a min_p of 0, in the interpreter


def engines(logits: Tensor, heat: Tensor, k: Tensor, p: Tensor, m: Tensor, keys: Tensor) -> Tensor:
    """What engine.sampler draws."""
    scores = logits.double() / torch.where(heat == 0, 1.0, heat)[:, None]
    kept = keep_most_likely(scores, k, p)
    kept = kept.masked_fill(kept < kept.max(-1, keepdim=True).values + torch.log(m)[:, None], -torch.inf)
    return torch.where(heat == 0, logits.argmax(-1), draw(kept, keys))


@pytest.mark.parametrize("vocab", [1, 2, 300, 5000])
def test_a_row_draws_the_token_that_the_engine_draws(vocab: int) -> None:
    logits = torch.randn(8, vocab) * 3
    logits[:3] = logits[:3].round()  # many are equal
    if vocab > 100:
        logits[3, 50:] = -torch.inf
        logits[4, ::2] = -0.0
        logits[4, 1::2] = 0.0
    heat = torch.tensor([0.7, 1.0, 0.0, 2.0, 1.0, 0.3, 1.0, 5.0], dtype=torch.float64)
    k = torch.tensor([3, vocab, vocab, 40, 7, vocab, 1, 200]).clamp(1, vocab)
    p = torch.tensor([0.9, 0.5, 1.0, 1.0, 0.8, 0.999, 1.0, 0.3], dtype=torch.float64)
    m = torch.tensor([0.0, 0.0, 0.0, 0.1, 0.0, 0.3, 0.0, 0.0], dtype=torch.float64)
    keys = draw_keys(torch.arange(8), torch.arange(8) % 3, torch.arange(8) * 7)
    assert sample(logits, heat, k, p, m, keys).tolist() == engines(logits, heat, k, p, m, keys).tolist()


def test_a_list_too_short_for_the_nucleus_gives_way_to_the_whole_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CANDIDATES", 64)
    monkeypatch.setattr(module, "NUCLEUS", 16)
    monkeypatch.setattr(module, "LANES", 64)
    logits = torch.randn(4, 700)
    logits[1] = 0.0
    heat = torch.ones(4, dtype=torch.float64)
    k = torch.tensor([700, 90, 700, 5])
    p = torch.tensor([0.9, 0.7, 0.01, 0.5], dtype=torch.float64)
    m, keys = torch.zeros(4, dtype=torch.float64), mix64(torch.arange(4))
    assert sample(logits, heat, k, p, m, keys).tolist() == engines(logits, heat, k, p, m, keys).tolist()


def test_of_equal_tokens_the_first_stay_however_many_tiles_they_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LANES", 64)
    rows = 12
    logits = torch.zeros(rows, 200)
    logits[:, 130:140] = 1.0
    heat, m = torch.ones(rows, dtype=torch.float64), torch.zeros(rows, dtype=torch.float64)
    k, p = torch.full((rows,), 150), torch.ones(rows, dtype=torch.float64)
    keys = mix64(torch.arange(rows))
    drawn = sample(logits, heat, k, p, m, keys).tolist()
    assert drawn == engines(logits, heat, k, p, m, keys).tolist()
    assert {token // 64 for token in drawn} == {0, 1, 2}  # the last that stays lies in the third


def test_a_token_does_not_depend_on_the_rows_beside_it() -> None:
    logits = torch.randn(3, 90)
    arguments = (
        torch.tensor([1.0, 0.8, 1.5], dtype=torch.float64),
        torch.tensor([90, 20, 5]),
        torch.tensor([0.9, 1.0, 1.0], dtype=torch.float64),
        torch.zeros(3, dtype=torch.float64),
        mix64(torch.arange(3)),
    )
    together = sample(logits, *arguments)
    for r in range(3):
        alone = sample(logits[r : r + 1], *(a[r : r + 1] for a in arguments))
        assert together[r] == alone[0]


def test_penalties() -> None:
    logits = torch.randn(3, 50)
    before = logits.clone()
    entries = [{4: 2, 9: 0, 30: 1}, {}, {0: 0, 49: 5}]
    ids = torch.tensor([i for row in entries for i in row])
    counts = torch.tensor([n for row in entries for n in row.values()])
    starts = torch.tensor([0, 3, 3, 5])
    repetition, presence, frequency = torch.tensor([[1.3, 2.0, 0.7], [0.5, 9.0, 0.0], [0.25, 9.0, -1.0]])
    penalize(logits, ids, counts, starts, repetition, presence, frequency)
    for r, row in enumerate(entries):
        for i in range(50):
            x = before[r, i]
            if i in row:
                x = x / repetition[r] if x > 0 else x * repetition[r]
                x = x - frequency[r] * row[i] - presence[r] * (row[i] > 0)
            torch.testing.assert_close(logits[r, i], x)


def test_arguments_that_do_not_fit_are_refused() -> None:
    ones = torch.ones(2, dtype=torch.float64)
    k = torch.ones(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="logits must be float32"):
        sample(torch.zeros(2, 4).half(), ones, k, ones, ones, k)
    with pytest.raises(ValueError, match="top_p must be"):
        sample(torch.zeros(2, 4), ones, k, ones.float(), ones, k)
    with pytest.raises(ValueError, match="row_starts"):
        penalize(torch.zeros(2, 4), k, k, k, *(ones.float(),) * 3)
    starts, wide = torch.tensor([0, 1, 2]), torch.ones(4)[::2]
    with pytest.raises(ValueError, match=r"presence must be contiguous float32 \(2,\), .* of stride \(2,\)"):
        penalize(torch.zeros(2, 4), k, k, starts, wide.contiguous(), wide, wide)
    with pytest.raises(ValueError, match=r"min_p must be contiguous torch.float64 \(2,\), .* of stride \(2,\)"):
        sample(torch.zeros(2, 4), ones, k, ones, torch.ones(4, dtype=torch.float64)[::2], k)


# what else the models use


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_residual_is_added_before_the_norm_and_rounded_once(dtype: torch.dtype) -> None:
    x, residual = torch.randn(3, 77).to(dtype), torch.randn(3, 77).to(dtype)
    weight = torch.randn(77).to(dtype)
    out, summed = add_rms_norm(x, residual, weight, 1e-5)
    # The interpreter's cast to bfloat16 drops the rest instead of rounding it: a unit in the last place.
    unit = 0.0 if dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(summed, residual + x, rtol=unit, atol=0)
    torch.testing.assert_close(out, rms_norm(summed, weight, 1e-5), rtol=unit, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "half"), [(8, 4), (80, 40), (24, 6)])
def test_rotary_pairs_halves_or_neighbours_and_leaves_the_rest(interleaved: bool, dim: int, half: int) -> None:
    x = torch.randn(2, 3, 5, dim)[:, 1]
    angle = torch.randn(2, half)
    out = rotary(x, angle.cos(), angle.sin(), interleaved)
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        turned = (
            torch.view_as_complex(torch.stack((x[..., a], x[..., b]), -1))
            * torch.polar(torch.ones(2), angle[:, i])[:, None]
        )
        torch.testing.assert_close(out[..., a], turned.real)
        torch.testing.assert_close(out[..., b], turned.imag)
    assert torch.equal(out[..., 2 * half :], x[..., 2 * half :])


@pytest.mark.parametrize("name", ["relu", "gelu", "gelu_tanh"])
def test_gates(name: str) -> None:
    x = torch.randn(4, 2 * 37) * 4
    gate, up = x.double().chunk(2, -1)
    act = {
        "relu": gate.clamp(min=0),
        "gelu": gate / 2 * (1 + torch.erf(gate / 2**0.5)),
        "gelu_tanh": gate / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))),
    }[name]
    torch.testing.assert_close(activation(x, name, gated=True).double(), act * up, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(activation(x[:, :37], name).double(), act, rtol=2e-5, atol=2e-5)
    with pytest.raises(ValueError, match="odd"):
        activation(x[:, :37], name, gated=True)
    with pytest.raises(ValueError, match="swish"):
        activation(x, "swish")
