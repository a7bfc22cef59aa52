"""The command `lawful`, as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.cli import main


def test_version_and_help_answer_without_torch() -> None:
    program = """
import sys
from engine.cli import main
try:
    main({argv})
except SystemExit as e:
    print(e.code, "torch" in sys.modules)
"""
    for argv, expected in ((["--version"], "lawful 0.1.0"), (["--help"], "generate"), (["chat", "--help"], "--system")):
        done = subprocess.run([sys.executable, "-c", program.format(argv=argv)], capture_output=True, text=True)
        assert expected in done.stdout
        assert done.stdout.endswith("0 False\n")


def test_no_command_prints_help_and_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "generate" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["generate", "x", "--model", "no-such-model"], "smollm2-135m"),
        (["generate", "x", "--temperature", "-1"], "temperature must be"),
        (["generate", "x", "--n", "0"], "n must be"),
        (["generate", "x", "--dtype", "int3"], "int3"),
        (["generate", "x", "--num-gpu-blocks-override", "0"], "num_gpu_blocks_override is 0"),
        (["generate", "x", "--max-num-seqs", "9", "--max-num-batched-tokens", "8"], "max_num_batched_tokens (8)"),
        (
            ["generate", "x", "--no-enable-chunked-prefill", "--max-num-batched-tokens", "64", "--max-model-len", "65"],
            "65",
        ),
        (["generate", "x", "--num-gpu-blocks-override", "2", "--max-model-len", "100"], "holds 32 tokens"),
        (["bench", "--num-prompts", "0"], "--num-prompts is 0"),
        (["demo", "--num-prompts", "0"], "num_prompts is 0"),
    ],
)
def test_wrong_values_are_explained_in_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 1
    error = capsys.readouterr().err.strip()
    assert error.startswith("lawful: error: ")
    assert message in error
    assert "\n" not in error


def test_a_damaged_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\x00" * 40)
    assert main(["generate", "x", "--model", str(broken)]) == 1
    assert str(broken) in capsys.readouterr().err


@pytest.mark.model
def test_generate_prints_every_completion_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--temperature", "0", "--max-tokens", "3", "-q", "--num-gpu-blocks-override", "64"]
    assert main(["generate", "The capital of France is", "--n", "2", *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line] == [f"[{i}] The capital of France is Paris." for i in range(2)]
    assert main(["generate", "The capital of France is", "Once", "--json", *flags]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["outputs"][0]["finish_reason"] for row in rows] == ["length", "length"]


@pytest.mark.model
def test_a_prompt_that_is_refused_does_not_stop_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--max-tokens", "2", "-q", "--num-gpu-blocks-override", "4"]
    assert main(["generate", "hello " * 200, "Once", *flags]) == 1
    captured = capsys.readouterr()
    assert captured.err.count("max_model_len (64)") == 1
    assert "lawful: error: prompt 1: " in captured.err
    assert captured.out.startswith("Once")


@pytest.mark.model
def test_chat_answers_until_it_is_told_to_stop_and_reset_starts_over() -> None:
    flags = ["--temperature", "0", "--max-tokens", "12", "--num-gpu-blocks-override", "64"]
    done = subprocess.run(
        [sys.executable, "-m", "engine", "chat", *flags],
        input="What is the capital of France?\n\n/reset\nWhat is the capital of France?\n/exit\nnever read\n",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["The capital of France is Paris."] * 2


@pytest.mark.model
def test_bench_prints_one_json_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    flags = [
        "--num-prompts",
        "2",
        "--input-len",
        "8",
        "--output-len",
        "4",
        "--n",
        "2",
        "--num-gpu-blocks-override",
        "32",
    ]
    assert main(["bench", "--json", "--output-json", str(out), *flags]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(out.read_text())
    assert printed["dtype"] == "float32"
    assert printed["output_tokens_per_s"] == pytest.approx(2 * 2 * 4 / printed["elapsed_s"], rel=0.01)


@pytest.mark.model
def test_the_demo_preempts_swaps_and_finishes_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "demo",
                "--num-prompts",
                "4",
                "--max-tokens",
                "24",
                "--num-gpu-blocks-override",
                "18",
                "--max-model-len",
                "256",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "4 = 4" in out
    table = {line.rsplit(maxsplit=1)[0].strip(): line.split()[-1] for line in out.splitlines() if line.strip()}
    assert int(table["preemptions"]) > 0
    assert "The capital" not in table
