"""Text to token ids and back: one interface over a Hugging Face directory, a GGUF file, or a toy for tests.

Where a tokenizer's tokens are pieces of bytes (byte-level BPE; SentencePiece with byte fallback), `token_bytes` gives
them, so that a stream can be decoded exactly, byte by byte.  `transformers` takes seconds to import: it is imported
when a directory is loaded or a chat template is rendered, not before.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.gguf_metadata import is_gguf, read_gguf_metadata

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# The library holds Python's lock while it works on one text, and lets it go while it works on a batch: from this length
# on (characters, tokens) a text goes as a batch of one, so that a server's other threads go on meanwhile.
_LONG = 1 << 14
_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type


class TokenizerError(ValueError):
    """A tokenizer cannot be loaded, or a text or chat cannot be turned into tokens."""


class Tokenizer(ABC):
    """What the engine needs of a tokenizer.

    vocab_size: one more than the largest token id.  The model's own vocabulary may be larger (padding).
    eos_token_ids: the tokens that end a text.
    special_token_ids: the tokens that leave no text with skip_special_tokens.
    special_tokens: name ("bos_token", "eos_token", ...) -> text, as chat templates know them.
    chat_template: a Jinja template, or None.
    """

    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    special_token_ids: frozenset[int] = frozenset()
    bos_token_id: int | None = None
    special_tokens: Mapping[str, str] = {}
    chat_template: str | None = None

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.  add_special_tokens: put those around it that the model expects (BOS, say)."""

    @abstractmethod
    def at_least_tokens(self, text: str) -> int:
        """Surely no more than `len(encode(text))`, told from the text's length alone; 0 where nothing is sure."""

    @abstractmethod
    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of all tokens together; bytes that are not UTF-8 become U+FFFD, unknown ids nothing."""

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes that a token stands for; None where tokens have no text of their own: use `decode`."""

    @abstractmethod
    def convert_ids_to_tokens(self, token_ids: Iterable[int]) -> list[str]:
        """Each token as the vocabulary spells it; "" for an unknown id."""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_arguments: Any,
    ) -> str:
        """The text of a conversation.  Encode it with add_special_tokens=False: the template has put them in.

        chat_template: used instead of the model's own.
        Raises TokenizerError when there is no template or it fails on these messages.
        """
        template = chat_template or self.chat_template
        if template is None:
            raise TokenizerError("this model has no chat template: give one with chat_template")
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered: Any = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                tools=[dict(tool) for tool in tools] if tools else None,
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **{**self.special_tokens, **template_arguments},
            )
        except Exception as error:  # a template is a program: anything may come out of it
            raise TokenizerError(f"the chat template failed: {type(error).__name__}: {error}") from error
        texts, _ = rendered
        return str(texts[0])


class FastTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library."""

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str],
        eos_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
    ) -> None:
        self._backend = backend
        self._pieces = _piece_decoder(backend)
        self._bytes: dict[int, bytes] = {}
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.special_tokens = dict(special_tokens)
        self.special_token_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        named = {name: vocabulary.get(text) for name, text in special_tokens.items()}
        self.bos_token_id = named.get("bos_token")
        eos = named.get("eos_token")
        self.eos_token_ids = frozenset(eos_token_ids) | (frozenset() if eos is None else {eos})
        self.chat_template = chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        _utf8(text)
        try:
            if len(text) < _LONG:
                return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            return self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        except Exception as error:  # the library raises plain ones: a vocabulary without an unknown token, say
            raise TokenizerError(f"the tokenizer cannot encode this text: {error}") from error

    def at_least_tokens(self, text: str) -> int:
        if len(text) < _LONG or self._most_characters is None:  # a short one is encoded in a moment
            return 0
        most, lost = self._most_characters
        return -(-(len(text) - sum(map(text.count, lost))) // most)

    @cached_property
    def _most_characters(self) -> tuple[int, str] | None:
        """The most characters of a text that one token stands for, and the characters that leave no token at all.

        None where there may be no such number.
        """
        return _most_characters(self._backend)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        ids = list(token_ids)
        try:
            if len(ids) < _LONG:
                return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
            return self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
        except Exception as error:
            raise TokenizerError(f"the tokenizer cannot decode these tokens: {error}") from error

    def token_bytes(self, token_id: int) -> bytes | None:
        if self._pieces is None:
            return None
        if token_id not in self._bytes:
            piece = self._backend.id_to_token(token_id)
            self._bytes[token_id] = b"" if piece is None else self._pieces(piece)
        return self._bytes[token_id]

    def convert_ids_to_tokens(self, token_ids: Iterable[int]) -> list[str]:
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]


class ByteTokenizer(Tokenizer):
    """A toy whose tokens are the given strings or bytes, for tests and scripted models.

    pieces: the text of token 0, 1, ...; without it tokens 0 to 255 are the bytes and 256 is the end of the text.
    Encoding takes the longest piece at every place; TokenizerError where none fits.
    """

    def __init__(
        self,
        pieces: Sequence[str | bytes] | None = None,
        *,
        eos_token_ids: Iterable[int] = (),
        special_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
    ) -> None:
        if pieces is None:
            pieces = [*(bytes([i]) for i in range(256)), "<eos>"]
            eos_token_ids = special_token_ids = (256,)
        self._pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
        self.vocab_size = len(self._pieces)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.special_token_ids = frozenset(special_token_ids)
        self.chat_template = chat_template
        plain = [i for i in range(self.vocab_size) if i not in self.special_token_ids and self._pieces[i]]
        self._longest_first = sorted(plain, key=lambda i: -len(self._pieces[i]))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        data = _utf8(text)
        ids: list[int] = []
        at = 0
        while at < len(data):
            fits = (i for i in self._longest_first if data.startswith(self._pieces[i], at))
            token_id = next(fits, None)
            if token_id is None:
                raise TokenizerError(f"no token fits the text at byte {at}")
            ids.append(token_id)
            at += len(self._pieces[token_id])
        return ids

    def at_least_tokens(self, text: str) -> int:
        longest = len(self._pieces[self._longest_first[0]]) if self._longest_first else 1
        return -(-len(text) // longest)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        kept = (i for i in token_ids if not (skip_special_tokens and i in self.special_token_ids))
        return b"".join(self.token_bytes(i) for i in kept).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id] if 0 <= token_id < self.vocab_size else b""

    def convert_ids_to_tokens(self, token_ids: Iterable[int]) -> list[str]:
        return [self.token_bytes(i).decode(errors="backslashreplace") for i in token_ids]


def get_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in a Hugging Face directory, or in the header of a GGUF file (or of the only one in a directory).

    path: where it lies, or the name of an embedded model.
    Nothing is fetched and no code from the directory is run.  Raises TokenizerError when there is none.
    """
    path = Path(path)
    if is_gguf(path):
        return _from_gguf(path)
    if not path.is_dir():
        embedded = _embedded(str(path))
        if embedded is None:
            raise TokenizerError(f"no tokenizer at {path}: it is neither a directory nor a GGUF file")
        return _from_gguf(embedded)
    if not any((path / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        files = [file for file in sorted(path.glob("*.gguf")) if is_gguf(file)]
        if len(files) == 1:
            return _from_gguf(files[0])
        raise TokenizerError(f"no tokenizer files in {path}")
    return _from_transformers(path, None, _generation_eos(path))


def _embedded(name: str) -> Path | None:
    """The file of the embedded model of this name."""
    from engine.models.load import EMBEDDED_MODELS, locate_model  # imports torch, which a tokenizer needs for no other

    return locate_model(name).path if name in EMBEDDED_MODELS else None


def _from_transformers(directory: Path, gguf_file: str | None, eos_token_ids: Iterable[int]) -> FastTokenizer:
    from transformers import AutoTokenizer

    arguments = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        loaded = AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True, **arguments)
    except Exception as error:
        raise TokenizerError(f"the tokenizer in {directory} cannot be loaded: {error}") from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise TokenizerError(f"{type(loaded).__name__} in {directory} is not a fast tokenizer: none other is supported")
    special = {name: str(text) for name, text in loaded.special_tokens_map.items() if isinstance(text, str)}
    template = loaded.chat_template
    if isinstance(template, dict):  # several templates by name
        template = template.get("default")
    return FastTokenizer(backend, special_tokens=special, eos_token_ids=eos_token_ids, chat_template=template)


def _generation_eos(directory: Path) -> list[int]:
    """End tokens of generation_config.json: chat models name more than their tokenizer does."""
    file = directory / "generation_config.json"
    if not file.exists():
        return []
    try:
        value = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise TokenizerError(f"{file} does not hold a JSON object: {error}") from error
    return value if isinstance(value, list) else [] if value is None else [value]


def _from_gguf(path: Path) -> FastTokenizer:
    """Byte-level BPE is built from the header at once; other kinds go through transformers' slower conversion."""
    try:
        metadata = read_gguf_metadata(path)
    except ValueError as error:
        raise TokenizerError(str(error)) from error
    get = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}.get
    tokens: list[str] | None = get("tokens")
    if tokens is None:
        raise TokenizerError(f"{path} holds no tokenizer")
    ends = [i for i in (get("eos_token_id"), get("eot_token_id"), get("eom_token_id")) if i is not None]
    if get("model") != "gpt2" or get("pre", "default") not in ("smollm", "gpt-2", "default"):
        return _from_transformers(path.parent, path.name, ends)

    from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as Backend

    merges = [tuple(merge.split(" ", 1)) for merge in get("merges", [])]
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=bool(get("add_space_prefix", False)), use_regex=True)
    # The smollm family was trained with every digit apart, before GPT-2's pattern: "\n 5" is "\n ", "5".
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level]) if get("pre") == "smollm" else byte_level
    backend.decoder = decoders.ByteLevel()
    kinds = get("token_type") or [1] * len(tokens)
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        chosen = [tokens[i] for i, k in enumerate(kinds) if k == kind]
        added = [AddedToken(text, special=special, normalized=False) for text in chosen]
        (backend.add_special_tokens if special else backend.add_tokens)(added)
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: get(f"{key}_token_id") for name, key in named.items()}
    special_tokens = {name: tokens[i] for name, i in ids.items() if i is not None}
    if get("add_bos_token", False) and "bos_token" in special_tokens:
        bos = special_tokens["bos_token"]
        template = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, ids["bos_token"])])
        backend.post_processor = template
    chat_template = metadata.get("tokenizer.chat_template")
    return FastTokenizer(backend, special_tokens=special_tokens, eos_token_ids=ends, chat_template=chat_template)


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(f"the text is not valid Unicode: {error.reason} at {error.start}") from None


def _piece_decoder(backend: Backend) -> Any:
    """A function from a vocabulary entry to its bytes, or None when the decoder needs more than one entry at a time."""
    if backend.decoder is None:
        return None
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = [decoder, *decoder.get("decoders", ())]
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return _byte_level_piece
    if kinds <= {"Sequence", "Replace", "ByteFallback", "Fuse", "Strip"} and {"Replace", "ByteFallback"} <= kinds:
        replace = next(step for step in steps if step["type"] == "Replace")
        pattern, content = replace["pattern"].get("String"), replace["content"]
        return None if pattern is None else lambda piece: _sentence_piece(piece.replace(pattern, content))
    return None


def _most_characters(backend: Backend) -> tuple[int, str] | None:
    """See `FastTokenizer`.  Only BPE that never merges characters into "unknown" or cuts a text off has a bound."""
    from tokenizers import models

    model = backend.model
    added = backend.get_added_tokens_decoder().values()
    if not isinstance(model, models.BPE) or backend.truncation or any(t.lstrip or t.rstrip for t in added):
        return None  # such an added token takes any number of spaces with it
    before = _steps(backend.normalizer, "normalizers")
    shrinks = 1
    for step in before:
        if step["type"] == "NFC":
            shrinks *= 4  # the longest canonical decomposition of one character
        elif step["type"] == "Replace":
            pattern = step["pattern"].get("String")
            if pattern is None or len(pattern) > len(step["content"]):
                return None
        elif step["type"] != "Prepend":
            return None
    splits = _steps(backend.pre_tokenizer, "pretokenizers")
    if any(
        step["type"] not in ("ByteLevel", "Digits", "Metaspace", "Split") or step.get("behavior") == "Removed"
        for step in splits
    ):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=True)
    lost = ""
    if any(step["type"] == "ByteLevel" for step in splits):
        # A byte without a token vanishes.  A character beyond ASCII has a byte from 0x80 to 0xBF, which keeps it.
        missing = [byte for character, byte in _byte_of_character().items() if character not in vocabulary]
        if any(0x80 <= byte < 0xC0 for byte in missing):
            return None
        lost = "".join(chr(byte) for byte in missing if byte < 0x80)
    elif not (model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))):
        return None
    return shrinks * max(map(len, vocabulary)), lost  # a character of a byte-level piece is a byte


def _steps(part: Any, key: str) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as its settings, one after another."""
    if part is None:
        return []
    state: dict[str, Any] = json.loads(part.__getstate__())
    return list(state.get(key, [state]))


@cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, every other byte for a character from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _byte_level_piece(piece: str) -> bytes:
    table = _byte_of_character()
    if all(character in table for character in piece):
        return bytes(table[character] for character in piece)
    return piece.encode()  # an added token in plain text


def _sentence_piece(piece: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.encode()
