"""From a conversation to the text that a model was trained on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import jinja2

from canter.core.errors import ConfigError, InvalidRequestError
from canter.text.template_env import RaisedByTemplateError, compile_template, make_environment, render_bounded
from canter.text.tokenizer import Tokenizer

RESERVED_VARIABLES = frozenset(
    ("messages", "conversation", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize",
     "bos_token", "eos_token", "unk_token", "pad_token")
)  # fmt: skip
"""Template variables that a request's `chat_template_kwargs` may not set."""

MAX_REQUEST_TEMPLATE_CHARS = 1 << 18

_NO_TEMPLATE = (
    "This model has no chat template, so a conversation can't be turned into a prompt. Give one with --chat-template "
    "(LLM(chat_template=...)), or send a finished prompt to the completions route (LLM.generate)."
)
_REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# The space tells whether the template strips what it is given.
_CUT_MARK = "CANTER-CONTINUES-HERE "
_PROBE = "canter-probe"

Message = Mapping[str, Any]


class ChatTemplate:
    """A compiled chat template. Every failure of rendering is an `InvalidRequestError`.

    `source` None stands for a model without a template: rendering says so. `tool_use` is used in its place when there are
    tools. `variables` are what every rendering sees besides `bos_token` and `eos_token`. `error` says why a template could not
    be compiled, and is what rendering then raises.
    """

    def __init__(
        self,
        source: str | None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        *,
        tool_use: str | None = None,
        variables: Mapping[str, Any] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self._tool_use_source = tool_use
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._variables = {**(variables or {}), **{name: token for name, token in tokens.items() if token is not None}}
        self._environment = make_environment(now)
        self.error: str | None = None if source is not None else _NO_TEMPLATE
        self._plain = self._compile(source)
        self._tool_use = self._compile(tool_use) or self._plain
        self._accepts_string, self._accepts_parts, self._argument_objects = self._probe()

    @property
    def text(self) -> str:
        """What the template says: of two, the one for tools too, which tells how calls are written."""
        return "\n".join(source for source in (self.source, self._tool_use_source) if source)

    @property
    def content_format(self) -> Literal["string", "openai"]:
        """Whether the template takes a message's content as a list of parts ("openai") or only as a string."""
        return "openai" if self._accepts_parts else "string"

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt of a conversation.

        `add_generation_prompt` opens the assistant's turn (default: unless the final message is continued);
        `continue_final_message` leaves the last message open, so that the model goes on with it. `kwargs` are further template
        variables. Raises `InvalidRequestError` for messages that the template refuses, and whenever rendering fails.
        """
        reserved = sorted(RESERVED_VARIABLES & set(kwargs))
        if reserved:
            raise InvalidRequestError(f"chat_template_kwargs may not set {', '.join(reserved)}.", "chat_template_kwargs")
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        elif add_generation_prompt and continue_final_message:
            raise InvalidRequestError(
                "add_generation_prompt and continue_final_message exclude each other: a message that goes on has no new turn.",
                "continue_final_message",
            )
        template = self._tool_use if tools else self._plain
        if template is None or self.error is not None:
            raise InvalidRequestError(self.error or _NO_TEMPLATE, "messages")
        prepared = self._prepare(messages)
        if continue_final_message:
            _mark_end(prepared)
        text = self._run(
            template,
            messages=prepared,
            tools=list(tools) if tools else None,
            documents=list(documents) if documents else None,
            add_generation_prompt=add_generation_prompt,
            **kwargs,
        )
        return _cut_at_mark(text) if continue_final_message else text

    def _compile(self, source: str | None) -> jinja2.Template | None:
        if source is None:
            return None
        try:
            return compile_template(self._environment, source)
        except jinja2.TemplateSyntaxError as error:
            self.error = f"The chat template can't be read: line {error.lineno}: {error.message}."
        except RecursionError:
            self.error = "The chat template can't be read: it is nested too deeply."
        return None

    def _run(self, template: jinja2.Template, **variables: Any) -> str:
        try:
            return render_bounded(template, {**self._variables, **variables})
        except InvalidRequestError:
            raise
        except RaisedByTemplateError as error:
            raise InvalidRequestError(f"The chat template refused the messages: {error.message}", "messages") from None
        except Exception as error:  # a template can raise anything that an expression of Python can
            reason = "it recurses too deeply" if isinstance(error, RecursionError) else str(error) or type(error).__name__
            raise InvalidRequestError(f"The chat template failed on these messages: {reason}.", "messages") from error

    def _prepare(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        if isinstance(messages, (str, bytes)) or not messages:
            raise InvalidRequestError("messages must be a list of at least one message.", "messages")
        return [self._prepare_message(index, message) for index, message in enumerate(messages)]

    def _prepare_message(self, index: int, message: Message) -> dict[str, Any]:
        """The message as the template takes it: absent fields left out, content in its format, arguments as objects."""
        name = f"messages[{index}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequestError(f"{name} must be an object with a role, got {message!r:.80}.", name)
        fields = {key: value for key, value in message.items() if value is not None}
        fields["content"] = self._prepare_content(f"{name}.content", message.get("content"))
        reasoning = next((fields[key] for key in _REASONING_NAMES if key in fields), None)
        if reasoning is not None:
            fields = dict.fromkeys(_REASONING_NAMES, reasoning) | fields
        if fields.get("tool_calls"):
            fields["tool_calls"] = [self._prepare_call(f"{name}.tool_calls", call) for call in fields["tool_calls"]]
        else:
            fields.pop("tool_calls", None)
        return fields

    def _prepare_content(self, name: str, content: Any) -> Any:
        if content is None:
            content = ""
        if isinstance(content, str):
            return content if self._accepts_string else [{"type": "text", "text": content}]
        if not isinstance(content, Sequence):
            raise InvalidRequestError(f"{name} must be a string or a list of parts, got {content!r:.80}.", name)
        parts = [_prepare_part(f"{name}[{index}]", part) for index, part in enumerate(content)]
        if self._accepts_parts:
            return parts
        for index, part in enumerate(parts):
            if part.get("type") != "text":
                raise InvalidRequestError(
                    f"{name}[{index}]: this model's chat takes text only, got a part of type {part.get('type')!r}.", name
                )
        return "\n".join(part["text"] for part in parts)

    def _prepare_call(self, name: str, call: Any) -> Any:
        """Arguments come as JSON text; most templates want the object, some the text."""
        if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
            raise InvalidRequestError(f"{name} must hold objects with a function, got {call!r:.80}.", name)
        arguments = call["function"].get("arguments")
        if self._argument_objects:
            if isinstance(arguments, str) or arguments is None:
                arguments = _parse_arguments(name, arguments or "{}")
        elif not isinstance(arguments, str):
            arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": arguments}}

    def _probe(self) -> tuple[bool, bool, bool]:
        """Try what the template takes: a string, a list of parts, tool arguments as an object."""
        if self.error is not None or self._plain is None:
            return True, False, True
        string = self._try(self._plain, [{"role": "user", "content": _PROBE}])
        parts = self._try(self._plain, [{"role": "user", "content": [{"type": "text", "text": _PROBE}]}])
        accepts_parts = _PROBE in parts and "'text'" not in parts and '"text"' not in parts
        return _PROBE in string or not accepts_parts, accepts_parts, self._takes_objects(accepts_parts and _PROBE not in string)

    def _takes_objects(self, wrap: bool) -> bool:
        def conversation(arguments: Any) -> list[dict[str, Any]]:
            call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": arguments}}
            texts: list[Any] = [[{"type": "text", "text": text}] if wrap else text for text in ("q", "")]
            return [{"role": "user", "content": texts[0]}, {"role": "assistant", "content": texts[1], "tool_calls": [call]}]

        template = self._tool_use
        if template is None:
            return True
        as_object, as_text = (self._try(template, conversation(form)) for form in ({_PROBE: 1}, json.dumps({_PROBE: 1})))
        failed_or_repr = not as_object or f"{{'{_PROBE}'" in as_object
        return not (failed_or_repr and _PROBE in as_text)

    def _try(self, template: jinja2.Template, messages: list[dict[str, Any]]) -> str:
        try:
            return self._run(template, messages=messages, tools=None, documents=None, add_generation_prompt=False)
        except InvalidRequestError:
            return ""


def _prepare_part(name: str, part: Any) -> dict[str, Any]:
    """A part of a content list; all spellings of text become `{"type": "text", "text": ...}`."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise InvalidRequestError(f"{name} must be an object with a type, got {part!r:.80}.", name)
    field = _TEXT_PARTS.get(part.get("type", ""))
    if field is None:
        return dict(part)
    if not isinstance(part.get(field), str):
        raise InvalidRequestError(f"{name}.{field} must be a string, got {part.get(field)!r:.80}.", name)
    return {"type": "text", "text": part[field]}


def _parse_arguments(name: str, text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidRequestError(f"{name}: function.arguments must be JSON, got {text!r:.80}.", name) from None
    return value


def _mark_end(messages: list[dict[str, Any]]) -> None:
    """Put the mark behind the last text of the last message."""
    content = messages[-1]["content"]
    if isinstance(content, str):
        messages[-1]["content"] = content + _CUT_MARK
        return
    for part in reversed(content):
        if part.get("type") == "text":
            part["text"] += _CUT_MARK
            return
    raise InvalidRequestError("continue_final_message needs text in the last message.", "continue_final_message")


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_CUT_MARK.rstrip())
    if at < 0:
        raise InvalidRequestError(
            "continue_final_message: this model's chat template leaves out the end of the last message, so it can't be continued.",
            "continue_final_message",
        )
    return text[:at] if text.startswith(_CUT_MARK, at) else text[:at].rstrip()


def load_chat_template(tokenizer: Tokenizer, override: str | Path | None = None) -> ChatTemplate:
    """The chat template to use: `override` (a file, the name of one of the model's templates, or the template itself), or else
    the model's own.

    A model without one gives a `ChatTemplate` that explains this when asked to render. Raises `ConfigError` for an override
    that is not found or does not compile.
    """
    named = tokenizer.chat_templates
    more = {"unk_token": tokenizer.unk_token, "pad_token": tokenizer.pad_token}
    variables = {name: token for name, token in more.items() if token is not None}
    if override is None:
        source, tool_use = named.get("default"), named.get("tool_use")
        return ChatTemplate(source, tokenizer.bos_token, tokenizer.eos_token, tool_use=tool_use, variables=variables)
    source = _read_override(str(override), named)
    template = ChatTemplate(source, tokenizer.bos_token, tokenizer.eos_token, variables=variables)
    if template.error is not None:
        raise ConfigError(f"--chat-template: {template.error}")
    return template


def request_chat_template(tokenizer: Tokenizer, source: str) -> ChatTemplate:
    """The template that a request brings, or the name of one of the model's. Never a file: whoever asks may not read the server's.

    Raises `InvalidRequestError` when it is too long or does not compile.
    """
    if len(source) > MAX_REQUEST_TEMPLATE_CHARS:
        raise InvalidRequestError(f"chat_template may have at most {MAX_REQUEST_TEMPLATE_CHARS} characters.", "chat_template")
    more = {"unk_token": tokenizer.unk_token, "pad_token": tokenizer.pad_token}
    variables = {name: token for name, token in more.items() if token is not None}
    text = tokenizer.chat_templates.get(source, source)
    template = ChatTemplate(text, tokenizer.bos_token, tokenizer.eos_token, variables=variables)
    if template.error is not None:
        raise InvalidRequestError(f"chat_template: {template.error}", "chat_template")
    return template


def _read_override(override: str, named: Mapping[str, str]) -> str:
    if override in named:
        return named[override]
    if "{%" in override or "{{" in override or "\n" in override:
        return override
    try:
        return Path(override).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        names = f", nor one of the model's templates ({', '.join(sorted(named))})" if named else ""
        raise ConfigError(f"--chat-template {override!r} is not a file that can be read ({error}), not a template{names}.") from None
