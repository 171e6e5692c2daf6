"""The compiled module: addresses (`Tensor.data_ptr()`) and sizes in, results written through them. See csrc/bindings.cpp.

Types are 0 for float32 and 1 for bfloat16; of caches also 2 for fp8_e4m3 and 3 for int8 with a scale for each token and head.
Only `canter.kernels.native` calls it.
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
    k_block_bytes: int,
    v_block_bytes: int,
    k_scale: int,
    v_scale: int,
    k_scale_stride: int,
    v_scale_stride: int,
    slots: int,
    rows: int,
    heads: int,
    head_dim: int,
    num_blocks: int,
    block_size: int,
    /,
) -> None: ...

class AttentionPlan:
    """The tasks of one step's attention. It points into the arrays that it was made of."""

    num_tasks: int
    def make(
        self,
        block_table: int,
        query_start_loc: int,
        seq_lens: int,
        rows: int,
        requests: int,
        table_width: int,
        q_heads: int,
        k_heads: int,
        head_dim: int,
        num_blocks: int,
        block_size: int,
        window: int,
        /,
    ) -> None: ...

def paged_attention(
    plan: AttentionPlan,
    q: int,
    type: int,
    q_stride: int,
    k_cache: int,
    v_cache: int,
    cache_type: int,
    k_block_bytes: int,
    v_block_bytes: int,
    k_scale: int,
    v_scale: int,
    k_scale_stride: int,
    v_scale_stride: int,
    sinks: int,
    out: int,
    scale: float,
    softcap: float,
    /,
) -> None: ...
def dequantize(type_name: str, data: int, num_bytes: int, num_elements: int, out: int, out_type: int, /) -> None: ...
