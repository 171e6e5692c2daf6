"""What was thought, said and called at random, written as each format writes it, is read back."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canter.text.parsing.load import load_format
from canter.text.parsing.options import ParseOptions, Tool
from tests.text.parsing.reading import checked, read_transcripts
from tests.text.parsing.test_transcripts import run
from tests.text.parsing.vocabulary import tiny_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "flag": {"type": ["boolean", "null"]},
        "list": {"type": "array", "items": {"type": "integer"}},
        "inner": {"type": "object", "properties": {"a": {"type": "string"}}},
    },
}
TOOLS = tuple(Tool(name, SCHEMA) for name in ("ping", "get_weather"))

# Nothing in these texts looks like a marker of any format: what does is the matter of the transcripts.
PLAIN = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cs", "Cc", "Z"), exclude_characters='<>[]{}"|\\'), min_size=1, max_size=12
)
WORDS = st.lists(PLAIN, min_size=1, max_size=4).map(" ".join).filter(lambda text: text == text.strip() and not text.startswith("thought"))
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": WORDS,
        "count": st.integers(-(10**6), 10**6),
        "flag": st.none() | st.booleans(),
        "list": st.lists(st.integers(0, 9), max_size=3),
        "inner": st.fixed_dictionaries({}, optional={"a": WORDS}),
    },
)
CALLED = st.lists(st.tuples(st.sampled_from(["ping", "get_weather"]), ARGUMENTS), max_size=3)

Called = list[tuple[str, dict[str, Any]]]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _brace(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_brace(inner)}" for key, inner in value.items()) + "}"
    return "[" + ",".join(map(_brace, value)) + "]" if isinstance(value, list) else _json(value)


def _hermes(calls: Called) -> str:
    return "".join(f"\n<tool_call>\n{_json({'name': name, 'arguments': arguments})}\n</tool_call>" for name, arguments in calls)


def _qwen(calls: Called) -> str:
    written = ""
    for name, arguments in calls:
        values = "".join(f"<parameter={key}>\n{_plain(value)}\n</parameter>\n" for key, value in arguments.items())
        written += f"\n<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"
    return written


def _kimi(calls: Called) -> str:
    parts = [
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{_json(arguments)}<|tool_call_end|>"
        for number, (name, arguments) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(parts)}<|tool_calls_section_end|>" if parts else ""


def _glm(calls: Called) -> str:
    pair = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
    return "".join(
        f"\n<tool_call>{name}\n{''.join(pair.format(key, _plain(value)) for key, value in arguments.items())}</tool_call>"
        for name, arguments in calls
    )


def _deepseek_v31(calls: Called) -> str:
    parts = [f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(arguments)}<｜tool▁call▁end｜>" for name, arguments in calls]
    return f"<｜tool▁calls▁begin｜>{''.join(parts)}<｜tool▁calls▁end｜>" if parts else ""


def _dsml(calls: Called) -> str:
    parts = []
    for name, arguments in calls:
        values = []
        for key, value in arguments.items():
            is_text = "true" if isinstance(value, str) else "false"
            values.append(f'<｜DSML｜parameter name="{key}" string="{is_text}">{_plain(value)}</｜DSML｜parameter>\n')
        parts.append(f'<｜DSML｜invoke name="{name}">\n{"".join(values)}</｜DSML｜invoke>\n')
    return f"\n\n<｜DSML｜function_calls>\n{''.join(parts)}</｜DSML｜function_calls>" if parts else ""


def _minimax(calls: Called) -> str:
    parts = [
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{key}">{_plain(value)}</parameter>\n' for key, value in arguments.items())
        + "</invoke>\n"
        for name, arguments in calls
    ]
    return f"\n<minimax:tool_call>\n{''.join(parts)}</minimax:tool_call>" if parts else ""


def _mistral(calls: Called) -> str:
    return "".join(f"[TOOL_CALLS]{name}{_json(arguments)}" for name, arguments in calls)


def _gemma(calls: Called) -> str:
    return "".join(f"<|tool_call>call:{name}{_brace(arguments)}<tool_call|>" for name, arguments in calls)


@dataclass(frozen=True)
class Written:
    """How a format writes: its transcripts' file (for the vocabulary), its thoughts, their markers, its calls."""

    file: str
    thoughts: str
    start: str
    end: str
    render: Callable[[Called], str]


FORMATS = {
    "hermes": Written("hermes", "think", "<think>", "</think>", _hermes),
    "qwen3_coder": Written("qwen3_coder", "qwen3", "<think>", "</think>", _qwen),
    "kimi_k2": Written("kimi_k2", "kimi_k2", "<think>", "</think>", _kimi),
    "glm45": Written("glm45", "glm45", "<think>", "</think>", _glm),
    "deepseek_v31": Written("deepseek_v31", "deepseek_r1", "<think>", "</think>", _deepseek_v31),
    "deepseek_v32": Written("deepseek_v32", "deepseek_r1", "<think>", "</think>", _dsml),
    "minimax_m2": Written("minimax_m2", "minimax_m2", "", "</think>", _minimax),
    "mistral": Written("mistral", "mistral", "[THINK]", "[/THINK]", _mistral),
    "gemma4": Written("gemma4", "gemma4", "<|channel>thought\n", "<channel|>", _gemma),
}
VOCABULARIES = {transcript.file: (transcript.tokens, transcript.special) for transcript in read_transcripts()}


@pytest.mark.parametrize("name", FORMATS)
@given(thought=WORDS, content=st.none() | WORDS, calls=CALLED, data=st.data())
@settings(max_examples=60, deadline=None)
def test_what_was_written_is_read(name: str, thought: str, content: str | None, calls: Called, data: st.DataObject) -> None:
    written = FORMATS[name]
    tokenizer = tiny_tokenizer(*VOCABULARIES[written.file])
    output_format = load_format(tokenizer, None, name, written.thoughts)
    assert output_format is not None
    text = written.start + thought + written.end + (content or "") + written.render(calls)
    expected: list[dict[str, Any]] = [{"reasoning": thought}] + ([{"content": content}] if content else [])
    expected += [{"call": function, "arguments": arguments} for function, arguments in calls]
    options = ParseOptions(tools=TOOLS, tool_choice="auto")
    ids = tokenizer.encode(text, add_special_tokens=False)
    checked(run(output_format.parser(options), [(text, ids)]), expected)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    checked(run(output_format.parser(options), [(part, ()) for part in parts]), expected)
