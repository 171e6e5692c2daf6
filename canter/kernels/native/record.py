"""Recorders of the native ops: each checks a call on symbols as the op itself checks tensors, and adds an instruction.

Addresses of weights, tables and caches are bound as they are at the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from canter import _native
from canter.kernels.attention_plan import AttentionPlan
from canter.kernels.native.attention import cache_arguments, keys_hold_values
from canter.kernels.native.dense import MAX_STREAMS, POINTWISE, has_even_pieces, head_strides
from canter.kernels.native.layout import TYPE_CODES
from canter.kernels.packed import BlockRows, PackedMatrix
from canter.kernels.recorder import Buffer, Recorder, RecordError, Symbol

Place = Callable[[Symbol], Any]

_SILU, _GELU_TANH, _GELU = 0, 1, 2


def _require(holds: bool, op: str, expected: str) -> None:
    if not holds:
        raise RecordError(f"{op} with other than {expected}")


def _code(op: str, x: Symbol | Tensor) -> int:
    code = TYPE_CODES.get(x.dtype)
    if code is None or x.device.type != "cpu":
        raise RecordError(f"{op} on {x.dtype} on {x.device}")
    return code


def _has_packed_heads(x: Symbol) -> bool:
    """Whether each row's heads [H, D] lie in one run."""
    return len(x.tail) == 2 and x.strides[2] == 1 and (x.strides[1] == x.tail[1] or x.tail[0] == 1)


def _is_metadata(x: Symbol, dtype: torch.dtype) -> bool:
    return isinstance(x, Symbol) and not isinstance(x.source, Buffer) and x.dtype == dtype and x.is_contiguous()


def _bind_matrix(recorder: Recorder, matrix: PackedMatrix) -> Any:
    for part in matrix.parts:
        recorder.bind(part.data)
    return matrix.native


def linear(x: Symbol, weight: Tensor | PackedMatrix, bias: Tensor | None) -> Symbol:
    """[rows, K] -> [rows, N]."""
    if isinstance(weight, Tensor):
        raise RecordError("linear with weights that are not packed")
    outputs, width = weight.shape
    fits = (
        x.tail == (width,) and (width == 1 or x.strides[1] == 1) and (bias is None or (bias.shape == (outputs,) and bias.is_contiguous()))
    )
    _require(fits, "linear", "x [T, K] in packed rows and contiguous bias [N] or None")
    recorder = x.recorder
    out = recorder.new(x.dtype, outputs)
    matrix, code = _bind_matrix(recorder, weight), _code("linear", x)
    bias_at, bias_type = (0, 0) if bias is None else (recorder.bind(bias), _code("linear", bias))

    def emit(program: Any, at: Place) -> None:
        program.matmul(matrix, at(x), code, x.strides[0], bias_at, bias_type, at(out), code)

    recorder.add("linear", [x], [out], emit, weight, by_row=True)
    return out


def known_ids(token_ids: Symbol, limit: int) -> Symbol:
    """[rows] ids -> the same."""
    _require(_is_metadata(token_ids, torch.int64) and token_ids.tail == (), "known_ids", "int64 ids [T] of the step")
    out = token_ids.recorder.new(torch.int64)

    def emit(program: Any, at: Place) -> None:
        program.known_ids(at(token_ids), at(out), limit)

    token_ids.recorder.add("known_ids", [token_ids], [out], emit)
    return out


def embedding(
    token_ids: Symbol, weight: Tensor | PackedMatrix | BlockRows, scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> Symbol:
    """[rows] ids -> [rows, H]."""
    if isinstance(weight, Tensor):
        raise RecordError("embedding with a table that is not packed")
    _require(token_ids.dtype == torch.int64 and token_ids.tail == () and token_ids.is_contiguous(), "embedding", "contiguous int64 ids [T]")
    recorder = token_ids.recorder
    vocab, width = weight.shape
    if scale != 1.0:
        scale = torch.tensor(scale, dtype=dtype).item()
    out = recorder.new(dtype, width)
    code = _code("embedding", out)
    if isinstance(weight, PackedMatrix):
        matrix = _bind_matrix(recorder, weight)

        def emit(program: Any, at: Place) -> None:
            program.embedding_packed(matrix, at(token_ids), at(out), code, scale)

    else:
        name, data = weight.type_name, recorder.bind_array(weight.data)
        table = weight.row_bytes, vocab, width, weight.is_mapped

        def emit(program: Any, at: Place) -> None:
            program.embedding_blocks(name, data, *table, at(token_ids), at(out), code, scale)

    recorder.add("embedding", [token_ids], [out], emit)
    return out


def rms_norm(x: Symbol, weight: Tensor, eps: float, plus_one: bool = False, cast_first: bool = True) -> Symbol:
    """[rows, H], or heads [rows, heads, H] that may lie in a fused projection -> the same, contiguous."""
    fits = (len(x.tail) == 1 and x.is_contiguous()) or _has_packed_heads(x)
    _require(fits and weight.shape == x.tail[-1:] and weight.is_contiguous(), "rms_norm", "packed x [T, H] or [T, heads, H] and weight [H]")
    heads, width = (1, *x.tail)[-2:]
    out = x.recorder.new(x.dtype, *x.tail)
    types, factor = (_code("rms_norm", x), _code("rms_norm", weight)), x.recorder.bind(weight)

    def emit(program: Any, at: Place) -> None:
        program.rms_norm(at(x), x.strides[0], factor, at(out), *types, heads, width, eps, plus_one, cast_first)

    x.recorder.add("rms_norm", [x], [out], emit, by_row=True)
    return out


def add_rms_norm(
    x: Symbol, residual: Symbol, weight: Tensor, eps: float, plus_one: bool = False, cast_first: bool = True
) -> tuple[Symbol, Symbol]:
    """Two [rows, H] -> (normed, sum)."""
    fits = len(x.tail) == 1 and residual.tail == x.tail and residual.dtype == x.dtype and x.is_contiguous() and residual.is_contiguous()
    fits = fits and weight.shape == x.tail and weight.is_contiguous()
    _require(fits, "add_rms_norm", "contiguous x and residual [T, H] of one type and weight [H]")
    (width,) = x.tail
    out, total = x.recorder.new(x.dtype, width), x.recorder.new(x.dtype, width)
    types, factor = (_code("add_rms_norm", x), _code("add_rms_norm", weight)), x.recorder.bind(weight)

    def emit(program: Any, at: Place) -> None:
        program.add_rms_norm(at(x), at(residual), factor, at(out), at(total), *types, width, eps, plus_one, cast_first)

    x.recorder.add("add_rms_norm", [x, residual], [out, total], emit, by_row=True)
    return out, total


def layer_norm(x: Symbol, weight: Tensor, bias: Tensor | None, eps: float) -> Symbol:
    """[rows, H] -> the same."""
    fits = len(x.tail) == 1 and x.is_contiguous() and weight.shape == x.tail and weight.is_contiguous()
    fits = fits and (bias is None or (bias.shape == x.tail and bias.dtype == weight.dtype and bias.is_contiguous()))
    _require(fits, "layer_norm", "contiguous x [T, H], weight [H] and bias [H] of its type or None")
    out = x.recorder.new(x.dtype, *x.tail)
    types, factors = (_code("layer_norm", x), _code("layer_norm", weight)), x.recorder.bind(weight)
    bias_at = 0 if bias is None else x.recorder.bind(bias)

    def emit(program: Any, at: Place) -> None:
        program.layer_norm(at(x), factors, bias_at, at(out), *types, x.tail[0], eps)

    x.recorder.add("layer_norm", [x], [out], emit)
    return out


def _has_packed_rows(x: Symbol) -> bool:
    """Whether each row [N] lies in one run."""
    return len(x.tail) == 1 and (x.strides[1] == 1 or x.tail[0] == 1)


def sparse_relu(x: Symbol, deviations: float) -> Symbol:
    """[rows, N] -> the same, contiguous."""
    _require(_has_packed_rows(x), "sparse_relu", "x [T, N] in packed rows")
    out, code = x.recorder.new(x.dtype, *x.tail), _code("sparse_relu", x)

    def emit(program: Any, at: Place) -> None:
        program.sparse_relu(at(x), at(out), code, x.tail[0], x.strides[0], deviations)

    x.recorder.add("sparse_relu", [x], [out], emit)
    return out


def mix_streams(x: Symbol, coefs: Symbol, scale: float) -> Symbol:
    """[rows, S * H] -> the same."""
    fits = len(x.tail) == len(coefs.tail) == 1 and x.is_contiguous() and coefs.is_contiguous() and x.dtype == coefs.dtype
    streams = math.isqrt(coefs.tail[0])
    fits = fits and 1 <= streams <= MAX_STREAMS and streams * streams == coefs.tail[0] and x.tail[0] % streams == 0
    _require(fits, "mix_streams", "contiguous x [T, S * H] and coefs [T, S * S] of one type")
    out, code = x.recorder.new(x.dtype, *x.tail), _code("mix_streams", x)

    def emit(program: Any, at: Place) -> None:
        program.mix_streams(at(x), at(coefs), at(out), code, streams, x.tail[0] // streams, scale)

    x.recorder.add("mix_streams", [x, coefs], [out], emit)
    return out


def add_to_streams(x: Symbol, row: Symbol, coefs: Symbol | None, scale: float = 1.0, offset: float = 0.0, first: int = 0) -> Symbol:
    """[rows, S * H] -> the same."""
    fits = len(x.tail) == 1 and x.is_contiguous() and _has_packed_rows(row) and x.dtype == row.dtype
    streams = x.tail[0] // row.tail[0]
    fits = fits and x.tail[0] == streams * row.tail[0] and 1 <= streams <= MAX_STREAMS
    fits = fits and (coefs is None or (coefs.tail == (streams,) and coefs.is_contiguous() and coefs.dtype == x.dtype))
    _require(fits, "add_to_streams", "contiguous x [T, S * H], row [T, H] in packed rows and coefs [T, S] or None of one type")
    out, code = x.recorder.new(x.dtype, *x.tail), _code("add_to_streams", x)
    sizes = streams, row.tail[0], row.strides[0]

    def emit(program: Any, at: Place) -> None:
        factors = None if coefs is None else at(coefs)
        program.add_to_streams(at(x), at(row), factors, at(out), code, *sizes, scale, offset, first)

    x.recorder.add("add_to_streams", [x, row] if coefs is None else [x, row, coefs], [out], emit)
    return out


def match_streams(row: Symbol, x: Symbol) -> Symbol:
    """[rows, H] and [rows, N * H] -> [rows, (N + 1) * H]."""
    fits = len(x.tail) == 1 and x.is_contiguous() and _has_packed_rows(row) and x.dtype == row.dtype and x.tail[0] % row.tail[0] == 0
    _require(fits, "match_streams", "row [T, H] in packed rows and contiguous x [T, N * H] of one type")
    width = row.tail[0]
    out, code = x.recorder.new(x.dtype, x.tail[0] + width), _code("match_streams", x)
    sizes = out.tail[0] // width, width, row.strides[0]

    def emit(program: Any, at: Place) -> None:
        program.match_streams(at(row), at(x), at(out), code, *sizes)

    x.recorder.add("match_streams", [row, x], [out], emit)
    return out


def concat(x: Symbol, y: Symbol) -> Symbol:
    """[rows, N] and [rows, M] -> [rows, N + M]; or of each head, [rows, H, N] and [rows, H, M]."""
    fits = len(x.tail) in (1, 2) and x.tail[:-1] == y.tail[:-1] and x.dtype == y.dtype
    fits = fits and has_even_pieces(x.shape, x.strides) and has_even_pieces(y.shape, y.strides)
    _require(fits, "concat", "x [T, N] and y [T, M], or x [T, H, N] and y [T, H, M], of one type, equally far apart")
    out, size = x.recorder.new(x.dtype, *x.tail[:-1], x.tail[-1] + y.tail[-1]), x.dtype.itemsize
    widths = x.tail[-1] * size, y.tail[-1] * size, x.strides[-2] * size, y.strides[-2] * size
    heads = math.prod(x.tail[:-1])

    def emit(program: Any, at: Place) -> None:
        program.concat(at(x), at(y), at(out), heads, *widths)

    x.recorder.add("concat", [x, y], [out], emit, by_row=True)
    return out


def head_linear(x: Symbol, weight: Tensor) -> Symbol:
    """[rows, H, K] -> [rows, H, N]."""
    fits = len(x.tail) == 2 and x.tail == (weight.shape[0], weight.shape[2]) and x.strides[2] == 1 and weight.dtype == x.dtype
    strides = head_strides(weight)
    if not fits or strides is None:
        raise RecordError("head_linear with other than x [T, H, K] and weight [H, N, K] of one type in packed rows")
    out = x.recorder.new(x.dtype, x.tail[0], weight.shape[1])
    code, matrices = _code("head_linear", x), x.recorder.bind(weight)
    sizes = *x.tail, weight.shape[1], x.strides[0], x.strides[1], *strides

    def emit(program: Any, at: Place) -> None:
        program.head_linear(at(x), matrices, at(out), code, *sizes)

    x.recorder.add("head_linear", [x], [out], emit, by_row=True)
    return out


def _gated(op: str, gate_up: Symbol, activation: int) -> Symbol:
    fits = len(gate_up.tail) == 1 and gate_up.tail[0] % 2 == 0 and gate_up.is_contiguous()
    _require(fits, op, "contiguous [T, 2 I]")
    width = gate_up.tail[0] // 2
    out = gate_up.recorder.new(gate_up.dtype, width)
    code = _code(op, gate_up)

    def emit(program: Any, at: Place) -> None:
        program.gated(op, at(gate_up), at(out), code, activation, width)

    gate_up.recorder.add(op, [gate_up], [out], emit, by_row=True)
    return out


def silu_and_mul(gate_up: Symbol) -> Symbol:
    """[rows, 2 I] -> [rows, I]."""
    return _gated("silu_and_mul", gate_up, _SILU)


def gelu_tanh_and_mul(gate_up: Symbol) -> Symbol:
    """[rows, 2 I] -> [rows, I]."""
    return _gated("gelu_tanh_and_mul", gate_up, _GELU_TANH)


def gelu_and_mul(gate_up: Symbol) -> Symbol:
    """[rows, 2 I] -> [rows, I]."""
    return _gated("gelu_and_mul", gate_up, _GELU)


def _pointwise(op: str, x: Symbol, y: Symbol | None = None, factors: Tensor | None = None, a: float = 1.0, b: float = 1.0) -> Symbol:
    other = x if y is None else y
    fits = (
        len(x.tail) == 1 and other.tail == x.tail and other.dtype == x.dtype and (x.tail[0] == 1 or x.strides[1] == other.strides[1] == 1)
    )
    fits = fits and (factors is None or (factors.shape == x.tail and factors.dtype == torch.float32 and factors.is_contiguous()))
    _require(fits, op, "x and y [T, N] of one type in packed rows, float32 factors [N]")
    out, code = x.recorder.new(x.dtype, *x.tail), _code(op, x)
    factors_at = 0 if factors is None else x.recorder.bind(factors)
    sizes = x.tail[0], x.strides[0], other.strides[0]

    def emit(program: Any, at: Place) -> None:
        program.pointwise(op, POINTWISE[op], at(x), at(other), factors_at, at(out), code, *sizes, a, b)

    x.recorder.add(op, [x] if y is None else [x, y], [out], emit)
    return out


def silu(x: Symbol) -> Symbol:
    """[rows, N] -> the same, contiguous."""
    return _pointwise("silu", x)


def relu_squared(x: Symbol) -> Symbol:
    """[rows, N] -> the same, contiguous."""
    return _pointwise("relu_squared", x)


def scale_columns(x: Symbol, factors: Tensor) -> Symbol:
    """[rows, N] -> the same, contiguous."""
    return _pointwise("scale_columns", x, factors=factors)


def sigmoid_mul(x: Symbol, gate: Symbol) -> Symbol:
    """Two [rows, N] -> the same, contiguous."""
    return _pointwise("sigmoid_mul", x, gate)


def silu_mul(x: Symbol, gate: Symbol) -> Symbol:
    """Two [rows, N] -> the same, contiguous."""
    return _pointwise("silu_mul", x, gate)


def gelu(x: Symbol) -> Symbol:
    """[rows, N] -> the same, contiguous."""
    return _pointwise("gelu", x)


def gelu_tanh(x: Symbol) -> Symbol:
    """[rows, N] -> the same, contiguous."""
    return _pointwise("gelu_tanh", x)


def gelu_tanh_mul(x: Symbol, gate: Symbol) -> Symbol:
    """Two [rows, N] -> the same, contiguous."""
    return _pointwise("gelu_tanh_mul", x, gate)


def weighted_sum(x: Symbol, y: Symbol, a: float, b: float) -> Symbol:
    """Two [rows, N] -> the same, contiguous."""
    return _pointwise("weighted_sum", x, y, a=a, b=b)


def softcap(x: Symbol, cap: float) -> Symbol:
    """[rows, N] -> the same."""
    _require(len(x.tail) == 1 and x.is_contiguous(), "softcap", "contiguous [T, N]")
    out = x.recorder.new(x.dtype, *x.tail)
    code = _code("softcap", x)

    def emit(program: Any, at: Place) -> None:
        program.softcap(at(x), at(out), code, x.tail[0], cap)

    x.recorder.add("softcap", [x], [out], emit, by_row=True)
    return out


def convert(x: Symbol, dtype: torch.dtype) -> Symbol:
    """[rows, N] bfloat16 -> float32: what `Symbol.to` records."""
    fits = x.dtype == torch.bfloat16 and dtype == torch.float32 and len(x.tail) == 1 and x.is_contiguous()
    _require(fits, "conversion", "contiguous [T, N] from bfloat16 to float32")
    out = x.recorder.new(dtype, *x.tail)

    def emit(program: Any, at: Place) -> None:
        program.widen(at(x), at(out), x.tail[0])

    x.recorder.add("widen", [x], [out], emit, by_row=True)
    return out


def gather(source: Symbol, count: str, indices: Symbol) -> Symbol:
    """Rows `indices` of a matrix [count, N] that comes with the run; `count` names the slot of its number of rows."""
    fits = not isinstance(source.source, Buffer) and source.is_contiguous() and _is_metadata(indices, torch.int64)
    _require(fits, "gather", "rows of a contiguous matrix that is given")
    recorder = indices.recorder
    out = recorder.new(source.dtype, *source.tail)
    row_bytes, count_slot = source.strides[0] * source.dtype.itemsize, recorder.slot(count).index

    def emit(program: Any, at: Place) -> None:
        program.gather(at(source), count_slot, at(indices), at(out), row_bytes)

    recorder.add("gather", [source, indices], [out], emit)
    return out


def rotary(q: Symbol, k: Symbol, positions: Symbol, cos_sin: Tensor, rot_dim: int, interleaved: bool = False) -> None:
    """In place, in q and k [rows, heads, D]."""
    fits = _has_packed_heads(q) and _has_packed_heads(k) and q.tail[1] == k.tail[1] and q.dtype == k.dtype
    fits = fits and _is_metadata(positions, torch.int64) and positions.tail == ()
    fits = fits and cos_sin.dim() == 2 and cos_sin.shape[1] == rot_dim <= q.tail[1] and rot_dim % 2 == 0
    fits = fits and cos_sin.dtype == torch.float32 and cos_sin.is_contiguous()
    _require(fits, "rotary", "packed heads of q and k, int64 positions of the step and a float32 table")
    sizes = q.tail[0], k.tail[0], q.tail[1], rot_dim, cos_sin.shape[0]
    code, table = _code("rotary", q), q.recorder.bind(cos_sin)

    def emit(program: Any, at: Place) -> None:
        program.rotary(at(q), at(k), code, q.strides[0], k.strides[0], at(positions), table, *sizes, interleaved)

    q.recorder.add("rotary", [q, k, positions], [q, k], emit)


def _cache_arguments(
    op: str, recorder: Recorder, k_cache: Tensor, v_cache: Tensor, heads: int, head_dim: int, k_scale: Tensor | None, v_scale: Tensor | None
) -> tuple[int, ...]:
    """What an instruction binds of a layer's cache."""
    try:
        arguments = cache_arguments(op, k_cache, v_cache, heads, head_dim, k_scale, v_scale)
    except ValueError as error:
        raise RecordError(str(error)) from None
    for tensor in (k_cache, v_cache, k_scale, v_scale):
        if tensor is not None:
            recorder.bind(tensor)
    return arguments


def write_kv(
    k: Symbol,
    v: Symbol,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Symbol,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """k [rows, heads, D] and v [rows, heads, Dv] into the caches."""
    fits = _has_packed_heads(k) and _has_packed_heads(v) and k.tail[0] == v.tail[0] and k.dtype == v.dtype
    fits = fits and v.tail[1] == v_cache.shape[-1]
    _require(fits and _is_metadata(slot_mapping, torch.int64), "write_kv", "packed heads of k and v, int64 slots of the step")
    heads, head_dim = k.tail
    caches = _cache_arguments("write_kv", k.recorder, k_cache, v_cache, heads, head_dim, k_scale, v_scale)
    if keys_hold_values(k_cache, v_cache):
        _require(v.tail[1] == 0, "write_kv", "nothing as values where keys hold them")
        k, v = v, k  # they lie as values do elsewhere
    new = _code("write_kv", k), k.strides[0], v.strides[0]
    sizes = heads, k.tail[1], v.tail[1], k_cache.shape[0], v_cache.shape[2]

    def emit(program: Any, at: Place) -> None:
        program.write_kv(at(k), at(v), *new, *caches, at(slot_mapping), *sizes)

    k.recorder.add("write_kv", [k, v, slot_mapping], [], emit)


def _plan(recorder: Recorder, plan: AttentionPlan, shape: tuple[int, ...], prompt_lens: Any) -> Any:
    """The native plan of a state group for layers of one shape (Hq, Hk, D, Dv, NB, BS, window, chunk), made once a step.

    The width of the table comes in the slot `<table's name>.width`, the number of requests in `num_reqs`.
    """
    key = (*shape, prompt_lens is not None)
    made = plan.made.get(key)
    if made is not None:
        return made
    symbols: tuple[Any, ...] = plan.block_table, plan.query_start_loc, plan.seq_lens
    table, starts, lengths = symbols
    if prompt_lens is not None:
        _require(shape[-1] == 0, "paged_attention", "prompt_lens, and no chunks")
        symbols = *symbols, prompt_lens
    _require(all(_is_metadata(x, torch.int32) for x in symbols), "paged_attention", "int32 metadata of the step")
    native = plan.made[key] = _native.AttentionPlan()
    counts = recorder.slot("num_reqs").index, recorder.slot(f"{table.name}.width").index

    def emit(program: Any, at: Place) -> None:
        given = at(table), at(starts), at(lengths), None if prompt_lens is None else at(prompt_lens)
        program.attention_plan(native, *given, *counts, *shape)

    recorder.add("attention_plan", symbols, [], emit)
    return native


def paged_attention(
    q: Symbol,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Symbol,
    query_start_loc: Symbol,
    seq_lens: Symbol,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    plan: AttentionPlan | None = None,
    chunk: int = 0,
    prompt_lens: Symbol | None = None,
    slopes: Tensor | None = None,
) -> Symbol:
    """q [rows, heads, D] -> [rows, heads, Dv], contiguous."""
    _require(_has_packed_heads(q) and v_cache.dim() == 4 and q.tail[0] % v_cache.shape[1] == 0, "paged_attention", "packed heads of q")
    heads, head_dim = q.tail
    num_blocks, k_heads, block_size, value_dim = v_cache.shape
    recorder = q.recorder
    caches = _cache_arguments("paged_attention", recorder, k_cache, v_cache, k_heads, head_dim, k_scale, v_scale)
    given: Any = block_table, query_start_loc, seq_lens
    shape = heads, k_heads, head_dim, value_dim, num_blocks, block_size, window, chunk
    native = _plan(recorder, plan or AttentionPlan(*given), shape, prompt_lens)
    for x in (sinks, slopes):
        fits = x is None or (x.shape == (heads,) and x.dtype == torch.float32 and x.is_contiguous())
        _require(fits, "paged_attention", "contiguous float32 sinks and slopes [Hq]")
    by_head = [0 if x is None else recorder.bind(x) for x in (sinks, slopes)]
    out = recorder.new(q.dtype, heads, value_dim)
    code, one_cache = _code("paged_attention", q), keys_hold_values(k_cache, v_cache)

    def emit(program: Any, at: Place) -> None:
        program.paged_attention(native, at(q), code, q.strides[0], *caches, *by_head, at(out), scale, softcap, one_cache)

    recorder.add("paged_attention", [q], [out], emit)
    return out
