"""Reading configs: both spellings, defaults of published configs, options that are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import transformers

from canter.core.errors import CheckpointError, UnsupportedModelError
from canter.core.state_specs import SharedState, StateKind
from canter.models.registry import get_model_class
from tests.models.families import ATTENTION, FAMILIES, HYBRIDS, LLAMA, Family, build_oracle

BY_NAME = {family.name: family for family in FAMILIES}
PLAIN = [family for family in FAMILIES if family not in ATTENTION + HYBRIDS]
_TOP_LEVEL = ("rope_theta", "partial_rotary_factor")


def saved_config(family: Family) -> dict[str, Any]:
    return build_oracle(family).config.to_dict()


def old_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """What transformers 4 would have saved: no `rope_parameters`, no `layer_types`."""
    config = copy.deepcopy(config)
    text = config.get("text_config", config)
    parameters = text.pop("rope_parameters")
    text.pop("layer_types", None)
    if "sliding_attention" in parameters:
        text["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
        parameters = parameters["full_attention"]
    for key in _TOP_LEVEL:
        if key in parameters:
            text[key] = parameters.pop(key)
    parameters["type"] = parameters.pop("rope_type")
    text["rope_scaling"] = None if parameters["type"] == "default" else parameters
    return config


@pytest.mark.parametrize("family", [f for f in PLAIN if f.name != "qwen3-window"], ids=lambda f: f.name)
def test_old_and_new_spelling_give_the_same_args(family: Family) -> None:
    args_class = get_model_class(family.architecture).Args
    new = saved_config(family)
    old = old_spelling(new)
    if pattern := family.settings.get("sliding_window_pattern", family.settings.get("text_config", {}).get("sliding_window_pattern")):
        old.get("text_config", old)["sliding_window_pattern"] = pattern
    assert args_class.from_hf(old) == args_class.from_hf(new)


@pytest.mark.parametrize("family", PLAIN, ids=lambda f: f.name)
def test_state_specs_follow_the_layers(family: Family) -> None:
    model_class = get_model_class(family.architecture)
    args = model_class.Args.from_hf(saved_config(family))
    specs = model_class.state_specs(args, 16, "bfloat16", "float32")
    assert list(specs) == list(range(args.num_layers))
    config = build_oracle(family).config.get_text_config()
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    for layer, spec in specs.items():
        slides = types[layer] == "sliding_attention" and getattr(config, "sliding_window", None)
        assert spec.kind == (StateKind.SLIDING_WINDOW if slides else StateKind.FULL)
        assert spec.window == (config.sliding_window if slides else None)
        assert spec.fields[0].shape[0] == 2 and spec.fields[0].dtype == "bfloat16"


def specs_of(name: str) -> list[Any]:
    """(kind, window, key heads, head size) of each layer, or the layer whose memory it reads."""
    model_class = get_model_class(BY_NAME[name].architecture)
    specs = model_class.state_specs(model_class.Args.from_hf(saved_config(BY_NAME[name])), 16, "float32", "float32")
    found: list[Any] = []
    for spec in specs.values():
        is_shared = isinstance(spec, SharedState)
        found.append(spec.layer_id if is_shared else (spec.kind.value, spec.window, spec.fields[1].shape[0], spec.fields[1].shape[2]))
    return found


def test_states_of_layers_that_read_others_of_chunks_and_of_windows() -> None:
    window, full = ("sliding_window", 5, 2, 12), ("full", None, 2, 12)
    assert specs_of("gemma3n") == [window, full, window, full, 2, 3]
    wide = ("full", None, 2, 24)
    assert specs_of("gemma4") == [window, wide, window, 1, 2, 1]
    assert specs_of("gemma4-values-are-keys")[1] == ("full", None, 3, 24)
    chunk = ("chunked_local", 7, 2, 12)
    assert specs_of("llama4") == [chunk, full, chunk, full]
    assert specs_of("gpt-oss") == [("sliding_window", 4, 2, 12), full] * 2
    assert specs_of("mpt") == [("full", None, 4, 12)] * 3


def test_published_gemma4_config() -> None:
    """As its authors write it: sizes of full layers by name, no list of what single layers differ in."""
    published = LLAMA | {
        "num_hidden_layers": 12,
        "global_head_dim": 24,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "num_kv_shared_layers": 6,
    }
    args = get_model_class("Gemma4ForConditionalGeneration").Args.from_hf({"text_config": published})
    local, full = args.attention[0], args.attention[5]
    assert (local.head_dim, local.num_kv_heads, local.values_are_keys, local.window) == (12, 2, False, 512)
    assert (full.head_dim, full.num_kv_heads, full.values_are_keys, full.window) == (24, 1, True, 0)
    assert (full.rope.kind, full.rope.theta, full.rope.num_turned, local.rope.theta) == ("proportional", 1e6, 3, 1e4)
    assert [layer.shares for layer in args.attention[6:]] == [4, 4, 4, 4, 4, 5]


def test_slopes_where_heads_are_no_power_of_two() -> None:
    mpt = get_model_class("MptForCausalLM").Args.from_hf({"d_model": 12, "n_heads": 3}).attention[0].slopes
    assert mpt == (2.0**-4, 2.0**-8, 2.0**-2)
    # transformers has 8 there, whatever the config says.
    most = {"d_model": 12, "n_heads": 2, "attn_config": {"alibi_bias_max": 6}}
    assert get_model_class("MptForCausalLM").Args.from_hf(most).attention[0].slopes == (2.0**-3, 2.0**-6)
    bloom = get_model_class("BloomForCausalLM").Args.from_hf({"hidden_size": 12, "n_head": 3}).attention[0].slopes
    assert bloom == (2.0**-4, 2.0**-8, 2.0**-2)


def test_published_gemma3_config_leaves_most_keys_out() -> None:
    published = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    }
    args = get_model_class("Gemma3ForConditionalGeneration").Args.from_hf(published)
    local, full = args.attention[0], args.attention[5]
    assert (args.vocab_size, args.num_layers, args.tied_output) == (262208, 34, True)
    assert (full.num_heads, full.num_kv_heads, full.head_dim, full.window, full.scale) == (8, 4, 256, 0, 1 / 16)
    assert (full.rope.kind, full.rope.theta, full.rope.factor) == ("linear", 1e6, 8.0)
    assert (local.rope.kind, local.rope.theta, local.window) == ("default", 1e4, 1024)
    assert [layer.window for layer in args.attention[:12]] == [1024] * 5 + [0] + [1024] * 5 + [0]


@pytest.mark.parametrize(("value", "window"), [({"sliding_window": None}, 0), ({"sliding_window": 7}, 7), ({}, 4096)])
def test_mistral_window(value: dict[str, Any], window: int) -> None:
    args = get_model_class("MistralForCausalLM").Args.from_hf(LLAMA | value)
    assert {layer.window for layer in args.attention} == {window}


def test_qwen_window_means_nothing_unless_it_is_used() -> None:
    args = get_model_class("Qwen2ForCausalLM").Args.from_hf(
        LLAMA | {"sliding_window": 5, "max_window_layers": 0, "use_sliding_window": False}
    )
    assert {layer.window for layer in args.attention} == {0}


def test_qwen3_window_from_max_window_layers() -> None:
    args = get_model_class("Qwen3ForCausalLM").Args.from_hf(
        LLAMA | {"sliding_window": 5, "max_window_layers": 2, "use_sliding_window": True}
    )
    assert [layer.window for layer in args.attention] == [0, 0, 5]


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_phi3_longrope_by_any_name(name: str) -> None:
    scaling = {"type": name, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    args = get_model_class("Phi3ForCausalLM").Args.from_hf(
        LLAMA | {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "rope_scaling": scaling}
    )
    rope = args.attention[0].rope
    assert (rope.kind, rope.original_length) == ("longrope", 4096)
    assert rope.attention_factor == pytest.approx(1.1902380714238083)  # sqrt(1 + ln 32 / ln 4096)


@pytest.mark.parametrize(
    ("architecture", "change", "error", "words"),
    [
        ("LlamaForCausalLM", {"hidden_size": None}, CheckpointError, ["hidden_size", "None"]),
        ("LlamaForCausalLM", {"num_hidden_layers": "3"}, CheckpointError, ["num_hidden_layers", "'3'"]),
        ("LlamaForCausalLM", {"num_key_value_heads": 4}, CheckpointError, ["num_key_value_heads", "6", "4"]),
        ("LlamaForCausalLM", {"rms_norm_eps": -1.0}, CheckpointError, ["rms_norm_eps", "-1.0"]),
        ("LlamaForCausalLM", {"attention_bias": "yes"}, CheckpointError, ["attention_bias", "yes"]),
        (
            "Qwen3ForCausalLM",
            {"use_sliding_window": True, "layer_types": ["linear_attention"] * 3},
            CheckpointError,
            ["layer_types", "linear"],
        ),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, CheckpointError, ["no_rope_layers", "3", "[1]"]),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, UnsupportedModelError, ["use_bidirectional_attention"]),
        ("GptOssForCausalLM", {"num_local_experts": 32}, UnsupportedModelError, ["experts", "32", "not supported yet"]),
        ("Llama4ForCausalLM", {"interleave_moe_layer_step": 2}, UnsupportedModelError, ["experts", "layers 1"]),
        ("Llama4ForCausalLM", {"moe_layers": [], "no_rope_layers": [2]}, CheckpointError, ["no_rope_layers", "[2]"]),
        ("Gemma4ForCausalLM", {"enable_moe_block": True}, UnsupportedModelError, ["enable_moe_block", "True"]),
        ("Gemma4ForCausalLM", {"num_kv_shared_layers": 3}, CheckpointError, ["num_kv_shared_layers", "0 to 2"]),
        ("Gemma4ForCausalLM", {"num_kv_shared_layers": 1}, CheckpointError, ["num_kv_shared_layers", "full_attention"]),
        ("Gemma3nForCausalLM", {"intermediate_size": [8, 9]}, CheckpointError, ["intermediate_size", "[8, 9]"]),
        (
            "Gemma3nForCausalLM",
            {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [1.0] * 3},
            CheckpointError,
            ["activation_sparsity_pattern", "below 1"],
        ),
        ("MptForCausalLM", {"attn_config": {"clip_qkv": 6}}, UnsupportedModelError, ["attn_config.clip_qkv", "6"]),
        ("MptForCausalLM", {"attn_config": {"alibi": False}}, UnsupportedModelError, ["alibi"]),
        ("BloomForCausalLM", {"apply_residual_connection_post_layernorm": True}, UnsupportedModelError, ["post_layernorm"]),
        ("UnlimitedOCRForCausalLM", {"first_k_dense_replace": 1}, UnsupportedModelError, ["experts"]),
        ("Gemma3ForConditionalGeneration", {"text_config": 3}, CheckpointError, ["text_config", "3"]),
    ],
)
def test_refusals_name_the_key(architecture: str, change: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        get_model_class(architecture).Args.from_hf(LLAMA | change)
    assert all(word in str(caught.value) for word in words), str(caught.value)


HYBRID_STATES = {
    "mamba2": "RRR",
    "mamba": "RRR",
    "falcon-mamba": "RRR",
    "lfm2": "RARR",
    "bamba": "RAR",
    "granite-hybrid": "RAR",
    "granite-hybrid-rope": "ARA",
    "falcon-h1": "RARARA",
    "falcon-h1-norm": "RARARA",
    "nemotron-h": "RAR",
    "qwen3-next": "RRRA",
    "qwen3.5": "RARA",
    "qwen3.5-multimodal": "RRRA",
    "jamba": "RAR",
    "minimax": "RAR",
    "kimi-linear": "RRR",
    "kimi-linear-latent": "RLR",
    "kimi-linear-latent-queries": "LRL",
    "zamba2": "RARARAR",
    "zamba2-one-block": "ARRAR",
}


@pytest.mark.parametrize("family", HYBRIDS, ids=lambda f: f.name)
def test_a_hybrid_has_a_memory_for_each_mixer_that_needs_one(family: Family) -> None:
    model_class = get_model_class(family.architecture)
    specs = model_class.state_specs(model_class.Args.from_hf(saved_config(family)), 16, "fp8_e4m3", "bfloat16")
    kinds = {StateKind.RECURRENT: "R", StateKind.FULL: "A", StateKind.MLA: "L"}
    assert list(specs) == list(range(len(specs)))
    assert "".join(kinds[spec.kind] for spec in specs.values()) == HYBRID_STATES[family.name]
    for spec in specs.values():
        types = {field.name: field.dtype for field in spec.fields}
        if spec.kind is StateKind.RECURRENT:
            assert (
                set(types) <= {"conv", "state"}
                and types.get("conv", "bfloat16") == "bfloat16"
                and types.get("state", "float32") == "float32"
            )
        else:
            assert set(types) in ({"k", "v"}, {"latent"}) and set(types.values()) == {"float8_e4m3fn"}


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("granite-hybrid", {"num_local_experts": 4}, ["num_local_experts", "4"]),
        ("granite-hybrid", {"position_embedding_type": "alibi"}, ["position_embedding_type", "alibi"]),
        ("nemotron-h", {"layers_block_type": ["linear_attention", "moe"]}, ["experts"]),
        ("nemotron-h", {"layers_block_type": None, "layer_types": None, "hybrid_override_pattern": "ME"}, ["experts"]),
        ("nemotron-h", {"mlp_hidden_act": "silu"}, ["mlp_hidden_act", "silu"]),
        ("qwen3-next", {"num_experts": 4}, ["num_experts"]),
        ("jamba", {"num_experts": 4}, ["num_experts", "4"]),
        ("minimax", {"num_local_experts": 4}, ["num_local_experts", "4"]),
        ("kimi-linear-latent", {"attention_bias": True}, ["attention_bias"]),
        ("kimi-linear-latent", {"mla_use_nope": False}, ["mla_use_nope"]),
        ("kimi-linear", {"mlp_layer_types": ["dense", "dense", "sparse"]}, ["Experts", "layer 2"]),
        ("mamba2", {"hidden_act": "relu"}, ["hidden_act", "relu"]),
        ("zamba2", {"use_long_context": True}, ["use_long_context"]),
        ("zamba2", {"num_key_value_heads": 2}, ["num_key_value_heads", "6"]),
        ("zamba2", {"tie_word_embeddings": False}, ["tie_word_embeddings"]),
        ("zamba2", {"num_hidden_layers": 65, "layers_block_type": ["hybrid"] * 65}, ["layers_block_type", "65"]),
    ],
)
def test_what_hybrids_cannot_do_yet_is_refused(name: str, change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        get_model_class(BY_NAME[name].architecture).Args.from_hf(saved_config(BY_NAME[name]) | change)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("mamba2", {"num_heads": 5}, ["num_heads", "5"]),
        ("mamba2", {"time_step_limit": [1]}, ["time_step_limit"]),
        ("lfm2", {"layer_types": ["conv"]}, ["layer_types", "4"]),
        ("lfm2", {"layer_types": None, "full_attn_idxs": 3}, ["full_attn_idxs", "3"]),
        ("bamba", {"attn_layer_indices": "1"}, ["attn_layer_indices"]),
        ("bamba", {"mamba_d_head": 7}, ["mamba_d_head", "7"]),
        ("granite-hybrid", {"logits_scaling": 0}, ["logits_scaling"]),
        ("falcon-h1", {"ssm_multipliers": [1.0]}, ["ssm_multipliers", "5"]),
        ("nemotron-h", {"layers_block_type": None, "layer_types": None, "hybrid_override_pattern": "MX"}, ["hybrid_override_pattern"]),
        ("qwen3-next", {"linear_num_value_heads": 3}, ["linear_num_value_heads", "3"]),
        ("zamba2", {"n_mamba_heads": 7}, ["n_mamba_heads", "96"]),
        ("zamba2", {"num_attention_heads": 5, "num_key_value_heads": 5}, ["num_attention_heads", "96"]),
    ],
)
def test_malformed_hybrid_configs_are_refused_by_key(name: str, change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        get_model_class(BY_NAME[name].architecture).Args.from_hf(saved_config(BY_NAME[name]) | change)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_latents_have_no_scales() -> None:
    model_class = get_model_class("KimiLinearForCausalLM")
    args = model_class.Args.from_hf(saved_config(BY_NAME["kimi-linear-latent"]))
    with pytest.raises(UnsupportedModelError, match="int8_per_token_head is not supported by latent attention"):
        model_class.state_specs(args, 16, "int8_per_token_head", "bfloat16")


PUBLISHED_MINIMAX = {"num_attention_heads": 8, "head_dim": 16, "num_local_experts": 1, "num_hidden_layers": 2, "postnorm": True}


def test_published_minimax_configs() -> None:
    args_class = get_model_class("MiniMaxText01ForCausalLM").Args
    args = args_class.from_hf(PUBLISHED_MINIMAX | {"decoder_attention_types": [0, 1], "rotary_dim": 8, "layernorm_mlp_alpha": 3.5})
    (linear, mlp), (full, _) = args.layers
    assert (linear.name, full.name, mlp.keeps) == ("lightning", "attention", 3.5)
    assert full.mixer.rope.dim == 8
    assert [layer[0].name for layer in args_class.from_hf(PUBLISHED_MINIMAX).layers] == ["attention"] * 2


@pytest.mark.parametrize("change", [{"postnorm": False}, {"shared_intermediate_size": 64}, {"num_attention_heads": 6}], ids=str)
def test_what_published_minimax_configs_may_not_ask_for(change: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=next(iter(change))):
        get_model_class("MiniMaxText01ForCausalLM").Args.from_hf(PUBLISHED_MINIMAX | change)


def test_published_zamba2_layers() -> None:
    """Without `layers_block_type` a config means those of the 2.7B."""
    args = get_model_class("Zamba2ForCausalLM").Args.from_hf({"hidden_size": 64, "n_mamba_heads": 2})
    assert [i for i, uses_block in enumerate(args.layers) if uses_block] == [6, 12, 18, 24, 30, 36, 42, 47, 51]
    assert transformers.Zamba2Config().hybrid_layer_ids == [6, 12, 18, 24, 30, 36, 42, 47, 51]


def test_original_hybrid_configs() -> None:
    """Keys as published checkpoints have them, before transformers renamed them."""
    lfm2 = {
        "hidden_size": 1024,
        "num_hidden_layers": 3,
        "full_attn_idxs": [2],
        "block_ff_dim": 6656,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "tie_embedding": True,
        "rope_theta": 1000000.0,
        "num_attention_heads": 16,
    }
    args = get_model_class("Lfm2ForCausalLM").Args.from_hf(lfm2)
    assert [branches[0].name for branches in args.layers] == ["conv", "conv", "attention"]
    assert args.layers[0][1].mixer.intermediate_size == 4608 and args.tied_output
    nemotron = {"hidden_size": 64, "hybrid_override_pattern": "M-M*-", "num_hidden_layers": 5, "rms_norm_eps": 1e-5}
    args = get_model_class("NemotronHForCausalLM").Args.from_hf(nemotron)
    assert [branches[0].name for branches in args.layers] == ["mamba", "mlp", "mamba", "attention", "mlp"]
    kimi = {"num_hidden_layers": 1, "linear_attn_config": {"num_heads": 3, "head_dim": 8, "kda_layers": [1], "full_attn_layers": []}}
    (layer,) = get_model_class("KimiLinearForCausalLM").Args.from_hf(kimi).layers
    kimi |= {"linear_attn_config": {"kda_layers": [], "full_attn_layers": [1]}, "mla_use_nope": True, "q_lora_rank": None}
    (latent,) = get_model_class("KimiLinearForCausalLM").Args.from_hf(kimi).layers
    assert (latent[0].mixer.latent_dim, latent[0].mixer.shared_dim, latent[0].mixer.query_rank) == (512, 64, 0)
    assert (layer[0].mixer.key_heads, layer[0].mixer.gate_rank, layer[0].mixer.taps) == (3, 8, 4)
    mamba2 = {
        "vocab_size": 10,
        "hidden_size": 64,
        "num_heads": 2,
        "num_hidden_layers": 1,
        "time_step_limit": [0.0, {"__float__": "Infinity"}],
    }
    (layer,) = get_model_class("Mamba2ForCausalLM").Args.from_hf(mamba2).layers
    assert layer[0].mixer.step_limits == (0.0, float("inf"))
