"""`canter bench serve`: load on a server that speaks the OpenAI API, and what its users would see."""

from __future__ import annotations

import os
import re
import sys
import time
from argparse import ArgumentTypeError, BooleanOptionalAction, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
from tqdm.std import tqdm

from canter.checkpoint.resolve import resolve
from canter.cli.api import ApiClient, ServerError, api_root
from canter.cli.args import Parser, add_number, json_object, number_from
from canter.cli.bench.datasets import EXACT, Ask, add_dataset_flags, make_asks, words
from canter.cli.bench.load import Plan, Target, arrivals, run_plan, warm_up
from canter.cli.bench.report import add_report_flags
from canter.cli.bench.serve_report import METRICS, report
from canter.core.config import QUANTIZATIONS
from canter.core.errors import ConfigError

EXAMPLES = """\
  canter bench serve --url http://localhost:8000/v1                           64 requests at once
  canter bench serve --request-rate 2 --num-prompts 100                       a new request every half second on average
  canter bench serve --max-concurrency 8 --random-input-len 512               eight users, each asking when answered
  canter bench serve --dataset-name prefix_repetition --goodput ttft:500 tpot:50
  canter bench serve --dataset-name sharegpt --dataset-path chats.json --backend openai-chat --save-result --label night
"""

ENDPOINTS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}
GOALS = ("ttft", "tpot", "e2el")
SAMPLING = {
    "top_p": "Draw from the likeliest tokens that hold this share.",
    "top_k": "Draw from so many of the likeliest tokens.",
    "min_p": "Leave out tokens less likely than this part of the likeliest.",
    "frequency_penalty": "As the API has it.",
    "presence_penalty": "As the API has it.",
    "repetition_penalty": "As vLLM has it.",
}


def build_parser() -> Parser:
    text = "Send requests to a running server and measure TTFT, TPOT, ITL and E2EL. Works with any server that has the OpenAI API."
    parser = Parser("canter bench serve", text, EXAMPLES)
    _add_server_flags(parser)
    _add_load_flags(parser)
    add_dataset_flags(parser)
    _add_answer_flags(parser)
    _add_result_flags(parser)
    group = parser.add_argument_group("limit")
    group.add_argument("--weights", metavar="MODEL", help="The served model's files on this machine: speeds then stand beside its limit.")
    group.add_argument(
        "--weights-dtype",
        default="float32",
        choices=("float32", "bfloat16", "float16"),
        help="Type the server holds them in. Default: float32.",
    )
    group.add_argument(
        "--weights-quantization",
        default="auto",
        choices=QUANTIZATIONS,
        help="Form the server computes them in, as its --quantization. Default: auto, that of the files.",
    )
    return parser


def _add_server_flags(parser: Parser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--url", "--base-url", help="API root. Default: http://localhost:8000/v1.")
    group.add_argument("--host", help="Instead of --url, together with --port.")
    group.add_argument("--port", type=number_from(int, 1), metavar="N", help="Instead of --url.")
    group.add_argument("--api-key", help="Default: the environment variable OPENAI_API_KEY.")
    group.add_argument("--header", nargs="+", action="extend", default=[], type=pair, metavar="NAME=VALUE", help="Headers to send.")
    group.add_argument("--insecure", action="store_true", help="Don't check the server's certificate.")
    group.add_argument("--model", metavar="NAME", help="Default: the server's first.")
    group.add_argument(
        "--backend",
        choices=tuple(ENDPOINTS),
        default="openai",
        help="openai (or vllm): /v1/completions, with token ids where the prompts are random, so that lengths are exact; "
        "openai-chat: /v1/chat/completions, with as many words. Default: openai.",
    )
    group.add_argument("--endpoint", metavar="PATH", help="Path to ask instead of the backend's.")
    add_number(group, "--ready-check-timeout-sec", default=0.0, doc="Wait so many seconds for the server to answer.")


def _add_load_flags(parser: Parser) -> None:
    group = parser.add_argument_group("load")
    add_number(group, "--num-prompts", default=64, doc="Requests.", least=1)
    add_number(group, "--request-rate", default=float("inf"), doc="New requests a second, at random; inf: all at once.", least=0.001)
    add_number(group, "--burstiness", default=1.0, doc="1: a Poisson process; less: bursts; more: even times between.", least=0.001)
    group.add_argument("--max-concurrency", type=number_from(int, 1), metavar="N", help="Most requests at once. Default: no limit.")
    group.add_argument(
        "--ramp-up-strategy", choices=("linear", "exponential"), help="Let the rate grow from the first request to the last."
    )
    group.add_argument("--ramp-up-start-rps", type=number_from(float, 0.001), metavar="X", help="Requests a second at first.")
    group.add_argument("--ramp-up-end-rps", type=number_from(float, 0.001), metavar="X", help="Requests a second at the end.")
    add_number(group, "--num-warmups", default=1, doc="Requests before the clock starts.")
    add_number(group, "--num-clients", default=1, doc="Processes that send; more when the report says that the client was busy.", least=1)
    add_number(group, "--seed", default=0, doc="Prompts and arrival times follow from it.")


def _add_answer_flags(parser: Parser) -> None:
    group = parser.add_argument_group("answers")
    add_number(group, "--temperature", default=0.0, doc="Randomness of the answers.")
    for name, doc in SAMPLING.items():
        kind = int if name == "top_k" else float
        group.add_argument(
            f"--{name.replace('_', '-')}", type=kind, metavar="N" if kind is int else "X", help=f"{doc} Default: the server's."
        )
    group.add_argument("--logprobs", type=number_from(int, 0), metavar="N", help="Ask for so many logprobs of each token.")
    group.add_argument(
        "--ignore-eos",
        action=BooleanOptionalAction,
        default=None,
        help="Let no answer end early. Default: on for random and prefix_repetition; off for servers that don't know it: --no-ignore-eos.",
    )
    group.add_argument(
        "--continuous-usage-stats",
        action="store_true",
        help="Ask for the tokens so far in every chunk, so that chunks of several tokens count as several.",
    )
    group.add_argument("--extra-body", type=json_object, default={}, metavar="JSON", help="Fields to add to every request.")


def _add_result_flags(parser: Parser) -> None:
    group = parser.add_argument_group("result")
    group.add_argument(
        "--percentile-metrics", type=metric_list, default=list(METRICS), metavar="LIST", help=f"Default: {','.join(METRICS)}."
    )
    group.add_argument("--metric-percentiles", type=percentile_list, default=[50.0, 90.0, 99.0], metavar="LIST", help="Default: 50,90,99.")
    group.add_argument(
        "--goodput",
        nargs="+",
        type=goal,
        default=[],
        metavar="NAME:MS",
        help=f"Count requests that meet all of these, in milliseconds: {', '.join(GOALS)}.",
    )
    group.add_argument("--label", help="Names the run in files of results.")
    group.add_argument(
        "--metadata", nargs="+", action="extend", default=[], type=pair, metavar="NAME=VALUE", help="Facts to write into them."
    )
    group.add_argument("--save-result", action="store_true", help="Write the figures to a file of their own.")
    group.add_argument("--save-detailed", action="store_true", help="Write each request's figures too.")
    group.add_argument("--append-result", action="store_true", help="Add a line to the file instead of writing it anew.")
    group.add_argument("--result-dir", default=".", metavar="DIR", help="Folder of that file. Default: this one.")
    group.add_argument("--result-filename", metavar="NAME", help="Default: made of label, rate, model and time.")
    add_report_flags(parser)


def percentile_list(text: str) -> list[float]:
    """The value of a flag such as 50,90,99."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 <= value <= 100 for value in values):
        raise ArgumentTypeError(f"expected numbers from 0 to 100 such as 50,90,99, got {text!r}")
    return values


def metric_list(text: str) -> list[str]:
    """The value of a flag such as ttft,tpot."""
    values = text.split(",")
    if not set(values) <= set(METRICS):
        raise ArgumentTypeError(f"expected some of {','.join(METRICS)}, got {text!r}")
    return [name for name in METRICS if name in values]


def goal(text: str) -> tuple[str, float]:
    """A goal such as ttft:200, in seconds."""
    name, _, value = text.partition(":")
    try:
        milliseconds = float(value)
    except ValueError:
        milliseconds = -1.0
    if name not in GOALS or not 0 < milliseconds < float("inf"):
        raise ArgumentTypeError(f"expected one of {', '.join(GOALS)} with milliseconds, such as ttft:200, got {text!r}")
    return name, milliseconds / 1000


def pair(text: str) -> tuple[str, str]:
    """A value such as name=value, fit for a header."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or re.search(r"[\r\n\0]", text):
        raise ArgumentTypeError(f"expected NAME=VALUE on one line, got {text!r}")
    return name.strip(), value


def run(namespace: Namespace) -> int:
    if namespace.weights:
        resolve(namespace.weights)  # a wrong name should not be told of after the load
    if not Path(namespace.result_dir).is_dir():
        raise ConfigError(f"There is no directory {namespace.result_dir!r} for the result.")
    rate = rate_of(namespace)
    asks = make_asks(namespace, namespace.num_prompts, namespace.seed)
    warm = make_asks(namespace, namespace.num_warmups, namespace.seed + 1)
    model = namespace.model or first_model(namespace)
    target = target_of(namespace)
    warm_up(target, [encode(namespace, model, ask) for ask in warm])
    bodies = [encode(namespace, model, ask) for ask in asks]
    plan = Plan(target, bodies, arrivals(len(bodies), rate, namespace.burstiness, namespace.seed), namespace.max_concurrency)
    num_clients = min(namespace.num_clients, len(bodies), namespace.max_concurrency or len(bodies))
    with tqdm(total=len(bodies), desc="Requests", dynamic_ncols=True, disable=not sys.stderr.isatty() or num_clients > 1) as bar:
        outcome = run_plan(plan, num_clients, lambda result: bar.update(1) and None)
    report(namespace, model, outcome)
    return 0 if all(result.error is None for result in outcome.results) else 1


def rate_of(namespace: Namespace) -> float | Callable[[float], float]:
    """Requests a second, or how that changes. Raises `ConfigError` for flags that contradict each other."""
    start, end = namespace.ramp_up_start_rps, namespace.ramp_up_end_rps
    if namespace.ramp_up_strategy is None:
        if start is not None or end is not None:
            raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy.")
        return float(namespace.request_rate)
    if start is None or end is None:
        raise ConfigError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps.")
    if namespace.request_rate != float("inf"):
        raise ConfigError("--request-rate is one rate; leave it out with --ramp-up-strategy.")
    if namespace.ramp_up_strategy == "linear":
        return lambda part: start + (end - start) * part
    return lambda part: start * (end / start) ** part


def root_of(namespace: Namespace) -> str:
    """The API root that --url, or --host and --port, name."""
    if namespace.url and (namespace.host or namespace.port):
        raise ConfigError("Give --url, or --host and --port.")
    return api_root(namespace.url or f"http://{namespace.host or 'localhost'}:{namespace.port or 8000}")


def target_of(namespace: Namespace) -> Target:
    """The address and the headers of every request."""
    root = root_of(namespace)
    path = namespace.endpoint or ENDPOINTS[namespace.backend]
    if not path.startswith("/"):
        raise ConfigError(f"--endpoint must begin with /, got {path!r}.")
    # With an API root of one's own, the paths below /v1 are below that.
    url = root + path.removeprefix("/v1") if not namespace.endpoint else "{0.scheme}://{0.netloc}".format(urlsplit(root)) + path
    key = namespace.api_key or os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return Target(url, headers | dict(namespace.header), not namespace.insecure)


def first_model(namespace: Namespace) -> str:
    """The server's first model; waits for the server as long as --ready-check-timeout-sec says."""
    deadline = time.monotonic() + namespace.ready_check_timeout_sec
    transport = httpx.HTTPTransport(verify=False) if namespace.insecure else None
    with ApiClient(root_of(namespace), namespace.api_key, transport) as client:
        while True:
            try:
                return client.first_model()
            except ServerError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(0.5)


def encode(namespace: Namespace, model: str, ask: Ask) -> bytes:
    """The body of a request."""
    chat = namespace.backend == "openai-chat"
    usage: dict[str, Any] = {"include_usage": True} | ({"continuous_usage_stats": True} if namespace.continuous_usage_stats else {})
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": ask.output_len,
        "temperature": namespace.temperature,
        "stream": True,
        "stream_options": usage,
    }
    ignore_eos = namespace.dataset_name in EXACT if namespace.ignore_eos is None else namespace.ignore_eos
    if ignore_eos:
        body["ignore_eos"] = True
    body |= {name: value for name in SAMPLING if (value := getattr(namespace, name)) is not None}
    if namespace.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": namespace.logprobs} if chat else {"logprobs": namespace.logprobs}
    if not chat and ask.messages is not None:
        raise ConfigError("The file has messages, which are for chat: use --backend openai-chat.")
    if chat:
        text = words(ask.prompt) if isinstance(ask.prompt, list) else ask.prompt
        body["messages"] = ask.messages or [{"role": "user", "content": text}]
    else:
        body["prompt"] = ask.prompt
    return msgspec.json.encode(body | namespace.extra_body)
