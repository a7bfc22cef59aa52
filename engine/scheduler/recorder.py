"""What a scheduler did lately, and the file from which a broken law can be run again.

Only contracts write here; with contracts off nothing is recorded.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from spec import views

KEPT_STEPS = 8  # steps before the violation that a dump can run again


class LawBrokenError(AssertionError):
    """A law does not hold: a bug in the scheduler.  law: its id; path: the dump, or None."""

    def __init__(self, law: str, message: str, path: Path | None) -> None:
        super().__init__(message + (f"\nstate and events: {path}" if path else ""))
        self.law = law
        self.path = path


class Recorder:
    """The last steps of one scheduler: for each the state at its boundary and the calls made since."""

    def __init__(self) -> None:
        self.steps: deque[dict[str, Any]] = deque(maxlen=KEPT_STEPS)
        self.step: views.Step | None = None  # the step under way, as the laws see it
        self.before: views.State | None = None  # the state before the call under way

    def begin(self, s: Any) -> None:
        """A step begins: keep the state before it."""
        self.steps.append({"state": dump_state(s), "calls": [{"call": "schedule"}]})

    def note(self, s: Any, call: str, **arguments: Any) -> None:
        """A call that is about to be made, after the last step begun."""
        if not self.steps:
            self.steps.append({"state": dump_state(s), "calls": []})
        self.steps[-1]["calls"].append({"call": call, **arguments})


_recorders: WeakKeyDictionary[Any, Recorder] = WeakKeyDictionary()


def recorder(s: Any) -> Recorder:
    """The recorder of a scheduler."""
    if s not in _recorders:
        _recorders[s] = Recorder()
    return _recorders[s]


def dump(s: Any, law: str, message: str) -> Path | None:
    """Write what is needed to run the violation again; None if nothing can be written."""
    path = Path(os.environ.get("LAWFUL_DUMP_DIR", ".lawful")) / f"{law}-{os.getpid()}-{time.time_ns()}.json"
    kept = list(recorder(s).steps) if s in _recorders else []
    content = {
        "law": law,
        "message": message,
        "scheduler": f"{type(s).__module__}:{type(s).__qualname__}",
        "state": kept[0]["state"] if kept else dump_state(s),
        "calls": [call for step in kept for call in step["calls"]],
        "plans": [step["plan"] for step in kept if "plan" in step],
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1, default=str))
    except OSError:
        return None  # the violation itself matters more
    return path


def dump_state(s: Any) -> dict[str, Any]:
    """Every field of a scheduler at a step boundary, as plain values."""
    config = s.config
    mode = config.mode
    return {
        "config": {
            "num_gpu_blocks": config.num_gpu_blocks,
            "num_cpu_blocks": config.num_cpu_blocks,
            "block_size": config.block_size,
            "max_model_len": config.max_model_len,
            "max_num_batched_tokens": config.tokens,
            "max_num_seqs": config.seqs,
            "enable_chunked_prefill": config.enable_chunked_prefill,
            "preemption_mode": mode.value if mode is not None else None,
            "watermark_blocks": config.watermark_blocks,
        },
        "running": [_dump_group(g) for g in s.running],
        "swapped": [_dump_group(g) for g in s.swapped],
        "waiting": [_dump_group(g) for g in s.waiting],
        "decodes_owed": s.decodes_owed,
        "num_arrivals": s.num_arrivals,
        "num_steps": s.num_steps,
        "pools": {
            name: {"free": list(pool.free), "refs": list(pool.refs)}
            for name in ("gpu", "cpu")
            if (pool := getattr(s.blocks, name, None)) is not None
        },
    }


def _dump_group(g: Any) -> dict[str, Any]:
    slots = [name for kind in type(g).__mro__ for name in getattr(kind, "__slots__", ())]
    row = {name: getattr(g, name) for name in slots}
    row["status"] = g.status.value
    row["branches"] = list(g.branches)
    row["tables"] = [list(table) for table in g.tables]
    return row


def describe(view: Any) -> str:
    """The values of a view, one group a line."""
    if isinstance(view, views.Round):
        return f"{describe(view.step)}\nafter update:\n{describe(view.after)}"
    if isinstance(view, views.Step):
        log = ", ".join(f"{verb} {i} [{blocks}] {detail}".rstrip() for verb, i, blocks, detail in view.plan.log)
        ran = ", ".join(f"{v.was.request_id} {v.tokens}" for v in view.served)
        plan = view.plan
        moves = ", ".join(
            f"{what} {pairs}"
            for what, pairs in (
                ("swap out", plan.blocks_to_swap_out),
                ("swap in", plan.blocks_to_swap_in),
                ("copy", plan.blocks_to_copy),
            )
            if pairs
        )
        return (
            f"before:\n{describe(view.before)}\nlog: {log}\ntokens: {ran}\nmoves: {moves or 'none'}\n"
            f"after schedule:\n{describe(view.mid)}"
        )
    config = view.config
    lines = [
        f"  max_num_batched_tokens {config.tokens}, max_num_seqs {config.seqs}, watermark {config.watermark_blocks}, "
        f"max_model_len {config.max_model_len}",
        f"  GPU free {view.blocks.gpu_free} of {view.config.num_gpu_blocks}, CPU free {view.blocks.cpu_free} of "
        f"{view.config.num_cpu_blocks}",
    ]
    for name in ("running", "swapped", "waiting"):
        lines += [
            f"  {name} {g.request_id}: arrival {g.arrival}, prompt {g.prompt_len}, n {g.n}, live {g.live}, known "
            f"{g.known}, deficit {g.deficit}, holds {g.held}, max_tokens {g.max_tokens}"
            for g in getattr(view, name)
        ]
    return "\n".join(lines)
