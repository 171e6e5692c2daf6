"""GPTQ (arXiv 2210.17323) with 4 bits: codes of eight neighbouring inputs in a word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from canter.checkpoint.tensors import StoredTensor
from canter.core.errors import CheckpointError, UnsupportedModelError
from canter.core.logging import get_logger
from canter.layers.quant.codes import MAX_CODE, FourBit, expect_shape, floats_of, groups_of, integers, nibbles, number, require_groups
from canter.layers.quant.weights import MatrixWeights

logger = get_logger(__name__)

_ROLES = ("qweight", "qzeros", "scales", "g_idx")
_FORMATS = ("gptq", "gptq_v2")


class GPTQ:
    """Per matrix: `qweight` int32 [K/8, N], `qzeros` int32 [K/g, N/8], `scales` [K/g, N], perhaps `g_idx` int32 [K];
    weight = (code - zero) * scale. Format "gptq" stores zeros less one, "gptq_v2" as they are.

    Matrices whose groups are not neighbours (`desc_act`) have no kernel: they are dequantised when loaded.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        bits = number(config, "bits", 4)
        layout = str(config.get("checkpoint_format") or "gptq")
        rules = [rule for name, rule in (config.get("dynamic") or {}).items() if not name.startswith("-:")]
        mixed = any(number(rule, "bits", 4) != 4 for rule in rules if isinstance(rule, Mapping))
        if bits != 4 or layout not in _FORMATS or mixed:
            raise UnsupportedModelError(
                f"quantization_config: gptq with {'mixed' if mixed else bits} bits in checkpoint_format {layout!r} is not supported; "
                f"supported are 4 bits in {' and '.join(_FORMATS)}."
            )
        self._zero_offset = 1 if layout == "gptq" else 0
        self._told = False

    def member(self, name: str) -> tuple[str, str] | None:
        stem, _, role = name.rpartition(".")
        return (f"{stem}.weight", role) if role in _ROLES else None

    def weights(self, name: str, members: Mapping[str, StoredTensor]) -> MatrixWeights:
        missing = [role for role in _ROLES[:3] if role not in members]
        if missing:
            raise CheckpointError(f"Weight {name!r}: the checkpoint lacks its {', '.join(missing)}.")
        words, zeros, scales = members["qweight"], members["qzeros"], members["scales"]
        if len(words.shape) != 2 or len(scales.shape) != 2:
            raise CheckpointError(f"Tensor {words.name!r}: expected two dimensions, found shape {list(words.shape)}.")
        width, outputs, groups = words.shape[0] * 8, words.shape[1], scales.shape[0]
        require_groups(name, width, groups)
        expect_shape(scales, (groups, outputs))
        expect_shape(zeros, (groups, outputs // 8))
        group_of = groups_of(members["g_idx"], width, groups) if "g_idx" in members else None
        if group_of is not None and not self._told:
            logger.warning("Matrices whose groups are in activation order (desc_act) are dequantised: they are not computed as 4 bits.")
            self._told = True
        packed = integers(words, "int32")
        zero_rows = (nibbles(integers(zeros, "int32")) + self._zero_offset) & MAX_CODE
        return FourBit(
            (outputs, width),
            lambda begin, end: _rows(packed, begin, end),
            floats_of(scales).t().contiguous(),
            zero_rows.t().contiguous(),
            group_of,
        )

    def passes_over(self, stored: StoredTensor) -> bool:
        """Older quantisers stored a bias of zeros for every matrix."""
        return stored.name.endswith(".bias") and stored.block_type is not None and not floats_of(stored).any()


def _rows(words: Tensor, begin: int, end: int) -> Tensor:
    """Outputs [begin, end) as uint8 [end - begin, K]."""
    return nibbles(words[:, begin:end].t())
