"""What the soak sends: every kind of request, with what its answer must be, and malformed ones, with the status they must get."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

TOPICS = ("a mill with two clocks", "the sea at night", "how bread rises", "a city under snow", "the colour of rust", "an honest thief")
FIRST_ORDINARY_TOKEN = 20
"""Below it are the special tokens of the models that this runs with."""
POLL_SECONDS = 0.2


class WrongAnswer(Exception):
    """An answer that is not what was asked for."""


def expect(condition: bool, what: str, shown: Any = "") -> None:
    """Raise `WrongAnswer` unless the condition holds."""
    if not condition:
        raise WrongAnswer(f"{what}: {shown!r:.300}" if shown != "" else what)


@dataclass
class Session:
    """The server as one run knows it: how to ask, and what must stay the same, or be different, from request to request."""

    http: httpx.AsyncClient
    model: str
    context: int
    vocab_size: int
    ids: set[str] = field(default_factory=set)
    fixed: dict[str, Any] = field(default_factory=dict)

    async def send(self, method: str, path: str, body: Any = None) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else None
        return await self.http.request(method, path, content=content, headers={"content-type": "application/json"})

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON of a request that must be answered with 200."""
        response = await self.send("POST", path, body)
        expect(response.status_code == 200, f"status {response.status_code} from {path}", response.text)
        found: dict[str, Any] = response.json()
        return found

    async def stream(self, path: str, body: dict[str, Any] | None = None, method: str = "POST") -> list[tuple[str, Any]]:
        """(name, data) of all server-sent events, names empty where there are none; for the line-wise JSON of Ollama too."""
        content = None if body is None else json.dumps(body).encode()
        async with self.http.stream(method, path, content=content, headers={"content-type": "application/json"}) as response:
            text = (await response.aread()).decode()
            expect(response.status_code == 200, f"status {response.status_code} from {path}", text)
            if response.headers["content-type"] == "application/x-ndjson":
                expect(text.endswith("\n"), "the last line is not whole", text[-100:])
                return [("", json.loads(line)) for line in text.splitlines()]
        expect(text.endswith("\n\n"), "the last event is not whole", text[-100:])
        return [_event(block) for block in text.split("\n\n")[:-1] if not block.startswith(":")]

    def take_id(self, given: str) -> None:
        expect(given not in self.ids, "an id came twice", given)
        self.ids.add(given)

    def same(self, key: str, value: Any) -> None:
        """What is the same whenever it is asked for, whatever runs beside it."""
        known = self.fixed.setdefault(key, value)
        expect(known == value, f"{key} was answered in another way than before", (known, value))

    def tokens(self, rng: random.Random, count: int) -> list[int]:
        return [rng.randrange(FIRST_ORDINARY_TOKEN, self.vocab_size) for _ in range(count)]

    def length(self, wanted: int) -> int:
        """A prompt's length that leaves room also in a small context."""
        return max(1, min(wanted, self.context // 2))


def _event(block: str) -> tuple[str, Any]:
    name, data = "", None
    for line in block.split("\n"):
        kind, _, value = line.partition(": ")
        if kind == "event":
            name = value
        elif kind == "data":
            expect(data is None, "an event has two lines of data", block)
            data = value if value == "[DONE]" else json.loads(value)
        else:
            raise WrongAnswer(f"no line of an event: {line!r:.200}")
    return name, data


def _messages(rng: random.Random) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"Tell me of {rng.choice(TOPICS)}, {rng.randrange(1000)}."}]


# --- OpenAI's two routes ----------------------------------------------------------------------------------------------


def check_usage(usage: dict[str, Any], completion: int, prompt: int | None = None) -> None:
    expect(usage["completion_tokens"] == completion, f"completion tokens, {completion} were asked for", usage)
    expect(usage["total_tokens"] == usage["prompt_tokens"] + completion, "total is no total", usage)
    expect(prompt is None or usage["prompt_tokens"] == prompt, f"prompt tokens, {prompt} were sent", usage)


def check_choices(answer: dict[str, Any], choices: int, tokens: int) -> None:
    """As many choices as were asked for, in order, each of so many tokens and at its limit."""
    expect([choice["index"] for choice in answer["choices"]] == list(range(choices)), "choices", answer)
    for choice in answer["choices"]:
        expect(choice["finish_reason"] == "length", "finish_reason", choice)
        expect(len(choice["token_ids"]) == tokens, f"token_ids, {tokens} were asked for", choice["token_ids"])


def check_chunks(session: Session, events: list[tuple[str, Any]], choices: int, tokens: int, prompt: int | None = None) -> list[Any]:
    """A stream of either route: one id, one finish and so many tokens for each choice, usage, one end. Returns its chunks."""
    expect(bool(events) and events[-1][1] == "[DONE]", "the stream has no end", events[-1:])
    chunks = [data for _, data in events[:-1]]
    expect(all(isinstance(chunk, dict) and "error" not in chunk for chunk in chunks), "an error in the stream", chunks[-1:])
    expect(len({chunk["id"] for chunk in chunks}) == 1, "a stream has one id")
    session.take_id(chunks[0]["id"])
    expect(chunks[-1]["choices"] == [], "the last chunk has the usage", chunks[-1])
    check_usage(chunks[-1]["usage"], choices * tokens, prompt)
    counts, finishes = [0] * choices, [0] * choices
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            index = choice["index"]
            expect(not finishes[index], "a choice goes on after its end", choice)
            counts[index] += len(choice.get("token_ids") or ())
            if choice["finish_reason"] is not None:
                expect(choice["finish_reason"] == "length", "finish_reason", choice)
                finishes[index] += 1
    expect(finishes == [1] * choices and counts == [tokens] * choices, "finishes and tokens of the choices", (finishes, counts))
    return chunks


def _asked(session: Session, tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": session.model, "max_tokens": tokens, "ignore_eos": True, "return_token_ids": True, **more}


STREAMED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


async def chat(session: Session, rng: random.Random) -> None:
    tokens = rng.randint(1, 40)
    answer = await session.post("/v1/chat/completions", _asked(session, tokens, messages=_messages(rng)))
    session.take_id(answer["id"])
    check_choices(answer, 1, tokens)
    check_usage(answer["usage"], tokens, len(answer["prompt_token_ids"]))


async def chat_streamed(session: Session, rng: random.Random) -> None:
    tokens = rng.randint(1, 64)
    events = await session.stream("/v1/chat/completions", _asked(session, tokens, messages=_messages(rng), **STREAMED))
    check_chunks(session, events, 1, tokens)


async def chat_choices(session: Session, rng: random.Random) -> None:
    """Several choices with logprobs."""
    tokens, choices = rng.randint(1, 12), rng.randint(2, 4)
    more = {"messages": _messages(rng), "n": choices, "logprobs": True, "top_logprobs": 3, "temperature": 0.8}
    answer = await session.post("/v1/chat/completions", _asked(session, tokens, **more))
    session.take_id(answer["id"])
    check_choices(answer, choices, tokens)
    check_usage(answer["usage"], choices * tokens)
    for choice in answer["choices"]:
        content = choice["logprobs"]["content"]
        expect(len(content) == tokens and all(len(entry["top_logprobs"]) >= 3 for entry in content), "logprobs", content)


async def choices_streamed(session: Session, rng: random.Random) -> None:
    tokens, choices, prompts = rng.randint(1, 10), rng.randint(1, 2), [session.tokens(rng, rng.randint(1, 30)) for _ in range(2)]
    more = {"prompt": prompts, "n": choices, "temperature": 1.0, "logprobs": 1, **STREAMED}
    events = await session.stream("/v1/completions", _asked(session, tokens, **more))
    chunks = check_chunks(session, events, 2 * choices, tokens, sum(map(len, prompts)))
    logprobs = sum(len(c["logprobs"]["token_logprobs"]) for chunk in chunks for c in chunk["choices"] if c["logprobs"])
    expect(logprobs == 2 * choices * tokens, "logprobs of a stream", logprobs)


async def completion_seeded(session: Session, rng: random.Random) -> None:
    """The same prompt with the same seed, again and again: the same text, whatever runs beside it."""
    seed, streamed = rng.randrange(6), rng.random() < 0.5
    prompt = session.tokens(random.Random(seed), session.length(20 + 10 * seed))
    body = _asked(session, 16, prompt=prompt, seed=seed, temperature=1.0 if seed % 2 else 0.0)
    if streamed:
        chunks = check_chunks(session, await session.stream("/v1/completions", body | STREAMED), 1, 16, len(prompt))
        found = [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]
    else:
        answer = await session.post("/v1/completions", body)
        session.take_id(answer["id"])
        check_choices(answer, 1, 16)
        found = answer["choices"][0]["token_ids"]
    session.same(f"seed {seed}", found)


async def completion_sampled(session: Session, rng: random.Random) -> None:
    """Every sampler at once."""
    tokens = rng.randint(2, 24)
    samplers = {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "min_p": 0.02, "repetition_penalty": 1.1, "presence_penalty": 0.2}
    more = {"frequency_penalty": 0.1, "logit_bias": {"25": 2.0}, "min_tokens": 1, "bad_words": ["never"], "stop_token_ids": [1]}
    body = _asked(session, tokens, prompt=f"Of {rng.choice(TOPICS)}:", **samplers, **more, stop=["\u2603"])
    answer = await session.post("/v1/completions", body)
    session.take_id(answer["id"])
    [choice] = answer["choices"]
    used = len(choice["token_ids"])
    expect(used == tokens if choice["finish_reason"] == "length" else choice["finish_reason"] == "stop", "finish", choice)
    check_usage(answer["usage"], used)


async def prompt_logprobs(session: Session, rng: random.Random) -> None:
    """The prompt echoed with the logprobs of all tokens."""
    prompt, tokens = session.tokens(rng, session.length(rng.randint(2, 120))), rng.randint(1, 4)
    answer = await session.post("/v1/completions", _asked(session, tokens, prompt=prompt, echo=True, logprobs=2, prompt_logprobs=1))
    session.take_id(answer["id"])
    check_choices(answer, 1, tokens)
    check_usage(answer["usage"], tokens, len(prompt))
    [choice] = answer["choices"]
    expect(len(choice["prompt_logprobs"]) == len(prompt), "prompt_logprobs", len(choice["prompt_logprobs"]))
    expect(len(choice["logprobs"]["tokens"]) == len(prompt) + tokens, "echoed logprobs", len(choice["logprobs"]["tokens"]))


async def beam_search(session: Session, rng: random.Random) -> None:
    tokens, width = rng.randint(1, 4), rng.randint(2, 3)
    body = _asked(session, tokens, prompt=session.tokens(rng, 12), n=width, use_beam_search=True, temperature=0)
    answer = await session.post("/v1/completions", body)
    session.take_id(answer["id"])
    check_choices(answer, width, tokens)
    check_usage(answer["usage"], width * tokens, 12)


async def long_prompt(session: Session, rng: random.Random) -> None:
    prompt, tokens = session.tokens(rng, session.length(rng.randint(600, 1400))), rng.randint(1, 8)
    events = await session.stream("/v1/completions", _asked(session, tokens, prompt=prompt, **STREAMED))
    check_chunks(session, events, 1, tokens, len(prompt))


async def shared_prefix(session: Session, rng: random.Random) -> None:
    """One of a few long beginnings, and an end of its own; one in four keeps to a part of the cache of its own."""
    which, tokens = rng.randrange(4), rng.randint(1, 16)
    prompt = session.tokens(random.Random(100 + which), session.length(400)) + session.tokens(rng, rng.randint(1, 20))
    salt = {"cache_salt": f"salt{which}"} if rng.random() < 0.25 else {}
    answer = await session.post("/v1/completions", _asked(session, tokens, prompt=prompt, **salt))
    session.take_id(answer["id"])
    check_choices(answer, 1, tokens)
    check_usage(answer["usage"], tokens, len(prompt))


async def tokenize(session: Session, rng: random.Random) -> None:
    topic = rng.choice(TOPICS)
    answer = await session.post("/tokenize", {"model": session.model, "prompt": f"Of {topic}. " * 20})
    expect(answer["count"] == len(answer["tokens"]) > 0, "count", answer)
    session.same(f"the tokens of {topic}", answer["tokens"])
    text = await session.post("/detokenize", {"model": session.model, "tokens": answer["tokens"]})
    session.same(f"the text of {topic}", text["prompt"])


# --- tools, thoughts, constraints -------------------------------------------------------------------------------------

FORECAST: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION = {"name": "forecast", "description": "The weather of the next days.", "parameters": FORECAST}
TOOLS = [{"type": "function", "function": FUNCTION}]
NAMED = {"type": "function", "function": {"name": "forecast"}}
THOUGHT = "<think>[a-z ]{4,30}</think>"
CALL = '<tool_call>\\{"name": "forecast", "arguments": \\{"city": "[A-Z][a-z]{2,9}", "days": [1-9]\\}\\}</tool_call>'
"""What a small model would hardly write by itself: a grammar makes it, and the parser must then find it. The soak's server is told to
apply grammars to thoughts, and how they and calls are written."""
ENOUGH = 150
"""Tokens for nearly every output that ends by itself; for the others the end is `length`."""


@dataclass
class Said:
    """An answer of the chat route, whole or as the sum of its chunks."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish: str = ""
    tokens: int = 0


async def _say(session: Session, body: dict[str, Any], streamed: bool) -> Said:
    """A chat whose one choice ends where it ends."""
    body = {"model": session.model, "max_tokens": ENOUGH, "return_token_ids": True, **body}
    if not streamed:
        answer = await session.post("/v1/chat/completions", body)
        session.take_id(answer["id"])
        [choice] = answer["choices"]
        message, used = choice["message"], answer["usage"]
        calls = [{"id": call["id"], **call["function"]} for call in message["tool_calls"]]
        said = Said(message["content"] or "", message["reasoning"] or "", calls, choice["finish_reason"], len(choice["token_ids"]))
    else:
        events = await session.stream("/v1/chat/completions", body | STREAMED)
        expect(bool(events) and events[-1][1] == "[DONE]", "the stream has no end", events[-1:])
        chunks = [data for _, data in events[:-1]]
        expect(all("error" not in chunk for chunk in chunks), "an error in the stream", chunks[-1:])
        session.take_id(chunks[0]["id"])
        said, used = _sum(chunks[:-1]), chunks[-1]["usage"]
    check_usage(used, said.tokens)
    for call in said.calls:
        session.take_id(call["id"])
    return said


def _sum(chunks: list[Any]) -> Said:
    said = Said()
    for chunk in chunks:
        [choice] = chunk["choices"]
        expect(not said.finish, "a choice goes on after its end", choice)
        delta = choice["delta"]
        said.content += delta.get("content") or ""
        said.reasoning += delta.get("reasoning") or ""
        said.tokens += len(choice.get("token_ids") or ())
        for part in delta.get("tool_calls") or ():
            if "id" in part:
                said.calls.append({"id": part["id"], "name": part["function"]["name"], "arguments": ""})
            expect(part["index"] == len(said.calls) - 1, "a part of a call that has not begun, or has ended", part)
            said.calls[-1]["arguments"] += part["function"].get("arguments") or ""
        said.finish = choice["finish_reason"] or ""
    return said


def _check_arguments(name: str, arguments: Any) -> None:
    """Those of a whole call."""
    expect(name == "forecast", "a function that is not there", name)
    found = json.loads(arguments) if isinstance(arguments, str) else arguments
    expect(set(found) == {"city", "days"} and len(found["city"]) <= 12 and 1 <= found["days"] <= 9, "arguments", found)


async def thoughts_and_calls(session: Session, rng: random.Random) -> None:
    """Both in the model's own format, or the thought alone, or none of it."""
    thinks, calls = rng.random() < 0.6, rng.random() < 0.6
    regex = (THOUGHT if thinks else "") + (CALL if calls else "[a-z]{3,20}")
    body = {"messages": _messages(rng), "structured_outputs": {"regex": regex}, "tools": TOOLS, "tool_choice": "auto"}
    said = await _say(session, body, rng.random() < 0.5)
    if said.finish == "length":
        expect(said.tokens == ENOUGH, "an early end", said)
        return
    expect(bool(said.reasoning) == thinks, "thoughts", said)
    expect("<" not in said.reasoning + said.content, "a marker in the text", said)
    expect(said.finish == ("tool_calls" if calls else "stop") and bool(said.content) != calls, "the end", said)
    expect(len(said.calls) == calls, "calls", said)
    for call in said.calls:
        _check_arguments(call["name"], call["arguments"])


async def calls_forced(session: Session, rng: random.Random) -> None:
    """By `required` or by name."""
    choice, most = rng.choice((("required", "tool_calls"), (NAMED, "stop")))
    body = {"messages": _messages(rng), "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    said = await _say(session, body, rng.random() < 0.5)
    expect(not said.content and not said.reasoning, "text beside a call", said)
    if said.finish == "length":
        expect(said.tokens == ENOUGH and len(said.calls) <= 1, "an early end", said)
        return
    expect(said.finish == most and len(said.calls) == 1, "the end", said)
    _check_arguments(said.calls[0]["name"], said.calls[0]["arguments"])


def _schema(name: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {name: {"enum": ["red", "green", 7]}}, "required": [name], "additionalProperties": False}
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


async def schema_obeyed(session: Session, rng: random.Random) -> None:
    """One of very many schemas, so that the cache of grammars must let some go: a few more are begun, to fill it early."""
    for name in (f"field{rng.randrange(2000)}" for _ in range(4)):
        said = await _say(session, {"messages": _messages(rng), "max_tokens": 1, "response_format": _schema(name)}, False)
        expect(said.finish == "length" and said.tokens == 1, "the end", said)
    said = await _say(session, {"messages": _messages(rng), "response_format": _schema(name)}, rng.random() < 0.5)
    if said.finish == "length":
        expect(said.tokens == ENOUGH, "an early end", said)
        return
    expect(said.finish == "stop" and json.loads(said.content)[name] in ("red", "green", 7), "an object of the schema", said)


async def grammar_seeded(session: Session, rng: random.Random) -> None:
    """A constrained completion with a seed: valid, and the same whatever runs beside it."""
    kind, seed = rng.choice(("regex", "choice", "grammar", "json")), rng.randrange(3)
    constraint = {
        "regex": r"[a-f]{4}-[0-9]{2}",
        "choice": ["a mill", "a clock", "an honest thief"],
        "grammar": 'root ::= "one" (" and " ("two" | "three"))*',
        "json": {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 2, "maxItems": 4},
    }[kind]
    prompt = session.tokens(random.Random(seed), session.length(20))
    body = {"model": session.model, "prompt": prompt, "seed": seed, "max_tokens": 40, "structured_outputs": {kind: constraint}}
    answer = await session.post("/v1/completions", body)
    session.take_id(answer["id"])
    [choice] = answer["choices"]
    check_usage(answer["usage"], answer["usage"]["completion_tokens"], len(prompt))
    text, whole = choice["text"], choice["finish_reason"] == "stop"
    if whole and kind == "regex":
        expect(re.fullmatch(r"[a-f]{4}-[0-9]{2}", text) is not None, "a text of the regex", text)
    elif whole and kind == "choice":
        expect(text in constraint, "one of the choices", text)
    elif whole and kind == "json":
        expect(2 <= len(json.loads(text)) <= 4, "an array of the schema", text)
    else:
        expect(text.startswith("one"[: len(text)]) or kind != "grammar", "a text of the grammar", text)
    session.same(f"{kind} with seed {seed}", (text, choice["finish_reason"]))


async def anthropic_call(session: Session, rng: random.Random) -> None:
    tool = {"name": "forecast", "description": FUNCTION["description"], "input_schema": FORECAST}
    choice = rng.choice(({"type": "any"}, {"type": "tool", "name": "forecast"}))
    body = {"model": session.model, "max_tokens": ENOUGH, "messages": _messages(rng), "tools": [tool],
            "tool_choice": choice | {"disable_parallel_tool_use": True}}  # fmt: skip
    if rng.random() < 0.5:
        answer = await session.post("/v1/messages", body)
        blocks, reason = answer["content"], answer["stop_reason"]
    else:
        events = [(name, data) for name, data in await session.stream("/v1/messages", body | {"stream": True}) if name != "ping"]
        names = [name for name, _ in events if name != "content_block_delta"]
        blocks = [data["content_block"] for name, data in events if name == "content_block_start"]
        inner = ["content_block_start", "content_block_stop"] * len(blocks)
        expect(names == ["message_start", *inner, "message_delta", "message_stop"], "order of events", names)
        answer, reason = events[0][1]["message"], events[-2][1]["delta"]["stop_reason"]
        parts = "".join(data["delta"]["partial_json"] for name, data in events if name == "content_block_delta")
        if reason == "tool_use":
            blocks[0]["input"] = json.loads(parts)
    session.take_id(answer["id"])
    expect(reason in ("tool_use", "max_tokens") and len(blocks) <= 1, "the end", (reason, blocks))
    if reason == "tool_use":
        expect(blocks[0]["type"] == "tool_use", "a block", blocks)
        session.take_id(blocks[0]["id"])
        _check_arguments(blocks[0]["name"], blocks[0]["input"])


async def response_call(session: Session, rng: random.Random) -> None:
    body = _response_body(session, rng, ENOUGH, tools=[{"type": "function", **FUNCTION}], tool_choice="required", parallel_tool_calls=False)
    del body["ignore_eos"]
    if rng.random() < 0.5:
        response = await session.post("/v1/responses", body)
    else:
        events = await session.stream("/v1/responses", body | {"stream": True})
        expect([data["sequence_number"] for _, data in events] == list(range(len(events))), "sequence numbers")
        response = events[-1][1]["response"]
        pieces = "".join(data["delta"] for name, data in events if name == "response.function_call_arguments.delta")
        expect(pieces == "".join(item["arguments"] for item in response["output"]), "the pieces are not the arguments", pieces)
    session.take_id(response["id"])
    if response["status"] == "incomplete":
        expect(response["usage"]["output_tokens"] == ENOUGH, "an early end", response["usage"])
        return
    [item] = response["output"]
    expect(response["status"] == "completed" and item["type"] == "function_call", "output", response["output"])
    session.take_id(item["call_id"])
    _check_arguments(item["name"], item["arguments"])


# --- Responses --------------------------------------------------------------------------------------------------------


def _response_body(session: Session, rng: random.Random, tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": session.model, "input": _messages(rng)[0]["content"], "max_output_tokens": tokens, "ignore_eos": True, **more}


def check_response(response: dict[str, Any], tokens: int) -> None:
    """One that reached its limit."""
    expect(response["status"] == "incomplete", "status", response)
    expect(response["incomplete_details"] == {"reason": "max_output_tokens"}, "reason", response)
    expect(response["usage"]["output_tokens"] == tokens, f"output tokens, {tokens} were asked for", response["usage"])
    expect(len(response["output"]) == 1 and len(response["output"][0]["content"]) == 1, "output", response["output"])


def check_response_events(events: list[tuple[str, Any]], tokens: int) -> dict[str, Any]:
    """The order, the numbers and the texts of a response's events; returns the response at the end."""
    numbers = [data["sequence_number"] for _, data in events]
    expect(numbers == list(range(len(events))), "sequence numbers", numbers)
    names = [name for name, _ in events]
    expect(all(name == data["type"] for name, data in events), "names of events", names)
    inner = [name.removeprefix("response.") for name in names if not name.endswith("output_text.delta")]
    order = ["created", "in_progress", "output_item.added", "content_part.added", "output_text.done", "content_part.done",
             "output_item.done", "incomplete"]  # fmt: skip
    expect(inner == order, "order of events", inner)
    response: dict[str, Any] = events[-1][1]["response"]
    check_response(response, tokens)
    text = "".join(data["delta"] for name, data in events if name.endswith("output_text.delta"))
    expect(text == response["output"][0]["content"][0]["text"], "the pieces are not the text", text)
    return response


async def response_of_two_turns(session: Session, rng: random.Random) -> None:
    tokens = rng.randint(1, 24)
    first = await session.post("/v1/responses", _response_body(session, rng, tokens))
    session.take_id(first["id"])
    check_response(first, tokens)
    second = await session.post("/v1/responses", _response_body(session, rng, 4, previous_response_id=first["id"]))
    session.take_id(second["id"])
    check_response(second, 4)
    expect(second["usage"]["input_tokens"] > first["usage"]["total_tokens"] - 2, "the second turn lacks the first", second["usage"])


async def response_streamed(session: Session, rng: random.Random) -> None:
    tokens = rng.randint(1, 48)
    response = check_response_events(await session.stream("/v1/responses", _response_body(session, rng, tokens, stream=True)), tokens)
    session.take_id(response["id"])
    status = (await session.send("DELETE", f"/v1/responses/{response['id']}")).status_code
    expect(status == 200, "status of the deletion", status)


async def response_in_background(session: Session, rng: random.Random) -> None:
    """Asked for until it is there; one in three is cancelled, and one in three watched."""
    tokens, way = rng.randint(1, 24), rng.choice(("wait", "cancel", "watch"))
    body = _response_body(session, rng, tokens, background=True)
    if way == "watch":
        events = await session.stream("/v1/responses", body | {"stream": True})
        response = check_response_events(events, tokens)
        session.take_id(response["id"])
        again = await session.stream(f"/v1/responses/{response['id']}?stream=true&starting_after=2", method="GET")
        expect(again == events[3:], "the events are others when read again", again[:1])
        return
    response = await session.post("/v1/responses", body)
    session.take_id(response["id"])
    expect(response["status"] in ("queued", "in_progress"), "status", response)
    path = f"/v1/responses/{response['id']}"
    if way == "cancel":
        response = await session.post(f"{path}/cancel", {})
        expect(response["status"] in ("cancelled", "incomplete"), "status after cancelling", response)
        return
    while response["status"] in ("queued", "in_progress"):
        await asyncio.sleep(POLL_SECONDS)
        response = (await session.send("GET", path)).json()
    check_response(response, tokens)


# --- other dialects ---------------------------------------------------------------------------------------------------


async def anthropic(session: Session, rng: random.Random) -> None:
    tokens = rng.randint(1, 32)
    body = {"model": session.model, "max_tokens": tokens, "messages": _messages(rng), "system": "Answer in one sentence."}
    counted = await session.post("/v1/messages/count_tokens", {name: body[name] for name in ("model", "messages", "system")})
    answer = await session.post("/v1/messages", body)
    session.take_id(answer["id"])
    usage = answer["usage"]
    _check_anthropic_end(answer["stop_reason"], usage["output_tokens"], tokens)
    expect(usage["input_tokens"] + usage["cache_read_input_tokens"] == counted["input_tokens"], "input tokens", (usage, counted))


async def anthropic_streamed(session: Session, rng: random.Random) -> None:
    tokens = rng.randint(1, 48)
    body = {"model": session.model, "max_tokens": tokens, "messages": _messages(rng), "stream": True}
    events = [(name, data) for name, data in await session.stream("/v1/messages", body) if name != "ping"]
    expect(all(name == data["type"] for name, data in events), "names of events", events[:3])
    names = [name for name, _ in events if name != "content_block_delta"]
    order = ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
    expect(names == order, "order of events", names)
    session.take_id(events[0][1]["message"]["id"])
    _check_anthropic_end(events[-2][1]["delta"]["stop_reason"], events[-2][1]["usage"]["output_tokens"], tokens)


def _check_anthropic_end(reason: str, used: int, asked: int) -> None:
    expect(used == asked if reason == "max_tokens" else reason == "end_turn" and 1 <= used <= asked, "end", (reason, used, asked))


async def ollama_chat(session: Session, rng: random.Random) -> None:
    tokens = rng.randint(1, 32)
    body = {"model": session.model, "messages": _messages(rng), "stream": False, "options": {"num_predict": tokens}}
    _check_ollama_end(await session.post("/api/chat", body), tokens)


async def ollama_generate(session: Session, rng: random.Random) -> None:
    tokens = rng.randint(1, 48)
    body = {"model": session.model, "prompt": _messages(rng)[0]["content"], "options": {"num_predict": tokens, "seed": 5}}
    lines = [data for _, data in await session.stream("/api/generate", body)]
    expect([line["done"] for line in lines] == [False] * (len(lines) - 1) + [True], "one end, at the end", lines[-2:])
    _check_ollama_end(lines[-1], tokens)


def _check_ollama_end(last: dict[str, Any], asked: int) -> None:
    used = last["eval_count"]
    expect(last["done"] and (used == asked if last["done_reason"] == "length" else 1 <= used <= asked), "end", last)


async def llamacpp(session: Session, rng: random.Random) -> None:
    prompt, tokens = session.tokens(rng, rng.randint(1, 40)), rng.randint(1, 32)
    body = {"prompt": prompt, "n_predict": tokens, "ignore_eos": True, "n_probs": rng.choice((0, 2)), "return_tokens": True}
    if rng.random() < 0.5:
        parts = [data for _, data in await session.stream("/completion", body | {"stream": True})]
    else:
        parts = [await session.post("/completion", body)]
    last = parts[-1]
    expect([part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True], "one end, at the end", parts[-2:])
    expect(sum(len(part["tokens"]) for part in parts) == tokens == last["tokens_predicted"], "tokens", (tokens, last))
    expect(last["stop_type"] == "limit" and last["tokens_evaluated"] == len(prompt), "end", last)


Kind = Callable[[Session, random.Random], Awaitable[None]]
KINDS: tuple[Kind, ...] = (
    chat,
    chat_streamed,
    chat_choices,
    choices_streamed,
    completion_seeded,
    completion_sampled,
    prompt_logprobs,
    beam_search,
    long_prompt,
    shared_prefix,
    tokenize,
    thoughts_and_calls,
    calls_forced,
    schema_obeyed,
    grammar_seeded,
    anthropic_call,
    response_call,
    response_of_two_turns,
    response_streamed,
    response_in_background,
    anthropic,
    anthropic_streamed,
    ollama_chat,
    ollama_generate,
    llamacpp,
)


# --- malformed --------------------------------------------------------------------------------------------------------

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def _bad_chat(**fields: Any) -> tuple[str, str, Any, int]:
    return "POST", CHAT, {"messages": HELLO, **fields}, 400


def _bad_text(**fields: Any) -> tuple[str, str, Any, int]:
    return "POST", TEXT, {"prompt": "Hello", **fields}, 400


MALFORMED: tuple[tuple[str, str, Any, int], ...] = (
    ("POST", CHAT, b"{", 400),
    ("POST", CHAT, b'{"messages": "\xff\xfe"}', 400),
    ("POST", CHAT, b"[" * 5000, 400),
    ("POST", CHAT, b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', 400),
    ("POST", CHAT, {}, 400),
    ("POST", CHAT, {"messages": []}, 400),
    ("POST", CHAT, {"messages": [{"role": "king", "content": "x"}]}, 400),
    ("POST", CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400),
    ("POST", CHAT, {"messages": HELLO, "model": "no such model"}, 404),
    _bad_chat(max_tokens=0),
    _bad_chat(max_tokens=2**63),
    _bad_chat(max_tokens=True),
    _bad_chat(n=0),
    _bad_chat(n=10**9),
    _bad_chat(temperature=-1),
    _bad_chat(temperature="hot", stream=True),
    _bad_chat(top_p=2.0, stream=True),
    _bad_chat(top_logprobs=5),
    _bad_chat(stop=[""]),
    _bad_chat(cache_salt="a/b"),
    _bad_chat(response_format={"type": "json_schema"}),
    _bad_chat(chat_template="{{ 1 }}"),
    _bad_chat(response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "no such type"}}}),
    _bad_chat(response_format={"type": "json_object"}, structured_outputs={"regex": "a"}),
    _bad_chat(tools=[]),
    _bad_chat(tool_choice="required"),
    _bad_chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "no such function"}}),
    _bad_chat(tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}], tool_choice="required"),
    ("POST", TEXT, {"prompt": []}, 400),
    ("POST", TEXT, {"prompt": [-1]}, 400),
    ("POST", TEXT, {"prompt": [10**9]}, 400),
    ("POST", TEXT, {"prompt": [25] * 200_000}, 400),
    ("POST", TEXT, {"prompt": "word " * 200_000}, 400),
    ("POST", TEXT, {"prompt": [["x"], 1]}, 400),
    _bad_text(prompt_embeds="AAAA"),
    _bad_text(logprobs=-5),
    _bad_text(use_beam_search=True, stream=True),
    _bad_text(use_beam_search=True, top_p=0.5),
    _bad_text(logit_bias={"x": 1}),
    _bad_text(guided_regex="(a"),
    _bad_text(structured_outputs={"grammar": "root ::= nothing"}),
    _bad_text(structured_outputs={"json": {"not": {"type": "string"}}}, stream=True),
    _bad_text(structured_outputs={"choice": []}),
    _bad_text(priority=3),
    ("POST", "/v1/responses", {}, 400),
    ("POST", "/v1/responses", {"input": "x", "n": 2}, 400),
    ("POST", "/v1/responses", {"input": "x", "previous_response_id": "resp_none"}, 404),
    ("POST", "/v1/responses", {"input": [{"type": "item_reference"}]}, 400),
    ("GET", "/v1/responses/resp_none", None, 404),
    ("POST", "/v1/responses/resp_none/cancel", {}, 404),
    ("POST", "/v1/messages", {"messages": HELLO}, 400),
    ("POST", "/v1/messages", {"messages": HELLO, "max_tokens": 5, "model": "no such model"}, 404),
    ("POST", "/v1/messages", {"messages": [], "max_tokens": 5}, 400),
    ("POST", "/api/generate", {"prompt": "x", "options": {"num_predict": "many"}}, 400),
    ("POST", "/api/generate", {"prompt": "x", "format": "json"}, 400),
    ("POST", "/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["AAAA"]}]}, 400),
    ("POST", "/api/chat", {"model": "no such model", "messages": HELLO}, 404),
    ("POST", "/completion", {}, 400),
    ("POST", "/completion", {"prompt": "x", "grammar": "root ::= x"}, 400),
    ("POST", "/tokenize", {}, 400),
    ("POST", "/detokenize", {"tokens": [-1]}, 400),
    ("GET", CHAT, None, 405),
    ("POST", "/no/such/route", {}, 404),
)
"""Method, path, body, and the status that it must get."""


async def malformed(session: Session, rng: random.Random) -> None:
    """One that must be refused, in words."""
    method, path, body, status = rng.choice(MALFORMED)
    response = await session.send(method, path, body)
    expect(response.status_code == status, f"{path} {body!r:.80}: status {response.status_code}, not {status}", response.text)
    expect(bool(response.json()["error"]), f"{path} {body!r:.80}: no error in the answer", response.text)
