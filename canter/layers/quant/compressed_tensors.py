"""compressed-tensors checkpoints: int8 weights with int8 activations ("int-quantized"), and 4-bit weights ("pack-quantized")."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from canter.checkpoint.tensors import StoredTensor
from canter.core.errors import CheckpointError, UnsupportedModelError
from canter.layers.quant.codes import EightBit, FourBit, expect_shape, floats_of, groups_of, integers, nibbles, require_groups
from canter.layers.quant.weights import MatrixWeights, StoredWeights

_ROLES = ("weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
_IGNORED = ("input_scale", "input_zero_point", "output_scale", "output_zero_point", "k_scale", "v_scale", "q_scale")
_SUPPORTED = (
    "'int-quantized' with 8 bits and symmetric scales per channel or tensor, 'pack-quantized' with 4 bits and scales per group or channel"
)
_SYMMETRIC_ZERO = 8


class CompressedTensors:
    """Which matrices are quantised, and how, is read from the tensors themselves; the configuration must allow only what is supported.

    "int-quantized": `weight` int8 [N, K], `weight_scale` [N, 1] or one for all. "pack-quantized": `weight_packed` int32 [N, K/8]
    low nibble first, `weight_scale` [N, K/g], `weight_shape`, perhaps `weight_zero_point` int32 [N/8, K/g] packed along N.
    Scales of activations are those of each row, as everywhere here, even where the checkpoint has fixed ones.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping) or not groups:
            raise CheckpointError("quantization_config: key 'config_groups': expected an object, found none.")
        for name in ("sparsity_config", "transform_config"):
            if config.get(name) and config[name].get("format") != "dense":
                what = f"compressed-tensors with {name}"
                raise UnsupportedModelError(f"quantization_config: {what} is not supported; supported are {_SUPPORTED}.")
        for group in groups.values():
            _check_group(group, str(group.get("format") or config.get("format")))

    def member(self, name: str) -> tuple[str, str] | None:
        stem, _, role = name.rpartition(".")
        return (f"{stem}.weight", role) if role in _ROLES else None

    def weights(self, name: str, members: Mapping[str, StoredTensor]) -> MatrixWeights:
        if set(members) == {"weight"}:
            return StoredWeights(members["weight"])
        codes = members.get("weight_packed") or members.get("weight")
        scale = members.get("weight_scale")
        if codes is None or scale is None:
            raise CheckpointError(f"Weight {name!r}: expected its codes and weight_scale, found {', '.join(members)}.")
        return _four_bit(name, codes, scale, members) if "weight_packed" in members else _eight_bit(codes, scale, members)

    def passes_over(self, stored: StoredTensor) -> bool:
        return stored.name.rpartition(".")[2] in _IGNORED


def _check_group(group: Mapping[str, Any], layout: str) -> None:
    weights = group.get("weights") or {}
    bits, kind, strategy = weights.get("num_bits"), weights.get("type", "int"), weights.get("strategy")
    int8 = layout == "int-quantized" and bits == 8 and strategy in ("channel", "tensor") and weights.get("symmetric", True)
    int4 = layout == "pack-quantized" and bits == 4 and strategy in ("group", "channel")
    if kind != "int" or not (int8 or int4):
        raise UnsupportedModelError(
            f"quantization_config: compressed-tensors format {layout!r} with {bits} bits of {kind}, strategy {strategy!r}, symmetric "
            f"{weights.get('symmetric', True)!r} is not supported; supported are {_SUPPORTED}."
        )


def _eight_bit(codes: StoredTensor, scale: StoredTensor, members: Mapping[str, StoredTensor]) -> MatrixWeights:
    if len(codes.shape) != 2:
        raise CheckpointError(f"Tensor {codes.name!r}: expected two dimensions, found shape {list(codes.shape)}.")
    if "weight_zero_point" in members and integers(members["weight_zero_point"], "int8").any():
        raise UnsupportedModelError(f"Tensor {members['weight_zero_point'].name!r}: int8 weights with zero points are not supported.")
    scales = floats_of(scale).flatten()
    if scales.numel() not in (1, codes.shape[0]):
        expect_shape(scale, (codes.shape[0], 1))
    return EightBit(integers(codes, "int8"), scales.expand(codes.shape[0]).contiguous())


def _four_bit(name: str, codes: StoredTensor, scale: StoredTensor, members: Mapping[str, StoredTensor]) -> MatrixWeights:
    if len(codes.shape) != 2 or len(scale.shape) != 2:
        raise CheckpointError(f"Tensor {codes.name!r}: expected two dimensions, found shape {list(codes.shape)}.")
    outputs, width = codes.shape[0], codes.shape[1] * 8
    if "weight_shape" in members:
        outputs, width = (int(size) for size in integers(members["weight_shape"], "int64", "int32"))
    groups = scale.shape[1]
    require_groups(name, width, groups)
    expect_shape(codes, (outputs, -(-width // 8)))
    expect_shape(scale, (outputs, groups))
    packed = integers(codes, "int32")
    if "weight_zero_point" in members:
        stored = members["weight_zero_point"]
        expect_shape(stored, (-(-outputs // 8), groups))
        zeros = nibbles(integers(stored, "int32").t()).t()[:outputs].contiguous()
    else:
        zeros = torch.full((outputs, groups), _SYMMETRIC_ZERO, dtype=torch.uint8)
    group_of = groups_of(members["weight_g_idx"], width, groups) if "weight_g_idx" in members else None

    def rows(begin: int, end: int) -> Tensor:
        return nibbles(packed[begin:end])[:, :width].contiguous()

    return FourBit((outputs, width), rows, floats_of(scale), zeros, group_of)
