"""A server of one's own, with small programs in the server's place."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

import httpx
import pytest

from canter.cli import private_server as module
from canter.cli.private_server import private_server
from canter.core.errors import EngineDeadError

HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b'ok')
port = int(sys.argv[sys.argv.index('--port') + 1])
print('flags', *sys.argv[1:], flush=True)
http.server.HTTPServer(('127.0.0.1', port), Handler).serve_forever()
"""


@pytest.fixture
def serve_with(monkeypatch: pytest.MonkeyPatch) -> Sequence[str]:
    """Puts a program in the place of `canter serve`."""
    real = module.subprocess.Popen

    def put(program: str) -> None:
        def start(command: list[str], **options: object) -> object:
            assert command[1:4] == ["-m", "canter.cli.main", "serve"]
            return real([sys.executable, "-c", program, *command[4:]], **options)  # type: ignore[call-overload]

        monkeypatch.setattr(module.subprocess, "Popen", start)

    return put  # type: ignore[return-value]


def test_it_answers_and_is_gone_afterwards(serve_with) -> None:  # type: ignore[no-untyped-def]
    serve_with(HEALTHY)
    waited: list[float] = []
    with private_server(["--max-num-seqs", "3"], waited.append) as server:
        assert httpx.get(f"{server.root}/health").text == "ok"
        assert server.url.endswith("/v1") and waited == sorted(waited)
        assert "--max-num-seqs 3 --disable-uvicorn-access-log --host 127.0.0.1 --port" in server.log_text()
        assert os.getsid(server.process.pid) == server.process.pid  # Ctrl-C of the terminal does not reach it
    assert server.process.returncode is not None
    assert not os.path.exists(server.log.name)


def test_a_server_that_dies_tells_its_last_words(serve_with) -> None:  # type: ignore[no-untyped-def]
    serve_with("import sys; print('no such model', file=sys.stderr); sys.exit(3)")
    with pytest.raises(EngineDeadError, match=r"status 3 before it was ready:\nno such model"), private_server([]):
        pass


def test_the_reason_of_a_failed_start_is_one_sentence() -> None:
    assert module.reason_of_end("loading\ncanter: error: No such model.\nbye", 1) == "No such model."
    assert module.reason_of_end("a\nb", 7) == "The server ended with status 7 before it was ready:\na\nb"


def test_a_server_that_will_not_stop_is_killed(serve_with, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    serve_with("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + HEALTHY)
    monkeypatch.setattr(module, "STOP_SECONDS", 0.1)
    start = time.monotonic()
    with private_server([]) as server:
        pass
    assert server.process.returncode == -9 and time.monotonic() - start < 10
