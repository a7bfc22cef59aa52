"""Decide after every token whether a branch is finished, and how much of its text is settled.

Text that may still become part of a stop string is held back; what has been shown is never taken back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from engine.sampling import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class StopString:
    """Follows one stop string through a text given in pieces (Knuth, Morris and Pratt 1977).

    `held` is the length of the longest end of the text that the stop string begins with: what may still become a match.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.held = 0
        self._fall = [0] * (len(stop) + 1)  # fall[k]: the longest proper end of stop[:k] that stop begins with
        k = 0
        for i in range(1, len(stop)):
            while k and stop[i] != stop[k]:
                k = self._fall[k]
            k += stop[i] == stop[k]
            self._fall[i + 1] = k

    def feed(self, piece: str) -> int | None:
        """Go through `piece`; the number of its characters after the first match, or None if there is none.

        Later matches in the same piece are not looked for, but `held` is always right for the end of the piece.
        """
        stop, fall, k = self.stop, self._fall, self.held
        left: int | None = None
        for i, character in enumerate(piece):
            while k and (k == len(stop) or character != stop[k]):
                k = fall[k]
            k += character == stop[k]
            if k == len(stop) and left is None:
                left = len(piece) - i - 1
        self.held = fall[k] if k == len(stop) else k
        return left


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a branch is finished.

    reason: the stop string, the stop token's id, or None (end of sequence, length).
    keep: how many characters of the text remain; None for all of them.
    """

    finish_reason: FinishReason
    reason: str | int | None = None
    keep: int | None = None


class StopChecker:
    """The stopping rules of one branch.

    In this order: end-of-sequence token (unless ignore_eos), stop token, stop string, length.  With fewer than
    `min_tokens` tokens the first three are not tested, and a stop string completed by then does not count later; one
    that is only begun by then does when it is completed.

    Of several stop strings completed by one token the one that starts first wins, of those that start together the
    shortest: it was completed first.

    max_tokens: the largest number of tokens of this branch (the request's, or what the engine's limits allow).
    """

    def __init__(self, params: SamplingParams, eos_token_ids: Iterable[int], max_tokens: int) -> None:
        self._min_tokens = params.min_tokens
        self._max_tokens = max_tokens
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._stop_ids = frozenset(params.stop_token_ids or ())
        self._strings = [StopString(stop) for stop in params.stop or ()]
        self._include = params.include_stop_str_in_output

    def check_token(self, token_id: int, num_tokens: int) -> Stop | None:
        """Whether the token itself ends the branch, which has `num_tokens` tokens with it."""
        if num_tokens < self._min_tokens:
            return None
        if token_id in self._eos:
            return Stop("stop")
        if token_id in self._stop_ids:
            return Stop("stop", token_id)
        return None

    def check_length(self, num_tokens: int) -> Stop | None:
        return Stop("length") if num_tokens >= self._max_tokens else None

    def check_text(self, piece: str, length: int, num_tokens: int) -> Stop | None:
        """Whether `piece`, the new end of a text that is `length` characters with it, completes a stop string."""
        matches: list[tuple[int, int, str]] = []
        for string in self._strings:
            left = string.feed(piece)
            if left is not None:
                size = len(string.stop)
                matches.append((length - left - size, size, string.stop))
        if not matches or num_tokens < self._min_tokens:
            return None
        start, size, stop = min(matches)
        return Stop("stop", stop, start + size if self._include else start)

    @property
    def held(self) -> int:
        """Characters at the end of the text that may still become part of a stop string."""
        return max((string.held for string in self._strings), default=0)
