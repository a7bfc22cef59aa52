"""Every error that the engine raises on purpose, in one tree.

Exception
├── ValueError
│   ├── InvalidParameterError   a sampling parameter out of range; names it and what is allowed
│   ├── InvalidPromptError      an empty prompt, a wrong type, token ids outside the vocabulary
│   ├── TokenizerError          a tokenizer that cannot be loaded, a chat template that fails
│   ├── ModelLoadError          an unknown model, a broken file, an architecture that is not supported
│   ├── ConfigError             engine arguments under which some request could wait for ever
│   └── RefusedError            a request that this engine could never finish
│       └── DuplicateError      a request id in use
└── RuntimeError
    ├── SamplingError           no token can be drawn: broken logits, or the request's own processor raised
    ├── ProtocolError           schedule and update out of turn: a bug in the caller
    ├── RequestFailedError      the request was accepted and could not be carried out
    └── UnavailableError        the engine takes no request now; a later one, or another engine, may be luckier
        ├── QueueFullError      as many requests wait as may
        ├── ShutdownError       the engine is being shut down
        ├── EngineStalledError  there is work, and no step has ended for too long
        └── EngineDeadError     the engine's thread has ended
"""

from engine.models.errors import ModelLoadError
from engine.sampling import InvalidParameterError
from engine.scheduler.errors import ConfigError, DuplicateError, ProtocolError, RefusedError
from engine.tokenizer import TokenizerError


class InvalidPromptError(ValueError):
    """The prompt is not one: empty, of a wrong type, or with token ids outside the vocabulary."""


class RequestFailedError(RuntimeError):
    """The request was accepted and could not be carried out; the message says why."""


class UnavailableError(RuntimeError):
    """The engine takes no request now.  reason: a short word for metrics."""

    reason = "unavailable"


class QueueFullError(UnavailableError):
    """As many requests wait as may."""

    reason = "queue_full"


class ShutdownError(UnavailableError):
    """The engine is being shut down."""

    reason = "shutdown"


class EngineStalledError(UnavailableError):
    """There is work, and no step has ended for too long."""

    reason = "stalled"


class EngineDeadError(UnavailableError):
    """The engine's thread has ended; nothing will be computed any more."""

    reason = "dead"


def reason_of(error: Exception) -> str:
    """A short word for why a request was not accepted: the label of metrics, the same for every way in."""
    if isinstance(error, RefusedError | UnavailableError):
        return error.reason
    if isinstance(error, InvalidParameterError):
        return "invalid_value"
    if isinstance(error, InvalidPromptError | TokenizerError):
        return "invalid_prompt"
    return "invalid_request"


__all__ = [
    "ConfigError",
    "DuplicateError",
    "EngineDeadError",
    "EngineStalledError",
    "InvalidParameterError",
    "InvalidPromptError",
    "ModelLoadError",
    "ProtocolError",
    "QueueFullError",
    "RefusedError",
    "RequestFailedError",
    "ShutdownError",
    "TokenizerError",
    "UnavailableError",
    "reason_of",
]
