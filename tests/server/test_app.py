"""What stands around the generation routes: health, models, keys, CORS, ids, metrics."""

from __future__ import annotations

import asyncio
import re

import pytest

from canter.core.errors import ConfigError, EngineDeadError, EngineError, EngineNotReadyError, EngineRestartingError, QueueFullError
from canter.server.args import ServerArgs
from canter.server.metrics import count_buckets
from canter.version import __version__
from tests.fake_core import FakeCore, say
from tests.server.helpers import Harness, error_of, with_harness


def test_health_is_empty_when_ready() -> None:
    async def body(h: Harness) -> None:
        for response in (await h.http.get("/health"), await h.http.get("/ping"), await h.http.post("/ping")):
            assert (response.status_code, response.content) == (200, b"")
        assert (await h.http.get("/version")).json() == {"version": __version__}

    with_harness(body)


def test_health_while_loading() -> None:
    async def body(h: Harness) -> None:
        h.engine.health = EngineNotReadyError("loading")
        response = await h.http.get("/health")
        assert response.status_code == 503
        assert response.json() == {"status": "loading", "phases": {"weights": 1.5}}
        assert (await h.http.get("/metrics")).status_code == 200
        assert (await h.http.get("/v1/models")).status_code == 200
        for response in (await h.chat(), await h.complete(), await h.http.post("/tokenize", json={"prompt": "a"})):
            error_of(response, 503)
            assert int(response.headers["retry-after"]) > 0

    with_harness(body, ready=False)


def test_health_waits_for_the_tokenizer_too() -> None:
    async def body(h: Harness) -> None:
        assert (await h.http.get("/health")).json()["status"] == "loading"
        error_of(await h.chat(), 503)

    with_harness(body, ready=False)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EngineDeadError("it died at 0xabc"), "dead"),
        (EngineError("it has not answered"), "stuck"),
        (EngineRestartingError("soon"), "restarting"),
    ],
)
def test_health_when_the_engine_is_gone_or_stuck(error: Exception, status: str) -> None:
    async def body(h: Harness) -> None:
        h.engine.health = error
        response = await h.http.get("/health")
        assert response.status_code == 503
        assert response.json()["status"] == status and "0xabc" not in response.text
        assert ("retry-after" in response.headers) == (status == "restarting")

    with_harness(body)


def test_while_draining_new_requests_are_turned_away() -> None:
    async def body(h: Harness) -> None:
        h.app.state.server.draining = True
        assert (await h.http.get("/health")).json() == {"status": "stopping"}
        assert "stopping" in error_of(await h.chat(), 503)["message"]

    with_harness(body)


def test_a_full_queue_says_when_to_come_again() -> None:
    core = FakeCore()
    core.refuse = QueueFullError("The queue is full.")

    async def body(h: Harness) -> None:
        response = await h.chat(stream=True)
        assert error_of(response, 503)["type"] == "ServiceUnavailableError"
        assert int(response.headers["retry-after"]) >= 1

    with_harness(body, core)


def test_models() -> None:
    async def body(h: Harness) -> None:
        listed = (await h.http.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert [card["id"] for card in listed["data"]] == ["m", "org/m"]
        card = listed["data"][0]
        [permission] = card.pop("permission")
        assert permission["object"] == "model_permission" and permission["allow_sampling"] is True
        assert card.pop("created") > 0
        assert card == {
            "id": "m", "root": "smollm2-135m-instruct", "max_model_len": 512, "object": "model", "owned_by": "canter", "parent": None,
        }  # fmt: skip
        assert (await h.http.get("/v1/models/org/m")).json()["id"] == "org/m"
        assert error_of(await h.http.get("/v1/models/x"), 404)["param"] == "model"
        assert (await h.chat(model="org/m", max_tokens=1)).json()["model"] == "org/m"

    with_harness(body, served_model_name=["m", "org/m"])


OPEN = {"/health", "/ping", "/version", "/metrics"}
GUARDED = ["/v1/models", "/v1/models/m", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/nowhere", "/health/",
           "http://test//health",
           "/HEALTH", "/health/x"]  # fmt: skip


@pytest.mark.parametrize("path", sorted(OPEN))
def test_open_paths_need_no_key(path: str) -> None:
    assert with_harness(lambda h: h.http.get(path), api_key=["key"]).status_code == 200


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic key"}, {"Authorization": "key"},
                                     {"x-api-key": "wrong"}, {"Authorization": "Bearer "}, {"x-api-key": ""}])  # fmt: skip
def test_all_other_paths_need_one(headers: dict) -> None:
    async def body(h: Harness) -> None:
        for path in GUARDED:
            for method in ("GET", "POST", "HEAD", "PUT"):
                response = await h.http.request(method, path, headers=headers)
                assert response.status_code == 401, (method, path)
                assert response.headers["www-authenticate"] == "Bearer"

    with_harness(body, api_key=["key", "other"])


@pytest.mark.parametrize("headers", [{"Authorization": "Bearer key"}, {"Authorization": "bearer other"}, {"x-api-key": "key"},
                                     {"Authorization": "Bearer wrong", "x-api-key": "other"}])  # fmt: skip
def test_any_of_the_keys_opens(headers: dict) -> None:
    assert with_harness(lambda h: h.http.get("/v1/models", headers=headers), api_key=["key", "other"]).status_code == 200


def test_a_key_of_any_script_works(monkeypatch) -> None:
    monkeypatch.setenv("CANTER_API_KEY", "schlüssel")
    headers = {"x-api-key": "schlüssel".encode()}
    assert with_harness(lambda h: h.http.get("/v1/models", headers=headers)).status_code == 200
    assert with_harness(lambda h: h.http.get("/v1/models")).status_code == 401


def test_cors_is_off_by_default_and_preflights_need_no_key() -> None:
    preflight = {"Origin": "http://page", "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}

    async def off(h: Harness) -> None:
        response = await h.http.get("/v1/models", headers={"Origin": "http://page"})
        assert "access-control-allow-origin" not in response.headers

    async def on(h: Harness) -> None:
        response = await h.http.options("/v1/chat/completions", headers=preflight)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "http://page"
        refused = await h.http.get("/v1/models", headers={"Origin": "http://page"})
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "http://page"

    with_harness(off)
    with_harness(on, allowed_origins=["http://page"], api_key=["key"])


def test_request_ids_come_back_when_wanted() -> None:
    async def body(h: Harness) -> None:
        assert (await h.http.get("/health", headers={"X-Request-Id": "abc"})).headers["x-request-id"] == "abc"
        response = await h.chat(max_tokens=1)
        assert response.json()["id"] == f"chatcmpl-{response.headers['x-request-id']}"

    with_harness(body, enable_request_id_headers=True)
    assert "x-request-id" not in with_harness(lambda h: h.http.get("/health")).headers


def samples(text: str) -> dict[str, float]:
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line and not line.startswith("#")}


def test_metrics_tell_of_requests() -> None:
    labels = 'engine="0",model_name="m"'

    async def body(h: Harness) -> dict[str, float]:
        await h.chat("x" * 20)
        await h.complete("a", n=2, temperature=1, max_tokens=3)
        error_of(await h.chat(model="other"), 404)
        return samples((await h.http.get("/metrics")).text)

    got = with_harness(body, FakeCore(say("hello")))

    def value(name: str, extra: str = "") -> float:
        return got[f"vllm:{name}{{{','.join(sorted([*labels.split(','), *([extra] if extra else [])]))}}}"]

    assert value("prompt_tokens_total") == len("[user]\n[assistant]") + 20 + 2
    assert value("prompt_tokens_cached_total") == 32
    assert value("generation_tokens_total") == 6 + 6
    assert value("request_success_total", 'finished_reason="stop"') == 1
    assert value("request_success_total", 'finished_reason="length"') == 2
    assert value("request_success_total", 'finished_reason="abort"') == 0
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_prompt_tokens", "request_generation_tokens",
                 "request_params_max_tokens", "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
                 "request_inference_time_seconds", "request_time_per_output_token_seconds", "request_num_preemptions",
                 "request_prefill_kv_computed_tokens"):  # fmt: skip
        assert value(f"{name}_count") == 3, name
    assert value("request_params_n_count") == value("request_max_num_generation_tokens_count") == 2
    assert value("inter_token_latency_seconds_count") == 5 + 2 + 2
    assert value("request_params_n_bucket", 'le="2.0"') == 2
    assert value("num_requests_running") == value("num_requests_waiting") == value("kv_cache_usage_perc") == 0
    assert value("iteration_tokens_total_count") > 0
    assert value("prefix_cache_queries_total") == value("prefix_cache_hits_total") == value("num_preemptions_total") == 0
    assert got[f"canter:num_blocks{{{labels}}}"] == got[f"canter:num_free_blocks{{{labels}}}"] == 100
    assert any(name.startswith("vllm:cache_config_info{") and 'num_gpu_blocks="100"' in name for name in got)
    assert got['http_requests_total{handler="/v1/chat/completions",method="POST",status="2xx"}'] == 1
    assert got['http_requests_total{handler="/v1/chat/completions",method="POST",status="4xx"}'] == 1
    assert "process_resident_memory_bytes" in got


def test_metrics_under_a_name_of_ones_own() -> None:
    async def body(h: Harness) -> list[str]:
        await h.chat('"\nvllm:"')
        return (await h.http.get("/metrics")).text.splitlines()

    def names(lines: list[str]) -> list[str]:
        return [re.split(r"[{ ]", line.removeprefix("# HELP ").removeprefix("# TYPE "))[0] for line in lines]

    usual = names(with_harness(body, FakeCore(say("a"))))
    own = names(with_harness(body, FakeCore(say("a")), metrics_prefix="canter"))
    assert any(name.startswith("vllm:") for name in usual)
    assert own == [name.replace("vllm:", "canter:") for name in usual]
    with pytest.raises(ConfigError, match="metrics_prefix"):
        ServerArgs.parse(metrics_prefix="other")


def test_before_the_first_step_all_blocks_are_free() -> None:
    async def body(h: Harness) -> None:
        lines = (await h.http.get("/metrics")).text.splitlines()
        values = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if line.startswith("canter:")}
        assert values["canter:num_free_blocks"] == values["canter:num_blocks"] > 0
        assert 0 < values["canter:event_loop_tasks"] < 100

    with_harness(body)


def test_bucket_series() -> None:
    assert count_buckets(120) == (1, 2, 5, 10, 20, 50, 100)


class Connection:
    """A raw ASGI conversation whose client can hang up."""

    def __init__(self, app, path: str, body: bytes, gate: asyncio.Event | None = None) -> None:
        self._gate = gate
        self.sent: list[dict] = []
        self.gone = asyncio.Event()
        self._body = [body]
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST", "path": path,
            "raw_path": path.encode(), "root_path": "", "query_string": b"", "scheme": "http", "client": None, "server": ("t", 80),
            "headers": [(b"content-type", b"application/json")],
        }  # fmt: skip
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict) -> None:
        self.sent.append(message)
        if self._gate is not None and message["type"] == "http.response.body":
            await self._gate.wait()
        await asyncio.sleep(0)


async def until(condition) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never became so")


@pytest.mark.parametrize("paused", [True, False])
@pytest.mark.parametrize("fields", [b'"stream": true', b'"stream": false', b'"stream": false, "n": 3, "temperature": 1'])
def test_a_client_that_leaves_ends_its_request(paused: bool, fields: bytes) -> None:
    async def body(h: Harness) -> None:
        h.engine.paused = paused
        payload = b'{"prompt": ["a", "b"], "max_tokens": 500, "ignore_eos": true, ' + fields + b"}"
        connection = Connection(h.app, "/v1/completions", payload)
        await until(lambda: h.engine.core.requests)
        num_requests = len(h.engine.core.requests)
        connection.gone.set()
        await connection.task
        assert len(h.engine.core.aborted) == num_requests
        assert not h.engine.core.requests
        assert h.engine.hub.num_live == 0
        got = samples((await h.http.get("/metrics")).text)
        aborted = got['vllm:request_success_total{engine="0",finished_reason="abort",model_name="m"}']
        assert aborted == num_requests
        h.engine.resume()
        assert (await h.chat(max_tokens=1)).status_code == 200

    with_harness(body)


def test_a_client_that_leaves_while_sending_its_body() -> None:
    async def body(h: Harness) -> None:
        connection = Connection(h.app, "/v1/completions", b"")
        connection._body.clear()
        connection.gone.set()
        await connection.task
        assert connection.sent == []

    with_harness(body)


def test_a_reader_that_stalls_gets_the_rest_at_once() -> None:
    async def body(h: Harness) -> None:
        gate = asyncio.Event()
        connection = Connection(h.app, "/v1/completions", b'{"prompt": "a", "max_tokens": 500, "stream": true}', gate)
        await until(lambda: len(h.engine.core.seen) == 1 and h.engine.hub.num_live == 0)
        assert len(connection.sent) == 2
        gate.set()
        await connection.task
        bodies = [message["body"] for message in connection.sent[1:]]
        assert len(bodies) == 3
        assert bodies[1].count(b"data: ") == 1

    with_harness(body)
