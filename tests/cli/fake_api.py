"""A server of the OpenAI API made of canned chunks, behind an httpx transport."""

from __future__ import annotations

import json
from typing import Any

import httpx


def sse(*events: dict[str, Any]) -> str:
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


def chat_chunks(*texts: str, thought: str = "", usage: tuple[int, int] = (5, 3)) -> str:
    """A streamed chat answer: a role, perhaps a thought, texts, the end, the usage."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning": thought}] if thought else []
    deltas += [{"content": text} for text in texts]
    events: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    events.append({"choices": [], "usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1]}})
    return sse(*events)


def completion_chunks(*texts: str, usage: tuple[int, int] = (5, 3)) -> str:
    events: list[dict[str, Any]] = [{"choices": [{"index": 0, "text": text, "finish_reason": None}]} for text in texts]
    events.append({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
    events.append({"choices": [], "usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1]}})
    return sse(*events)


class FakeApi:
    """Answers like a server and remembers the bodies it was sent."""

    def __init__(self, chat: str = chat_chunks("Hel", "lo"), completion: str = completion_chunks(" Par", "is"), status: int = 200) -> None:
        self.chat, self.completion, self.status = chat, completion, status
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[httpx.Headers] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.headers.append(request.headers)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "tiny"}, {"id": "other"}]})
        self.bodies.append(json.loads(request.content))
        if self.status != 200:
            return httpx.Response(self.status, json={"error": {"message": "prompt too long", "code": self.status}})
        return httpx.Response(200, text=self.chat if request.url.path.endswith("/chat/completions") else self.completion)

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self)
