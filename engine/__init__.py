"""lawful: an LLM inference engine whose scheduler obeys laws.

    from engine import LLM, SamplingParams

    llm = LLM("smollm2-135m")
    print(llm.chat([{"role": "user", "content": "What is the capital of France?"}])[0].outputs[0].text)

Names are imported on first use, so that `engine.scheduler` can be used without torch.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.async_llm import AsyncLLM
    from engine.config import EngineArgs
    from engine.core import EngineCore
    from engine.llm import LLM
    from engine.outputs import CompletionOutput, RequestOutput
    from engine.sampling import SamplingParams

# OpenMP threads that wait for each other spin by default, which on a machine with other work costs many times the
# time of the work itself; on an idle one, passive waiting made the engine a fifth slower once (54 against 68 tokens/s
# at 16 requests, two cores), and no slower when measured again (docs/performance.md).  Spinning for a bounded time
# (GOMP_SPINCOUNT) is the worse of both: on two busy cores a parallel sum of 70,000 numbers took 21 us at the median
# passively, 88 with a count of 1,000, 747 with 10,000.  Who has a machine to himself sets OMP_WAIT_POLICY=ACTIVE.
# Read by the runtime when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# oneDNN keeps code for every number of rows it has met, by default for 1024 shapes: a server's memory would grow for
# hours.  A step needs one for each kind of layer; what a new number of rows costs is not to be seen in processor time.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")
os.environ.setdefault("LRU_CACHE_CAPACITY", "32")

__version__ = "0.1.0"

_HOMES = {
    "LLM": "engine.llm",
    "AsyncLLM": "engine.async_llm",
    "EngineArgs": "engine.config",
    "EngineCore": "engine.core",
    "SamplingParams": "engine.sampling",
    "RequestOutput": "engine.outputs",
    "CompletionOutput": "engine.outputs",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineArgs",
    "EngineCore",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
