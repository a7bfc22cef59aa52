"""What requests may hold.  Types are strict, as in the OpenAI API; values are checked by `SamplingParams`.

Fields of the OpenAI API that change nothing here are accepted and ignored (`Ignored`); those that would change the
answer and are not supported are refused by name when they ask for something (`REFUSED`); unknown ones are refused.
"""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, field_validator


class _FirstError(FailFast):
    """Stop at a list's first wrong item: a long list of wrong ones would make as many errors."""

    __hash__ = object.__hash__  # unions of annotated types need it


TokenIds = Annotated[list[int], _FirstError()]
Texts = Annotated[list[str], _FirstError()]
Prompts = str | Texts | TokenIds | Annotated[list[TokenIds], _FirstError()]

ID_PATTERN = r"^[!-~]{1,256}$"  # visible ASCII: it goes into headers and log lines


class Body(BaseModel):
    """A request body: no unknown fields, no conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class StreamOptions(Body):
    """include_usage: one more chunk before [DONE], with the request's usage and no choices."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(None, description="ignored")


class Sampling(Body):
    """Sampling fields of both endpoints.  The second block are vLLM's extensions."""

    n: int | None = 1
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    seed: int | None = None
    stop: str | Texts | None = None
    logit_bias: dict[str, float] | None = None

    top_k: int | None = -1
    min_p: float | None = 0.0
    repetition_penalty: float | None = 1.0
    min_tokens: int | None = 0
    stop_token_ids: TokenIds | None = None
    allowed_token_ids: TokenIds | None = None
    ignore_eos: bool | None = False
    include_stop_str_in_output: bool | None = False
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: bool | None = True
    priority: int | None = 0
    request_id: str | None = Field(None, pattern=ID_PATTERN)
    return_token_ids: bool | None = False


class Ignored(Body):
    """Fields of the OpenAI API that say nothing about the text."""

    user: Any = Field(None, description="ignored")
    metadata: Any = Field(None, description="ignored")
    store: Any = Field(None, description="ignored")
    service_tier: Any = Field(None, description="ignored")
    safety_identifier: Any = Field(None, description="ignored")
    prompt_cache_key: Any = Field(None, description="ignored")
    prompt_cache_retention: Any = Field(None, description="ignored")


REFUSED = ("suffix", "tools", "functions", "function_call", "audio", "prediction", "web_search_options")


class CompletionRequest(Sampling, Ignored):
    """POST /v1/completions."""

    model: str | None = None
    prompt: Prompts
    max_tokens: int | None = 16
    best_of: int | None = None
    echo: bool | None = False
    logprobs: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = True
    suffix: Any = Field(None, description="not supported: must be absent or null")


class ContentPart(BaseModel):
    """A part of a message.  Only text is supported."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str
    text: str | None = None


MOST_MESSAGES = 1 << 14  # each costs time before a word of it is read
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEMPLATE_FIELDS = ("name", "tool_calls", "tool_call_id", "function_call", "reasoning_content")


class Message(Body):
    """A message of a conversation.  Those of answers may come back as they were."""

    role: str = Field(description=f"one of {', '.join(ROLES)}")
    content: str | list[ContentPart] | None = None
    name: str | None = Field(None, description="for the chat template, as the next four")
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None
    reasoning_content: str | None = None
    refusal: Any = Field(None, description="ignored")
    annotations: Any = Field(None, description="ignored")
    audio: Any = Field(None, description="not supported: must be absent or null")

    @field_validator("role")
    @classmethod
    def _known(cls, role: str) -> str:
        if role not in ROLES:
            raise ValueError(f"{role!r:.60} is no role; allowed are {', '.join(ROLES)}")
        return role


Messages = Annotated[list[Message], _FirstError()]


class ResponseFormat(BaseModel):
    """Only {"type": "text"} is supported."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str


class ChatRequest(Sampling, Ignored):
    """POST /v1/chat/completions."""

    model: str | None = None
    messages: Messages = Field(min_length=1, max_length=MOST_MESSAGES)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    best_of: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    add_special_tokens: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    modalities: list[str] | None = None
    tool_choice: Any = Field(None, description="ignored without tools")
    parallel_tool_calls: Any = Field(None, description="ignored without tools")
    reasoning_effort: Any = Field(None, description="ignored")
    verbosity: Any = Field(None, description="ignored")
    tools: Any = Field(None, description="not supported: must be absent, null or empty")
    functions: Any = Field(None, description="not supported: must be absent, null or empty")
    function_call: Any = Field(None, description="not supported: must be absent, null or 'none'")
    audio: Any = Field(None, description="not supported: must be absent or null")
    prediction: Any = Field(None, description="not supported: must be absent or null")
    web_search_options: Any = Field(None, description="not supported: must be absent or null")


class TokenizeRequest(Body):
    """POST /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = Field(None, min_length=1, max_length=MOST_MESSAGES)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = True
    return_token_strs: bool | None = False


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds


# answers: for the schema and for tests; answers are built as plain dictionaries, which is several times faster


class CachedTokens(BaseModel):
    cached_tokens: int = 0


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None = None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length", "abort"] | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionResponse(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob] | None


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "abort"] | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatResponse(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "abort"] | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "lawful"
    root: str | None = None
    max_model_len: int | None = None


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(BaseModel):
    prompt: str


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    error: ErrorBody


def now() -> int:
    """Seconds since 1970, as `created` fields have them."""
    return int(time.time())


def random_id() -> str:
    """An id that nobody else has."""
    return uuid.uuid4().hex
