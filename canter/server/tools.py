"""Tools and the choice among them, from what a request says to how its output is constrained and read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from canter.core.errors import InvalidRequestError
from canter.core.structured_outputs import PARAM, StructuredOutputsParams
from canter.text.parsing.options import Choice, ParseOptions, Tool
from canter.text.parsing.parser import OutputFormat

MAX_TOOLS = 1024
MAX_NAME_CHARS = 256


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The functions that a request offers, and which of them the model may or must call."""

    tools: tuple[Tool, ...] = ()
    choice: Choice = "none"
    named: str | None = None
    parallel: bool = True


NO_TOOLS = ToolUse()


@dataclass(frozen=True, slots=True)
class DeclaredTool:
    """What a client calls a function that the model may know by a longer name, with its namespace in front. A custom tool takes a text."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


def read_functions(tools: Sequence[Mapping[str, Any]], where: str = "tools") -> tuple[Tool, ...]:
    """Tools of OpenAI's chat form, `{"type": "function", "function": {...}}`. Raises `InvalidRequestError` naming the one at fault."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"{where} may hold at most {MAX_TOOLS} entries, got {len(tools)}.", where)
    read = tuple(_function(tool, f"{where}[{i}]") for i, tool in enumerate(tools))
    names = set()
    for i, tool in enumerate(read):
        if tool.name in names:
            raise InvalidRequestError(f"{where}[{i}].function.name: there is already a function {tool.name!r:.80}.", where)
        names.add(tool.name)
    return read


def _function(tool: Mapping[str, Any], where: str) -> Tool:
    kind = tool.get("type", "function")
    if kind != "function":
        raise InvalidRequestError(f"{where}: a tool of type {kind!r:.80} is not supported by this server; only functions are.", where)
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequestError(f"{where}.function must be an object with a name, got {function!r:.80}.", where)
    name, parameters, strict = function.get("name"), function.get("parameters"), function.get("strict")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        raise InvalidRequestError(f"{where}.function.name must be a text of 1 to {MAX_NAME_CHARS} characters, got {name!r:.80}.", where)
    if parameters is not None and not isinstance(parameters, Mapping):
        raise InvalidRequestError(f"{where}.function.parameters must be a JSON schema, got {parameters!r:.80}.", where)
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequestError(f"{where}.function.strict must be true or false, got {strict!r:.80}.", where)
    return Tool(name, parameters or {}, bool(strict))


def choose(tools: Sequence[Mapping[str, Any]] | None, choice: object, parallel: bool | None) -> ToolUse:
    """What `tools`, `tool_choice` and `parallel_tool_calls` of a chat request come to. Raises `InvalidRequestError`."""
    if tools is not None and not tools:
        raise InvalidRequestError("tools must not be empty. Leave it out instead.", "tools")
    if tools is None:
        if choice not in (None, "none"):
            raise InvalidRequestError("tool_choice needs tools.", "tool_choice")
        return NO_TOOLS
    functions = read_functions(tools)
    kind, named = _choice(choice, [function.name for function in functions])
    return ToolUse(functions, kind, named, parallel is not False)


def _choice(choice: object, names: Sequence[str]) -> tuple[Choice, str | None]:
    if choice is None or choice == "auto":
        return "auto", None
    if choice == "none":
        return "none", None
    if choice == "required":
        return "required", None
    if not isinstance(choice, Mapping):
        raise InvalidRequestError(f"tool_choice must be none, auto, required or a named function, got {choice!r:.80}.", "tool_choice")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice.get("type", "function") != "function" or not isinstance(name, str):
        expected = '{"type": "function", "function": {"name": ...}}'
        raise InvalidRequestError(f"tool_choice must be none, auto, required or {expected}, got {choice!r:.80}.", "tool_choice")
    check_named(name, names)
    return "named", name


def check_named(name: str, names: Sequence[str]) -> None:
    """Raises `InvalidRequestError` for a function that `tool_choice` names and `tools` don't have."""
    if name not in names:
        known = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise InvalidRequestError(
            f"tool_choice names the function {name!r:.80}, which tools don't have. They have: {known}.", "tool_choice"
        )


def arguments_object(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object, for dialects that have them so; empty where the model wrote none."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def forced_output(use: ToolUse) -> StructuredOutputsParams | None:
    """The grammar of an output that must be a call: a list of calls, or the arguments of the named function. None where it need not."""
    if use.choice not in ("named", "required"):
        return None
    schemas = [_checked_schema(tool, i) for i, tool in enumerate(use.tools)]
    if use.choice == "named":
        (schema,) = [schema for tool, schema in zip(use.tools, schemas, strict=True) if tool.name == use.named]
        return StructuredOutputsParams(json=schema)
    calls: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": []}, "$defs": {}}
    if not use.parallel:
        calls["maxItems"] = 1
    for i, (tool, schema) in enumerate(zip(use.tools, schemas, strict=True)):
        # References of a function's schema begin at its own root, which now lies below another.
        calls["$defs"][f"function{i}"] = _moved(schema, f"#/$defs/function{i}")
        properties = {"name": {"const": tool.name}, "parameters": {"$ref": f"#/$defs/function{i}"}}
        entry = {"type": "object", "properties": properties, "required": ["name", "parameters"], "additionalProperties": False}
        calls["items"]["anyOf"].append(entry)
    return StructuredOutputsParams(json=calls)


def strict_calls(format: OutputFormat, options: ParseOptions) -> StructuredOutputsParams | None:
    """The grammar of an answer that may call strict functions: free text, and calls whose arguments obey. None where no function is
    strict. Raises `InvalidRequestError` where a function is and this model can't be held to it."""
    written = format.written_calls
    if options.tool_choice != "auto" or not any(tool.strict for tool in options.tools):
        return None
    if written is None:
        raise InvalidRequestError(
            "tools: this server doesn't know how to hold the model's calls to a schema where it may also answer with text. Leave strict "
            "out, or set tool_choice to required or to a function.",
            "tools",
        )
    for i, tool in enumerate(options.tools):
        _checked_schema(tool, i)
    tag = {"type": "structural_tag", "format": written.tag(options.tools, options.parallel_tool_calls)}
    try:
        return StructuredOutputsParams(structural_tag=tag)
    except InvalidRequestError as error:
        raise named_tools(error) from None


def named_tools(error: InvalidRequestError) -> InvalidRequestError:
    """An error of the grammar that `strict_calls` has made: what the user wrote are tools."""
    return InvalidRequestError(re.sub(rf"^{PARAM}\.structural_tag", "tools", str(error)), "tools")


def _checked_schema(tool: Tool, index: int) -> dict[str, Any]:
    """The schema of a function's arguments. Raises `InvalidRequestError` for one that is too large or nested too deeply."""
    schema = {"type": "object", **tool.parameters}
    try:
        StructuredOutputsParams(json=schema)
    except InvalidRequestError as error:
        name = f"tools[{index}].function.parameters"
        raise InvalidRequestError(str(error).replace(error.param or "", name, 1), name) from None
    return schema


def _moved(schema: Any, root: str) -> Any:
    """A schema whose references to places in itself lead below `root`."""
    if isinstance(schema, Mapping):
        return {key: _moved_reference(value, root) if key == "$ref" else _moved(value, root) for key, value in schema.items()}
    return [_moved(item, root) for item in schema] if isinstance(schema, list) else schema


def _moved_reference(reference: Any, root: str) -> Any:
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        return root + reference[1:]
    return reference
