"""When a branch ends, and what of its text is shown before and after."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.branch import BranchOutput
from engine.request import RequestState, Sampled
from engine.sampler import Sampler
from engine.sampling import SamplingParams
from engine.stopping import StopString
from engine.tokenizer import ByteTokenizer

TOY = ByteTokenizer(["DEF", "G", "HI", "J", "X", "<eos>", "<end>"], eos_token_ids=[5, 6], special_token_ids=[5, 6])
DEF, G, HI, J, X, EOS, END = range(7)


class Run:
    """Feed tokens to a branch until it ends; `deltas[i]` is what was shown after token i."""

    def __init__(self, token_ids: list[int], tokenizer: ByteTokenizer | None = TOY, **given: object) -> None:
        params = SamplingParams(**{"max_tokens": 100, **given})  # type: ignore[arg-type]
        request = RequestState("r", [], params, 0, [[]])
        self.branch = BranchOutput(request, 0, tokenizer, tokenizer.eos_token_ids if tokenizer else {5, 6})
        self.deltas: list[str] = []
        for token_id in token_ids:
            done = self.branch.append(Sampled(token_id))
            self.deltas.append(self.branch.delta())
            assert "".join(self.deltas) == self.branch.text
            if done:
                break

    @property
    def end(self) -> tuple[str, str | None, object, list[int]]:
        branch = self.branch
        return branch.text, branch.finish_reason, branch.stop_reason, branch.token_ids


# Stop strings inside and across tokens.


def test_a_stop_string_inside_one_token_is_found() -> None:
    assert Run([DEF, G], stop="DE").end == ("", "stop", "DE", [DEF])
    assert Run([DEF, G], stop="DE", include_stop_str_in_output=True).end == ("DE", "stop", "DE", [DEF])
    assert Run([DEF, G], stop="E").end == ("D", "stop", "E", [DEF])


def test_a_stop_string_across_four_tokens_is_found_and_nothing_of_it_is_shown_early() -> None:
    run = Run([DEF, G, HI, J], stop="DEFGHIJ")
    assert run.deltas == ["", "", "", ""]
    assert run.end == ("", "stop", "DEFGHIJ", [DEF, G, HI, J])
    run = Run([DEF, G, HI, J], stop=["DEFGHIJ"], include_stop_str_in_output=True)
    assert run.deltas == ["", "", "", "DEFGHIJ"]


def test_text_held_back_is_released_when_it_cannot_be_a_stop_string_any_more() -> None:
    run = Run([DEF, G, HI, X, X], stop="DEFGHIJ")
    assert run.deltas == ["", "", "", "DEFGHIX", "X"]
    assert not run.branch.finished


@pytest.mark.parametrize(("token_id", "reason"), [(HI, "length"), (EOS, "stop")])
def test_text_held_back_is_released_at_the_end(token_id: int, reason: str) -> None:
    run = Run([DEF, G, token_id], stop="DEFGHIJ", max_tokens=3)
    assert run.deltas == ["", "", "DEFGHI" if token_id == HI else "DEFG"]
    assert run.branch.finish_reason == reason
    assert run.branch.stop_reason is None


def test_text_held_back_is_released_by_an_abort() -> None:
    run = Run([DEF, G], stop="DEFGHIJ")
    run.branch.finish("abort")
    assert run.branch.delta() == "DEFG"
    assert run.end == ("DEFG", "abort", None, [DEF, G])


@pytest.mark.parametrize("stops", [["FG", "EFG"], ["EFG", "FG"]])
@pytest.mark.parametrize("include", [False, True])
def test_of_several_stop_strings_the_one_that_starts_first_wins(stops: list[str], include: bool) -> None:
    run = Run([DEF, G], stop=stops, include_stop_str_in_output=include)
    assert run.end == ("DEFG" if include else "D", "stop", "EFG", [DEF, G])


@pytest.mark.parametrize("stops", [["EF", "E"], ["E", "EF"]])
def test_of_stop_strings_that_start_together_the_shortest_wins(stops: list[str]) -> None:
    assert Run([DEF], stop=stops, include_stop_str_in_output=True).end == ("DE", "stop", "E", [DEF])


def test_a_complete_stop_string_does_not_wait_for_a_longer_one_that_began_before_it() -> None:
    assert Run([DEF, G], stop=["EFGH", "F"]).end == ("DE", "stop", "F", [DEF])


# Tokens and length.


def test_the_end_token_counts_but_leaves_no_text() -> None:
    for end in (EOS, END):
        assert Run([DEF, end, G]).end == ("DEF", "stop", None, [DEF, end])
    shown = Run([DEF, EOS], include_stop_str_in_output=True, skip_special_tokens=False)
    assert shown.end == ("DEF<eos>", "stop", None, [DEF, EOS])


def test_ignore_eos_goes_on_unless_the_token_is_a_stop_token_too() -> None:
    run = Run([DEF, EOS, G], ignore_eos=True, max_tokens=3)
    assert run.end == ("DEFG", "length", None, [DEF, EOS, G])
    assert Run([DEF, EOS, G], ignore_eos=True, stop_token_ids=[EOS]).end[1:3] == ("stop", EOS)


def test_a_stop_token_counts_and_its_text_is_shown_only_when_asked() -> None:
    assert Run([DEF, G, HI], stop_token_ids=[G]).end == ("DEF", "stop", G, [DEF, G])
    run = Run([DEF, G, HI], stop_token_ids=[G], include_stop_str_in_output=True)
    assert run.end == ("DEFG", "stop", G, [DEF, G])


def test_length_ends_a_branch_and_a_stop_at_the_same_token_comes_first() -> None:
    assert Run([DEF, G, HI], max_tokens=2).end == ("DEFG", "length", None, [DEF, G])
    assert Run([DEF, G], max_tokens=2, stop="G").end == ("DEF", "stop", "G", [DEF, G])
    assert Run([DEF, EOS], max_tokens=2).end == ("DEF", "stop", None, [DEF, EOS])


def test_a_finished_branch_takes_no_more_tokens() -> None:
    run = Run([EOS])
    with pytest.raises(RuntimeError, match="finished"):
        run.branch.append(Sampled(G))


def test_without_a_tokenizer_tokens_and_length_still_end_a_branch() -> None:
    assert Run([DEF, EOS], tokenizer=None).end == ("", "stop", None, [DEF, EOS])
    assert Run([DEF, G], detokenize=False, max_tokens=2).end == ("", "length", None, [DEF, G])


# min_tokens.


def test_below_min_tokens_neither_strings_nor_ids_end_a_branch() -> None:
    run = Run([G, EOS, J, J], min_tokens=4, stop=["G"], stop_token_ids=[J])
    assert run.end[1:] == ("stop", J, [G, EOS, J, J])


def test_a_stop_string_completed_below_min_tokens_does_not_count_later() -> None:
    run = Run([G, HI, J, X, X], min_tokens=3, stop=["HI"], max_tokens=5)
    assert run.end == ("GHIJXX", "length", None, [G, HI, J, X, X])
    assert run.deltas == ["G", "HI", "J", "X", "X"]


def test_a_stop_string_begun_below_min_tokens_counts_when_it_is_completed() -> None:
    run = Run([DEF, G, HI, J], min_tokens=3, stop=["FGH"])
    assert run.end == ("DE", "stop", "FGH", [DEF, G, HI])


def test_the_token_that_reaches_min_tokens_may_stop() -> None:
    assert Run([G, G, HI], min_tokens=2, stop="G").end == ("G", "stop", "G", [G, G])


def test_min_tokens_holds_against_favoured_end_tokens_and_a_stop_string_through_a_recompute() -> None:
    """Sampler and branch together: the end token is the favourite of every step, a stop string comes third."""
    tokenizer = ByteTokenizer(["a", "b", "<eos>", "c", "\n", "d", "e", "<end>"], eos_token_ids=[2, 7])
    favourites = [[0], [7, 1], [2, 4], [7, 3], [2, 5], [7], [6], [6]]

    def run(recompute: bool) -> BranchOutput:
        params = SamplingParams(min_tokens=5, max_tokens=8, stop="\n", temperature=0)
        request = RequestState("r", [0], params, 0, [[]])
        branch = BranchOutput(request, 0, tokenizer, tokenizer.eos_token_ids)
        sampler = Sampler(8, tokenizer.eos_token_ids)
        for step, favoured in enumerate(favourites):
            if recompute and step == 3:  # what is rebuilt on the device starts from the same request
                request = RequestState("r", request.prompt_token_ids, params, 0, request.outputs)
            logits = torch.zeros(1, 8)
            logits[0, favoured] = torch.tensor([9.0, 5.0])[: len(favoured)]
            sampled = sampler.sample(logits, [(request, 0)])[0]
            assert isinstance(sampled, Sampled)
            if branch.append(sampled):
                break
        return branch

    for branch in (run(False), run(True)):
        assert branch.token_ids == [0, 1, 4, 3, 5, 7]
        assert (branch.text, branch.finish_reason, branch.stop_reason) == ("ab\ncd", "stop", None)


# Characters split over tokens, together with stop strings.


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_of_split_characters_is_found(include: bool) -> None:
    run = Run(
        list("a😀€b".encode()), tokenizer=ByteTokenizer(), stop="😀€", include_stop_str_in_output=include, max_tokens=20
    )
    assert run.branch.text == ("a😀€" if include else "a")
    assert run.branch.stop_reason == "😀€"
    assert run.deltas[1:-1] == [""] * 6


def test_an_unfinished_character_at_the_length_limit_is_resolved_in_the_text_and_in_the_stream() -> None:
    run = Run([65, 0xF0, 0x9F], tokenizer=ByteTokenizer(), max_tokens=3)
    assert run.deltas == ["A", "", "\ufffd"]
    run = Run([65, 0xF0, 0x9F, 256], tokenizer=ByteTokenizer())
    assert run.end == ("A\ufffd", "stop", None, [65, 0xF0, 0x9F, 256])


def naive_end(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    """The text after the first piece with which any stop string is in the text, cut at the one that starts first."""
    text = ""
    for piece in pieces:
        text += piece
        found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
        if found:
            start, _, stop = min(found)
            return text[:start], stop
    return text, None


LETTERS = st.text(alphabet="aab€", min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(st.lists(LETTERS, max_size=8), st.lists(LETTERS, max_size=3), st.booleans())
def test_deltas_joined_are_the_text_and_no_text_is_taken_back(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    tokenizer = ByteTokenizer([*pieces, "unused"])
    run = Run(list(range(len(pieces))), tokenizer, stop=stops, include_stop_str_in_output=include)
    text, stop = naive_end(pieces, stops)
    assert run.branch.stop_reason == stop
    if stop is None:
        run.branch.finish("abort")
    assert run.branch.text == text + (stop if stop and include else "")
    assert "".join([*run.deltas, run.branch.delta()]) == run.branch.text


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="ab€", max_size=12), st.lists(LETTERS, max_size=2), st.lists(st.integers(0, 60), max_size=8))
def test_streamed_and_whole_texts_agree_with_random_byte_splits(text: str, stops: list[str], cuts: list[int]) -> None:
    data = text.encode()
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    tokenizer = ByteTokenizer([*(data[a:b] for a, b in pairwise(places)), b"|"])
    tokens = list(range(len(places) - 1))
    streamed = Run(tokens, tokenizer, stop=stops)
    request = RequestState("r", [], SamplingParams(stop=stops, max_tokens=100), 0, [[]])
    whole = BranchOutput(request, 0, tokenizer, ())
    for token_id in tokens:
        if whole.append(Sampled(token_id)):
            break
    for branch in (streamed.branch, whole):
        branch.finish("abort")
    assert "".join(streamed.deltas) + streamed.branch.delta() == whole.text
    assert "\ufffd" not in whole.text


@settings(max_examples=200, deadline=None)
@given(LETTERS, st.lists(st.text(alphabet="aab€", max_size=5), max_size=6))
def test_what_is_held_back_is_the_longest_end_that_the_stop_string_begins_with(stop: str, pieces: list[str]) -> None:
    string = StopString(stop)
    text = ""
    for piece in pieces:
        before, text = text, text + piece
        ends = [i for i in range(len(before) + 1, len(text) + 1) if text[:i].endswith(stop)]
        assert string.feed(piece) == (len(text) - ends[0] if ends else None)
        assert string.held == max(k for k in range(len(stop)) if text.endswith(stop[:k]))
