"""`canter serve`: the HTTP server."""

from __future__ import annotations

import gc
import importlib
from argparse import Namespace
from typing import cast

from canter.cli.args import Parser, add_engine_flags, add_flags, engine_args, given
from canter.client.launch import EngineLaunch
from canter.server.args import ServerArgs

EXAMPLES = """\
  canter serve                                            the bundled model on port 8000
  canter serve ./Qwen3-0.6B --port 9000 --api-key secret
  canter serve ./model.gguf --max-model-len 8k --kv-cache-memory-bytes 2G
  canter serve owner/name --served-model-name assistant --generation-config vllm

  curl http://localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Hello!"}]}'
"""


def build_parser() -> Parser:
    text = "Serve a model over HTTP, with the OpenAI API. The port is open at once; /health says when the model is loaded."
    parser = Parser("canter serve", text, EXAMPLES)
    add_engine_flags(parser)
    add_flags(parser, ServerArgs)
    return parser


def run(namespace: Namespace) -> int:
    args, server = engine_args(namespace), ServerArgs.parse(**given(namespace, ServerArgs))
    launch = EngineLaunch()  # before this process loads its own modules, which it does beside the engine
    gc.disable()
    try:
        run_server = importlib.import_module("canter.server.serve").run_server
        gc.freeze()  # the modules stay: a collection has no need to look at them
        gc.enable()
        return cast(int, run_server(args, server, launch=launch))
    finally:
        launch.discard()
