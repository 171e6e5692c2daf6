"""`canter chat` and `canter complete` on canned answers."""

from __future__ import annotations

import io
from argparse import Namespace
from collections.abc import Iterator

import pytest

from canter.cli import chat, complete
from canter.cli.api import ApiClient, Piece
from canter.cli.main import main
from canter.cli.terminal import Answer, WaitingLine, show_answer
from tests.cli.fake_api import FakeApi, chat_chunks

URL = "http://localhost:8000/v1"


def made(api: FakeApi, **options: object) -> tuple[chat.Chat, io.StringIO]:
    out = io.StringIO()
    return chat.Chat(ApiClient(URL, transport=api.transport), "tiny", {"temperature": 0.0}, out=out, **options), out  # type: ignore[arg-type]


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    """What the user types; an exception class stands for Ctrl-C or Ctrl-D."""
    waiting = iter([*lines, EOFError])

    def read(prompt: str = "") -> str:
        line = next(waiting)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)


def test_a_conversation_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    api = FakeApi()
    session, out = made(api, system_prompt="Be brief.")
    typed(monkeypatch, "Hi", "", "Again")
    session.loop()
    assert api.bodies[0]["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert [message["role"] for message in api.bodies[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert api.bodies[1]["messages"][2]["content"] == "Hello"
    assert api.bodies[0]["temperature"] == 0.0
    assert out.getvalue().count("Hello\n") == 2


def test_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    api = FakeApi()
    session, out = made(api)
    typed(monkeypatch, "one", "/clear", "/system Be kind.", "/nonsense", "/help", KeyboardInterrupt, "two", "/exit", "never")
    session.loop()
    assert [body["messages"][-1]["content"] for body in api.bodies] == ["one", "two"]
    assert api.bodies[1]["messages"] == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "two"}]
    shown = out.getvalue()
    assert "No command /nonsense." in shown and "/system TEXT" in shown and "(Ctrl-D leaves.)" in shown


def test_a_failed_turn_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    api = FakeApi(status=400)
    session, out = made(api)
    typed(monkeypatch, "too long")
    session.loop()
    assert session.messages == [] and "! The server answered 400: prompt too long" in out.getvalue()


def test_ctrl_c_stops_the_answer_and_keeps_what_came() -> None:
    closed = []

    def pieces() -> Iterator[Piece]:
        try:
            yield Piece(text="So far")
            raise KeyboardInterrupt
        finally:
            closed.append(True)

    answer = show_answer(pieces(), io.StringIO())
    assert answer.interrupted and answer.text == "So far" and closed


def test_thoughts_stand_between_marks() -> None:
    out = io.StringIO()
    with ApiClient(URL, transport=FakeApi(chat_chunks("ok", thought="hm")).transport) as client:
        answer = show_answer(client.chat({}), out)
    assert out.getvalue() == "<think>\nhm\n</think>\nok\n"
    assert answer.text == "ok"


def test_statistics_of_an_answer() -> None:
    answer = Answer(started=10.0, first=10.25, last=11.25, num_prompt_tokens=7, num_output_tokens=21)
    assert answer.summary() == "[TTFT 250 ms, 20.0 tokens/s, 7 prompt tokens, 21 output tokens]"
    assert Answer().summary() == "[no tokens]"


def test_quick_answers_once_and_leaves(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    api = FakeApi()
    monkeypatch.setattr("canter.cli.terminal.ApiClient", lambda url, key: ApiClient(url, key, transport=api.transport))
    assert main(["chat", "--url", URL, "-q", "Hi", "--stats", "--system-prompt", "S", "--max-tokens", "9"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Hello\n[TTFT ") and "3 output tokens" in out
    assert api.bodies[0] | {} == api.bodies[0] and api.bodies[0]["model"] == "tiny" and api.bodies[0]["max_tokens"] == 9
    assert api.bodies[0]["messages"][0] == {"role": "system", "content": "S"}


def test_a_running_server_takes_no_engine_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", URL, "--max-num-seqs", "3"]) == 1
    assert "leave out --max-num-seqs" in capsys.readouterr().err


def test_complete_quick_and_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    api = FakeApi()
    monkeypatch.setattr("canter.cli.terminal.ApiClient", lambda url, key: ApiClient(url, key, transport=api.transport))
    assert main(["complete", "--url", URL, "-q", "The capital", "--echo"]) == 0
    assert capsys.readouterr().out == "The capital Paris\n"
    typed(monkeypatch, "first", "  ", "second")
    assert main(["complete", "--url", URL, "--model-name", "other"]) == 0
    assert [body["prompt"] for body in api.bodies] == ["The capital", "first", "second"]
    assert api.bodies[1]["model"] == "other"


def test_a_line_that_fails_is_reported_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    api = FakeApi(status=400)
    typed(monkeypatch, "first", "second")
    with ApiClient(URL, transport=api.transport) as client:
        assert complete.complete_lines(client, {}, Namespace(echo=False, stats=False)) == 1
    assert len(api.bodies) == 2 and capsys.readouterr().err.count("! The server answered 400") == 2


def test_the_waiting_line_is_only_for_terminals() -> None:
    out = io.StringIO()
    line = WaitingLine("Loading", out)
    line.show(1.0)
    line.clear()
    assert out.getvalue() == ""


def test_history_file_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert str(chat.history_file()) == "/state/canter/chat_history"
