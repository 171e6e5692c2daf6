"""Anthropic's conversations from their schema to what a chat template takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from canter.core.errors import InvalidRequestError
from canter.server.messages import MAX_MESSAGES
from canter.server.schemas.anthropic import Block, Conversation, Message, Tool

MAX_BLOCKS = 16384
"""All blocks of a request, those inside of others too."""
Messages = list[dict[str, Any]]


def template_messages(body: Conversation) -> Messages:
    """Messages as plain dictionaries, the system prompt first, neighbours of one role joined, results of tools as messages of
    their own. Raises `InvalidRequestError` naming the block."""
    if not body.messages:
        raise InvalidRequestError("messages must hold at least one message.", "messages")
    if len(body.messages) > MAX_MESSAGES:
        raise InvalidRequestError(f"messages may hold at most {MAX_MESSAGES} messages, got {len(body.messages)}.", "messages")
    _check_number(body)
    result: Messages = []
    if body.system:
        _append(result, "system", _texts(body.system, "system"))
    tool_names: dict[str, str] = {}
    for i, message in enumerate(body.messages):
        _add_message(result, message, f"messages[{i}]", tool_names)
    for joined in result:
        if "reasoning" in joined:
            joined["reasoning"] = "\n".join(joined["reasoning"])
    return result


def continues(body: Conversation) -> bool:
    """Whether the answer goes on with the last message, which the assistant has begun. Raises for one without a text to go on with."""
    last = body.messages[-1] if body.messages else None
    if last is None or last.role != "assistant":
        return False
    if not isinstance(last.content, str) and (not last.content or last.content[-1].type != "text"):
        raise InvalidRequestError("messages: the last message is the assistant's, but ends without a text to go on with.", "messages")
    return True


def template_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """Tools in the form that chat templates know."""
    if tools is None:
        return None
    return [
        {"type": "function", "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema or {}}}
        for tool in tools
    ]


def _check_number(body: Conversation) -> None:
    waiting = [body.system, *(message.content for message in body.messages)]
    number = 0
    while waiting:
        content = waiting.pop()
        if not isinstance(content, list):
            continue
        number += len(content)
        if number > MAX_BLOCKS:
            raise InvalidRequestError(f"messages and system may hold at most {MAX_BLOCKS} content blocks together.", "messages")
        waiting += [block.content for block in content if block.content is not None]
        waiting += [block.source.content for block in content if block.source is not None]


def _add_message(result: Messages, message: Message, where: str, tool_names: dict[str, str]) -> None:
    if message.role == "assistant" and isinstance(message.content, list):
        _add_assistant(result, message.content, f"{where}.content", tool_names)
        return
    content = message.content
    if isinstance(content, str):
        _append(result, message.role, [content])
        return
    for i, block in enumerate(content):
        name = f"{where}.content[{i}]"
        if block.type == "tool_result" and message.role == "user":
            result.append(_tool_result(block, name, tool_names))
        else:
            _append(result, message.role, [_text(block, name)])
    if not content:
        _append(result, message.role, [""])


def _add_assistant(result: Messages, blocks: list[Block], where: str, tool_names: dict[str, str]) -> None:
    """Texts, thoughts and tool calls of a turn. Redacted thoughts are left out: only those who wrote them can read them."""
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(blocks):
        name = f"{where}[{i}]"
        if block.type == "thinking":
            thoughts.append(_needed(block.thinking, name, "thinking"))
        elif block.type == "tool_use":
            call_id, tool = _needed(block.id, name, "id"), _needed(block.name, name, "name")
            tool_names[call_id] = tool
            calls.append({"id": call_id, "type": "function", "function": {"name": tool, "arguments": block.input or {}}})
        elif block.type != "redacted_thinking":
            texts.append(_text(block, name))
    message = _append(result, "assistant", texts or [""])
    if thoughts:
        message.setdefault("reasoning", []).extend(thoughts)
    if calls:
        message.setdefault("tool_calls", []).extend(calls)


def _append(result: Messages, role: str, texts: list[str]) -> dict[str, Any]:
    """Add texts as a message, or to the last if the role is the same: turns alternate, as templates want it."""
    parts = [{"type": "text", "text": text} for text in texts]
    if not result or result[-1]["role"] != role:
        result.append({"role": role, "content": texts[0] if len(texts) == 1 else parts})
        return result[-1]
    message = result[-1]
    if isinstance(message["content"], str):
        message["content"] = [{"type": "text", "text": message["content"]}]
    message["content"].extend(parts)
    return message


def _tool_result(block: Block, where: str, tool_names: dict[str, str]) -> dict[str, Any]:
    call_id = _needed(block.tool_use_id, where, "tool_use_id")
    texts = _texts(block.content or "", f"{where}.content")
    if block.is_error:
        texts.insert(0, "Error:")
    message = {"role": "tool", "tool_call_id": call_id, "content": "\n".join(texts)}
    return message | ({"name": tool_names[call_id]} if call_id in tool_names else {})


def _texts(content: str | list[Block], where: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [_text(block, f"{where}[{i}]") for i, block in enumerate(content)]


def _text(block: Block, where: str) -> str:
    """The text of a block of text or of a document. Anything else needs a model that sees, which this server doesn't have."""
    if block.type == "text":
        return _needed(block.text, where, "text")
    if block.type == "document":
        return _document(block, where)
    what = "this model reads text only" if block.type in ("image", "audio", "video", "file") else "it has no place here"
    raise InvalidRequestError(f"{where}: a block of type {block.type!r:.80} is not supported: {what}.", f"{where}.type")


def _document(block: Block, where: str) -> str:
    if block.citations is not None and block.citations.enabled:
        raise InvalidRequestError(f"{where}.citations are not supported by this server. Leave them out.", f"{where}.citations")
    source = block.source
    if source is None or source.type not in ("text", "content"):
        kind = None if source is None else source.type
        raise InvalidRequestError(
            f"{where}.source must be of type text or content, got {kind!r:.80}: this server reads no files.", f"{where}.source"
        )
    if source.type == "text":
        texts = [_needed(source.data, f"{where}.source", "data")]
    elif source.content is None:
        raise InvalidRequestError(f"{where}.source.content is required.", f"{where}.source.content")
    else:
        texts = _plain_texts(source.content, f"{where}.source.content")
    return "\n".join([*filter(None, (block.title, block.context)), *texts])


def _plain_texts(content: str | list[Block], where: str) -> list[str]:
    """The texts of a document: it holds no documents, so that nothing nests without end."""
    if isinstance(content, list):
        for i, block in enumerate(content):
            if block.type != "text":
                raise InvalidRequestError(f"{where}[{i}]: a document may hold blocks of text only.", f"{where}[{i}].type")
    return _texts(content, where)


def _needed(value: str | None, where: str, field: str) -> str:
    if value is None:
        raise InvalidRequestError(f"{where}.{field} is required.", f"{where}.{field}")
    return value
