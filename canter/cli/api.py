"""A small client of the OpenAI API for the terminal: streaming, with usage and errors in plain words."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import httpx

from canter.core.errors import CanterError

CONNECT_SECONDS = 10.0
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class ServerError(CanterError):
    """The server can't be reached, or answered with an error."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event of a stream brings: text, thought, the reason of the end, the count of tokens; each may be empty."""

    text: str = ""
    thought: str = ""
    finish_reason: str | None = None
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None


class ApiClient:
    """Talks to one server. `url` is its API root (`http://host:port/v1`; `/v1` is added to a bare address).

    `api_key` defaults to the environment variable OPENAI_API_KEY. Every method raises `ServerError`.
    """

    def __init__(self, url: str, api_key: str | None = None, transport: httpx.BaseTransport | None = None) -> None:
        self.url = api_root(url)
        key = api_key or os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(
            headers=headers,
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            transport=transport,
            trust_env=urlsplit(self.url).hostname not in LOOPBACK,  # a proxy can't reach this machine
        )

    def __enter__(self) -> ApiClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._http.close()

    def models(self) -> list[str]:
        """The names of the models that the server serves."""
        try:
            response = self._http.get(f"{self.url}/models")
        except httpx.HTTPError as error:
            raise ServerError(f"Can't reach {self.url}: {error}. Is the server running? Start one with 'canter serve'.") from error
        if response.is_error:
            raise ServerError(error_text(response))
        return [entry["id"] for entry in response.json()["data"]]

    def first_model(self) -> str:
        """The name to use when none is given."""
        names = self.models()
        if not names:
            raise ServerError(f"{self.url} serves no model.")
        return names[0]

    def chat(self, body: dict[str, Any]) -> Iterator[Piece]:
        """Stream a chat answer. Closing the iterator early ends the request."""
        return self._stream("/chat/completions", body)

    def complete(self, body: dict[str, Any]) -> Iterator[Piece]:
        """Stream a completion. Closing the iterator early ends the request."""
        return self._stream("/completions", body)

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[Piece]:
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        try:
            with self._http.stream("POST", self.url + path, json=body) as response:
                if response.is_error:
                    response.read()
                    raise ServerError(error_text(response))
                for line in response.iter_lines():
                    event = event_of(line)
                    if event is not None:
                        yield piece_of(event)
        except httpx.HTTPError as error:
            raise ServerError(f"The connection to {self.url} broke: {error or type(error).__name__}.") from error


def api_root(url: str) -> str:
    """`http://host:port` -> `http://host:port/v1`; an address with a path stays as it is."""
    if urlsplit(url).scheme not in ("http", "https"):
        raise ServerError(f"Expected an address such as http://localhost:8000/v1, got {url!r}.")
    return url.rstrip("/") if urlsplit(url).path.strip("/") else url.rstrip("/") + "/v1"


def event_of(line: str) -> dict[str, Any] | None:
    """The JSON of a server-sent event's data line; None for other lines and for the end mark. An error event raises."""
    if not line.startswith("data:"):
        return None
    data = line[5:].strip()
    if data == "[DONE]":
        return None
    event: dict[str, Any] = json.loads(data)
    if event.get("error"):
        error = event["error"]
        raise ServerError(str(error.get("message", error)) if isinstance(error, dict) else str(error))
    return event


def piece_of(event: dict[str, Any]) -> Piece:
    """One chunk of either API as a `Piece`."""
    usage = event.get("usage") or {}
    choices = event.get("choices") or [{}]
    delta = choices[0].get("delta") or {}
    return Piece(
        text=choices[0].get("text") or delta.get("content") or "",
        thought=delta.get("reasoning") or delta.get("reasoning_content") or "",
        finish_reason=choices[0].get("finish_reason"),
        num_prompt_tokens=usage.get("prompt_tokens"),
        num_output_tokens=usage.get("completion_tokens"),
    )


def error_text(response: httpx.Response) -> str:
    """The message of an error response: the OpenAI error object's, or the body's start."""
    try:
        error = response.json()["error"]
        message = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError):
        message = response.text[:500]
    return f"The server answered {response.status_code}: {message}"
