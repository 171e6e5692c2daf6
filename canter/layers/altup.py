"""AltUp (arXiv 2301.13310): several residual streams, of which a layer computes one and predicts the others; and what its layers have
besides: a low-rank branch (LAuReL, arXiv 2411.07501) and gates that are mostly cut to zero."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from canter.core.errors import UnsupportedModelError
from canter.layers.build import Build
from canter.layers.linear import Linear, gate_up_linear
from canter.layers.norm import NormArgs, RMSNorm


@dataclass(frozen=True, slots=True)
class AltUpArgs:
    """`active`: the stream that layers compute. `scales_output`: what layers add to the others is scaled by learned factors."""

    num_streams: int
    active: int
    scales_output: bool


class Streams:
    """[T, hidden_size] -> [T, num_streams * hidden_size], and back."""

    def __init__(self, build: Build, args: AltUpArgs, hidden_size: int) -> None:
        self._sizes = (hidden_size,) * args.num_streams
        parts = {str(i): hidden_size for i in range(args.num_streams - 1)}
        self._split = Linear(build.at("split"), hidden_size, sum(parts.values()), parts=parts)
        self._join = [Linear(build.at(f"join.{i}"), hidden_size, hidden_size) for i in range(args.num_streams - 1)]
        self._match_streams: Callable[..., Tensor] = build.op("match_streams")
        self._weighted_sum: Callable[..., Tensor] = build.op("weighted_sum")

    def split(self, x: Tensor) -> Tensor:
        return self._match_streams(x, self._split(x))

    def join(self, streams: Tensor) -> Tensor:
        """The mean of the first stream and of maps of the others."""
        first, *others = streams.split_with_sizes(self._sizes, 1)
        share = 1 / len(self._sizes)
        total, count = first, share
        for linear, other in zip(self._join, others, strict=True):
            _, matched = self._match_streams(first, linear(other)).split_with_sizes(self._sizes[:2], 1)
            total, count = self._weighted_sum(total, matched, count, share), 1.0
        return total


class AltUp:
    """What one layer does to the streams before and after it computes the active one."""

    def __init__(self, build: Build, args: AltUpArgs, hidden_size: int, norm: NormArgs) -> None:
        count = args.num_streams
        self._sizes, self._active, self._hidden_size = (hidden_size,) * count, args.active, hidden_size
        self._router_norm = RMSNorm(build.at("router_norm"), hidden_size, norm)
        self._router = Linear(build.at("router"), hidden_size, count)
        self._prediction = Linear(build.at("prediction"), count, count * count)
        self._correction = Linear(build.at("correction"), count, count)
        self._output_scale = build.parameter("output_scale", (hidden_size,), dtype=torch.float32)
        self._scales_output = args.scales_output
        self._softcap: Callable[..., Tensor] = build.op("softcap")
        self._mix_streams: Callable[..., Tensor] = build.op("mix_streams")
        self._add_to_streams: Callable[..., Tensor] = build.op("add_to_streams")
        self._weighted_sum: Callable[..., Tensor] = build.op("weighted_sum")
        self._scale_columns: Callable[..., Tensor] = build.op("scale_columns")

    def active(self, streams: Tensor) -> Tensor:
        """The stream that layers compute: [T, hidden_size]."""
        return streams.split_with_sizes(self._sizes, 1)[self._active]

    def predict(self, streams: Tensor) -> Tensor:
        """The streams as they are expected behind the layer."""
        return self._mix_streams(streams, self._prediction(self._routed(self.active(streams))), 1 / self._hidden_size)

    def correct(self, predicted: Tensor, computed: Tensor) -> Tensor:
        """The predicted streams, given what the layer `computed` of the active one."""
        innovation = self._weighted_sum(computed, self.active(predicted), 1.0, -1.0)
        return self._add_to_streams(predicted, innovation, self._correction(self._routed(computed)), 1 / self._hidden_size, 1.0)

    def scaled(self, active: Tensor) -> Tensor:
        """The active stream as the layer's own input is added to it."""
        return self._scale_columns(active, self._output_scale) if self._scales_output else active

    def add_to_others(self, streams: Tensor, row: Tensor) -> Tensor:
        """The streams with [T, hidden_size] added to all but the first."""
        return self._add_to_streams(streams, row, None, 1.0, 0.0, 1)

    def _routed(self, x: Tensor) -> Tensor:
        """tanh(router(norm(x)) / hidden_size) times hidden_size, which the caller divides by: a soft cap is both in one."""
        normed = self._router_norm(x.view(-1, 1, self._hidden_size)).view(-1, self._hidden_size)
        return self._softcap(self._router(normed), float(self._hidden_size))


class LowRankBranch:
    """x + norm(right(left(x)))."""

    def __init__(self, build: Build, hidden_size: int, rank: int, norm: NormArgs) -> None:
        self._left = Linear(build.at("left"), hidden_size, rank)
        self._right = Linear(build.at("right"), rank, hidden_size)
        self._norm = RMSNorm(build.at("norm"), hidden_size, norm)
        self._weighted_sum: Callable[..., Tensor] = build.op("weighted_sum")

    def __call__(self, x: Tensor) -> Tensor:
        return self._weighted_sum(x, self._norm(self._right(self._left(x))), 1.0, 1.0)


class SparseMLP:
    """down(gelu(gate) * up) where about `sparsity` of the gates are cut to zero: those below so many deviations from their mean."""

    def __init__(self, build: Build, hidden_size: int, intermediate_size: int, activation: str, sparsity: float) -> None:
        if activation != "gelu_pytorch_tanh":
            raise UnsupportedModelError(f"Activation {activation!r} of sparse gates is not supported, only 'gelu_pytorch_tanh' is.")
        self._sizes = (intermediate_size,) * 2
        self._gate_up = gate_up_linear(build.at("gate_up"), hidden_size, intermediate_size, bias=False)
        self._down = Linear(build.at("down"), intermediate_size, hidden_size)
        self._deviations = NormalDist().inv_cdf(sparsity)
        self._sparse_relu: Callable[..., Tensor] = build.op("sparse_relu")
        self._activate: Callable[..., Tensor] = build.op("gelu_tanh_mul")

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self._gate_up(x).split_with_sizes(self._sizes, 1)
        return self._down(self._activate(up, self._sparse_relu(gate, self._deviations)))
