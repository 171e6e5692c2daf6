"""The `anthropic` library."""

from __future__ import annotations

import asyncio
import json

import anthropic
from checks import ASK, CAPITAL, CITY, COUNT, FUNCTIONS, KEY, MODEL, URL, check, raises, run, shown_how

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=120)
USER = {"role": "user", "content": CAPITAL}


def ask(*messages: dict, **fields) -> dict:
    """Greedy; the library has no argument for the temperature any more."""
    return {"model": MODEL, "max_tokens": 60, "messages": list(messages or [USER]), "extra_body": {"temperature": 0}, **fields}


@check
def a_message():
    message = client.messages.create(**ask())
    [block] = message.content
    assert message.type == "message" and message.role == "assistant" and message.model == MODEL and message.id.startswith("msg_")
    assert block.type == "text" and "Paris" in block.text
    assert message.stop_reason == "end_turn" and message.stop_sequence is None
    usage = message.usage
    assert usage.output_tokens > 5 and usage.input_tokens > 0 and usage.cache_creation_input_tokens == 0
    counted = client.messages.count_tokens(model=MODEL, messages=[USER]).input_tokens
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


@check
def events_in_order():
    body = ask({"role": "user", "content": COUNT})
    whole = client.messages.create(**body)
    events = list(client.messages.create(**body, stream=True))
    kinds = [event.type for event in events if event.type != "ping"]
    deltas = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert kinds == ["message_start", "content_block_start", *["content_block_delta"] * len(deltas), "content_block_stop", "message_delta",
                     "message_stop"]  # fmt: skip
    assert len(deltas) > 5 and "".join(deltas) == whole.content[0].text
    assert events[0].message.content == [] and events[0].message.usage.input_tokens > 0
    [end] = [event for event in events if event.type == "message_delta"]
    assert end.delta.stop_reason == whole.stop_reason and end.usage.output_tokens == whole.usage.output_tokens


@check
def the_stream_helper():
    with client.messages.stream(**ask()) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert "Paris" in text and final.content[0].text == text and final.stop_reason == "end_turn" and final.usage.output_tokens > 5


@check
def reasons_to_stop():
    message = client.messages.create(**ask({"role": "user", "content": COUNT}, max_tokens=3))
    assert message.stop_reason == "max_tokens" and message.usage.output_tokens == 3
    message = client.messages.create(**ask(stop_sequences=["Paris"]))
    assert message.stop_reason == "stop_sequence" and message.stop_sequence == "Paris" and "Paris" not in message.content[0].text


@check
def the_assistant_goes_on():
    message = client.messages.create(**ask(USER, {"role": "assistant", "content": "The capital of France is"}, max_tokens=8))
    assert message.content[0].text.lstrip().startswith("Paris"), message.content


@check
def system_blocks_and_a_history_with_tools():
    system = [{"type": "text", "text": "You are brief.", "cache_control": {"type": "ephemeral"}}]
    history = [
        {"role": "user", "content": [{"type": "text", "text": "What is the weather in Oslo?", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "I should look.", "signature": "x"},
            {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}]},
                                     {"type": "text", "text": "So what is it?"}]},
    ]  # fmt: skip
    body = ask(*history, system=system, metadata={"user_id": "u"})
    message = client.messages.create(**body)
    assert message.content[0].text and message.stop_reason in ("end_turn", "max_tokens")
    again = client.messages.create(**body)
    assert again.content == message.content and again.usage.cache_read_input_tokens > 0
    total = message.usage.input_tokens + message.usage.cache_read_input_tokens
    assert again.usage.input_tokens + again.usage.cache_read_input_tokens == total


TOOLS = [{"name": name, "description": f"the {name} of a city", "input_schema": CITY} for name in FUNCTIONS]


def whole_and_streamed(**body) -> anthropic.types.ToolUseBlock:
    """The call of an answer, checked to be that of its stream."""
    message = client.messages.create(**body)
    [block] = message.content
    assert block.type == "tool_use" and block.id and message.stop_reason == "tool_use"
    with client.messages.stream(**body) as stream:
        kinds = [event.type for event in stream]
        [streamed] = stream.get_final_message().content
    assert "input_json" in kinds and (streamed.name, streamed.input) == (block.name, block.input)
    return block


@check
def calls_that_must_be():
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "time"}):
        block = whole_and_streamed(**ask({"role": "user", "content": ASK}, max_tokens=120, tools=TOOLS, tool_choice=choice))
        assert set(block.input) == {"city"} and block.name in FUNCTIONS
    assert block.name == "time"


@check
def calls_that_the_model_chooses():
    block = whole_and_streamed(**ask(*shown_how(), tools=TOOLS))
    assert (block.name, block.input) == ("weather", {"city": "Paris"})
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "rain"}
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": block.id, "name": block.name, "input": block.input}]}
    after = client.messages.create(**ask(*shown_how(), called, {"role": "user", "content": [result]}, tools=TOOLS))
    assert after.content and after.stop_reason in ("end_turn", "tool_use", "max_tokens")
    plain = client.messages.create(**ask(tools=TOOLS))
    assert "Paris" in plain.content[0].text and plain.stop_reason == "end_turn"


@check
def an_answer_that_obeys_a_schema():
    message = client.messages.create(**ask(max_tokens=120, output_config={"format": {"type": "json_schema", "schema": CITY}}))
    assert set(json.loads(message.content[0].text)) == {"city"}


@check
def errors():
    error = raises(anthropic.NotFoundError, client.messages.create, **ask(model="other"))
    assert error.body["error"]["type"] == "not_found_error" and "other" in error.body["error"]["message"]
    tool = {"name": "f", "input_schema": {"type": "object"}}
    error = raises(anthropic.BadRequestError, client.messages.create, **ask(tools=[tool], tool_choice={"type": "tool", "name": "g"}))
    assert error.body["error"]["type"] == "invalid_request_error" and "tool_choice" in error.body["error"]["message"]
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    error = raises(anthropic.BadRequestError, client.messages.create, **ask({"role": "user", "content": [image]}), stream=True)
    assert "image" in error.body["error"]["message"]
    raises(anthropic.BadRequestError, client.messages.create, **ask(max_tokens=10**6))
    other = anthropic.Anthropic(base_url=URL, api_key="wrong", max_retries=0)
    error = raises(anthropic.AuthenticationError, other.messages.create, **ask())
    assert error.body["error"]["type"] == "authentication_error"


@check
def a_bearer_token_opens_too():
    other = anthropic.Anthropic(base_url=URL, auth_token=KEY, api_key=None, max_retries=0)
    assert other.messages.create(**ask(max_tokens=1)).usage.output_tokens == 1


@check
async def many_at_once():
    async with anthropic.AsyncAnthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=120) as several:
        answers = await asyncio.gather(*(several.messages.create(**ask()) for _ in range(16)))
    assert len({answer.content[0].text for answer in answers}) == 1 and len({answer.id for answer in answers}) == 16


run("anthropic")
