"""`canter bench kernels`: every op of a model's forward on the shapes of a model, beside this machine's bandwidth and peaks."""

from __future__ import annotations

import dataclasses
import math
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from canter.checkpoint.model_config import read_model_config
from canter.checkpoint.resolve import resolve
from canter.cli.args import Parser, add_number
from canter.cli.bench.limits import Machine, kind_of, measure_machine
from canter.cli.bench.report import Report, add_report_flags, number
from canter.cli.table import table
from canter.core.config import DEFAULT_MODEL
from canter.core.errors import ConfigError
from canter.kernels import inputs, num_threads, set_num_threads
from canter.kernels.native import isa, isas, set_isa
from canter.kernels.native.packed import FORMATS, allocate_part, packed_bytes
from canter.kernels.native.program import NativeProgram, new_recorder
from canter.kernels.native.record_recurrent import NUM_REQUESTS
from canter.kernels.ops import OPS, Impl, implementations
from canter.kernels.packed import PackedMatrix
from canter.kernels.recurrent_inputs import ROW_ARGUMENTS
from canter.kernels.recurrent_plan import RecurrentPlan
from canter.layers.attention import AttentionArgs
from canter.layers.decoder import DecoderArgs
from canter.models.registry import get_model_class

EXAMPLES = """\
  canter bench kernels
  canter bench kernels --model ./model.gguf --op linear --rows 1 32
  canter bench kernels --isa all --provider native --json kernels.json
"""

COLD_BYTES = 192 * 2**20
"""Weights and caches of a case are so many copies that these are read before one comes again: in a model each layer has its own."""

MOST_COPIES = 256
MOST_HEAD_ROWS = 64
"""The output matrix works on one row a request, never on a whole prompt."""

STEP_OPS = (
    "gather_step",
    "greedy_tokens",
    "draw_tokens",
    "keep_tokens",
    "allow_tokens",
    "mask_tokens",
    "add_to_tokens",
    "forbid_words",
    "penalize",
    "token_logprobs",
)
"""Ops of a step around the model. `benchmarks/step_overhead.py` times them together with everything else there."""

RECURRENT_SHAPES = (
    ("causal_conv", "4 taps, 1792"),
    ("causal_conv", "3 taps, gated, 1024"),
    ("ssd_scan", "24 heads of 64, state 128"),
    ("ssd_scan", "constant decay, 16 heads of 128, state 128"),
    ("selective_scan", "1536, state 16"),
    ("gated_delta", "16 heads of 128x128"),
    ("gated_delta", "decay by channel, 16 heads of 128x128"),
    ("l2_norm", "16 heads of 128"),
    ("decay_gate", "16 heads of 128"),
    ("gated_rms_norm", "1536"),
)
"""Ops of recurrent layers, on the shapes of published models of about 130M (Mamba, Mamba-2) and 0.5B (gated delta), LFM2's
convolution, lightning attention and Kimi's delta rule. They are timed as instructions of a step program."""

LATENT_HEADS, LATENT_ROW, LATENT_VALUE = 16, 576, 512
"""Attention over one cache, as DeepSeek-V2-Lite has it: a token's row is a latent of 512, its value for all heads, and behind that 64
elements more of their key."""

FAMILY_OPS = (
    "known_ids",
    "layer_norm",
    "sparse_relu",
    "mix_streams",
    "add_to_streams",
    "match_streams",
    "concat",
    "head_linear",
    "gelu_and_mul",
    "silu",
    "relu_squared",
    "gelu",
    "gelu_tanh",
    "scale_columns",
    "sigmoid_mul",
    "silu_mul",
    "gelu_tanh_mul",
    "weighted_sum",
)
"""What single families do to elements one by one, timed at the width that it would have in this model."""

STREAMS = 4
"""Residual streams side by side, as Gemma 3n has them."""

TIMED_OPS = tuple(name for name in OPS if name != "advance_step")
"""The one left out moves a table on each time, and can't be repeated."""

GROUP = 128
"""Elements that share a scale, in formats that leave it open."""

SECONDS = 0.2
"""Time spent on one measurement, one run at least."""


@dataclass(frozen=True)
class Case:
    """One op on one shape. `calls`: arguments that are used in turn. `kind`: the type of the factors, for the peak."""

    op: str
    shape: str
    rows: int
    weights: str
    calls: Sequence[inputs.Case]
    num_bytes: int
    operations: int = 0
    kind: str = "float32"

    def least_seconds(self, machine: Machine) -> float:
        """What the case takes on a machine that wastes nothing and has nothing in its caches."""
        return max(self.num_bytes / machine.read_bandwidth, self.operations / machine.peak_for(self.kind))


@dataclass(frozen=True)
class Timing:
    """A case under one implementation and instruction set."""

    op: str
    shape: str
    rows: int
    weights: str
    provider: str
    isa: str
    seconds: float
    gb_s: float
    gop_s: float
    of_limit: float


def build_parser() -> Parser:
    text = (
        "Time every op and implementation on the shapes of a model. Small inputs lie in caches, so an op without weights may pass 100%, "
        "as may one that writes where it read: the limit is the speed of reading."
    )
    parser = Parser("canter bench kernels", text, EXAMPLES)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="Whose shapes; weights are not loaded. Default: the bundled model.")
    parser.add_argument("--rows", nargs="+", type=positive, default=[1, 8, 32, 1024], metavar="N", help="Tokens. Default: 1 8 32 1024.")
    parser.add_argument("--op", nargs="+", choices=TIMED_OPS, help="Only these ops.")
    parser.add_argument("--weights", nargs="+", choices=FORMATS, help="Only these formats.")
    parser.add_argument("--provider", nargs="+", help="Only these implementations, such as native.")
    parser.add_argument("--isa", nargs="+", choices=[*isas(), "all"], help="Instruction sets. Default: the best.")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="Type of activations. Default: float32.")
    add_number(parser, "--context-len", default=1024, doc="Tokens that attention finds in the cache of each request.", least=1)
    parser.add_argument("--num-threads", type=positive, help="Threads. Default: as the engine.")
    add_report_flags(parser)
    return parser


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return int(text)


def run(namespace: Namespace) -> int:
    if namespace.num_threads:
        set_num_threads(namespace.num_threads)
    torch.set_num_threads(num_threads())
    config = read_model_config(resolve(namespace.model))
    args = get_model_class(config.architecture).Args.from_hf(config.hf)
    if not isinstance(args, DecoderArgs):
        raise ConfigError(f"The kernel benchmark knows the shapes of plain decoders only, not those of {config.architecture}.")
    before, best = measure_machine(num_threads()), isa()
    names = isas() if namespace.isa and "all" in namespace.isa else namespace.isa or [best]
    wanted = set(namespace.op or TIMED_OPS)
    weights = namespace.weights or FORMATS
    results: list[tuple[Case, Timing]] = []
    dtype = getattr(torch, namespace.dtype)
    try:
        for make in cases(args, dtype, namespace.rows, namespace.context_len, wanted, weights):
            case = make()
            results += [
                (dataclasses.replace(case, calls=()), timing(case, impl, name, before))
                for impl in implementations(case.op)
                if (not namespace.provider or impl.provider in namespace.provider) and impl.rejects("cpu", dtype) is None
                for name in (names if impl.provider == "native" else ["-"])
            ]
    finally:
        set_isa(best)
    # Other load on the machine disturbs the limits as well: the better of two measurements is nearer to the truth.
    machine = before.best_with(measure_machine(num_threads()))
    timings = [dataclasses.replace(found, of_limit=case.least_seconds(machine) / found.seconds) for case, found in results]
    print(shown(timings) + "\n")
    report = Report("kernels", {"model": namespace.model, "dtype": namespace.dtype, "isas": isas(), "threads": num_threads()})
    report.data["kernels"] = [dataclasses.asdict(one) for one in timings]
    report.add("read bandwidth", machine.read_bandwidth / 1e9, "GB/s", "read_bandwidth_gb_s")
    for kind, peak in machine.peaks.items():
        report.add(f"peak, {kind}", peak / 1e9, "GOP/s", f"peak_{kind}_gop_s")
    report.finish(namespace.json)
    return 0


def cases(
    args: DecoderArgs, dtype: torch.dtype, rows: Sequence[int], context_len: int, ops: set[str], weights: Sequence[str]
) -> Iterator[Callable[[], Case]]:
    """Every case of a model, each made when it is called for, so that the tensors of one are in memory at a time."""
    attentions = list(dict.fromkeys(args.attention))
    for count in rows:
        if "linear" in ops:
            for name, outputs, width in matrices(args):
                if name != "head" or count <= MOST_HEAD_ROWS:
                    for kind in weights:
                        if fits(kind, outputs, width):
                            yield lambda c=count, n=name, o=outputs, w=width, k=kind: linear_case(c, n, o, w, k, dtype)  # type: ignore[misc]
        if "embedding" in ops:
            yield lambda c=count: embedding_case(c, args.vocab_size, args.hidden_size, dtype)  # type: ignore[misc]
        for op in STEP_OPS:
            if op in ops and count <= MOST_HEAD_ROWS:
                yield lambda c=count, op=op: step_case(op, c, args.vocab_size, context_len)  # type: ignore[misc]
        for op in elementwise_ops(args, count):
            if op in ops:
                yield lambda c=count, op=op: elementwise_case(op, c, args, dtype)  # type: ignore[misc]
        for op in FAMILY_OPS:
            if op in ops:
                yield lambda c=count, op=op: family_case(op, c, args, dtype)  # type: ignore[misc]
        for op, shape in RECURRENT_SHAPES:
            if op in ops:
                yield lambda c=count, op=op, s=shape: recurrent_case(op, s, c, dtype)  # type: ignore[misc]
        for attention in attentions:
            for op in ("rotary", "write_kv", "paged_attention"):
                if op in ops and (op != "rotary" or attention.rope is not None):
                    yield lambda c=count, op=op, a=attention: attention_case(op, c, a, context_len, dtype)  # type: ignore[misc]
        for attention in masked(attentions[0]) if "paged_attention" in ops else ():
            yield lambda c=count, a=attention: attention_case("paged_attention", c, a, context_len, dtype)  # type: ignore[misc]
        if "paged_attention" in ops:
            yield lambda c=count: latent_case(c, context_len, dtype)  # type: ignore[misc]


def masked(a: AttentionArgs) -> list[AttentionArgs]:
    """The model's attention under the masks of other families: local chunks, a prompt in sight beside a window, and ALiBi."""
    plain = dataclasses.replace(a, window=0, chunk=0, sees_prompt=False, slopes=())
    changes: list[dict[str, Any]] = [{"chunk": 256}, {"window": 256, "sees_prompt": True}, {"slopes": (0.1,) * a.num_heads}]
    return [dataclasses.replace(plain, **change) for change in changes]


def matrices(args: DecoderArgs) -> list[tuple[str, int, int]]:
    """(name, outputs, width) of the weight matrices, as layers fuse them, each shape once."""
    found: dict[tuple[int, int], str] = {}
    for a in args.attention:
        found.setdefault(((a.num_heads + 2 * a.num_kv_heads) * a.head_dim, args.hidden_size), "qkv")
        found.setdefault((args.hidden_size, a.num_heads * a.head_dim), "output")
    found.setdefault((2 * args.intermediate_size, args.hidden_size), "gate_up")
    found.setdefault((args.hidden_size, args.intermediate_size), "down")
    found.setdefault((args.vocab_size, args.hidden_size), "head")
    return [(name, outputs, width) for (outputs, width), name in found.items()]


def copies(num_bytes: int) -> int:
    """How many of so many bytes are read before one comes again."""
    return min(MOST_COPIES, max(1, math.ceil(COLD_BYTES / max(1, num_bytes))))


def group_of(kind: str) -> int:
    """Elements that share a scale, where a packed format leaves that to the checkpoint."""
    return GROUP if kind == "w4" else 0


def fits(kind: str, outputs: int, width: int) -> bool:
    """Whether a format can hold a matrix of this size in this build."""
    try:
        return packed_bytes(kind, outputs, width, group_of(kind)) > 0
    except ValueError:
        return False


def make_weight(kind: str, outputs: int, width: int) -> PackedMatrix:
    """A matrix whose every page is memory of its own. Values matter to speed only in that none is denormal in any format."""
    part = allocate_part(kind, outputs, width, group_of(kind))
    part.data.fill_(0x11)
    return PackedMatrix((part,))


def linear_case(rows: int, name: str, outputs: int, width: int, kind: str, dtype: torch.dtype) -> Case:
    x = torch.randn(rows, width).to(dtype)
    first = make_weight(kind, outputs, width)
    weights = [first, *(make_weight(kind, outputs, width) for _ in range(copies(first.nbytes) - 1))]
    moved = first.nbytes + x.nbytes + rows * outputs * dtype.itemsize
    calls = [(x, weight, None) for weight in weights]
    return Case("linear", f"{name} {outputs}x{width}", rows, kind, calls, moved, 2 * rows * outputs * width, kind_of(kind))


def embedding_case(rows: int, vocab: int, hidden: int, dtype: torch.dtype) -> Case:
    kind = "f32" if dtype == torch.float32 else "bf16"
    weight = make_weight(kind, vocab, hidden)
    calls = [(torch.randint(vocab, (rows,)), weight, 1.0, dtype) for _ in range(16)]
    return Case("embedding", f"{vocab}x{hidden}", rows, kind, calls, 2 * rows * hidden * dtype.itemsize)


def step_case(op: str, rows: int, vocab: int, context_len: int) -> Case:
    """So many requests that each bring a token."""
    line, none = torch.arange(rows), torch.zeros(rows, 0, dtype=torch.int64)
    if op == "gather_step":
        blocks = context_len // 16 + 1
        host = torch.stack((line, torch.ones_like(line), torch.ones_like(line), torch.zeros_like(line)))  # a token with logits each
        ids = torch.randint(vocab, (rows, context_len + 1), dtype=torch.int32)
        lengths, table = torch.full((rows,), context_len, dtype=torch.int32), torch.ones(rows, blocks, dtype=torch.int32)
        call = (host, line[:0], rows, rows, ids, lengths + 1, lengths, line.unsqueeze(1), [table], [16], [blocks], [True])
        return Case(op, f"{context_len} tokens", rows, "int32", [call], 8 * rows * blocks)
    kept, share, least = torch.full((rows,), 40), torch.full((rows,), 0.95, dtype=torch.float64), torch.full((rows,), -math.inf)
    logits = [torch.randn(rows, vocab) * 3 for _ in range(min(copies(4 * rows * vocab), 16))]
    calls: list[inputs.Case]
    moved = 4 * rows * vocab
    if op == "greedy_tokens":
        calls = [(one,) for one in logits]
    elif op == "token_logprobs":
        calls = [(one, line % vocab, 5) for one in logits]
    elif op == "keep_tokens":
        calls, moved = [(one, kept, share, least) for one in logits], 2 * moved
    elif op == "allow_tokens":
        allowed = min(vocab, 100)
        ids = torch.cat([torch.randperm(vocab)[:allowed] for _ in range(rows)])
        calls = [(one, line, torch.arange(rows + 1) * allowed, ids) for one in logits]
    elif op == "mask_tokens":
        masks = torch.where(torch.rand(rows, (vocab + 31) // 32) < 0.9, -1, 0x5A5A5A5A).to(torch.int32)
        calls = [(one, line, masks) for one in logits]
    elif op == "add_to_tokens":
        biased = min(vocab, 100)
        ids = torch.randint(vocab, (rows * biased,))
        calls = [(one, line.repeat_interleave(biased), ids, torch.randn(rows * biased)) for one in logits]
        moved = rows * biased * (8 + 8 + 4 + 2 * 4)
    elif op == "forbid_words":
        number, longest = rows * 100, 4  # words of five tokens, one in a hundred of which are about to be completed
        lines, last, lengths = line.repeat_interleave(100), torch.randint(vocab, (number,)), torch.full((number,), longest)
        prefixes = (torch.arange(number) % 100).unsqueeze(1).expand(-1, longest).contiguous()
        known = torch.zeros(rows, context_len, dtype=torch.int32), torch.full((rows,), context_len, dtype=torch.int32)
        zeros = torch.zeros_like(lines)
        calls = [(one, lines, last, prefixes, lengths, lines, zeros, zeros, *known, None) for one in logits]
        moved = number * (6 + longest) * 8
    elif op == "penalize":
        counts = torch.randint(2, (rows, vocab), dtype=torch.int32)
        penalties = (torch.full((rows,), value) for value in (1.1, 0.0, 0.0))
        others = line, line, counts, *penalties, none, none.int()
        calls, moved = [(one, *others) for one in logits], 3 * moved
    else:
        salts = torch.randint(-(2**31), 2**31, (vocab,)).to(torch.int32)
        limits = torch.full((rows,), 0.8), kept, share, least
        calls = [(one, *limits, line, line, salts, True) for one in logits]
    return Case(op, f"{vocab}", rows, "float32", calls, moved)


def elementwise_ops(args: DecoderArgs, rows: int) -> list[str]:
    """Ops between the matrices that the model uses."""
    gated = "silu_and_mul" if args.activation == "silu" else "gelu_tanh_and_mul"
    return ["rms_norm", "add_rms_norm", gated, *(["softcap"] if args.logit_softcap and rows <= MOST_HEAD_ROWS else [])]


def elementwise_case(op: str, rows: int, args: DecoderArgs, dtype: torch.dtype) -> Case:
    hidden = args.hidden_size
    x, weight = torch.randn(rows, hidden).to(dtype), torch.ones(hidden, dtype=dtype)
    if op == "rms_norm":
        return Case(op, f"{hidden}", rows, type_name(dtype), [(x, weight, 1e-6, False, True)], 2 * x.nbytes + weight.nbytes)
    if op == "add_rms_norm":
        return Case(op, f"{hidden}", rows, type_name(dtype), [(x, x.clone(), weight, 1e-6, False, True)], 4 * x.nbytes + weight.nbytes)
    if op == "softcap":
        logits = torch.randn(rows, args.vocab_size)
        return Case(op, f"{args.vocab_size}", rows, "float32", [(logits, args.logit_softcap)], 2 * logits.nbytes)
    gate_up = torch.randn(rows, 2 * args.intermediate_size).to(dtype)
    return Case(op, f"{args.intermediate_size}", rows, type_name(dtype), [(gate_up,)], gate_up.nbytes * 3 // 2)


def family_case(op: str, rows: int, args: DecoderArgs, dtype: torch.dtype) -> Case:
    """One of `FAMILY_OPS`: those of the residual stream as wide as the model's, the others as wide as its MLP."""
    if op == "known_ids":
        ids = torch.randint(args.vocab_size, (rows,))
        return Case(op, f"{args.vocab_size}", rows, "int64", [(ids, args.vocab_size // 2)], 2 * ids.nbytes)
    if op == "head_linear":
        heads, latent = 16, 512
        values, weight = torch.randn(rows, heads, latent).to(dtype), torch.randn(heads, 128, latent).to(dtype)
        moved, work = values.nbytes * 5 // 4 + weight.nbytes, 2 * rows * weight.numel()
        return Case(op, f"{heads} heads, {latent} to 128", rows, type_name(dtype), [(values, weight)], moved, work)
    of_stream = op in ("layer_norm", "weighted_sum", "concat", "mix_streams", "add_to_streams", "match_streams")
    width = args.hidden_size if of_stream else args.intermediate_size

    def random(width: int) -> torch.Tensor:
        return torch.randn(rows, width).to(dtype)

    x = random(width)
    shape, moved = f"{width}", 2 * x.nbytes
    call: inputs.Case = (x,)
    if op.endswith("_streams"):
        shape, streams = f"{STREAMS} streams of {width}", random(STREAMS * width)
        if op == "mix_streams":
            coefs = random(STREAMS * STREAMS)
            call, moved = (streams, coefs, 1.0), 2 * streams.nbytes + coefs.nbytes
        elif op == "add_to_streams":
            coefs = random(STREAMS)
            call, moved = (streams, x, coefs, 1.0, 1.0, 0), 2 * streams.nbytes + x.nbytes + coefs.nbytes
        else:
            call, moved = (x, random((STREAMS - 1) * width)), 2 * streams.nbytes
    elif op == "layer_norm":
        weight, bias = torch.ones(2, width, dtype=dtype)
        call, moved = (x, weight, bias, 1e-5), moved + 2 * weight.nbytes
    elif op == "concat":
        call, moved = (x, random(width)), 4 * x.nbytes
    elif op == "gelu_and_mul":
        call, moved = (random(2 * width),), 3 * x.nbytes
    elif op == "sparse_relu":
        call = (x, 1.6448536)  # which leaves one element in twenty, as in Gemma 3n
    elif op == "scale_columns":
        call, moved = (x, torch.rand(width)), moved + 4 * width
    elif op == "weighted_sum":
        call, moved = (x, random(width), 0.5, 2.0), 3 * x.nbytes
    elif op.endswith("_mul"):
        call, moved = (x, random(width)), 3 * x.nbytes
    return Case(op, shape, rows, type_name(dtype), [call], moved)


def attention_case(op: str, rows: int, a: AttentionArgs, context_len: int, dtype: torch.dtype) -> Case:
    """Of a prompt in sight, half of a request's tokens are."""
    requests = queries_and_positions(rows, context_len)
    prompt = requests[0][1] // 2 if a.sees_prompt else 0

    def keys(position: int) -> int:
        """How many the query there sees."""
        count = position % a.chunk + 1 if a.chunk else position + 1
        return min(count, prompt + a.window) if a.window else count

    seen = [keys(length - 1) for _, length in requests]
    shape = f"{a.num_heads}/{a.num_kv_heads} heads of {a.head_dim}" + (f", window {a.window}" if a.window else "")
    shape += f", chunks of {a.chunk}" * bool(a.chunk) + f", prompt of {prompt}" * bool(prompt) + ", slopes" * bool(a.slopes)
    token_bytes = 2 * a.num_kv_heads * a.head_dim * dtype.itemsize
    rng = torch.Generator().manual_seed(0)
    sizes = {"heads": (a.num_heads, a.num_kv_heads), "head_dim": a.head_dim, "block_size": 16}
    if op == "paged_attention":
        mask: dict[str, Any] = {"window": a.window, "chunk": a.chunk, "slopes": bool(a.slopes)}
        mask["prompt_lens"] = [prompt] * len(requests) if prompt else None

        def call() -> inputs.Case:
            return inputs.attention_case(rng, dtype, requests=requests, softcap=a.softcap, **mask, **sizes)  # type: ignore[arg-type]

        moved = sum(seen) * token_bytes + 2 * rows * a.num_heads * a.head_dim * dtype.itemsize
        pairs = sum(seen) if rows <= MOST_HEAD_ROWS else sum(map(keys, range(rows)))
        calls = [call() for _ in range(min(copies(moved), 64))]
        return Case(op, f"{shape}, {requests[0][1]} tokens", rows, type_name(dtype), calls, moved, 4 * a.num_heads * a.head_dim * pairs)
    fused = torch.randn(rows, (a.num_heads + 2 * a.num_kv_heads) * a.head_dim).to(dtype)
    split = fused.split_with_sizes([heads * a.head_dim for heads in (a.num_heads, a.num_kv_heads, a.num_kv_heads)], dim=-1)
    q, k, v = (part.unflatten(-1, (-1, a.head_dim)) for part in split)
    if op == "write_kv":
        cache = inputs.attention_case(rng, dtype, requests=[(1, max(rows, 16))], **sizes)  # type: ignore[arg-type]
        return Case(op, shape, rows, type_name(dtype), [(k, v, cache[1], cache[2], torch.arange(rows))], 2 * rows * token_bytes)
    assert a.rope is not None
    table_ = torch.rand(max(rows, 2), a.rope.dim)
    return Case(op, shape, rows, type_name(dtype), [(q, k, torch.arange(rows), table_, a.rope.dim)], 2 * (q.nbytes + k.nbytes))


def latent_case(rows: int, context_len: int, dtype: torch.dtype) -> Case:
    """Attention over one cache: a key is read once, for all heads and as a value too."""
    requests = queries_and_positions(rows, context_len)
    heads, width, value_dim = LATENT_HEADS, LATENT_ROW, LATENT_VALUE
    rng = torch.Generator().manual_seed(0)
    moved = (sum(length for _, length in requests) * width + rows * heads * (width + value_dim)) * dtype.itemsize
    calls = [
        inputs.attention_case(rng, dtype, requests=requests, heads=(heads, 1), head_dim=width, value_dim=value_dim, shared=True)
        for _ in range(min(copies(moved), 64))
    ]
    pairs = sum(length for _, length in requests) if rows <= MOST_HEAD_ROWS else rows * (rows + 1) // 2
    shape = f"{heads} heads over latents of {value_dim} + {width - value_dim}, {requests[0][1]} tokens"
    return Case("paged_attention", shape, rows, type_name(dtype), calls, moved, 2 * heads * (width + value_dim) * pairs)


def queries_and_positions(rows: int, context_len: int) -> list[tuple[int, int]]:
    """Of each request: up to 64 rows are a token each of as many requests; more are one prompt."""
    return [(1, context_len)] * rows if rows <= MOST_HEAD_ROWS else [(rows, rows)]


def recurrent_case(op: str, shape: str, rows: int, dtype: torch.dtype) -> Case:
    """One of `RECURRENT_SHAPES`. Up to 64 rows are a token each of as many requests; more are one prompt."""
    ends = torch.arange(1, rows + 1, dtype=torch.int32) if rows <= MOST_HEAD_ROWS else torch.tensor([rows], dtype=torch.int32)
    number = len(ends)
    places = torch.arange(number, dtype=torch.int32)
    plan = RecurrentPlan(torch.arange(number + 1, dtype=torch.int32), ends, places, places)
    factor, name = torch.rand(24) + 0.1, type_name(dtype)
    moved = work = 0

    def random(*sizes: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(rows, *sizes).to(kind)

    def states(*sizes: int, kind: torch.dtype = torch.float32, own: int = 0) -> list[torch.Tensor]:
        """A state for each layer. `own`: bytes of other things that a layer has."""
        return [torch.zeros(number, *sizes, dtype=kind) for _ in range(copies(number * math.prod(sizes) * kind.itemsize + own))]

    calls: list[inputs.Case]
    if op == "causal_conv":
        gated = "gated" in shape
        taps, channels = (3, 1024) if gated else (4, 1792)
        x, gates = random(channels), [random(channels), random(channels)] if gated else [None, None]
        held = states(taps - 1, channels, kind=dtype)
        calls = [(x, torch.rand(taps, channels), None, state, plan, not gated, *gates) for state in held]
        moved = 2 * (held[0].nbytes + x.nbytes * (2 if gated else 1))
    elif op == "ssd_scan" and "constant" in shape:
        x, key, held = random(16, 128), random(16, 128), states(16, 128, 128)
        calls = [(x, None, None, -factor[:16], key, key, None, state, plan) for state in held]
        moved, work = 2 * (held[0].nbytes + x.nbytes + key.nbytes), 5 * rows * 16 * 128 * 128
    elif op == "ssd_scan":
        x, dt, key, held = random(24, 64), random(24), random(1, 128), states(24, 128, 64)
        calls = [(x, dt, factor, -factor, key, key, factor, state, plan) for state in held]
        moved, work = 2 * (held[0].nbytes + x.nbytes + key.nbytes), 5 * rows * 24 * 128 * 64
    elif op == "selective_scan":
        x, key, slopes = random(1536), random(16), -torch.rand(16, 1536) - 0.1
        held = states(16, 1536, own=slopes.nbytes)
        calls = [(x, x, slopes[0], slopes.clone(), key, key, slopes[0], x, state, plan) for state in held]
        moved, work = 2 * held[0].nbytes + slopes.nbytes + 4 * x.nbytes, 5 * rows * 16 * 1536
    elif op == "gated_delta":
        key, v, held = random(16, 128, kind=torch.float32), random(16, 128), states(16, 128, 128)
        decay = torch.rand(rows, 16, 128 if "channel" in shape else 1)
        calls = [(key, key, v, decay, random(16), state, plan) for state in held]
        moved, work = 2 * (held[0].nbytes + key.nbytes + v.nbytes) + decay.nbytes, 7 * rows * 16 * 128 * 128
    elif op == "gated_rms_norm":
        x = random(1536)
        calls, moved = [(x, random(1536), torch.ones(1536), 1e-5, 1536, True)], 3 * x.nbytes
    else:
        heads = random(16, 128)
        calls = [(heads, 1e-6)] if op == "l2_norm" else [(heads, -factor[:16], torch.rand(16, 128))]
        moved = heads.nbytes + 4 * heads.numel()
    return Case(op, shape, rows, name, calls, moved, work)


def program_of(case: Case, impl: Impl) -> Callable[[], object]:
    """A case of a recurrent op as a step program: its calls are layers, and a run makes all of them."""
    assert impl.record is not None
    recorder, values = new_recorder(), dict[str, int]()

    def symbol(name: str, value: torch.Tensor) -> Any:
        values[name] = value.data_ptr()
        return recorder.given(name, value.dtype, *value.shape[1:])

    symbols: dict[int, Any] = {}
    for i, value in enumerate(case.calls[0]):
        if isinstance(value, RecurrentPlan):
            values[NUM_REQUESTS] = value.num_requests
            symbols[i] = RecurrentPlan(*(symbol(f"plan{j}", part) for j, part in enumerate(value.tensors)))
        elif isinstance(value, torch.Tensor) and i in ROW_ARGUMENTS[case.op]:
            symbols[i] = symbol(f"x{i}", value)
    for call in case.calls:
        result = impl.record(*(symbols.get(i, value) for i, value in enumerate(call)))
    program = NativeProgram(recorder, result)
    slots = [values[slot.name] for slot in recorder.slots]
    return lambda: program.run(case.rows, slots)


def type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def timing(case: Case, impl: Impl, isa_name: str, machine: Machine) -> Timing:
    """Time an implementation on a case."""
    if isa_name != "-":
        set_isa(isa_name)
    if case.op in ROW_ARGUMENTS and impl.record is not None:
        seconds = best_seconds(program_of(case, impl), [()], SECONDS) / len(case.calls)
    else:
        seconds = best_seconds(impl.fn, case.calls, SECONDS)
    where = (case.op, case.shape, case.rows, case.weights, impl.provider, isa_name)
    return Timing(*where, seconds, case.num_bytes / seconds / 1e9, case.operations / seconds / 1e9, case.least_seconds(machine) / seconds)


def best_seconds(
    fn: Callable[..., Any], calls: Sequence[inputs.Case], budget: float, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds of a call: the best mean of several rounds, in each of which other arguments are used in turn."""
    begin = clock()
    fn(*calls[0])
    once = max(clock() - begin, 1e-7)
    if once > budget:
        return once
    each = max(1, min(len(calls), int(budget / once / 4)), int(0.001 / once))
    best, at, begin = math.inf, 1, clock()
    while True:
        start = clock()
        for i in range(at, at + each):
            fn(*calls[i % len(calls)])
        now = clock()
        best, at = min(best, (now - start) / each), at + each
        if now - begin > budget:
            return best


def shown(timings: Sequence[Timing]) -> str:
    header = ["op", "shape", "weights", "rows", "by", "isa", "us", "GB/s", "GOP/s", "of limit"]
    lines = [
        [
            *(t.op, t.shape, t.weights, str(t.rows), t.provider, t.isa, number(t.seconds * 1e6), number(t.gb_s)),
            number(t.gop_s) if t.gop_s else "",
            f"{t.of_limit:.0%}",
        ]
        for t in timings
    ]
    return table(header, lines)
