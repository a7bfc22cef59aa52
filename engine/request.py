"""What the engine knows of one request: tokens, parameters and text, none of which the scheduler sees."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.sampling import SamplingParams


@dataclass(slots=True)
class Sampled:
    """One draw: the token, its log-probability, and the most likely ones when they were asked for.

    logprob: natural log of the token's probability under the model's own distribution (before temperature, penalties
        and truncation).
    top: (token id, logprob) pairs, most likely first; None unless `SamplingParams.logprobs` was given.
    rank: 1 for the most likely token; 0 when logprobs were not asked for.
    """

    token_id: int
    logprob: float = 0.0
    top: list[tuple[int, float]] | None = None
    rank: int = 0


@dataclass(slots=True, eq=False)
class RequestState:
    """The tokens of a request.  `outputs[b]` are the tokens that branch `b` has generated."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int  # the request's own, or a fresh one
    outputs: list[list[int]] = field(default_factory=list)

    def tokens(self, branch: int, start: int, end: int) -> list[int]:
        """Token ids at positions `start` to `end` (exclusive) of a branch, over prompt and output."""
        prompt = self.prompt_token_ids
        if end <= len(prompt):
            return prompt[start:end]
        output = self.outputs[branch]
        if start >= len(prompt):
            return output[start - len(prompt) : end - len(prompt)]
        return prompt[start:] + output[: end - len(prompt)]


@dataclass(slots=True)
class StepOutput:
    """What a runner returns for a plan: one draw for every branch named in a row's `draws`.

    samples: (request id, branch) -> draw.
    errors: request id -> what went wrong for this request alone (a logits processor that raised, say).
    """

    samples: dict[tuple[str, int], Sampled] = field(default_factory=dict)
    errors: dict[str, Exception] = field(default_factory=dict)
