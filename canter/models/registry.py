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
    RegistryRow("Phi3ForCausalLM", "Phi-3, Phi-3.5, Phi-4", "canter.models.phi3", "Phi3ForCausalLM"),
    RegistryRow("MambaForCausalLM", "Mamba", "canter.models.mamba", "MambaForCausalLM"),
    RegistryRow("FalconMambaForCausalLM", "Falcon Mamba", "canter.models.mamba", "FalconMambaForCausalLM"),
    RegistryRow("Mamba2ForCausalLM", "Mamba-2, Codestral Mamba", "canter.models.mamba", "Mamba2ForCausalLM"),
    RegistryRow("Lfm2ForCausalLM", "LFM2", "canter.models.lfm2", "Lfm2ForCausalLM"),
    RegistryRow("BambaForCausalLM", "Bamba", "canter.models.bamba", "BambaForCausalLM"),
    RegistryRow("GraniteMoeHybridForCausalLM", "Granite 4 hybrid (without experts)", "canter.models.bamba", "GraniteMoeHybridForCausalLM"),
    RegistryRow("FalconH1ForCausalLM", "Falcon-H1", "canter.models.bamba", "FalconH1ForCausalLM"),
    RegistryRow("NemotronHForCausalLM", "Nemotron-H (without experts)", "canter.models.nemotron_h", "NemotronHForCausalLM"),
    RegistryRow("Qwen3NextForCausalLM", "Qwen3-Next (without experts)", "canter.models.qwen_hybrid", "Qwen3NextForCausalLM"),
    RegistryRow("Qwen3_5ForCausalLM", "Qwen3.5", "canter.models.qwen_hybrid", "Qwen35ForCausalLM"),
    RegistryRow("Qwen3_5ForConditionalGeneration", "Qwen3.5 (text only)", "canter.models.qwen_hybrid", "Qwen35ForConditionalGeneration"),
    RegistryRow("JambaForCausalLM", "Jamba (without experts)", "canter.models.jamba", "JambaForCausalLM"),
    RegistryRow("MiniMaxForCausalLM", "MiniMax-Text-01 (with one expert)", "canter.models.minimax", "MiniMaxForCausalLM"),
    RegistryRow("KimiLinearForCausalLM", "Kimi-Linear (KDA and dense layers)", "canter.models.kimi_linear", "KimiLinearForCausalLM"),
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
