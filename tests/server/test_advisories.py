"""Security advisories on other engines, each a test here, for as far as they concern text. The ids are those of the advisories.

Values of single fields, which several of them are about, stand in `test_field_values`.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import dataclasses
import gzip
import hmac
import io
import json
import logging
import os
import pickle
import re
import socket
import stat
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import msgspec
import pytest

import canter
from canter.checkpoint.resolve import resolve
from canter.cli.batch.lines import Line
from canter.cli.batch.progress import Progress
from canter.cli.batch.runner import Runner
from canter.core.config import EngineArgs
from canter.core.errors import CheckpointError
from canter.scheduler.cache.hashing import PrefixHasher
from canter.server.app import ROUTES
from canter.server.args import ServerArgs
from canter.server.batch import AppCaller, batch_paths
from canter.server.errors import describe
from canter.server.routes import admin
from canter.text.chat_template import ChatTemplate
from canter.text.model_text import load_model_text
from tests import engines, fakes
from tests.fake_core import CONTEXT, VOCAB_SIZE, FakeCore, say
from tests.server.bodies import CHATS, GOOD, conversation, kinds_of, open_options, places, post_paths
from tests.server.helpers import Harness, error_of, with_harness
from tests.server.test_serve import Process, server

MAX_ERROR_BYTES = 16 * 1024
RENDERED = (*CHATS, "/v1/responses/render", "/tokenize", "/api/generate")
"""Routes that fill the model's chat template."""


def body_for(path: str, content: Any = "hi") -> dict[str, Any]:
    """A good body that goes through the chat template."""
    if path == "/tokenize":
        return {"messages": [{"role": "user", "content": content}]}
    return GOOD[path] | {"prompt": content} if path == "/api/generate" else conversation(path, content)


def message_of(response: httpx.Response) -> str:
    error = response.json()["error"]
    return error if isinstance(error, str) else error["message"]


def opened(body: Callable[[Harness], Any], core: Any = None, **options: Any) -> Any:
    """With every route open; afterwards the engine must be idle and answer."""

    async def checked(h: Harness) -> Any:
        result = await body(h)
        assert not getattr(h.engine.core, "requests", ())
        assert h.engine.hub.num_live == 0
        assert (await h.chat(max_tokens=2)).status_code == 200
        return result

    return with_harness(checked, core, seconds=120, **(open_options() | options))


def sources() -> Iterator[tuple[Path, ast.AST]]:
    for path in Path(canter.__file__).parent.rglob("*.py"):
        yield path, ast.walk(ast.parse(path.read_text()))  # type: ignore[misc]


# --- deserialisation and transport ------------------------------------------------------------------------------------


class Bomb:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return open, (str(self._path), "w")


def test_cve_2024_11041_and_others_of_their_kind_nothing_unpickles() -> None:
    """Also CVE-2025-30165, -32444, -29783, -47277, -62164, CVE-2024-9052, -9053, -50050, CVE-2026-3059, -3060, -3989."""
    for path, nodes in sources():
        for node in nodes:  # type: ignore[attr-defined]
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}, path
            if isinstance(node, ast.Attribute):
                assert node.attr not in ("recv_pyobj", "send_pyobj"), path
                assert not (isinstance(node.value, ast.Name) and (node.value.id, node.attr) == ("torch", "load")), path
            if isinstance(node, ast.Name):
                assert node.id not in ("eval", "exec", "__import__"), path


def listening(pid: int) -> tuple[list[int], list[str]]:
    """TCP ports and unix sockets on which a process listens."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(entry)))
    ports = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                ports.append(int(fields[1].rpartition(":")[2], 16))
    lines = [line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
    return ports, [fields[7] for fields in lines if fields[6] in inodes and int(fields[3], 16) & 0x10000 and len(fields) > 7]


@pytest.fixture(scope="module")
def running() -> Iterator[Process]:
    with server(max_body_bytes=100_000, constants={"canter.server.http_protocol": {"HEADER_SECONDS": 1.0}}) as process:
        yield process


def test_cve_2025_30202_nothing_listens_but_http(running: Process, tmp_path: Path) -> None:
    """The engine's socket is a unix one that only this user can reach, and bytes that are a pickle are just wrong bytes."""
    pid = running.process.pid
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    ports, paths = listening(pid)
    assert ports == [running.port] and children
    assert [listening(child)[0] for child in children] == [[]] * len(children)
    for path in paths:
        # Once the engine has connected, the directory is taken away, and no other can.
        assert not Path(path).parent.exists() or stat.S_IMODE(Path(path).parent.stat().st_mode) == 0o700
    marker = tmp_path / "marker"
    assert send(running, pickle.dumps(Bomb(marker))).startswith((b"HTTP/1.1 400", b""))
    assert httpx.post(running.url + "/v1/completions", content=pickle.dumps(Bomb(marker))).status_code == 400
    assert not marker.exists()
    pickle.loads(pickle.dumps(Bomb(marker)))
    assert marker.exists()  # it would have been


def test_cve_2025_24357_pickled_weights_are_refused(tmp_path: Path) -> None:
    folder, marker = fakes.write_tokenizer(tmp_path / "m"), tmp_path / "marker"
    for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth"):
        (folder / name).write_bytes(pickle.dumps(Bomb(marker)))
    with pytest.raises(CheckpointError, match="safetensors"):
        resolve(str(folder))
    assert not marker.exists()


@pytest.mark.parametrize("path", [path for path in GOOD if path.startswith("/v1/c") and "derender" not in path])
@pytest.mark.parametrize("value", ["AAAA", ["AAAA"], {"sparse": [1]}, 5, True])
def test_cve_2025_62164_prompt_embeddings_are_off(path: str, value: Any) -> None:
    """Also CVE-2025-62372: no shape of a tensor that isn't taken can be wrong."""
    response = opened(lambda h: h.http.post(path, json=GOOD[path] | {"prompt_embeds": value}))
    assert error_of(response, 400)["param"] == "prompt_embeds"


# --- code by configuration --------------------------------------------------------------------------------------------


def test_cve_2025_66448_code_beside_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    """Also CVE-2026-22807 and CVE-2026-27893: whatever names the code, `--hf-overrides` too."""
    marker = tmp_path / "marker"
    code = f"open({str(marker)!r}, 'w').close()\nclass Any: pass\n"
    names = ["AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer", "AutoProcessor", "AutoImageProcessor"]
    auto_map: dict[str, Any] = dict.fromkeys(names, "evil.Any") | {"AutoTokenizer": ["evil.Any", "evil.Any"]}
    folder = tiny_model(tmp_path)
    fakes_folder = fakes.model_folder()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((fakes_folder / name).read_bytes())
    (folder / "evil.py").write_text(code)
    for name in ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json", "generation_config.json"):
        path = folder / name
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(known | {"auto_map": auto_map, "vision_config": {"auto_map": auto_map}, "text_config": None}))
    overrides = {"auto_map": auto_map, "vision_config": {"auto_map": auto_map}}
    core = engines.engine(folder, hf_overrides=overrides)
    load_model_text(EngineArgs(model=str(folder), hf_overrides=overrides))
    assert core.info.vocab_size == VOCAB_SIZE and not marker.exists()
    core.shutdown()


HOSTILE_TEMPLATES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('touch MARKER') }}",
    "{{ (messages | map(attribute='__class__') | list)[0].__mro__ }}",
    "{{ (messages | attr('__class__')).__mro__ }}",
    "{% set n = namespace(_Namespace__attrs=1) %}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "{% include 'MARKER' %}",
    "{% for i in range(10**9) %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'x' * 10**11 }}",
    "{{ (':' * 400000 ~ '}').format() }}",
    "{{ ('<!-- -->' * 400000) | striptags }}",
    "{{ ([[1]] * 400000) | sum(start=[]) | length }}",
]


@pytest.mark.parametrize("source", HOSTILE_TEMPLATES)
def test_cve_2026_5760_a_model_s_template_reaches_nothing_and_ends(source: str, tmp_path: Path) -> None:
    """SGLang's: a template that a model file brings, on every route that fills it."""
    marker = tmp_path / "marker"

    async def body(h: Harness) -> None:
        state = h.app.state.server
        plain = state.text
        template = ChatTemplate("{% if messages[0].content == 'go' %}" + source.replace("MARKER", str(marker)) + "{% endif %}x")
        state.text = dataclasses.replace(plain, chat_template=template)
        for path in RENDERED:
            response = await h.http.post(path, json=body_for(path, "go"))
            assert response.status_code == 400 and "template" in message_of(response), (path, response.text)
            assert " 0x" not in response.text and len(response.content) < MAX_ERROR_BYTES
        assert not marker.exists() and not h.engine.core.seen
        assert (await h.chat(max_tokens=2)).status_code == 200

    with_harness(body, seconds=120, **open_options())


TEMPLATE_PATHS = [path for path in GOOD if any(place.where == "chat_template" for place in places(path, str))]


@pytest.mark.parametrize("source", ["PWNED", *HOSTILE_TEMPLATES])
def test_cve_2025_61620_a_request_s_template(source: str) -> None:
    """Refused unless the server trusts requests so far; then it is bounded. Routes that know no such field never see it."""
    fields = {"chat_template": source, "template": source, "chat_template_kwargs": {}}

    async def closed(h: Harness) -> None:
        for path in RENDERED:
            response = await h.http.post(path, json=body_for(path) | fields)
            assert response.status_code == 400 or path not in (*TEMPLATE_PATHS, "/api/generate"), path
        assert all("PWNED" not in bytes(request.prompt_token_ids).decode() for request in h.engine.core.seen)

    async def trusted(h: Harness) -> None:
        for path in TEMPLATE_PATHS:
            response = await h.http.post(path, json=body_for(path) | {"chat_template": source})
            assert response.status_code == (200 if source == "PWNED" else 400), response.text

    async def files(h: Harness) -> None:
        for path in TEMPLATE_PATHS:
            for file in (__file__, "/etc/passwd", "/dev/zero"):
                response = await h.http.post(path, json=body_for(path) | {"chat_template": file})
                assert response.status_code == 200 and "root:" not in response.text
                ids = response.json().get("token_ids") or response.json().get("tokens") or h.engine.core.seen[-1].prompt_token_ids
                assert bytes(ids).decode() == file  # it is a template without variables
        for broken in ("{% if %}", "{{ x | nonesuch }}", "{{ " * 10_000, "x" * 300_000):
            response = await h.http.post("/tokenize", json=body_for("/tokenize") | {"chat_template": broken})
            assert "chat_template" in error_of(response, 400)["message"]

    assert set(TEMPLATE_PATHS) == {"/v1/chat/completions", "/v1/chat/completions/render", "/tokenize"}
    opened(closed, FakeCore(say("ok")))
    opened(trusted, FakeCore(say("ok")), trust_request_chat_template=True)
    opened(files, FakeCore(say("ok")), trust_request_chat_template=True)


WITH_KWARGS = [path for path in RENDERED if not path.startswith("/api/")]
RESERVED = [
    "tokenize",
    "chat_template",
    "messages",
    "conversation",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "bos_token",
    "eos_token",
    "self",
]


@pytest.mark.parametrize("path", WITH_KWARGS)
@pytest.mark.parametrize("name", RESERVED)
def test_cve_2025_62426_variables_that_the_server_sets(path: str, name: str) -> None:
    response = opened(lambda h: h.http.post(path, json=body_for(path) | {"chat_template_kwargs": {name: True}}))
    assert name in error_of_any(response)


def error_of_any(response: httpx.Response) -> str:
    assert response.status_code == 400, response.text
    return message_of(response)


@pytest.mark.parametrize("path", [*CHATS[:4], "/v1/completions", "/completion", "/api/generate"])
def test_cve_2025_9141_what_the_model_writes_stays_text(path: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    written = f'[f(x=__import__("os").system("touch {marker}"))] {{{{ 7 * 7 }}}} <tool_call>{{"name": "f"}}</tool_call>'
    body = body_for(path) if path in RENDERED else GOOD[path]
    more = {name: len(written) for name in ("max_tokens", "max_output_tokens", "n_predict") if name in body}
    options = {"options": {"num_predict": len(written)}} if path.startswith("/api/") else {}
    response = opened(lambda h: h.http.post(path, json=body | more | options), FakeCore(say(written)))
    assert response.status_code == 200 and json.dumps(written)[1:-1] in json.dumps(response.json())
    assert not marker.exists()


def test_cve_2026_22778_errors_tell_no_addresses() -> None:
    """The advisory's leak was the text of an image library's error. Images are refused before anything reads them."""
    assert "0x7f" not in describe(RuntimeError("broken <object at 0x7f00deadbeef>")).message

    async def body(h: Harness) -> None:
        for path in RENDERED:
            for source in ("{{ raise_exception(joiner()) }}", "{{ raise_exception(messages.__len__) }}", "{{ messages[joiner()].x.y }}"):
                template = ChatTemplate("{% if messages[0].content == 'go' %}" + source + "{% endif %}x")
                state = h.app.state.server
                state.text = dataclasses.replace(state.text, chat_template=template)
                response = await h.http.post(path, json=body_for(path, "go"))
                assert response.status_code == 400 and not re.search(r"0x[0-9a-f]{6}", response.text), response.text

    with_harness(body, **open_options())


# --- exhaustion by one request ----------------------------------------------------------------------------------------

GREEDY: dict[str, dict[str, Any]] = {
    "n": {"n": 10**6},
    "best_of": {"best_of": 10**6},
    "stop": {"stop": ["a"] * 500_000},
    "stop_sequences": {"stop_sequences": ["a"] * 500_000},
    "bad_words": {"bad_words": ["a"] * 50_000},
    "prompt": {"prompt": ["a"] * 100_000},
    "messages": {"messages": [{"role": "user", "content": "a"}] * 100_000},
    "input": {"input": [{"role": "user", "content": "a"}] * 100_000},
    "documents": {"documents": [{"text": "a"}] * 100_000},
    "tools": {"tools": [{"type": "function", "name": "f", "input_schema": {}, "function": {"name": "f"}}] * 10_000, "tool_choice": "none"},
    "stop_token_ids": {"stop_token_ids": [1] * 100_000},
    "allowed_token_ids": {"allowed_token_ids": [1] * 100_000},
    "logprob_token_ids": {"logprob_token_ids": [1] * 100_000, "logprobs": True},
    "logit_bias": {"logit_bias": {str(i): 1.0 for i in range(100_000)}},
    "token_ids": {"token_ids": [1] * 100_000},
    "context": {"context": [1] * 100_000},
    "metadata": {"metadata": {str(i): "x" for i in range(100_000)}},
    "vllm_xargs": {"vllm_xargs": {str(i): 1 for i in range(100_000)}},
    "generate_responses": {"generate_responses": [{"request_id": "r", "choices": []}] * 100_000},
    "prompt_token_ids": {"prompt_token_ids": [1] * 100_000},
    "system": {"system": [{"type": "text", "text": "a"}] * 100_000},
    "logprobs": {"logprobs": 10**6},
    "n_probs": {"n_probs": 10**6},
}


def greedy_cases() -> list[Any]:
    known = {path: {field.encode_name for field in msgspec.structs.fields(kinds_of(path)[0])} for path in GOOD}
    return [pytest.param(path, name, id=f"{path} {name}") for path, names in known.items() for name in GREEDY if name in names]


@pytest.mark.parametrize(("path", "name"), greedy_cases())
def test_cve_2024_8939_no_field_asks_for_a_million_of_anything(path: str, name: str) -> None:
    """Also CVE-2026-34756 and vLLM's #51447, #54721, #47845, #53473."""

    async def body(h: Harness) -> None:
        fields = dict(GREEDY[name])
        if path.startswith("/v1/messages"):
            fields.pop("tool_choice", None)
        if name == "logprob_token_ids" and "chat" not in path:
            fields["logprobs"] = 1
        content = json.dumps(GOOD[path] | fields).encode()
        tracemalloc.start()
        response = await asyncio.wait_for(h.http.post(path, content=content, headers={"content-type": "application/json"}), 20)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert response.status_code == 400 and (name in message_of(response) or "The prompt has" in message_of(response)), (
            response.status_code,
            response.text[:300],
        )
        assert len(response.content) < MAX_ERROR_BYTES and peak < 100 * 2**20
        assert not h.engine.core.seen

    opened(body, FakeCore(say("ok")))


@pytest.mark.parametrize("path", GOOD)
def test_cve_2024_8768_empty_prompts(path: str) -> None:
    fields = ("prompt", "messages", "input", "content", "tokens", "token_ids", "system", "instructions", "context", "generate_responses")

    async def body(h: Harness) -> None:
        for field in (*fields, "model", "request_ids", "generate_response"):
            if field not in GOOD[path]:
                continue
            for value in ("", " ", [], [[]], [""], [{}], {}, [[[]]], None, [None], [0], ["", ""], [[], []]):
                response = await h.http.post(path, json=GOOD[path] | {field: value})
                assert response.status_code in (200, 400, 404), (path, field, value, response.text)
        for content in ("", [], [""], [{}], [{"type": "text", "text": ""}], None) if path in CHATS else ():
            for role in ("user", "assistant", "system", "tool"):
                conversation = [{"role": role, "content": content}]
                response = await h.http.post(path, json=GOOD[path] | {"messages": conversation, "input": conversation})
                assert response.status_code in (200, 400), (path, role, content, response.text)

    opened(body, FakeCore(say("ok")))


def send(process: Process, *parts: bytes, shut: bool = True) -> bytes:
    """The whole answer to bytes that are sent as they are."""
    with socket.create_connection(("127.0.0.1", process.port), timeout=20) as connection:
        with contextlib.suppress(ConnectionError):
            for part in parts:
                connection.sendall(part)
            if shut:
                connection.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while chunk := connection.recv(65536):
                answer += chunk
        return answer


def is_alive(process: Process) -> bool:
    return httpx.post(process.url + "/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("target", ["/v1/chat/completions", "/v1/messages", "/api/chat", "/completion", "/v1/responses", "/health", "/no"])
def test_cve_2025_48956_header_floods(running: Process, target: str) -> None:
    start = b"POST " + target.encode() + b" HTTP/1.1\r\nHost: x\r\n"
    floods = [
        [start + b"x: " + b"y" * 10_000_000 + b"\r\n\r\n"],
        [start + b"".join(b"x%d: yyyyyyyyyyyyyyyy\r\n" % i for i in range(10_000)) + b"\r\n"],
        [start, *(b"x: " + b"y" * 1000 + b"\r\n" for _ in range(10_000))],
        [b"POST /" + b"y" * 10_000_000 + b" HTTP/1.1\r\n\r\n"],
    ]
    for flood in floods:
        answer = send(running, *flood)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 4"), answer[:200]
    assert is_alive(running)


def test_cve_2025_48956_a_header_that_never_ends_is_given_up(running: Process) -> None:
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", running.port), timeout=20)) for _ in range(50)]
        for connection in slow:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nx: ")
        assert is_alive(running)
        for connection in slow:
            assert connection.recv(100) == b""


CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
)


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ([CHUNKED, *[b"2710\r\n" + b" " * 10_000 + b"\r\n"] * 50], b"413"),
        ([CHUNKED, *[b"1\r\n \r\n"] * 110_000], b"413"),
        ([CHUNKED.replace(b"Transfer-Encoding: chunked", b"Content-Length: 100000000000"), b"{"], b"413"),
        ([CHUNKED.replace(b"Transfer-Encoding: chunked", b"Content-Length: " + b"9" * 5000), b"{"], b"4"),
        ([CHUNKED.replace(b"Transfer-Encoding: chunked", b"Content-Length: -1"), b"{}"], b"4"),
        ([CHUNKED, b"ffffffffffffffffffff\r\n{"], b"4"),
        ([CHUNKED, b"zz\r\n{"], b"4"),
        ([CHUNKED.replace(b"\r\n\r\n", b"\r\nContent-Length: 2\r\n\r\n"), b"2\r\n{}\r\n0\r\n\r\n"], b"4"),
    ],
)
def test_bodies_without_end(running: Process, parts: list[bytes], status: bytes) -> None:
    answer = send(running, *parts, shut=False)
    assert answer.startswith(b"HTTP/1.1 " + status), answer[:200]
    assert is_alive(running)


DEEP = 100_000


@cache
def many_keys() -> bytes:
    return b",".join(b'"k%d": %d' % (i, i) for i in range(200_000))


@cache
def gzip_bomb() -> bytes:
    return gzip.compress(b" " * 50_000_000)


def awkward_bodies(path: str) -> dict[str, bytes]:
    """Bodies that cost a careless reader its stack, its memory or its mind."""
    good = json.dumps(GOOD[path]).encode()
    first = next(iter(GOOD[path]), "x").encode()
    inside = good[1:-1] or b'"profile_prefix": "x"'
    return {
        "deep list": b"[" * DEEP,
        "deep list, closed": b'{"' + first + b'": ' + b"[" * DEEP + b"]" * DEEP + b"}",
        "deep object": b'{"' + first + b'": ' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}",
        "deep unknown": b"{" + inside + b', "junk": ' + b"[" * DEEP + b"]" * DEEP + b"}",
        "deep, not too deep": b"{" + inside + b', "' + first + b'": ' + b"[" * 900 + b"]" * 900 + b"}",
        "many keys": b"{" + inside + b"," + many_keys() + b"}",
        "key twice": b"{" + inside + b"," + inside + b"}",
        "key many times": b"{" + b",".join([inside] * 10_000) + b"}",
        "long key": b'{"' + b"k" * 1_000_000 + b'": 1}',
        "no utf-8": good[:-1] + b'\xff\xfe"\xc3(}',
        "no utf-8 in a text": b'{"' + first + b'": "\xff\xc0\x80"}',
        "half a surrogate": b'{"' + first + b'": "\\ud800"}',
        "utf-16": good.decode().encode("utf-16"),
        "byte order mark": b"\xef\xbb\xbf" + good,
        "numbers": b"{" + inside + b', "' + first + b'": [1e400, -1e400, 1e-400, NaN]}',
        "gzip": gzip.compress(good),
        "gzip bomb": gzip_bomb(),
        "cut": good[:-1],
        "twice": good + good,
        "comment": b"/**/" + good,
        "zeros": bytes(1_000_000),
        "empty": b"",
    }


@pytest.mark.parametrize("path", sorted(set(post_paths()) & GOOD.keys()))
def test_bodies_that_are_hard_to_read(path: str) -> None:
    async def body(h: Harness) -> None:
        for name, content in awkward_bodies(path).items():
            for encoding in ({}, {"content-encoding": "gzip"}) if "gzip" in name else ({},):
                headers = {"content-type": "application/json", **encoding}
                tracemalloc.start()
                response = await asyncio.wait_for(h.http.post(path, content=content, headers=headers), 20)
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                told = (name, response.status_code, response.text[:300], peak)
                allowed = (200, 400, 404, 413) if name in READABLE else (400, 413)
                assert response.status_code in allowed or (name == "empty" and path.count("/") == 1), told
                assert len(response.content) < MAX_ERROR_BYTES and peak < 30 * 2**20, told
        if path == "/start_profile":
            await h.http.post("/stop_profile")

    opened(body, FakeCore(say("ok")))


READABLE = ("many keys", "key twice", "key many times", "long key", "deep unknown")


@pytest.mark.parametrize("path", [path for path in GOOD if path.count("/") > 1 or path in ("/tokenize", "/detokenize", "/completion")])
def test_other_content_types_are_refused(path: str) -> None:
    async def body(h: Harness) -> None:
        for content_type in (
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data; boundary=x",
            "application/xml",
            "",
            "/",
        ):
            response = await h.http.post(path, content=json.dumps(GOOD[path]), headers={"content-type": content_type})
            assert response.status_code == 400 and "application/json" in message_of(response), response.text

    opened(body)


WRONG_SCHEMA = {"type": "object", "properties": {"a": {"type": "nothing", "pattern": "((("}}, "required": ["a"]}
DEEP_SCHEMA: dict[str, Any] = {}
for _ in range(70):
    DEEP_SCHEMA = {"type": "object", "properties": {"a": DEEP_SCHEMA}}
CONSTRAINTS: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": WRONG_SCHEMA}}},
        {"structured_outputs": {"json": DEEP_SCHEMA}},
        {"guided_json": WRONG_SCHEMA},
        {"guided_regex": "(" * 1000},
        {"guided_grammar": "x"},
    ],
    "/v1/completions": [
        {"structured_outputs": {"regex": "["}},
        {"guided_choice": ["a" * 200_000]},
        {"structured_outputs": {"regex": "\0"}},
    ],
    "/v1/responses": [
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": WRONG_SCHEMA}}},
        {"structured_outputs": {"json": DEEP_SCHEMA}},
    ],
    "/v1/messages": [{"output_config": {"format": {"type": "json_schema", "schema": WRONG_SCHEMA}}}],
    "/api/chat": [{"format": "xml"}, {"format": WRONG_SCHEMA}],
    "/api/generate": [{"format": {"type": 5}}],
    "/completion": [{"grammar": "root ::= root"}, {"json_schema": {"type": "string", "pattern": "("}}],
    "/inference/v1/generate": [{"sampling_params": {"structured_outputs": {"json": WRONG_SCHEMA}}}],
}


@pytest.mark.parametrize("path", CONSTRAINTS)
def test_cve_2025_29770_and_48942_bad_constraints_stop_at_the_frontend(path: str) -> None:
    """Also CVE-2025-32381, -48943, -48944: what can't be compiled, or not within bounds, is refused by name, and no engine sees it."""

    async def body(h: Harness) -> None:
        for fields in CONSTRAINTS[path]:
            [name] = fields
            response = await h.http.post(path, json=GOOD[path] | fields)
            assert name in error_of_any(response)
        assert not h.engine.core.seen

    opened(body)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/tokenize"])
@pytest.mark.parametrize("schema", [5, "x", [], {"type": "nonsense"}, {"properties": {"a": {"pattern": "(((", "type": 5}}}, {"$ref": "#"}])
def test_cve_2025_48944_tools_with_schemas_that_are_none(path: str, schema: Any) -> None:
    tool = {"type": "function", "name": "f", "function": {"name": "f", "parameters": schema}, "parameters": schema, "input_schema": schema}
    if "messages" in path:
        tool["type"] = "custom"
    choice: Any = {"type": "none"} if "messages" in path else "none"

    async def body(h: Harness) -> None:
        response = await h.http.post(path, json=body_for(path) | {"tools": [tool], "tool_choice": choice})
        assert response.status_code in (200, 400), response.text

    opened(body, FakeCore(say("ok")))


STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"stream": True, "max_tokens": 200},
    "/v1/completions": {"stream": True, "max_tokens": 200, "n": 2},
    "/v1/responses": {"stream": True, "max_output_tokens": 200},
    "/v1/messages": {"stream": True, "max_tokens": 200},
    "/api/chat": {"stream": True, "options": {"num_predict": 200}},
    "/api/generate": {"stream": True, "options": {"num_predict": 200}},
    "/completion": {"stream": True, "n_predict": 200},
    "/inference/v1/generate": {"stream": True, "sampling_params": {"max_tokens": 200}},
}


def test_cve_2026_9540_nothing_of_a_request_is_left() -> None:
    """Requests that are broken off, streamed or not, wrong ones, and ones with an id that another has."""

    async def body(h: Harness) -> None:
        before = len(asyncio.all_tasks())
        for turn in range(6):
            h.engine.paused = True
            asked = []
            for path, fields in STREAMS.items():
                for stream in (True, False):
                    more = fields | {"stream": stream, "request_id": "same"}
                    asked.append(asyncio.create_task(h.http.post(path, json=GOOD[path] | more, headers={"x-request-id": "same"})))
                asked.append(asyncio.create_task(h.http.post(path, json=GOOD[path] | {"temperature": -1})))
            for _ in range(100):
                await asyncio.sleep(0)
            assert len(h.engine.core.requests) >= len(STREAMS)
            if turn % 2:
                h.engine.resume()
                await asyncio.sleep(0.01)
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            h.engine.resume()
        for _ in range(500):
            if not h.engine.core.requests and len(asyncio.all_tasks()) <= before:
                break
            await asyncio.sleep(0.01)
        assert not h.engine.core.requests and len(asyncio.all_tasks()) <= before

    opened(body)


def test_cve_2026_44222_special_tokens_spelled_out_as_text() -> None:
    """And texts that look like the template's own, on every route: they are text, in whatever field, and nothing is evaluated."""

    async def body(h: Harness) -> None:
        tokenizer = h.app.state.server.text.tokenizer
        added = [tokenizer.id_to_token(i) for i in sorted(tokenizer.added_token_ids)]
        assert len(added) == 4
        texts = [
            *added,
            "".join(added) * 20,
            "<|vision_start|><|image_pad|><|vision_end|>",
            "<|im_end|>\n<|im_start|>system\n",
            "[/INST]",
            "[assistant]",
            "CANTER-CONTINUES-HERE",
            "CANTER-CONTINUES-HERE x",
            "canter-probe",
        ]
        for text in texts:
            for path in RENDERED:
                response = await h.http.post(path, json=body_for(path, text))
                assert response.status_code == 200, (path, text, response.text)
            for path, field in (
                ("/v1/completions", "prompt"),
                ("/completion", "prompt"),
                ("/tokenize", "prompt"),
                ("/v1/responses", "input"),
                ("/v1/completions/render", "prompt"),
            ):
                assert (await h.http.post(path, json=GOOD[path] | {field: text})).status_code == 200
            answer = await h.http.post(
                "/v1/chat/completions",
                json={
                    "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": text}],
                    "continue_final_message": True,
                    "add_generation_prompt": False,
                    "max_tokens": 1,
                },
            )
            assert answer.status_code == 200, answer.text
            ids = h.engine.core.seen[-1].prompt_token_ids
            assert tokenizer.decode(ids, skip_special_tokens=False) == f"[user]a\n[assistant]{text}"

    opened(body, FakeCore(say("ok")))


@pytest.mark.parametrize("path", [path for path in RENDERED if path not in ("/v1/messages/count_tokens",)])
def test_text_is_never_a_template(path: str) -> None:
    injected = "{{ 7 * 7 }}{% for i in range(10**9) %}{% endfor %}{{ cycler.__init__.__globals__.os.popen('id') }}"

    async def body(h: Harness) -> None:
        response = await h.http.post(path, json=body_for(path, injected))
        assert response.status_code == 200
        ids = response.json().get("token_ids") or response.json().get("tokens") or h.engine.core.seen[-1].prompt_token_ids
        assert injected in bytes(ids).decode()

    opened(body, FakeCore(say("ok")))


# --- reach into the network, files, administration --------------------------------------------------------------------


@contextlib.contextmanager
def listener() -> Iterator[tuple[str, list[Any]]]:
    """An address, and who connected to it."""
    with socket.create_server(("127.0.0.1", 0)) as listening_socket:
        came: list[Any] = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, address = listening_socket.accept()
                    came.append(address)
                    connection.close()

        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{listening_socket.getsockname()[1]}", came
        listening_socket.shutdown(socket.SHUT_RDWR)


def test_cve_2025_6242_and_tgi_2026_0599_nothing_is_fetched() -> None:
    """Also CVE-2026-24779 and -25960. No route reads an address; one in a text, as Markdown too, is a text."""

    async def body(h: Harness) -> None:
        with listener() as (address, came):
            urls = [
                f"http://{address}/x.png",
                rf"http://a.test\@{address}/x",
                f"http://{address}#@a.test",
                "file:///etc/passwd",
                "gopher://x",
            ]
            for url in urls:
                parts = [
                    {"type": "image_url", "image_url": {"url": url}},
                    {"type": "video_url", "video_url": {"url": url}},
                    {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
                    {"type": "input_image", "image_url": url},
                    {"type": "input_file", "file_url": url},
                    {"type": "image", "source": {"type": "url", "url": url}},
                    {"type": "document", "source": {"type": "url", "url": url}},
                    {"type": "audio_url", "audio_url": {"url": url}},
                ]
                for path in CHATS:
                    for part in parts:
                        response = await h.http.post(path, json=conversation(path, [part]))
                        assert response.status_code == 400, (path, part, response.text)
                    written = await h.http.post(path, json=conversation(path, f"![picture]({url}) <img src={url}>"))
                    assert written.status_code == 200, written.text
                images = {"messages": [{"role": "user", "content": "x", "images": [url]}]}
                assert (await h.http.post("/api/chat", json=GOOD["/api/chat"] | images)).status_code == 400
                assert (await h.http.post("/api/generate", json=GOOD["/api/generate"] | {"images": [url]})).status_code == 400
                assert (await h.http.post("/completion", json=GOOD["/completion"] | {"image_data": [{"data": url}]})).status_code == 400
            await asyncio.sleep(0.05)
            assert not came
            socket.create_connection(tuple(address.split(":"))).close()  # type: ignore[arg-type]
            while not came:
                await asyncio.sleep(0.01)  # it would have been seen

    opened(body, FakeCore(say("ok")))


def test_cve_2026_34753_lines_of_a_batch_name_routes_only() -> None:
    urls = [
        "http://127.0.0.1:1/v1/completions",
        "file:///etc/passwd",
        "//127.0.0.1/x",
        "/metrics",
        "/v1/../metrics",
        "/server_info",
        "/v1/completions?x=1",
        "/v1/completions/",
        "/V1/completions",
        "/v1/models",
        "/pause",
        "/abort_requests",
        "",
        "/v1/responses/x/cancel",
        "/api/generate",
        "/completion",
    ]

    async def body(h: Harness) -> list[dict[str, Any]]:
        written: list[bytes] = []
        caller = AppCaller(h.app, h.engine, ServerArgs())
        runner = Runner(caller, written.append, Progress(len(urls), 0, io.StringIO()), 4, batch_paths())
        lines = [json.dumps({"custom_id": url, "url": url, "body": {"prompt": "a", "max_tokens": 1}}).encode() for url in urls]
        await run_lines(runner, lines)
        assert not h.engine.core.seen
        return [json.loads(line) for line in b"".join(written).splitlines()]

    results = opened(body)
    assert {result["custom_id"] for result in results} == set(urls)
    assert all(result["response"]["status_code"] in (400, 404) and result["error"] for result in results), results


async def run_lines(runner: Runner, lines: list[bytes]) -> None:
    async def given() -> Any:
        yield [Line(i + 1, line) for i, line in enumerate(lines)]

    await runner.run(given(), {})


@pytest.mark.parametrize(
    "path",
    [
        "/start_profile",
        "/stop_profile",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/server_info",
        "/reset_prefix_cache",
        "/pause",
        "/resume",
        "/sleep",
        "/wake_up",
        "/abort_requests",
        "/collective_rpc",
        "/update_weights",
        "/slots/0",
        "/lora-adapters",
        "/apply-template",
        "/api/pull",
        "/api/create",
        "/api/push",
        "/api/delete",
        "/api/copy",
        "/load",
        "/tokenizer_info",
    ],
)
def test_routes_that_change_a_server_are_not_there_unless_asked_for(path: str) -> None:
    async def body(h: Harness) -> None:
        for method in ("GET", "POST", "DELETE", "PUT"):
            response = await h.http.request(method, path, json={"lora_name": "x", "lora_path": "/etc"})
            assert response.status_code == 404, response.text

    with_harness(body)


@pytest.mark.parametrize("prefix", ["../x", "/etc/x", "a/b", "..", ".hidden", "a\0b", "x" * 129, "", "~root"])
def test_profiles_stay_in_their_folder(prefix: str, tmp_path: Path) -> None:
    async def body(h: Harness) -> None:
        assert "profile_prefix" in error_of(await h.http.post("/start_profile", json={"profile_prefix": prefix}), 400)["message"]

    opened(body, profile_dir=str(tmp_path / "traces"))


# --- isolation and keys -----------------------------------------------------------------------------------------------


def test_cve_2025_25183_block_hashes_do_not_collide() -> None:
    """Python's own `hash` gives -1 and -2, and None in all processes, the same; here everything is hashed with SHA-256."""

    def chain(tokens: list[int], salt: str | None = None, size: int = 2) -> list[bytes]:
        hashes: list[bytes] = []
        PrefixHasher(size).extend(hashes, tokens, salt)
        return hashes

    assert hash((1, -1)) == hash((1, -2))
    chains = [
        chain([1, 2, 3, 4]),
        chain([1, 2, 4, 3]),
        chain([2, 1, 3, 4]),
        chain([1, 2, 3, 4], "a"),
        chain([1, 2, 3, 4], "b"),
        chain([1, -1, 3, 4]),
        chain([1, -2, 3, 4]),
        chain([1, 2, 3, 4], size=4),
    ]
    last = [hashes[-1] for hashes in chains]
    assert len(set(last)) == len(last) and {len(value) for value in last} == {32}


def tiny_model(folder: Path) -> Path:
    """A tiny checkpoint with the vocabulary of the fake tokenizer."""
    with mock.patch.multiple(engines, VOCAB_SIZE=VOCAB_SIZE, CONTEXT=CONTEXT):
        return engines.tiny_checkpoint(folder, "llama")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def with_engine(body: Callable[[Harness], Any], model: Path, server_options: dict[str, Any] | None = None, **changes: Any) -> Any:
    """A real engine of a tiny model behind the whole app."""
    core = engines.engine(model, max_model_len=CONTEXT, **changes)
    try:
        return with_harness(body, core, seconds=300, **(open_options() | (server_options or {})))  # type: ignore[arg-type]
    finally:
        core.shutdown()


def test_cve_2025_46570_salts_keep_caches_apart(tiny: Path) -> None:
    """By the counts, which the times follow. Routes without the field share one cache by design."""
    text = "a secret that was said before, long enough for some blocks of the cache to hold it"

    async def body(h: Harness) -> None:
        async def cached(salt: str | None) -> int:
            response = await h.chat(text, max_tokens=1, **({} if salt is None else {"cache_salt": salt}))
            details = response.json()["usage"]["prompt_tokens_details"] or {}
            return int(details.get("cached_tokens", 0))

        assert await cached("alice") == 0
        assert await cached("alice") > 0
        assert await cached("bob") == 0
        assert await cached(None) == 0
        assert await cached(None) > 0
        body = conversation("/v1/messages", text) | {"cache_salt": "carol", "max_tokens": 1}
        usage = [(await h.http.post("/v1/messages", json=body)).json()["usage"]["cache_read_input_tokens"] for _ in range(2)]
        assert usage[0] == 0 < usage[1]

    with_engine(body, tiny, {"enable_prompt_tokens_details": True})


@pytest.mark.parametrize("changes", [{}, {"enable_prefix_caching": False}, {"num_gpu_blocks_override": 40}])
def test_cve_2026_3108_no_request_sees_another(tiny: Path, changes: dict[str, Any]) -> None:
    """Each answer is the one that its request gets alone, also where blocks are reused after aborts and preemption."""
    prompts = [f"shared beginning of everyone; the secret of number {i} is {i * 7919}" for i in range(16)]

    async def together(h: Harness) -> list[str]:
        async def ask(prompt: str) -> str:
            response = await h.complete(prompt, max_tokens=24, temperature=0, ignore_eos=True, return_token_ids=True)
            assert response.status_code == 200, response.text
            return str(response.json()["choices"][0]["token_ids"])

        async def leave(prompt: str) -> None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(h.complete(prompt + "!", max_tokens=200, temperature=1, ignore_eos=True), 0.05)

        answers, *_ = await asyncio.gather(asyncio.gather(*map(ask, prompts)), *(leave(prompt) for prompt in prompts))
        return list(answers)

    async def alone(h: Harness) -> list[str]:
        answers = []
        for prompt in prompts:
            response = await h.complete(prompt, max_tokens=24, temperature=0, ignore_eos=True, return_token_ids=True)
            answers.append(str(response.json()["choices"][0]["token_ids"]))
        return answers

    expected = with_engine(alone, tiny, enable_prefix_caching=False)
    assert len(set(expected)) > 1
    assert with_engine(together, tiny, **changes) == expected


def test_cve_2025_59425_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each given key with every known one, also after one has fitted, and as digests of one length."""
    compared: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest

    def watched(a: Any, b: Any) -> bool:
        compared.append((a, b))
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", watched)

    async def body(h: Harness) -> None:
        for given, status in (("first", 200), ("third", 200), ("x", 401), ("first2", 401), ("firs", 401)):
            compared.clear()
            assert (await h.http.get("/v1/models", headers={"authorization": f"Bearer {given}"})).status_code == status
            assert len(compared) == 3 and {len(value) for pair in compared for value in pair} == {32}

    with_harness(body, api_key=["first", "second", "third"])


def test_keys_guard_every_route_however_its_path_is_written() -> None:
    open_paths = ("/health", "/ping", "/version", "/metrics")

    async def body(h: Harness) -> None:
        for route in (*ROUTES, *admin.routes(ServerArgs(**open_options()))):
            path = route.path.replace("{model:path}", "m").replace("{response_id}", "resp_x")
            if path in open_paths:
                continue
            spellings = [
                path,
                "http://test/" + path,
                path + "/",
                path.upper(),
                path.replace("/", "%2f"),
                "/health/.." + path,
                "/health%2f.." + path,
                path + "%00",
                path + "?x=/health",
                path + ";/health",
                "/health#" + path,
                "http://test/health/../" + path[1:],
            ]
            for method in {*(route.methods or ()), "HEAD", "GET", "POST", "PUT"}:
                for spelling in spellings:
                    for headers in (
                        {},
                        {"authorization": "Bearer wrong"},
                        {"x-api-key": "wrong"},
                        {"authorization": "Basic a2V5"},
                        {"authorization": "key"},
                        {"x-forwarded-for": "127.0.0.1", "x-original-url": "/health"},
                    ):
                        response = await h.http.request(method, spelling, headers=headers)
                        if spelling.startswith("/health#"):
                            continue  # the fragment is not sent
                        assert response.status_code == 401, (method, spelling, headers, response.status_code)
        assert not h.engine.core.seen

    with_harness(body, seconds=120, api_key=["key"], **open_options())


def test_keys_guard_behind_a_root_path_too() -> None:
    async def body(h: Harness) -> None:
        http = httpx.AsyncClient(transport=httpx.ASGITransport(h.app, root_path="/llm"), base_url="http://test")
        assert (await http.get("/llm/health")).status_code == 200
        for path in ("/llm/v1/models", "/v1/models", "/llm/llm/health", "/llm", "/llm/health/v1/models"):
            assert (await http.get(path)).status_code == 401, path

    with_harness(body, api_key=["key"])


@pytest.mark.parametrize("form", ["text", "json"])
def test_log_injection(form: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    """What clients send begins no line of its own in the log, and gives terminals no orders."""
    evil = "x\r\nINFO: all is well \x1b[31m\u2028\x85"

    async def body(h: Harness) -> None:
        h.engine.core.refuse = RuntimeError("secret")
        quoted = "%0d%0aINFO:%20all%20is%20well%1b[31m%E2%80%A8%C2%85"
        for path in (f"/{quoted}", f"/v1/models/{quoted}", f"/v1/models?x={quoted}", f"/v1/responses/{quoted}"):
            await h.http.get(path, headers={"x-request-id": "a b\tc"})
        for path in RENDERED:
            fields = {"model": evil, "request_id": evil, "user": evil, evil: 1}
            await h.http.post(path, json=body_for(path, evil) | fields)
            fields.pop("model")
            await h.http.post(path, json=body_for(path, evil) | fields)

    with caplog.at_level(logging.DEBUG, "canter"):
        logging.getLogger("canter.access").setLevel("INFO")
        with_harness(body, access_log_format=form, **open_options())
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("canter")] + capsys.readouterr().err.splitlines()
    assert len(lines) > len(RENDERED)
    for line in lines:
        assert line.isprintable(), line


@pytest.mark.parametrize("path", GOOD)
def test_errors_echo_little(path: str) -> None:
    """Each text of a body in 200 kB is in `test_field_values`; here are the values of fields that should be no texts."""

    async def body(h: Harness) -> None:
        for place in places(path, int, float, bool, list):
            for value in ('"' + "x" * 200_000 + '"', '{"' + "x" * 200_000 + '": 1}', "[" + "1," * 100_000 + "1]"):
                headers = {"content-type": "application/json"}
                response = await h.http.post(path, content=place.with_value(value), headers=headers)
                if response.status_code != 200:
                    assert len(response.content) <= MAX_ERROR_BYTES, (place.where, len(response.content))
        if path == "/start_profile":
            await h.http.post("/stop_profile")

    opened(body, FakeCore(say("ok")))


@pytest.mark.parametrize("path", [path for path in STREAMS if path != "/inference/v1/generate"])
def test_pr_51137_transfer_parameters_are_refused(path: str) -> None:
    """They name sizes that others allocate; here no other machine takes part."""
    names = ["kv_transfer_params"] if path.startswith("/v1/c") or path == "/v1/responses" else []

    async def body(h: Harness) -> None:
        for name in names:
            response = await h.http.post(path, json=GOOD[path] | {name: {"tp_size": 10**9}})
            assert name in error_of_any(response)

    opened(body)
