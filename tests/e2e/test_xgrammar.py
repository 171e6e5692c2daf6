"""A server whose outputs xgrammar holds to their grammars, in all of its processes."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Server, serve, wait_for
from tests.engines import add_letters, tiny_checkpoint

pytestmark = pytest.mark.skipif(find_spec("xgrammar") is None, reason="needs the extra xgrammar")

SLOW = "root ::= root root root | root root | [a-z ]+"


def descendants(pid: int) -> dict[int, str]:
    """The processes below one, by their commands."""
    found: dict[int, str] = {}
    todo = [pid]
    while todo:
        for task in Path(f"/proc/{todo.pop()}/task").glob("*/children"):
            children = [int(child) for child in task.read_text().split()]
            todo += children
            found |= {child: Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ") for child in children}
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = add_letters(tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", seed=2))
    arguments = ("--served-model-name", "m", "--num-gpu-blocks-override", "400", "--num-threads", "1")
    with serve(str(model), "--structured-outputs-config.backend", "xgrammar", *arguments) as started:
        yield started
        below = descendants(started.process.pid)
        assert sum("xgrammar_worker" in command for command in below.values()) == 2
        started.process.send_signal(signal.SIGTERM)
        started.process.wait(60)
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), 20, "every process to be gone")


def complete(server: Server, wanted: dict[str, Any], **fields: Any) -> httpx.Response:
    body = {"model": "m", "prompt": "abc", "max_tokens": 60, "seed": 3, "temperature": 1.0, "structured_outputs": wanted, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def texts(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    return [choice["text"] for choice in response.json()["choices"]]


def test_several_choices_obey_each(server: Server) -> None:
    found = texts(complete(server, {"regex": "(ab|cd){2,9}x"}, n=4))
    assert len(found) == 4 and len(set(found)) > 1
    assert all(re.fullmatch("(ab|cd){2,9}x", text) for text in found)


def test_a_chat_answer_of_a_schema(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": [1, "z"]}}, "required": ["a", "b"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"model": "m", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 80, "seed": 1, "response_format": wanted}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    value = json.loads(response.json()["choices"][0]["message"]["content"])
    assert isinstance(value["a"], bool) and value["b"] in (1, "z") and len(value) == 2


def test_a_stop_string_ends_before_the_grammar(server: Server) -> None:
    response = complete(server, {"regex": "[a-c]{3}END[a-c]{20}"}, stop=["END"])
    assert re.fullmatch("[a-c]{3}", texts(response)[0]) and response.json()["choices"][0]["finish_reason"] == "stop"


def test_what_is_wrong_is_refused_with_its_place(server: Server) -> None:
    for wanted, message in (
        ({"regex": "a(b"}, "unclosed group"),
        ({"grammar": "root ::= other"}, "line 1, column 10"),
        ({"json": {"not": {}}}, "not"),
    ):
        response = complete(server, wanted)
        assert response.status_code == 400 and message in response.json()["error"]["message"]


def test_a_slow_grammar_is_an_error_and_others_go_on(server: Server) -> None:
    wanted = {"regex": "([a-f]{3} ){9}"}
    alone = texts(complete(server, wanted))
    found: list[httpx.Response] = []
    slow = threading.Thread(target=lambda: found.append(complete(server, {"grammar": SLOW}, max_tokens=230, min_tokens=230)))
    slow.start()
    while slow.is_alive():
        assert texts(complete(server, wanted)) == alone
    assert found[0].status_code == 400 and "took too long" in found[0].json()["error"]["message"]
    again = complete(server, {"grammar": SLOW}, max_tokens=2)
    assert again.status_code == 400 and "took too long" in again.json()["error"]["message"]
    assert texts(complete(server, wanted)) == alone
