"""From request bodies to what the engine takes: sampling parameters, token ids and texts."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from engine.async_llm import INLINE, AsyncLLM
from engine.sampling import SamplingParams
from engine.scheduler import SequenceGroup
from engine.server.errors import ApiError
from engine.server.options import ServerOptions
from engine.server.protocol import REFUSED, TEMPLATE_FIELDS, ChatRequest, CompletionRequest, Message, Sampling

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A prompt as token ids, and the text they stand for; None if ids were given."""

    token_ids: list[int]
    text: str | None


def sampling_params(
    body: Sampling, max_tokens: int | None, logprobs: int | None, best_of: int | None, vocab_size: int
) -> SamplingParams:
    """The body's sampling fields; null means the default.  Raises InvalidParameterError, which names the field."""
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        listed = getattr(body, name)
        if listed is not None and len(listed) > vocab_size:  # before they are looked at one by one
            message = f"{name} has {len(listed)} entries and the vocabulary has {vocab_size} tokens"
            raise ApiError(message, param=name, code="invalid_value")
    given: dict[str, Any] = {
        name: value
        for name in (
            "n",
            "temperature",
            "top_p",
            "presence_penalty",
            "frequency_penalty",
            "seed",
            "stop",
            "top_k",
            "min_p",
            "repetition_penalty",
            "min_tokens",
            "stop_token_ids",
            "allowed_token_ids",
            "ignore_eos",
            "include_stop_str_in_output",
            "skip_special_tokens",
            "spaces_between_special_tokens",
        )
        if (value := getattr(body, name)) is not None
    }
    bias = None if body.logit_bias is None else {_token_id(key): bias for key, bias in body.logit_bias.items()}
    return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, best_of=best_of, logit_bias=bias, **given)


def _token_id(key: str) -> int:
    """A key of logit_bias: JSON has only strings there."""
    if not key.isascii() or not key.isdigit() or len(key) > 10:
        raise ApiError(f"logit_bias has the key {key!r:.60}; keys must be token ids", param="logit_bias")
    return int(key)


def width_name(body: CompletionRequest | ChatRequest) -> str:
    """What the client calls the number of branches."""
    return "n" if body.best_of is None or body.best_of <= (body.n or 1) else "best_of"


def refuse_unsupported(body: CompletionRequest | ChatRequest) -> None:
    """Raise ApiError for a field that asks for something this server cannot do."""
    for name in REFUSED:
        value = getattr(body, name, None)
        if value not in (None, [], {}, "", "none"):
            raise ApiError(f"{name} is not supported", param=name, code="unsupported_parameter")
    if isinstance(body, ChatRequest):
        if body.response_format is not None and body.response_format.type != "text":
            message = f"response_format {body.response_format.type!r:.40} is not supported; only 'text' is"
            raise ApiError(message, param="response_format", code="unsupported_parameter")
        if body.tool_choice not in (None, "none", "auto"):
            raise ApiError(
                "tool_choice asks for a tool and there are none: tools are not supported", param="tool_choice"
            )
        if body.modalities not in (None, [], ["text"]):
            raise ApiError("modalities other than text are not supported", param="modalities")
    if body.stream_options is not None and not body.stream:
        raise ApiError("stream_options is only allowed with stream: true", param="stream_options")
    if body.priority:
        raise ApiError(f"priority is {body.priority}; only 0 is supported", param="priority", code="priority")
    if body.stream and body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError("best_of chooses when all branches are done: it cannot be streamed", param="best_of")


class PromptReader:
    """Tokenizes for the endpoints, long texts in a thread."""

    def __init__(self, llm: AsyncLLM, options: ServerOptions) -> None:
        self._llm = llm
        self._options = options

    async def of_completion(self, body: CompletionRequest) -> list[PromptTokens]:
        """The prompts of a completion request: a text, token ids, or a list of either."""
        given = body.prompt
        items: Sequence[Any] = given if isinstance(given, list) else [given]
        if items and isinstance(items[0], int):
            items = [given]
        if not items:
            raise ApiError("prompt is an empty list; give at least one", param="prompt")
        if len(items) > self._llm.max_queued_requests:
            limit = self._llm.max_queued_requests
            raise ApiError(f"prompt has {len(items)} entries; at most {limit} may be queued at all", param="prompt")
        special = body.add_special_tokens is not False
        for item in items:  # all of them before any is turned into tokens
            if isinstance(item, str):
                self._llm.core.check_text(item)
            else:
                self.check_length(item)

        def read() -> list[PromptTokens]:
            return [
                PromptTokens(self._llm.tokenizer.encode(item, add_special_tokens=special), item)
                if isinstance(item, str)
                else PromptTokens(item, None)
                for item in items
            ]

        return await _run(sum(len(item) for item in items if isinstance(item, str)), read)

    def check_length(self, token_ids: list[int]) -> None:
        """Refuse a hopeless prompt before its ids are looked at one by one."""
        if len(token_ids) > self._llm.core.scheduler.config.max_model_len:
            self._llm.core.scheduler.check(SequenceGroup("", len(token_ids), max_tokens=1))

    async def count(self, text: str, special: bool) -> list[int]:
        """Token ids of a text of any length: it will not be a prompt."""
        encode = self._llm.tokenizer.encode
        return await _run(len(text), functools.partial(encode, text, add_special_tokens=special))

    async def decode(self, token_ids: list[int]) -> str:
        """The text of token ids, however many."""
        decode = self._llm.tokenizer.decode
        return await _run(len(token_ids), functools.partial(decode, token_ids, skip_special_tokens=False))

    async def of_chat(self, body: ChatRequest) -> PromptTokens:
        """The conversation through the chat template."""
        if body.chat_template is not None and not self._options.trust_request_chat_template:
            raise ApiError(
                "chat_template is not allowed in requests: a template is a program (--trust-request-chat-template)",
                param="chat_template",
            )
        if body.add_generation_prompt and body.continue_final_message:
            raise ApiError("continue_final_message needs add_generation_prompt: false", param="continue_final_message")
        return await self.of_messages(
            body.messages,
            template=body.chat_template,
            special=bool(body.add_special_tokens),
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
            arguments=body.chat_template_kwargs or {},
        )

    async def of_messages(
        self,
        messages: Sequence[Message],
        *,
        template: str | None = None,
        special: bool = False,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        arguments: dict[str, Any] | None = None,
        limited: bool = True,
    ) -> PromptTokens:
        """A conversation as tokens.  limited: refuse it unread if it is certainly too long for a prompt."""
        most = self._llm.core.scheduler.config.max_model_len
        if len(messages) > most:
            message = f"messages has {len(messages)} entries; max_model_len is {most}, and each takes a token at least"
            raise ApiError(message, param="messages", code="context_length_exceeded", reason="max_model_len")
        plain = [_plain(message, index) for index, message in enumerate(messages)]
        tokenizer = self._llm.tokenizer
        fixed = {"messages", "chat_template", "add_generation_prompt", "continue_final_message", "tools"}
        wrong = sorted(fixed & set(arguments or {}))
        if wrong:
            raise ApiError(f"chat_template_kwargs may not hold {wrong[0]}", param="chat_template_kwargs")

        def render() -> PromptTokens:
            text = tokenizer.apply_chat_template(
                plain,
                chat_template=template or self._options.chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(arguments or {}),
            )
            if limited:
                self._llm.core.check_text(text)
            return PromptTokens(tokenizer.encode(text, add_special_tokens=special), text)

        size = sum(len(message["content"] or "") for message in plain)
        return await _run(INLINE if template else size, render)


def _plain(message: Message, index: int) -> dict[str, Any]:
    """A message as templates expect it: its text parts joined, and without what is absent."""
    place = f"messages[{index}]"
    content = message.content
    if isinstance(content, list):
        for i, part in enumerate(content):
            at = f"{place}.content[{i}]"
            if part.type != "text" or part.text is None:
                what = "has no text" if part.type == "text" else f"is of type {part.type!r:.40}; only text is supported"
                raise ApiError(f"{at} {what}", param=at, code="unsupported_content")
            for name in part.model_extra or ():
                extra = f"{at}.{name:.60}"
                raise ApiError(f"unknown parameter: {extra}", param=extra, code="unknown_parameter")
        content = "\n".join(part.text or "" for part in content)
    if content is None and message.role != "assistant":
        raise ApiError(f"{place} has no content", param=f"{place}.content", code="missing_required_parameter")
    if message.audio is not None:
        raise ApiError(f"{place}.audio is not supported", param=f"{place}.audio", code="unsupported_parameter")
    more = {name: value for name in TEMPLATE_FIELDS if (value := getattr(message, name)) is not None}
    role = "system" if message.role == "developer" else message.role  # templates know the older word
    return {**more, "role": role, "content": content or ""}


async def _run(size: int, function: Callable[[], T]) -> T:
    if size < INLINE:
        return function()
    return await asyncio.to_thread(function)
