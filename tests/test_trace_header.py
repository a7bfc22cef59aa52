"""The header of a trace and its lines as lines: what is impossible is named, by field and number."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler import Scheduler, SchedulerConfig, SequenceGroup
from engine.scheduler.trace import TraceWriter
from spec.check.header import FIELDS, LEAST, wrong_header
from spec.check.trace import audit


def record(path: Path) -> list[str]:
    """The lines of a short trace."""
    s = Scheduler(SchedulerConfig(num_gpu_blocks=8, num_cpu_blocks=4, block_size=2, max_model_len=32))
    trace = TraceWriter(s, path)
    s.add(SequenceGroup("a", 3, 2, 4))
    while s.has_unfinished():
        s.update(s.schedule())
    trace.close()
    assert audit(path).lawful
    return path.read_text().splitlines(keepends=True)


def stated(path: Path) -> dict[str, Any]:
    return json.loads(record(path)[0])  # type: ignore[no-any-return]


def with_header(path: Path, header: dict[str, Any]) -> list[str]:
    """What an audit finds once the header is this, with the digest that belongs to it."""
    lines = record(path)
    header.pop("digest", None)
    body = json.dumps(header, separators=(",", ":"))
    digest = blake2b(body.encode(), digest_size=16).hexdigest()
    path.write_text("".join([f'{body[:-1]},"digest":"{digest}"}}\n', *lines[1:]]))
    return [str(finding) for finding in audit(path).findings]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("watermark_blocks", -1, "watermark_blocks is -1; it must be at least 0"),
        ("block_size", 0, "block_size is 0; it must be at least 1"),
        ("num_gpu_blocks", 0, "num_gpu_blocks is 0; it must be at least 1"),
        ("num_gpu_blocks", 10**15, "num_gpu_blocks is 1000000000000000; with block_size 2"),
        ("num_cpu_blocks", "4", "num_cpu_blocks is '4'; it must be an int"),
        ("max_num_seqs", 3000, "max_num_seqs is 3000; it must be at most max_num_batched_tokens (2048)"),
        ("max_num_batched_tokens", True, "max_num_batched_tokens is True; it must be an int"),
        ("enable_chunked_prefill", 1, "enable_chunked_prefill is 1; it must be true or false"),
        ("preemption_mode", "drop", "preemption_mode is 'drop'; it must be null, swap or recompute"),
        ("max_model_len", None, "max_model_len is None; it must be an int"),
    ],
)
def test_an_impossible_configuration_is_named(tmp_path: Path, name: str, value: Any, message: str) -> None:
    header = stated(tmp_path / "trace")
    header["config"][name] = value
    (finding,) = with_header(tmp_path / "trace", header)
    assert finding.startswith("line 1: ")
    assert message in finding


def test_whole_prompts_first_need_a_step_as_long_as_a_prompt(tmp_path: Path) -> None:
    header = stated(tmp_path / "trace")
    header["config"] |= {"enable_chunked_prefill": False, "max_model_len": 4096}
    (finding,) = with_header(tmp_path / "trace", header)
    assert "without chunked prefill it must be at least max_model_len (4096)" in finding


@pytest.mark.parametrize("name", ["config", "steps", "arrivals", "owed", "counts"])
def test_what_a_header_lacks_is_named(tmp_path: Path, name: str) -> None:
    header = stated(tmp_path / "trace")
    del header[name]
    (finding,) = with_header(tmp_path / "trace", header)
    assert f"the header has no {name}" in finding


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_what_a_configuration_lacks_or_has_too_much_is_named(tmp_path: Path, name: str) -> None:
    header = stated(tmp_path / "trace")
    value = header["config"].pop(name)
    (finding,) = with_header(tmp_path / "trace", header)
    assert f"the configuration has no {name}" in finding
    header["config"] |= {name: value, "more": 1}
    (finding,) = with_header(tmp_path / "trace", header)
    assert "the configuration has a field 'more', which is unknown" in finding


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(-2, 9), max_size=3),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)


@given(st.sampled_from([*sorted(FIELDS), "steps", "arrivals", "owed", "counts", "config"]), ODD)
def test_any_value_of_any_field_is_taken_or_named(name: str, value: Any) -> None:
    """What is not named can be held by a scheduler: the audit goes on with it."""
    config: dict[str, Any] = {**dict.fromkeys(LEAST, 2), "enable_chunked_prefill": True, "preemption_mode": None}
    header: dict[str, Any] = {"config": config, "steps": 0, "arrivals": 0, "owed": False, "counts": [2, 2]}
    (config if name in FIELDS else header)[name] = value
    wrong = wrong_header(header)
    if not wrong:
        SchedulerConfig(**config)
        assert [type(one) for one in header["counts"]] == [int, int]
        assert type(header["owed"]) is bool
        return
    said = {"counts": ("counts", "free GPU", "free CPU"), "config": ("config",)}.get(name, (name,))
    assert any(one in wrong for one in said)


def test_a_blank_line_is_called_one(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    lines = record(path)
    for blank in ("\n", "   \n"):
        path.write_text("".join([*lines[:2], blank, *lines[2:]]))
        (finding,) = audit(path).findings
        assert str(finding) == "line 3: the line is blank: no trace has blank lines"
    path.write_text("".join([*lines[:2], lines[2][:9]]))
    (finding,) = audit(path).findings
    assert "line 3: the line is cut off" in str(finding)
