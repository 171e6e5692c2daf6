"""Zamba2 (arXiv 2411.15242): Mamba-2, and one or two blocks of attention and feed-forward that come back at several depths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from canter.core.errors import CheckpointError, UnsupportedModelError
from canter.core.state_specs import SharedState, StateSpec
from canter.layers.attention import AttentionArgs
from canter.layers.build import Build
from canter.layers.context import StepContext
from canter.layers.embedding import Embedding, OutputHead
from canter.layers.norm import NormArgs, RMSNorm
from canter.layers.recurrent import Mamba2, Mamba2Args
from canter.layers.rope import read_rope
from canter.layers.shared import SharedBlock, SharedBlockArgs, SharedBlockUse
from canter.layers.state import StateTypes
from canter.models import hf_config, names
from canter.models.weights import Rule, WeightMap

_KINDS = {"mamba": "mamba", "linear_attention": "mamba", "hybrid": "hybrid"}
_GATED_NORM_EPS = 1e-5
_MOST_USES = 64


@dataclass(frozen=True, slots=True)
class Zamba2Args:
    """`layers`: of each, whether the shared block comes before its Mamba-2. `num_blocks`: blocks that take turns.

    Step widths are not clamped: `time_step_min` says how a model began its training.
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[bool, ...]
    num_blocks: int
    block: SharedBlockArgs
    mamba: Mamba2Args
    norm: NormArgs

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        num_layers = hf_config.positive_int(hf, "num_hidden_layers", 54)
        key = "layer_types" if hf.get("layer_types") is not None else "layers_block_type"
        default = ["hybrid" if i in _PUBLISHED_USES else "mamba" for i in range(num_layers)]
        kinds = hf_config.kinds(hf, key, num_layers, _KINDS, default)
        if kinds.count("hybrid") > _MOST_USES:
            raise UnsupportedModelError(f"Config key {key!r}: {kinds.count('hybrid')} layers use shared blocks, at most {_MOST_USES} may.")
        norm = NormArgs(hf_config.number(hf, "rms_norm_eps", 1e-5))
        if not hf_config.flag(hf, "tie_word_embeddings", True):
            # transformers then shares no blocks either, others do: such a checkpoint does not say what it means.
            raise UnsupportedModelError(
                "Config key 'tie_word_embeddings': Zamba2 models with an output matrix of their own are not supported."
            )
        return cls(
            vocab_size=hf_config.positive_int(hf, "vocab_size", 32000),
            hidden_size=hf_config.positive_int(hf, "hidden_size", 2560),
            layers=tuple(kind == "hybrid" for kind in kinds),
            num_blocks=hf_config.positive_int(hf, "num_mem_blocks", 1),
            block=_block(hf, norm),
            mamba=_mamba2(hf),
            norm=norm,
        )


_PUBLISHED_USES = (*range(6, 43, 6), 47, 51)


def _block(hf: Mapping[str, Any], norm: NormArgs) -> SharedBlockArgs:
    hidden_size = hf_config.positive_int(hf, "hidden_size", 2560)
    heads, kv_heads = hf_config.head_counts(hf, 32)
    if 2 * hidden_size % heads:
        raise CheckpointError(f"Config key 'num_attention_heads': expected a divisor of {2 * hidden_size}, found {heads}.")
    adapts = hf_config.flag(hf, "use_shared_attention_adapter")
    if adapts and kv_heads != heads:
        raise UnsupportedModelError(f"Config key 'num_key_value_heads': adapters need as many as there are query heads, {heads}.")
    rotated = hf_config.flag(hf, "use_mem_rope")
    if rotated and hf_config.flag(hf, "use_long_context"):
        raise UnsupportedModelError("Config key 'use_long_context': frequencies stretched for it are not supported.")
    head_dim = 2 * hidden_size // heads
    rope = read_rope(hf, head_dim) if rotated else None
    return SharedBlockArgs(
        attention=AttentionArgs(heads, kv_heads, head_dim, (head_dim / 2) ** -0.5, rope),
        intermediate_size=hf_config.positive_int(hf, "intermediate_size", 4 * hidden_size),
        activation=str(hf.get("hidden_act") or "gelu"),
        mlp_bias=hf_config.flag(hf, "add_bias_linear"),
        norm=norm,
        adapter_rank=hf_config.positive_int(hf, "adapter_rank", 128),
        adapts_attention=adapts,
    )


def _mamba2(hf: Mapping[str, Any]) -> Mamba2Args:
    heads = hf_config.positive_int(hf, "n_mamba_heads", 8)
    width = hf_config.positive_int(hf, "hidden_size", 2560) * hf_config.positive_int(hf, "mamba_expand", 2)
    if width % heads:
        raise CheckpointError(f"Config key 'n_mamba_heads': expected a divisor of {width}, found {heads}.")
    bias = hf_config.flag(hf, "add_bias_linear")
    return Mamba2Args(
        num_heads=heads,
        head_dim=width // heads,
        groups=hf_config.positive_int(hf, "mamba_ngroups", 1),
        state_size=hf_config.positive_int(hf, "mamba_d_state", 64),
        taps=hf_config.positive_int(hf, "mamba_d_conv", 4),
        norm_eps=_GATED_NORM_EPS,
        bias=bias,
        output_bias=bias,
    )


class _Layer:
    """x + mamba(norm(x)), or with a shared block x + mamba(norm(x + block(x, embedded)))."""

    def __init__(self, build: Build, state_id: int, args: Zamba2Args, block: SharedBlockUse | None) -> None:
        self.block = block
        self.norm = RMSNorm(build.at("mamba_norm"), args.hidden_size, args.norm)
        self.mamba = Mamba2(build.at("mamba"), args.hidden_size, state_id, args.mamba)


_SHARED, _BLOCK = f"{names.LAYER}.shared_transformer", "layers.{i}.shared"


def _shared(name: str, target: str, part: str | None = None) -> Rule:
    """Of a block, which checkpoints may store once for each layer that uses it."""
    return Rule(f"{_SHARED}.{name}", f"{_BLOCK}.{target}", part, tied=True)


def _adapter_rules(use: int) -> tuple[Rule, ...]:
    """What a use adds is stored with the weights that it is added to."""
    attention, mlp, target = "self_attn.linear_{}_adapter_list", f"feed_forward.gate_up_proj_adapter_list.{use}", f"uses.{use}"
    return (
        *(_shared(f"{attention.format(p)}.{use}.0.weight", f"{target}.attention_down.weight", p) for p in ("q", "k", "v")),
        *(_shared(f"{attention.format(p)}.{use}.1.weight", f"{target}.{p}_up.weight") for p in ("q", "k", "v")),
        _shared(f"{mlp}.0.weight", f"{target}.mlp_down.weight"),
        _shared(f"{mlp}.1.weight", f"{target}.mlp_up.weight"),
    )


def _mamba_rules(source: str, target: str) -> tuple[Rule, ...]:
    norm = Rule(f"{source}.input_layernorm.weight", f"{target}.mamba_norm.weight")
    return (norm, *names.mamba2(f"{source}.mamba", f"{target}.mamba"))


_RULES = (
    Rule("model.embed_tokens.weight", "embed.weight"),
    Rule("model.final_layernorm.weight", "norm.weight"),
    Rule("lm_head.weight", "head.weight", tied=True),
    Rule(f"{names.LAYER}.linear.weight", "layers.{i}.output.weight"),
    *_mamba_rules(names.LAYER, "layers.{i}"),
    *_mamba_rules(f"{names.LAYER}.mamba_decoder", "layers.{i}.mamba_decoder"),
    _shared("input_layernorm.weight", "attention_norm.weight"),
    _shared("pre_ff_layernorm.weight", "mlp_norm.weight"),
    *(_shared(f"self_attn.{p}_proj.weight", "attention.qkv.weight", p) for p in ("q", "k", "v")),
    _shared("self_attn.o_proj.weight", "attention.output.weight"),
    *(_shared(f"feed_forward.gate_up_proj.{kind}", f"mlp.gate_up.{kind}") for kind in ("weight", "bias")),
    *(_shared(f"feed_forward.down_proj.{kind}", f"mlp.down.{kind}") for kind in ("weight", "bias")),
    *(rule for use in range(_MOST_USES) for rule in _adapter_rules(use)),
)


class Zamba2ForCausalLM:
    """`Zamba2ForCausalLM` of config.json."""

    Args = Zamba2Args
    WEIGHTS = WeightMap(_RULES, (*names.BODY_RENAMES, ("final_layernorm.", "model.final_layernorm.")), names.ROPE_BUFFERS)

    def __init__(self, args: Zamba2Args, build: Build) -> None:
        self.args = args
        self.parameters = build.parameters
        size = args.hidden_size
        self._embed = Embedding(build.at("embed"), args.vocab_size, size)
        self._layers: list[_Layer] = []
        blocks: list[SharedBlock] = []
        state_id = uses = 0
        for i, uses_block in enumerate(args.layers):
            place, use = build.at(f"layers.{i}"), None
            if uses_block:
                if len(blocks) < args.num_blocks:
                    blocks.append(SharedBlock(place.at("shared"), size, args.block))
                use = SharedBlockUse(place.at("output"), state_id, blocks[uses % args.num_blocks], uses)
                place, uses, state_id = place.at("mamba_decoder"), uses + 1, state_id + 1
            self._layers.append(_Layer(place, state_id, args, use))
            state_id += 1
        self._norm = RMSNorm(build.at("norm"), size, args.norm)
        self._head = OutputHead(build.at("head"), args.vocab_size, size, self._embed)
        self._weighted_sum: Callable[..., Tensor] = build.op("weighted_sum")

    def forward(self, token_ids: Tensor, ctx: StepContext) -> Tensor:
        """[T] int64 token ids -> [T, hidden_size], after the last norm. Writes the caches of `ctx`."""
        embedded = self._embed(token_ids)
        x, mixed = embedded, None  # where `mixed` is given, x is still to be added to it
        for layer in self._layers:
            if layer.block is not None:
                x = x if mixed is None else self._weighted_sum(x, mixed, 1.0, 1.0)
                normed, _ = layer.norm.add(layer.block(x, embedded, ctx), x)
            elif mixed is None:
                normed = layer.norm(x)
            else:
                normed, x = layer.norm.add(mixed, x)
            mixed = layer.mamba(normed, ctx)
        assert mixed is not None
        return self._norm.add(mixed, x)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size], rows of what `forward` returns -> [N, vocab_size] float32."""
        return self._head(hidden)

    @staticmethod
    def state_specs(args: Zamba2Args, block_size: int, cache_dtype: str, dtype: str) -> dict[int, StateSpec | SharedState]:
        """Memory id -> what it is, layer by layer: keys and values of a use of a block come before the state that follows it."""
        types = StateTypes(block_size, cache_dtype, dtype, args.hidden_size)
        mamba, attention = args.mamba.states(types), args.block.attention.states(types)
        return dict(enumerate(spec for uses_block in args.layers for spec in ((*attention, *mamba) if uses_block else mamba)))
