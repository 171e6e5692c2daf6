"""What every route needs, and the questions that several ask of it."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field

from starlette.requests import Request

from canter.client.protocol import EngineClient
from canter.core.config import EngineArgs
from canter.core.errors import EngineNotReadyError, ModelNotFoundError
from canter.server.args import ServerArgs
from canter.server.generation import Generation
from canter.server.metrics import Metrics
from canter.server.model_text import ModelText
from canter.server.request_ids import SAFE_ID, made_request_id
from canter.server.schemas.openai import PromptTokensDetails, Usage
from canter.server.tracing import Tracing
from canter.server.traffic import ID_MARK, Traffic


@dataclass(eq=False)
class ServerState:
    """Mutable in two points: `text` comes when the tokenizer is read, `draining` when the server stops."""

    client: EngineClient
    engine_args: EngineArgs
    server_args: ServerArgs
    metrics: Metrics
    text: ModelText | None = None
    draining: bool = False
    tracing: Tracing | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    _serial: itertools.count[int] = field(default_factory=itertools.count)
    _generation: Generation | None = None
    traffic: Traffic = field(init=False)

    def __post_init__(self) -> None:
        self.traffic = Traffic(self.client, self.server_args.request_timeout)

    @property
    def model_names(self) -> list[str]:
        return self.server_args.served_model_name or [self.engine_args.model]

    def generation(self) -> Generation:
        """The pipeline. Raises `EngineNotReadyError` while loading or stopping, `EngineDeadError` when the engine is gone."""
        if self.draining:
            raise EngineNotReadyError("The server is stopping. Send the request to another one.")
        if self._generation is None:
            self.client.check_health()
            if self.text is None or self.client.info is None:
                raise EngineNotReadyError("The model is still loading. Try again in a moment.")
            self._generation = Generation(self.client, self.text, self.engine_args, self.traffic)
        return self._generation

    def model_name(self, asked: str | None) -> str:
        """The name to answer with. Raises `ModelNotFoundError` for a name that isn't served."""
        names = self.model_names
        if not asked:
            return names[0]
        if asked not in names:
            served = ", ".join(f"`{name}`" for name in names)
            raise ModelNotFoundError(f"The model `{asked:.200}` does not exist. This server serves {served}.")
        return asked

    def new_ids(self, request: Request, prefix: str, asked: str | None) -> tuple[str, str]:
        """(id to show, id for the engine). The client's own id is kept where it can be; the engine's is unique in any case."""
        own = asked or request.headers.get("x-request-id") or ""
        shown = f"{prefix}-{own if SAFE_ID.fullmatch(own) else made_request_id(request.scope)}"
        return shown, f"{shown}{ID_MARK}{next(self._serial)}"

    def usage(self, num_prompt_tokens: int, num_generated: int, num_cached: int) -> Usage:
        return make_usage(num_prompt_tokens, num_generated, num_cached if self.server_args.enable_prompt_tokens_details else None)


def make_usage(num_prompt_tokens: int, num_generated: int, num_cached: int | None) -> Usage:
    details = None if num_cached is None else PromptTokensDetails(num_cached)
    return Usage(num_prompt_tokens, num_prompt_tokens + num_generated, num_generated, details)


def server_state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state
