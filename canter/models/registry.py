"""Which architecture is served by which class. Importable without torch: a model's module is imported when it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, cast

from canter.core.errors import UnsupportedModelError
from canter.core.state_specs import StateKind

if TYPE_CHECKING:
    from canter.models.contract import Model


_FULL = (StateKind.FULL,)
_WINDOWED = (StateKind.FULL, StateKind.SLIDING_WINDOW)
_RECURRENT = (StateKind.RECURRENT,)
_HYBRID = (StateKind.FULL, StateKind.RECURRENT)
_CHUNKED = (StateKind.FULL, StateKind.CHUNKED_LOCAL)
_EXPERTS = "experts: not built yet"
_MPT = "clip_qkv, qk_ln, prefix_lm, rope: not built"


@dataclass(frozen=True, slots=True)
class RegistryRow:
    """`architecture`: the name in a config's `architectures`. `family`: what people call it. `module`: where its class is.

    `memory`: the kinds of memory that its layers may have. `refuses`: what of the family's checkpoints is refused, and why.
    """

    architecture: str
    family: str
    module: str
    class_name: str
    memory: tuple[StateKind, ...] = _FULL
    refuses: str = ""

    @property
    def shared_prefixes(self) -> str:
        """Which prefixes the cache keeps for later requests."""
        parts = []
        if StateKind.RECURRENT in self.memory:
            parts.append("at boundaries (mamba_cache_mode)")
        if StateKind.PROMPT_WINDOW in self.memory:
            parts.append("of prompts only")
        return ", ".join(parts) or "every block"

    @property
    def limits(self) -> str:
        """What is refused, and why: of the kinds of memory, and of the family."""
        drafts = "speculative decoding: drafts can't be taken out of a state" if StateKind.RECURRENT in self.memory else ""
        return "; ".join(filter(None, (drafts, self.refuses)))


_ROWS = (
    RegistryRow("LlamaForCausalLM", "Llama 2, 3 and relatives", "canter.models.llama", "LlamaForCausalLM"),
    RegistryRow("MistralForCausalLM", "Mistral", "canter.models.llama", "MistralForCausalLM", _WINDOWED),
    RegistryRow("SmolLM3ForCausalLM", "SmolLM3", "canter.models.llama", "SmolLM3ForCausalLM", _WINDOWED),
    RegistryRow("Qwen2ForCausalLM", "Qwen2, Qwen2.5", "canter.models.qwen", "Qwen2ForCausalLM", _WINDOWED),
    RegistryRow("Qwen3ForCausalLM", "Qwen3", "canter.models.qwen", "Qwen3ForCausalLM", _WINDOWED),
    RegistryRow("Gemma2ForCausalLM", "Gemma 2", "canter.models.gemma", "Gemma2ForCausalLM", _WINDOWED),
    RegistryRow("Gemma3ForCausalLM", "Gemma 3", "canter.models.gemma", "Gemma3ForCausalLM", _WINDOWED),
    RegistryRow(
        "Gemma3ForConditionalGeneration",
        "Gemma 3 (text only)",
        "canter.models.gemma",
        "Gemma3ForConditionalGeneration",
        _WINDOWED,
        "images: text only so far",
    ),
    RegistryRow("Gemma3nForCausalLM", "Gemma 3n", "canter.models.gemma3n", "Gemma3nForCausalLM", _WINDOWED),
    RegistryRow(
        "Gemma3nForConditionalGeneration",
        "Gemma 3n (text only)",
        "canter.models.gemma3n",
        "Gemma3nForConditionalGeneration",
        _WINDOWED,
        "images and sound: text only so far",
    ),
    RegistryRow("Gemma4ForCausalLM", "Gemma 4", "canter.models.gemma4", "Gemma4ForCausalLM", _WINDOWED, _EXPERTS),
    RegistryRow(
        "Gemma4ForConditionalGeneration",
        "Gemma 4 (text only)",
        "canter.models.gemma4",
        "Gemma4ForConditionalGeneration",
        _WINDOWED,
        f"{_EXPERTS}; images and sound: text only so far",
    ),
    RegistryRow("GptOssForCausalLM", "gpt-oss", "canter.models.gpt_oss", "GptOssForCausalLM", _WINDOWED, _EXPERTS),
    RegistryRow("Llama4ForCausalLM", "Llama 4", "canter.models.llama4", "Llama4ForCausalLM", _CHUNKED, _EXPERTS),
    RegistryRow(
        "Llama4ForConditionalGeneration",
        "Llama 4 (text only)",
        "canter.models.llama4",
        "Llama4ForConditionalGeneration",
        _CHUNKED,
        f"{_EXPERTS}; images: text only so far",
    ),
    RegistryRow("MptForCausalLM", "MPT", "canter.models.mpt", "MptForCausalLM", refuses=_MPT),
    RegistryRow("MPTForCausalLM", "MPT", "canter.models.mpt", "MptForCausalLM", refuses=_MPT),
    RegistryRow("BloomForCausalLM", "BLOOM", "canter.models.bloom", "BloomForCausalLM"),
    RegistryRow(
        "UnlimitedOCRForCausalLM",
        "Unlimited-OCR (text only)",
        "canter.models.unlimited_ocr",
        "UnlimitedOCRForCausalLM",
        (StateKind.PROMPT_WINDOW,),
        f"{_EXPERTS}; images: text only so far",
    ),
    RegistryRow(
        "UnlimitedOcrForConditionalGeneration",
        "Unlimited-OCR (text only)",
        "canter.models.unlimited_ocr",
        "UnlimitedOcrForConditionalGeneration",
        (StateKind.PROMPT_WINDOW,),
        f"{_EXPERTS}; images: text only so far",
    ),
    RegistryRow("Phi3ForCausalLM", "Phi-3, Phi-3.5, Phi-4", "canter.models.phi3", "Phi3ForCausalLM", _WINDOWED),
    RegistryRow("MambaForCausalLM", "Mamba", "canter.models.mamba", "MambaForCausalLM", _RECURRENT),
    RegistryRow("FalconMambaForCausalLM", "Falcon Mamba", "canter.models.mamba", "FalconMambaForCausalLM", _RECURRENT),
    RegistryRow("Mamba2ForCausalLM", "Mamba-2, Codestral Mamba", "canter.models.mamba", "Mamba2ForCausalLM", _RECURRENT),
    RegistryRow("Lfm2ForCausalLM", "LFM2", "canter.models.lfm2", "Lfm2ForCausalLM", _HYBRID),
    RegistryRow("BambaForCausalLM", "Bamba", "canter.models.bamba", "BambaForCausalLM", _HYBRID),
    RegistryRow("Zamba2ForCausalLM", "Zamba2", "canter.models.zamba2", "Zamba2ForCausalLM", _HYBRID, "use_long_context"),
    RegistryRow(
        "GraniteMoeHybridForCausalLM",
        "Granite 4 hybrid",
        "canter.models.bamba",
        "GraniteMoeHybridForCausalLM",
        _HYBRID,
        _EXPERTS,
    ),
    RegistryRow("FalconH1ForCausalLM", "Falcon-H1", "canter.models.bamba", "FalconH1ForCausalLM", _HYBRID),
    RegistryRow("NemotronHForCausalLM", "Nemotron-H", "canter.models.nemotron_h", "NemotronHForCausalLM", _HYBRID, _EXPERTS),
    RegistryRow("Qwen3NextForCausalLM", "Qwen3-Next", "canter.models.qwen_hybrid", "Qwen3NextForCausalLM", _HYBRID, _EXPERTS),
    RegistryRow("Qwen3_5ForCausalLM", "Qwen3.5", "canter.models.qwen_hybrid", "Qwen35ForCausalLM", _HYBRID),
    RegistryRow(
        "Qwen3_5ForConditionalGeneration",
        "Qwen3.5 (text only)",
        "canter.models.qwen_hybrid",
        "Qwen35ForConditionalGeneration",
        _HYBRID,
        "images: text only so far",
    ),
    RegistryRow("JambaForCausalLM", "Jamba", "canter.models.jamba", "JambaForCausalLM", _HYBRID, _EXPERTS),
    RegistryRow("MiniMaxForCausalLM", "MiniMax-Text-01", "canter.models.minimax", "MiniMaxForCausalLM", _HYBRID, _EXPERTS),
    RegistryRow("MiniMaxText01ForCausalLM", "MiniMax-Text-01", "canter.models.minimax", "MiniMaxText01ForCausalLM", _HYBRID, _EXPERTS),
    RegistryRow("MiniMaxM1ForCausalLM", "MiniMax-M1", "canter.models.minimax", "MiniMaxText01ForCausalLM", _HYBRID, _EXPERTS),
    RegistryRow(
        "KimiLinearForCausalLM",
        "Kimi-Linear",
        "canter.models.kimi_linear",
        "KimiLinearForCausalLM",
        (StateKind.MLA, StateKind.RECURRENT),
        f"{_EXPERTS}; kv_cache_dtype int8_per_token_head",
    ),
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
