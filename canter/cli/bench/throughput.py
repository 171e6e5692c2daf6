"""`canter bench throughput`: tokens a second of many requests at once, offline."""

from __future__ import annotations

import dataclasses
import time
from argparse import Namespace

from canter.cli.args import Parser, add_engine_flags, add_number, engine_args, flag_words
from canter.cli.bench.limits import Work, limit_of
from canter.cli.bench.offline import load
from canter.cli.bench.prompts import random_prompts
from canter.cli.bench.report import Report, add_report_flags
from canter.core.sampling_params import SamplingParams

EXAMPLES = """\
  canter bench throughput --num-prompts 32 --input-len 128 --output-len 128
  canter bench throughput ./model.gguf --max-num-seqs 64 --json throughput.json
"""


def build_parser() -> Parser:
    parser = Parser("canter bench throughput", "Submit many requests at once, offline, and measure tokens a second.", EXAMPLES)
    add_number(parser, "--input-len", default=128, doc="Prompt tokens of a request.", least=1)
    add_number(parser, "--output-len", default=128, doc="Tokens generated for a request.", least=1)
    add_number(parser, "--num-prompts", default=32, doc="Requests.", least=1)
    add_number(parser, "--n", default=1, doc="Answers to each prompt.", least=1)
    add_report_flags(parser)
    add_engine_flags(parser)
    return parser


def run(namespace: Namespace) -> int:
    arguments = engine_args(namespace)
    with load(namespace) as llm:
        vocab = llm.info.vocab_size
        temperature = 1.0 if namespace.n > 1 else 0.0
        sampling = SamplingParams(
            n=namespace.n, temperature=temperature, ignore_eos=True, max_tokens=namespace.output_len, detokenize=False
        )
        warm_up = random_prompts(2, 16, arguments.seed + 1, vocab_size=vocab)
        llm.generate([{"prompt_token_ids": ids} for ids in warm_up], sampling.clone(max_tokens=4), use_tqdm=False)
        prompts = random_prompts(namespace.num_prompts, namespace.input_len, arguments.seed, vocab_size=vocab)
        steps = llm.stats().num_steps
        start = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling)
        seconds = time.perf_counter() - start
        steps = llm.stats().num_steps - steps
        limit = limit_of(arguments.model, llm.info.dtype, arguments.revision, arguments.quantization)
    generated = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    report = Report("throughput", {"num_prompts": namespace.num_prompts, "seconds": seconds, "engine_flags": flag_words(arguments)})
    report.add("requests", namespace.num_prompts / seconds, "requests/s", "requests_s")
    work = Work(namespace.num_prompts * namespace.n, 0, namespace.input_len, namespace.output_len)
    least = limit.decode_seconds(work) + limit.prefill_seconds(dataclasses.replace(work, requests=namespace.num_prompts))
    report.add("output", generated / seconds, "tokens/s", "output_tokens_s", least / seconds)
    report.add("prompt and output", (generated + namespace.num_prompts * namespace.input_len) / seconds, "tokens/s", "total_tokens_s")
    report.add("steps", steps / seconds, "steps/s", "steps_s", limit.fraction(steps / seconds))
    report.add("output a step", generated / max(steps, 1), "tokens", "tokens_per_step")
    report.add_limit(limit)
    report.finish(namespace.json)
    return 0
