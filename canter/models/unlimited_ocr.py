"""Unlimited-OCR (arXiv 2606.23050), its language model: every token sees the whole prompt and the last few tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

from canter.core.errors import CheckpointError, UnsupportedModelError
from canter.layers.decoder import Decoder, DecoderArgs
from canter.models import hf_config, names
from canter.models.weights import WeightMap

_REFERENCE = "reference_sliding_attention"
_DEFAULTS = {"vocab_size": 129280, "hidden_size": 1280, "intermediate_size": 6848, "num_hidden_layers": 12, "num_attention_heads": 10}


class UnlimitedOCRArgs(DecoderArgs):
    """Unlimited-OCR: Llama's build with full attention over the prompt. Experts are not served yet: a config that has layers of them is
    refused."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        text = _DEFAULTS | {key: value for key, value in _language_config(hf).items() if value is not None}
        num_layers = hf_config.positive_int(text, "num_hidden_layers")
        _require_dense(text, num_layers)
        types = text.get("layer_types", [_REFERENCE] * num_layers)
        if types != [_REFERENCE] * num_layers:
            raise UnsupportedModelError(f"Config key 'layer_types': only {_REFERENCE!r} in every layer is supported, found {types!r:.120}.")
        window = hf_config.positive_int(text, "rswa_window", hf_config.positive_int(text, "sliding_window", 128))
        bias = hf_config.flag(text, "attention_bias")
        shape = hf_config.llama_shape(text, qkv_bias=bias, output_bias=bias)
        attention = tuple(replace(args, window=window, sees_prompt=True) for args in shape["attention"])
        return cls(**{**shape, "attention": attention}, mlp_bias=hf_config.flag(text, "mlp_bias"))


def _language_config(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part: `text_config` in newer configs; `language_config` in the original ones, which have its window outside."""
    original = hf.get("language_config")
    if original is None:
        return hf_config.text_config(hf)
    if not isinstance(original, Mapping):
        raise CheckpointError(f"Config key 'language_config': expected an object, found {original!r:.80}.")
    return {key: hf.get(key) for key in ("sliding_window", "rswa_window")} | dict(original)


def _require_dense(text: Mapping[str, Any], num_layers: int) -> None:
    types = text.get("mlp_layer_types")
    num_dense = int(hf_config.number(text, "first_k_dense_replace", 1))
    if "sparse" in (types if types is not None else []) or (types is None and num_dense < num_layers):
        raise UnsupportedModelError("Unlimited-OCR models with experts are not supported yet: only layers without them are.")


_RULES = (*names.OUTER, *names.LLAMA_NORMS, *names.SEPARATE_QKV, *names.OUTPUT, *names.SEPARATE_GATE_UP, *names.DOWN)
_SIGHT = ("*sam_model.*", "*vision_model.*", "*vision_tower.*", "*projector.*", "*image_newline", "*view_seperator")


class UnlimitedOCRForCausalLM(Decoder):
    """`UnlimitedOCRForCausalLM` of config.json, its language model: what sees is left in the file."""

    Args = UnlimitedOCRArgs
    WEIGHTS = WeightMap(_RULES, names.MULTIMODAL_RENAMES + names.BODY_RENAMES, (*_SIGHT, *names.ROPE_BUFFERS))


class UnlimitedOcrForConditionalGeneration(UnlimitedOCRForCausalLM):
    """`UnlimitedOcrForConditionalGeneration` of config.json: the same as transformers saves it."""
