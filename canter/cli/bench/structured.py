"""`canter bench structured`: what it costs that outputs obey grammars, and whom else it costs something.

First decoding, offline: the same batches free and under a schema for each request, in turns. Then a server: the gaps between the
tokens of streams, alone, beside as many free requests as there are schemas, and beside requests with a new schema each.
"""

from __future__ import annotations

import asyncio
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from statistics import median
from typing import Any

import httpx
from tqdm.auto import tqdm

import canter
from canter.cli.args import Parser, add_engine_flags, add_number, engine_args, flag_words
from canter.cli.bench.offline import load
from canter.cli.bench.prompts import random_prompts
from canter.cli.bench.report import Report, add_report_flags, summary
from canter.cli.private_server import private_server
from canter.core.sampling_params import SamplingParams
from canter.core.structured_outputs import StructuredOutputsParams

EXAMPLES = """\
  canter bench structured
  canter bench structured ./model.gguf --batch-sizes 1 --schemas 0 --json structured.json
"""

PROMPT_TOKENS = 16
WARM_SECONDS = 1.0
FIELDS = ("name", "city", "age", "street_address", "is_active", "note", "parent_id", "price_in_euros")
KINDS: tuple[dict[str, Any], ...] = (
    {"type": "string", "maxLength": 24},
    {"type": "integer"},
    {"type": "boolean"},
    {"enum": ["red", "green", "blue"]},
)


def build_parser() -> Parser:
    parser = Parser("canter bench structured", "Measure what outputs that obey a schema cost, and whether they stall others.", EXAMPLES)
    parser.add_argument("--batch-sizes", type=sizes, default=(1, 32), metavar="N,N", help="Requests at once, decoding (default: 1,32).")
    add_number(parser, "--output-len", default=64, doc="Tokens generated for each.", least=2)
    add_number(parser, "--num-iters", default=3, doc="Measured runs of each kind.", least=1)
    add_number(parser, "--schemas", default=50, doc="Requests with a schema of their own that come at once; 0: don't measure streams.")
    add_number(parser, "--beside-len", default=32, doc="Tokens generated for each of them.", least=1)
    add_number(parser, "--streams", default=4, doc="Streams beside them.", least=1)
    add_number(parser, "--seconds", default=5, doc="How long the streams are watched alone.", least=1)
    add_report_flags(parser)
    add_engine_flags(parser)
    return parser


def run(namespace: Namespace) -> int:
    arguments = engine_args(namespace)
    report = Report("structured")
    if namespace.batch_sizes:
        with load(namespace, enable_prefix_caching=False) as llm:
            for size in namespace.batch_sizes:
                time_decoding(llm, size, namespace.output_len, namespace.num_iters, arguments.seed, report)
    if namespace.schemas:
        with private_server(flag_words(arguments)) as server:
            gaps = asyncio.run(watch_streams(server.url, namespace.streams, namespace.schemas, namespace.beside_len, namespace.seconds))
        report_gaps(gaps, report)
    report.data["engine_flags"] = flag_words(arguments)
    report.finish(namespace.json)
    return 0


def sizes(text: str) -> tuple[int, ...]:
    """Whole numbers from 1 on, parted by commas; none for an empty text."""
    found = tuple(int(part) if part.strip().isdecimal() else 0 for part in text.split(",") if part.strip())
    if 0 in found:
        raise ArgumentTypeError(f"expected whole numbers of at least 1, parted by commas, got {text!r}")
    return found


def schema(index: int, least: int = 1) -> dict[str, Any]:
    """A list of `least` objects or more. No two indices give the same names."""
    names = [f"{FIELDS[(index + i) % len(FIELDS)]}_{index}" for i in range(4)]
    properties = {name: KINDS[(index + i) % len(KINDS)] for i, name in enumerate(names)}
    item = {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
    return {"type": "array", "items": item, "minItems": least}


def time_decoding(llm: canter.LLM, size: int, output_len: int, num_iters: int, seed: int, report: Report) -> None:
    """Tokens a second of a batch, free and bound: as many of each request, so that only the time differs."""
    free = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=output_len)
    # A list of so many objects is not at its end before the tokens are.
    bound = [
        SamplingParams(temperature=0.0, max_tokens=output_len, structured_outputs=StructuredOutputsParams(json=schema(i, output_len)))
        for i in range(size)
    ]
    seconds: dict[str, list[float]] = {"free": [], "bound": []}
    num_ahead = 0
    for i in tqdm(range(num_iters + 1), desc=f"Batches of {size}", dynamic_ncols=True):
        ids = random_prompts(size, PROMPT_TOKENS, seed + i, vocab_size=llm.info.vocab_size)
        for name, params in (("free", [free] * size), ("bound", bound)):
            before, start = llm.stats().num_accepted_drafts, time.perf_counter()
            outputs = llm.generate([{"prompt_token_ids": one} for one in ids], params, use_tqdm=False)
            elapsed = time.perf_counter() - start
            if {len(o.outputs[0].token_ids) for o in outputs} != {output_len}:
                raise RuntimeError("an output ended before it should have")
            if i:  # the first of each warms up
                seconds[name].append(elapsed)
                num_ahead += llm.stats().num_accepted_drafts - before
    rates = {name: size * output_len / median(values) for name, values in seconds.items()}
    for name, rate in rates.items():
        report.add(f"batch of {size}, {name}", rate, "tokens/s", f"batch_{size}_{name}_tokens_s")
    report.add(f"batch of {size}, bound / free", rates["bound"] / rates["free"], "", f"batch_{size}_ratio")
    share = num_ahead / (size * output_len * num_iters)
    report.add(f"batch of {size}, tokens without a step of their own", 100 * share, "%", f"batch_{size}_jump_ahead_percent")


async def watch_streams(url: str, num_streams: int, num_schemas: int, beside_len: int, seconds: float) -> dict[str, list[float]]:
    """Gaps in seconds between the tokens of all streams: alone, beside free requests, beside bound ones."""
    found: dict[str, list[float]] = {}
    gaps: list[float] = []
    prompts = random_prompts(num_schemas, PROMPT_TOKENS, seed=2)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False, limits=limits) as http:
        streams = [asyncio.create_task(_stream(http, prompt, gaps)) for prompt in random_prompts(num_streams, PROMPT_TOKENS, seed=1)]
        await asyncio.sleep(WARM_SECONDS)
        gaps.clear()
        await asyncio.sleep(seconds)
        found["alone"] = gaps.copy()
        for name, schemas in (("free", [None] * num_schemas), ("bound", [schema(i, beside_len) for i in range(num_schemas)])):
            gaps.clear()
            async with asyncio.TaskGroup() as group:
                for prompt, wanted in zip(prompts, schemas, strict=True):
                    group.create_task(_complete(http, prompt, beside_len, wanted))
            found[name] = gaps.copy()
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return found


async def _complete(http: httpx.AsyncClient, prompt: Sequence[int], max_tokens: int, wanted: dict[str, Any] | None) -> None:
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    body |= {"ignore_eos": True} if wanted is None else {"structured_outputs": {"json": wanted}}
    (await http.post("/completions", json=body)).raise_for_status()


async def _stream(http: httpx.AsyncClient, prompt: Sequence[int], gaps: list[float]) -> None:
    """Generate without end, and note the time from each piece to the next."""
    body = {"prompt": prompt, "max_tokens": 1000, "ignore_eos": True, "stream": True, "temperature": 0}
    while True:
        async with http.stream("POST", "/completions", json=body) as response:
            response.raise_for_status()
            last = None
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    now = time.perf_counter()
                    if last is not None:
                        gaps.append(now - last)
                    last = now


def report_gaps(gaps: dict[str, list[float]], report: Report) -> None:
    """The middle and the longest gaps of each time; and how much longer they are beside schemas than beside what is free."""
    for name, values in gaps.items():
        for key, value in summary([1000 * gap for gap in values], (50, 99, 100)).items():
            if key != "mean":
                label = "longest" if key == "p100" else key
                report.add(f"gaps of streams, {name}, {label}", value, "ms", f"gap_{name}_{key}_ms")
    longest = {name: summary(values, (99,))["p99"] for name, values in gaps.items()}
    for name in ("alone", "free"):
        if longest[name]:
            report.add(f"p99 beside schemas / {name}", longest["bound"] / longest[name], "", f"gap_p99_to_{name}")
