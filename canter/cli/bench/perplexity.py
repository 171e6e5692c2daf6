"""`canter bench perplexity`: how well a model predicts a text, and whether other engine arguments change that."""

from __future__ import annotations

import dataclasses
import math
from argparse import Namespace
from importlib.resources import files
from pathlib import Path
from typing import Any

import canter
from canter.cli.args import Parser, add_engine_flags, add_number, engine_args, flag_words, json_object
from canter.cli.bench.report import Report, add_report_flags
from canter.core.config import EngineArgs
from canter.core.errors import ConfigError
from canter.core.sampling_params import SamplingParams

EXAMPLES = """\
  canter bench perplexity
  canter bench perplexity ./model.gguf --text essay.txt --context-len 512
  canter bench perplexity ./model.gguf --against '{"dtype": "bfloat16"}' --json perplexity.json
"""

TEXT = "perplexity.txt"
"""Beside this file: prose, dialogue, code and lists, written for this purpose, so that no model has seen it."""


def build_parser() -> Parser:
    text = "Perplexity of a text: e to the mean surprise of its tokens. With --against, the same once more with other engine arguments."
    parser = Parser("canter bench perplexity", text, EXAMPLES)
    parser.add_argument("--text", metavar="FILE", help="The text, in UTF-8. Default: one that comes with Canter.")
    parser.add_argument("--against", type=json_object, metavar="JSON", help="Engine arguments of a second engine, over the others.")
    add_number(parser, "--context-len", default=2048, doc="The text is cut into pieces of this many tokens.", least=2)
    add_report_flags(parser)
    add_engine_flags(parser)
    return parser


def run(namespace: Namespace) -> int:
    arguments = engine_args(namespace)
    text = read_text(namespace.text)
    report = Report("perplexity", {"text": namespace.text or TEXT, "engine_flags": flag_words(arguments)})
    default = dataclasses.asdict(EngineArgs())
    values = {name: value for name, value in dataclasses.asdict(arguments).items() if value != default[name]}
    first, tokens = measure(values, text, namespace.context_len)
    report.add("tokens", tokens, "", "tokens")
    report.add("perplexity", first, "", "perplexity")
    if namespace.against is not None:
        second, _ = measure(values | namespace.against, text, namespace.context_len)
        report.data["against"] = namespace.against
        report.add(f"with {namespace.against}", second, "", "perplexity_against")
        report.add("difference", (first / second - 1) * 100, "%", "difference_percent")
    report.finish(namespace.json)
    return 0


def read_text(path: str | None) -> str:
    """The text of a file, or the one that comes with Canter. Raises `ConfigError` when it can't be read."""
    try:
        return (Path(path) if path else files("canter.cli.bench") / TEXT).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text: {path} can't be read: {error}.") from None


def measure(arguments: dict[str, Any], text: str, context_len: int) -> tuple[float, int]:
    """Perplexity of a text by the engine that `arguments` make, and the number of tokens that were predicted."""
    with canter.LLM(**arguments) as llm:
        ids = llm.get_tokenizer().encode(text)
        return perplexity(llm, ids, min(context_len, llm.info.max_model_len - 1))


def perplexity(llm: canter.LLM, token_ids: list[int], context_len: int) -> tuple[float, int]:
    """Of each piece of `context_len` tokens every token but the first is predicted from those before it in the piece."""
    pieces = [token_ids[start : start + context_len] for start in range(0, len(token_ids), context_len)]
    pieces = [piece for piece in pieces if len(piece) > 1]
    if not pieces:
        raise ConfigError("--text: two tokens are the least that can be predicted.")
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    total, count = 0.0, 0
    for output in llm.generate([{"prompt_token_ids": piece} for piece in pieces], sampling):
        assert output.prompt_logprobs is not None
        for token_id, position in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
            assert position is not None
            total -= position[token_id].logprob
            count += 1
    return math.exp(total / count), count
