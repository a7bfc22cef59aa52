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
    └── ProtocolError           schedule and update out of turn: a bug in the caller
"""

from engine.models.errors import ModelLoadError
from engine.sampling import InvalidParameterError
from engine.scheduler.errors import ConfigError, DuplicateError, ProtocolError, RefusedError
from engine.tokenizer import TokenizerError


class InvalidPromptError(ValueError):
    """The prompt is not one: empty, of a wrong type, or with token ids outside the vocabulary."""


__all__ = [
    "ConfigError",
    "DuplicateError",
    "InvalidParameterError",
    "InvalidPromptError",
    "ModelLoadError",
    "ProtocolError",
    "RefusedError",
    "TokenizerError",
]
