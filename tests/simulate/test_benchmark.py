"""The comparison of policies: its tables are those of its runs, and without the traces it says so."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import simulate_policies

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def test_the_committed_tables_are_made_from_the_committed_runs() -> None:
    result = json.loads((RESULTS / "simulate_policies.json").read_text())
    assert result["tables"] == simulate_policies.tables(result["runs"])
    assert {run["trace_name"] for run in result["runs"]} == set(simulate_policies.TRACES)
    assert {run["mode"] for run in result["runs"]} == set(simulate_policies.MODES)
    for key in ("machine", "date", "command", "section"):
        assert result[key]


def test_policies_are_compared_on_the_same_load() -> None:
    result = json.loads((RESULTS / "simulate_policies.json").read_text())
    for trace in simulate_policies.TRACES:
        for mode in simulate_policies.MODES:
            runs = [run for run in result["runs"] if (run["trace_name"], run["mode"]) == (trace, mode)]
            assert len(runs) == len(list(simulate_policies.policies(mode)))
            for name in ("trace", "n", "cost_model"):
                assert len({json.dumps(run[name]) for run in runs}) == 1
            for name in ("num_gpu_blocks", "num_cpu_blocks", "max_num_seqs", "max_num_batched_tokens"):
                assert len({run["config"][name] for run in runs}) == 1


def test_the_figures_of_the_text_are_those_of_the_tables() -> None:
    text = (RESULTS.parents[1] / "docs" / "performance.md").read_text()
    result = json.loads((RESULTS / "simulate_policies.json").read_text())
    cells = {cell for table in result["tables"] for row in table["rows"] for cell in row}
    aborted = {cell.rpartition(" ")[2] for cell in cells if "aborted" in cell}
    found = text.partition("### What was found")[2].partition("<!-- simulation: begin -->")[0]
    named = re.findall(r"(\d+)(?:st|nd|rd|th) (?:request|of 1,000)", found)
    assert len(named) == 3
    assert set(named) <= aborted
    compared = re.findall(r"([\d.]+) s(?: at p99)?\s+(?:against|instead of) ([\d.]+) s", found)
    assert len(compared) == 4
    values = [float(cell) for cell in cells if re.fullmatch(r"[\d.]+", cell)]
    for figure in (figure for pair in compared for figure in pair):
        places = len(figure.partition(".")[2])
        assert any(f"{value:.{places}f}" == figure for value in values), figure


def test_without_the_traces_nothing_is_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(simulate_policies, "DATA", tmp_path)
    monkeypatch.setattr("sys.argv", ["simulate_policies"])
    assert simulate_policies.main() == 1
    assert "azure2023_conv.csv is missing; nothing was run" in capsys.readouterr().err


def test_a_small_comparison_is_the_same_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = "".join(f"{i * 0.2},{20 + i % 40},{1 + i % 30}\n" for i in range(40))
    (tmp_path / "small.csv").write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
    monkeypatch.setattr(simulate_policies, "DATA", tmp_path)
    monkeypatch.setattr(simulate_policies, "TRACES", ("small",))

    def once() -> list[dict[str, Any]]:
        return simulate_policies.compare(40)

    runs = once()
    assert runs == once()
    made = simulate_policies.tables(runs)
    assert [table["title"] for table in made[:-2]] == [f"{mode}: rules" for mode in simulate_policies.MODES]
    for table in made:
        assert table["rows"]
        assert all(len(row) == len(table["columns"]) for row in table["rows"])
