"""Tool calls and structure on real models, through the `openai` and `anthropic` clients: what a grammar forces needs no clever model,
and the 1.5B coder, if its weights are here, knows tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from canter.core.config import EngineArgs
from canter.text.model_text import load_model_text
from tests.e2e.conftest import Server, serve
from tests.weights import gguf_file

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


@pytest.mark.parametrize("choice", ({"type": "any"}, {"type": "tool", "name": "time"}))
def test_forced_calls_through_anthropics_client_whole_and_streamed(bundled_server: Server, choice: dict[str, str]) -> None:
    client = anthropic.Anthropic(base_url=bundled_server.url, api_key="unused", max_retries=0, timeout=120)
    tools = [{"name": name, "description": name, "input_schema": CITY} for name in ("weather", "time")]
    ask = {"model": "smol", "max_tokens": 120, "messages": ASK["messages"], "tools": tools, "extra_body": {"temperature": 0}}
    ask["tool_choice"] = choice | {"disable_parallel_tool_use": True}
    message = client.messages.create(**ask)
    with client.messages.stream(**ask) as stream:
        streamed = stream.get_final_message()
    assert message.stop_reason == streamed.stop_reason == "tool_use"
    [block], [again] = message.content, streamed.content
    assert (block.type, block.name, block.input) == (again.type, again.name, again.input)
    assert set(block.input) == {"city"} and (block.name == "time") >= (choice["type"] == "tool")


# --- a model that knows tools -------------------------------------------------------------------------------------------

PLACE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
ABOUT = {"get_weather": "Get the current weather of a city", "get_time": "Get the local time of a city"}
KNOWN = [{"type": "function", "function": {"name": name, "description": text, "parameters": PLACE}} for name, text in ABOUT.items()]
NAMED = {"type": "function", "function": {"name": "get_time"}}
DOUBLED = r"{{\"name\": <function-name>, \"arguments\": <args-json-object>}}"
PARIS, BOTH = "What is the weather in Paris?", "What is the weather in Paris, and what time is it in Tokyo?"


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """As the guide of tools says that it is served: the model has no use for the token `<tool_call>`, and writes calls as bare JSON when
    its template doesn't show it doubled braces."""
    path = str(gguf_file("qwen2.5-coder-1.5b.gguf"))
    template = load_model_text(EngineArgs.parse(model=path)).chat_template.source or ""
    mended = template.replace(DOUBLED, DOUBLED[1:-1])
    assert mended != template
    file = tmp_path_factory.mktemp("template") / "coder.jinja"
    file.write_text(mended)
    limits = ("--max-model-len", "2048", "--kv-cache-memory-bytes", "256M")
    calls = ("--chat-template", str(file), "--tool-call-parser", "llama3_json")
    with serve(path, *limits, *calls, "--served-model-name", "coder") as server:
        yield server


def called(server: Server, asked: str, **fields: Any) -> tuple[list[tuple[str, Any]], str]:
    """The calls and the content of an answer, checked to be those of its stream."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=300)
    body = {
        "model": "coder",
        "temperature": 0,
        "max_tokens": 120,
        "tools": KNOWN,
        "messages": [{"role": "user", "content": asked}],
        **fields,
    }
    [choice] = client.chat.completions.create(**body).choices
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    streamed: list[list[str]] = []
    content = ""
    for chunk in client.chat.completions.create(**body, stream=True):
        content += chunk.choices[0].delta.content or ""
        for part in chunk.choices[0].delta.tool_calls or ():
            if part.index == len(streamed):
                streamed.append([part.function.name, ""])
            streamed[part.index][1] += part.function.arguments or ""
    assert [tuple(call) for call in streamed] == calls and content == (choice.message.content or "")
    return [(name, json.loads(arguments)) for name, arguments in calls], content


@pytest.mark.slow
def test_calls_that_the_coder_must_make(coder: Server) -> None:
    assert called(coder, PARIS, tool_choice="required", parallel_tool_calls=False)[0] == [("get_weather", {"city": "Paris"})]
    assert called(coder, PARIS, tool_choice=NAMED)[0] == [("get_time", {"city": "Paris"})]
    both = called(coder, BOTH, tool_choice="required")[0]
    assert both == [("get_weather", {"city": "Paris"}), ("get_time", {"city": "Tokyo"})]


@pytest.mark.slow
def test_calls_that_the_coder_chooses_to_make(coder: Server) -> None:
    assert called(coder, PARIS) == ([("get_weather", {"city": "Paris"})], "")
    assert called(coder, "What time is it in Tokyo?") == ([("get_time", {"city": "Tokyo"})], "")
    calls, content = called(coder, "Write a haiku about snow.")
    assert calls == [] and len(content) > 20
    calls, content = called(coder, BOTH)
    assert calls == [] and content.startswith("```json"), "in a fence of Markdown it is content, as in vLLM"


@pytest.mark.slow
def test_the_coders_calls_through_anthropics_client(coder: Server) -> None:
    client = anthropic.Anthropic(base_url=coder.url, api_key="unused", max_retries=0, timeout=300)
    tools = [{"name": name, "description": text, "input_schema": PLACE} for name, text in ABOUT.items()]
    body = {"model": "coder", "max_tokens": 120, "tools": tools, "extra_body": {"temperature": 0}}

    def blocks(messages: list[dict[str, Any]], **fields: Any) -> list[tuple[str, Any]]:
        message = client.messages.create(**body, messages=messages, **fields)
        assert message.stop_reason == "tool_use"
        with client.messages.stream(**body, messages=messages, **fields) as stream:
            streamed = stream.get_final_message()
        found, again = ([(block.name, block.input) for block in said.content] for said in (message, streamed))
        assert found == again
        return found

    both = [{"role": "user", "content": BOTH}]
    assert blocks(both, tool_choice={"type": "any"}) == [("get_weather", {"city": "Paris"}), ("get_time", {"city": "Tokyo"})]
    assert len(blocks(both, tool_choice={"type": "any", "disable_parallel_tool_use": True})) == 1
    assert [name for name, _ in blocks(both, tool_choice={"type": "tool", "name": "get_time"})] == ["get_time"]
    assert blocks([{"role": "user", "content": PARIS}]) == [("get_weather", {"city": "Paris"})]
