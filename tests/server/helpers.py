"""Calls into an app over a fake engine, without a network."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
from starlette.applications import Starlette

from canter.core.config import EngineArgs
from canter.server.app import build_app
from canter.server.args import ServerArgs
from canter.server.metrics import Metrics
from canter.text.parsing.load import load_format
from tests.fake_core import INFO, FakeCore
from tests.fakes import FakeEngineClient, fake_text, fake_tokenizer

MODEL = "m"


class Harness:
    """An app with everything around it; make it inside a running loop."""

    def __init__(
        self,
        core: FakeCore | None = None,
        *,
        engine_args: EngineArgs | None = None,
        defaults: dict[str, Any] | None = None,
        ready: bool = True,
        parsers: tuple[str | None, str | None] | None = None,
        **server: Any,
    ) -> None:
        self.metrics = Metrics(MODEL)
        self.engine = FakeEngineClient(core, observer=self.metrics)
        args = ServerArgs(**{"served_model_name": [MODEL], **server})
        output_format = load_format(fake_tokenizer(), None, *parsers) if parsers else None
        text = fake_text(defaults, output_format) if ready else None
        self.app: Starlette = build_app(self.engine, text, engine_args=engine_args or EngineArgs(), server_args=args, metrics=self.metrics)
        if ready:
            self.metrics.engine_ready(INFO)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://test")

    async def chat(self, content: str = "hi", **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}], **fields})

    async def complete(self, prompt: Any = "abc", **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": prompt, **fields})


def with_harness(body: Callable[[Harness], Any], core: FakeCore | None = None, *, seconds: float = 30, **options: Any) -> Any:
    """Run `await body(harness)`, and fail if that takes longer than `seconds`."""

    async def main() -> Any:
        return await body(Harness(core, **options))

    return asyncio.run(asyncio.wait_for(main(), seconds))


def events(response: httpx.Response) -> list[Any]:
    """The events of a stream, checked to end in [DONE], which is left out."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of an answer, checked to wear the envelope."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == status
    return body["error"]
