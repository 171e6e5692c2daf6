"""Gemma 4 (text, dense): windowed and full layers in turn, layers that read others' keys, inputs of single layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from canter.core.errors import CheckpointError, UnsupportedModelError
from canter.core.state_specs import SharedState, StateSpec
from canter.layers.attention import Attention, AttentionArgs
from canter.layers.build import Build
from canter.layers.context import StepContext
from canter.layers.decoder import DecoderArgs, attention_states
from canter.layers.embedding import Embedding, OutputHead
from canter.layers.mlp import GatedMLP
from canter.layers.norm import NormArgs, RMSNorm
from canter.layers.per_layer import PerLayerArgs, PerLayerBranch, PerLayerInputs
from canter.layers.rope import read_rope
from canter.models import gemma_common, hf_config, names
from canter.models.weights import Rule, WeightMap

_ROPES = {
    hf_config.SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    hf_config.FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
"""Of a config that has none."""


@dataclass(frozen=True, slots=True)
class Gemma4Args(DecoderArgs):
    """`widths`: of each layer's MLP. `per_layer`: what is told of the inputs of single layers, where the model has them."""

    widths: tuple[int, ...] = ()
    per_layer: PerLayerArgs | None = None

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        text = hf_config.text_config(hf)
        for key in ("enable_moe_block", "use_bidirectional_attention"):
            if text.get(key) not in (None, False, "vision"):
                raise UnsupportedModelError(f"Gemma 4 models with {key} {text[key]!r:.40} are not supported yet: dense causal ones are.")
        num_layers = hf_config.positive_int(text, "num_hidden_layers", 30)
        types = hf_config.layer_types(text, num_layers, [hf_config.SLIDING if (i + 1) % 6 else hf_config.FULL for i in range(num_layers)])
        types[-1] = hf_config.FULL
        shares = gemma_common.shared_layers(text, types, 0)
        hidden_size = hf_config.positive_int(text, "hidden_size", 2304)
        norm = NormArgs(hf_config.number(text, "rms_norm_eps", 1e-6), cast_first=False)
        width = hf_config.positive_int(text, "intermediate_size", 9216)
        doubles = hf_config.flag(text, "use_double_wide_mlp")
        activation = str(text.get("hidden_activation") or "gelu_pytorch_tanh")
        vocab_size = hf_config.positive_int(text, "vocab_size", 262144)
        return cls(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=width,
            attention=tuple(_attention(text, i, types[i], shares[i], norm) for i in range(num_layers)),
            norm=norm,
            tied_output=hf_config.flag(text, "tie_word_embeddings", True),
            activation=activation,
            embed_scale=hidden_size**0.5,
            logit_softcap=hf_config.number(text, "final_logit_softcapping", 0.0),
            widths=tuple(2 * width if doubles and shared is not None else width for shared in shares),
            per_layer=gemma_common.per_layer_args(text, vocab_size, activation),
        )


def _attention(text: Mapping[str, Any], layer: int, kind: str, shares: int | None, norm: NormArgs) -> AttentionArgs:
    is_full = kind == hf_config.FULL
    values_are_keys = is_full and hf_config.flag(text, "attention_k_eq_v")
    own = _own_sizes(text, layer, is_full, values_are_keys)
    head_dim = hf_config.positive_int(own, "head_dim", 256)
    num_heads, num_kv_heads = hf_config.head_counts({"num_attention_heads": text.get("num_attention_heads", 8)} | own, 8, 4)
    bias = hf_config.flag(text, "attention_bias")
    return AttentionArgs(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=1.0,
        rope=read_rope({**text, "rope_parameters": text.get("rope_parameters") or _ROPES}, head_dim, kind),
        window=0 if is_full else hf_config.positive_int(text, "sliding_window", 512),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=norm,
        v_norm=replace(norm, weighted=False),
        values_are_keys=values_are_keys,
        shares=shares,
    )


def _own_sizes(text: Mapping[str, Any], layer: int, is_full: bool, values_are_keys: bool) -> dict[str, Any]:
    """`head_dim` and `num_key_value_heads` of a layer: newer configs list those that differ, published ones name those of full layers."""
    sizes = {key: text.get(key) for key in ("head_dim", "num_key_value_heads")}
    listed = text.get("per_layer_config")
    if listed is not None:
        if not isinstance(listed, Mapping) or not all(isinstance(value, Mapping) for value in listed.values()):
            raise CheckpointError(f"Config key 'per_layer_config': expected an object of objects, found {listed!r:.80}.")
        return sizes | dict(listed.get(str(layer)) or listed.get(layer) or {})
    if is_full:
        sizes["head_dim"] = text.get("global_head_dim") or 512
        if values_are_keys and text.get("num_global_key_value_heads") is not None:
            sizes["num_key_value_heads"] = text["num_global_key_value_heads"]
    return sizes


class Gemma4Layer:
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))), then x + what the layer's own input adds, all times a scalar."""

    def __init__(self, build: Build, layer_id: int, args: Gemma4Args) -> None:
        def norm(name: str) -> RMSNorm:
            return RMSNorm(build.at(name), args.hidden_size, args.norm)

        self._attention_norm, self._after_attention = norm("attention_norm"), norm("after_attention_norm")
        self._mlp_norm, self._after_mlp = norm("mlp_norm"), norm("after_mlp_norm")
        self._attention = Attention(build.at("attention"), layer_id, args.hidden_size, args.attention[layer_id])
        self._mlp = GatedMLP(build.at("mlp"), args.hidden_size, args.widths[layer_id], args.activation)
        self._per_layer = None
        if args.per_layer is not None:
            self._per_layer = PerLayerBranch(build.at("per_layer"), args.per_layer, args.hidden_size, args.norm)
        self._scalar = build.parameter("scalar", (1,), dtype=torch.float32)
        self._hidden_size = args.hidden_size
        self._weighted_sum: Callable[..., Tensor] = build.op("weighted_sum")
        self._scale_columns: Callable[..., Tensor] = build.op("scale_columns")

    def __call__(self, x: Tensor, layer_input: Tensor | None, ctx: StepContext) -> Tensor:
        branch = self._after_attention(self._attention(self._attention_norm(x), ctx))
        normed, x = self._mlp_norm.add(branch, x)
        x = self._weighted_sum(x, self._after_mlp(self._mlp(normed)), 1.0, 1.0)
        if self._per_layer is not None and layer_input is not None:
            x = self._weighted_sum(x, self._per_layer(x, layer_input), 1.0, 1.0)
        return self._scale_columns(x, self._scalar.expand(self._hidden_size).contiguous())


class Gemma4ForCausalLM:
    """`Gemma4ForCausalLM` of config.json."""

    Args = Gemma4Args
    WEIGHTS = WeightMap(
        (*gemma_common.RULES, Rule(f"{names.LAYER}.layer_scalar", "layers.{i}.scalar")), names.BODY_RENAMES, names.ROPE_BUFFERS
    )

    def __init__(self, args: Gemma4Args, build: Build) -> None:
        self.args, self.parameters = args, build.parameters
        self._embed = Embedding(build.at("embed"), args.vocab_size, args.hidden_size, args.embed_scale)
        self._inputs = None
        if args.per_layer is not None:
            given = args.per_layer, args.num_layers, args.vocab_size, args.hidden_size, args.norm
            self._inputs = PerLayerInputs(build.at("per_layer"), *given)
        self._layers = [Gemma4Layer(build.at(f"layers.{i}"), i, args) for i in range(args.num_layers)]
        self._norm = RMSNorm(build.at("norm"), args.hidden_size, args.norm)
        tied = self._embed if args.tied_output else None
        self._head = OutputHead(build.at("head"), args.vocab_size, args.hidden_size, tied, args.logit_softcap)

    def forward(self, token_ids: Tensor, ctx: StepContext) -> Tensor:
        """[T] int64 token ids -> [T, hidden_size], after the last norm. Writes the caches of `ctx`."""
        x = self._embed(token_ids)
        inputs = self._inputs(token_ids, x) if self._inputs is not None else [None] * len(self._layers)
        for layer, layer_input in zip(self._layers, inputs, strict=True):
            x = layer(x, layer_input, ctx)
        return self._norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size], rows of what `forward` returns -> [N, vocab_size] float32."""
        return self._head(hidden)

    @staticmethod
    def state_specs(args: Gemma4Args, block_size: int, cache_dtype: str, dtype: str) -> Mapping[int, StateSpec | SharedState]:
        """layer id -> what it remembers. Needs no weights."""
        return attention_states(args, block_size, cache_dtype)


class Gemma4ForConditionalGeneration(Gemma4ForCausalLM):
    """`Gemma4ForConditionalGeneration` of config.json, its text part: towers are left in the file."""

    WEIGHTS = WeightMap(Gemma4ForCausalLM.WEIGHTS.rules, names.MULTIMODAL_RENAMES, (*gemma_common.TOWERS, *names.ROPE_BUFFERS))
