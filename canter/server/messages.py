"""Conversations from their schema to what a chat template takes."""

from __future__ import annotations

from typing import Any

from canter.core.errors import InvalidRequestError
from canter.server.schemas.openai import ChatMessage, ContentPart, ToolCall

MAX_MESSAGES = 16384
TEXT_PART_FIELDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
"""Type of a content part -> the field that holds its text."""


def template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as plain dictionaries, parts of all kinds of text as text parts. Raises `InvalidRequestError` naming the part."""
    if not messages:
        raise InvalidRequestError("messages must hold at least one message.", "messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequestError(f"messages may hold at most {MAX_MESSAGES} messages, got {len(messages)}.", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def plain_text(message: ChatMessage) -> str:
    """The text of a message, parts joined by line feeds."""
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    return "\n".join(getattr(part, TEXT_PART_FIELDS.get(part.type, "text")) or "" for part in message.content)


def _message(message: ChatMessage, where: str) -> dict[str, Any]:
    content: Any = message.content
    if isinstance(content, list):
        content = [_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
    result: dict[str, Any] = {"role": message.role, "content": content}
    for name in ("name", "tool_call_id", "reasoning", "reasoning_content"):
        if getattr(message, name) is not None:
            result[name] = getattr(message, name)
    if message.tool_calls:
        result["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return result


def _part(part: ContentPart, where: str) -> dict[str, str]:
    """A part as a text part. Anything but text needs a model that sees or hears, which this server doesn't have."""
    field = TEXT_PART_FIELDS.get(part.type)
    if field is None:
        raise InvalidRequestError(
            f"{where}: a part of type {part.type!r:.80} is not supported: this model reads text only.", f"{where}.type"
        )
    text: str | None = getattr(part, field)
    if text is None:
        raise InvalidRequestError(f"{where}.{field} is required for a part of type {part.type!r}.", f"{where}.{field}")
    return {"type": "text", "text": text}


def _tool_call(call: ToolCall) -> dict[str, Any]:
    result: dict[str, Any] = {"type": call.type, "function": {"name": call.function.name, "arguments": call.function.arguments}}
    if call.id is not None:
        result["id"] = call.id
    return result
