"""`canter bench latency`: how long one batch takes, offline."""

from __future__ import annotations

import time
from argparse import Namespace

from tqdm.auto import tqdm

from canter.cli.args import Parser, add_engine_flags, add_number, engine_args, flag_words
from canter.cli.bench.limits import Limit, Work, limit_of
from canter.cli.bench.offline import load
from canter.cli.bench.prompts import random_prompts
from canter.cli.bench.report import Report, add_report_flags, summary
from canter.client.outputs import RequestOutput
from canter.core.sampling_params import SamplingParams

EXAMPLES = """\
  canter bench latency --batch-size 1 --input-len 128 --output-len 128
  canter bench latency ./model.gguf --json latency.json
"""


def build_parser() -> Parser:
    parser = Parser(
        "canter bench latency", "Time one batch of equal requests, offline. The prefix cache is off unless asked for.", EXAMPLES
    )
    add_number(parser, "--input-len", default=32, doc="Prompt tokens of a request.", least=1)
    add_number(parser, "--output-len", default=128, doc="Tokens generated for a request.", least=1)
    add_number(parser, "--batch-size", default=8, doc="Requests at once.", least=1)
    add_number(parser, "--num-iters-warmup", default=1, doc="Runs before the measured ones.")
    add_number(parser, "--num-iters", default=5, doc="Measured runs.", least=1)
    add_report_flags(parser)
    add_engine_flags(parser)
    return parser


def run(namespace: Namespace) -> int:
    arguments = engine_args(namespace)
    with load(namespace, enable_prefix_caching=False) as llm:
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=namespace.output_len, detokenize=False)
        runs: list[list[RequestOutput]] = []
        seconds: list[float] = []
        for i in tqdm(range(namespace.num_iters_warmup + namespace.num_iters), desc="Runs", dynamic_ncols=True):
            ids = random_prompts(namespace.batch_size, namespace.input_len, arguments.seed + i, vocab_size=llm.info.vocab_size)
            start = time.perf_counter()
            outputs = llm.generate([{"prompt_token_ids": one} for one in ids], sampling, use_tqdm=False)
            if i >= namespace.num_iters_warmup:
                seconds.append(time.perf_counter() - start)
                runs.append(outputs)
        limit = limit_of(arguments.model, llm.info.dtype, arguments.revision, arguments.quantization)
    report = make_report(namespace, seconds, runs, limit)
    report.data["engine_flags"] = flag_words(arguments)
    report.finish(namespace.json)
    return 0


def make_report(namespace: Namespace, seconds: list[float], runs: list[list[RequestOutput]], limit: Limit) -> Report:
    """Median run: whole time, first token, and decoding beside the machine's limit."""
    report = Report("latency", {"seconds": seconds, "batch_size": namespace.batch_size})
    first = [max(o.metrics.first_token_latency for o in outputs if o.metrics is not None) for outputs in runs]
    whole, ttft = summary(seconds, (50, 90))["p50"], summary(first)["p50"]
    report.add("whole batch, median", whole, "s", "median_s")
    report.add("whole batch, p90", summary(seconds, (90,))["p90"], "s", "p90_s")
    report.add("last first token, median", ttft * 1000, "ms", "ttft_ms")
    work = Work(namespace.batch_size, 0, namespace.input_len, namespace.output_len)
    prompt = namespace.batch_size * namespace.input_len
    report.add("prefill", prompt / ttft, "tokens/s", "prefill_tokens_s", limit.prefill_seconds(work) / ttft)
    if namespace.output_len > 1:
        steps = (namespace.output_len - 1) / max(whole - ttft, 1e-9)
        report.add("decode, each request", steps, "tokens/s", "decode_tokens_s_each", limit.fraction(steps))
        report.add("decode, batch", steps * namespace.batch_size, "tokens/s", "decode_tokens_s")
    report.add_limit(limit)
    return report
