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

MAX_TOP_LOGPROBS: int

def greedy_tokens(logits: int, scores: int, tokens: int, rows: int, vocab: int, /) -> None: ...
def draw_tokens(
    logits: int,
    temperature: int,
    top_k: int,
    top_p: int,
    log_min_p: int,
    seed_keys: int,
    positions: int,
    salts: int,
    scores: int,
    tokens: int,
    rows: int,
    vocab: int,
    stream_offset: int,
    /,
) -> None: ...
def keep_tokens(logits: int, top_k: int, top_p: int, log_min_p: int, rows: int, vocab: int, /) -> None: ...
def penalize(
    logits: int,
    lines: int,
    rows: int,
    counts: int,
    repetition: int,
    frequency: int,
    presence: int,
    draft_ids: int,
    draft_counts: int,
    count: int,
    vocab: int,
    drafts: int,
    in_prompt: int,
    /,
) -> None: ...
def token_logprobs(logits: int, chosen: int, ids: int, logprobs: int, ranks: int, rows: int, vocab: int, top: int, /) -> None: ...
def gather_step(
    token_ids: int,
    total_len: int,
    num_computed: int,
    table_drafts: int,
    width: int,
    max_drafts: int,
    max_rows: int,
    host: int,
    drafts: int,
    requests: int,
    out_ids: int,
    positions: int,
    logits_indices: int,
    logit_positions: int,
    logit_rows: int,
    query_start_loc: int,
    seq_lens: int,
    groups: list[tuple[int, int, int, int, int, int]],
    /,
) -> None: ...
def advance_step(
    token_ids: int,
    total_len: int,
    num_computed: int,
    width: int,
    host: int,
    sampled: int,
    inputs: int,
    accepted: int,
    num_accepted: int,
    requests: int,
    accepted_width: int,
    /,
) -> None: ...
