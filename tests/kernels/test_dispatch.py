"""Which form runs: LAWFUL_KERNELS, and what is said of a choice that cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.dispatch import choose, uses_triton

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def form() -> None:
    """In place of the folder's: each test names its form itself."""


def python(code: str, choice: str | None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment.pop("LAWFUL_KERNELS", None)
    if choice is not None:
        environment["LAWFUL_KERNELS"] = choice
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("choice", "expected"), [(None, "False"), ("", "False"), ("reference", "False"), ("triton", "True")]
)
def test_the_environment_chooses(choice: str | None, expected: str) -> None:
    done = python("import torch; from kernels.dispatch import uses_triton; print(uses_triton(torch.zeros(1)))", choice)
    assert done.stdout.strip() == expected, done.stderr


def test_another_choice_is_refused_naming_what_is_allowed() -> None:
    done = python("import kernels.dispatch", "cuda")
    assert done.returncode != 0
    assert "LAWFUL_KERNELS is 'cuda'; allowed are reference, triton" in done.stderr


def test_the_environment_puts_the_runner_of_a_gpu_and_every_kernel_of_a_step_on_the_cpu(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "vocab_size": 31, "hidden_size": 16, "intermediate_size": 16,'
        ' "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 32}'
    )
    code = f"""
from engine import LLM, SamplingParams
from triton.runtime.interpreter import GridExecutor
ran, call = set(), GridExecutor.__call__
def seen(self, *args, **kwargs):
    ran.add(self.fn.__name__)
    return call(self, *args, **kwargs)
GridExecutor.__call__ = seen
llm = LLM({str(tmp_path)!r}, load_format="dummy", skip_tokenizer_init=True, device="cpu", num_gpu_blocks_override=4)
params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, detokenize=False)
out = llm.generate([[1, 2, 3]], params, use_tqdm=False)
print(type(llm.core.runner).__name__, llm.core.runner.times.steps, len(out[0].outputs[0].token_ids))
print(*sorted(ran))
"""
    done = python(code, "triton")
    first, kernels = done.stdout.splitlines()
    assert first.split() == ["GpuRunner", "2", "3"], done.stderr
    assert kernels.split() == [
        f"{name}_kernel"
        for name in ("paged_decode", "paged_prefill", "rms_norm", "rotary", "sample", "silu_mul", "write_kv")
    ]


def test_a_choice_lasts_as_long_as_its_block() -> None:
    tensor = torch.zeros(1)
    with choose("triton"):
        with choose("reference"):
            assert not uses_triton(tensor)
        assert uses_triton(tensor)
    assert not uses_triton(tensor)
