"""AWQ (arXiv 2306.00978), the "gemm" layout: 4-bit codes, eight neighbouring outputs in a word, in an order of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from canter.checkpoint.tensors import StoredTensor
from canter.core.errors import CheckpointError, UnsupportedModelError
from canter.layers.quant.codes import FourBit, expect_shape, floats_of, integers, nibbles, number, require_groups
from canter.layers.quant.weights import MatrixWeights

_ROLES = ("qweight", "qzeros", "scales")
_FIELD_OF_COLUMN = (0, 4, 1, 5, 2, 6, 3, 7)


class AWQ:
    """Per matrix: `qweight` int32 [K, N/8], `qzeros` int32 [K/g, N/8], `scales` [K/g, N]; weight = (code - zero) * scale."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        bits = number(config, "bits" if "bits" in config else "w_bit", 4)
        version = str(config.get("version", "gemm")).lower()
        if bits != 4 or version != "gemm" or config.get("zero_point", True) is not True:
            raise UnsupportedModelError(
                f"quantization_config: awq with {bits} bits, version {version!r}, zero_point {config.get('zero_point', True)!r} is not "
                "supported; supported are 4 bits, version 'gemm', with zero points."
            )

    def member(self, name: str) -> tuple[str, str] | None:
        stem, _, role = name.rpartition(".")
        return (f"{stem}.weight", role) if role in _ROLES else None

    def weights(self, name: str, members: Mapping[str, StoredTensor]) -> MatrixWeights:
        missing = [role for role in _ROLES if role not in members]
        if missing:
            raise CheckpointError(f"Weight {name!r}: the checkpoint lacks its {', '.join(missing)}.")
        words, zeros, scales = members["qweight"], members["qzeros"], members["scales"]
        if len(words.shape) != 2 or len(scales.shape) != 2:
            raise CheckpointError(f"Tensor {words.name!r}: expected two dimensions, found shape {list(words.shape)}.")
        width, outputs, groups = words.shape[0], words.shape[1] * 8, scales.shape[0]
        require_groups(name, width, groups)
        expect_shape(scales, (groups, outputs))
        expect_shape(zeros, (groups, outputs // 8))
        packed = integers(words, "int32")
        zero_rows = _columns(integers(zeros, "int32"))
        return FourBit(
            (outputs, width),
            lambda begin, end: _rows(packed, begin, end),
            floats_of(scales).t().contiguous(),
            zero_rows.t().contiguous(),
        )

    def passes_over(self, stored: StoredTensor) -> bool:
        return False


def _columns(words: Tensor) -> Tensor:
    """[K, W] words to uint8 [K, 8 W] codes, outputs in order."""
    fields: Tensor = nibbles(words).unflatten(-1, (-1, 8))[..., list(_FIELD_OF_COLUMN)]
    return fields.flatten(-2)


def _rows(words: Tensor, begin: int, end: int) -> Tensor:
    """Outputs [begin, end), whole words of them, as uint8 [end - begin, K]."""
    return _columns(words[:, begin // 8 : -(-end // 8)]).t().contiguous()
