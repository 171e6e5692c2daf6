"""`canter run-batch`: answer a file of requests, and go on where a run before stopped."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
from argparse import Namespace
from collections.abc import AsyncIterator, Collection, Iterator

from canter.cli.args import Parser, add_engine_flags, add_flags, engine_args, flag_words, given, number_from
from canter.cli.batch.output import Output
from canter.cli.batch.progress import Progress
from canter.cli.batch.remote import ServerCaller, fetch, is_url, send, temporary_file
from canter.cli.batch.runner import Caller, Runner
from canter.cli.batch.source import Source, read_ahead
from canter.core.config import EngineArgs
from canter.core.errors import ConfigError
from canter.core.logging import configure_logging
from canter.server.args import ServerArgs
from canter.server.batch import batch_paths, served_app

EXAMPLES = """\
  canter run-batch -i requests.jsonl -o results.jsonl
  canter run-batch -i requests.jsonl -o results.jsonl ./Qwen3-0.6B --max-model-len 8k
  canter run-batch -i requests.jsonl.gz -o - --max-concurrency 32 > results.jsonl
  canter run-batch -i requests.jsonl -o results.jsonl --url http://localhost:8000/v1

A line of the input, and one of the output:
  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "Hello!"}]}}
  {"id": "batch_req_1", "custom_id": "1", "response": {"status_code": 200, "request_id": "batch-...", "body": {...}}, "error": null}
"""

SERVER_FIELDS = (
    "served_model_name",
    "chat_template",
    "trust_request_chat_template",
    "response_role",
    "max_body_bytes",
    "enable_prompt_tokens_details",
)
"""The server's arguments that mean something without a socket."""
REMOTE_CONCURRENCY = 64


def build_parser() -> Parser:
    text = "Answer a file of OpenAI batch requests. Each line is answered by itself; a second run goes on where the first stopped."
    parser = Parser("canter run-batch", text, EXAMPLES)
    group = parser.add_argument_group("batch")
    group.add_argument(
        "-i", "--input-file", required=True, metavar="FILE", help="Requests, one a line; - is standard input; may end in .gz, or be a URL."
    )
    group.add_argument(
        "-o",
        "--output-file",
        required=True,
        metavar="FILE",
        help="Results, added to those there; - is standard output; a URL gets a PUT.",
    )
    group.add_argument("--output-tmp-dir", metavar="DIR", help="Where files lie that come from a URL or go to one. Default: the system's.")
    group.add_argument(
        "--max-concurrency",
        type=number_from(int, 1),
        metavar="N",
        help=f"Most requests at once. Default: twice the engine's batch; {REMOTE_CONCURRENCY} with --url.",
    )
    group.add_argument("--url", help="API root of a running server to ask (http://localhost:8000/v1), instead of an engine of one's own.")
    group.add_argument("--api-key", dest="key", help="Key for --url. Default: the environment variable OPENAI_API_KEY.")
    add_engine_flags(parser)
    add_flags(parser, ServerArgs, skip=[field.name for field in dataclasses.fields(ServerArgs) if field.name not in SERVER_FIELDS])
    return parser


def run(namespace: Namespace) -> int:
    args, server_args = engine_args(namespace), ServerArgs.parse(**given(namespace, ServerArgs))
    if namespace.url and (words := [*flag_words(args), *flag_words(server_args)]):
        raise ConfigError(f"With --url the server already has its model; leave out {words[0]}.")
    if namespace.output_file.endswith(".gz"):
        raise ConfigError("Results are written line by line as plain text: compress the file when it is done.")
    configure_logging()
    with contextlib.ExitStack() as stack:
        source = Source(stack.enter_context(_input_path(namespace)), server_args.max_body_bytes)
        source.verify()
        sends = is_url(namespace.output_file)
        path = temporary_file(namespace.output_tmp_dir, ".jsonl") if sends else namespace.output_file
        if path != "-" and os.path.exists(path) and not source.is_stream and os.path.samefile(path, source.path):
            raise ConfigError("Input and output are the same file.")
        output = stack.enter_context(Output(str(path)))
        total = None if source.is_stream else source.check(output.done)
        if total is not None and total == len(output.done):
            print(f"{namespace.output_file} has the results of all {total:,} lines already.", file=sys.stderr)
        else:
            status = asyncio.run(_Batch(namespace, source, output, total).run())
            if status:
                return status
        output.put_in_order()
        if sends:
            send(path, namespace.output_file)
            os.unlink(path)
    return 0


@contextlib.contextmanager
def _input_path(namespace: Namespace) -> Iterator[str]:
    """The file to read; one that had to be fetched is removed again."""
    if not is_url(namespace.input_file):
        yield namespace.input_file
        return
    path = fetch(namespace.input_file, namespace.output_tmp_dir)
    try:
        yield str(path)
    finally:
        path.unlink()


class _Batch:
    """One run, and the signals that end it early."""

    def __init__(self, namespace: Namespace, source: Source, output: Output, total: int | None) -> None:
        self._namespace = namespace
        self._source = source
        self._output = output
        self._total = total
        self._signal = 0

    async def run(self) -> int:
        """Answer all lines. Returns the exit status: 0, or 128 + the number of the signal that stopped it."""
        task = asyncio.create_task(self._answer())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop, number, task)
        try:
            await task
        except asyncio.CancelledError:
            if not self._signal:
                raise
            return 128 + self._signal
        return 0

    def _stop(self, number: int, task: asyncio.Task[None]) -> None:
        if self._signal:
            os._exit(128 + number)  # the engine ends with this process
        self._signal = number
        task.cancel()

    async def _answer(self) -> None:
        async with self._caller() as (caller, concurrency, paths):
            progress = Progress(self._total, len(self._output.done), sys.stderr)
            end = "stopped: run again to go on"
            try:
                runner = Runner(caller, self._output.write, progress, concurrency, paths)
                async with read_ahead(self._source) as portions:
                    await runner.run(portions, self._output.done)
                end = f"results in {self._namespace.output_file}"
            finally:
                progress.close(end)

    @contextlib.asynccontextmanager
    async def _caller(self) -> AsyncIterator[tuple[Caller, int, Collection[str] | None]]:
        """Who answers, how many requests at once, and the paths that may be asked."""
        namespace = self._namespace
        if namespace.url:
            concurrency = namespace.max_concurrency or REMOTE_CONCURRENCY
            async with ServerCaller(namespace.url, namespace.key, concurrency) as remote:
                yield remote, concurrency, None
            return
        args = engine_args(namespace)
        if "max_prefill_slowdown" not in given(namespace, EngineArgs):
            args = dataclasses.replace(args, max_prefill_slowdown=0.0)  # nobody reads along
        async with served_app(args, ServerArgs.parse(**given(namespace, ServerArgs))) as caller:
            yield caller, namespace.max_concurrency or caller.concurrency, batch_paths()
