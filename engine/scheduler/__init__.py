"""The production scheduler: policy on counts, blocks with ids, a plan for every step.

No torch, no clock, no randomness: it can be driven without a model, and is what the proofs run.
"""

from engine.scheduler.config import SchedulerConfig
from engine.scheduler.errors import ConfigError, DuplicateError, ProtocolError, RefusedError, SchedulerError
from engine.scheduler.plan import Action, Plan, PreemptionMode, ScheduledSequence
from engine.scheduler.scheduler import QueueCounts, Scheduler
from engine.scheduler.sequence import SequenceGroup, Status

__all__ = [
    "Action",
    "ConfigError",
    "DuplicateError",
    "Plan",
    "PreemptionMode",
    "ProtocolError",
    "QueueCounts",
    "RefusedError",
    "ScheduledSequence",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerError",
    "SequenceGroup",
    "Status",
]
