"""The compiled module: addresses (`Tensor.data_ptr()`) and sizes in, results written through them. See csrc/bindings.cpp.

Types are 0 for float32 and 1 for bfloat16. Only `canter.kernels.native` calls it.
"""

def isas() -> list[str]: ...
def isa() -> str: ...
def set_isa(name: str) -> None: ...
def default_num_threads() -> int: ...
def num_threads() -> int: ...
def set_num_threads(count: int) -> None: ...
def quant_types() -> list[str]: ...
def linear(
    x: int, x_type: int, weight: int, weight_type: int, bias: int, bias_type: int, out: int, rows: int, outputs: int, width: int, /
) -> None: ...
def formats() -> list[str]: ...
def width_multiple(format: str) -> int: ...
def packed_bytes(format: str, outputs: int, width: int, group: int) -> int: ...

class Matrix:
    """Parts of a packed matrix: (format, address, outputs, width, group). The caller keeps their memory alive."""

    def __init__(self, parts: list[tuple[str, int, int, int, int]]) -> None: ...
    @property
    def outputs(self) -> int: ...
    @property
    def width(self) -> int: ...

def pack_floats(
    format: str, source: int, source_type: int, row_stride: int, row_index: int, outputs: int, width: int, dest: int, /
) -> None: ...
def pack_blocks(format: str, source: int, row_bytes: int, row_index: int, outputs: int, width: int, dest: int, /) -> None: ...
def pack_i8(codes: int, scales: int, row_index: int, outputs: int, width: int, dest: int, /) -> None: ...
def pack_w4(codes: int, scales: int, zeros: int, row_index: int, outputs: int, width: int, group: int, dest: int, /) -> None: ...
def unpack_rows(matrix: Matrix, begin: int, end: int, out: int, /) -> None: ...
def embedding_packed(matrix: Matrix, ids: int, out: int, out_type: int, rows: int, scale: float, /) -> None: ...
def embedding_blocks(
    type_name: str, base: int, row_bytes: int, ids: int, out: int, out_type: int, rows: int, vocab: int, width: int, scale: float, /
) -> None: ...
def matmul(
    matrix: Matrix, x: int, x_type: int, x_stride: int, bias: int, bias_type: int, out: int, out_type: int, out_stride: int, rows: int, /
) -> None: ...
def embedding(ids: int, weight: int, out: int, type: int, rows: int, vocab: int, width: int, scale: float, /) -> None: ...
def rms_norm(
    x: int,
    residual: int,
    weight: int,
    out: int,
    total: int,
    type: int,
    weight_type: int,
    rows: int,
    width: int,
    eps: float,
    plus_one: bool,
    cast_first: bool,
    /,
) -> None: ...
def gated(gate_up: int, out: int, type: int, activation: int, rows: int, width: int, /) -> None: ...
def softcap(x: int, out: int, type: int, count: int, cap: float, /) -> None: ...
def rotary(
    q: int,
    k: int,
    type: int,
    q_stride: int,
    k_stride: int,
    positions: int,
    cos_sin: int,
    rows: int,
    q_heads: int,
    k_heads: int,
    head_dim: int,
    rot_dim: int,
    max_pos: int,
    /,
) -> None: ...
def write_kv(
    k: int,
    v: int,
    type: int,
    k_stride: int,
    v_stride: int,
    k_cache: int,
    v_cache: int,
    cache_type: int,
    k_block_stride: int,
    v_block_stride: int,
    slots: int,
    rows: int,
    heads: int,
    head_dim: int,
    num_blocks: int,
    block_size: int,
    /,
) -> None: ...
def paged_attention(
    q: int,
    type: int,
    q_stride: int,
    k_cache: int,
    v_cache: int,
    cache_type: int,
    k_block_stride: int,
    v_block_stride: int,
    block_table: int,
    query_start_loc: int,
    seq_lens: int,
    out: int,
    rows: int,
    requests: int,
    table_width: int,
    q_heads: int,
    k_heads: int,
    head_dim: int,
    num_blocks: int,
    block_size: int,
    window: int,
    scale: float,
    softcap: float,
    /,
) -> None: ...
def dequantize(type_name: str, data: int, num_bytes: int, num_elements: int, out: int, out_type: int, /) -> None: ...
