"""The compiled module: addresses (`Tensor.data_ptr()`) and sizes in, results written through them. See csrc/bindings.cpp.

Types are 0 for float32 and 1 for bfloat16; of caches also 2 for fp8_e4m3 and 3 for int8 with a scale for each token and head.
Only `canter.kernels.native` calls it.
"""

from collections.abc import Sequence

def isas() -> list[str]: ...
def isa() -> str: ...
def set_isa(name: str) -> None: ...
def default_num_threads() -> int: ...
def num_threads() -> int: ...
def set_num_threads(count: int) -> None: ...
def quant_types() -> list[str]: ...
def read_bandwidth(num_bytes: int, threads: int, passes: int, /) -> float: ...
def peak_operations(kind: str, threads: int, /) -> float: ...
def formats() -> list[str]: ...
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
def known_ids(ids: int, out: int, rows: int, limit: int, /) -> None: ...
def embedding_packed(matrix: Matrix, ids: int, out: int, out_type: int, rows: int, scale: float, /) -> None: ...
def embedding_blocks(
    type_name: str, base: int, row_bytes: int, ids: int, out: int, out_type: int, rows: int, vocab: int, width: int, scale: float, /
) -> None: ...
def matmul(
    matrix: Matrix, x: int, x_type: int, x_stride: int, bias: int, bias_type: int, out: int, out_type: int, out_stride: int, rows: int, /
) -> None: ...
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
    group: int,
    x_stride: int,
    eps: float,
    plus_one: bool,
    cast_first: bool,
    /,
) -> None: ...
def layer_norm(x: int, weight: int, bias: int, out: int, type: int, weight_type: int, rows: int, width: int, eps: float, /) -> None: ...
def sparse_relu(x: int, out: int, type: int, rows: int, width: int, x_stride: int, deviations: float, /) -> None: ...
def mix_streams(x: int, coefs: int, out: int, type: int, rows: int, streams: int, width: int, scale: float, /) -> None: ...
def add_to_streams(
    x: int,
    row: int,
    coefs: int,
    out: int,
    type: int,
    rows: int,
    streams: int,
    width: int,
    row_stride: int,
    scale: float,
    offset: float,
    first: int,
    /,
) -> None: ...
def match_streams(row: int, x: int, out: int, type: int, rows: int, streams: int, width: int, row_stride: int, /) -> None: ...
def concat(x: int, y: int, out: int, rows: int, x_bytes: int, y_bytes: int, x_stride: int, y_stride: int, /) -> None: ...
def head_linear(
    x: int,
    weight: int,
    out: int,
    type: int,
    rows: int,
    heads: int,
    width: int,
    outputs: int,
    x_row_stride: int,
    x_head_stride: int,
    n_stride: int,
    k_stride: int,
    /,
) -> None: ...
def gated(gate_up: int, out: int, type: int, activation: int, rows: int, width: int, /) -> None: ...
def pointwise(
    kind: int,
    x: int,
    y: int,
    factors: int,
    out: int,
    type: int,
    rows: int,
    width: int,
    x_stride: int,
    y_stride: int,
    a: float,
    b: float,
    /,
) -> None: ...
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
    interleaved: bool,
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
    value_dim: int,
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
        prompt_lens: int,
        rows: int,
        requests: int,
        table_width: int,
        q_heads: int,
        k_heads: int,
        head_dim: int,
        value_dim: int,
        num_blocks: int,
        block_size: int,
        window: int,
        chunk: int,
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
    slopes: int,
    out: int,
    scale: float,
    softcap: float,
    one_cache: bool,
    /,
) -> None: ...
def dequantize(type_name: str, data: int, num_bytes: int, num_elements: int, out: int, out_type: int, /) -> None: ...

class RecurrentPlan:
    """Addresses of a plan's tensors, and the number of its requests."""

    def __init__(self, segment_start: int, ends: int, read: int, write: int, requests: int, /) -> None: ...

def causal_conv(
    plan: RecurrentPlan,
    x: int,
    gate_in: int,
    gate_out: int,
    type: int,
    x_stride: int,
    gate_in_stride: int,
    gate_out_stride: int,
    weight: int,
    bias: int,
    state: int,
    out: int,
    rows: int,
    slots: int,
    channels: int,
    taps: int,
    silu: bool,
    /,
) -> None: ...
def ssd_scan(
    plan: RecurrentPlan,
    x: int,
    b: int,
    c: int,
    type: int,
    x_stride: int,
    b_stride: int,
    c_stride: int,
    dt: int,
    dt_type: int,
    dt_stride: int,
    dt_bias: int,
    a: int,
    d: int,
    state: int,
    out: int,
    rows: int,
    slots: int,
    heads: int,
    groups: int,
    depth: int,
    width: int,
    dt_min: float,
    dt_max: float,
    /,
) -> None: ...
def selective_scan(
    plan: RecurrentPlan,
    x: int,
    dt: int,
    b: int,
    c: int,
    gate: int,
    type: int,
    x_stride: int,
    dt_stride: int,
    b_stride: int,
    c_stride: int,
    gate_stride: int,
    dt_bias: int,
    a: int,
    d: int,
    state: int,
    out: int,
    rows: int,
    slots: int,
    depth: int,
    width: int,
    /,
) -> None: ...
def gated_delta(
    plan: RecurrentPlan,
    q: int,
    k: int,
    v: int,
    beta: int,
    decay: int,
    type: int,
    beta_type: int,
    q_stride: int,
    k_stride: int,
    v_stride: int,
    beta_stride: int,
    state: int,
    out: int,
    rows: int,
    slots: int,
    heads: int,
    groups: int,
    depth: int,
    width: int,
    each_channel: bool,
    beta_scale: float,
    /,
) -> None: ...
def l2_norm(x: int, out: int, type: int, rows: int, heads: int, width: int, x_stride: int, eps: float, scale: float, /) -> None: ...
def decay_gate(
    x: int, a: int, bias: int, out: int, type: int, rows: int, heads: int, width: int, x_stride: int, lower_bound: float, /
) -> None: ...
def gated_rms_norm(
    x: int,
    gate: int,
    weight: int,
    out: int,
    type: int,
    x_stride: int,
    gate_stride: int,
    rows: int,
    width: int,
    group: int,
    shared_weight: bool,
    gate_first: bool,
    sigmoid: bool,
    eps: float,
    /,
) -> None: ...

class Operand:
    """Where an instruction finds a tensor: at an address, in the arena (bytes per row before its buffer, and into its row; for all
    rows, which are `row_bytes` apart, or for those of a block), or where a slot of the step says."""

    @staticmethod
    def constant(address: int) -> Operand: ...
    @staticmethod
    def arena(start: int, offset: int, row_bytes: int) -> Operand: ...
    @staticmethod
    def block(start: int, offset: int) -> Operand: ...
    @staticmethod
    def slot(index: int) -> Operand: ...

class PlanOperands:
    """A plan whose tensors come with each run; `requests` is the slot of their number."""

    def __init__(self, segment_start: Operand, ends: Operand, read: Operand, write: Operand, requests: int, /) -> None: ...

class Program:
    """Native calls, bound and in order. Each method that is named after an op adds a call of it."""

    def __init__(self) -> None: ...
    def set_stretches(self, stretches: Sequence[tuple[int, int]], row_bytes: int, block_rows: int) -> None:
        """Instructions (begin, end) that are run for at most so many rows at a time; `row_bytes` of each row of a run come before the
        buffers of a block."""
    def run(self, arena: int, rows: int, slots: Sequence[int]) -> None: ...
    def time(self, arena: int, rows: int, slots: Sequence[int]) -> list[float]: ...
    def names(self) -> list[str]: ...
    def matmul(
        self, matrix: Matrix, x: Operand, x_type: int, x_stride: int, bias: int, bias_type: int, out: Operand, out_type: int, /
    ) -> None: ...
    def known_ids(self, ids: Operand, out: Operand, limit: int, /) -> None: ...
    def embedding_packed(self, matrix: Matrix, ids: Operand, out: Operand, out_type: int, scale: float, /) -> None: ...
    def embedding_blocks(
        self,
        type_name: str,
        data: int,
        row_bytes: int,
        vocab: int,
        width: int,
        is_mapped: bool,
        ids: Operand,
        out: Operand,
        out_type: int,
        scale: float,
        /,
    ) -> None: ...
    def rms_norm(
        self,
        x: Operand,
        x_stride: int,
        weight: int,
        out: Operand,
        type: int,
        weight_type: int,
        heads: int,
        width: int,
        eps: float,
        plus_one: bool,
        cast_first: bool,
        /,
    ) -> None: ...
    def add_rms_norm(
        self,
        x: Operand,
        residual: Operand,
        weight: int,
        out: Operand,
        total: Operand,
        type: int,
        weight_type: int,
        width: int,
        eps: float,
        plus_one: bool,
        cast_first: bool,
        /,
    ) -> None: ...
    def layer_norm(
        self, x: Operand, weight: int, bias: int, out: Operand, type: int, weight_type: int, width: int, eps: float, /
    ) -> None: ...
    def sparse_relu(self, x: Operand, out: Operand, type: int, width: int, x_stride: int, deviations: float, /) -> None: ...
    def mix_streams(self, x: Operand, coefs: Operand, out: Operand, type: int, streams: int, width: int, scale: float, /) -> None: ...
    def add_to_streams(
        self,
        x: Operand,
        row: Operand,
        coefs: Operand | None,
        out: Operand,
        type: int,
        streams: int,
        width: int,
        row_stride: int,
        scale: float,
        offset: float,
        first: int,
        /,
    ) -> None: ...
    def match_streams(self, row: Operand, x: Operand, out: Operand, type: int, streams: int, width: int, row_stride: int, /) -> None: ...
    def concat(
        self, x: Operand, y: Operand, out: Operand, heads: int, x_bytes: int, y_bytes: int, x_stride: int, y_stride: int, /
    ) -> None: ...
    def head_linear(
        self,
        x: Operand,
        weight: int,
        out: Operand,
        type: int,
        heads: int,
        width: int,
        outputs: int,
        x_row_stride: int,
        x_head_stride: int,
        n_stride: int,
        k_stride: int,
        /,
    ) -> None: ...
    def gated(self, name: str, gate_up: Operand, out: Operand, type: int, activation: int, width: int, /) -> None: ...
    def pointwise(
        self,
        name: str,
        kind: int,
        x: Operand,
        y: Operand,
        factors: int,
        out: Operand,
        type: int,
        width: int,
        x_stride: int,
        y_stride: int,
        a: float,
        b: float,
        /,
    ) -> None: ...
    def softcap(self, x: Operand, out: Operand, type: int, width: int, cap: float, /) -> None: ...
    def widen(self, x: Operand, out: Operand, width: int, /) -> None: ...
    def gather(self, source: Operand, count_slot: int, indices: Operand, out: Operand, row_bytes: int, /) -> None: ...
    def rotary(
        self,
        q: Operand,
        k: Operand,
        type: int,
        q_stride: int,
        k_stride: int,
        positions: Operand,
        cos_sin: int,
        q_heads: int,
        k_heads: int,
        head_dim: int,
        rot_dim: int,
        max_pos: int,
        interleaved: bool,
        /,
    ) -> None: ...
    def write_kv(
        self,
        k: Operand,
        v: Operand,
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
        slots: Operand,
        heads: int,
        head_dim: int,
        value_dim: int,
        num_blocks: int,
        block_size: int,
        /,
    ) -> None: ...
    def attention_plan(
        self,
        plan: AttentionPlan,
        block_table: Operand,
        query_start_loc: Operand,
        seq_lens: Operand,
        prompt_lens: Operand | None,
        requests_slot: int,
        table_width_slot: int,
        q_heads: int,
        k_heads: int,
        head_dim: int,
        value_dim: int,
        num_blocks: int,
        block_size: int,
        window: int,
        chunk: int,
        /,
    ) -> None: ...
    def paged_attention(
        self,
        plan: AttentionPlan,
        q: Operand,
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
        slopes: int,
        out: Operand,
        scale: float,
        softcap: float,
        one_cache: bool,
        /,
    ) -> None: ...
    def causal_conv(
        self,
        plan: PlanOperands,
        x: Operand,
        gate_in: Operand | None,
        gate_out: Operand | None,
        type: int,
        x_stride: int,
        gate_in_stride: int,
        gate_out_stride: int,
        weight: int,
        bias: int,
        state: int,
        out: Operand,
        slots: int,
        channels: int,
        taps: int,
        silu: bool,
        /,
    ) -> None: ...
    def ssd_scan(
        self,
        plan: PlanOperands,
        x: Operand,
        b: Operand,
        c: Operand,
        type: int,
        x_stride: int,
        b_stride: int,
        c_stride: int,
        dt: Operand | None,
        dt_type: int,
        dt_stride: int,
        dt_bias: int,
        a: int,
        d: int,
        state: int,
        out: Operand,
        slots: int,
        heads: int,
        groups: int,
        depth: int,
        width: int,
        dt_min: float,
        dt_max: float,
        /,
    ) -> None: ...
    def selective_scan(
        self,
        plan: PlanOperands,
        x: Operand,
        dt: Operand,
        b: Operand,
        c: Operand,
        gate: Operand | None,
        type: int,
        x_stride: int,
        dt_stride: int,
        b_stride: int,
        c_stride: int,
        gate_stride: int,
        dt_bias: int,
        a: int,
        d: int,
        state: int,
        out: Operand,
        slots: int,
        depth: int,
        width: int,
        /,
    ) -> None: ...
    def gated_delta(
        self,
        plan: PlanOperands,
        q: Operand,
        k: Operand,
        v: Operand,
        beta: Operand,
        decay: Operand,
        type: int,
        beta_type: int,
        q_stride: int,
        k_stride: int,
        v_stride: int,
        beta_stride: int,
        state: int,
        out: Operand,
        slots: int,
        heads: int,
        groups: int,
        depth: int,
        width: int,
        each_channel: bool,
        beta_scale: float,
        /,
    ) -> None: ...
    def l2_norm(self, x: Operand, out: Operand, type: int, heads: int, width: int, x_stride: int, eps: float, scale: float, /) -> None: ...
    def decay_gate(
        self, x: Operand, a: int, bias: int, out: Operand, type: int, heads: int, width: int, x_stride: int, lower_bound: float, /
    ) -> None: ...
    def gated_rms_norm(
        self,
        x: Operand,
        gate: Operand,
        weight: int,
        out: Operand,
        type: int,
        x_stride: int,
        gate_stride: int,
        width: int,
        group: int,
        shared_weight: bool,
        gate_first: bool,
        sigmoid: bool,
        eps: float,
        /,
    ) -> None: ...

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
def allow_tokens(logits: int, lines: int, starts: int, ids: int, count: int, rows: int, vocab: int, /) -> None: ...
def mask_tokens(logits: int, lines: int, masks: int, count: int, rows: int, vocab: int, /) -> None: ...
def add_to_tokens(logits: int, lines: int, ids: int, values: int, count: int, rows: int, vocab: int, /) -> None: ...
def forbid_words(
    logits: int,
    lines: int,
    last: int,
    prefixes: int,
    lengths: int,
    rows: int,
    first: int,
    drafts: int,
    token_ids: int,
    total_len: int,
    input_ids: int,
    count: int,
    longest: int,
    num_rows: int,
    width: int,
    num_lines: int,
    vocab: int,
    /,
) -> None: ...
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
