"""What the scheduler refuses at its door, before anything has changed."""

from __future__ import annotations

from typing import Any

import pytest

from engine.scheduler import ConfigError, PreemptionMode, RefusedError, SchedulerConfig, SequenceGroup
from tests.worlds import R, Run, world


def test_a_group_is_added_once() -> None:
    run = Run(world(gpu=8))
    group = R(p=4, m=2)
    run.add(group)
    run.drain()
    with pytest.raises(RefusedError, match="was added before"):
        run.add(group)
    other = world(gpu=8)
    with pytest.raises(RefusedError, match="was added before"):
        other.add(group)
    assert not run.s.has_unfinished()
    assert not other.has_unfinished()


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"prompt_len": 3.5}, "prompt_len"), ({"prompt_len": True}, "prompt_len"), ({"n": 1.5}, "n"), ({"n": "2"}, "n"),
     ({"max_tokens": 2.5}, "max_tokens")],
)  # fmt: skip
def test_counts_are_whole_numbers(changes: dict[str, Any], name: str) -> None:
    s = world(gpu=8)
    with pytest.raises(RefusedError, match=f"{name} is .* must be an int"):
        s.add(SequenceGroup("a", **{"prompt_len": 4, **changes}))
    assert not s.has_unfinished()


@pytest.mark.parametrize("mode", [1, True, "swop", 0.5, object()])
def test_an_unknown_preemption_mode_is_refused(mode: Any) -> None:
    with pytest.raises(ConfigError, match="allowed are 'swap', 'recompute' and None"):
        SchedulerConfig(num_gpu_blocks=8, preemption_mode=mode)


def test_preemption_modes_are_taken_by_name_or_as_members() -> None:
    for mode in ("swap", PreemptionMode.SWAP):
        assert SchedulerConfig(num_gpu_blocks=8, preemption_mode=mode).mode is PreemptionMode.SWAP
    assert SchedulerConfig(num_gpu_blocks=8).mode is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_num_batched_tokens", "5"), ("max_model_len", "x"), ("num_gpu_blocks", 8.0), ("enable_chunked_prefill", "no"),
     ("max_num_seqs", True), ("block_size", None)],
)  # fmt: skip
def test_wrong_types_are_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value!r}"):
        SchedulerConfig(**{"num_gpu_blocks": 8, name: value})
