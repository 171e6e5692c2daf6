"""Gemma 3n (text): four residual streams, low-rank branches, inputs of single layers, layers that read others' keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import Tensor

from canter.core.errors import CheckpointError
from canter.core.state_specs import SharedState, StateSpec
from canter.layers.altup import AltUp, AltUpArgs, LowRankBranch, SparseMLP, Streams
from canter.layers.attention import Attention, AttentionArgs
from canter.layers.build import Build
from canter.layers.context import StepContext
from canter.layers.decoder import DecoderArgs, attention_states
from canter.layers.embedding import Embedding, OutputHead
from canter.layers.mlp import GatedMLP
from canter.layers.norm import NormArgs, RMSNorm
from canter.layers.per_layer import PerLayerArgs, PerLayerBranch, PerLayerInputs
from canter.layers.rope import RopeArgs, read_rope
from canter.models import gemma_common, hf_config, names
from canter.models.weights import Rule, WeightMap


@dataclass(frozen=True, slots=True)
class Gemma3nArgs(DecoderArgs):
    """`widths` and `sparsities`: of each layer's MLP, and the part of its gates that is cut to zero. `rank`: of low-rank branches."""

    widths: tuple[int, ...] = ()
    sparsities: tuple[float, ...] = ()
    rank: int = 0
    altup: AltUpArgs = AltUpArgs(4, 0, scales_output=True)
    per_layer: PerLayerArgs = PerLayerArgs(256, 262144, "gelu_pytorch_tanh")

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        text = hf_config.text_config(hf)
        num_layers = hf_config.positive_int(text, "num_hidden_layers", 35)
        types = hf_config.layer_types(text, num_layers, [hf_config.SLIDING if (i + 1) % 5 else hf_config.FULL for i in range(num_layers)])
        hidden_size = hf_config.positive_int(text, "hidden_size", 2048)
        norm = NormArgs(hf_config.number(text, "rms_norm_eps", 1e-6), cast_first=False)
        activation = str(text.get("hidden_activation") or "gelu_pytorch_tanh")
        vocab_size = hf_config.positive_int(text, "vocab_size", 262400)
        per_layer = gemma_common.per_layer_args(text, vocab_size, activation)
        if per_layer is None:
            raise CheckpointError("Config key 'hidden_size_per_layer_input': expected an integer of at least 1, found 0.")
        widths = _widths(text, num_layers)
        return cls(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=max(widths),
            attention=_attention(text, types, norm),
            norm=norm,
            tied_output=hf_config.flag(text, "tie_word_embeddings", True),
            activation=activation,
            embed_scale=hidden_size**0.5,
            logit_softcap=hf_config.number(text, "final_logit_softcapping", 30.0 if "final_logit_softcapping" not in text else 0.0),
            widths=widths,
            sparsities=_sparsities(text, num_layers),
            rank=hf_config.positive_int(text, "laurel_rank", 64),
            altup=_altup(text),
            per_layer=per_layer,
        )


def _attention(text: Mapping[str, Any], types: list[str], norm: NormArgs) -> tuple[AttentionArgs, ...]:
    num_heads, num_kv_heads = hf_config.head_counts(text, 8, 2)
    head_dim = hf_config.positive_int(text, "head_dim", 256)
    window = hf_config.positive_int(text, "sliding_window", 512)
    bias = hf_config.flag(text, "attention_bias")
    return tuple(
        AttentionArgs(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=1.0,
            rope=_rope(text, head_dim, kind),
            window=window if kind == hf_config.SLIDING else 0,
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=norm,
            v_norm=replace(norm, weighted=False),
            shares=shares,
        )
        for kind, shares in zip(types, gemma_common.shared_layers(text, types, 15), strict=True)
    )


def _rope(text: Mapping[str, Any], head_dim: int, kind: str) -> RopeArgs:
    """As in Gemma 3: newer configs nest ropes by kind, in older ones `rope_local_base_freq` is the sliding layers'."""
    if kind == hf_config.FULL:
        return read_rope(text, head_dim, kind, default_theta=1000000.0)
    nested = text.get("rope_parameters")
    own = nested.get(kind) if isinstance(nested, Mapping) else None
    theta = hf_config.number(text, "rope_local_base_freq", 10000.0)
    return read_rope({**text, "rope_scaling": None, "rope_theta": theta, "rope_parameters": own}, head_dim)


def _widths(text: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    given = text.get("intermediate_size", 16384)
    widths = list(given) if isinstance(given, (list, tuple)) else [given] * num_layers
    if len(widths) != num_layers or not all(isinstance(width, int) and width > 0 for width in widths):
        raise CheckpointError(f"Config key 'intermediate_size': expected an integer above 0 or {num_layers} of them, found {given!r:.120}.")
    return tuple(widths)


def _sparsities(text: Mapping[str, Any], num_layers: int) -> tuple[float, ...]:
    given = text.get("activation_sparsity_pattern")
    if given is None:
        sparse = 10 if num_layers > 10 else 0
        given = [0.95] * sparse + [0.0] * (num_layers - sparse)
    given = given if isinstance(given, (list, tuple)) else [given] * num_layers
    if len(given) != num_layers or not all(isinstance(part, (int, float)) and 0 <= part < 1 for part in given):
        raise CheckpointError(
            f"Config key 'activation_sparsity_pattern': expected {num_layers} numbers of at least 0 and below 1, found {given!r:.120}."
        )
    return tuple(float(part) for part in given)


def _altup(text: Mapping[str, Any]) -> AltUpArgs:
    count = hf_config.positive_int(text, "altup_num_inputs", 4)
    active = int(hf_config.number(text, "altup_active_idx", 0))
    if not 2 <= count <= 16 or active >= count:
        raise CheckpointError(f"Config keys 'altup_num_inputs', 'altup_active_idx': expected 2 to 16 and less, found {count}, {active}.")
    return AltUpArgs(count, active, hf_config.flag(text, "altup_correct_scale", True))


class Gemma3nLayer:
    """Predicts the streams, computes the active one, and corrects the others by what came of it."""

    def __init__(self, build: Build, layer_id: int, args: Gemma3nArgs) -> None:
        def norm(name: str) -> RMSNorm:
            return RMSNorm(build.at(name), args.hidden_size, args.norm)

        size, width, sparsity = args.hidden_size, args.widths[layer_id], args.sparsities[layer_id]
        self._hidden_size = size
        self._altup = AltUp(build.at("altup"), args.altup, size, args.norm)
        self._attention_norm, self._after_attention = norm("attention_norm"), norm("after_attention_norm")
        self._mlp_norm, self._after_mlp = norm("mlp_norm"), norm("after_mlp_norm")
        self._attention = Attention(build.at("attention"), layer_id, size, args.attention[layer_id])
        self._low_rank = LowRankBranch(build.at("laurel"), size, args.rank, args.norm)
        self._mlp: Callable[[Tensor], Tensor]
        if sparsity:
            self._mlp = SparseMLP(build.at("mlp"), size, width, args.activation, sparsity)
        else:
            self._mlp = GatedMLP(build.at("mlp"), size, width, args.activation)
        self._per_layer = PerLayerBranch(build.at("per_layer"), args.per_layer, size, args.norm)
        self._weighted_sum: Callable[..., Tensor] = build.op("weighted_sum")

    def __call__(self, streams: Tensor, layer_input: Tensor, ctx: StepContext) -> Tensor:
        predicted = self._altup.predict(streams)
        active = self._altup.active(predicted)
        normed = self._attention_norm(active.view(-1, 1, self._hidden_size)).view(-1, self._hidden_size)
        x = self._weighted_sum(active, self._after_attention(self._attention(normed, ctx)), 1.0, 1.0)
        x = self._weighted_sum(x, self._low_rank(normed), 0.5**0.5, 0.5**0.5)
        x = self._weighted_sum(x, self._after_mlp(self._mlp(self._mlp_norm(x))), 1.0, 1.0)
        corrected = self._altup.correct(predicted, x)
        added = self._per_layer(self._altup.scaled(self._altup.active(corrected)), layer_input)
        return self._altup.add_to_others(corrected, added)


_ALTUP = (
    ("correct_output_scale", "output_scale"),
    ("correction_coefs.weight", "correction.weight"),
    ("prediction_coefs.weight", "prediction.weight"),
    ("modality_router.weight", "router.weight"),
    ("router_norm.weight", "router_norm.weight"),
)
_LAUREL = (("linear_left.weight", "left.weight"), ("linear_right.weight", "right.weight"), ("post_laurel_norm.weight", "norm.weight"))
_RULES = (
    *gemma_common.RULES,
    *(Rule(f"{names.LAYER}.altup.{name}", f"layers.{{i}}.altup.{own}") for name, own in _ALTUP),
    *(Rule(f"{names.LAYER}.laurel.{name}", f"layers.{{i}}.laurel.{own}") for name, own in _LAUREL),
    *(Rule(f"model.altup_projections.{i}.weight", "streams.split.weight", str(i), tied=True) for i in range(15)),
    *(Rule(f"model.altup_unembed_projections.{i}.weight", f"streams.join.{i}.weight") for i in range(15)),
)


class Gemma3nForCausalLM:
    """`Gemma3nForCausalLM` of config.json."""

    Args = Gemma3nArgs
    WEIGHTS = WeightMap(_RULES, names.BODY_RENAMES, names.ROPE_BUFFERS)

    def __init__(self, args: Gemma3nArgs, build: Build) -> None:
        self.args, self.parameters = args, build.parameters
        size = args.hidden_size
        self._embed = Embedding(build.at("embed"), args.vocab_size, size, args.embed_scale)
        self._inputs = PerLayerInputs(build.at("per_layer"), args.per_layer, args.num_layers, args.vocab_size, size, args.norm)
        self._streams = Streams(build.at("streams"), args.altup, size)
        self._layers = [Gemma3nLayer(build.at(f"layers.{i}"), i, args) for i in range(args.num_layers)]
        self._norm = RMSNorm(build.at("norm"), size, args.norm)
        tied = self._embed if args.tied_output else None
        self._head = OutputHead(build.at("head"), args.vocab_size, size, tied, args.logit_softcap)

    def forward(self, token_ids: Tensor, ctx: StepContext) -> Tensor:
        """[T] int64 token ids -> [T, hidden_size], after the last norm. Writes the caches of `ctx`."""
        x = self._embed(token_ids)
        inputs = self._inputs(token_ids, x)
        streams = self._streams.split(x)
        for layer, layer_input in zip(self._layers, inputs, strict=True):
            streams = layer(streams, layer_input, ctx)
        return self._norm(self._streams.join(streams))

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size], rows of what `forward` returns -> [N, vocab_size] float32."""
        return self._head(hidden)

    @staticmethod
    def state_specs(args: Gemma3nArgs, block_size: int, cache_dtype: str, dtype: str) -> Mapping[int, StateSpec | SharedState]:
        """layer id -> what it remembers. Needs no weights."""
        return attention_states(args, block_size, cache_dtype)


class Gemma3nForConditionalGeneration(Gemma3nForCausalLM):
    """`Gemma3nForConditionalGeneration` of config.json, its text part: towers are left in the file."""

    WEIGHTS = WeightMap(_RULES, names.MULTIMODAL_RENAMES, (*gemma_common.TOWERS, *names.ROPE_BUFFERS))
