"""The native rows of the op table."""

from __future__ import annotations

from typing import Any

import torch

from canter.kernels.native import attention, dense, packed, record, record_recurrent, recurrent, sampling, step
from canter.kernels.native.attention import CACHE_TYPE_CODES
from canter.kernels.native.layout import TYPE_CODES
from canter.kernels.ops import register_impl
from canter.kernels.packed import register_packer

PRIORITY = 10


def rejects(device: str, dtype: torch.dtype, **facts: Any) -> str | None:
    """Why the compiled module can't serve: it runs on the CPU, in float32 and bfloat16."""
    if torch.device(device).type != "cpu":
        return f"runs on the CPU, not on {device}"
    for name, value in {"dtype": dtype, **facts}.items():
        if name == "cache_dtype":
            if value not in CACHE_TYPE_CODES:
                known = ", ".join(str(dtype).removeprefix("torch.") for dtype in CACHE_TYPE_CODES)
                return f"cache_dtype {str(value).removeprefix('torch.')} is none of {known}"
        elif name.endswith("dtype") and value not in TYPE_CODES:
            return f"{name} {str(value).removeprefix('torch.')} is neither float32 nor bfloat16"
    return None


def register() -> None:
    """Add every native implementation to the op table."""
    register_packer(packed)
    for fn in (
        dense.linear,
        dense.known_ids,
        dense.embedding,
        dense.rms_norm,
        dense.add_rms_norm,
        dense.silu_and_mul,
        dense.gelu_tanh_and_mul,
        dense.gelu_and_mul,
        dense.silu,
        dense.relu_squared,
        dense.scale_columns,
        dense.sigmoid_mul,
        dense.silu_mul,
        dense.weighted_sum,
        dense.gelu,
        dense.gelu_tanh,
        dense.gelu_tanh_mul,
        dense.layer_norm,
        dense.sparse_relu,
        dense.mix_streams,
        dense.add_to_streams,
        dense.match_streams,
        dense.concat,
        dense.head_linear,
        dense.softcap,
        attention.rotary,
        attention.write_kv,
        attention.paged_attention,
        recurrent.causal_conv,
        recurrent.ssd_scan,
        recurrent.selective_scan,
        recurrent.gated_delta,
        recurrent.l2_norm,
        recurrent.decay_gate,
        recurrent.gated_rms_norm,
        step.gather_step,
        step.advance_step,
        sampling.greedy_tokens,
        sampling.draw_tokens,
        sampling.keep_tokens,
        sampling.allow_tokens,
        sampling.mask_tokens,
        sampling.add_to_tokens,
        sampling.forbid_words,
        sampling.penalize,
        sampling.token_logprobs,
    ):
        recorded = getattr(record, fn.__name__, None) or getattr(record_recurrent, fn.__name__, None)
        register_impl(fn.__name__, "native", PRIORITY, fn, rejects, recorded)
