"""`lawful bench serve`: its arrivals, its sums, and a run against a server."""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from engine.bench_serve import arrivals, percentile, read_trace
from engine.cli import main
from tests.server.servers import Server, wait_for

pytestmark = pytest.mark.timeout(120)


def test_arrivals_are_poisson_and_the_same_every_time() -> None:
    times = arrivals(4000, 5.0, 1.0, 0)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert times == arrivals(4000, 5.0, 1.0, 0)
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(statistics.fmean(gaps), rel=0.1)
    even = arrivals(4000, 5.0, 100.0, 0)
    assert statistics.stdev([b - a for a, b in itertools.pairwise(even)]) < 0.05
    assert arrivals(3, float("inf"), 1.0, 0) == [0, 0, 0]


def test_a_trace_is_scaled_and_played_in_order(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("arrival_s,prompt_tokens,output_tokens\n0.0,160,32\n4.0,8,1\n5.0,1,1\n")
    items = read_trace(str(file), 2, 16, 2.0)
    assert [(item.arrival, item.prompt_tokens, item.output_tokens) for item in items] == [(0.0, 10, 2), (2.0, 1, 1)]
    file.write_text("arrival_s,prompt_tokens\n0.0,160\n")
    with pytest.raises(ValueError, match="row 1 is no request"):
        read_trace(str(file), 2, 1, 1)


def test_percentiles() -> None:
    assert percentile([], 99) is None
    assert percentile([1.0], 99) == 1.0
    assert percentile([float(i) for i in range(101)], 99) == 99.0


def test_a_run_reports_what_its_clients_saw(shared: Server, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    wait_for(shared.idle)
    before = shared.metrics()
    file = tmp_path / "result.json"
    flags = ["--num-prompts", "12", "--request-rate", "50", "--input-len", "9", "--output-len", "7"]
    status = main(["bench", "serve", "--url", shared.url, "--quiet", *flags, "--json", "--output-json", str(file)])
    assert status == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (result["completed"], result["failed"]) == (12, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (108, 84)
    assert result["output_throughput"] == pytest.approx(84 / result["duration_s"])
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert 0 < result[f"median_{name}_ms"] <= result[f"p99_{name}_ms"]
    assert result["mean_ttft_ms"] < result["mean_e2el_ms"]
    whole = json.loads(file.read_text())
    assert len(whole["requests"]) == 12
    assert shared.metrics()["lawful:generation_tokens_total"] - before["lawful:generation_tokens_total"] == 84


def test_a_trace_with_a_limit_on_open_requests(shared: Server, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "trace.csv"
    rows = "".join(f"{i / 100},{10 + i},{3 + i % 4}\n" for i in range(10))
    file.write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
    flags = ["--trace", str(file), "--num-prompts", "10", "--max-concurrency", "2"]
    assert main(["bench", "serve", "--url", shared.url, "--quiet", *flags]) == 0
    text = capsys.readouterr().out
    for line in ("Successful requests", "Output token throughput (tok/s)", "Median TPOT (ms)", "P99 E2EL (ms)"):
        assert line in text


def test_failures_are_counted_and_said(shared: Server, capsys: pytest.CaptureFixture) -> None:
    status = main(["bench", "serve", "--url", shared.url, "--quiet", "--num-prompts", "2", "--input-len", "5000"])
    assert status == 1
    assert "max_model_len" in capsys.readouterr().out
    assert main(["bench", "serve", "--url", "http://127.0.0.1:9", "--quiet"]) == 1
    assert "127.0.0.1:9" in capsys.readouterr().err
    assert main(["bench", "serve", "--url", shared.url, "--num-prompts", "0"]) == 1


def test_bench_alone_is_still_the_engine(capsys: pytest.CaptureFixture) -> None:
    for command in (["bench"], ["bench", "throughput"]):
        assert main([*command, "--num-prompts", "0"]) == 1
        assert "--num-prompts is 0; it must be at least 1" in capsys.readouterr().err
