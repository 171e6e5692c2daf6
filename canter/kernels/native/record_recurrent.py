"""Recorders of the recurrent ops, as `record` has them for the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from canter import _native
from canter.kernels.native.layout import TYPE_CODES
from canter.kernels.native.recurrent import MAX_STATE_ROWS, MAX_TAPS
from canter.kernels.recorder import Buffer, Recorder, RecordError, Symbol
from canter.kernels.recurrent_plan import RecurrentPlan

NUM_REQUESTS = "num_reqs"
"""The slot that holds the number of requests of a step."""


def _require(holds: bool, op: str, expected: str) -> None:
    if not holds:
        raise RecordError(f"{op} with other than {expected}")


def _code(op: str, x: Symbol) -> int:
    code = TYPE_CODES.get(x.dtype)
    if code is None:
        raise RecordError(f"{op} on {x.dtype}")
    return code


def _has_packed_rows(x: Symbol) -> bool:
    expected = 1
    for size, stride in zip(x.tail[::-1], x.strides[:0:-1], strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _floats(recorder: Recorder, op: str, x: Tensor | None, *shape: int) -> int:
    if x is None:
        return 0
    _require(x.shape == shape and x.dtype == torch.float32 and x.is_contiguous(), op, f"a float32 parameter {list(shape)}")
    return recorder.bind(x)


def _state(recorder: Recorder, op: str, state: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> tuple[int, int]:
    fits = state.shape[1:] == shape and state.dtype == dtype and state.is_contiguous()
    _require(fits, op, f"a contiguous state [slots, {', '.join(map(str, shape))}] of {dtype}")
    return recorder.bind(state), state.shape[0]


class _Plan:
    """The plan's symbols, and how an instruction finds them."""

    def __init__(self, op: str, recorder: Recorder, plan: RecurrentPlan) -> None:
        self.symbols: tuple[Any, ...] = plan.tensors
        given = all(isinstance(x, Symbol) and not isinstance(x.source, Buffer) and x.dtype == torch.int32 for x in self.symbols)
        _require(given, op, "an int32 plan of the step")
        self._requests = recorder.slot(NUM_REQUESTS).index

    def native(self, at: Any) -> Any:
        starts, ends, reads, writes = self.symbols
        return _native.PlanOperands(at(starts), at(ends), at(reads), at(writes), self._requests)


def causal_conv(
    x: Symbol,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    plan: RecurrentPlan,
    silu: bool = False,
    gate_in: Symbol | None = None,
    gate_out: Symbol | None = None,
) -> Symbol:
    """[rows, C] -> the same, contiguous."""
    op, taps = "causal_conv", weight.shape[0]
    gates = [g for g in (gate_in, gate_out) if g is not None]
    fits = len(x.tail) == 1 and all(g.tail == x.tail and g.dtype == x.dtype and _has_packed_rows(g) for g in (x, *gates))
    _require(fits and 2 <= taps <= MAX_TAPS, op, "x and gates [T, C] of one type in packed rows, 2 to 8 taps")
    (channels,) = x.tail
    recorder, code = x.recorder, _code(op, x)
    factors = _floats(recorder, op, weight, taps, channels), _floats(recorder, op, bias, channels)
    place, slots = _state(recorder, op, state, taps - 1, channels, dtype=x.dtype)
    out, of = recorder.new(x.dtype, channels), _Plan(op, recorder, plan)
    strides = x.strides[0], *(0 if g is None else g.strides[0] for g in (gate_in, gate_out))

    def emit(program: Any, at: Any) -> None:
        inputs = at(x), None if gate_in is None else at(gate_in), None if gate_out is None else at(gate_out)
        program.causal_conv(of.native(at), *inputs, code, *strides, *factors, place, at(out), slots, channels, taps, silu)

    recorder.add(op, [x, *gates, *of.symbols], [out], emit)
    return out


def ssd_scan(
    x: Symbol,
    dt: Symbol | None,
    dt_bias: Tensor | None,
    a: Tensor,
    b: Symbol,
    c: Symbol,
    d: Tensor | None,
    state: Tensor,
    plan: RecurrentPlan,
    dt_min: float = 0.0,
    dt_max: float = float("inf"),
) -> Symbol:
    """[rows, H, P] -> the same, contiguous."""
    op = "ssd_scan"
    fits = len(x.tail) == len(b.tail) == 2 and b.tail == c.tail and x.dtype == b.dtype == c.dtype
    fits = fits and all(_has_packed_rows(y) for y in (x, b, c)) and x.tail[0] % b.tail[0] == 0 and b.tail[1] <= MAX_STATE_ROWS
    fits = fits and (dt is None or (dt.tail == x.tail[:1] and _has_packed_rows(dt)))
    _require(fits, op, "x [T, H, P], dt [T, H], b and c [T, G, N <= 256] in packed rows")
    (heads, width), (groups, depth) = x.tail, b.tail
    recorder, code = x.recorder, _code(op, x)
    factors = [_floats(recorder, op, p, heads) for p in (dt_bias, a, d)]
    place, slots = _state(recorder, op, state, heads, depth, width)
    out, of = recorder.new(x.dtype, heads, width), _Plan(op, recorder, plan)
    strides = x.strides[0], b.strides[0], c.strides[0]
    step = (code, 0) if dt is None else (_code(op, dt), dt.strides[0])
    sizes = slots, heads, groups, depth, width

    def emit(program: Any, at: Any) -> None:
        widths = None if dt is None else at(dt), *step
        inputs = at(x), at(b), at(c), code, *strides
        program.ssd_scan(of.native(at), *inputs, *widths, *factors, place, at(out), *sizes, dt_min, dt_max)

    recorder.add(op, [x, b, c, *([] if dt is None else [dt]), *of.symbols], [out], emit)
    return out


def selective_scan(
    x: Symbol,
    dt: Symbol,
    dt_bias: Tensor | None,
    a: Tensor,
    b: Symbol,
    c: Symbol,
    d: Tensor | None,
    gate: Symbol | None,
    state: Tensor,
    plan: RecurrentPlan,
) -> Symbol:
    """[rows, I] -> the same, contiguous."""
    op = "selective_scan"
    inputs = [x, dt, b, c, *([] if gate is None else [gate])]
    fits = all(len(y.tail) == 1 and y.dtype == x.dtype and _has_packed_rows(y) for y in inputs)
    fits = fits and dt.tail == x.tail and (gate is None or gate.tail == x.tail) and b.tail == c.tail and b.tail[0] <= MAX_STATE_ROWS
    _require(fits, op, "x, dt and gate [T, I], b and c [T, N <= 256] of one type in packed rows")
    (width,), (depth,) = x.tail, b.tail
    recorder, code = x.recorder, _code(op, x)
    factors = _floats(recorder, op, dt_bias, width), _floats(recorder, op, a, depth, width), _floats(recorder, op, d, width)
    place, slots = _state(recorder, op, state, depth, width)
    out, of = recorder.new(x.dtype, width), _Plan(op, recorder, plan)
    strides = *(y.strides[0] for y in (x, dt, b, c)), 0 if gate is None else gate.strides[0]

    def emit(program: Any, at: Any) -> None:
        places = at(x), at(dt), at(b), at(c), None if gate is None else at(gate)
        program.selective_scan(of.native(at), *places, code, *strides, *factors, place, at(out), slots, depth, width)

    recorder.add(op, [*inputs, *of.symbols], [out], emit)
    return out


def gated_delta(
    q: Symbol, k: Symbol, v: Symbol, decay: Symbol, beta: Symbol, state: Tensor, plan: RecurrentPlan, beta_scale: float = 1.0
) -> Symbol:
    """[rows, H, V] -> the same, contiguous."""
    op = "gated_delta"
    fits = len(q.tail) == len(v.tail) == 2 and q.tail == k.tail and v.tail[0] % q.tail[0] == 0 and q.tail[1] <= MAX_STATE_ROWS
    fits = fits and q.dtype == k.dtype == decay.dtype == torch.float32 and all(_has_packed_rows(y) for y in (q, k, v, beta))
    fits = fits and beta.tail == v.tail[:1] and decay.is_contiguous() and decay.tail in ((v.tail[0], 1), (v.tail[0], q.tail[1]))
    _require(fits, op, "float32 q and k [T, G, K <= 256], v [T, H, V], float32 decay [T, H, 1 or K], beta [T, H], in packed rows")
    (groups, depth), (heads, width) = q.tail, v.tail
    recorder, codes = v.recorder, (_code(op, v), _code(op, beta))
    place, slots = _state(recorder, op, state, heads, depth, width)
    out, of = recorder.new(v.dtype, heads, width), _Plan(op, recorder, plan)
    strides = q.strides[0], k.strides[0], v.strides[0], beta.strides[0]
    sizes = slots, heads, groups, depth, width
    each = decay.tail[1] == depth and depth > 1

    def emit(program: Any, at: Any) -> None:
        inputs = at(q), at(k), at(v), at(beta), at(decay)
        program.gated_delta(of.native(at), *inputs, *codes, *strides, place, at(out), *sizes, each, beta_scale)

    recorder.add(op, [q, k, v, decay, beta, *of.symbols], [out], emit)
    return out


def l2_norm(x: Symbol, eps: float, scale: float = 1.0) -> Symbol:
    """[rows, H, D] -> the same, contiguous float32."""
    _require(len(x.tail) == 2 and _has_packed_rows(x), "l2_norm", "packed heads [T, H, D]")
    heads, width = x.tail
    out, code = x.recorder.new(torch.float32, heads, width), _code("l2_norm", x)

    def emit(program: Any, at: Any) -> None:
        program.l2_norm(at(x), at(out), code, heads, width, x.strides[0], eps, scale)

    x.recorder.add("l2_norm", [x], [out], emit)
    return out


def decay_gate(x: Symbol, a: Tensor, bias: Tensor, lower_bound: float = 0.0) -> Symbol:
    """[rows, H, D] -> the same, contiguous float32."""
    _require(len(x.tail) == 2 and _has_packed_rows(x), "decay_gate", "packed heads [T, H, D]")
    heads, width = x.tail
    factors = _floats(x.recorder, "decay_gate", a, heads), _floats(x.recorder, "decay_gate", bias, heads, width)
    out, code = x.recorder.new(torch.float32, heads, width), _code("decay_gate", x)

    def emit(program: Any, at: Any) -> None:
        program.decay_gate(at(x), *factors, at(out), code, heads, width, x.strides[0], lower_bound)

    x.recorder.add("decay_gate", [x], [out], emit)
    return out


def gated_rms_norm(
    x: Symbol, gate: Symbol, weight: Tensor, eps: float, group: int, gate_first: bool = False, sigmoid: bool = False
) -> Symbol:
    """[rows, W] -> the same, contiguous."""
    op = "gated_rms_norm"
    fits = len(x.tail) == 1 and gate.tail == x.tail and gate.dtype == x.dtype and _has_packed_rows(x) and _has_packed_rows(gate)
    _require(fits and 0 < group <= x.tail[0] and x.tail[0] % group == 0, op, f"x and gate [T, W] of one type in groups of {group}")
    (width,) = x.tail
    shared = weight.shape == (group,)
    factor = _floats(x.recorder, op, weight, group if shared else width)
    out, code = x.recorder.new(x.dtype, width), _code(op, x)

    def emit(program: Any, at: Any) -> None:
        strides = x.strides[0], gate.strides[0]
        program.gated_rms_norm(at(x), at(gate), factor, at(out), code, *strides, width, group, shared, gate_first, sigmoid, eps)

    x.recorder.add(op, [x, gate], [out], emit)
    return out
