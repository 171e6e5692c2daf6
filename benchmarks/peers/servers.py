"""Engines as servers: how soon the first token comes, and what a full house holds in memory."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from peers.driver import DECODING, WORKS, figure, make_prompts
from peers.processes import EngineFailed, EngineProcess

START_SECONDS = 600.0
"""The longest wait for a server."""


class HttpServer:
    """A server with the OpenAI API, started here. `{port}` in its command becomes a free port."""

    def __init__(self, command: Sequence[str], env: dict[str, str] | None = None) -> None:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = int(one.getsockname()[1])
        self.process = EngineProcess([word.replace("{port}", str(self.port)) for word in command], env)

    def wait_until_ready(self) -> float:
        """Seconds from the start of the process to the first streamed token."""
        try:
            while time.perf_counter() - self.process.started < START_SECONDS:
                if self.process.has_ended:
                    raise self.process.failure()
                try:
                    self._model = self._first_model()
                    self.complete("Hello", 1)
                    return time.perf_counter() - self.process.started
                except (OSError, http.client.HTTPException, NotReady):
                    time.sleep(0.02)
            raise EngineFailed(f"{' '.join(self.process.command)} was not ready in {START_SECONDS:.0f} s:\n{self.process.tail()}")
        except BaseException:
            self.process.close()
            raise

    def _first_model(self) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_SECONDS)
        connection.request("GET", "/v1/models")
        response = connection.getresponse()
        if response.status != 200:
            raise NotReady
        return str(json.loads(response.read())["data"][0]["id"])

    def complete(self, prompt: str | list[int], count: int) -> int:
        """Stream one completion, greedy and past any end token; returns the tokens that the server counted."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_SECONDS)
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status in (404, 503):
            raise NotReady
        if response.status != 200:
            raise EngineFailed(f"{self.process.command[0]} answered {response.status}: {response.read()[:500]!r}")
        counted = 0
        for line in response:
            if line.startswith(b"data: {"):
                event: dict[str, Any] = json.loads(line[6:])
                counted = (event.get("usage") or {}).get("completion_tokens", counted)
        return counted

    def complete_all(self, prompts: list[list[int]], count: int) -> float:
        """Seconds for all prompts, sent at once."""
        start = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            counts = list(pool.map(lambda prompt: self.complete(prompt, count), prompts))
        if counts != [count] * len(prompts):
            raise EngineFailed(f"asked for {count} tokens each, got {sorted(set(counts))}")
        return time.perf_counter() - start

    def measure(self, name: str, seed: int) -> float:
        """Tokens a second of a workload, as a client sees it."""
        work = WORKS[name]
        first = self.complete_all(make_prompts(work, seed + 500_000), 1) if name in DECODING else 0.0
        return figure(name, self.complete_all(make_prompts(work, seed), work.out), first)


class NotReady(Exception):
    """The server answers, but not yet with a model."""
