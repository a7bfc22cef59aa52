"""Streams of tokens become whole characters: nothing broken, nothing of the prompt, nothing lost."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.detokenizer import Detokenizer
from engine.tokenizer import ByteTokenizer, Tokenizer

BYTES = ByteTokenizer()
EOS = 256


def deltas(token_ids: list[int], prompt: list[int] | None = None, tokenizer: Tokenizer = BYTES, **given: bool) -> list:
    """What every append returns, and at the end what flush does."""
    detokenizer = Detokenizer(tokenizer, prompt or [], **given)
    return [*(detokenizer.append(i) for i in token_ids), detokenizer.flush()]


class WholeTextTokenizer(ByteTokenizer):
    """One whose tokens have no bytes of their own: decoding works on texts only, and drops a leading space."""

    def token_bytes(self, token_id: int) -> None:  # type: ignore[override]
        return None

    def decode(self, token_ids, skip_special_tokens: bool = True) -> str:  # type: ignore[no-untyped-def]
        kept = [i for i in token_ids if not (skip_special_tokens and i in self.special_token_ids)]
        return b"".join(self._pieces[i] for i in kept).decode(errors="replace").removeprefix(" ")


WHOLE = WholeTextTokenizer()


@pytest.mark.parametrize("tokenizer", [BYTES, WHOLE])
def test_a_character_split_over_four_tokens_comes_out_whole(tokenizer: Tokenizer) -> None:
    assert deltas(list("😀".encode()), tokenizer=tokenizer) == ["", "", "", "😀", ""]


@pytest.mark.parametrize("tokenizer", [BYTES, WHOLE])
def test_an_unfinished_character_at_the_end_becomes_one_replacement_character(tokenizer: Tokenizer) -> None:
    assert deltas([65, 0xF0, 0x9F], tokenizer=tokenizer) == ["A", "", "", "\ufffd"]


@pytest.mark.parametrize("tokenizer", [BYTES, WHOLE])
def test_a_genuine_replacement_character_is_text_like_any_other(tokenizer: Tokenizer) -> None:
    text = "a\ufffdb\ufffd"
    assert "".join(deltas(list(text.encode()), tokenizer=tokenizer)) == text


def test_a_prompt_that_ends_inside_a_character_is_context_and_never_output() -> None:
    euro = "€".encode()
    assert deltas([*euro[2:], 65], prompt=[66, *euro[:2]]) == ["€", "A", ""]  # the output completes it
    assert deltas([65, 66], prompt=[66, *euro[:2]]) == ["A", "B", ""]  # the output does not
    assert deltas([0xF0, 0x9F, 0x98, 0x80], prompt=[*euro[:2]]) == ["", "", "", "😀", ""]
    assert deltas([], prompt=[*euro[:2]]) == [""]
    assert deltas([0xBD], prompt=[0xEF, 0xBF]) == ["\ufffd", ""]  # a genuine U+FFFD, completed by the output
    assert deltas([0x98, 65], prompt=[0xF0, 0x9F]) == ["", "\ufffdA", ""]  # its last byte was generated
    assert deltas([65], prompt=list(b"Hello")) == ["A", ""]


@pytest.mark.parametrize("tokenizer", [BYTES, WHOLE])
def test_the_first_delta_contains_no_prompt_text(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("Once upon a time")
    assert deltas(tokenizer.encode(" there"), prompt, tokenizer)[0] == " "


def test_special_tokens_leave_text_only_when_asked() -> None:
    assert deltas([65, EOS, 66]) == ["A", "", "B", ""]
    assert deltas([65, EOS, 66], skip_special_tokens=False) == ["A", "<eos>", "B", ""]
    assert deltas([0x98, 0x80], prompt=[0xF0, 0x9F, EOS]) == ["", "😀", ""]


TEXT = st.text(alphabet=st.sampled_from("aé€😀ไ\ufffd\n ะ"), max_size=20)


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    """`data` cut into tokens at the given places: inside characters as well."""
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in pairwise(places)]


@settings(max_examples=150, deadline=None)
@given(TEXT, st.lists(st.integers(0, 100), max_size=12), st.booleans())
def test_deltas_joined_are_the_text_however_its_bytes_are_cut(text: str, cuts: list[int], whole: bool) -> None:
    pieces = pieces_of(text.encode(), cuts)
    kind = WholeTextTokenizer if whole else ByteTokenizer
    tokenizer = kind([b"|", *pieces])
    parts = deltas(list(range(1, len(pieces) + 1)), [0], tokenizer)
    assert "".join(parts) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from([0x41, 0x80, 0x9F, 0x98, 0xBF, 0xC3, 0xE2, 0xED, 0xF0, 0xF4, 0xFF, EOS]), max_size=12))
def test_deltas_joined_are_the_decode_of_any_bytes_at_all(token_ids: list[int]) -> None:
    assert "".join(deltas(token_ids)) == BYTES.decode(token_ids)


def test_the_window_that_is_decoded_does_not_grow_with_the_output() -> None:
    longest = 0

    class Watched(WholeTextTokenizer):
        def decode(self, token_ids, skip_special_tokens: bool = True) -> str:  # type: ignore[no-untyped-def]
            nonlocal longest
            longest = max(longest, len(token_ids))
            return super().decode(token_ids, skip_special_tokens)

    for token_id in (65, 0x80):  # whole characters; bytes that never complete one
        deltas([token_id] * 500, [65] * 100, Watched())
    assert longest < 20
