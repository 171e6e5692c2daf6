"""Canter: an LLM inference and serving engine.

`from canter import LLM, SamplingParams` is the offline API; `canter serve` is the server. `LLM` is loaded on first
use, so that importing a torch-free part of the package stays torch-free.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from canter.version import __version__

if TYPE_CHECKING:
    from canter.client.outputs import CompletionOutput, RequestOutput
    from canter.core.sampling_params import SamplingParams
    from canter.core.structured_outputs import StructuredOutputsParams
    from canter.llm import LLM, BeamSearchParams

_EXPORTS = {
    "LLM": "canter.llm",
    "BeamSearchParams": "canter.llm",
    "SamplingParams": "canter.core.sampling_params",
    "StructuredOutputsParams": "canter.core.structured_outputs",
    "RequestOutput": "canter.client.outputs",
    "CompletionOutput": "canter.client.outputs",
}

__all__ = ["LLM", "BeamSearchParams", "CompletionOutput", "RequestOutput", "SamplingParams", "StructuredOutputsParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'canter' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)
