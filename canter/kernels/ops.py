"""The op table: every op once, with its meaning (a torch reference), the inputs it is tried on and the tolerance it is held to.

Implementations register with `register_impl`; `dispatch.bind` chooses among them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from canter.kernels import inputs, recurrent_inputs
from canter.kernels.reference import activation, attention, linear, norm, recurrent, rotary, sampling, step, streams

Kernel = Callable[..., Any]
Rejects = Callable[..., str | None]
"""`rejects(device, dtype, **facts)`: why an implementation can't serve, or None when it can."""
Record = Callable[..., Any]
"""An op's call, its first argument a `recorder.Symbol`: records an instruction and returns symbols of the results."""
Tolerance = Mapping[torch.dtype, tuple[float, float]]
"""Relative and absolute tolerance by type of the activations."""


@dataclass(frozen=True, slots=True)
class Op:
    """One op. `mutates` holds the positions of arguments that it changes in place, where they are given."""

    name: str
    reference: Kernel
    inputs: Callable[[torch.Generator, torch.dtype], list[inputs.Case]]
    tolerance: Tolerance
    mutates: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Impl:
    """One implementation of an op. The greatest priority that does not reject wins; references have priority 0.

    `record` puts a call into a step program; None: a model that is given this implementation runs eagerly.
    """

    op: str
    provider: str
    priority: int
    fn: Kernel
    rejects: Rejects
    record: Record | None = None


def _tolerance(float32: tuple[float, float]) -> Tolerance:
    """Half types get one unit in the last place: both sides compute in float32 and may round to neighbours."""
    return {torch.float32: float32, torch.bfloat16: (2**-7, max(1e-3, float32[1])), torch.float16: (2**-10, max(1e-3, float32[1]))}


def _all(tolerance: tuple[float, float]) -> Tolerance:
    """For ops whose tensors have one type, whatever the activations have."""
    return dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), tolerance)


_EXACT = _all((0.0, 0.0))

OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op("linear", linear.linear, inputs.linear_inputs, _tolerance((1e-4, 1e-5))),
        Op("head_linear", linear.head_linear, inputs.head_linear_inputs, _tolerance((1e-4, 1e-5))),
        Op("known_ids", linear.known_ids, inputs.known_ids_inputs, _EXACT),
        Op("embedding", linear.embedding, inputs.embedding_inputs, _EXACT),
        Op("rms_norm", norm.rms_norm, inputs.rms_norm_inputs, _tolerance((1e-5, 1e-7))),
        Op("add_rms_norm", norm.add_rms_norm, inputs.add_rms_norm_inputs, _tolerance((1e-5, 1e-7))),
        Op("layer_norm", norm.layer_norm, inputs.layer_norm_inputs, _tolerance((1e-4, 1e-5))),
        Op("sparse_relu", norm.sparse_relu, inputs.sparse_relu_inputs, _tolerance((1e-4, 1e-5))),
        Op("mix_streams", streams.mix_streams, inputs.mix_streams_inputs, _tolerance((1e-4, 1e-5))),
        Op("add_to_streams", streams.add_to_streams, inputs.add_to_streams_inputs, _tolerance((1e-5, 1e-6))),
        Op("match_streams", streams.match_streams, inputs.match_streams_inputs, _tolerance((1e-5, 1e-6))),
        Op("concat", streams.concat, inputs.concat_inputs, _EXACT),
        Op("silu_and_mul", activation.silu_and_mul, inputs.gated_inputs, _tolerance((1e-5, 1e-7))),
        Op("gelu_tanh_and_mul", activation.gelu_tanh_and_mul, inputs.gated_inputs, _tolerance((1e-4, 1e-6))),
        Op("gelu_and_mul", activation.gelu_and_mul, inputs.gated_inputs, _tolerance((1e-3, 1e-5))),
        Op("silu", activation.silu, inputs.elementwise_inputs, _tolerance((1e-5, 1e-7))),
        Op("relu_squared", activation.relu_squared, inputs.elementwise_inputs, _tolerance((1e-6, 0.0))),
        Op("scale_columns", activation.scale_columns, inputs.scale_columns_inputs, _tolerance((1e-6, 0.0))),
        Op("sigmoid_mul", activation.sigmoid_mul, inputs.pair_inputs, _tolerance((1e-5, 1e-7))),
        Op("silu_mul", activation.silu_mul, inputs.pair_inputs, _tolerance((1e-5, 1e-7))),
        Op("gelu", activation.gelu, inputs.elementwise_inputs, _tolerance((1e-4, 1e-6))),
        Op("gelu_tanh", activation.gelu_tanh, inputs.elementwise_inputs, _tolerance((1e-4, 1e-6))),
        Op("gelu_tanh_mul", activation.gelu_tanh_mul, inputs.pair_inputs, _tolerance((1e-4, 1e-6))),
        Op("weighted_sum", activation.weighted_sum, inputs.weighted_sum_inputs, _tolerance((1e-5, 1e-5))),
        Op("softcap", activation.softcap, inputs.softcap_inputs, _tolerance((1e-5, 1e-7))),
        Op("rotary", rotary.rotary, inputs.rotary_inputs, _tolerance((1e-5, 1e-6)), mutates=(0, 1)),
        Op("write_kv", attention.write_kv, inputs.write_kv_inputs, _EXACT, mutates=(2, 3, 5, 6)),
        Op("paged_attention", attention.paged_attention, inputs.attention_inputs, _tolerance((1e-4, 1e-5))),
        Op("causal_conv", recurrent.causal_conv, recurrent_inputs.causal_conv_inputs, _tolerance((1e-5, 1e-5)), mutates=(3,)),
        Op("ssd_scan", recurrent.ssd_scan, recurrent_inputs.ssd_scan_inputs, _tolerance((1e-4, 1e-4)), mutates=(7,)),
        Op("selective_scan", recurrent.selective_scan, recurrent_inputs.selective_scan_inputs, _tolerance((1e-4, 1e-4)), mutates=(8,)),
        Op("gated_delta", recurrent.gated_delta, recurrent_inputs.gated_delta_inputs, _tolerance((1e-4, 1e-4)), mutates=(5,)),
        Op("l2_norm", recurrent.l2_norm, recurrent_inputs.l2_norm_inputs, _all((1e-5, 1e-7))),
        Op("decay_gate", recurrent.decay_gate, recurrent_inputs.decay_gate_inputs, _all((1e-5, 1e-7))),
        Op("gated_rms_norm", recurrent.gated_rms_norm, recurrent_inputs.gated_rms_norm_inputs, _tolerance((1e-5, 1e-6))),
        Op("gather_step", step.gather_step, inputs.gather_step_inputs, _EXACT, mutates=(4,)),
        Op("advance_step", step.advance_step, inputs.advance_step_inputs, _EXACT, mutates=(5, 6, 7)),
        Op("greedy_tokens", sampling.greedy_tokens, inputs.greedy_tokens_inputs, _EXACT),
        Op("draw_tokens", sampling.draw_tokens, inputs.draw_tokens_inputs, _EXACT),
        Op("keep_tokens", sampling.keep_tokens, inputs.keep_tokens_inputs, _EXACT, mutates=(0,)),
        Op("allow_tokens", sampling.allow_tokens, inputs.allow_tokens_inputs, _EXACT, mutates=(0,)),
        Op("mask_tokens", sampling.mask_tokens, inputs.mask_tokens_inputs, _EXACT, mutates=(0,)),
        Op("add_to_tokens", sampling.add_to_tokens, inputs.add_to_tokens_inputs, _EXACT, mutates=(0,)),
        Op("forbid_words", sampling.forbid_words, inputs.forbid_words_inputs, _EXACT, mutates=(0,)),
        Op("penalize", sampling.penalize, inputs.penalize_inputs, _EXACT, mutates=(0,)),
        Op("token_logprobs", sampling.token_logprobs, inputs.token_logprobs_inputs, _all((1e-6, 1e-5))),
    )
}

_impls: dict[str, list[Impl]] = {}


def register_impl(op: str, provider: str, priority: int, fn: Kernel, rejects: Rejects, record: Record | None = None) -> None:
    """Add an implementation of an op to the table. Raises `KeyError` for an op that is not in the table."""
    entries = _impls.setdefault(OPS[op].name, [])
    entries.append(Impl(op, provider, priority, fn, rejects, record))
    entries.sort(key=lambda impl: -impl.priority)


def implementations(op: str) -> tuple[Impl, ...]:
    """Implementations of an op, best first, its reference last."""
    reference = Impl(op, "reference", 0, OPS[op].reference, lambda *args, **facts: None)
    return (*_impls.get(op, ()), reference)
