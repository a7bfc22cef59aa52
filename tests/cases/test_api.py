"""Field cases of the API that need no server.  Numbers are those of the case list; where a case speaks of a status
code, the error that the server turns into it is asserted here."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine.errors import ConfigError, DuplicateError, InvalidParameterError, RefusedError
from engine.sampling import SamplingParams
from engine.tokenizer import ByteTokenizer
from tests.oracle import World, script
from tests.worlds import ids

# 49


@pytest.mark.parametrize("bad", [0, -1])
def test_max_tokens_below_one_is_refused_before_any_state_is_made(bad: int) -> None:
    """Case 49: 0 is a stated error here (scoring a prompt is not offered); nothing is sampled, no block is held."""
    world = World(gpu=16)
    with pytest.raises(InvalidParameterError, match=f"max_tokens must be an integer of 1 or more, got {bad}"):
        world.add("A", m=bad)
    world.check_drained()
    assert world.core.stats.received == 0


@pytest.mark.parametrize("logprobs", [None, 2])
def test_max_tokens_null_means_as_many_as_the_limits_allow_and_one_means_one(logprobs: int | None) -> None:
    """Case 49."""
    world = World(gpu=64, length=20)
    world.add("null", p=4, m=None, logprobs=logprobs)
    world.add("one", p=4, m=1, logprobs=logprobs)
    world.drain()
    assert [len(world.tokens(name)[0]) for name in ("null", "one")] == [16, 1]
    assert [world.ended[name].outputs[0].finish_reason for name in ("null", "one")] == ["length", "length"]
    assert world.all_same_as_alone()


def test_the_only_token_ends_the_output_by_stop_if_it_is_the_end_of_the_sequence() -> None:
    """Case 49: m=1 gives `stop` if that token is EOS."""
    world = World(gpu=64, eos=(9,), favourites=script(9))
    world.add("A", m=1, temperature=0, ignore_eos=False)
    world.drain()
    assert (world.tokens("A"), world.ended["A"].outputs[0].finish_reason) == ([[9]], "stop")


def test_absent_max_tokens_is_the_default_of_sixteen() -> None:
    """Case 49."""
    world = World(gpu=64)
    [output] = world.llm().generate([1, 2, 3], SamplingParams(ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 16


# 50


@pytest.mark.parametrize("chunked", [True, False])
def test_the_total_never_passes_max_model_len_and_can_reach_it(chunked: bool) -> None:
    """Case 50.  (p=16, m=0) is refused like every max_tokens of 0."""
    world = World(gpu=16, length=16, enable_chunked_prefill=chunked)
    longest = []
    world.between = lambda plan: longest.extend(len(row.block_table) for row in plan.scheduled)
    for i, (p, m, made) in enumerate([(15, 5, 1), (12, 4, 4), (15, None, 1), (12, 400, 4), (16, 1, 0), (17, 1, 0)]):
        if made:
            world.add(f"r{i}", p=p, m=m)
            world.drain()
            assert len(world.tokens(f"r{i}")[0]) == made
            assert world.ended[f"r{i}"].outputs[0].finish_reason == "length"
        else:
            with pytest.raises(RefusedError, match=rf"the prompt has {p} tokens, .* \(16\); at most 15") as refused:
                world.add(f"r{i}", p=p, m=m)
            assert refused.value.reason == "max_model_len"
        world.add(f"next{i}", p=4, m=1)
        world.drain()
        assert len(world.tokens(f"next{i}")[0]) == 1
    assert max(longest) == 4


# 51


def test_a_budget_below_the_context_is_refused_without_chunking_and_pieces_serve_with_it() -> None:
    """Case 51: a start error, never an empty answer."""
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(8\) is below max_model_len \(32\)"):
        World(gpu=16, t=8, length=32, enable_chunked_prefill=False)
    world = World(gpu=16, t=8, length=32)
    world.add("A", p=12, m=4)
    world.step()
    assert "A" not in world.outputs, "no output before the prompt is computed"
    world.step()
    assert len(world.tokens("A")[0]) == 1
    world.drain()
    assert [(row.start, row.end) for plan in world.plans[:2] for row in plan.scheduled] == [(0, 8), (8, 12)]
    assert world.same_as_alone("A")


def test_generate_returns_results_in_input_order_even_if_some_are_refused() -> None:
    """Case 51."""
    world = World(gpu=16, t=8, length=32)
    prompts = [[1] * 20, [2] * 40, [3] * 5, [], [64], [4] * 12]
    outputs = world.llm().generate(prompts, SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert [output.request_id for output in outputs] == list("012345")
    assert [output.error is None for output in outputs] == [True, False, True, False, False, True]
    assert [len(output.outputs) for output in outputs] == [1, 0, 1, 0, 0, 1]
    assert all(output.finished for output in outputs)
    assert "the prompt has 40 tokens" in outputs[1].error
    assert "the prompt is empty" in outputs[3].error
    assert "prompt_token_ids must be token ids from 0 to 63" in outputs[4].error


# 53


def test_a_request_id_in_use_is_refused_and_its_owner_does_not_notice() -> None:
    """Case 53."""
    world = World(gpu=64)
    world.add("x", p=5, m=50)
    for _ in range(5):
        world.step()
    asked = dict(world.asked)
    with pytest.raises(DuplicateError, match="request id 'x' is in use by an unfinished request"):
        world.add("x", p=9, m=2)
    world.asked = asked
    world.drain()
    assert world.same_as_alone("x")
    world.outputs.clear()
    world.add("x", p=7, m=4)
    world.drain()
    assert world.same_as_alone("x"), "the id is free again"
    counts = world.core.stats.to_dict()
    assert (counts["requests_received"], counts["requests_finished"], counts["requests_refused"]) == (2, 2, 1)
    assert all(value >= 0 for value in counts.values())  # type: ignore[operator]


def test_branches_do_not_clash_with_ids_that_look_like_theirs() -> None:
    """Case 53: a user may call a request "x_1", and an abort touches its own alone."""
    world = World(gpu=64)
    for name in ("x", "x_1", "x_0", "x-1", ""):
        world.add(name, p=5, n=3, m=6)
    world.step()
    assert world.abort("x_1")
    assert ids(world.scheduler.running) == ["x", "x_0", "x-1", ""]
    world.drain()
    assert all(world.same_as_alone(name) for name in ("x", "x_0", "x-1", ""))


def test_an_id_can_be_used_again_as_soon_as_its_request_is_aborted() -> None:
    """Case 53: at a boundary at once; between schedule and update only when the step is over."""
    world = World(gpu=64)
    world.add("x", p=5, m=6)
    world.step()
    world.core.abort_request("x")
    world.core.add_request("x", [1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))
    outputs = []
    refused = []

    def again(plan: object) -> None:
        world.core.abort_request("x")
        with pytest.raises(DuplicateError):
            world.core.add_request("x", [4], SamplingParams(max_tokens=1))
        refused.append(True)

    world.between = again
    while world.core.has_unfinished_requests():
        outputs += world.core.step()
    assert [(o.request_id, len(o.prompt_token_ids), o.outputs[0].finish_reason) for o in outputs] == [
        ("x", 5, "abort"),
        ("x", 3, "abort"),
    ]
    assert refused == [True]
    world.check_drained()


# 54

BAD: list[tuple[str, dict[str, Any]]] = [
    ("temperature", {"temperature": math.nan}),
    ("temperature", {"temperature": -1}),
    ("temperature", {"temperature": math.inf}),
    ("temperature", {"temperature": "hot"}),
    ("top_p", {"top_p": 0}),
    ("top_p", {"top_p": 1.5}),
    ("top_k", {"top_k": -2}),
    ("n", {"n": 0}),
    ("n", {"n": -1}),
    ("n", {"n": 1.5}),
    ("best_of", {"n": 3, "best_of": 2}),
    ("presence_penalty", {"presence_penalty": 9}),
    ("frequency_penalty", {"frequency_penalty": -9}),
    ("repetition_penalty", {"repetition_penalty": 9}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("logprobs", {"logprobs": 10**6}),
    ("logprobs", {"logprobs": -1}),
    ("seed", {"seed": 2**70}),
    ("stop", {"stop": [""]}),
    ("stop", {"stop": ["x"] * 10_000}),
    ("stop", {"stop": 5}),
    ("max_tokens", {"max_tokens": "5"}),
    ("min_tokens", {"min_tokens": 9, "max_tokens": 8}),
    ("logits_processors", {"logits_processors": [3]}),
]


@pytest.mark.parametrize(("field", "bad"), BAD)
def test_a_bad_value_is_found_before_the_loop_and_the_neighbour_does_not_notice(field: str, bad: dict) -> None:
    """Case 54: the error names the field, before anything is added."""
    world = World(gpu=64)
    world.add("B", p=6, m=4)
    world.step()
    with pytest.raises(InvalidParameterError) as refused:
        world.core.add_request("A", [1, 2], SamplingParams(**bad))
    assert refused.value.parameter == field
    assert str(refused.value).startswith(f"{field} must be ")
    steps = world.core.stats.steps
    world.drain()
    assert world.core.stats.steps == steps + 3
    assert world.same_as_alone("B")


@pytest.mark.parametrize("at", [0, 2])
def test_a_logits_processor_that_raises_ends_its_own_request_alone(at: int) -> None:
    """Case 54."""

    def broken(generated: list[int], logits: Any) -> Any:
        if len(generated) == at:
            raise ZeroDivisionError("my processor")
        return logits

    world = World(gpu=64)
    world.add("B", p=6, m=8)
    world.add("A", p=6, n=2, m=8, logits_processors=[broken])
    world.drain()
    assert "my processor" in world.ended["A"].error
    assert "ZeroDivisionError" in world.ended["A"].error
    assert [c.finish_reason for c in world.ended["A"].outputs] == ["error", "error"]
    assert [len(tokens) for tokens in world.tokens("A")] == [at, at]
    assert world.same_as_alone("B")
    assert (world.core.stats.failed, world.core.stats.finished) == (1, 1)


# 56


@pytest.mark.parametrize("cpu", [24, 0])
def test_tokens_are_counted_once_for_the_prompt_and_for_every_branch(cpu: int) -> None:
    """Case 56, what the server counts from: partial prefill steps give no output, also for a preempted request."""
    world = World(gpu=18, cpu=cpu, t=8, s=8)
    world.add("A", p=30, n=2, m=9)
    world.add("B", p=30, n=2, m=9)
    early = [output.request_id for _ in range(3) for output in world.step()]
    assert early == [], "no output before the prompt is computed"
    world.drain()
    assert world.core.stats.preemptions > 0
    for name in "AB":
        assert len(world.ended[name].prompt_token_ids) == 30
        assert [len(tokens) for tokens in world.tokens(name)] == [9, 9]
    assert world.core.stats.prompt_tokens == 60
    assert world.core.stats.generation_tokens == 36
    computed = sum(plan.num_tokens for plan in world.plans)
    assert computed == world.core.stats.computed_tokens == 60 + 2 * 2 * 8 + world.core.stats.recomputed_tokens


# 57


def text_of(*output: bytes, prompt: bytes = b"say", m: int | None = None, **params: Any) -> tuple[str, list[str]]:
    """Text and deltas of a greedy request that is made to generate these bytes."""
    data = b"".join(output)
    world = World(gpu=64, tokenizer=ByteTokenizer(), favourites=script(*data))
    world.add("A", prompt=list(prompt), m=m or len(data), temperature=0, **params)
    deltas, shown = [], ""
    while world.core.has_unfinished_requests():
        for output_ in world.step():
            text = output_.outputs[0].text
            assert text.startswith(shown), "what was shown is taken back"
            deltas.append(text[len(shown) :])
            shown = text
    assert "".join(deltas) == world.texts("A")[0]
    again = World(gpu=64, tokenizer=ByteTokenizer(), favourites=script(*data))
    again.add("A", prompt=list(prompt), m=m or len(data), temperature=0, **params)
    while again.core.has_unfinished_requests():
        again.step(finished_only=True)
    assert again.texts("A") == world.texts("A"), "both modes give the same text"
    return shown, deltas


def test_a_character_of_four_tokens_is_shown_whole_or_not_at_all() -> None:
    """Case 57: F0 9F 98 80, whole and cut off after two bytes."""
    assert text_of("😀!".encode()) == ("😀!", ["", "", "", "😀", "!"])
    text, deltas = text_of("ab😀".encode()[:4])
    assert text == "ab\ufffd"
    assert deltas == ["a", "b", "", "\ufffd"], "the unfinished tail is resolved at the end and not before"
    assert text_of("ไทย".encode())[0] == "ไทย"


def test_a_prompt_that_ends_inside_a_character_is_context_and_never_output() -> None:
    """Case 57: the output completes the character, or does not."""
    euro = "€".encode()
    assert text_of(euro[2:], b"5", prompt=b"price " + euro[:2])[0] == "€5"
    text, deltas = text_of(b"5!", prompt=b"price " + euro[:2])
    assert (text, deltas) == ("5!", ["5", "!"])
    assert text_of(b"ok", prompt="long before ไทย".encode())[1] == ["o", "k"]


def test_a_genuine_replacement_character_is_text_like_any_other() -> None:
    """Case 57."""
    text, deltas = text_of("a\ufffdb".encode())
    assert (text, deltas) == ("a\ufffdb", ["a", "", "", "\ufffd", "b"])


def test_stop_strings_of_many_bytes_are_found_and_held_back() -> None:
    """Case 57 with case 40."""
    assert text_of("hi 😀 there".encode(), stop=["😀"]) == ("hi ", ["h", "i", " ", "", "", "", ""])
    assert text_of("a😀b".encode(), stop=["😀c"])[1] == ["a", "", "", "", "", "😀b"]
    assert text_of("a😀c".encode(), stop=["😀c"])[0] == "a"
