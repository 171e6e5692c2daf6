"""A Hugging Face configuration out of a GGUF file's metadata.

Keys are those of the `config.json` that the file was converted from, in the older spelling (`rope_theta`, `rope_scaling`).
What the metadata leaves out and llama.cpp holds as constants (Gemma's window pattern, SmolLM3's layers without rotation) is
put in here.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from canter.checkpoint.gguf_names import block_index
from canter.checkpoint.gguf_reader import GGUFParts
from canter.core.errors import CheckpointError, UnsupportedModelError

Config = dict[str, Any]

_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")
_CONTROL_TOKEN = 3
_SINGLE = struct.Struct("<f")
_FACTOR_LETTERS = {"F32": "f", "F16": "e"}
"""How struct reads the types in which rotary factors are stored."""
_SAMPLING_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def _shortest(value: float) -> float:
    """The float32 nearest to a number, written as short as tells it apart; what is beyond float32 stays as it is."""
    try:
        stored = _SINGLE.pack(value)
        texts = (f"{_SINGLE.unpack(stored)[0]:.{digits}g}" for digits in range(1, 10))
        return next((short for short in map(float, texts) if _SINGLE.pack(short) == stored), float(value))
    except OverflowError:
        return float(value)


class ArchKeys:
    """The metadata of one file by keys without their architecture prefix, checked for type and range."""

    def __init__(self, parts: GGUFParts) -> None:
        self.parts, self.metadata, self.path = parts, parts.metadata, parts.path
        arch = self.metadata.get("general.architecture")
        if not isinstance(arch, str):
            raise self.fail("general.architecture", "a string", arch)
        self.arch = arch

    def fail(self, key: str, expected: str, found: object) -> CheckpointError:
        shown = "nothing" if found is None else repr(found)
        return CheckpointError(f"{self.path}: key {key!r}: expected {expected}, found {shown[:200]}.")

    def integer(self, name: str, default: int | None = None) -> int:
        """A count of at least 1. A per-layer array is taken when all its entries are the same."""
        key = f"{self.arch}.{name}"
        value = self.metadata.get(key, default)
        if isinstance(value, list) and value and all(entry == value[0] for entry in value):
            value = value[0]
        if isinstance(value, list):
            raise UnsupportedModelError(f"{self.path}: key {key!r}: expected one value for all layers, found several.")
        if type(value) is not int or not 1 <= value < 1 << 31:
            raise self.fail(key, "an integer of at least 1", value)
        return value

    def optional_int(self, name: str) -> int | None:
        """Like `integer`, and None where the key is missing or zero."""
        return self.integer(name) if self.metadata.get(f"{self.arch}.{name}") not in (None, 0) else None

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0, written as short as its float32 allows: 1e-05, not 9.99999974e-06."""
        key = f"{self.arch}.{name}"
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 3e38:
            raise self.fail(key, "a number above 0", value)
        return _shortest(value)

    def optional_float(self, name: str) -> float | None:
        return self.number(name) if f"{self.arch}.{name}" in self.metadata else None

    def factors(self, tensor: str, count: int) -> list[float] | None:
        """The divisors of the rotary frequencies that the named tensor holds, None where there is none."""
        info = self.parts.tensors.get(tensor)
        if info is None:
            return None
        if info.shape != (count,):
            raise CheckpointError(f"{self.path}: tensor {tensor!r}: expected shape ({count},), found {info.shape}.")
        if info.type_name not in _FACTOR_LETTERS:
            known = " or ".join(_FACTOR_LETTERS)
            raise UnsupportedModelError(f"{self.path}: tensor {tensor!r}: expected factors as {known}, found {info.type_name}.")
        values = struct.unpack(f"<{count}{_FACTOR_LETTERS[info.type_name]}", self.parts.data(tensor))
        if not all(0 < value < math.inf for value in values):
            raise CheckpointError(f"{self.path}: tensor {tensor!r}: expected finite factors above 0, found others.")
        return list(values)


@dataclass(frozen=True, slots=True)
class _Arch:
    """`finish` adds what is particular to the architecture to the common configuration, that of transformers of Llama's build unless
    `common` reads another."""

    hf_class: str
    model_type: str
    finish: Callable[[ArchKeys, Config], None]
    stop_texts: tuple[str, ...] = _TURN_ENDS
    common: Callable[[ArchKeys], Config] | None = None


def _finish_llama(keys: ArchKeys, config: Config) -> None:
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in keys.parts.tensors
    window = keys.optional_int("attention.sliding_window")
    if window is not None:
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}


def _finish_qwen2(keys: ArchKeys, config: Config) -> None:
    config |= {"attention_bias": True, "use_sliding_window": False, "sliding_window": None}


def _finish_qwen3(keys: ArchKeys, config: Config) -> None:
    config |= {"use_sliding_window": False, "sliding_window": None}


def _finish_smollm3(keys: ArchKeys, config: Config) -> None:
    layers = range(1, config["num_hidden_layers"] + 1)
    config |= {"mlp_bias": "blk.0.ffn_gate.bias" in keys.parts.tensors, "no_rope_layer_interval": 4}
    config |= {"no_rope_layers": [int(layer % 4 != 0) for layer in layers], "use_sliding_window": False, "sliding_window": None}


def _gemma(keys: ArchKeys, config: Config, window: int, pattern: int, layers_of_27b: int) -> None:
    """The 27B models scale queries by hidden size over heads, all others by head size: llama.cpp tells them by their layers."""
    per_head = config["hidden_size"] // config["num_attention_heads"]
    config["hidden_activation"] = config.pop("hidden_act")
    config["query_pre_attn_scalar"] = per_head if config["num_hidden_layers"] == layers_of_27b else config["head_dim"]
    config["sliding_window"] = window
    config["layer_types"] = [
        "sliding_attention" if layer % pattern else "full_attention" for layer in range(1, config["num_hidden_layers"] + 1)
    ]


def _finish_gemma2(keys: ArchKeys, config: Config) -> None:
    _gemma(keys, config, keys.integer("attention.sliding_window", 4096), pattern=2, layers_of_27b=46)
    config["attn_logit_softcapping"] = keys.number("attn_logit_softcapping", 50.0)
    config["final_logit_softcapping"] = keys.number("final_logit_softcapping", 30.0)


def _finish_gemma3(keys: ArchKeys, config: Config) -> None:
    pattern = keys.integer("attention.sliding_window_pattern", 6)
    _gemma(keys, config, keys.integer("attention.sliding_window"), pattern, layers_of_27b=62)
    config["sliding_window_pattern"] = pattern
    config["rope_theta"] = keys.number("rope.freq_base", 1_000_000.0)
    config["rope_local_base_freq"] = keys.number("rope.freq_base_swa", 10_000.0)
    config["attn_logit_softcapping"] = None
    config["final_logit_softcapping"] = keys.optional_float("final_logit_softcapping")


def _finish_phi3(keys: ArchKeys, config: Config) -> None:
    rotary = keys.integer("rope.dimension_count", config["head_dim"])
    config["partial_rotary_factor"] = rotary / config["head_dim"]
    config["sliding_window"] = keys.optional_int("attention.sliding_window")
    config["original_max_position_embeddings"] = keys.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
    short, long = (keys.factors(f"rope_factors_{kind}.weight", rotary // 2) for kind in ("short", "long"))
    if (short is None) != (long is None):
        raise CheckpointError(f"{keys.path}: expected both of rope_factors_short.weight and rope_factors_long.weight, found one.")
    if short is not None:
        config["rope_scaling"] = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        attention_factor = keys.optional_float("rope.scaling.attn_factor")
        if attention_factor is not None:
            config["rope_scaling"]["attention_factor"] = attention_factor


def _state_sizes(keys: ArchKeys) -> Config:
    """Of models of Mamba layers alone."""
    hidden = keys.integer("embedding_length")
    return {
        "vocab_size": _vocab_size(keys, hidden),
        "hidden_size": hidden,
        "num_hidden_layers": _num_layers(keys),
        "max_position_embeddings": keys.integer("context_length"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_rms_epsilon"),
        "state_size": keys.integer("ssm.state_size"),
        "conv_kernel": keys.integer("ssm.conv_kernel"),
        "use_bias": "blk.0.ssm_in.bias" in keys.parts.tensors,
        "use_conv_bias": "blk.0.ssm_conv1d.bias" in keys.parts.tensors,
        "tie_word_embeddings": "output.weight" not in keys.parts.tensors,
    }


_FALCON_MAMBA_EPS = 1e-6


def _finish_mamba(keys: ArchKeys, config: Config) -> None:
    config |= {"intermediate_size": keys.integer("ssm.inner_size"), "time_step_rank": keys.integer("ssm.time_step_rank")}
    if keys.metadata.get("mamba.ssm.dt_b_c_rms"):
        config |= {"architectures": ["FalconMambaForCausalLM"], "model_type": "falcon_mamba", "mixer_rms_eps": _FALCON_MAMBA_EPS}


def _finish_mamba2(keys: ArchKeys, config: Config) -> None:
    inner, heads, hidden = keys.integer("ssm.inner_size"), keys.integer("ssm.time_step_rank"), config["hidden_size"]
    if inner % heads:
        raise keys.fail("mamba2.ssm.time_step_rank", f"a divisor of the {inner} channels", heads)
    if inner % hidden:
        raise UnsupportedModelError(f"{keys.path}: {inner} channels for a hidden size of {hidden} are not supported, only a multiple is.")
    config |= {"num_heads": heads, "head_dim": inner // heads, "expand": inner // hidden, "n_groups": keys.integer("ssm.group_count", 1)}


def _lfm2_sizes(keys: ArchKeys) -> Config:
    hidden, heads, layers = keys.integer("embedding_length"), keys.integer("attention.head_count"), _num_layers(keys)
    key = "lfm2.attention.head_count_kv"
    counts = keys.metadata.get(key)
    if not isinstance(counts, list) or len(counts) != layers or any(type(count) is not int or count < 0 for count in counts):
        raise keys.fail(key, f"{layers} counts of heads, 0 where a layer convolves", counts)
    kv_heads = set(counts) - {0}
    if len(kv_heads) > 1 or hidden % heads:
        raise UnsupportedModelError(f"{keys.path}: layers whose heads differ in number or size are not supported.")
    if keys.metadata.get("lfm2.rope.scaling.type") not in (None, "none") or "rope_freqs.weight" in keys.parts.tensors:
        raise UnsupportedModelError(f"{keys.path}: a stretched rope is not supported in GGUF architecture 'lfm2'.")
    return {
        "vocab_size": _vocab_size(keys, hidden),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(kv_heads, default=heads),
        "max_position_embeddings": keys.integer("context_length"),
        "layer_types": ["full_attention" if count else "conv" for count in counts],
        "intermediate_size": keys.integer("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,  # the width that it would be adjusted to is the one in the file
        "norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": keys.integer("shortconv.l_cache"),
        "conv_bias": "blk.0.shortconv.in_proj.bias" in keys.parts.tensors,
        "rope_theta": keys.number("rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in keys.parts.tensors,
    }


def _bloom_sizes(keys: ArchKeys) -> Config:
    hidden = keys.integer("embedding_length")
    if keys.integer("feed_forward_length", 4 * hidden) != 4 * hidden:
        raise UnsupportedModelError(f"{keys.path}: a feed-forward of other than four times the hidden size ({hidden}) is not supported.")
    return {
        "vocab_size": _vocab_size(keys, hidden),
        "hidden_size": hidden,
        "num_hidden_layers": _num_layers(keys),
        "num_attention_heads": keys.integer("attention.head_count"),
        "max_position_embeddings": keys.integer("context_length"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
        "tie_word_embeddings": "output.weight" not in keys.parts.tensors,
    }


def _finish_nothing(keys: ArchKeys, config: Config) -> None:
    """All of it is common."""


ARCHES: dict[str, _Arch] = {
    "llama": _Arch("LlamaForCausalLM", "llama", _finish_llama),
    "qwen2": _Arch("Qwen2ForCausalLM", "qwen2", _finish_qwen2, (*_TURN_ENDS, "<|endoftext|>")),
    "qwen3": _Arch("Qwen3ForCausalLM", "qwen3", _finish_qwen3, (*_TURN_ENDS, "<|endoftext|>")),
    "gemma2": _Arch("Gemma2ForCausalLM", "gemma2", _finish_gemma2),
    "gemma3": _Arch("Gemma3ForCausalLM", "gemma3_text", _finish_gemma3),
    "phi3": _Arch("Phi3ForCausalLM", "phi3", _finish_phi3),
    "smollm3": _Arch("SmolLM3ForCausalLM", "smollm3", _finish_smollm3),
    "mamba": _Arch("MambaForCausalLM", "mamba", _finish_mamba, common=_state_sizes),
    "mamba2": _Arch("Mamba2ForCausalLM", "mamba2", _finish_mamba2, common=_state_sizes),
    "lfm2": _Arch("Lfm2ForCausalLM", "lfm2", _finish_nothing, common=_lfm2_sizes),
    "bloom": _Arch("BloomForCausalLM", "bloom", _finish_nothing, common=_bloom_sizes),
}
"""The GGUF architectures that can be read."""


def _sizes(keys: ArchKeys) -> Config:
    heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
    kv_heads = keys.integer("attention.head_count_kv", heads)
    head_dim = keys.integer("attention.key_length", hidden // heads)
    if heads % kv_heads:
        raise keys.fail(f"{keys.arch}.attention.head_count", f"a multiple of the {kv_heads} key and value heads", heads)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(f"{keys.path}: values of another size than keys ({head_dim}) are not supported.")
    rotary = keys.integer("rope.dimension_count", head_dim)
    if rotary > head_dim or rotary % 2 or (rotary != head_dim and keys.arch != "phi3"):
        raise keys.fail(f"{keys.arch}.rope.dimension_count", f"the head size {head_dim}", rotary)
    return {
        "vocab_size": _vocab_size(keys, hidden),
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": _num_layers(keys),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


def _vocab_size(keys: ArchKeys, hidden: int) -> int:
    info = keys.parts.tensors.get("token_embd.weight")
    if info is None:
        raise CheckpointError(f"{keys.path}: tensor 'token_embd.weight': expected it, found none.")
    if len(info.shape) != 2 or info.shape[1] != hidden:
        raise CheckpointError(f"{keys.path}: tensor 'token_embd.weight': expected shape (vocabulary, {hidden}), found {info.shape}.")
    return info.shape[0]


def _num_layers(keys: ArchKeys) -> int:
    count, blocks = keys.integer("block_count"), {block_index(name) for name in keys.parts.tensors} - {None}
    if len(blocks) != count or blocks != set(range(count)):
        raise keys.fail(f"{keys.arch}.block_count", f"the {len(blocks)} layers that the tensors make up", count)
    return count


def _rope_scaling(keys: ArchKeys, head_dim: int) -> Config | None:
    factors = keys.factors("rope_freqs.weight", keys.integer("rope.dimension_count", head_dim) // 2)
    if factors is not None:
        return {"rope_type": "explicit_factors", "factors": factors}
    kind = keys.metadata.get(f"{keys.arch}.rope.scaling.type")
    if kind in (None, "none", "longrope"):
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(f"{keys.path}: key '{keys.arch}.rope.scaling.type': expected none, linear or yarn, found {kind!r}.")
    factor = keys.number("rope.scaling.factor")
    return {"rope_type": "linear", "factor": factor} if kind == "linear" else _yarn(keys, factor)


def _yarn(keys: ArchKeys, factor: float) -> Config:
    scaling: Config = {"rope_type": "yarn", "factor": factor}
    scaling["original_max_position_embeddings"] = keys.integer("rope.scaling.original_context_length", keys.integer("context_length"))
    for ours, name in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        value = keys.optional_float(f"rope.scaling.{name}")
        if value is not None:
            scaling[ours] = value
    extra = keys.optional_float("rope.scaling.yarn_attn_factor") or keys.optional_float("rope.scaling.attn_factor")
    if extra is not None and extra != 1.0:  # llama.cpp multiplies its own 0.1 ln(factor) + 1 by it; the configuration holds the product
        scaling["attention_factor"] = extra * (0.1 * math.log(factor) + 1.0)
    return scaling


def _token_ids(keys: ArchKeys) -> Config:
    """bos, eos and pad ids, None where the file has none."""
    names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    return {ours: _token_id(keys, theirs) for ours, theirs in names.items()}


def _token_id(keys: ArchKeys, name: str) -> int | None:
    """The id of a special token. One outside the vocabulary counts as none, as in llama.cpp: files say -1 for "not set"."""
    key = f"tokenizer.ggml.{name}"
    value = keys.metadata.get(key)
    if value is None:
        return None
    if type(value) is not int:
        raise keys.fail(key, "a token id", value)
    return value if 0 <= value < keys.parts.tensors["token_embd.weight"].shape[0] else None


def read_config(parts: GGUFParts) -> Config:
    """The Hugging Face configuration of an open GGUF model.

    Raises `UnsupportedModelError` for an architecture outside `ARCHES` and for options that would change what the layers
    compute, `CheckpointError` for keys that are missing or make no sense.
    """
    keys = ArchKeys(parts)
    if keys.arch not in ARCHES:
        raise UnsupportedModelError(f"{keys.path}: GGUF architecture {keys.arch!r} is not supported; supported: {', '.join(ARCHES)}.")
    if keys.optional_int("expert_count") is not None:
        raise UnsupportedModelError(f"{keys.path}: mixture-of-experts models are not supported in GGUF architecture {keys.arch!r}.")
    arch = ARCHES[keys.arch]
    config: Config = {"architectures": [arch.hf_class], "model_type": arch.model_type, "torch_dtype": "float32"}
    config |= _transformer(keys) if arch.common is None else arch.common(keys)
    config |= _token_ids(keys)
    arch.finish(keys, config)
    return config


def _transformer(keys: ArchKeys) -> Config:
    config = _sizes(keys)
    config |= {
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(keys, config["head_dim"]),
        "hidden_act": "gelu_pytorch_tanh" if keys.arch.startswith("gemma") else "silu",
        "attention_bias": "blk.0.attn_q.bias" in keys.parts.tensors,
        "tie_word_embeddings": "output.weight" not in keys.parts.tensors,
    }
    return config


def _stop_texts(keys: ArchKeys) -> list[int]:
    """Ids of the end-of-turn marks that the vocabulary holds as control tokens: files often declare only one end of text."""
    wanted = ARCHES[keys.arch].stop_texts
    found = keys.metadata.find_strings("tokenizer.ggml.tokens", wanted)
    kinds = keys.metadata.get("tokenizer.ggml.token_type") if found else None
    if not isinstance(kinds, list):
        return []
    return [found[text] for text in wanted if text in found and kinds[found[text] : found[text] + 1] == [_CONTROL_TOKEN]]


def read_generation(parts: GGUFParts) -> Config:
    """What a generation_config.json would say: `eos_token_id` is a list of everything that ends a turn, the declared one first."""
    keys = ArchKeys(parts)
    ids = _token_ids(keys)
    ends = [ids["eos_token_id"], _token_id(keys, "eot_token_id"), _token_id(keys, "eom_token_id"), *_stop_texts(keys)]
    generation = ids | {"eos_token_id": list(dict.fromkeys(end for end in ends if end is not None))}
    for key, name in _SAMPLING_KEYS.items():
        value = keys.metadata.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            generation[name] = value if isinstance(value, int) else _shortest(value)
    return {name: value for name, value in generation.items() if value not in (None, [])}
