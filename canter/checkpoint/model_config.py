"""What a checkpoint says of its model: architecture, configuration, the facts that engine arguments are resolved with, and
the generation defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from canter.checkpoint.gguf_config import read_config, read_generation
from canter.checkpoint.gguf_reader import GGUFParts
from canter.checkpoint.json_files import read_json_object
from canter.checkpoint.resolve import CheckpointFiles
from canter.checkpoint.safetensors_reader import SafetensorsFile
from canter.core.config import ModelFacts
from canter.core.errors import CheckpointError, UnsupportedModelError

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length", "max_sequence_length")
TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
QUANTIZED = ("awq", "gptq", "compressed-tensors")
"""Methods of `quantization_config` that `canter.layers.quant` has a scheme for."""
_MAX_STRETCH = 1024
_STRETCHING = {"yarn", "dynamic"}
"""Kinds of rope scaling that reach beyond `max_position_embeddings`."""
_DTYPES = ("float32", "bfloat16", "float16")
_DEFAULT_CONTEXT = {"gemma3_text": 131072, "bloom": 2048, "mamba": 131072, "falcon_mamba": 131072, "mamba2": 131072}
"""Context lengths that published configurations leave to their class, by `model_type`. Models without attention have none: theirs
is what may be asked of them."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model before it is built.

    `hf` is the configuration as in config.json (made up from the metadata for GGUF files), overrides laid over it; both spellings
    of the rotary settings pass through as they are. `generation` is as in generation_config.json: `eos_token_id` may be one id
    or a list.
    """

    architecture: str
    hf: dict[str, Any]
    facts: ModelFacts
    generation: dict[str, Any]
    quantization: dict[str, Any] = field(default_factory=dict)
    """The checkpoint's `quantization_config`, empty for floats and GGUF files."""


def read_model_config(files: CheckpointFiles, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """Read the configuration of a resolved checkpoint and lay `overrides` over it (nested objects are merged).

    Opens the weight files to count their elements. Raises `CheckpointError` naming the key that is missing or makes no sense,
    `UnsupportedModelError` for safetensors checkpoints that are quantised in a way that Canter does not know.
    """
    return _read_gguf(files, overrides or {}) if files.kind == "gguf" else _read_hf(files, overrides or {})


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid over `base`: objects are merged, everything else is replaced."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _read_gguf(files: CheckpointFiles, overrides: Mapping[str, Any]) -> ModelConfig:
    parts = GGUFParts(files.weight_files)
    hf = merge(read_config(parts), overrides)
    return _assemble(files, hf, read_generation(parts), "float32", "gguf", {})


def _read_hf(files: CheckpointFiles, overrides: Mapping[str, Any]) -> ModelConfig:
    if files.config_json is None:
        raise CheckpointError(f"{files.root}: expected a config.json beside the weights, found none.")
    hf = merge(read_json_object(files.config_json), overrides)
    method, quantization = _quantization(files, hf)
    generation = {key: part[key] for part in (_text(hf), hf) for key in TOKEN_KEYS if part.get(key) is not None}
    if files.generation_config is not None:
        generation |= read_json_object(files.generation_config)
    elements: dict[str, int] = {}
    for path in files.weight_files:
        for info in SafetensorsFile(path).tensors.values():
            elements[info.dtype] = elements.get(info.dtype, 0) + _product(info.shape)
    return _assemble(files, hf, generation, _dtype(hf, elements), method, quantization)


def _product(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _quantization(files: CheckpointFiles, hf: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(method as `EngineArgs.quantization` names it or "none", the checkpoint's own description)."""
    config = hf.get("quantization_config") or _text(hf).get("quantization_config")
    if not config:
        return "none", {}
    method = config.get("quant_method") if isinstance(config, Mapping) else config
    if not isinstance(config, Mapping) or method not in QUANTIZED:
        raise UnsupportedModelError(
            f"{files.name}: key 'quantization_config': checkpoints quantised with {method!r} are not supported; supported are "
            f"{', '.join(QUANTIZED)}, float32, float16 and bfloat16 safetensors, and GGUF files."
        )
    return method, dict(config)


def _text(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of the configuration that describes the language model."""
    text = hf.get("text_config") or hf.get("language_config")
    return text if isinstance(text, Mapping) else hf


def _dtype(hf: Mapping[str, Any], elements: Mapping[str, int]) -> str:
    """The type that the configuration declares, else the one that most elements have."""
    for part in (hf, _text(hf)):
        declared = part.get("dtype") or part.get("torch_dtype")
        if isinstance(declared, str) and declared.removeprefix("torch.") in _DTYPES:
            return declared.removeprefix("torch.")
    return max(_DTYPES, key=lambda name: elements.get(name, 0))


def _assemble(
    files: CheckpointFiles, hf: dict[str, Any], generation: dict[str, Any], dtype: str, method: str, quantization: dict[str, Any]
) -> ModelConfig:
    names = hf.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise CheckpointError(f"{files.name}: key 'architectures': expected a list with the model's class, found {names!r}.")
    context = _stretched_length(hf, _context_length(files, hf))
    facts = ModelFacts(names[0], dtype, context, method)
    return ModelConfig(names[0], hf, facts, generation, quantization)


def _context_length(files: CheckpointFiles, hf: Mapping[str, Any]) -> int:
    for key in _CONTEXT_KEYS:
        value = _text(hf).get(key, hf.get(key))
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise CheckpointError(f"{files.name}: key {key!r}: expected an integer of at least 1, found {value!r}.")
        return value
    default = _DEFAULT_CONTEXT.get(str(_text(hf).get("model_type")))
    if default is not None:
        return default
    raise CheckpointError(f"{files.name}: key 'max_position_embeddings': expected the model's context length, found none.")


def _stretched_length(hf: Mapping[str, Any], trained: int) -> int:
    """The context that a rope stretches `trained` tokens to: configurations often name it only by its factor."""
    for scaling in (_text(hf).get("rope_scaling"), _text(hf).get("rope_parameters")):
        if isinstance(scaling, Mapping) and _STRETCHING & {scaling.get("rope_type"), scaling.get("type")}:
            factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings", trained)
            if isinstance(factor, int | float) and isinstance(original, int) and 1 <= factor <= _MAX_STRETCH:
                return max(trained, int(original * factor))
    return trained
