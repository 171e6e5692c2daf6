"""How weights are stored and computed: one file a scheme. A scheme turns the tensors that a checkpoint holds for one matrix into
`MatrixWeights`, which fill a packed matrix or a dense tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from canter.core.errors import UnsupportedModelError
from canter.layers.quant.awq import AWQ
from canter.layers.quant.compressed_tensors import CompressedTensors
from canter.layers.quant.gptq import GPTQ
from canter.layers.quant.weights import MatrixWeights, PackOptions, Scheme, SelectedRows, StoredWeights

__all__ = ["MatrixWeights", "PackOptions", "Scheme", "SelectedRows", "StoredWeights", "open_scheme"]

_SCHEMES: Mapping[str, Callable[[Mapping[str, Any]], Scheme]] = {"awq": AWQ, "gptq": GPTQ, "compressed-tensors": CompressedTensors}


def open_scheme(method: str, config: Mapping[str, Any]) -> Scheme:
    """The scheme of a checkpoint's `quantization_config`. Raises `UnsupportedModelError` for a method, or options of one, that
    Canter can't compute, saying what it can."""
    scheme = _SCHEMES.get(method)
    if scheme is None:
        raise UnsupportedModelError(f"Checkpoints quantised with {method!r} are not supported; supported are {', '.join(_SCHEMES)}.")
    return scheme(config)
