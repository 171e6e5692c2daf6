"""Have others judge the API: its document by a validator, the server by schemathesis, which sends what the document allows and forbids.

python tests/api/run.py [EXAMPLES]

EXAMPLES requests (default 50) are tried of each operation, beside the edge cases of every field. The server runs over a fake engine, with
every route that a flag can bring. The judges' environment lies in `.api`, or where CANTER_API_TOOLS says. A failure is an answer with a
status of 500, one whose status, content type or body is not in the document, or a crash.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import httpx

from tests.page.canned import CannedServer
from tests.server.test_openapi import everything

HERE = Path(__file__).resolve().parent
HOME = Path(os.environ.get("CANTER_API_TOOLS", HERE.parents[1] / ".api"))
BIN = HOME / "venv" / "bin"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
CONTROL = "/(pause|resume|is_paused|start_profile|stop_profile)$"
"""Tried by themselves, on a server of their own: a paused engine answers nobody else."""


def install() -> None:
    """Bring the environment up to requirements.txt; done once for each state of it."""
    needed = HERE / "requirements.txt"
    stamp, state = HOME / "stamp", hashlib.sha256(needed.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == state:
        return
    subprocess.run([sys.executable, "-m", "venv", str(HOME / "venv")], check=True)
    subprocess.run([str(BIN / "python"), "-m", "pip", "install", "-q", "-r", str(needed)], check=True)
    stamp.write_text(state)


def main(examples: str = "50") -> int:
    install()
    with tempfile.TemporaryDirectory() as profiles:
        status = judge(examples, profiles, "--exclude-path-regex")
        return judge(examples, profiles, "--include-path-regex") or status


def judge(examples: str, profiles: str, which: str) -> int:
    """Have a server's routes tried, all but `CONTROL` or only those; then it must still answer."""
    server = CannedServer(in_front=False, **everything() | {"profile_dir": profiles})
    try:
        with tempfile.NamedTemporaryFile(suffix=".json") as document:
            document.write(httpx.get(server.url + "openapi.json").content)
            document.flush()
            subprocess.run([str(BIN / "python"), "-m", "openapi_spec_validator", document.name], check=True)
        command = [
            str(BIN / "schemathesis"), "run", server.url + "openapi.json", "--checks", CHECKS, "--phases", "examples,coverage,fuzzing",
            "--max-examples", examples, which, CONTROL, "--continue-on-failure", "--suppress-health-check", "all",
            "--request-timeout", "20", "--seed", "1", "--no-color", "--generation-database", "none",
        ]  # fmt: skip
        status = subprocess.run(command, cwd=HOME).returncode
        httpx.post(server.url + "resume").raise_for_status()
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        httpx.post(server.url + "v1/chat/completions", json=body).raise_for_status()
        return status
    finally:
        server.close()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
