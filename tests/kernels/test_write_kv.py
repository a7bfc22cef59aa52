"""write_kv against a loop over tokens."""

from __future__ import annotations

import pytest
import torch

from kernels.write_kv import write_kv


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_token_lands_in_its_slot_and_padding_writes_nothing(dtype: torch.dtype) -> None:
    key_cache, value_cache = (torch.full((4, 2, 3, 5), float("nan"), dtype=dtype) for _ in range(2))
    key, value = torch.randn(5, 3, 5).to(dtype), torch.randn(5, 3, 5).to(dtype)
    slots = [7, -1, 0, 3, -5]
    write_kv(key, value, torch.tensor(slots), key_cache, value_cache)
    for cache, new in ((key_cache, key), (value_cache, value)):
        flat = cache.view(8, 3, 5)
        for token, slot in enumerate(slots):
            if slot >= 0:
                assert torch.equal(flat[slot], new[token])
        assert flat[[1, 2, 4, 5, 6]].isnan().all()


def test_keys_may_be_a_strided_view() -> None:
    fused = torch.randn(3, 6, 4)
    key_cache, value_cache = torch.zeros(2, 2, 2, 4), torch.zeros(2, 2, 2, 4)
    write_kv(fused[:, 2:4], fused[:, 4:], torch.tensor([2, 0, 1]), key_cache, value_cache)
    assert torch.equal(key_cache.view(4, 2, 4)[[2, 0, 1]], fused[:, 2:4])
    assert torch.equal(value_cache.view(4, 2, 4)[[2, 0, 1]], fused[:, 4:])


def test_no_tokens_and_only_padding_write_nothing() -> None:
    cache = torch.zeros(1, 2, 1, 4)
    write_kv(torch.ones(0, 1, 4), torch.ones(0, 1, 4), torch.zeros(0, dtype=torch.int64), cache, cache.clone())
    write_kv(torch.ones(2, 1, 4), torch.ones(2, 1, 4), torch.tensor([-1, -1]), cache, cache.clone())
    assert not cache.any()


def test_slots_that_do_not_lie_together_are_refused_by_the_kernel(form: str) -> None:
    """The reference takes them as they are; the kernel would read what lies between."""
    cache, new, slots = torch.zeros(1, 4, 1, 4), torch.ones(2, 1, 4), torch.tensor([0, 3, 2, 3])[::2]
    if form == "triton":
        with pytest.raises(ValueError, match="slots must be contiguous, not of stride 2"):
            write_kv(new, new, slots, cache, cache.clone())
        assert not cache.any()
    else:
        write_kv(new, new, slots, cache, cache.clone())
        assert cache[0, :, 0, 0].tolist() == [1, 0, 1, 0]


def test_arguments_that_do_not_fit_are_refused() -> None:
    cache, new, slots = torch.zeros(1, 2, 1, 4), torch.ones(1, 1, 4), torch.tensor([0])
    with pytest.raises(ValueError, match="do not fit"):
        write_kv(torch.ones(1, 2, 4), torch.ones(1, 2, 4), slots, cache, cache)
    with pytest.raises(ValueError, match="int64"):
        write_kv(new, new, slots.int(), cache, cache)
    with pytest.raises(ValueError, match=r"slots must be int64 \(1,\), not torch.int64 \(0,\)"):
        write_kv(new, new, slots[:0], cache, cache)
    with pytest.raises(ValueError, match="float16"):
        write_kv(new.half(), new.half(), slots, cache, cache)
    with pytest.raises(IndexError):
        write_kv(new, new, torch.tensor([2]), cache, cache)
