"""A theorem that fails tells its counterexample: the shape, each group with queue and numbers, and what was done."""

from __future__ import annotations

from typing import Any

import pytest

from engine.scheduler import Scheduler
from engine.scheduler.contracts import lifted
from proofs import steps
from proofs.worlds import Shape


class ForgetsDemotion(Scheduler):
    def _make_room(self, size: Any, step: Any) -> bool:
        return bool(size <= self.blocks.cpu_free)


class CountsTwice(Scheduler):
    def _sample(self, group: Any, stopped: Any) -> None:
        super()._sample(group, stopped)
        group.deficit += 1


class KeepsTheAborted(Scheduler):
    def abort(self, request_id: str) -> bool:
        self.groups[request_id].deficit = 0
        return True


TWO = Shape(2, 0, 0, forked=2, branches=((2, 2), (1, 1)), block_size=4)


@pytest.mark.parametrize(
    ("prove", "said"),
    [
        (
            lambda: steps.prove_schedule(Shape(2, 1, 0, forked=2), ForgetsDemotion),
            [
                "Q2 seniority: running ++ swapped ++ waiting is sorted by seniority",
                "shape: 2 running, 1 swapped, 0 waiting, 2 beyond their first token; chunked, "
                "preemption mode by width, block size any, live branches any",
                "before: swapped 1: c: known ",
                "; all it knows takes ",
                "the code: ",
                "preempt b (by recompute)",
                "after: waiting 1: b: known ",
            ],
        ),
        (
            lambda: steps.prove_update(TWO, 0, CountsTwice),
            [
                "S12 samples_when_caught_up: ",
                "block size 4, live branches 2 of 2, 1 of 1",
                "before: running 1: a: known ",
                ", given 2 tokens",
                "the code: update() of a",
                "after: running 2: b: known ",
            ],
        ),
        (
            lambda: steps.prove_step(TWO, CountsTwice),
            ["the code: ", "before: running 2: b: known "],
        ),
        (
            lambda: steps.prove_operation(TWO, steps.abort("b"), KeepsTheAborted),
            ["before: running 2: b: known ", "after: running 2: b: known ", "deficit 0"],
        ),
    ],
    ids=["schedule", "update", "step", "operation"],
)
def test_a_broken_theorem_is_told(prove: Any, said: list[str]) -> None:
    with lifted():  # contracts would stop the faulty run before it is broken
        report = prove()
    assert report.failures
    text = str(report)
    assert not [part for part in said if part not in text]
    assert "config: GPU " in text
    assert "all numbers: " in text
    assert "cannot be told" not in text
