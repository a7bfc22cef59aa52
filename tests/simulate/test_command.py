"""`lawful simulate` from end to end."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from engine.cli import main
from engine.simulate.command import SAMPLE, Options, simulate
from spec.check.trace import audit

QUICK = ("--requests", "60", "--cost-model", "step=0.02,prefill_token=1e-4")
TIGHT = ("--gpu-blocks", "400", "--swap", "200", "--max-model-len", "6000", "--n", "4", "--rate", "4")


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = main(["simulate", "-q", *argv])
    out, err = capsys.readouterr()
    return status, out, err


def test_alone_it_plays_its_sample(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys)
    assert (status, err) == (0, "")
    assert Path(SAMPLE).name in out
    for words in (
        "TTFT",
        "TPOT",
        "E2E",
        "queue",
        "stall",
        "p99",
        "1,000 came, 1,000 finished",
        "preemptions",
        "waiting",
    ):
        assert words in out


def test_json_on_standard_output_and_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, *QUICK, *TIGHT, "--json")
    assert status == 0
    result = json.loads(out)
    path = tmp_path / "result.json"
    status, out, _ = run(capsys, *QUICK, *TIGHT, "--json", str(path))
    assert status == 0
    assert json.loads(path.read_text()) == result, "equal inputs, equal output"
    assert "TTFT" in out
    assert result["policy"] == "strict"
    assert result["trace"]["name"] == Path(SAMPLE).name
    assert result["requests"]["arrived"] == 60
    assert result["cost_model"]["step"] == 0.02
    assert result["config"]["num_gpu_blocks"] == 400
    assert result["preemptions"]["swap"] > 0


def test_every_option_reaches_the_scheduler(capsys: pytest.CaptureFixture[str]) -> None:
    options = {
        "gpu-blocks": 300,
        "swap": 77,
        "block-size": 8,
        "watermark": 0.1,
        "max-model-len": 2000,
        "max-num-seqs": 9,
        "max-num-batched-tokens": 2048,
        "preemption-mode": "swap",
    }
    argv = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    _, out, _ = run(capsys, *QUICK, *argv, "--no-enable-chunked-prefill", "--json")
    assert json.loads(out)["config"] == {
        "num_gpu_blocks": 300,
        "num_cpu_blocks": 77,
        "block_size": 8,
        "watermark_blocks": 30,
        "max_model_len": 2000,
        "max_num_seqs": 9,
        "max_num_batched_tokens": 2048,
        "preemption_mode": "swap",
        "enable_chunked_prefill": False,
    }


def test_a_recorded_run_is_accepted_by_the_audit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    status, out, _ = run(capsys, *QUICK, *TIGHT, "--json", "--record-trace", str(path))
    result = json.loads(out)
    audited = audit(path)
    assert status == 0
    assert audited.lawful, audited.findings
    assert audited.steps == result["steps"]
    assert audited.verbs["preempt"] == sum(result["preemptions"].values()) > 0
    assert main(["audit", str(path)]) == 0
    assert "lawful, from the header to the trailer" in capsys.readouterr().out


def test_the_old_rules_run_is_refused_by_the_audit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    status, out, _ = run(capsys, *QUICK, *TIGHT, "--policy", "old", "--record-trace", str(path))
    assert status == 1
    assert "aborted at step" in out
    assert "Aborted due to the lack of CPU swap space" in out
    audited = audit(path)
    assert not audited.lawful
    assert audited.findings[0].law is not None


def test_a_plot_as_svg(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, again = tmp_path / "first.svg", tmp_path / "again.svg"
    for path in (first, again):
        assert run(capsys, *QUICK, *TIGHT, "--plot", str(path))[0] == 0
    assert first.read_bytes() == again.read_bytes(), "equal inputs, equal files"
    root = ET.parse(first).getroot()
    assert root.tag.endswith("svg")
    words = " ".join(text.strip() for text in root.itertext() if text.strip())
    for label in ("running", "swapped", "waiting", "GPU, 400 blocks", "CPU, 200 blocks", "simulated seconds"):
        assert label in words
    assert len(list(root.iter("{http://www.w3.org/2000/svg}path"))) > 5


def test_a_plot_as_png_of_a_run_that_aborts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    path = tmp_path / "plot.png"
    assert run(capsys, *QUICK, *TIGHT, "--policy", "old", "--plot", str(path))[0] == 1
    with Image.open(path) as image:
        image.load()
        assert image.format == "PNG"
        assert image.size == (1200, 720)


def test_without_matplotlib_a_plot_is_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("engine.simulate.command.simulate", lambda *_: pytest.fail("it ran"))
    status, _, err = run(capsys, "--plot", "plot.svg")
    assert status == 1
    assert "pip install 'lawful[plot]'" in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--plot", "plot.pdf"), "its name must end in .png or .svg"),
        (("--plot", "no/such/plot.png"), "there is no such directory"),
        (("--json", "no/such/file"), "there is no such directory"),
        (("--trace", "no-such-trace.csv"), "No such file"),
        (("--policy", "lenient"), "it must be one of strict"),
        (("--policy", "recompute", "--preemption-mode", "swap"), "--policy recompute preempts by recompute"),
        (("--preemption-mode", "drop"), "allowed are 'swap', 'recompute' and None"),
        (("--cost-model", "fast"), "must be one of llama2-7b-a100"),
        (("--gpu-blocks", "0"), "num_gpu_blocks is 0; it must be at least 1"),
        (("--swap", "-1"), "num_cpu_blocks is -1"),
        (("--max-num-seqs", "4096"), "max_num_seqs (4096) exceeds max_num_batched_tokens (2048)"),
        (("--n", "0"), "--n is 0; it must be at least 1"),
        (("--requests", "0"), "--requests is 0"),
        (("--repeat", "0"), "--repeat is 0"),
        (("--rate", "0"), "--rate is 0.0; it must be above 0"),
        (("--rate", "nan"), "--rate is nan"),
        (("--scale", "-2"), "--scale is -2.0"),
        (("--spread", "inf"), "--spread is inf"),
        (("--watermark", "1"), "--watermark is 1.0; it must be at least 0 and below 1"),
        (("--max-steps", "0"), "--max-steps is 0"),
        (("--fit", "cost.txt"), "its name must end in .json"),
        (("--fit", "no/such/cost.json"), "there is no such directory"),
        (("--fit", "cost.json", "--fit-clock", "sand"), "--fit-clock is 'sand'; it must be one of wall, processor"),
    ],
)
def test_what_cannot_be_done_is_explained(
    argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, *argv)
    assert (status, out) == (1, "")
    assert message in err
    assert "Traceback" not in err


def test_the_help_lists_the_cost_models(capsys: pytest.CaptureFixture[str]) -> None:
    from engine.simulate.cost import presets

    with pytest.raises(SystemExit) as ended:
        main(["simulate", "--help"])
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert len(presets()) >= 2
    assert ", ".join(presets()) in shown


def test_a_measured_cost_model_is_used_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--requests", "5", "--rate", "0.01", "--cost-model", "smollm2-135m-cpu", "--json")
    assert status == 0
    assert json.loads(out)["cost_model"]["name"] == "smollm2-135m-cpu"


def test_refusals_are_shown_by_reason(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, *QUICK, "--gpu-blocks", "60")
    assert status == 0
    assert "by max_model_len" in out


def test_the_progress_bar_is_told(tmp_path: Path) -> None:
    told: list[tuple[int, float]] = []
    _, tally = simulate(Options(requests=20), lambda done, now: told.append((done, now)))
    assert len(told) == tally.steps
    assert told[-1] == (20, tally.ended)
    assert told == sorted(told)


def test_contracts_are_lifted_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    import engine.simulate.command as command
    from engine.scheduler import Scheduler

    before = Scheduler.schedule
    during: list[Any] = []

    class Seen(command.Simulation):
        def run(self, requests: Any) -> Any:
            during.append(Scheduler.schedule)
            return super().run(requests)

    monkeypatch.setattr(command, "Simulation", Seen)
    simulate(Options(requests=5))
    assert during[0] is getattr(before, "__wrapped__", before)
    assert Scheduler.schedule is before
