"""The engine loop: whatever goes wrong with one request ends that request, and the others do not notice."""

from __future__ import annotations

import logging
import re
from collections import Counter
from typing import Any

import pytest
import torch

from engine.errors import DuplicateError, InvalidParameterError, InvalidPromptError, RefusedError
from engine.sampling import SamplingParams
from engine.scheduler import Plan, Status
from engine.stats import LOG_INTERVAL
from engine.tokenizer import ByteTokenizer
from tests.oracle import World

QUEUES = [Status.RUNNING, Status.SWAPPED, Status.WAITING]


def crowd(**more: Any) -> World:
    """A and B stream, C is swapped out before long, D waits."""
    world = World(**{"gpu": 14, "cpu": 8, "s": 6, "length": 64, **more})  # type: ignore[arg-type]
    for name in "ABC":
        world.add(name, p=6, n=2, m=14)
    world.add("D", p=9, m=8)
    return world


# a step that fails


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize("at", [0, 1, 5, 9, 12])
def test_a_runner_that_raises_ends_the_groups_of_that_step_and_no_others(when: str, at: int, chunked: bool) -> None:
    """Before anything was carried out, and after all of it: the cache cannot be trusted in either case."""
    world = crowd(enable_chunked_prefill=chunked)
    lost: list[str] = []

    def fault(plan: Plan) -> None:
        if plan.step == at:
            lost.extend(world.names(plan))
            raise RuntimeError("CUDA error: an illegal memory access")

    setattr(world, when, fault)
    world.drain()
    assert lost
    assert set(world.ended) == set("ABCD")
    for name in "ABCD":
        if name in lost:
            assert world.ended[name].error == "the step failed: RuntimeError: CUDA error: an illegal memory access"
            assert {c.finish_reason for c in world.ended[name].outputs} <= {"error", "length"}
        else:
            assert world.same_as_alone(name)
    assert world.core.stats.failed == len(lost)
    assert len(lost) < 4 or at == 0
    world.add("next", p=5, n=2, m=5)
    world.drain()
    assert world.same_as_alone("next")


def test_a_runner_that_always_raises_ends_every_request_with_its_error() -> None:
    world = crowd()

    def fault(plan: Plan) -> None:
        raise OSError("no device")

    world.before = fault
    world.drain()
    assert all(output.error == "the step failed: OSError: no device" for output in world.ended.values())
    assert world.core.stats.failed == 4
    assert not world.core.stats.finished


@pytest.mark.parametrize("at", [0, 3, 8])
def test_an_interrupt_in_a_step_loses_nothing_and_the_engine_goes_on(at: int) -> None:
    """Ctrl-C is no request's fault: it reaches the caller, all requests keep their places, one was being aborted."""
    world = crowd()

    def interrupt(plan: Plan) -> None:
        if plan.step == at:
            world.core.abort_request("B")
            raise KeyboardInterrupt

    world.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        world.drain()
    world.check()
    assert [output.request_id for output in world.core._gone] == ["B"]
    world.drain()
    assert world.ended["B"].outputs[0].finish_reason == "abort"
    assert all(world.same_as_alone(name) for name in "ACD")


# one request that is at fault


def test_a_processor_that_raises_in_a_rebuilt_group_ends_it_alone() -> None:
    def broken(generated: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(generated) == 10:
            raise ValueError("ten")
        return logits

    world = crowd(cpu=0)
    world.add("E", p=5, n=2, m=14, logits_processors=[broken])
    world.drain()
    assert "ValueError: ten" in world.ended["E"].error
    assert [len(tokens) for tokens in world.tokens("E")] == [10, 10]
    assert all(world.same_as_alone(name) for name in "ABCD")


def test_broken_logits_end_their_own_request_alone() -> None:
    world = crowd()
    world.add("E", p=5, m=9, logits_processors=[lambda generated, logits: logits * float("nan")])
    world.add("F", p=5, m=9, logits_processors=[lambda generated, logits: logits[:3]])
    world.drain()
    assert "no token can be drawn" in world.ended["E"].error
    assert "returned shape (3,)" in world.ended["F"].error
    assert all(world.same_as_alone(name) for name in "ABCD")


class Brittle(ByteTokenizer):
    """Knows no bytes for token 200."""

    def token_bytes(self, token_id: int) -> bytes:
        if token_id == 200:
            raise LookupError("token 200")
        return super().token_bytes(token_id)


@pytest.mark.parametrize("n", [1, 3])
def test_a_tokenizer_that_cannot_decode_ends_that_request_alone(n: int) -> None:
    def favourite(state: Any, branch: int, position: int) -> int | None:
        done = position - len(state.prompt_token_ids)
        return 200 if (state.request_id, branch, done) == ("bad", n - 1, 2) else 65

    world = World(gpu=64, tokenizer=Brittle(), favourites=favourite)
    world.add("good", prompt="hello", n=2, m=6, temperature=0)
    world.add("bad", prompt="hello", n=n, m=6, temperature=0)
    world.drain()
    assert world.ended["bad"].error == "LookupError: token 200"
    assert [c.finish_reason for c in world.ended["bad"].outputs] == ["error"] * n
    assert world.texts("good") == ["AAAAAA"] * 2
    assert world.same_as_alone("good")


def test_a_tokenizer_that_fails_on_a_prompt_leaves_nothing_behind() -> None:
    world = World(gpu=64, tokenizer=Brittle())
    with pytest.raises(LookupError):
        world.add("bad", prompt=[65, 200], m=3)
    world.check_drained()
    assert world.core.stats.received == 0
    attempts = []

    def add_in_a_step(plan: Plan) -> None:
        if not attempts:
            attempts.append(1)
            with pytest.raises(LookupError):
                world.core.add_request("bad", [65, 200], SamplingParams())
            with pytest.raises(DuplicateError):
                world.core.add_request("bad", [65], SamplingParams())

    world.between = add_in_a_step
    world.add("good", prompt=[66, 67], m=3, logit_bias={200: -100})
    world.drain()
    assert list(world.ended) == ["good"]
    world.add("bad", prompt=[65], m=3, logit_bias={200: -100})
    world.drain()
    assert world.same_as_alone("bad")


# aborts in the midst of a step


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("at", [1, 4, 8])
def test_a_processor_that_aborts_its_own_request_gets_what_came_before(at: int, chunked: bool) -> None:
    world = crowd(enable_chunked_prefill=chunked)
    aborted = []

    def give_up(generated: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(generated) == at:
            aborted.append(world.core.abort_request("E"))
        return logits

    world.add("E", p=5, n=2, m=14, logits_processors=[give_up])
    world.drain()
    assert aborted == [True, False], "once for both branches"
    assert [(c.finish_reason, len(c.token_ids)) for c in world.ended["E"].outputs] == [("abort", at)] * 2
    assert world.ended["E"].error is None
    assert all(world.same_as_alone(name) for name in "ABCD")


def test_a_processor_that_aborts_and_then_raises_is_aborted_not_failed() -> None:
    world = World(gpu=64)

    def both(generated: list[int], logits: torch.Tensor) -> torch.Tensor:
        world.core.abort_request("E")
        raise ValueError("after all")

    world.add("E", p=5, m=4, logits_processors=[both])
    world.drain()
    assert world.ended["E"].outputs[0].finish_reason == "abort"
    assert world.ended["E"].error is None
    assert (world.core.stats.aborted, world.core.stats.failed) == (1, 0)


@pytest.mark.parametrize("status", QUEUES)
def test_a_processor_can_abort_a_neighbour_in_any_queue(status: Status) -> None:
    world = World(gpu=14, cpu=8, s=6, length=64)
    victims: list[str] = []

    def hostile(generated: list[int], logits: torch.Tensor) -> torch.Tensor:
        there = [g.request_id for g in world.scheduler.groups.values() if g.status is status and g.request_id != "A"]
        if there and not victims:
            victims.append(there[-1])
            assert world.core.abort_request(there[-1])
        return logits

    world.add("A", p=6, n=2, m=14, logits_processors=[hostile])
    for name in "BC":
        world.add(name, p=6, n=2, m=14)
    world.add("D", p=9, m=8)
    world.drain()
    [victim] = victims
    assert {c.finish_reason for c in world.ended[victim].outputs} == {"abort"}
    assert all(world.same_as_alone(name) for name in "ABCD" if name != victim)


def test_requests_can_be_added_in_the_midst_of_a_step() -> None:
    world = World(gpu=32, cpu=8)

    def more(plan: Plan) -> None:
        if plan.step < 5:
            world.add(f"late{plan.step}", p=7, n=2, m=5)

    world.between = more
    world.add("A", p=7, m=9)
    world.drain()
    assert len(world.ended) == 6
    assert world.all_same_as_alone()


# what is refused at the door


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty; it must have at least 1 token"),
        ("", "the prompt is empty; it must have at least 1 token"),
        (b"bytes", "the prompt is a bytes; it must be text or a list of token ids"),
        (7, "the prompt is a int; it must be text or a list of token ids"),
        (None, "the prompt is a NoneType"),
        ({"prompt": "x"}, "the prompt is a dict"),
        ([1, "2"], "prompt_token_ids must be token ids from 0 to 256 .*, got '2'"),
        ([1, 2.0], "prompt_token_ids must be token ids from 0 to 256 .*, got 2.0"),
        ([1, True], "prompt_token_ids must be token ids from 0 to 256 .*, got True"),
        ([1, 257], "prompt_token_ids must be token ids from 0 to 256 .*, got 257"),
        ([[1]], r"prompt_token_ids must be token ids from 0 to 256 .*, got \[1\]"),
    ],
)
def test_a_prompt_that_is_none_is_refused_with_the_value_and_what_is_allowed(prompt: Any, message: str) -> None:
    world = World(gpu=16, tokenizer=ByteTokenizer())
    with pytest.raises((InvalidPromptError, InvalidParameterError), match=message):
        world.core.add_request("A", prompt, SamplingParams())
    world.check_drained()


def test_text_without_a_tokenizer_a_priority_and_foreign_params_are_refused() -> None:
    world = World(gpu=16)
    with pytest.raises(InvalidPromptError, match="the tokenizer was not loaded; give token ids"):
        world.core.add_request("A", "text", SamplingParams())
    with pytest.raises(RefusedError, match="priority is 1; only 0 is supported"):
        world.core.add_request("A", [1], SamplingParams(), priority=1)
    with pytest.raises(TypeError, match="params must be SamplingParams, got dict"):
        world.core.add_request("A", [1], {"n": 1})  # type: ignore[arg-type]
    world.check_drained()


# what is told


def test_counts_are_the_sums_of_the_plans() -> None:
    world = crowd(gpu=9, cpu=5)
    world.drain()
    stats = world.core.stats
    plans = world.plans
    log = Counter(f"preempt:{a.detail}" if a.verb == "preempt" else a.verb for plan in plans for a in plan.log)
    assert stats.actions == log
    assert stats.steps == len(plans)
    assert stats.preemptions == sum(len(plan.preempted) for plan in plans) > 1
    assert stats.demotions == log["demote"]
    assert stats.blocks_swapped_out == sum(len(plan.blocks_to_swap_out) for plan in plans) > 0
    assert stats.blocks_swapped_in == sum(len(plan.blocks_to_swap_in) for plan in plans)
    assert stats.blocks_copied == sum(len(plan.blocks_to_copy) for plan in plans) > 0
    assert stats.prompt_tokens == 6 * 3 + 9
    assert stats.generation_tokens == 3 * 2 * 14 + 8
    assert stats.computed_tokens == sum(world.sizes.values())
    needed = sum(p + n * (m - 1) for p, n, m in [(6, 2, 14)] * 3 + [(9, 1, 8)])
    assert stats.computed_tokens == needed + stats.recomputed_tokens
    assert (stats.received, stats.finished, stats.aborted, stats.failed) == (4, 4, 0, 0)
    assert sum(output.metrics.num_preemptions for output in world.ended.values()) == stats.preemptions


@pytest.mark.parametrize("cpu", [0, 3, 40])
def test_prompt_and_recomputed_tokens_are_told_apart_whatever_happens(cpu: int) -> None:
    """Every prompt token is computed for the first time once, however often it is cut, dropped or swapped."""
    for t in (4, 7, 64):
        world = World(gpu=9, cpu=cpu, t=t, s=min(t, 6), length=64)
        for i, (p, n, m) in enumerate([(13, 2, 9), (9, 3, 6), (17, 1, 8), (5, 2, 12)]):
            world.add(f"r{i}", p=p, n=n, m=m)
        world.drain()
        stats = world.core.stats
        assert stats.prompt_tokens == 13 + 9 + 17 + 5
        needed = 13 + 2 * 8 + 9 + 3 * 5 + 17 + 7 + 5 + 2 * 11
        assert stats.computed_tokens == needed + stats.recomputed_tokens
        assert (stats.recomputed_tokens > 0) is (stats.actions["preempt:recompute"] + stats.demotions > 0)


def test_times_of_a_request_are_in_order_and_first_tokens_come_in_order_of_arrival() -> None:
    world = crowd()
    world.drain()
    firsts = []
    for name in "ABCD":
        metrics = world.ended[name].metrics
        times = [
            metrics.arrival_time,
            metrics.first_scheduled_time,
            metrics.first_token_time,
            metrics.last_token_time,
            metrics.finished_time,
        ]
        assert times == sorted(times)
        assert metrics.time_in_queue == metrics.first_scheduled_time - metrics.arrival_time >= 0
        firsts.append(metrics.first_token_time)
    assert firsts == sorted(firsts)


def test_only_requests_that_moved_are_told_of_and_only_ended_ones_on_request() -> None:
    world = World(gpu=64)
    world.add("A", p=4, m=2)
    world.add("B", p=4, m=3)
    assert [(o.request_id, o.finished) for o in world.step()] == [("A", False), ("B", False)]
    assert [(o.request_id, o.finished) for o in world.step()] == [("B", False), ("A", True)]
    world.add("C", p=4, m=2)
    assert [(o.request_id, o.finished) for o in world.step(finished_only=True)] == [("B", True)]
    assert world.step(finished_only=True)[0].request_id == "C"
    assert world.step() == []


def test_an_output_that_was_given_does_not_change_afterwards() -> None:
    world = World(gpu=64, tokenizer=ByteTokenizer())
    world.add("A", p=4, n=2, m=5, logprobs=1)
    given: list[tuple[Any, str]] = []
    while world.core.has_unfinished_requests():
        given += [(output.outputs, repr(output.outputs)) for output in world.step()]
    assert all(repr(outputs) == text for outputs, text in given)


def test_the_log_line_and_the_preemption_warning_read_as_in_the_report(caplog: pytest.LogCaptureFixture) -> None:
    world = World(gpu=8, cpu=8)
    world.core.stats.log_stats = True
    world.add("A", p=4, n=2, m=12)
    world.add("37", p=4, n=2, m=12)
    with caplog.at_level(logging.INFO, "lawful"):
        world.until(lambda: world.scheduler.swapped)
        world.core.stats._last_log -= LOG_INTERVAL
        world.step()
    lines = [record.getMessage() for record in caplog.records]
    [warning] = [line for line in lines if "preempted" in line]
    assert warning.startswith("Sequence group 37 is preempted by PreemptionMode.SWAP mode because")
    [line] = [line for line in lines if line.startswith("Avg prompt")]
    assert re.fullmatch(
        r"Avg prompt throughput: \d+\.\d tokens/s, Avg generation throughput: \d+\.\d tokens/s, "
        r"Running: 1 reqs, Swapped: 1 reqs, Pending: 0 reqs, GPU KV cache usage: 62\.5%, CPU KV cache usage: 37\.5%",
        line,
    )


def test_warnings_about_preemption_do_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    world = World(gpu=8, cpu=0, length=64)
    for i in range(40):
        world.add(f"r{i}", p=6, m=20)
    with caplog.at_level(logging.WARNING, "lawful"):
        world.drain()
    warnings = [record.getMessage() for record in caplog.records if "preempted" in record.getMessage()]
    assert world.core.stats.preemptions > 20
    assert len(warnings) == -(-world.core.stats.preemptions // 50)
    assert warnings[0].endswith("total_cumulative_preemption_cnt=1")


def test_requests_that_come_and_go_between_steps_leave_nothing_behind() -> None:
    w = World(gpu=8)
    for i in range(20):
        w.core.add_request(f"r{i}", [1, 2, 3], SamplingParams(max_tokens=2))
        w.core.abort_request(f"r{i}")
        assert [output.outputs[0].finish_reason for output in w.core.step()] == ["abort"]
    assert w.core.stats.actions["abort"] == 20
    assert not w.core.scheduler._log
    assert not w.core.scheduler._departed or len(w.core.scheduler._departed) == 1
