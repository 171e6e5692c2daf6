"""What a request says of its tools and thoughts, as far as reading the answer depends on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Choice = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is its JSON Schema; empty for one that takes anything."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ParseOptions:
    """`template_kwargs` are the variables that the chat template was given beside the conversation: formats look there for whether
    the model thinks. `num_previous_calls`: tool calls in the conversation so far, for formats whose ids count on.
    `keep_special_tokens`: those that mean nothing to the format stay in the text."""

    tools: tuple[Tool, ...] = ()
    tool_choice: Choice = "none"
    named_tool: str | None = None
    parallel_tool_calls: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reasoning_effort: str | None = None
    num_previous_calls: int = 0
    keep_special_tokens: bool = False
