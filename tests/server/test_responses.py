"""`/v1/responses` over a fake engine, in one process."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from canter.core.errors import EngineDeadError, EngineError, QueueFullError
from tests.fake_core import CONTEXT, FakeCore, say
from tests.server.helpers import Harness, error_of, with_harness

PROMPT = "[user]hi\n[assistant]"
LOGPROBS = ["message.output_text.logprobs"]
HUGE = 10**30


async def create(h: Harness, input: Any = "hi", **fields: Any) -> httpx.Response:
    return await h.http.post("/v1/responses", json={"input": input, **fields})


async def get(h: Harness, response_id: str, path: str = "", **query: Any) -> httpx.Response:
    return await h.http.get(f"/v1/responses/{response_id}{path}", params=query)


def respond(core: FakeCore | None = None, harness: dict | None = None, **fields: Any) -> httpx.Response:
    return with_harness(lambda h: create(h, **fields), core, **(harness or {}))


def events(response: httpx.Response, first: int = 0) -> list[dict]:
    """The events of a stream, checked for what holds of every stream."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    result = []
    for block in filter(None, response.text.split("\n\n")):
        name, data = block.split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert name == f"event: {body['type']}"
        result.append(body)
    assert [event["sequence_number"] for event in result] == list(range(first, first + len(result)))
    return result


async def until(condition, what: str) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError(what)


def text_of(body: dict) -> str:
    return "".join(part["text"] for item in body["output"] for part in item["content"])


def prompts(h: Harness) -> list[str]:
    return [bytes(request.prompt_token_ids).decode() for request in h.engine.core.seen]


# --- answers ----------------------------------------------------------------------------------------------------------


def test_an_answer_has_every_field() -> None:
    body = respond(
        FakeCore(say("hello")), model="m", metadata={"a": "b"}, user="me", max_output_tokens=50, temperature=0.5, top_p=0.9
    ).json()
    item = body["output"][0]
    assert body["id"].startswith("resp_") and item.pop("id").startswith("msg_")
    assert body["completed_at"] >= body["created_at"] > 0
    for name in ("id", "created_at", "completed_at", "output"):
        del body[name]
    assert item == {
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}],
    }
    assert body == {
        "object": "response", "model": "m", "status": "completed", "background": False, "error": None, "incomplete_details": None,
        "instructions": None, "max_output_tokens": 50, "max_tool_calls": None, "metadata": {"a": "b"}, "parallel_tool_calls": True,
        "previous_response_id": None, "prompt_cache_key": None, "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None, "service_tier": "default", "store": True, "temperature": 0.5,
        "text": {"format": {"type": "text"}, "verbosity": "medium"}, "tool_choice": "auto", "tools": [], "top_logprobs": 0,
        "top_p": 0.9, "truncation": "disabled", "user": "me",
        "usage": {
            "input_tokens": len(PROMPT), "input_tokens_details": {"cached_tokens": len(PROMPT) // 16 * 16, "cache_write_tokens": 0},
            "output_tokens": 6, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": len(PROMPT) + 6,
        },
    }  # fmt: skip


def test_a_stream_has_its_events_in_order() -> None:
    stream = events(respond(FakeCore(say("hey")), stream=True))
    assert [event["type"] for event in stream] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    created, in_progress, added, part, *deltas, text, part_done, item_done, completed = stream
    assert created["response"]["status"] == in_progress["response"]["status"] == "in_progress"
    assert created["response"]["output"] == in_progress["response"]["output"] == []
    assert created["response"]["usage"] is None
    assert added["item"] == {"type": "message", "id": added["item"]["id"], "role": "assistant", "status": "in_progress", "content": []}
    assert part["part"] == {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    assert [delta["delta"] for delta in deltas] == ["h", "e", "y"]
    for event in (part, *deltas, text, part_done):
        assert (event["item_id"], event["output_index"], event["content_index"]) == (added["item"]["id"], 0, 0)
    assert text["text"] == part_done["part"]["text"] == "hey"
    assert item_done["item"] == completed["response"]["output"][0]
    assert item_done["item"]["status"] == completed["response"]["status"] == "completed"
    assert len({event["response"]["id"] for event in (created, in_progress, completed)}) == 1


def without_ids(body: dict) -> dict:
    output = [{**item, "id": ""} for item in body["output"]]
    return {**body, "id": "", "created_at": 0, "completed_at": 0, "output": output}


@pytest.mark.parametrize("options", [{}, {"max_output_tokens": 4}, {"stop": ["lo"]}, {"include": LOGPROBS, "top_logprobs": 2}])
def test_stream_and_answer_say_the_same(options: dict) -> None:
    whole = respond(FakeCore(say("hello wörld")), **options).json()
    last = events(respond(FakeCore(say("hello wörld")), stream=True, **options))[-1]
    assert without_ids(last["response"]) == without_ids(whole)


def test_a_response_cut_by_its_length_is_incomplete() -> None:
    body = respond(max_output_tokens=3).json()
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete" and body["completed_at"] is None
    last = events(respond(max_output_tokens=3, stream=True))[-1]
    assert last["type"] == "response.incomplete" and last["response"]["status"] == "incomplete"


def test_an_empty_answer_has_its_item_all_the_same() -> None:
    stream = events(respond(FakeCore(say("")), stream=True))
    assert [event["type"].removeprefix("response.") for event in stream] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert text_of(stream[-1]["response"]) == ""


def test_logprobs() -> None:
    core = FakeCore(say("ab", then_eos=False))
    [part] = respond(core, max_output_tokens=2, include=LOGPROBS, top_logprobs=2).json()["output"][0]["content"]
    first, second = part["logprobs"]
    assert (first["token"], first["bytes"], first["logprob"]) == ("a", [97], -0.5)
    assert [top["token"] for top in second["top_logprobs"]] == ["b", "c"]
    deltas = [e for e in events(respond(FakeCore(say("ab")), stream=True, top_logprobs=1)) if e["type"].endswith("text.delta")]
    assert [entry["token"] for delta in deltas for entry in delta["logprobs"]] == ["a", "b", "<eos>"]
    assert "".join(delta["delta"] for delta in deltas) == "ab"


def test_sampling_fields_act() -> None:
    async def body(h: Harness) -> None:
        fields = dict(seed=5, top_k=7, min_p=0.1, stop=["x"], ignore_eos=True, min_tokens=2, repetition_penalty=1.1, logit_bias={"5": 1.0})
        assert (await create(h, max_output_tokens=4, **fields)).status_code == 200
        params = h.engine.core.seen[0].sampling
        for name, value in fields.items():
            assert getattr(params, name) == ({5: 1.0} if name == "logit_bias" else value), name
        assert params.max_tokens == 4

    with_harness(body)


def test_the_effort_reaches_the_template() -> None:
    async def body(h: Harness) -> None:
        await create(h, chat_template_kwargs={"mood": "glad"}, reasoning={"effort": "low", "summary": "auto"}, max_output_tokens=1)
        assert prompts(h) == ["[user]hi\nglad[assistant]"]

    with_harness(body)


def test_instructions_come_first() -> None:
    async def body(h: Harness) -> None:
        await create(h, instructions="Be brief.", max_output_tokens=1)
        assert prompts(h) == ["[system]Be brief.\n" + PROMPT]

    with_harness(body)


# --- conversations ----------------------------------------------------------------------------------------------------


def test_a_conversation_goes_on_without_its_instructions() -> None:
    async def body(h: Harness) -> None:
        first = (await create(h, "one", instructions="Be brief.")).json()
        second = (await create(h, "two", previous_response_id=first["id"])).json()
        third = (await create(h, "three", previous_response_id=second["id"], instructions="Rhyme.")).json()
        assert second["previous_response_id"] == first["id"] and third["status"] == "completed"
        assert prompts(h)[1:] == [
            "[user]one\n[assistant]ok\n[user]two\n[assistant]",
            "[system]Rhyme.\n[user]one\n[assistant]ok\n[user]two\n[assistant]ok\n[user]three\n[assistant]",
        ]

    with_harness(body, FakeCore(say("ok")))


def test_several_may_go_on_from_one() -> None:
    async def body(h: Harness) -> None:
        first = (await create(h, "one")).json()
        for word in ("two", "deux"):
            await create(h, word, previous_response_id=first["id"])
        assert [prompt.split("\n")[2] for prompt in prompts(h)[1:]] == ["[user]two", "[user]deux"]

    with_harness(body, FakeCore(say("ok")))


def test_what_is_not_stored_can_not_be_gone_on_from() -> None:
    async def body(h: Harness) -> None:
        first = (await create(h, "one", store=False)).json()
        assert first["store"] is False
        error = error_of(await create(h, "two", previous_response_id=first["id"]), 404)
        assert error["param"] == "previous_response_id" and error["type"] == "NotFoundError"
        error_of(await get(h, first["id"]), 404)

    with_harness(body, FakeCore(say("ok")))


def test_items_of_every_kind_become_messages() -> None:
    items = [
        {"role": "developer", "content": "D"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "A"}, {"type": "input_text", "text": "B"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "T"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "C", "annotations": [{"x": 1}], "logprobs": []}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "namespace": "n", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "g", "input": "i"},
        {"type": "function_call_output", "call_id": "c1", "output": "O"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "P"}]},
        {"role": "assistant", "content": "E"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "N"}]},
        {"type": "reasoning", "id": "rs_2", "summary": []},
        {"role": "user", "content": "Z"},
    ]  # fmt: skip

    async def body(h: Harness) -> None:
        response = (await create(h, items, max_output_tokens=1)).json()
        assert prompts(h) == [
            "[system]D\n[user]A\nB\n[assistant]C\n[tool]O\n[tool]P\n[assistant]E\n[assistant]N\n[user]Z\n[assistant]",
        ]
        page = (await get(h, response["id"], "/input_items", order="asc", limit=100)).json()
        assert [item["type"] for item in page["data"]] == [item.get("type", "message") for item in items]
        assert page["data"][3]["content"] == [{"type": "output_text", "text": "C", "annotations": []}]
        assert all(item["id"] for item in page["data"])

    with_harness(body)


@pytest.mark.parametrize(
    ("item", "name"),
    [
        ({}, "input[0].type"),
        ({"type": "item_reference", "id": "msg_1"}, "input[0].type"),
        ({"type": "computer_call_output"}, "input[0].type"),
        ({"role": "king", "content": "x"}, "input[0].role"),
        ({"role": "user"}, "input[0].content"),
        ({"role": "user", "content": 5}, "input[0].content"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]}, "input[0].content[0].type"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[0].content[0].text"),
        ({"type": "function_call", "call_id": "c", "name": "f"}, "input[0].arguments"),
        ({"type": "function_call_output", "output": "x"}, "input[0].call_id"),
        ({"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file"}]}, "input[0].output[0].type"),
        ({"type": "reasoning", "summary": [], "encrypted_content": "x"}, "input[0].encrypted_content"),
        ({"type": "reasoning", "summary": []}, "input"),
        ("text", "input[0]"),
    ],
)
def test_items_that_can_not_be_read_are_refused_by_name(item: Any, name: str) -> None:
    error = error_of(respond(input=[item]), 400)
    assert error["param"] == name and name.split("[")[0] in error["message"]


def test_input_items_come_in_pages() -> None:
    async def body(h: Harness) -> None:
        first = (await create(h, [{"role": "user", "content": str(i)} for i in range(3)])).json()
        second = (await create(h, "3", previous_response_id=first["id"])).json()

        async def page(**query: Any) -> tuple[list[str], dict]:
            answer = (await get(h, second["id"], "/input_items", **query)).json()
            return [part["text"] for item in answer["data"] for part in item["content"]], answer

        assert (await page())[0] == ["3", "ok", "2", "1", "0"]
        texts, answer = await page(limit=2, order="asc")
        assert texts == ["0", "1"] and answer["has_more"] and answer["last_id"] == answer["data"][1]["id"]
        texts, answer = await page(limit=3, order="asc", after=answer["last_id"])
        assert texts == ["2", "ok", "3"] and not answer["has_more"]
        for name, value in [("order", "up"), ("limit", "0"), ("limit", "101"), ("limit", "NaN"), ("limit", "-1"), ("after", "msg_x")]:
            assert error_of(await get(h, second["id"], "/input_items", **{name: value}), 400)["param"] == name

    with_harness(body, FakeCore(say("ok")))


def test_truncation_leaves_out_the_oldest_turns() -> None:
    turns = [{"role": role, "content": f"{i:02d}" + "x" * 60} for i in range(10) for role in ("user", "assistant")]
    turns += [{"role": "user", "content": "last"}]

    async def body(h: Harness) -> None:
        error = error_of(await create(h, turns, instructions="S"), 400)
        assert str(CONTEXT) in error["message"]
        answer = (await create(h, turns, instructions="S", truncation="auto", max_output_tokens=10)).json()
        assert answer["truncation"] == "auto"
        [prompt] = prompts(h)
        lines = prompt.split("\n")
        assert lines[0] == "[system]S" and lines[1].startswith("[user]") and lines[-2:] == ["[user]last", "[assistant]"]
        kept = int(lines[1][6:8])
        assert len(prompt) + 10 <= CONTEXT < len(prompt) + 10 + 2 * 72, "one turn more would not have fitted"
        assert [line[-62:-60] for line in lines[1:-2:2]] == [f"{i:02d}" for i in range(kept, 10)]
        error_of(await create(h, "y" * 600, truncation="auto"), 400)

    with_harness(body)


# --- stored responses -------------------------------------------------------------------------------------------------


def test_a_stored_response_reads_as_it_was_answered() -> None:
    async def body(h: Harness) -> None:
        made = await create(h)
        assert (await get(h, made.json()["id"])).content == made.content
        streamed = events(await create(h, stream=True))[-1]["response"]
        assert (await get(h, streamed["id"])).json() == streamed

    with_harness(body, FakeCore(say("hello")))


def test_a_response_may_be_deleted() -> None:
    async def body(h: Harness) -> None:
        response_id = (await create(h)).json()["id"]
        answer = await h.http.delete(f"/v1/responses/{response_id}")
        assert answer.json() == {"id": response_id, "object": "response", "deleted": True}
        for request in (get(h, response_id), get(h, response_id, "/input_items"), h.http.delete(f"/v1/responses/{response_id}"),
                        h.http.post(f"/v1/responses/{response_id}/cancel")):  # fmt: skip
            assert error_of(await request, 404)["param"] == "response_id"

    with_harness(body, FakeCore(say("hello")))


def test_a_request_id_names_the_response_unless_it_is_taken() -> None:
    async def body(h: Harness) -> None:
        ids = [(await create(h, request_id=name)).json()["id"] for name in ("mine", "resp_mine", "resp_other", "../x", "mine/x")]
        assert ids[0] == "resp_mine" and ids[2] == "resp_other"
        assert len(set(ids)) == 5 and all(len(i) == 37 for i in (ids[1], ids[3], ids[4]))

    with_harness(body, FakeCore(say("hello")))


def test_two_at_once_with_one_request_id_are_both_served() -> None:
    async def body(h: Harness) -> None:
        answers = await asyncio.gather(*(create(h, str(i), request_id="mine") for i in range(2)))
        ids = [answer.json()["id"] for answer in answers]
        assert len(set(ids)) == 2
        assert [(await get(h, i)).content for i in ids] == [answer.content for answer in answers]

    with_harness(body, FakeCore(say("hello")))


def test_the_background_runs_without_a_client() -> None:
    async def body(h: Harness) -> None:
        h.engine.paused = True
        made = (await create(h, background=True)).json()
        assert (made["status"], made["background"], made["output"]) == ("queued", True, [])
        assert error_of(await create(h, previous_response_id=made["id"]), 400)["param"] == "previous_response_id"
        h.engine.resume()
        await until(lambda: not h.engine.core.requests, "the response to end")
        await asyncio.sleep(0)
        done = (await get(h, made["id"])).json()
        assert done["status"] == "completed" and text_of(done) == "hello"
        assert (await create(h, previous_response_id=made["id"])).status_code == 200

    with_harness(body, FakeCore(say("hello")))


def test_a_running_response_shows_how_far_it_is() -> None:
    async def body(h: Harness) -> None:
        made = (await create(h, background=True, max_output_tokens=400)).json()
        record = h.app.state.server.responses.get(made["id"])
        await until(lambda: b"hello" in record.body(), "some text")
        h.engine.paused = True
        await asyncio.sleep(0)
        running = (await get(h, made["id"])).json()
        assert running["status"] == "in_progress" and text_of(running).startswith("hello")
        assert running["output"][0]["status"] == "in_progress"

    with_harness(body, FakeCore(lambda _: b"hello" * 100))


def test_background_events_can_be_read_again_from_anywhere() -> None:
    async def body(h: Harness) -> None:
        h.engine.paused = True
        response_id = "resp_b"
        reading = asyncio.create_task(create(h, background=True, stream=True, request_id="b"))
        await until(lambda: len(h.app.state.server.responses) == 1, "the response to be stored")
        following = asyncio.create_task(get(h, response_id, stream="true"))
        await asyncio.sleep(0.01)
        h.engine.resume()
        whole, followed = await reading, await following
        stream = events(whole)
        assert [event["type"] for event in stream[:3]] == ["response.created", "response.in_progress", "response.output_item.added"]
        assert stream[0]["response"]["status"] == "queued"
        assert followed.content == whole.content == (await get(h, response_id, stream="true")).content
        later = await get(h, response_id, stream="true", starting_after=4)
        assert events(later, first=5) == stream[5:]
        for after in (len(stream) - 1, 10**9):
            assert (await get(h, response_id, stream="true", starting_after=after)).text == ""
        for value in ("-1", "NaN", "1.5", "x", "", str(2**63), "true"):
            assert error_of(await get(h, response_id, stream="true", starting_after=value), 400)["param"] == "starting_after"
        assert error_of(await get(h, response_id, stream="maybe"), 400)["param"] == "stream"
        assert error_of(await get(h, response_id, starting_after=1), 400)["param"] == "starting_after"

    with_harness(body, FakeCore(say("hello")))


def test_only_a_streamed_background_response_has_events() -> None:
    async def body(h: Harness) -> None:
        for fields in ({}, {"stream": True, "request_id": "s"}, {"background": True}):
            made = await create(h, **fields)
            response_id = "resp_s" if "stream" in fields else made.json()["id"]
            assert error_of(await get(h, response_id, stream="true"), 400)["param"] == "stream"

    with_harness(body, FakeCore(say("hello")))


def test_cancelling_keeps_what_there_is() -> None:
    async def body(h: Harness) -> None:
        made = (await create(h, background=True, stream=False, max_output_tokens=400)).json()
        record = h.app.state.server.responses.get(made["id"])
        await until(lambda: b"hello" in record.body(), "some text")
        cancelled = (await h.http.post(f"/v1/responses/{made['id']}/cancel")).json()
        assert cancelled["status"] == "cancelled" and text_of(cancelled).startswith("hello")
        assert cancelled["output"][0]["status"] == "incomplete" and cancelled["usage"]["output_tokens"] >= 5
        assert len(h.engine.core.aborted) == 1
        await until(lambda: not h.engine.core.requests, "the engine to be idle")
        again = (await h.http.post(f"/v1/responses/{made['id']}/cancel")).json()
        assert again == cancelled == (await get(h, made["id"])).json()
        foreground = (await create(h, max_output_tokens=1)).json()["id"]
        assert error_of(await h.http.post(f"/v1/responses/{foreground}/cancel"), 400)["param"] == "response_id"

    with_harness(body, FakeCore(lambda _: b"hello" * 100))


def test_cancelling_before_the_first_token_ends_the_stream() -> None:
    async def body(h: Harness) -> None:
        h.engine.paused = True
        reading = asyncio.create_task(create(h, background=True, stream=True, request_id="c"))
        await until(lambda: len(h.app.state.server.responses) == 1, "the response to be stored")
        await h.http.post("/v1/responses/resp_c/cancel")
        stream = events(await reading)
        assert [event["type"] for event in stream] == ["response.created", "response.in_progress", "response.incomplete"]
        assert stream[-1]["response"]["status"] == "cancelled" and stream[-1]["response"]["output"] == []

    with_harness(body)


def test_deleting_a_running_response_aborts_it() -> None:
    async def body(h: Harness) -> None:
        h.engine.paused = True
        made = (await create(h, background=True)).json()
        await h.http.delete(f"/v1/responses/{made['id']}")
        await until(lambda: h.engine.core.aborted, "the abort")
        store = h.app.state.server.responses
        await asyncio.sleep(0.01)
        assert len(store) == 0 and store.size == 0
        error_of(await get(h, made["id"]), 404)

    with_harness(body)


def test_a_foreground_response_goes_with_its_client() -> None:
    async def body(h: Harness) -> None:
        for stream in (False, True):
            h.engine.paused = True
            task = asyncio.create_task(create(h, stream=stream))
            await until(lambda: len(h.engine.core.requests) == 1, "the request to arrive")
            await leave(h, task)
            assert len(h.app.state.server.responses) == 0

    with_harness(body)


async def leave(h: Harness, task: asyncio.Task) -> None:
    """Break a request off; its work must end in an abort."""
    before = len(h.engine.core.aborted)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: len(h.engine.core.aborted) > before, "the abort")


def test_the_store_may_be_turned_off() -> None:
    async def body(h: Harness) -> None:
        made = (await create(h)).json()
        assert made["store"] is False
        error_of(await get(h, made["id"]), 404)
        for name, value in [("store", True), ("background", True), ("previous_response_id", made["id"])]:
            assert error_of(await create(h, **{name: value}), 400)["param"] == name
        assert (await create(h, store=False)).status_code == 200

    with_harness(body, FakeCore(say("a")), enable_responses_store=False)


def test_the_oldest_make_room() -> None:
    async def body(h: Harness) -> None:
        ids = [(await create(h, str(i))).json()["id"] for i in range(4)]
        assert [(await get(h, i)).status_code for i in ids] == [404, 404, 200, 200]

    with_harness(body, FakeCore(say("a")), responses_store_size=2)


def test_running_responses_fill_the_store() -> None:
    async def body(h: Harness) -> None:
        h.engine.paused = True
        for _ in range(2):
            assert (await create(h, background=True)).status_code == 200
        refused = await create(h, background=True)
        assert error_of(refused, 503)["type"] == "ServiceUnavailableError" and refused.headers["retry-after"] == "1"
        assert len(h.engine.core.requests) == 2
        h.engine.resume()
        await until(lambda: not h.engine.core.requests, "the responses to end")
        assert (await create(h, background=True)).status_code == 200

    with_harness(body, FakeCore(say("a")), responses_store_size=2)


def test_a_conversation_larger_than_the_store_is_refused() -> None:
    async def body(h: Harness) -> None:
        assert error_of(await create(h, "x" * 2000), 400)["param"] == "input"
        error = error_of(await create(h, "x" * 2000, store=False), 400)
        assert "context" in error["message"]

    with_harness(body, responses_store_bytes=2048)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
@pytest.mark.parametrize(("error", "status"), [(QueueFullError("full"), 503), (EngineError("broken"), 500)])
def test_an_error_before_the_first_token_is_an_http_error(fields: dict, error: Exception, status: int) -> None:
    core = FakeCore()
    core.refuse = error
    assert str(error) in error_of(respond(core, **fields), status)["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_server_refuses_the_background_at_once(stream: bool) -> None:
    async def body(h: Harness) -> None:
        h.engine.hub.max_live = 0
        error_of(await create(h, background=True, stream=stream), 503)
        assert len(h.app.state.server.responses) == 0

    with_harness(body)


def test_an_error_in_the_middle_fails_the_response() -> None:
    async def body(h: Harness) -> None:
        reading = asyncio.create_task(create(h, stream=True, request_id="f"))
        await until(lambda: h.engine.core.stats().num_steps > 5, "some steps")
        h.engine.hub.fail_all(EngineDeadError("gone at 0x7f00 in /usr/lib/x.py"))
        stream = events(await reading)
        assert stream[-1]["type"] == "response.failed"
        failed = stream[-1]["response"]
        assert failed["status"] == "failed" and failed["error"]["code"] == "server_error"
        assert (
            "gone" in failed["error"]["message"] and "0x7f" not in failed["error"]["message"] and "/usr" not in failed["error"]["message"]
        )
        assert failed["output"][0]["status"] == "incomplete" and text_of(failed)
        assert (await get(h, "resp_f")).json() == failed

    with_harness(body)


def test_an_error_in_the_background_is_read_later() -> None:
    async def body(h: Harness) -> None:
        h.engine.core.refuse = QueueFullError("full")
        made = (await create(h, background=True)).json()
        record = h.app.state.server.responses.get(made["id"])
        await until(lambda: record.finished, "the end")
        failed = (await get(h, made["id"])).json()
        assert failed["status"] == "failed" and failed["error"] == {"code": "rate_limit_exceeded", "message": "full"}

    with_harness(body)


def test_an_abort_from_elsewhere_is_a_cancelled_response() -> None:
    async def body(h: Harness) -> None:
        h.engine.paused = True
        asking = asyncio.create_task(create(h))
        await until(lambda: len(h.engine.core.requests) == 1, "the request")
        await h.engine.abort(list(h.engine.core.requests))
        answer = (await asking).json()
        assert answer["status"] == "cancelled"

    with_harness(body)


@pytest.mark.parametrize(("method", "path"), [("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")])
def test_an_unknown_response_is_not_found(method: str, path: str) -> None:
    error = error_of(with_harness(lambda h: h.http.request(method, "/v1/responses/resp_nothing" + path)), 404)
    assert error["type"] == "NotFoundError" and "resp_nothing" in error["message"]


# --- every field ------------------------------------------------------------------------------------------------------

FUNCTION = {"type": "function", "name": "f"}
WRONG = {
    "input": [5, True, [], [5], [HUGE], {}, {"role": "user"}],
    "model": [5, True],
    "instructions": [5, True, ["x"], [{"role": "system", "content": "x"}]],
    "background": ["x", 1, 2**63, []],
    "store": ["x", 1, []],
    "stream": ["x", 1],
    "previous_response_id": [5, True, []],
    "include": ["x", 5, ["x"], [5], {}],
    "max_output_tokens": [0, -1, 2**63, HUGE, 1.5, "1", True, "NaN", []],
    "max_tool_calls": [0, -1, 1.5, "x", True],
    "metadata": ["x", 5, [], {"a": 5}, {"a": None}, {"a" * 65: "b"}, {"a": "b" * 513}, {str(i): "x" for i in range(17)}],
    "parallel_tool_calls": ["x", 1],
    "reasoning": ["x", 5, {"effort": "some"}, {"effort": 5}, {"summary": "detailed"}, {"summary": "x"}, {"generate_summary": "concise"}],
    "text": ["x", 5, {"format": "text"}, {"format": {}}, {"format": {"type": "json"}}, {"format": {"type": "json_schema", "name": "x"}},
             {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}}, {"verbosity": "low"}, {"verbosity": 5}],
    "tools": ["x", 5, [5], [{}], [FUNCTION], [{"type": "web_search"}], [{"type": "mcp", "server_label": "x"}],
              [{"type": "custom", "name": "x"}],
              [{"type": "file_search"}], [{"type": "namespace", "name": "n", "tools": [FUNCTION]}]],
    "tool_choice": ["required", "sometimes", 5, {"type": "function", "name": "f"}, {}, []],
    "top_logprobs": [-1, 21, 10**6, 2**63, HUGE, 1.5, "x", True, "NaN"],
    "truncation": ["x", 5, True],
    "stream_options": ["x", {"include_obfuscation": True}, {}, {"include_usage": "x"}],
    "chat_template_kwargs": ["x", {"messages": []}, {"self": 1}],
    "safety_identifier": [5, "x" * 600],
    "prompt_cache_key": [5, "x" * 600],
    "user": [5, "x" * 600],
    "service_tier": ["flex", 5],
    "prompt_cache_retention": ["24h", 5],
    "temperature": [-0.1, 2.1, "x", True, [], 2**63, "NaN"],
    "top_p": [0, 1.1, -1, "x", True],
    "top_k": [-2, 1.5, "x", True],
    "min_p": [-0.1, 1.1, "x"],
    "seed": [2**63, -(2**63) - 1, 1.5, "x", True],
    "stop": [5, [5], "", [""]],
    "min_tokens": [-1, 600, HUGE, "x"],
    "logit_bias": [5, {"x": 1}, {"-1": 1}],
    "bad_words": [[""], "x"],
    "priority": [1, "x", HUGE, True],
    "cache_salt": ["", "a/b", 5, "x" * 129],
    "request_id": [5, True],
    "n": [2, "x"],
    "max_tokens": [5],
    "prompt": [{"id": "x"}],
    "conversation": ["conv_1"],
    "context_management": [[{"type": "compaction"}]],
    "moderation": [{"model": "x"}],
    "structured_outputs": [{"regex": "["}, {}, "x"],
    "response_format": [{"type": "text"}],
    "previous_input_messages": [[{}]],
    "enable_response_messages": [True],
    "prompt_logprobs": [1],
    "echo": [True],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"), [pytest.param(name, value, id=f"{name}={str(value)[:24]}") for name, values in WRONG.items() for value in values]
)
def test_wrong_values_are_refused_by_name(name: str, value: Any) -> None:
    async def body(h: Harness) -> None:
        error = error_of(await h.http.post("/v1/responses", json={"input": "hi", name: value}), 400)
        shown = "logprobs" if name == "top_logprobs" else name
        assert shown in error["message"]
        assert (error["param"] or "").split(".")[0].split("[")[0] in (name, shown)
        assert not h.engine.core.seen

    with_harness(body)


@pytest.mark.parametrize("name", ["temperature", "top_logprobs", "max_output_tokens"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none(name: str, value: str) -> None:
    body = f'{{"input": "hi", "{name}": {value}}}'
    assert error_of(with_harness(lambda h: h.http.post("/v1/responses", content=body)), 400)


@pytest.mark.parametrize("name", [name for name in WRONG if name != "input"])
def test_null_means_the_default(name: str) -> None:
    assert respond(FakeCore(say("a")), **{name: None}).json()["status"] == "completed"


PASS = [
    {"tools": []}, {"tool_choice": "none"}, {"tool_choice": "auto"}, {"tools": [], "tool_choice": "auto"}, {"text": {}},
    {"text": {"format": {"type": "text"}, "verbosity": "medium"}}, {"reasoning": {"effort": None, "summary": None}},
    {"include": ["reasoning.encrypted_content", "file_search_call.results"]}, {"service_tier": "auto"}, {"n": 1}, {"metadata": {}},
    {"truncation": "disabled"}, {"max_output_tokens": 5.0}, {"private_field": {"x": 1}}, {"include_reasoning": True},
    {"stream": True, "stream_options": {"include_obfuscation": False}}, {"max_tool_calls": 3, "parallel_tool_calls": False},
    {"tool_choice": "none", "tools": [FUNCTION, {"type": "custom", "name": "g", "format": {"type": "text"}}]},
]  # fmt: skip


@pytest.mark.parametrize("fields", PASS, ids=lambda fields: str(fields)[:50])
def test_values_that_pass(fields: dict) -> None:
    assert respond(FakeCore(say("a")), **fields).status_code == 200


@pytest.mark.parametrize(
    ("tools", "name"),
    [
        ([{"type": "namespace", "name": "n", "tools": []}], "tools[0].tools"),
        ([{"type": "namespace", "tools": [FUNCTION]}], "tools[0].name"),
        ([{"type": "namespace", "name": "n", "tools": [{"type": "web_search"}]}], "tools[0].tools[0].type"),
        ([FUNCTION, FUNCTION], "tools[1].name"),
        ([{"type": "function", "name": "n__f"}, {"type": "namespace", "name": "n", "tools": [FUNCTION]}], "tools[1].tools[0].name"),
        ([{"type": "function", "name": "f", "parameters": 5}], "tools[0].parameters"),
        ([{"type": "function", "name": "f", "description": 5}], "tools[0].description"),
        ([{"type": "function", "name": "a b"}], "tools[0].name"),
        ([{"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}}], "tools[0].format"),
        ([{"type": "function", "name": f"f{i}"} for i in range(1025)], "tools"),
    ],
)
def test_tools_are_checked_also_when_none_may_be_called(tools: list, name: str) -> None:
    assert error_of(respond(tools=tools, tool_choice="none"), 400)["param"] == name


def test_the_cache_salt_reaches_the_engine() -> None:
    async def body(h: Harness) -> None:
        await create(h, cache_salt="s", max_output_tokens=1)
        assert h.engine.core.seen[0].cache_salt == "s"

    with_harness(body)
