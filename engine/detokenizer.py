"""Turn tokens into text one at a time: only whole characters come out, and together they are the text of all tokens."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import islice

from engine.tokenizer import Tokenizer

_CONTEXT = 8  # prompt tokens looked at: more than the bytes of one character, special tokens among them included


class Detokenizer:
    """The text of one branch, as it grows.

    prompt_token_ids: context only.  A prompt may end inside a character: the character belongs to the output if the
    output completes it, and leaves no trace if it does not.

    The text of `append` calls and a last `flush`, joined, is the tokenizer's decode of the whole output, where that
    does not depend on the prompt.  Bytes that are no UTF-8 become U+FFFD as Python decodes them: a SentencePiece
    tokenizer may write another number of these for the same bytes.  The work for a token does not depend on how many
    came before it.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        context = [i for i in islice(reversed(prompt_token_ids), _CONTEXT) if i not in self._skipped][::-1]
        self._stream: _ByteStream | _TextStream
        if tokenizer.token_bytes(0) is not None:
            self._stream = _ByteStream(tokenizer, context)
        else:
            self._stream = _TextStream(tokenizer, context, skip_special_tokens)

    def append(self, token_id: int) -> str:
        """The text that this token completes: "" while a character is unfinished."""
        return "" if token_id in self._skipped else self._stream.append(token_id)

    def flush(self) -> str:
        """What an unfinished character at the end becomes: U+FFFD, or "" if there is none."""
        return self._stream.flush()


class _ByteStream:
    """For tokens that are pieces of bytes: an incremental UTF-8 decoder is exact."""

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._decoder.decode(b"".join(tokenizer.token_bytes(i) or b"" for i in context))
        self._prompt_tail: bytes = self._decoder.getstate()[0]
        self._decoder.reset()

    def append(self, token_id: int) -> str:
        data = self._tokenizer.token_bytes(token_id) or b""
        if self._prompt_tail and data:
            data = self._joined(data)
        return self._decoder.decode(data)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    def _joined(self, data: bytes) -> bytes:
        """The prompt's unfinished character and the output's first bytes, if the first byte goes on with it."""
        tail, self._prompt_tail = self._prompt_tail, b""
        try:
            codecs.utf_8_decode(tail + data[:1], "strict", False)
        except UnicodeDecodeError:
            return data
        return tail + data


class _TextStream:
    """For all other tokenizers: decode a window twice, without and with the new tokens, and take the difference.

    The window starts where text last came out, so that what a decoder does at the start of a text (dropping a space)
    happens in both.  Of tokens that give no text it keeps the last few, so that it cannot grow.
    """

    def __init__(self, tokenizer: Tokenizer, context: list[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window = context
        self._known = len(context)  # tokens of the window whose text is out

    def append(self, token_id: int) -> str:
        self._window.append(token_id)
        known, whole = self._texts()
        unfinished = whole.endswith("\ufffd") and len(self._window) - self._known < _CONTEXT
        if unfinished or len(whole) <= len(known):
            if len(self._window) - self._known > _CONTEXT:
                del self._window[self._known]
            return ""
        self._window = self._window[self._known :]
        self._known = len(self._window)
        return whole[len(known) :]

    def flush(self) -> str:
        known, whole = self._texts()
        self._known = len(self._window)
        return whole[len(known) :]

    def _texts(self) -> tuple[str, str]:
        decode = self._tokenizer.decode
        return decode(self._window[: self._known], self._skip), decode(self._window, self._skip)
