"""Field cases of sampling and stopping, through the whole engine.  Numbers are those of the case list."""

from __future__ import annotations

import pytest

from engine.errors import InvalidParameterError
from engine.models.oracle import Favourites
from engine.tokenizer import ByteTokenizer
from tests.oracle import World, script

# 40

TOYS = ByteTokenizer(["DEF", "G", "HI", "J", "X", "."])
DEF, G, HI, J, X, DOT = range(6)


def stream(world: World, name: str) -> tuple[str, list[str]]:
    """Run to the end; the final text and every delta.  What has been shown is never taken back."""
    shown, deltas = "", []
    while world.core.has_unfinished_requests():
        for output in world.step():
            if output.request_id == name:
                text = output.outputs[0].text
                assert text.startswith(shown)
                deltas.append(text[len(shown) :])
                shown = text
    return world.texts(name)[0], deltas


@pytest.mark.parametrize(
    ("stop", "tokens", "text", "included", "deltas", "reason"),
    [
        (["DE"], [DEF, G], "", "DE", [""], "DE"),
        (["DEFGHIJ"], [DEF, G, HI, J, X], "", "DEFGHIJ", ["", "", "", ""], "DEFGHIJ"),
        (["DEFGHIJ"], [DEF, G, HI, X], "DEFGHIX", "DEFGHIX", ["", "", "", "DEFGHIX"], None),
        (["GH", "FGHI"], [DEF, G, HI], "DE", "DEFGHI", ["DE", "", ""], "FGHI"),
        (["HI", "FG", "DEFGHI"], [DEF, G, HI], "DE", "DEFG", ["", "DE"], "FG"),
        (["GHI", "HI"], [DEF, G, HI], "DEF", "DEFGHI", ["DEF", "", ""], "GHI"),
        (["I", "HI"], [G, HI], "G", "GHI", ["G", ""], "HI"),
        (["EFGX", "GHIJ"], [DEF, G, HI, J], "DEF", "DEFGHIJ", ["D", "", "EF", ""], "GHIJ"),
        (["GG"], [G, X, G, G], "GX", "GXGG", ["", "GX", "", ""], "GG"),
    ],
)
def test_a_stop_string_is_found_inside_and_across_tokens(
    stop: list[str], tokens: list[int], text: str, included: str, deltas: list[str], reason: str | None
) -> None:
    """Case 40: (a) to (d), and more.  Nothing is shown that a stop string may still take."""
    for include in (False, True):
        world = World(gpu=16, tokenizer=TOYS, favourites=script(*tokens))
        world.add("A", prompt=[DOT], m=len(tokens), temperature=0, stop=stop, include_stop_str_in_output=include)
        got, pieces = stream(world, "A")
        completion = world.ended["A"].outputs[0]
        assert got == (included if include else text)
        assert "".join(pieces) == got
        if not include:
            assert pieces == deltas
        assert completion.stop_reason == reason
        assert completion.finish_reason == ("stop" if reason else "length")
        assert completion.token_ids == tokens[: len(pieces)], "the stopping token counts"


@pytest.mark.parametrize("streamed", [True, False])
def test_streamed_and_final_text_are_the_same(streamed: bool) -> None:
    """Case 40: outputs that are only read at the end are those that were streamed."""
    world = World(gpu=16, tokenizer=TOYS, favourites=script(DEF, G, HI, X, G, HI, J))
    world.add("A", prompt=[DOT], m=9, temperature=0, stop=["DEFGHIJ", "GHIJ"])
    while world.core.has_unfinished_requests():
        world.step(finished_only=not streamed)
    assert world.texts("A") == ["DEFGHIX"]


# 42


def favourites_of_case_42() -> Favourites:
    """The second end id at token 2, a stop string at token 3, and an end id after the minimum."""
    return script(5, 7, 10, 2, 7, 20, 10)


@pytest.mark.parametrize("preempted", [False, True])
def test_below_min_tokens_neither_end_ids_nor_stop_strings_end_the_output(preempted: bool) -> None:
    """Case 42.  A stop string completed below the minimum does not count later."""
    eos = (2, 7)
    world = World(5 if preempted else 64, tokenizer=ByteTokenizer(), eos=eos, favourites=favourites_of_case_42())
    if preempted:
        world.add("Z", p=6, m=14)
    world.add("A", p=6, m=8, temperature=0, min_tokens=5, stop="\n", stop_token_ids=[99], ignore_eos=False)
    if preempted:
        world.until(lambda: world.plans[-1:] and world.plans[-1].preempted)
        assert (world.group("A").generated, world.group("A").num_preemptions) == (3, 1)
    world.drain()
    [tokens] = world.tokens("A")
    assert len(tokens) == 7
    assert not {2, 7, 99} & set(tokens[:5])
    assert (tokens[0], tokens[2], tokens[5], tokens[6]) == (5, 10, 20, 10)
    assert world.ended["A"].outputs[0].stop_reason == "\n", "the one after the minimum does"
    assert world.texts("A")[0].count("\n") == 1
    assert world.all_same_as_alone()


def test_the_token_at_the_minimum_may_end_the_output_by_length_of_the_end_id() -> None:
    """Case 42: with min_tokens=5 the sixth token is the first that may be an end id, and then ends the output."""
    world = World(gpu=64, eos=(2, 7), favourites=script(*[7] * 8))
    world.add("A", p=6, m=8, temperature=0, min_tokens=5, ignore_eos=False)
    world.drain()
    [tokens] = world.tokens("A")
    assert len(tokens) == 6
    assert tokens[5] == 7
    assert 7 not in tokens[:5]
    assert world.ended["A"].outputs[0].finish_reason == "stop"


def test_ignore_eos_and_min_tokens_work_together() -> None:
    """Case 42: end ids stay masked below the minimum, and later are ordinary tokens."""
    world = World(gpu=64, eos=(2, 7), favourites=script(*[7] * 8))
    world.add("A", p=6, m=8, temperature=0, min_tokens=5, ignore_eos=True)
    world.drain()
    [tokens] = world.tokens("A")
    assert tokens[5:] == [7, 7, 7]
    assert 7 not in tokens[:5]
    with pytest.raises(InvalidParameterError, match="min_tokens must be at most max_tokens = 4, got 5"):
        world.add("B", m=4, min_tokens=5)


# 43


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("prompt_token_ids", {"prompt": [-1]}),
        ("prompt_token_ids", {"prompt": [100]}),
        ("prompt_token_ids", {"prompt": [3, 2.0]}),
        ("logit_bias", {"logit_bias": {100: 5}}),
        ("logit_bias", {"logit_bias": {-1: 5}}),
        ("stop_token_ids", {"stop_token_ids": [100], "min_tokens": 1}),
        ("allowed_token_ids", {"allowed_token_ids": [1, 100]}),
    ],
)
def test_a_token_id_outside_the_vocabulary_is_refused_and_the_neighbour_does_not_notice(field: str, bad: dict) -> None:
    """Case 43: the error names the field; the server turns it into a 400."""
    world = World(gpu=64, vocab=100)
    world.add("B", p=6, m=6)
    for _ in range(3):
        steps = world.core.stats.steps
        with pytest.raises(InvalidParameterError, match=field):
            world.add("A", m=4, **bad)
        world.step()
        assert world.core.stats.steps == steps + 1
    world.drain()
    assert list(world.ended) == ["B"]
    assert world.same_as_alone("B")
    assert world.core.stats.received == 1


# 44


def case_44(**more: object) -> World:
    return World(**{"gpu": 64, "vocab": 1000, **more})  # type: ignore[arg-type]


def test_a_seeded_request_draws_the_same_alone_beside_others_and_after_any_preemption() -> None:
    """Case 44: five equal outputs, and logprobs equal to the last bit."""
    request = {"prompt": [5, 3, 800, 41, 5, 9], "m": 16, "seed": 42, "temperature": 0.8, "logprobs": 1}
    worlds = [case_44(), case_44(), case_44()]
    worlds[0].add("A", **request)
    worlds[1].add("A", **request)
    worlds[1].add("B", p=7, m=20, seed=None)
    worlds[2].add("B", p=7, m=20, seed=None)
    worlds[2].add("A", **request)
    for mode in ("recompute", "swap"):
        world = case_44(gpu=6, cpu=6, preemption_mode=mode)
        world.add("Z", p=2, m=14)
        world.add("A", **request)
        world.until(lambda world=world: world.plans[-1:] and world.plans[-1].preempted)
        assert world.group("A").generated == 7
        assert world.plans[-1].preempted == [world.group("A")]
        worlds.append(world)
    for world in worlds:
        world.drain()
    assert worlds[3].verbs["preempt:recompute"]
    assert worlds[4].verbs["preempt:swap"]
    results = [(w.tokens("A"), w.ended["A"].outputs[0].logprobs) for w in worlds]
    assert len(results) == 5
    assert all(result == results[0] for result in results)


def test_requests_without_a_seed_draw_differently_from_each_other() -> None:
    """Case 44: an unseeded request gets a seed of its own, a fresh one each time."""
    world = case_44()
    for name in "ABCD":
        world.add(name, prompt=[1, 2, 3], n=2, m=8, seed=None)
    world.drain()
    assert len({tuple(tokens) for name in "ABCD" for tokens in world.tokens(name)}) == 8


# 46

PENALTIES = {"presence_penalty": 0.5, "repetition_penalty": 1.3, "logprobs": 2}
SPANNING = script(None, None, None, ord("a"), ord("b"), request="A")


def case_46(**params: object) -> World:
    """A is preempted by recompute after token 4, with a budget of 4, so that its rebuild takes several steps."""
    world = World(gpu=5, t=4, tokenizer=ByteTokenizer(), favourites=SPANNING)
    world.add("Z", p=3, m=14)
    world.add("A", p=6, m=10, temperature=0, **PENALTIES, **params)
    world.until(lambda: world.plans[-1:] and world.plans[-1].preempted)
    assert world.group("A").generated == 4
    assert [(a.request_id, a.detail) for a in world.plans[-1].log if a.verb == "preempt"] == [("A", "recompute")]
    return world


def test_a_recompute_keeps_the_cut_between_prompt_and_output() -> None:
    """Case 46.  The stop string is completed at token 5, below min_tokens=6, so that it does not count."""
    world = case_46(min_tokens=6, stop="ab")
    rebuild = []
    while world.core.has_unfinished_requests():
        before = len(world.tokens("A")[0])
        world.step()
        for row in world.plans[-1].scheduled:
            if row.group.request_id == "A" and "A" not in world.ended and len(world.tokens("A")[0]) == before:
                assert row.draws == (), "no sample is taken in a partial rebuild"
                rebuild.append((row.start, row.end))
    assert len(rebuild) > 1
    assert rebuild[0][0] == 0
    output = world.ended["A"]
    [completion] = output.outputs
    assert (len(output.prompt_token_ids), len(completion.token_ids)) == (6, 10)
    assert len(completion.logprobs) == 10
    assert all(len(entry) in (2, 3) for entry in completion.logprobs)
    assert completion.token_ids[3:5] == [97, 98]
    assert "ab" in world.texts("A")[0]
    assert world.all_same_as_alone()


def test_a_stop_string_that_spans_a_recompute_is_seen() -> None:
    """Case 46, without the minimum: token 4 is before the preemption, token 5 after the rebuild."""
    world = case_46(stop="ab").drain()
    [completion] = world.ended["A"].outputs
    assert completion.stop_reason == "ab"
    assert len(completion.token_ids) == len(completion.logprobs) == 5
    assert world.all_same_as_alone()


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_processors_and_penalties_see_the_same_output_after_every_preemption(mode: str, chunked: bool) -> None:
    """Case 46: a processor is shown the generated tokens and nothing of the prompt, also while groups are rebuilt."""
    seen: dict[str, list[tuple[int, ...]]] = {}

    def spy(name: str):  # type: ignore[no-untyped-def]
        def look(generated, logits):  # type: ignore[no-untyped-def]
            seen.setdefault(name, []).append(tuple(generated))
            return logits

        return look

    world = World(gpu=8, cpu=6, length=64, preemption_mode=mode, enable_chunked_prefill=chunked)
    for name in "ABC":
        world.add(name, p=7, m=14, logits_processors=[spy(name)], frequency_penalty=0.3, **PENALTIES)
    world.drain()
    assert world.core.stats.preemptions > 1
    for name in "ABC":
        [tokens] = world.tokens(name)
        assert seen[name] == [tuple(tokens[:i]) for i in range(14)], "every position is drawn once"
    assert world.all_same_as_alone()
