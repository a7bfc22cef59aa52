"""What can go wrong at the scheduler's door.

SchedulerError
├── ConfigError        a configuration under which some request could wait for ever, or no request could run
├── RefusedError       a request that this scheduler can never serve; `reason` is a short word for metrics
│   └── DuplicateError the request id is in use
└── ProtocolError      schedule and update called out of turn: a bug in the caller
"""

from __future__ import annotations


class SchedulerError(Exception):
    """Base of all errors that the scheduler raises on purpose."""


class ConfigError(SchedulerError, ValueError):
    """The configuration cannot work; the message names the values and what is allowed."""


class RefusedError(SchedulerError, ValueError):
    """The request can never be served; the message names the two numbers that do not fit."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class DuplicateError(RefusedError):
    """A request with this id is unfinished."""

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"request id {request_id!r} is in use by an unfinished request; choose another", "duplicate_id"
        )


class ProtocolError(SchedulerError, RuntimeError):
    """A call out of turn: `schedule` and `update` (or `fail`) must alternate."""
