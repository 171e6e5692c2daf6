"""Native recurrent layers. Meaning: `canter.kernels.reference.recurrent`."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from canter import _native
from canter.kernels.native.layout import has_packed_blocks, require, type_code
from canter.kernels.recurrent_plan import RecurrentPlan

MAX_TAPS = 8
MAX_STATE_ROWS = 256


class Placed(NamedTuple):
    """A tensor as the compiled module takes it; what was copied for that must live until the call has ended."""

    tensor: Tensor | None
    address: int
    stride: int


NOTHING = Placed(None, 0, 0)


def placed(x: Tensor | None, dtype: torch.dtype | None = None) -> Placed:
    """Rows in one run each, any distance apart, as views into a fused projection are; otherwise a contiguous copy."""
    if x is None:
        return NOTHING
    if dtype is not None and x.dtype != dtype:
        x = x.to(dtype)
    if not has_packed_blocks(x):
        x = x.contiguous()
    return Placed(x, x.data_ptr(), x.stride(0) if x.shape[0] > 1 else math.prod(x.shape[1:]))


def floats(x: Tensor | None) -> Placed:
    """A parameter as dense float32."""
    return NOTHING if x is None else placed(x.float().contiguous())


def native_plan(plan: RecurrentPlan) -> _native.RecurrentPlan:
    """Raises `ValueError` for tensors that do not fit each other."""
    starts, ends, reads, writes = plan.tensors
    fits = all(t.dtype == torch.int32 and t.dim() == 1 and t.is_contiguous() and t.device.type == "cpu" for t in plan.tensors)
    fits = fits and starts.shape[0] == reads.shape[0] + 1 and ends.shape == writes.shape
    require(
        fits and int(starts[-1]) == ends.shape[0], "recurrent plan", "int32 starts [R + 1], ends [S], reads [R], writes [S]", *plan.tensors
    )
    return _native.RecurrentPlan(starts.data_ptr(), ends.data_ptr(), reads.data_ptr(), writes.data_ptr(), plan.num_requests)


def _require_state(op: str, state: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    fits = state.shape[1:] == shape and state.dtype == dtype and state.is_contiguous() and state.device.type == "cpu"
    require(fits, op, f"a contiguous state [slots, {', '.join(map(str, shape))}] of {dtype}", state)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    plan: RecurrentPlan,
    silu: bool = False,
    gate_in: Tensor | None = None,
    gate_out: Tensor | None = None,
) -> Tensor:
    """As the reference, for 2 to 8 taps."""
    rows, channels = x.shape
    taps = weight.shape[0]
    fits = weight.shape == (taps, channels) and 2 <= taps <= MAX_TAPS and (bias is None or bias.shape == (channels,))
    fits = fits and all(g is None or (g.shape == x.shape and g.dtype == x.dtype) for g in (gate_in, gate_out))
    require(fits, "causal_conv", "x and gates [T, C] of one type, weight [2 to 8, C] and bias [C]", x, weight, bias, gate_in, gate_out)
    _require_state("causal_conv", state, (taps - 1, channels), x.dtype)
    out = torch.empty((rows, channels), dtype=x.dtype)
    inputs = placed(x), placed(gate_in), placed(gate_out)
    factors = floats(weight), floats(bias)
    addresses = inputs[0].address, inputs[1].address, inputs[2].address
    strides = inputs[0].stride, inputs[1].stride, inputs[2].stride
    parameters = factors[0].address, factors[1].address
    sizes = rows, state.shape[0], channels, taps
    code = type_code("causal_conv", x)
    _native.causal_conv(native_plan(plan), *addresses, code, *strides, *parameters, state.data_ptr(), out.data_ptr(), *sizes, silu)
    return out


def ssd_scan(
    x: Tensor,
    dt: Tensor | None,
    dt_bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    state: Tensor,
    plan: RecurrentPlan,
    dt_min: float = 0.0,
    dt_max: float = float("inf"),
) -> Tensor:
    """As the reference, for states of at most 256 rows."""
    rows, heads, width = x.shape
    groups, depth = b.shape[1:]
    fits = b.shape == c.shape == (rows, groups, depth) and x.dtype == b.dtype == c.dtype and heads % groups == 0 and depth <= MAX_STATE_ROWS
    fits = fits and (dt is None or dt.shape == (rows, heads)) and all(p is None or p.shape == (heads,) for p in (a, d, dt_bias))
    require(fits, "ssd_scan", "x [T, H, P], dt [T, H], b and c [T, G, N <= 256], a, d and dt_bias [H]", x, dt, b, c, a, d, dt_bias)
    _require_state("ssd_scan", state, (heads, depth, width), torch.float32)
    out = torch.empty((rows, heads, width), dtype=x.dtype)
    inputs = placed(x), placed(b), placed(c)
    widths, factors = placed(dt), (floats(dt_bias), floats(a), floats(d))
    addresses = inputs[0].address, inputs[1].address, inputs[2].address
    strides = inputs[0].stride, inputs[1].stride, inputs[2].stride
    steps = widths.address, type_code("ssd_scan", x if dt is None else dt), widths.stride
    sizes = rows, state.shape[0], heads, groups, depth, width
    parameters = factors[0].address, factors[1].address, factors[2].address
    code = type_code("ssd_scan", x)
    places = state.data_ptr(), out.data_ptr()
    _native.ssd_scan(native_plan(plan), *addresses, code, *strides, *steps, *parameters, *places, *sizes, dt_min, dt_max)
    return out


def selective_scan(
    x: Tensor,
    dt: Tensor,
    dt_bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    gate: Tensor | None,
    state: Tensor,
    plan: RecurrentPlan,
) -> Tensor:
    """As the reference, for states of at most 256 rows."""
    rows, width = x.shape
    depth = a.shape[0]
    fits = dt.shape == x.shape and (gate is None or gate.shape == x.shape) and b.shape == c.shape == (rows, depth)
    fits = fits and all(t is None or t.dtype == x.dtype for t in (dt, b, c, gate)) and depth <= MAX_STATE_ROWS
    fits = fits and a.shape == (depth, width) and all(p is None or p.shape == (width,) for p in (d, dt_bias))
    expected = "x, dt and gate [T, I] and b and c [T, N <= 256] of one type, a [N, I], d and dt_bias [I]"
    require(fits, "selective_scan", expected, x, dt, gate, b, c, a, d, dt_bias)
    _require_state("selective_scan", state, (depth, width), torch.float32)
    out = torch.empty((rows, width), dtype=x.dtype)
    inputs = placed(x), placed(dt), placed(b), placed(c), placed(gate)
    factors = floats(dt_bias), floats(a), floats(d)
    addresses = inputs[0].address, inputs[1].address, inputs[2].address, inputs[3].address, inputs[4].address
    strides = inputs[0].stride, inputs[1].stride, inputs[2].stride, inputs[3].stride, inputs[4].stride
    parameters = factors[0].address, factors[1].address, factors[2].address
    code = type_code("selective_scan", x)
    places = state.data_ptr(), out.data_ptr()
    _native.selective_scan(native_plan(plan), *addresses, code, *strides, *parameters, *places, rows, state.shape[0], depth, width)
    return out


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, plan: RecurrentPlan, beta_scale: float = 1.0
) -> Tensor:
    """As the reference, for states of at most 256 rows."""
    rows, heads, width = v.shape
    groups, depth = q.shape[1:]
    fits = q.shape == k.shape == (rows, groups, depth) and heads % groups == 0 and depth <= MAX_STATE_ROWS
    fits = fits and q.dtype == k.dtype == decay.dtype == torch.float32
    fits = fits and decay.shape in ((rows, heads, 1), (rows, heads, depth)) and beta.shape == (rows, heads)
    expected = "float32 q and k [T, G, K <= 256], v [T, H, V], float32 decay [T, H, 1 or K], beta [T, H]"
    require(fits, "gated_delta", expected, q, k, v, decay, beta)
    _require_state("gated_delta", state, (heads, depth, width), torch.float32)
    out = torch.empty((rows, heads, width), dtype=v.dtype)
    inputs = placed(q), placed(k), placed(v), placed(beta)
    stays = decay.contiguous()
    addresses = inputs[0].address, inputs[1].address, inputs[2].address, inputs[3].address
    strides = inputs[0].stride, inputs[1].stride, inputs[2].stride, inputs[3].stride
    codes = type_code("gated_delta", v), type_code("gated_delta", beta)
    sizes = rows, state.shape[0], heads, groups, depth, width
    each, places = decay.shape[2] == depth and depth > 1, (state.data_ptr(), out.data_ptr())
    _native.gated_delta(native_plan(plan), *addresses, stays.data_ptr(), *codes, *strides, *places, *sizes, each, beta_scale)
    return out


def l2_norm(x: Tensor, eps: float, scale: float = 1.0) -> Tensor:
    """As the reference."""
    rows, heads, width = x.shape
    out, source = torch.empty((rows, heads, width), dtype=torch.float32), placed(x)
    _native.l2_norm(source.address, out.data_ptr(), type_code("l2_norm", x), rows, heads, width, source.stride, eps, scale)
    return out


def decay_gate(x: Tensor, a: Tensor, bias: Tensor, lower_bound: float = 0.0) -> Tensor:
    """As the reference."""
    rows, heads, width = x.shape
    require(a.shape == (heads,) and bias.shape == (heads, width), "decay_gate", "x [T, H, D], a [H] and bias [H, D]", x, a, bias)
    out, source = torch.empty((rows, heads, width), dtype=torch.float32), placed(x)
    slopes, offsets = floats(a), floats(bias)
    sizes = rows, heads, width, source.stride
    code = type_code("decay_gate", x)
    _native.decay_gate(source.address, slopes.address, offsets.address, out.data_ptr(), code, *sizes, lower_bound)
    return out


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, gate_first: bool = False, sigmoid: bool = False
) -> Tensor:
    """As the reference."""
    rows, width = x.shape
    fits = gate.shape == x.shape and gate.dtype == x.dtype and 0 < group <= width and width % group == 0
    fits = fits and weight.shape in ((width,), (group,))
    require(fits, "gated_rms_norm", f"x and gate [T, W] of one type in groups of {group}, weight [W] or [{group}]", x, gate, weight)
    out = torch.empty((rows, width), dtype=x.dtype)
    source, factor, scale = placed(x), placed(gate), floats(weight)
    shared = weight.shape == (group,)
    addresses = source.address, factor.address, scale.address, out.data_ptr(), type_code("gated_rms_norm", x)
    _native.gated_rms_norm(*addresses, source.stride, factor.stride, rows, width, group, shared, gate_first, sigmoid, eps)
    return out
