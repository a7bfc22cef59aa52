"""The header of a trace: what is wrong with it, by the name of the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LEAST = {  # the ints of a configuration
    "num_gpu_blocks": 1,
    "num_cpu_blocks": 0,
    "block_size": 1,
    "max_model_len": 2,
    "max_num_batched_tokens": 1,
    "max_num_seqs": 1,
    "watermark_blocks": 0,
}
FIELDS = {*LEAST, "enable_chunked_prefill", "preemption_mode"}
MODES = (None, "swap", "recompute")
MOST_TOKENS = 1 << 28  # in one pool: an audit keeps a name for each


def wrong_header(line: Mapping[str, Any]) -> str:
    """What no scheduler's header says, and what is allowed; empty if it is one that a trace can begin with."""
    for name in ("config", "steps", "arrivals", "owed", "counts"):
        if name not in line:
            return f"the header has no {name}"
    config = line["config"]
    if not isinstance(config, dict):
        return f"config is {config!r}; it must be an object"
    return _config(config) or _start(line, config)


def _config(config: Mapping[str, Any]) -> str:
    for name in sorted(FIELDS):
        if name not in config:
            return f"the configuration has no {name}"
    for name in config:
        if name not in FIELDS:
            return f"the configuration has a field {name!r}, which is unknown"
    for name, least in LEAST.items():
        if wrong := _count(name, config[name], least):
            return wrong
    mode, chunked = config["preemption_mode"], config["enable_chunked_prefill"]
    if mode not in MODES:
        return f"preemption_mode is {mode!r}; it must be null, swap or recompute"
    if not isinstance(chunked, bool):
        return f"enable_chunked_prefill is {chunked!r}; it must be true or false"
    tokens, seqs, length = config["max_num_batched_tokens"], config["max_num_seqs"], config["max_model_len"]
    if seqs > tokens:
        return f"max_num_seqs is {seqs}; it must be at most max_num_batched_tokens ({tokens})"
    if not chunked and tokens < length:
        return (
            f"max_num_batched_tokens is {tokens}; without chunked prefill it must be at least max_model_len ({length})"
        )
    for name in ("num_gpu_blocks", "num_cpu_blocks"):
        if config[name] * config["block_size"] > MOST_TOKENS:
            return (
                f"{name} is {config[name]}; with block_size {config['block_size']} an audit holds {MOST_TOKENS} tokens"
            )
    return ""


def _start(line: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    for name in ("steps", "arrivals"):
        if wrong := _count(name, line[name], 0):
            return wrong
    if not isinstance(line["owed"], bool):
        return f"owed is {line['owed']!r}; it must be true or false"
    counts = line["counts"]
    if not isinstance(counts, list) or len(counts) != 2:
        return f"counts is {counts!r}; it must be the free blocks of the GPU and of the CPU"
    for device, count in zip(("GPU", "CPU"), counts, strict=True):
        if wrong := _count(f"the number of free {device} blocks", count, 0):
            return wrong
    return ""


def _count(name: str, value: Any, least: int) -> str:
    if not isinstance(value, int) or isinstance(value, bool):
        return f"{name} is {value!r}; it must be an int"
    return f"{name} is {value}; it must be at least {least}" if value < least else ""
