"""Where a model's tensors come from: files of a Hugging Face directory, a GGUF file, or a random generator.

A model asks for each tensor by its Hugging Face name and the shape it needs, and gets it in the engine's type and
place.  Nothing in a checkpoint is ever executed.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.errors import ModelLoadError
from engine.models.gguf_file import GGUFFile
from kernels.quantized_rows import QuantizedWeight

ALLOWED_FILES = "model.safetensors, model.safetensors.index.json, pytorch_model.bin or pytorch_model.bin.index.json"


class Weights:
    """A source of tensors.  Subclasses say how one is read."""

    def __init__(self, where: str, dtype: torch.dtype, device: torch.device | str) -> None:
        """where: what messages call the source."""
        self.where = where
        self.dtype = dtype
        self.device = torch.device(device)

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        """The tensor as it is stored, or None if there is none of this name.  `shape` is what the caller expects."""
        raise NotImplementedError

    def quantized(self, names: Sequence[str]) -> QuantizedWeight | None:
        """The blocks of these tensors, one under the other, if they are to be kept and there are any of one kind."""
        return None

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor `name` as `dtype` on `device`.

        Raises ModelLoadError when it is missing, has another shape or is not made of floats.
        """
        return self.stack([name], [shape[0]], shape[1:])

    def stack(self, names: Sequence[str], rows: Sequence[int], inner: tuple[int, ...] = ()) -> Tensor:
        """Tensors of shape (rows[i], *inner), one under the other in one tensor.  Raises as `take` does."""
        shape = (sum(rows), *inner)
        try:
            whole = torch.empty(shape, dtype=self.dtype, device=self.device)
        except (RuntimeError, MemoryError) as error:  # a size from a damaged file, or a device that is full
            raise ModelLoadError(f"{self.where}: no room for '{names[0]}' of shape {list(shape)}: {error}") from error
        # Always a copy: a mapped file may change under us, and its alignment would change the last bits of a product.
        for name, part in zip(names, torch.split(whole, list(rows)), strict=True):
            part.copy_(self._checked(name, tuple(part.shape)))
        return whole

    def _checked(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self.read(name, shape)
        if tensor is None:
            raise ModelLoadError(f"{self.where} has no tensor '{name}' (shape {list(shape)})")
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(
                f"{self.where}: tensor '{name}' has shape {list(tensor.shape)}, expected {list(shape)}"
            )
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise ModelLoadError(
                f"{self.where}: tensor '{name}' holds {tensor.dtype}; supported are float32, float16, bfloat16, float64"
            )
        return tensor


class DirectoryWeights(Weights):
    """Tensors of a Hugging Face directory: safetensors first, else PyTorch files, whole or in shards."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device | str, load_format: str) -> None:
        """load_format: auto, safetensors or pt.  Raises ModelLoadError when there are no files of that format."""
        super().__init__(str(directory), dtype, device)
        self._directory = directory
        self._opened: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        stems = {"safetensors": ["model.safetensors"], "pt": ["pytorch_model.bin"]}
        stems["auto"] = stems["safetensors"] + stems["pt"]
        for stem in stems[load_format]:
            if (directory / f"{stem}.index.json").is_file():
                self._file_of = _read_index(directory / f"{stem}.index.json")
                return
            if (directory / stem).is_file():
                self._file_of = dict.fromkeys(self._names_in(stem), stem)
                return
        raise ModelLoadError(f"{directory} has no weights for load_format={load_format!r}; looked for {ALLOWED_FILES}")

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        # A checkpoint saved from the bare decoder lacks the outer "model.".
        stored = name if name in self._file_of else name.removeprefix("model.")
        file = self._file_of.get(stored)
        if file is None or stored not in self._names_in(file):
            return None
        opened = self._opened[file]
        try:
            tensor: Tensor = opened[stored] if isinstance(opened, dict) else opened.get_tensor(stored)
        except SafetensorError as error:
            raise ModelLoadError(f"{self._directory / file}: tensor '{stored}' cannot be read: {error}") from error
        return tensor

    def _names_in(self, file: str) -> set[str]:
        if file not in self._opened:
            self._opened[file] = self._open(self._directory / file)
        return set(self._opened[file].keys())

    def _open(self, path: Path) -> Any:
        if not path.is_file():
            raise ModelLoadError(f"{path} is missing, but the index names it")
        try:
            if path.suffix == ".safetensors":
                return safe_open(path, framework="pt", device="cpu")
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except Exception as error:  # a damaged pickle can raise nearly anything
            raise ModelLoadError(
                f"{path} is damaged, truncated or holds something else than plain tensors: {error}"
            ) from error
        if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
            raise ModelLoadError(f"{path} does not hold a dictionary of tensors")
        return tensors


def _read_index(path: Path) -> dict[str, str]:
    """The weight map of an index file: tensor name -> file name in the same directory."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelLoadError(f"{path} has no 'weight_map'")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith((".safetensors", ".bin")):
            raise ModelLoadError(f"{path} names {file!r}; only .safetensors and .bin files beside it are read")
    return weight_map


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.  Raises ModelLoadError when it is missing or is not one."""
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(contents, dict):
        raise ModelLoadError(f"{path} does not hold a JSON object")
    return contents


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """The name that a GGUF file gives to a tensor of a Llama-like model."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{GGUF_NAMES[module]}.{kind}"
    index, _, inner = module.removeprefix("model.layers.").partition(".")
    return f"blk.{index}.{GGUF_NAMES[inner]}.{kind}"


class GGUFWeights(Weights):
    """Tensors of a GGUF file, dequantized.

    keep_blocks: `quantized` gives what the file holds.  kept: the tensors it gave.
    """

    def __init__(
        self,
        file: GGUFFile,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        keep_blocks: bool = False,
    ) -> None:
        super().__init__(str(file.path), dtype, device)
        self._file = file
        self._keep_blocks = keep_blocks
        self.kept: list[str] = []
        self._permuted = {}
        # Files of this architecture hold rotary pairs side by side (2i, 2i + 1); the engine pairs the halves of a head.
        if file.metadata.get("general.architecture") == "llama":
            self._permuted = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        stored = gguf_name(name)
        if stored not in self._file.tensors:
            return None
        tensor = self._file.tensor(stored)
        order = self._order(name, len(tensor))
        return tensor if order is None else tensor[order]

    def _order(self, name: str, rows: int) -> Tensor | None:
        """Where the engine's rows are in the file, if not in their places."""
        heads = self._permuted.get(name.split(".")[-2])
        if heads is None or rows % (2 * heads):
            return None
        return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).flatten()

    def quantized(self, names: Sequence[str]) -> QuantizedWeight | None:
        parts = []
        for name in names if self._keep_blocks else ():
            part = self._file.blocks(gguf_name(name)) if gguf_name(name) in self._file.tensors else None
            if part is None:
                return None
            order = self._order(name, len(part.codes))
            parts.append(part if order is None else part.rows(order))
        whole = QuantizedWeight.stack(parts) if parts else None
        if whole is not None:
            self.kept += names
        return whole


class RandomWeights(Weights):
    """Random tensors for tests and timing: normal with deviation 0.02, norms 1.  The same seed gives the same model."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__("random weights", dtype, device)
        self._seed = seed

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self.device)
        # Seeded by name: a tensor does not depend on which others were made before it.
        generator = torch.Generator(self.device).manual_seed(self._seed ^ zlib.crc32(name.encode()) << 20)
        return torch.randn(shape, generator=generator, device=self.device) * 0.02
