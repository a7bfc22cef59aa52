"""Pieces that both endpoints build their answers from: ids, usage, logprobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.outputs import Logprob, RequestOutput
from engine.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no -inf


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """Token counts of a request.  A prompt counts once, whatever n is."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def usage_of(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """Token counts of finished outputs."""
    outputs = list(outputs)
    made = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    return usage(sum(len(output.prompt_token_ids) for output in outputs), made)


class LogprobWriter:
    """Logprobs of tokens in the two forms of the OpenAI API.

    tokenizer: None for tokens without text, which are shown as "token_id:7".
    """

    def __init__(self, tokenizer: Tokenizer | None, most: int) -> None:
        self._tokenizer = tokenizer
        self._most = most

    def chat(self, token_ids: Sequence[int], logprobs: Sequence[Mapping[int, Logprob]]) -> dict[str, Any]:
        """`logprobs` of a chat choice: for each token its logprob and the most likely ones."""
        content = []
        for token_id, row in zip(token_ids, logprobs, strict=True):
            top = list(row.items())[: self._most]
            entry = self._entry(token_id, row[token_id])
            entry["top_logprobs"] = [self._entry(other, logprob) for other, logprob in top]
            content.append(entry)
        return {"content": content}

    def _entry(self, token_id: int, logprob: Logprob) -> dict[str, Any]:
        data = None if self._tokenizer is None else self._tokenizer.token_bytes(token_id)
        return {
            "token": self._text(token_id, logprob),
            "logprob": max(logprob.logprob, LOWEST),
            "bytes": None if data is None else list(data),
        }

    def completion(
        self, token_ids: Sequence[int], logprobs: Sequence[Mapping[int, Logprob]], offset: int
    ) -> dict[str, Any]:
        """`logprobs` of a completion choice.  offset: where in the text the first of these tokens begins."""
        tokens: list[str] = []
        offsets: list[int] = []
        for token_id, row in zip(token_ids, logprobs, strict=True):
            tokens.append(self._text(token_id, row[token_id]))
            offsets.append(offset)
            offset += len(tokens[-1])
        return {
            "tokens": tokens,
            "token_logprobs": [
                max(row[token_id].logprob, LOWEST) for token_id, row in zip(token_ids, logprobs, strict=True)
            ],
            "top_logprobs": [
                {self._text(other, logprob): max(logprob.logprob, LOWEST) for other, logprob in row.items()}
                for row in logprobs
            ],
            "text_offset": offsets,
        }

    def _text(self, token_id: int, logprob: Logprob) -> str:
        return f"token_id:{token_id}" if logprob.decoded_token is None else logprob.decoded_token
