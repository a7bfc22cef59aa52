"""Traces of requests: read line by line, changed as asked, refused with file and line."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from engine.simulate.workload import Request, count_lines, read_trace

HEADER = "arrival_s,prompt_tokens,output_tokens\n"


def trace(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


def read(path: Path, **options: Any) -> list[tuple[float, int, int]]:
    return [tuple(request) for request in read_trace(path, **options)]  # type: ignore[misc]


def test_a_trace_is_read_in_its_order_and_other_columns_are_ignored(tmp_path: Path) -> None:
    path = trace(tmp_path, "prompt_tokens,hash,output_tokens,arrival_s\n7,0 1-3,2,0.5\n\n8,,3,0.5\n")
    assert read(path) == [(0.5, 7, 2), (0.5, 8, 3)]
    assert count_lines(path) == 3


def test_rate_scale_and_limit(tmp_path: Path) -> None:
    path = trace(tmp_path, HEADER + "0,100,10\n4,9,1\n6,50,0\n")
    assert read(path, rate=2.0) == [(0.0, 100, 10), (2.0, 9, 1), (3.0, 50, 0)]
    assert read(path, scale=10.0) == [(0.0, 10, 1), (4.0, 1, 1), (6.0, 5, 0)]
    assert read(path, limit=1) == [(0.0, 100, 10)]


def test_requests_of_one_moment_are_spread_no_further_than_to_the_next(tmp_path: Path) -> None:
    path = trace(tmp_path, HEADER + "0,1,1\n0,2,1\n0,3,1\n1.5,4,1\n1.5,5,1\n")
    assert [request[0] for request in read(path, spread=3.0)] == [0.0, 0.5, 1.0, 1.5, 3.0]


def test_a_repeated_trace_goes_on_a_mean_gap_later(tmp_path: Path) -> None:
    path = trace(tmp_path, HEADER + "1,1,1\n2,2,1\n5,3,1\n")
    assert [request[0] for request in read(path, repeat=3)] == [1, 2, 5, 7, 8, 11, 13, 14, 17]
    alone = trace(tmp_path, HEADER + "0,1,1\n")
    assert [request[0] for request in read(alone, repeat=2)] == [0, 0]


def test_a_trace_without_arrivals_gets_those_of_its_seed(tmp_path: Path) -> None:
    path = trace(tmp_path, "prompt_tokens,output_tokens\n" + "5,2\n" * 400)
    first = read(path, seed=1)
    assert first == read(path, seed=1) != read(path, seed=2)
    times = [request[0] for request in first]
    assert times == sorted(times)
    assert times[0] == 0
    assert 300 < times[-1] < 500  # one a second on average
    assert read(path, seed=1, rate=4.0)[-1][0] == times[-1] / 4


def test_nothing_is_read_ahead(tmp_path: Path) -> None:
    """The line that is wrong is met when it is its turn, and not before."""
    path = trace(tmp_path, HEADER + "0,1,1\n1,2,2\n2,oh,3\n")
    reader = read_trace(path)
    assert list(islice(reader, 2)) == [Request(0, 1, 1), Request(1, 2, 2)]
    with pytest.raises(ValueError, match="line 4"):
        next(reader)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: the header has no column prompt_tokens; a trace has prompt_tokens, output_tokens and"),
        ("prompt_tokens,arrival_s\n1,2\n", "line 1: the header has no column output_tokens"),
        (HEADER, "has no requests, only a header"),
        (HEADER + "0,1,1\n0,1\n", "line 3: there are 2 fields; the header names 3"),
        (HEADER + "0,1,1,4\n", "line 2: there are 4 fields"),
        (HEADER + "0,-1,1\n", "line 2: prompt_tokens is '-1'; it must be an int of at least 0"),
        (HEADER + "0,1,1.5\n", "line 2: output_tokens is '1.5'; it must be an int"),
        (HEADER + "0,,1\n", "line 2: prompt_tokens is ''"),
        (HEADER + "0," + "9" * 5000 + ",1\n", "line 2: prompt_tokens is '99999"),
        (HEADER + "now,1,1\n", "line 2: arrival_s is 'now'; it must be a number of seconds of at least 0"),
        (HEADER + "nan,1,1\n", "line 2: arrival_s is 'nan'"),
        (HEADER + "inf,1,1\n", "line 2: arrival_s is 'inf'"),
        (HEADER + "-1,1,1\n", "line 2: arrival_s is '-1'"),
        (HEADER + "5,1,1\n4.5,1,1\n", "line 3: arrival_s is 4.5 after 5; arrivals must be in order"),
    ],
)
def test_a_line_that_is_no_request_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = trace(tmp_path, text)
    with pytest.raises(ValueError) as caught:
        read(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(HEADER.encode() + b"0,1,1\n\xff\xfe,2,2\n")
    with pytest.raises(ValueError, match="a trace is UTF-8 text"):
        read(path)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none.csv")
