"""The start of an engine behind an app: whoever serves one, over HTTP or a file of requests, begins here."""

from __future__ import annotations

import asyncio

from canter.client.remote import RemoteClient
from canter.client.shared import SharedClient
from canter.core.errors import ConfigError
from canter.core.logging import get_logger
from canter.server.args import ServerArgs
from canter.server.model_text import ModelText, load_model_text
from canter.server.state import ServerState

logger = get_logger(__name__)


async def load_engine(client: RemoteClient | SharedClient, state: ServerState) -> None:
    """Start the engine, read the tokenizer while it loads, and give both to the app. Raises what made it fail."""
    await client.start()
    text = asyncio.create_task(asyncio.to_thread(load_model_text, state.engine_args, state.server_args.chat_template))
    ready = asyncio.create_task(client.wait_ready())
    try:
        # Whichever fails first says why: the other would only follow.
        for first in asyncio.as_completed((text, ready)):
            await first
    except BaseException:
        ready.cancel()
        text.add_done_callback(lambda task: task.cancelled() or task.exception())  # the other's reason is told already
        raise
    _check_tools(text.result(), state.server_args)
    client.set_tokenizer(text.result().tokenizer)
    info = ready.result()
    state.metrics.engine_ready(info)
    state.text = text.result()
    logger.info(
        "ready: %s on %s, %s, context %d tokens, cache %d tokens", ", ".join(state.model_names), info.device, info.dtype,
        info.max_model_len, info.cache_tokens,
    )  # fmt: skip


def _check_tools(text: ModelText, server_args: ServerArgs) -> None:
    """Raises `ConfigError` where calls must be read and nobody knows how."""
    if server_args.enable_auto_tool_choice and (text.output_format is None or not text.output_format.reads_tools):
        raise ConfigError(
            "enable_auto_tool_choice: it isn't known how this model writes tool calls. Name the format with --tool-call-parser."
        )
