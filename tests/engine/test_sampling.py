"""Sampling parameters: what is accepted, what is refused, and what the refusal says."""

from typing import Any

import pytest

from engine.sampling import MAX_STOP_STRINGS, InvalidParameterError, SamplingParams

REFUSED = [
    ("temperature", float("nan")),
    ("temperature", -1),
    ("temperature", float("inf")),
    ("temperature", 10**400),
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", None),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_p", float("nan")),
    ("top_k", -2),
    ("top_k", 1.0),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("n", 0),
    ("n", -1),
    ("n", True),
    ("n", 2.0),
    ("n", 2**63),
    ("best_of", 2**63),
    ("max_tokens", 2**63),
    ("best_of", 0),
    ("presence_penalty", 9),
    ("presence_penalty", -2.1),
    ("frequency_penalty", 9),
    ("repetition_penalty", 9),
    ("repetition_penalty", 0),
    ("logprobs", 10**6),
    ("logprobs", -1),
    ("logprobs", True),
    ("prompt_logprobs", 1),
    ("seed", 2**70),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("seed", 1.5),
    ("stop", [""]),
    ("stop", ""),
    ("stop", ["a"] * 10_000),
    ("stop", ["a" * 10_000]),
    ("stop", [1]),
    ("stop", 1),
    ("stop_token_ids", 5),
    ("stop_token_ids", ["5"]),
    ("stop_token_ids", [-1]),
    ("max_tokens", "5"),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", True),
    ("max_tokens", 1.5),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("logit_bias", [1]),
    ("logit_bias", {"1": 1}),
    ("logit_bias", {1: 101}),
    ("logit_bias", {1: float("nan")}),
    ("logit_bias", {-1: 1}),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [-1]),
    ("logits_processors", [1]),
    ("logits_processors", len),
    ("ignore_eos", 1),
    ("detokenize", None),
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda v: repr(v)[:20])
def test_a_bad_value_is_refused_by_name_with_the_value_and_what_is_allowed(name: str, value: object) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        SamplingParams(**{name: value})
    error = caught.value
    assert isinstance(error, ValueError)
    assert error.parameter == name
    assert str(error).startswith(f"{name} must be ")
    assert ", got " in str(error)
    assert len(str(error)) < 300


def test_the_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.n, params.best_of, params.temperature, params.top_p, params.top_k) == (1, None, 1.0, 1.0, -1)
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (16, 0, None, None)
    assert params.skip_special_tokens
    assert params.detokenize
    assert not params.ignore_eos
    assert not params.include_stop_str_in_output


def test_the_limits_themselves_are_accepted() -> None:
    SamplingParams(temperature=0, top_p=1, top_k=0, min_p=1, presence_penalty=-2, frequency_penalty=2)
    SamplingParams(repetition_penalty=2, logprobs=20, seed=-(2**63), max_tokens=None, min_tokens=10**6)
    SamplingParams(seed=2**63 - 1, stop=["x"] * MAX_STOP_STRINGS, min_tokens=16, logit_bias={0: -100, 1: 100})


def test_best_of_below_n_is_refused_and_width_is_the_larger() -> None:
    with pytest.raises(InvalidParameterError, match="best_of must be an integer of n = 3 or more, got 2"):
        SamplingParams(n=3, best_of=2)
    assert SamplingParams(n=3).width == 3
    assert SamplingParams(n=2, best_of=5).width == 5


def test_greedy_with_best_of_above_n_is_refused_but_with_n_branches_it_is_not() -> None:
    with pytest.raises(InvalidParameterError, match="best_of"):
        SamplingParams(n=1, best_of=2, temperature=0)
    assert SamplingParams(n=2, temperature=0).is_greedy
    assert SamplingParams(n=2, best_of=2, temperature=0).width == 2


def test_stop_strings_without_text_are_refused() -> None:
    with pytest.raises(InvalidParameterError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


@pytest.mark.parametrize("name", ["use_beam_search", "length_penalty", "priority"])
def test_names_that_are_not_supported_are_not_accepted(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: 1})


@pytest.mark.parametrize(
    ("name", "given"), [("stop_token_ids", [100]), ("logit_bias", {100: 5.0}), ("allowed_token_ids", [3, 100])]
)
def test_token_ids_outside_the_vocabulary_are_refused_in_every_field(name: str, given: object) -> None:
    params = SamplingParams(**{name: given})
    params.check_against_vocabulary(101)
    with pytest.raises(InvalidParameterError) as caught:
        params.check_against_vocabulary(100)
    assert name in str(caught.value)
    assert "99" in str(caught.value)
    assert "100" in str(caught.value)


def test_params_cannot_change_after_they_were_checked() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().temperature = float("nan")  # type: ignore[misc]


def test_a_caller_changing_its_lists_later_changes_nothing() -> None:
    stops, bias = ["a"], {1: 2.0}
    params = SamplingParams(stop=stops, logit_bias=bias)
    stops.append("")
    bias[-5] = float("nan")
    assert params.stop == ("a",)
    assert params.logit_bias == {1: 2.0}


def test_equal_params_have_one_hash_whatever_they_hold() -> None:
    def made(bias: float) -> SamplingParams:
        return SamplingParams(stop=["a"], logit_bias={1: bias}, allowed_token_ids=[1], logits_processors=[PROCESSOR])

    assert len({made(2.0), made(2.0), made(3.0)}) == 2
    assert hash(made(2.0)) == hash(made(2.0).clone())


@pytest.mark.parametrize("name", ["n", "best_of", "max_tokens", "min_tokens", "seed"])
def test_an_integer_of_more_digits_than_python_prints_is_refused_in_our_words(name: str) -> None:
    given: dict[str, Any] = {"best_of": 3, "min_tokens": 3, name: 10**5000}
    with pytest.raises(
        InvalidParameterError, match=rf"{name} must be an integer from .+ to \d+, got a value of type int"
    ):
        SamplingParams(**given)


class Processor:
    """One that has no hash."""

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, _: list[int], row: Any) -> Any:
        return row


PROCESSOR = Processor()


def test_a_clone_is_equal_and_apart() -> None:
    params = SamplingParams(n=2, stop=["a"], logit_bias={1: 2.0}, seed=7)
    assert params.clone() == params
    assert params.clone() is not params
