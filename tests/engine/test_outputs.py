"""What users see of a branch and of a request."""

import math

import pytest

from engine.branch import BranchOutput
from engine.outputs import Logprob, RequestMetrics, RequestOutput, completions
from engine.request import RequestState, Sampled
from engine.sampling import SamplingParams
from engine.tokenizer import ByteTokenizer

TOY = ByteTokenizer(["a", "b", "c", "<eos>"], eos_token_ids=[3], special_token_ids=[3])


def branches(*tokens: list[Sampled], **given: object) -> list[BranchOutput]:
    request = RequestState("r", [0, 1], SamplingParams(**given), 0, [[] for _ in tokens])  # type: ignore[arg-type]
    made = [BranchOutput(request, i, TOY, TOY.eos_token_ids) for i in range(len(tokens))]
    for branch, draws in zip(made, tokens, strict=True):
        for draw in draws:
            branch.append(draw)
    return made


def test_a_branch_extends_the_tokens_of_its_request() -> None:
    request = RequestState("r", [0, 1], SamplingParams(n=2), 0, [[], []])
    BranchOutput(request, 1, TOY, TOY.eos_token_ids).append(Sampled(2, -1.0))
    assert request.outputs == [[], [2]]
    assert request.tokens(1, 0, 3) == [0, 1, 2]


def test_a_branch_needs_a_limit_from_somebody() -> None:
    request = RequestState("r", [0], SamplingParams(max_tokens=None), 0, [[]])
    with pytest.raises(ValueError, match="max_tokens"):
        BranchOutput(request, 0, TOY, ())
    branch = BranchOutput(request, 0, TOY, (), max_tokens=1)
    assert branch.append(Sampled(0))
    assert branch.finish_reason == "length"


def test_cumulative_logprob_is_the_sum_over_all_tokens() -> None:
    (branch,) = branches([Sampled(0, -0.5), Sampled(1, -1.25), Sampled(3, -2.0)])
    assert branch.finished
    assert branch.to_completion().cumulative_logprob == pytest.approx(-3.75)
    assert branch.logprobs is None


def test_logprobs_name_the_most_likely_tokens_and_the_one_drawn() -> None:
    drawn_first = Sampled(0, -0.1, [(0, -0.1), (3, -2.5)], 1)
    drawn_third = Sampled(2, -3.0, [(0, -0.1), (3, -2.5)], 3)
    (branch,) = branches([drawn_first, drawn_third], logprobs=2)
    first, second = branch.to_completion().logprobs or []
    assert first == {0: Logprob(-0.1, 1, "a"), 3: Logprob(-2.5, 2, "<eos>")}
    assert second == {0: Logprob(-0.1, 1, "a"), 3: Logprob(-2.5, 2, "<eos>"), 2: Logprob(-3.0, 3, "c")}
    assert list(second) == [0, 3, 2]


def test_there_is_one_logprobs_entry_for_every_token_the_stopping_one_included() -> None:
    (branch,) = branches([Sampled(0, -1.0, [], 4), Sampled(1, -1.0, [], 4)], logprobs=0, stop="b")
    output = branch.to_completion()
    assert (output.text, output.stop_reason, len(output.token_ids), len(output.logprobs or [])) == ("a", "b", 2, 2)


def test_a_completion_is_a_copy() -> None:
    (branch,) = branches([Sampled(0, -1.0)])
    output = branch.to_completion()
    branch.append(Sampled(1, -1.0))
    assert (output.text, output.token_ids, output.finished()) == ("a", [0], False)


def test_n_completions_come_in_the_order_of_their_branches() -> None:
    made = branches([Sampled(0, -3.0)], [Sampled(1, -1.0)], n=2)
    assert [(o.index, o.text) for o in completions(made, 2)] == [(0, "a"), (1, "b")]


def test_best_of_returns_the_most_likely_branches_best_first() -> None:
    made = branches([Sampled(0, -3.0)], [Sampled(1, -1.0)], [Sampled(2, -1.0)], [Sampled(0, -math.inf)], n=2, best_of=4)
    assert [(o.index, o.text) for o in completions(made, 2)] == [(0, "b"), (1, "c")]


def test_time_in_queue_is_known_once_a_request_was_scheduled() -> None:
    metrics = RequestMetrics(arrival_time=10.0)
    assert metrics.time_in_queue is None
    metrics.first_scheduled_time = 12.5
    assert metrics.time_in_queue == 2.5


def test_a_new_request_output_says_that_nothing_has_happened() -> None:
    output = RequestOutput("r", "ab", [0, 1])
    assert (output.outputs, output.finished, output.error, output.prompt_logprobs) == ([], False, None, None)
