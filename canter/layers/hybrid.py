"""Decoders whose layers are not all alike: a description lists the branches of every layer, and what each is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from canter.core.state_specs import SharedState, StateSpec
from canter.layers.build import Build
from canter.layers.context import StepContext
from canter.layers.embedding import Embedding, OutputHead
from canter.layers.norm import NormArgs, RMSNorm
from canter.layers.scale import make_scale
from canter.layers.state import StateTypes

Mixer = Callable[[Tensor, StepContext], Tensor]
"""[T, hidden_size] -> [T, hidden_size]."""
Branch = Callable[[Tensor, Tensor, StepContext], tuple[Tensor, Tensor]]


class MixerArgs(Protocol):
    """What a branch is made of: attention, a recurrent layer, a feed-forward, several of them side by side. Frozen and hashable."""

    def states(self, types: StateTypes) -> tuple[StateSpec | SharedState, ...]:
        """What it remembers: none, one, or several memories."""
        ...

    def make(self, build: Build, hidden_size: int, state_id: int) -> Mixer:
        """The layer. `state_id`: of its first memory; the others follow."""
        ...


@dataclass(frozen=True, slots=True)
class BranchArgs:
    """`x + factor * mixer(norm(x))`, or with `keeps` `keeps * norm(x) + factor * mixer(norm(x))`.

    Parameters are found under `name`, the norm's under `<name>_norm`.
    """

    name: str
    mixer: MixerArgs
    factor: float = 1.0
    keeps: float | None = None


@dataclass(frozen=True, slots=True)
class SideBySideArgs:
    """The sum of two or more mixers of the same input: (name, mixer, factor of its input, factor of its output)."""

    sides: tuple[tuple[str, MixerArgs, float, float], ...]

    def states(self, types: StateTypes) -> tuple[StateSpec | SharedState, ...]:
        return tuple(spec for _, mixer, _, _ in self.sides for spec in mixer.states(types))

    def make(self, build: Build, hidden_size: int, state_id: int) -> Mixer:
        return SideBySide(build, hidden_size, state_id, self)


class SideBySide:
    """[T, hidden_size] -> [T, hidden_size]."""

    def __init__(self, build: Build, hidden_size: int, state_id: int, args: SideBySideArgs) -> None:
        self._sides = []
        for name, mixer, factor_in, factor_out in args.sides:
            scale = make_scale(build, [(factor_in, hidden_size)])
            self._sides.append((scale, mixer.make(build.at(name), hidden_size, state_id), factor_out))
            state_id += num_states(mixer)
        self._weighted_sum: Callable[..., Tensor] = build.op("weighted_sum")

    def __call__(self, x: Tensor, ctx: StepContext) -> Tensor:
        (scale, mixer, factor), *others = self._sides
        total = mixer(x if scale is None else scale(x), ctx)
        for scale, mixer, other in others:
            total = self._weighted_sum(total, mixer(x if scale is None else scale(x), ctx), factor, other)
            factor = 1.0
        return total


def num_states(mixer: MixerArgs) -> int:
    """How many memories a mixer has."""
    return len(mixer.states(StateTypes(1, "float32", "float32", 1)))


@dataclass(frozen=True, slots=True)
class HybridArgs:
    """`layers`: the branches of each. `embed_factor` and `logit_factor` multiply embeddings and logits."""

    vocab_size: int
    hidden_size: int
    layers: tuple[tuple[BranchArgs, ...], ...]
    norm: NormArgs
    tied_output: bool
    embed_factor: float = 1.0
    logit_factor: float = 1.0

    @property
    def num_layers(self) -> int:
        return len(self.layers)


class HybridDecoder:
    """Token ids to hidden states to logits. The base of the families' models, which add how checkpoints name things."""

    def __init__(self, args: HybridArgs, build: Build) -> None:
        self.args = args
        self.parameters = build.parameters
        size = args.hidden_size
        self._embed = Embedding(build.at("embed"), args.vocab_size, size)
        self._embed_scale = make_scale(build, [(args.embed_factor, size)])
        norms: list[RMSNorm] = []
        mixers: list[tuple[Mixer, BranchArgs]] = []
        state_id = 0
        for i, branches in enumerate(args.layers):
            for branch in branches:
                place = build.at(f"layers.{i}")
                norms.append(RMSNorm(place.at(f"{branch.name}_norm"), size, args.norm))
                mixers.append((branch.mixer.make(place.at(branch.name), size, state_id), branch))
                state_id += num_states(branch.mixer)
        norms.append(RMSNorm(build.at("norm"), size, args.norm))
        self._first_norm = norms[0]
        self._branches = [_branch(build, mixer, branch, norm, size) for (mixer, branch), norm in zip(mixers, norms[1:], strict=True)]
        self._head = OutputHead(build.at("head"), args.vocab_size, size, self._embed if args.tied_output else None)
        self._logit_scale = make_scale(build, [(args.logit_factor, args.vocab_size)])

    def forward(self, token_ids: Tensor, ctx: StepContext) -> Tensor:
        """[T] int64 token ids -> [T, hidden_size], after the last norm. Writes the caches of `ctx`."""
        residual = self._embed(token_ids)
        if self._embed_scale is not None:
            residual = self._embed_scale(residual)
        normed = self._first_norm(residual)
        for branch in self._branches:
            normed, residual = branch(normed, residual, ctx)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size], rows of what `forward` returns -> [N, vocab_size] float32."""
        logits = self._head(hidden)
        return logits if self._logit_scale is None else self._logit_scale(logits)

    @staticmethod
    def state_specs(args: HybridArgs, block_size: int, cache_dtype: str, dtype: str) -> dict[int, StateSpec | SharedState]:
        """Memory id -> what it is, layer by layer. Needs no weights."""
        types = StateTypes(block_size, cache_dtype, dtype, args.hidden_size)
        return dict(enumerate(spec for branches in args.layers for branch in branches for spec in branch.mixer.states(types)))


def _branch(build: Build, mixer: Mixer, args: BranchArgs, next_norm: RMSNorm, hidden_size: int) -> Branch:
    """Takes and returns (norm(x), x), the returned norm being that of the next branch."""
    if args.keeps is not None:
        weighted_sum: Callable[..., Tensor] = build.op("weighted_sum")
        keeps, factor = args.keeps, args.factor

        def replace(normed: Tensor, residual: Tensor, ctx: StepContext) -> tuple[Tensor, Tensor]:
            total = weighted_sum(normed, mixer(normed, ctx), keeps, factor)
            return next_norm(total), total

        return replace
    scale = make_scale(build, [(args.factor, hidden_size)])
    if scale is None:
        return lambda normed, residual, ctx: next_norm.add(mixer(normed, ctx), residual)
    return lambda normed, residual, ctx: next_norm.add(scale(mixer(normed, ctx)), residual)
