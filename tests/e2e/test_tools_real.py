"""Tool calls and structure on the bundled model, through the `openai` client: what a grammar forces needs no clever model."""

from __future__ import annotations

import json

import openai
import pytest

from tests.e2e.conftest import Server

pytestmark = pytest.mark.real

CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": name, "description": name, "parameters": CITY}} for name in ("weather", "time")]
ASK = {"model": "smol", "messages": [{"role": "user", "content": "What is the weather in Paris?"}], "temperature": 0, "max_tokens": 120}


@pytest.fixture
def client(bundled_server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{bundled_server.url}/v1", api_key="unused", max_retries=0, timeout=120)


@pytest.mark.parametrize("choice", ("required", {"type": "function", "function": {"name": "time"}}))
def test_forced_calls_obey_the_schema_whole_and_streamed(client: openai.OpenAI, choice: object) -> None:
    answer = client.chat.completions.create(**ASK, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    [call] = answer.choices[0].message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"city"} and isinstance(arguments["city"], str)
    assert (call.function.name == "time") or choice == "required"
    assert answer.choices[0].finish_reason == ("tool_calls" if choice == "required" else "stop")
    chunks = client.chat.completions.create(**ASK, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, stream=True)
    deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or ()]
    assert deltas[0].function.name == call.function.name and {delta.index for delta in deltas} == {0}
    assert "".join(delta.function.arguments or "" for delta in deltas) == call.function.arguments


def test_an_answer_obeys_its_schema(client: openai.OpenAI) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    answer = client.chat.completions.create(**{**ASK, "temperature": 1}, response_format=schema, seed=5)
    assert set(json.loads(answer.choices[0].message.content)) == {"city"}
    number = client.completions.create(
        model="smol", prompt="My number is", max_tokens=20, extra_body={"structured_outputs": {"regex": "[0-9]{3}-[0-9]{4}"}}
    )
    assert len(number.choices[0].text) == 8 and number.choices[0].finish_reason == "stop"
