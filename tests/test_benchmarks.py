"""Benchmarks: results are complete and shown, the summary's figures are in its tables, the programs count what ran."""

from __future__ import annotations

import argparse
import datetime
import json
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import z3

from benchmarks import explorer, proofs, server_overhead
from engine.scheduler.contracts import lifted
from spec.check.symbolic import Executor, Report
from tests.test_docs import DOCUMENTS, ROOT, build

RESULTS = ROOT / "benchmarks" / "results"
FILES = sorted(RESULTS.glob("*.json"))
PERFORMANCE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")


def load(file: Path) -> dict[str, Any]:
    found = json.loads(file.read_text(encoding="utf-8"))
    assert isinstance(found, dict), file
    return found


def check(result: dict[str, Any]) -> None:
    """A result is what docs/build.py reads."""
    for key in ("section", "title", "command", "machine", "date"):
        assert isinstance(result[key], str), key
        assert result[key], key
    datetime.date.fromisoformat(result["date"])
    assert "/home" not in result["command"]
    assert result["tables"]
    for table in result["tables"]:
        assert table["title"]
        assert table["rows"]
        assert {len(row) for row in table["rows"]} == {len(table["columns"])}
        assert all(isinstance(cell, str) for row in [table["columns"], *table["rows"]] for cell in row)


# what is committed


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_result_is_complete_and_shown_in_a_document(file: Path) -> None:
    result = load(file)
    check(result)
    texts = [(ROOT / path).read_text(encoding="utf-8") for path in build.GENERATED]
    for text in (f"### {result['title']}\n", f"`{result['command']}`, {result['date']}, {result['machine']}."):
        assert sum(text in one for one in texts) == 1, f"{file.name} is shown in no document: {text}"
    for table in result["tables"]:
        for row in table["rows"]:
            assert any("| " + " | ".join(row) + " |" in one for one in texts), row


def test_every_section_of_performance_has_a_result() -> None:
    assert {load(file)["section"] for file in FILES} == set(build.GENERATED["docs/performance.md"])


def test_every_benchmark_and_every_result_is_named_in_a_document() -> None:
    for file in (ROOT / "benchmarks").glob("*.py"):
        named = re.search(rf"benchmarks[./]{file.stem}\b", PERFORMANCE)
        assert named, f"docs/performance.md does not name benchmarks/{file.name}"
    texts = [(ROOT / path).read_text(encoding="utf-8") for path in DOCUMENTS]
    shown = {file.stem for file in FILES}
    for file in RESULTS.glob("*.md"):
        assert file.stem in shown or any(f"benchmarks/results/{file.name}" in one for one in texts), file.name


def test_make_bench_runs_what_the_document_says() -> None:
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").partition("bench: setup\n")[2].partition("\n\n")[0]
    assert "benchmarks/scheduler_step.py" in recipe
    assert "-m benchmarks.proofs" in recipe
    assert "lawful bench" in recipe
    assert "--write" not in recipe


def figures(text: str) -> set[str]:
    """The numbers in a text, without the commas between thousands."""
    return {number.replace(",", "").rstrip(".") for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text)}


SUMMARY = {
    "Scheduler step": "scheduler-step",
    "Search": "proofs",
    "Symbolic proofs": "proofs",
    "CPU engine": "cpu-engine",
    "Server": "server",
    "Rules on real traffic": "simulation",
}


def test_the_figures_of_the_summary_are_those_of_the_tables() -> None:
    """Each point's figures stand in the tables of its own section."""
    summary = PERFORMANCE.partition("## In short\n")[2].partition("\n## ")[0]
    assert 6 <= len(summary.strip().splitlines()) <= 9
    points = dict(re.findall(r"^- \*(.+?)\*(.+?)(?=^- |\Z)", summary, re.DOTALL | re.MULTILINE))
    assert list(points) == list(SUMMARY)
    for point, text in points.items():
        known: set[str] = set()
        for result in map(load, FILES):
            if result["section"] == SUMMARY[point]:
                for table in result["tables"]:
                    for row in [[table["title"]], table["columns"], *table["rows"]]:
                        known |= figures(" ".join(row))
        told = figures(re.sub(r"\b(?:p99|V1)\b", "", text))
        assert told
        assert told <= known, f"{point}: {sorted(told - known)} of the summary are in no table"


def test_a_title_that_begins_with_a_symbol_keeps_its_case() -> None:
    assert build.sentence("n=4: rules") == "n=4: rules"
    assert build.sentence("median of 5 rounds") == "Median of 5 rounds"
    assert build.sentence("") == ""


# what the programs do


SMALL = proofs.any_size(1, 0, 0)


def test_a_proof_is_measured_and_the_solver_left_as_it_was() -> None:
    kept = (z3.Solver.check, Executor.__init__, Executor._check, Executor._push)
    cost = proofs.measure(SMALL, True)
    with lifted():
        report = SMALL.make(True)
    assert (cost.paths, cost.queries) == (report.paths, report.queries)
    assert cost.paths > 1
    assert (z3.Solver.check, Executor.__init__, Executor._check, Executor._push) == kept


def test_every_query_goes_through_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that ticks once a reading, each of the solver's answers takes one tick, and nothing else does."""
    ticks = iter(range(10**9))
    monkeypatch.setattr(proofs, "CLOCK", lambda: float(next(ticks)))
    cost = proofs.measure(SMALL, True)
    assert cost.solver == cost.queries
    assert cost.seconds > cost.solver + cost.terms > cost.solver


def test_a_proof_that_does_not_hold_is_not_measured() -> None:
    with pytest.raises(AssertionError, match="not satisfiable"):
        proofs.measure(proofs.Proof("nothing", "0/0/0", lambda chunked: Report()), True)


def test_the_proofs_are_of_both_orders_and_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "PROOFS", (SMALL,))
    table = proofs.symbolic()
    assert [row[:3] for row in table["rows"]] == [
        [SMALL.name, "1/0/0", "chunked"],
        [SMALL.name, "1/0/0", "prefill-first"],
        ["all", "", ""],
    ]
    paths = [int(row[3]) for row in table["rows"]]
    assert paths[0] + paths[1] == paths[2]
    check({"section": "a", "title": "a", "command": "a", "machine": "a", "date": "2026-11-30", "tables": [table]})


def test_the_committed_proofs_are_those_of_the_program() -> None:
    rows = load(RESULTS / "proofs.json")["tables"][0]["rows"]
    expected = [[proof.name, proof.shape, order] for proof in proofs.PROOFS for order in proofs.ORDERS]
    assert [row[:3] for row in rows] == [*expected, ["all", "", ""]]


def test_mutants_are_counted_by_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    class Known:
        verdicts: ClassVar[dict[str, Any]] = {
            "a": {"soak": {"killed": True, "cpu": 2.0}},
            "b": {"soak": {"killed": False, "cpu": 4.0}, "books": {"killed": True, "cpu": 54.0}},
        }

    monkeypatch.setattr(proofs.mutate, "Known", Known)
    assert proofs.mutants()["rows"] == [
        ["soak", "2", "1", "6", "20"],
        ["books", "1", "1", "54", "1"],
        ["all", "2", "2", "60", "2"],
    ]
    monkeypatch.setattr(Known, "verdicts", {})
    with pytest.raises(SystemExit, match="make mutants"):
        proofs.mutants()


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where results go instead."""
    monkeypatch.setattr(explorer, "RESULTS", tmp_path)
    monkeypatch.setattr(proofs, "RESULTS", tmp_path)
    monkeypatch.setattr(server_overhead, "RESULTS", tmp_path / "server_overhead.json")
    return tmp_path


def test_the_explorer_writes_the_same_table_twice(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr("sys.argv", ["explorer", "chunked-one-token-a-step", "--write"])
    explorer.main()
    result = load(folder / "explorer.json")
    check(result)
    assert result["command"] == "python -m benchmarks.explorer chunked-one-token-a-step --write"
    [table] = result["tables"]
    assert [row[:4] for row in table["rows"]] == [
        ["chunked-one-token-a-step", "43", "203", "45"],
        ["all", "43", "203", "45"],
    ]
    lines = (folder / "explorer.md").read_text().splitlines()
    assert ["| " + " | ".join(row) + " |" for row in [table["columns"], *table["rows"]]] == [
        line for line in lines if line.startswith("| ")
    ]


def test_proofs_are_written_where_the_documents_look(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(proofs, "PROOFS", (SMALL,))
    monkeypatch.setattr("sys.argv", ["proofs", "--write"])
    assert proofs.main() == 0
    result = load(folder / "proofs.json")
    check(result)
    assert (result["section"], result["command"]) == ("proofs", "python -m benchmarks.proofs --write")


def test_the_servers_table_has_every_round_and_the_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["server_overhead.py", "--rounds", "3"])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("LAWFUL_CONTRACTS", raising=False)
    args = argparse.Namespace(batch=16, input_len=64, output_len=64, model="smollm2-135m")
    result = server_overhead.document([(90.0, 75.0), (80.0, 88.0), (100.0, 81.0)], args)
    check(result)
    assert result["section"] == "server"
    assert result["command"] == "OMP_NUM_THREADS=1 python benchmarks/server_overhead.py --rounds 3"
    assert result["tables"][0]["rows"] == [
        ["1", "90.0", "75.0", "0.833"],
        ["2", "80.0", "88.0", "1.100"],
        ["3", "100.0", "81.0", "0.810"],
        ["median", "90.0", "81.0", "0.900"],
    ]
    committed = load(RESULTS / "server_overhead.json")["tables"][0]
    assert committed["columns"] == result["tables"][0]["columns"]
