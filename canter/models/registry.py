"""Which architecture is served by which class. Importable without torch: a model's module is imported when it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, cast

from canter.core.errors import UnsupportedModelError

if TYPE_CHECKING:
    from canter.models.contract import Model


@dataclass(frozen=True, slots=True)
class RegistryRow:
    """`architecture`: the name in a config's `architectures`. `family`: what people call it. `module`: where its class is."""

    architecture: str
    family: str
    module: str
    class_name: str


_ROWS = (
    RegistryRow("LlamaForCausalLM", "Llama 2, 3 and relatives", "canter.models.llama", "LlamaForCausalLM"),
    RegistryRow("MistralForCausalLM", "Mistral", "canter.models.llama", "MistralForCausalLM"),
    RegistryRow("SmolLM3ForCausalLM", "SmolLM3", "canter.models.llama", "SmolLM3ForCausalLM"),
    RegistryRow("Qwen2ForCausalLM", "Qwen2, Qwen2.5", "canter.models.qwen", "Qwen2ForCausalLM"),
    RegistryRow("Qwen3ForCausalLM", "Qwen3", "canter.models.qwen", "Qwen3ForCausalLM"),
    RegistryRow("Gemma2ForCausalLM", "Gemma 2", "canter.models.gemma", "Gemma2ForCausalLM"),
    RegistryRow("Gemma3ForCausalLM", "Gemma 3", "canter.models.gemma", "Gemma3ForCausalLM"),
    RegistryRow("Gemma3ForConditionalGeneration", "Gemma 3 (text only)", "canter.models.gemma", "Gemma3ForConditionalGeneration"),
    RegistryRow("Gemma3nForCausalLM", "Gemma 3n", "canter.models.gemma3n", "Gemma3nForCausalLM"),
    RegistryRow("Gemma3nForConditionalGeneration", "Gemma 3n (text only)", "canter.models.gemma3n", "Gemma3nForConditionalGeneration"),
    RegistryRow("Gemma4ForCausalLM", "Gemma 4 (no experts yet)", "canter.models.gemma4", "Gemma4ForCausalLM"),
    RegistryRow(
        "Gemma4ForConditionalGeneration", "Gemma 4 (text only, no experts yet)", "canter.models.gemma4", "Gemma4ForConditionalGeneration"
    ),
    RegistryRow("GptOssForCausalLM", "gpt-oss (no experts yet)", "canter.models.gpt_oss", "GptOssForCausalLM"),
    RegistryRow("Llama4ForCausalLM", "Llama 4 (no experts yet)", "canter.models.llama4", "Llama4ForCausalLM"),
    RegistryRow(
        "Llama4ForConditionalGeneration", "Llama 4 (text only, no experts yet)", "canter.models.llama4", "Llama4ForConditionalGeneration"
    ),
    RegistryRow("MptForCausalLM", "MPT", "canter.models.mpt", "MptForCausalLM"),
    RegistryRow("MPTForCausalLM", "MPT", "canter.models.mpt", "MptForCausalLM"),
    RegistryRow("BloomForCausalLM", "BLOOM", "canter.models.bloom", "BloomForCausalLM"),
    RegistryRow(
        "UnlimitedOCRForCausalLM", "Unlimited-OCR (text only, no experts yet)", "canter.models.unlimited_ocr", "UnlimitedOCRForCausalLM"
    ),
    RegistryRow(
        "UnlimitedOcrForConditionalGeneration",
        "Unlimited-OCR (text only, no experts yet)",
        "canter.models.unlimited_ocr",
        "UnlimitedOcrForConditionalGeneration",
    ),
    RegistryRow("Phi3ForCausalLM", "Phi-3, Phi-3.5, Phi-4", "canter.models.phi3", "Phi3ForCausalLM"),
)


def list_models() -> tuple[RegistryRow, ...]:
    """Every architecture that can be served."""
    return _ROWS


def get_model_class(architecture: str) -> type[Model]:
    """The class that serves an architecture (imports torch). Raises `UnsupportedModelError` for an unknown one."""
    for row in _ROWS:
        if row.architecture == architecture:
            return cast("type[Model]", getattr(import_module(row.module), row.class_name))
    known = ", ".join(row.architecture for row in _ROWS)
    raise UnsupportedModelError(f"Architecture {architecture!r} is not supported. Supported: {known}.")
