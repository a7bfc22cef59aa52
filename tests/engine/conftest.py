from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Any]:
    """The embedded model as transformers sees it, dequantized to float32, and its tokenizer."""
    from engine.models.load import locate_model

    file: Path = locate_model("smollm2-135m").path
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        quantization = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, quantization_config=quantization
        )
        return model.eval(), AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
