"""The terminal's API client: streams, usage, errors in plain words."""

from __future__ import annotations

import httpx
import pytest

from canter.cli.api import ApiClient, Piece, ServerError, api_root, event_of
from tests.cli.fake_api import FakeApi, chat_chunks, sse

URL = "http://localhost:8000/v1"


def test_chat_streams_text_thought_and_usage() -> None:
    api = FakeApi(chat_chunks("a", "b", thought="hm"))
    with ApiClient(URL, transport=api.transport) as client:
        pieces = list(client.chat({"model": "tiny", "messages": []}))
    assert "".join(piece.text for piece in pieces) == "ab"
    assert "".join(piece.thought for piece in pieces) == "hm"
    assert pieces[-2].finish_reason == "stop"
    assert pieces[-1] == Piece(num_prompt_tokens=5, num_output_tokens=3)
    assert api.bodies[0]["stream"] is True and api.bodies[0]["stream_options"] == {"include_usage": True}


def test_completion_streams_text() -> None:
    with ApiClient(URL, transport=FakeApi().transport) as client:
        assert "".join(piece.text for piece in client.complete({"prompt": "x"})) == " Paris"


def test_models_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-environment")
    api = FakeApi()
    with ApiClient(URL, transport=api.transport) as client:
        assert client.models() == ["tiny", "other"] and client.first_model() == "tiny"
    with ApiClient(URL, "given", transport=api.transport) as client:
        client.models()
    assert api.headers[0]["authorization"] == "Bearer from-environment"
    assert api.headers[-1]["authorization"] == "Bearer given"


def test_errors_carry_the_server_message() -> None:
    with (
        ApiClient(URL, transport=FakeApi(status=400).transport) as client,
        pytest.raises(ServerError, match="answered 400: prompt too long"),
    ):
        list(client.chat({}))


def test_an_error_inside_a_stream_is_raised() -> None:
    api = FakeApi(sse({"choices": [{"delta": {"content": "x"}}]}, {"error": {"message": "engine died"}}))
    with ApiClient(URL, transport=api.transport) as client, pytest.raises(ServerError, match="engine died"):
        list(client.chat({}))


def test_an_unreachable_server_is_explained() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with (
        ApiClient(URL, transport=httpx.MockTransport(refuse)) as client,
        pytest.raises(ServerError, match=r"Can't reach .*'canter serve'"),
    ):
        client.models()


def test_api_root_adds_the_version_to_a_bare_address() -> None:
    assert api_root("http://host:1") == "http://host:1/v1"
    assert api_root("http://host:1/") == "http://host:1/v1"
    assert api_root("https://host/prefix/v1/") == "https://host/prefix/v1"
    with pytest.raises(ServerError, match="Expected an address"):
        api_root("localhost:8000")


def test_lines_that_are_no_events() -> None:
    assert event_of("") is None and event_of(": ping") is None and event_of("data: [DONE]") is None
