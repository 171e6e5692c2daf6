"""`canter bench prefix`: what it saves that prompts begin alike. The same work twice: with different beginnings, then with one."""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from dataclasses import dataclass

from canter.cli.args import Parser, add_engine_flags, add_number, engine_args, flag_words
from canter.cli.bench.limits import limit_of
from canter.cli.bench.offline import load
from canter.cli.bench.prompts import random_prompts
from canter.cli.bench.report import Report, add_report_flags
from canter.client.outputs import RequestOutput
from canter.core.messages import EngineStats
from canter.core.sampling_params import SamplingParams

EXAMPLES = """\
  canter bench prefix
  canter bench prefix ./model.gguf --shared-prefix-len 2048 --num-prompts 16 --json prefix.json
"""


def build_parser() -> Parser:
    parser = Parser("canter bench prefix", "Measure what a shared prefix saves, offline: the same requests with and without one.", EXAMPLES)
    add_number(parser, "--shared-prefix-len", default=1024, doc="Tokens that all prompts begin with.")
    add_number(parser, "--input-len", default=16, doc="Further tokens of each prompt.", least=1)
    add_number(parser, "--output-len", default=32, doc="Tokens generated for each.", least=1)
    add_number(parser, "--num-prompts", default=8, doc="Requests.", least=1)
    add_report_flags(parser)
    add_engine_flags(parser)
    return parser


@dataclass(frozen=True)
class Measured:
    """One run: seconds, output tokens, mean time to the first token, steps, and the prompt tokens that were cached, with their share."""

    seconds: float
    num_output: int
    ttft: float
    num_steps: int
    num_cached: int
    hit_rate: float


def run(namespace: Namespace) -> int:
    arguments = engine_args(namespace)
    with load(namespace) as llm:
        vocab, own = llm.info.vocab_size, namespace.shared_prefix_len + namespace.input_len
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=namespace.output_len, detokenize=False)

        def measure(prompts: list[list[int]]) -> Measured:
            before, start = llm.stats(), time.perf_counter()
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling)
            return measured(time.perf_counter() - start, outputs, before, llm.stats())

        measure(random_prompts(2, 16, arguments.seed + 2, vocab_size=vocab))
        apart = measure(random_prompts(namespace.num_prompts, own, arguments.seed + 1, vocab_size=vocab))
        alike = random_prompts(namespace.num_prompts, namespace.input_len, arguments.seed, namespace.shared_prefix_len, vocab)
        shared = measure(alike)
        again = measure(alike)
        limit = limit_of(arguments.model, llm.info.dtype, arguments.revision, arguments.quantization)
    report = Report("prefix", {"num_prompts": namespace.num_prompts, "engine_flags": flag_words(arguments)})
    for name, result in (("different", apart), ("shared", shared), ("shared, again", again)):
        key = name.replace(", ", "_")
        report.add(f"{name}: output", result.num_output / result.seconds, "tokens/s", f"{key}_output_tokens_s")
        steps = result.num_steps / result.seconds
        report.add(f"{name}: steps", steps, "steps/s", f"{key}_steps_s", limit.fraction(steps))
        report.add(f"{name}: TTFT, mean", result.ttft * 1000, "ms", f"{key}_ttft_ms")
        report.add(f"{name}: cached", result.hit_rate * 100, "% of the prompt", f"{key}_hit_percent")
        report.add(f"{name}: saved", result.num_cached, "tokens", f"{key}_saved_tokens")
    report.add("speed-up by sharing", apart.seconds / shared.seconds, "times", "speedup")
    report.add_limit(limit)
    report.finish(namespace.json)
    return 0


def measured(seconds: float, outputs: list[RequestOutput], before: EngineStats, after: EngineStats) -> Measured:
    num_prompt, num_cached = sum(len(output.prompt_token_ids) for output in outputs), sum(output.num_cached_tokens for output in outputs)
    return Measured(
        seconds,
        sum(len(choice.token_ids) for output in outputs for choice in output.outputs),
        statistics.mean(output.metrics.first_token_latency for output in outputs if output.metrics is not None),
        after.num_steps - before.num_steps,
        num_cached,
        num_cached / num_prompt,
    )
