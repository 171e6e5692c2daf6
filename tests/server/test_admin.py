"""Routes that a flag must ask for: load, tokenizer, profiles, and the control of the engine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from canter.core.errors import EngineError
from canter.server.app import ROUTES
from canter.server.args import ServerArgs
from canter.server.routes import admin
from tests.server.helpers import Harness, error_of, events, with_harness
from tests.server.test_app import until

EVERYTHING = {"enable_server_load_tracking": True, "enable_tokenizer_info_endpoint": True, "enable_dev_mode": True}
PATHS = {
    "/load": "GET", "/tokenizer_info": "GET", "/start_profile": "POST", "/stop_profile": "POST", "/server_info": "GET",
    "/reset_prefix_cache": "POST", "/pause": "POST", "/resume": "POST", "/is_paused": "GET", "/abort_requests": "POST",
}  # fmt: skip


def test_none_is_there_by_default() -> None:
    async def body(h: Harness) -> None:
        for path in PATHS:
            for method in ("GET", "POST"):
                error_of(await h.http.request(method, path), 404)

    assert admin.routes(ServerArgs()) == []
    with_harness(body)


def test_all_are_there_when_asked_for_and_need_the_key(tmp_path: Path) -> None:
    args = ServerArgs(profile_dir=str(tmp_path), **EVERYTHING)
    assert {route.path: min(route.methods - {"HEAD"}) for route in admin.routes(args)} == PATHS

    async def body(h: Harness) -> None:
        open_paths = {"/health", "/ping", "/version", "/metrics"}
        for route in (*ROUTES, *admin.routes(args)):
            path = route.path.replace("{model:path}", "m")
            for headers in ({}, {"x-api-key": "wrong"}):
                response = await h.http.request(min(route.methods), path, headers=headers)
                assert (response.status_code == 401) is (path not in open_paths), path

    with_harness(body, api_key=["key"], profile_dir=str(tmp_path), **EVERYTHING)


def test_load_counts_requests_but_not_monitoring() -> None:
    async def body(h: Harness) -> None:
        h.engine.paused = True
        asking = asyncio.create_task(h.complete("a", max_tokens=2))
        await until(lambda: h.engine.core.requests)
        assert (await h.http.get("/load")).json() == {"server_load": 1}
        h.engine.resume()
        assert (await asking).status_code == 200
        assert (await h.http.get("/load")).json() == {"server_load": 0}

    with_harness(body, **EVERYTHING)


def test_tokenizer_info() -> None:
    async def body(h: Harness) -> None:
        info = (await h.http.get("/tokenizer_info")).json()
        assert info["eos_token"] == "<eos>" and info["vocab_size"] == 260 and info["model_max_length"] == 512
        assert "add_generation_prompt" in info["chat_template"]
        assert info["added_tokens_decoder"]["256"] == {"content": "<eos>", "special": True}

    with_harness(body, **EVERYTHING)


def test_server_info_keeps_secrets() -> None:
    async def body(h: Harness) -> None:
        for form, kind in (("text", str), ("json", dict)):
            response = await h.http.get(f"/server_info?config_format={form}", headers={"x-api-key": "top-secret"})
            info = response.json()
            assert type(info["engine_args"]) is type(info["server_args"]) is kind
            assert "top-secret" not in response.text
            assert info["engine"]["max_model_len"] == 512
        error_of(await h.http.get("/server_info?config_format=xml", headers={"x-api-key": "top-secret"}), 400)

    with_harness(body, api_key=["top-secret"], **EVERYTHING)


def test_reset_prefix_cache() -> None:
    async def body(h: Harness) -> None:
        assert (await h.http.post("/reset_prefix_cache?reset_external=false")).json() == {"success": True}
        h.engine.paused = True
        asking = asyncio.create_task(h.complete("a", max_tokens=2))
        await until(lambda: h.engine.core.requests)
        assert (await h.http.post("/reset_prefix_cache")).json() == {"success": False}
        error = error_of(await h.http.post("/reset_prefix_cache?reset_running_requests=true"), 400)
        assert error["param"] == "reset_running_requests"
        h.engine.resume()
        await asking

    with_harness(body, **EVERYTHING)


async def start_stream(h: Harness, **fields) -> asyncio.Task:
    asking = asyncio.create_task(h.complete("ab", max_tokens=400, stream=True, **fields))
    await until(lambda: h.engine.core.requests)
    return asking


def finish_reason(response) -> str:
    return events(response)[-1]["choices"][0]["finish_reason"]


def test_pause_keep_freezes_and_resume_goes_on() -> None:
    async def body(h: Harness) -> None:
        running = await start_stream(h)
        assert (await h.http.post("/pause?mode=keep")).json() == {"status": "paused"}
        assert (await h.http.get("/is_paused")).json() == {"is_paused": True}
        newcomer = asyncio.create_task(h.complete("c", max_tokens=2))
        for _ in range(200):
            await asyncio.sleep(0)
        assert not running.done() and not newcomer.done() and len(h.engine.core.seen) == 1
        h.engine.health = EngineError("nothing has come for an hour")
        assert (await h.http.get("/health")).status_code == 200  # it does as it was told
        assert (await h.http.post("/resume")).json() == {"status": "resumed"}
        assert (await h.http.get("/health")).status_code == 503
        assert "".join(e["choices"][0]["text"] for e in events(await running)) == "ab" * 200
        assert (await newcomer).json()["choices"][0]["text"] == "cc"
        assert (await h.http.get("/is_paused")).json() == {"is_paused": False}

    with_harness(body, **EVERYTHING)


def test_pause_abort_ends_what_runs() -> None:
    async def body(h: Harness) -> None:
        running = await start_stream(h)
        assert (await h.http.post("/pause")).json() == {"status": "paused"}
        assert finish_reason(await running) == "abort"
        assert (await h.http.post("/resume")).status_code == 200
        assert (await h.complete("c", max_tokens=1)).status_code == 200

    with_harness(body, **EVERYTHING)


def test_pause_wait_lets_requests_end_first() -> None:
    async def body(h: Harness) -> None:
        running = await start_stream(h)
        assert (await h.http.post("/pause?mode=wait")).json() == {"status": "paused"}
        assert finish_reason(await running) == "length"
        assert h.engine.core.is_paused

    with_harness(body, **EVERYTHING)


@pytest.mark.parametrize("query", ["mode=sleep", "clear_cache=perhaps"])
def test_pause_checks_its_parameters(query: str) -> None:
    async def body(h: Harness) -> None:
        assert error_of(await h.http.post(f"/pause?{query}"), 400)["param"] == query.partition("=")[0]

    with_harness(body, **EVERYTHING)


def test_abort_by_the_ids_that_clients_see() -> None:
    async def body(h: Harness) -> None:
        tasks = [asyncio.create_task(h.complete("ab", max_tokens=400, stream=True, request_id=name)) for name in ("one", "one-2", "two")]
        await until(lambda: len(h.engine.core.requests) == 3)
        h.engine.paused = True
        assert (await h.http.post("/abort_requests", json={"request_ids": ["cmpl-one", "cmpl-unknown"]})).json() == {"aborted": 1}
        h.engine.resume()
        assert [finish_reason(await task) for task in tasks] == ["abort", "length", "length"]
        error_of(await h.http.post("/abort_requests", json={"ids": []}), 400)

    with_harness(body, **EVERYTHING)


def test_abort_all() -> None:
    async def body(h: Harness) -> None:
        h.engine.paused = True
        asking = asyncio.create_task(h.complete(["a", "b"], max_tokens=400))
        await until(lambda: len(h.engine.core.requests) == 2)
        assert (await h.http.post("/abort_requests")).json() == {"aborted": 2}
        assert [choice["finish_reason"] for choice in (await asking).json()["choices"]] == ["abort", "abort"]

    with_harness(body, **EVERYTHING)


def test_a_profile_is_written_once_and_can_be_read(tmp_path: Path) -> None:
    async def body(h: Harness) -> None:
        error_of(await h.http.post("/stop_profile"), 409)
        started = await h.http.post("/start_profile", json={"profile_prefix": "mine"})
        assert started.status_code == 200
        error_of(await h.http.post("/start_profile"), 409)
        await h.complete("a", max_tokens=5)
        path = Path((await h.http.post("/stop_profile")).json()["trace"])
        assert path.parent == tmp_path and path.name.startswith("mine-")
        trace = json.loads(path.read_text())
        spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
        assert len(spans) == 5 and all(span["dur"] >= 0 and span["name"] == "step" for span in spans)
        error_of(await h.http.post("/stop_profile"), 409)

    with_harness(body, profile_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"profile_prefix": "../x"}, "profile_prefix"), ({"profile_prefix": ""}, "profile_prefix"),
     ({"profile_prefix": "a" * 129}, "profile_prefix"), ({"delay_iterations": -1}, "delay_iterations"),
     ({"max_iterations": 2**63}, "max_iterations"), ({"other": 1}, "other"), ({"max_iterations": True}, "max_iterations")],
)  # fmt: skip
def test_profile_fields_are_checked(tmp_path: Path, fields: dict, param: str) -> None:
    async def body(h: Harness) -> None:
        assert error_of(await h.http.post("/start_profile", json=fields), 400)["param"] == param
        assert list(tmp_path.iterdir()) == []

    with_harness(body, profile_dir=str(tmp_path))


@pytest.mark.parametrize(("form", "start"), [("text", "TEXT named_metrics."), ("json", 'JSON {"named_metrics":')])
def test_load_is_told_in_a_header_when_asked(form: str, start: str) -> None:
    async def body(h: Harness) -> None:
        response = await h.http.post(
            "/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"endpoint-load-metrics-format": form}
        )
        told = response.headers["endpoint-load-metrics"]
        assert told.startswith(start)
        assert all(name in told for name in ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting"))
        assert "endpoint-load-metrics" not in (await h.complete("a", max_tokens=1)).headers

    with_harness(body)
