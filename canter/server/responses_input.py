"""The input of a response: items checked and brought to one form, made into messages, and fitted into the context."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET

from canter.core.errors import InvalidRequestError
from canter.server.generation import Prompt
from canter.server.messages import MAX_MESSAGES
from canter.server.responses_encoder import new_item_id
from canter.server.schemas.responses import (
    CustomCallItem,
    FunctionCallItem,
    InputItem,
    InputPart,
    OutputItem,
    ReasoningItem,
    ResponsesAnswer,
)
from canter.server.tools import MAX_TOOLS, DeclaredTool

NAMESPACE_SEPARATOR = "__"
_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
_ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
_NEEDED = {
    "message": ("role", "content"),
    "reasoning": (),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
}
"""Type of an item -> the fields without which it says nothing."""
_TEXT_PARTS = frozenset(("text", "input_text", "output_text", "reasoning_text", "summary_text"))

item_decoder = msgspec.json.Decoder(InputItem)


# --- items ------------------------------------------------------------------------------------------------------------


def read_items(given: str | list[InputItem]) -> list[InputItem]:
    """The items of a request, each with its type, an id and its content as parts. Raises `InvalidRequestError` naming the item."""
    if isinstance(given, str):
        given = [InputItem(role="user", content=given)]
    if not given:
        raise InvalidRequestError("input must hold at least one item.", "input")
    if len(given) > MAX_MESSAGES:
        raise InvalidRequestError(f"input may hold at most {MAX_MESSAGES} items, got {len(given)}.", "input")
    return [_read_item(item, f"input[{i}]") for i, item in enumerate(given)]


def output_items(response: ResponsesAnswer) -> list[InputItem]:
    """What a response has written, as items of the conversation that goes on from it."""
    return [_output_item(item) for item in response.output]


def _output_item(item: OutputItem) -> InputItem:
    status: Literal["completed", "incomplete"] = "completed" if item.status == "completed" else "incomplete"
    if isinstance(item, FunctionCallItem):
        namespace = None if item.namespace is UNSET else item.namespace
        return InputItem(
            type=item.type, id=item.id, status=status, call_id=item.call_id, name=item.name, namespace=namespace, arguments=item.arguments
        )
    if isinstance(item, CustomCallItem):
        return InputItem(type=item.type, id=item.id, status=status, call_id=item.call_id, name=item.name, input=item.input)
    if isinstance(item, ReasoningItem):
        thoughts = [InputPart(type=part.type, text=part.text) for part in item.content]
        return InputItem(type=item.type, id=item.id, status=status, summary=[], content=thoughts)
    texts = [InputPart(type=part.type, text=part.text, annotations=[]) for part in item.content]
    return InputItem(type="message", id=item.id, role="assistant", status=status, content=texts)


def _read_item(item: InputItem, where: str) -> InputItem:
    kind = item.type or ("message" if item.role is not None else None)
    if kind is None:
        raise InvalidRequestError(f"{where}.type is required.", f"{where}.type")
    if kind not in _NEEDED:
        raise InvalidRequestError(f"{where}: an item of type {kind!r:.80} is not supported by this server.", f"{where}.type")
    for name in _NEEDED[kind]:
        if getattr(item, name) is None:
            raise InvalidRequestError(f"{where}.{name} is required for an item of type {kind!r}.", f"{where}.{name}")
    if item.encrypted_content is not None and not item.content and not item.summary:
        raise InvalidRequestError(f"{where}.encrypted_content can't be read by this server.", f"{where}.encrypted_content")
    plain = "output_text" if item.role == "assistant" else "reasoning_text" if kind == "reasoning" else "input_text"
    return msgspec.structs.replace(
        item,
        type=kind,
        id=item.id or new_item_id(_ID_PREFIXES[kind]),
        content=_read_parts(item.content, plain, f"{where}.content"),
        summary=_read_parts(item.summary, "summary_text", f"{where}.summary"),
        output=item.output if isinstance(item.output, str) else _read_parts(item.output, "input_text", f"{where}.output"),
    )


def _read_parts(given: str | list[InputPart] | None, plain: str, where: str) -> list[InputPart] | None:
    if given is None:
        return None
    parts = [InputPart(type=plain, text=given)] if isinstance(given, str) else given
    return [_read_part(part, f"{where}[{i}]") for i, part in enumerate(parts)]


def _read_part(part: InputPart, where: str) -> InputPart:
    if part.type not in _TEXT_PARTS and part.type != "refusal":
        raise InvalidRequestError(
            f"{where}: a part of type {part.type!r:.80} is not supported: this model reads text only.", f"{where}.type"
        )
    field = "refusal" if part.type == "refusal" else "text"
    text = part.refusal if field == "refusal" else part.text
    if text is None:
        raise InvalidRequestError(f"{where}.{field} is required for a part of type {part.type!r}.", f"{where}.{field}")
    return InputPart(type=part.type, annotations=[] if part.type == "output_text" else None, **{field: text})


# --- messages ---------------------------------------------------------------------------------------------------------


def chat_messages(items: Sequence[InputItem], instructions: str | None) -> list[dict[str, Any]]:
    """The conversation as a chat template takes it.

    What one turn of the model made, thoughts, text and tool calls, lies in items that follow each other and is one message.
    Developers speak as the system, because few templates know them.
    """
    messages: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    turn: dict[str, Any] | None = None
    for item in items:
        if (item.type == "message" and item.role != "assistant") or item.type in ("function_call_output", "custom_tool_call_output"):
            turn = None
            messages.append(_other_message(item))
            continue
        if turn is None or _begins_a_turn(item, turn):
            turn = {"role": "assistant", "content": None}
            messages.append(turn)
        _add_to_turn(turn, item)
    return [message for message in messages if message["role"] != "assistant" or len(message) > 2 or message["content"] is not None]


def _other_message(item: InputItem) -> dict[str, Any]:
    if item.type == "message":
        return {"role": "system" if item.role == "developer" else item.role, "content": _content(item.content)}
    return {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)}


def _begins_a_turn(item: InputItem, turn: dict[str, Any]) -> bool:
    if item.type == "message":
        return turn["content"] is not None or "tool_calls" in turn
    return item.type == "reasoning" and (turn["content"] is not None or "tool_calls" in turn)


def _add_to_turn(turn: dict[str, Any], item: InputItem) -> None:
    if item.type == "message":
        turn["content"] = _content(item.content)
    elif item.type == "reasoning":
        text = "\n".join(part.text or "" for part in item.content or item.summary or () if isinstance(part, InputPart))
        if text:
            turn["reasoning"] = turn["reasoning"] + "\n" + text if "reasoning" in turn else text
    else:
        arguments = item.arguments if item.type == "function_call" else json.dumps({"input": item.input}, ensure_ascii=False)
        function = {"name": flat_name(item.namespace, item.name or ""), "arguments": arguments}
        turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})


def _content(content: str | list[InputPart] | None) -> Any:
    """Parts as text parts; a single one as its text, which every template takes."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = [part.refusal if part.type == "refusal" else part.text for part in content]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


# --- tools ------------------------------------------------------------------------------------------------------------


def flat_name(namespace: str | None, name: str) -> str:
    """The name under which a model knows a function of a namespace."""
    return name if namespace is None else f"{namespace}{NAMESPACE_SEPARATOR}{name}"


def declared_tools(tools: Sequence[dict[str, Any]] | None) -> dict[str, DeclaredTool]:
    """Of tools that `read_tools` has let pass: what each is called, by its flat name."""
    declared = {}
    for tool in tools or ():
        if tool["type"] == "namespace":
            for member in tool["tools"]:
                name = DeclaredTool(member["name"], tool["name"], member["type"] == "custom")
                declared[flat_name(tool["name"], member["name"])] = name
        else:
            declared[tool["name"]] = DeclaredTool(tool["name"], None, tool["type"] == "custom")
    return declared


def read_tools(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Functions, custom tools and namespaces of them, as the flat list of functions that a chat template takes.

    Raises `InvalidRequestError` naming the tool at fault; tools that a server would have to run are refused.
    """
    flat: dict[str, dict[str, Any]] = {}
    for i, tool in enumerate(tools or ()):
        where = f"tools[{i}]"
        if tool.get("type") != "namespace":
            _add_tool(flat, tool, None, where)
            continue
        namespace = _tool_name(tool, where)
        members = tool.get("tools")
        if not isinstance(members, list) or not members:
            raise InvalidRequestError(f"{where}.tools must be a list of at least one tool.", f"{where}.tools")
        for j, member in enumerate(members):
            _add_tool(flat, member, namespace, f"{where}.tools[{j}]")
    return list(flat.values())


def _add_tool(flat: dict[str, dict[str, Any]], tool: Any, namespace: str | None, where: str) -> None:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind not in ("function", "custom"):
        raise InvalidRequestError(f"{where}: a tool of type {kind!r:.80} is not supported by this server.", f"{where}.type")
    name = flat_name(namespace, _tool_name(tool, where))
    if name in flat:
        raise InvalidRequestError(f"{where}.name: there is already a tool {name!r}.", f"{where}.name")
    if len(flat) == MAX_TOOLS:
        raise InvalidRequestError(f"tools may hold at most {MAX_TOOLS} functions.", "tools")
    description = tool.get("description")
    if description is not None and not isinstance(description, str):
        raise InvalidRequestError(f"{where}.description must be a string.", f"{where}.description")
    function = {"name": name, "description": description or "", "parameters": _parameters(tool, kind, where)}
    flat[name] = {"type": "function", "function": function}


def _tool_name(tool: dict[str, Any], where: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{where}.name must have 1 to 128 letters, digits, underscores or hyphens, got {name!r:.80}.", f"{where}.name"
        )
    return name


def _parameters(tool: dict[str, Any], kind: str, where: str) -> dict[str, Any]:
    if kind == "custom":
        style = tool.get("format") or {"type": "text"}
        if not isinstance(style, dict) or style.get("type") != "text":
            raise InvalidRequestError(f"{where}.format: only text is supported by this server.", f"{where}.format")
        return {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    parameters = tool.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequestError(f"{where}.parameters must be a JSON schema object.", f"{where}.parameters")
    return parameters or {"type": "object", "properties": {}}


# --- context ----------------------------------------------------------------------------------------------------------


async def fit(messages: list[dict[str, Any]], limit: int, encode: Callable[[list[dict[str, Any]]], Awaitable[Prompt]]) -> Prompt:
    """The prompt of a conversation from whose beginning as many messages are left out as it takes to have at most `limit` tokens.

    System messages stay, and so does the last message. Cuts are made before a user's message, so that no answer loses its
    question and no tool's output its call. When nothing helps the shortest prompt comes back, for the caller to refuse.
    """
    prompt = await encode(messages)
    if len(prompt.token_ids) <= limit:
        return prompt
    cuts = [i for i, message in enumerate(messages) if message["role"] == "user" and i > 0]
    low, high = 0, len(cuts) - 1  # the prompt of cuts[high] is the shortest; look for the first that fits
    while low <= high:
        middle = (low + high) // 2
        shorter = await encode(without_beginning(messages, cuts[middle]))
        if len(shorter.token_ids) <= limit or middle == len(cuts) - 1:
            prompt = shorter
        if len(shorter.token_ids) <= limit:
            high = middle - 1
        else:
            low = middle + 1
    return prompt


def without_beginning(messages: list[dict[str, Any]], start: int) -> list[dict[str, Any]]:
    """Messages from `start` on, and the system's before it."""
    return [message for i, message in enumerate(messages) if i >= start or message["role"] == "system"]
