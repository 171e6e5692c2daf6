"""Bodies that nobody would write by hand: whatever comes, the answer is an answer or a 400, and the server goes on."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from canter.server.body import _layout
from canter.server.schemas.responses import ResponsesRequest
from canter.server.schemas.scale_out import DerenderChatRequest, DerenderCompletionRequest, GenerateRequest, GenerateSampling
from tests.fake_core import FakeCore, say
from tests.server.helpers import Harness, error_of, with_harness

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3), max_leaves=6
)
KINDS = ["message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "item_reference"]
parts = st.fixed_dictionaries(
    {"type": st.sampled_from(["input_text", "output_text", "refusal", "reasoning_text", "summary_text", "input_image"])},
    optional=dict.fromkeys(("text", "refusal"), scalars),
)
texts = st.text(max_size=8) | st.lists(parts, max_size=3)
items = st.fixed_dictionaries(
    {"type": st.sampled_from(KINDS)},
    optional={
        "role": st.sampled_from(["user", "assistant", "system", "developer"]),
        "content": texts,
        "output": texts,
        "summary": st.lists(parts, max_size=2),
        **{name: st.text(max_size=8) for name in ("id", "call_id", "name", "namespace", "arguments", "input")},
    },
)
tools = st.fixed_dictionaries(
    {"type": st.sampled_from(["function", "custom", "namespace", "web_search"])},
    optional=dict.fromkeys(("name", "tools", "parameters", "description", "format"), values),
)
calm = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def answered(path: str, body: dict) -> None:
    async def ask(h: Harness) -> None:
        response = await h.http.post(path, content=json.dumps(body))
        if response.status_code != 200:
            error_of(response, 404 if response.status_code == 404 else 400)
        after = await h.http.post("/v1/responses", json={"input": "hi"})
        assert after.json()["status"] == "completed"

    with_harness(ask, FakeCore(say("ok")), enable_scale_out=True)


def fields(kind: Any) -> st.SearchStrategy[dict]:
    """Any values for any of the fields that a body may have."""
    names = [name for name in _layout(kind).raw.__struct_fields__ if name != "background"]
    return st.dictionaries(st.sampled_from(names), values, max_size=4)


@calm
@given(st.lists(items, max_size=5), st.lists(tools, max_size=2), fields(ResponsesRequest))
def test_responses(given_items: list, given_tools: list, more: dict) -> None:
    answered("/v1/responses", {"input": given_items, "tools": given_tools, "tool_choice": "none", **more})


@calm
@given(st.lists(items, min_size=1, max_size=6))
def test_a_conversation_of_any_items_can_be_gone_on_from(given_items: list) -> None:
    async def ask(h: Harness) -> None:
        first = await h.http.post("/v1/responses", content=json.dumps({"input": given_items}))
        if first.status_code != 200:
            error_of(first, 400)
            return
        second = await h.http.post("/v1/responses", json={"input": "on", "previous_response_id": first.json()["id"]})
        assert second.status_code == 200, second.text
        listed = await h.http.get(f"/v1/responses/{second.json()['id']}/input_items", params={"limit": 100})
        assert len(listed.json()["data"]) == len(given_items) + 2

    with_harness(ask, FakeCore(say("ok")))


@calm
@given(st.lists(st.integers(-1, 270), max_size=3), fields(GenerateSampling), fields(GenerateRequest))
def test_generate(token_ids: list, sampling: dict, more: dict) -> None:
    answered("/inference/v1/generate", {"token_ids": token_ids, "sampling_params": sampling, **more})


choices = st.lists(
    st.fixed_dictionaries(
        {"index": st.integers(0, 3)},
        optional={
            "token_ids": st.lists(st.integers(0, 260), max_size=4),
            "finish_reason": st.sampled_from(["stop", "length", None]),
            "stop_reason": scalars,
            "logprobs": values,
        },
    ),
    max_size=2,
)
answers = st.fixed_dictionaries(
    {"request_id": st.text(max_size=4), "choices": choices}, optional={"usage": values, "prompt_logprobs": values}
)


@calm
@given(answers, fields(DerenderChatRequest), fields(DerenderCompletionRequest), st.booleans())
def test_derender(answer: dict, chat: dict, completion: dict, stream: bool) -> None:
    answered("/v1/chat/completions/derender", {"generate_response": answer, "generate_chunk": answer, "stream": stream, **chat})
    answered("/v1/completions/derender", {"generate_responses": [answer], "generate_chunk": answer, "stream": stream, **completion})
