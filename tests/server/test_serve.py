"""The whole server as a process: `run_server` over a fake engine process, real sockets, and the openai client."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from canter.core.config import EngineArgs
from canter.core.errors import ConfigError
from canter.server.args import ServerArgs
from tests.fakes import FAKE_ENGINE, model_folder

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = """
import json, sys
from canter.core.config import EngineArgs
from canter.server.args import ServerArgs
from canter.server.serve import run_server
given = json.loads(sys.argv[1])
for name, values in given["constants"].items():
    vars(sys.modules[name]).update(values)
sys.exit(run_server(EngineArgs(**given["engine"]), ServerArgs(**given["server"]), engine_command=given["command"]))
"""


class Process:
    """A server process on a free port. `constants`: by module, what it is to take in place of its own."""

    def __init__(self, *flags: str, model: str | None = None, engine: dict | None = None, constants: dict | None = None, **server) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        arguments = {
            "engine": {"model": model or str(model_folder()), **(engine or {})},
            "server": {"host": "127.0.0.1", "port": self.port, "served_model_name": ["m"], **server},
            "command": [*FAKE_ENGINE, *flags],
            "constants": constants or {},
        }
        self.process = subprocess.Popen([sys.executable, "-c", SCRIPT, json.dumps(arguments)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(iter(self.process.stderr.readline, ""))

    def wait_for_status(self, status: int, timeout: float = 20.0) -> httpx.Response:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                response = httpx.get(self.url + "/health")
                if response.status_code == status:
                    return response
            time.sleep(0.02)
        raise AssertionError(f"/health never answered {status}: {''.join(self.log)}")

    def wait_for_line(self, part: str, timeout: float = 20.0) -> None:
        deadline = time.monotonic() + timeout
        while not any(part in line for line in self.log):
            assert time.monotonic() < deadline and self.process.poll() is None, f"no line with {part!r}: {''.join(self.log)}"
            time.sleep(0.02)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = 20.0) -> int:
        code = self.process.wait(timeout)
        self._reader.join(5)
        return code


@contextlib.contextmanager
def server(*flags: str, ready: bool = True, **options) -> Iterator[Process]:
    process = Process(*flags, **options)
    try:
        if ready:
            process.wait_for_status(200)
        yield process
    finally:
        if process.process.poll() is None:
            process.process.kill()
            process.process.wait()


@pytest.fixture(scope="module")
def shared() -> Iterator[Process]:
    with server(api_key=["secret"]) as process:
        yield process


@pytest.fixture(scope="module")
def client(shared: Process) -> openai.OpenAI:
    return openai.OpenAI(base_url=shared.url + "/v1", api_key="secret", max_retries=0)


MESSAGES = [{"role": "user", "content": "hi"}]
EXTRAS = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1, "ignore_eos": True, "skip_special_tokens": False,
          "include_stop_str_in_output": True, "return_token_ids": True, "cache_salt": "a", "add_generation_prompt": True,
          "chat_template_kwargs": {"mood": "x"}, "stop_token_ids": [1]}  # fmt: skip


def test_openai_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="m", messages=MESSAGES, max_completion_tokens=6, temperature=0.5, top_p=0.9, n=2, seed=1, stop=["zz"], logprobs=True,
        top_logprobs=2, presence_penalty=0.1, frequency_penalty=0.1, logit_bias={"5": 1}, user="u", extra_body=EXTRAS,
    )  # fmt: skip
    assert [choice.message.content for choice in answer.choices] == ["[user]", "[user]"]
    assert answer.usage.completion_tokens == 12
    assert [entry.token for entry in answer.choices[0].logprobs.content] == list("[user]")
    assert answer.choices[0].token_ids == list(b"[user]")


def test_openai_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=9, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "[user]hi\n"
    assert chunks[-1].usage.completion_tokens == 9


def test_openai_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="m", prompt=["ab", "c"], max_tokens=3, logprobs=1, echo=True)
    assert [choice.text for choice in answer.choices] == ["ababa", "cccc"]
    chunks = list(client.completions.create(model="m", prompt="ab", max_tokens=3, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "aba"


def test_openai_models_and_errors(client: openai.OpenAI, shared: Process) -> None:
    assert [model.id for model in client.models.list()] == ["m"]
    assert client.models.retrieve("m").id == "m"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.chat.completions.create(model="m", messages=MESSAGES, temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="m", messages=MESSAGES, temperature=9, stream=True)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=shared.url + "/v1", api_key="wrong").models.list()


def live_requests(url: str) -> int:
    text = httpx.get(url + "/metrics").text
    [line] = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running{")]
    return int(float(line.rsplit(" ", 1)[1]))


def test_leaving_a_real_connection_aborts(client: openai.OpenAI, shared: Process) -> None:
    stream = client.completions.create(model="m", prompt="ab", max_tokens=500, stream=True)
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 10
    while live_requests(shared.url) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert live_requests(shared.url) == 0


@pytest.mark.parametrize(
    "data",
    [b"\x00\xff\xfe garbage\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /health HTTP/1.1\r\nbroken\r\n\r\n",
     b"GET /health HTTP/1.1\r\nx: " + b"y" * 1_000_000, b"GET /" + b"y" * 1_000_000],
)  # fmt: skip
def test_garbage_closes_the_connection_and_hurts_nobody(shared: Process, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", shared.port), timeout=10) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(data)
        answer = connection.recv(1000)
        assert answer == b"" or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4"))
    assert httpx.get(shared.url + "/health").status_code == 200


def ask(process: Process, *parts: bytes) -> bytes:
    """The whole answer to bytes that are sent in parts."""
    with socket.create_connection(("127.0.0.1", process.port), timeout=10) as connection:
        for part in parts:
            connection.sendall(part)
        return b"".join(iter(lambda: connection.recv(65536), b""))


COMPLETION = b'{"prompt": "ab", "max_tokens": 3}'
UPGRADE_HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nConnection: Upgrade, HTTP2-Settings, close\r\n"
    b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQBAAAAAAIAAAAA\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
) % len(COMPLETION)


@pytest.mark.parametrize("cut", [len(UPGRADE_HEAD), 10, len(UPGRADE_HEAD) + 5, len(UPGRADE_HEAD + COMPLETION)])
def test_a_wish_for_http2_is_passed_over(shared: Process, cut: int) -> None:
    whole = UPGRADE_HEAD + COMPLETION
    answer = ask(shared, whole[:cut], whole[cut:])
    assert answer.startswith(b"HTTP/1.1 200") and b'"text":"aba"' in answer


def test_trailers_without_end_close_the_connection(shared: Process) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", shared.port), timeout=10) as connection:
        connection.sendall(head + b"%x\r\n%b\r\n0\r\n" % (len(COMPLETION), COMPLETION))
        with pytest.raises(ConnectionError):
            for _ in range(2000):
                connection.sendall(b"A: " + b"b" * 50_000 + b"\r\n")
    assert httpx.get(shared.url + "/health").status_code == 200


def test_it_listens_while_it_loads_and_stops_when_told() -> None:
    with server("--hold", ready=False) as process:
        body = process.wait_for_status(503).json()
        assert body["status"] == "loading"
        response = httpx.post(process.url + "/v1/completions", json={"prompt": "a"})
        assert response.status_code == 503 and int(response.headers["retry-after"]) > 0
        assert httpx.get(process.url + "/metrics").status_code == 200
        process.signal(signal.SIGINT)
        assert process.wait() == 0


def test_sigterm_lets_streams_end_and_leaves_nothing_behind() -> None:
    with server("--delay", "0.02", shutdown_timeout=20) as process:
        engine = engine_pid(process)
        client = openai.OpenAI(base_url=process.url + "/v1", api_key="x", max_retries=0)
        stream = iter(client.completions.create(model="m", prompt="ab", max_tokens=30, stream=True))
        chunks = [next(stream)]
        process.signal(signal.SIGTERM)
        chunks.extend(stream)
        assert "".join(chunk.choices[0].text for chunk in chunks) == "ab" * 15
        assert process.wait() == 0
        with pytest.raises(ProcessLookupError):
            os.kill(engine, 0)
        with pytest.raises(httpx.ConnectError):
            httpx.get(process.url + "/health")


def test_without_time_to_drain_streams_end_with_an_error() -> None:
    with server("--delay", "0.02") as process:
        with httpx.stream("POST", process.url + "/v1/completions", json={"prompt": "ab", "max_tokens": 500, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            process.signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert "shutting down" in json.loads(rest[-2][6:])["error"]["message"]
        assert process.wait() == 0


def test_a_second_signal_ends_it_at_once() -> None:
    with server("--delay", "0.05", shutdown_timeout=60) as process:
        engine = engine_pid(process)
        with httpx.stream("POST", process.url + "/v1/completions", json={"prompt": "ab", "max_tokens": 500, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            process.signal(signal.SIGTERM)
            process.wait_for_line("stopping: ")
            process.signal(signal.SIGTERM)
            assert process.wait() == 128 + signal.SIGTERM
        wait_gone(engine)


def test_a_start_that_fails_prints_one_sentence() -> None:
    with server("--fail", "There is no such model.", ready=False) as process:
        assert process.wait() == 1
        assert process.log[-1] == "canter: error: There is no such model.\n"
        assert not any("Traceback" in line for line in process.log)


def test_a_model_that_is_not_there_is_named() -> None:
    with server("--hold", ready=False, model="/nowhere/model") as process:
        assert process.wait() == 1
        assert "/nowhere/model" in process.log[-1]


def test_a_port_in_use_is_said_in_plain_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, server(ready=False, port=taken.getsockname()[1]) as process:
        assert process.wait() == 1
        assert "Can't listen on 127.0.0.1:" in process.log[-1]


def test_the_death_of_the_engine_ends_requests_and_the_server() -> None:
    with server("--die-after", "5", "--delay", "0.02", on_engine_death="fail") as process:
        with httpx.stream("POST", process.url + "/v1/completions", json={"prompt": "ab", "max_tokens": 500, "stream": True}) as response:
            lines = [line for line in response.iter_lines() if line]
        assert "exit code 4" in json.loads(lines[-2][6:])["error"]["message"]
        assert process.wait() == 1
        assert "engine has died" in process.log[-1]
        assert not any("restarting" in line for line in process.log)


def test_a_unix_socket_serves_and_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    with server(ready=False, uds=str(path)) as process:
        client = httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://x")
        process.wait_for_line("ready: m")
        assert client.get("/health").status_code == 200
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
    assert not path.exists()


def engine_pid(process: Process) -> int:
    children = Path(f"/proc/{process.process.pid}/task/{process.process.pid}/children").read_text().split()
    return int(children[0])


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.02)
    raise AssertionError(f"process {pid} is still there")


def test_a_unix_socket_has_the_permissions_asked_for(tmp_path: Path) -> None:
    for permissions in ("660", "600"):
        path = tmp_path / permissions
        with server("--hold", ready=False, uds=str(path), uds_permissions=permissions) as process:
            process.wait_for_line("Started server process")
            assert stat.S_IMODE(path.stat().st_mode) == int(permissions, 8)
            process.signal(signal.SIGTERM)
            assert process.wait() == 0


def test_a_unix_socket_in_use_or_another_file_is_left_alone(tmp_path: Path) -> None:
    live, other = tmp_path / "live", tmp_path / "file"
    other.write_text("mine")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(live))
        listener.listen()
        for path in (live, other):
            with server(ready=False, uds=str(path)) as process:
                assert process.wait() == 1
                assert f"Can't listen on {path}" in process.log[-1]
            assert path.exists()


def test_a_socket_file_that_another_server_has_put_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with server("--hold", ready=False, uds=str(path)) as process:
        process.wait_for_line("Started server process")
        path.unlink()
        with socket.socket(socket.AF_UNIX) as successor:
            successor.bind(str(path))
            process.signal(signal.SIGTERM)
            assert process.wait() == 0
            assert path.exists()


def test_a_stopped_engine_is_not_healthy_and_recovers() -> None:
    with server("--delay", "0.02", engine_stall_timeout=1) as process:
        engine = engine_pid(process)
        with httpx.stream("POST", process.url + "/v1/completions", json={"prompt": "ab", "max_tokens": 60, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(engine, signal.SIGSTOP)
            try:
                assert process.wait_for_status(503).json()["status"] == "stuck"
            finally:
                os.kill(engine, signal.SIGCONT)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        process.wait_for_status(200)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_readers_that_take_nothing_cost_little_and_hold_up_nobody() -> None:
    with server() as process:
        httpx.post(process.url + "/v1/completions", json={"prompt": "ab", "max_tokens": 400})
        before = resident_bytes(process.process.pid)
        body = json.dumps({"prompt": "ab", "max_tokens": 500, "stream": True, "logprobs": 5}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        stalled = []
        try:
            for _ in range(100):
                connection = socket.socket()
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.connect(("127.0.0.1", process.port))
                connection.sendall(head + body)
                stalled.append(connection)
            with httpx.Client(base_url=process.url, timeout=60) as client:
                assert client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 5}).status_code == 200
                assert client.get("/health").status_code == 200
                deadline = time.monotonic() + 60
                while live_requests(process.url) and time.monotonic() < deadline:  # their requests end, though nobody reads
                    time.sleep(0.05)
                assert live_requests(process.url) == 0
            assert resident_bytes(process.process.pid) - before < 100 * 2**20
        finally:
            for connection in stalled:
                connection.close()


def test_a_reader_that_takes_nothing_for_long_is_cut_off() -> None:
    with server(constants={"canter.server.http_protocol": {"WRITE_SECONDS": 0.5}}) as process, socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect(("127.0.0.1", process.port))
        body = json.dumps({"prompt": ["ab"] * 4, "max_tokens": 500, "logprobs": 20, "n": 20, "temperature": 1}).encode()
        stalled.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        stalled.sendall(body)
        deadline = time.monotonic() + 30
        while num_connections(process) > 0:
            assert time.monotonic() < deadline, "the connection is still there"
            time.sleep(0.05)
        process.wait_for_status(200)


def num_connections(process: Process) -> int:
    """Established connections of the server, as the kernel lists them."""
    ends = [line.split()[1:4] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(own == f"0100007F:{process.port:04X}" and state == "01" for own, _, state in ends)


def test_the_access_log_is_machine_readable() -> None:
    with server(access_log_format="json") as process:
        httpx.post(process.url + "/v1/completions", json={"prompt": "ab", "max_tokens": 2})
        process.wait_for_line('"path":"/v1/completions"')
        [line] = [line for line in process.log if line.startswith("{")]
        entry = json.loads(line)
        assert entry["status"] == 200 and entry["client"].startswith("127.0.0.1:")


def test_server_args_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean port\?"):
        ServerArgs.parse(prot=1)
    for name, value in [("port", 70_000), ("port", "80"), ("max_body_bytes", 0), ("shutdown_timeout", -1), ("uvicorn_log_level", "loud"),
                        ("api_key", [""]),
                        ("on_engine_death", "hope"), ("max_engine_restarts", 0), ("engine_stall_timeout", 0)]:  # fmt: skip
        with pytest.raises(ConfigError, match=name):
            ServerArgs.parse(**{name: value})
    ServerArgs.parse(port=0, shutdown_timeout=5)
    EngineArgs.parse()
