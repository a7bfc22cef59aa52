"""How a request wants its tokens chosen and when it wants to stop.

A `SamplingParams` that exists is valid: every field is checked when it is made, so that no value can be found bad
inside the engine's loop, where it would harm its neighbours.  What depends on the model is checked by
`SamplingParams.check_against_vocabulary`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    LogitsProcessor = Callable[[list[int], Tensor], Tensor]

MAX_LOGPROBS = 20  # as in the OpenAI API; each one costs a part of every answer
MAX_COUNT = 2**63 - 1  # of tokens or branches
MAX_STOP_STRINGS = 64  # every stop string is followed through every character of the output
MAX_STOP_LENGTH = 4096  # characters of one stop string
GREEDY_BELOW = 1e-5  # a temperature below this is greedy: dividing by it says nothing more and may overflow


class InvalidParameterError(ValueError):
    """A sampling parameter has a value that is not allowed.

    parameter: the name of the field.  value: what was given.  allowed: in words.
    """

    def __init__(self, parameter: str, value: object, allowed: str) -> None:
        super().__init__(f"{parameter} must be {allowed}, got {_shown(value)}")
        self.parameter = parameter
        self.value = value
        self.allowed = allowed


def check_token_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raise InvalidParameterError, naming `name`, unless every id is an integer with 0 <= id < vocab_size."""
    ids = ids if isinstance(ids, list | tuple) else list(ids)
    if _are_plain(ids) and min(ids) >= 0 and max(ids) < vocab_size:
        return
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, Integral) or not 0 <= int(token_id) < vocab_size:
            allowed = f"token ids from 0 to {vocab_size - 1} (the vocabulary has {vocab_size} tokens)"
            raise InvalidParameterError(name, token_id, allowed)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, with vLLM's names and defaults.

    n: number of completions returned.
    best_of: number of branches generated, of which the `n` with the highest cumulative logprob are returned; None means
        `n`.  With temperature 0 all branches are equal, so best_of > n is refused there; n > 1 is not: it gives n equal
        completions.
    presence_penalty, frequency_penalty: from -2 to 2; taken off the logit of a token that was generated, once and once
        for each time.  The prompt does not count.
    repetition_penalty: above 0 and at most 2; divides positive and multiplies negative logits of every token of prompt
        and output (Keskar et al. 2019, section 4.1).  1 is off.
    temperature: 0 or more; 0 (or less than 1e-5) is greedy, the lowest id among equals.
    top_p: above 0, at most 1; the smallest set of most likely tokens with at least this probability (Holtzman et al.
        2020).
    top_k: this many most likely tokens; -1 or 0 is off.
    min_p: from 0 to 1; only tokens with at least this fraction of the most likely token's probability.
    seed: a 64-bit signed integer; None lets the engine choose one.
    stop: strings that end the output (at most 64 of 1 to 4096 characters).
    stop_token_ids: tokens that end the output.
    include_stop_str_in_output: whether the text keeps the stop string or the text of the stop token.
    ignore_eos: go on after an end-of-sequence token.
    max_tokens: 1 or more; None means as many as the engine's limits allow.  0 is refused.
    min_tokens: until the output has this many tokens, end tokens and stop tokens cannot be drawn and stop strings are
        not looked for.
    logprobs: how many most likely tokens to report for every position, 0 to 20, beside the one drawn; None is off.
        Logprobs are those of the model's own distribution, before any of these parameters.
    prompt_logprobs: not supported: must be None.
    logit_bias: token id -> -100 to 100, added to the logit.
    allowed_token_ids: only these may be drawn.
    logits_processors: callables (generated token ids, logits (V,) float32) -> logits (V,), called in order before all
        else.  One that raises ends its own request only.
    detokenize: False leaves the text empty; stop strings are then refused.
    skip_special_tokens: whether special tokens leave no text.
    spaces_between_special_tokens: accepted for compatibility; the fast tokenizers never add such spaces.

    Raises InvalidParameterError, which names the field, the value and what is allowed.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    logits_processors: Sequence[LogitsProcessor] | None = field(default=None, hash=False)
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def __post_init__(self) -> None:
        put = self._put
        put("n", _count("n", self.n, 1))
        if self.best_of is not None:
            put("best_of", _count("best_of", self.best_of, self.n, low_is=f"n = {self.n}"))
        put("presence_penalty", _number("presence_penalty", self.presence_penalty, -2, 2))
        put("frequency_penalty", _number("frequency_penalty", self.frequency_penalty, -2, 2))
        put("repetition_penalty", _number("repetition_penalty", self.repetition_penalty, 0, 2, above=True))
        put("temperature", _number("temperature", self.temperature, 0))
        put("top_p", _number("top_p", self.top_p, 0, 1, above=True))
        put("top_k", _integer("top_k", self.top_k, -1, note=" (-1 or 0 is off)"))
        put("min_p", _number("min_p", self.min_p, 0, 1))
        if self.seed is not None:
            put("seed", _integer("seed", self.seed, -(2**63), 2**63 - 1))
        if self.max_tokens is not None:
            put("max_tokens", _count("max_tokens", self.max_tokens, 1))
        put("min_tokens", _count("min_tokens", self.min_tokens, 0))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameterError("min_tokens", self.min_tokens, f"at most max_tokens = {self.max_tokens}")
        if self.logprobs is not None:
            put("logprobs", _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS))
        if self.prompt_logprobs is not None:
            raise InvalidParameterError("prompt_logprobs", self.prompt_logprobs, "None: it is not supported")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameterError(name, getattr(self, name), "True or False")
        put("stop", _stop_strings(self.stop))
        put("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids) if self.stop_token_ids is not None else ())
        if self.allowed_token_ids is not None:
            put("allowed_token_ids", _ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise InvalidParameterError("allowed_token_ids", [], "None or a list of at least one token id")
        if self.logit_bias is not None:
            put("logit_bias", _bias(self.logit_bias))
        if self.logits_processors is not None:
            put("logits_processors", _callables(self.logits_processors))
        if self.is_greedy and self.width > self.n:
            allowed = f"n = {self.n} with temperature 0, where all branches are equal"
            raise InvalidParameterError("best_of", self.best_of, allowed)
        if self.stop and not self.detokenize:
            raise InvalidParameterError("stop", list(self.stop), "empty with detokenize=False, which makes no text")

    def _put(self, name: str, value: Any) -> None:
        """Replace a field by its checked form: frozen for everyone else."""
        object.__setattr__(self, name, value)

    @property
    def width(self) -> int:
        """Number of branches that are generated: max(n, best_of)."""
        return self.best_of if self.best_of is not None else self.n

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @cached_property
    def edits_logits(self) -> bool:
        """Whether logits are changed before temperature, `min_tokens` apart (that depends on the output's length)."""
        return (
            bool(self.logits_processors)
            or bool(self.logit_bias)
            or self.allowed_token_ids is not None
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )

    def check_against_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidParameterError unless every token id in any field is below `vocab_size`."""
        check_token_ids("stop_token_ids", self.stop_token_ids or (), vocab_size)
        check_token_ids("logit_bias", self.logit_bias or (), vocab_size)
        check_token_ids("allowed_token_ids", self.allowed_token_ids or (), vocab_size)

    def clone(self) -> SamplingParams:
        """An equal copy.  Logits processors are shared, not copied."""
        return replace(self)


_FLAGS = (
    "include_stop_str_in_output",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # an integer of too many digits, or a caller's own class
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _integer(
    name: str, value: object, low: int, high: int | None = None, *, low_is: str | None = None, note: str = ""
) -> int:
    """`value` as an int of at least `low` and at most `high`."""
    if not isinstance(value, bool) and isinstance(value, Integral):
        number = int(value)
        if low <= number and (high is None or number <= high):
            return number
    below = low_is or str(low)
    span = f"an integer of {below} or more" if high is None else f"an integer from {below} to {high}"
    raise InvalidParameterError(name, value, span + note)


def _count(name: str, value: object, low: int, *, low_is: str | None = None) -> int:
    """`value` as an int of at least `low` that is a count of something: no message or metric can hold a larger one."""
    number = _integer(name, value, low, low_is=low_is)
    if number > MAX_COUNT:
        raise InvalidParameterError(name, value, f"an integer from {low_is or low} to {MAX_COUNT}")
    return number


def _number(name: str, value: object, low: float, high: float = math.inf, *, above: bool = False) -> float:
    """`value` as a finite float of at least `low` (more than `low` with `above`) and at most `high`."""
    if not isinstance(value, bool) and isinstance(value, Real):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number) and low <= number <= high and not (above and number == low):
            return number
    least = f"above {low}" if above else f"{low} or more"
    span = f"a finite number, {least}" if high == math.inf else f"a number, {least} and at most {high}"
    raise InvalidParameterError(name, value, span)


def _stop_strings(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    allowed = f"a string or a list of at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_LENGTH} characters"
    if not isinstance(stops, (list, tuple)):
        raise InvalidParameterError("stop", value, allowed)
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidParameterError("stop", stops, f"{allowed}; {len(stops)} are too many")
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise InvalidParameterError("stop", stop, allowed)
    return tuple(stops)


def _are_plain(ids: Sequence[Any]) -> bool:
    """At least one, and nothing but ints: then they can be checked together, many times as fast as one by one."""
    return set(map(type, ids)) == {int}


def _ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise InvalidParameterError(name, value, "a list of token ids")
    plain = tuple(value)
    if _are_plain(plain) and min(plain) >= 0:
        return plain
    return tuple(_integer(name, token_id, 0, note=" (a token id)") for token_id in value)


def _bias(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise InvalidParameterError("logit_bias", value, "a mapping from token id to a number from -100 to 100")
    return {
        _integer("logit_bias", token_id, 0, note=" (a token id)"): _number("logit_bias", bias, -100, 100)
        for token_id, bias in value.items()
    }


def _callables(value: object) -> tuple[LogitsProcessor, ...]:
    if not isinstance(value, (list, tuple)) or not all(callable(processor) for processor in value):
        raise InvalidParameterError("logits_processors", value, "a list of callables (token ids, logits) -> logits")
    return tuple(value)
