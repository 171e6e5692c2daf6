"""What was thought, said and called at random, written as each format writes it, is read back."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canter.text.parsing.formats import CALLS
from canter.text.parsing.load import load_format
from canter.text.parsing.options import ParseOptions, Tool
from tests.text.parsing.reading import checked, read_transcripts
from tests.text.parsing.test_transcripts import distinct, run
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
Render = Callable[[Called], str]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _brace(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_brace(inner, quote)}" for key, inner in value.items()) + "}"
    return "[" + ",".join(_brace(inner, quote) for inner in value) + "]" if isinstance(value, list) else _json(value)


def _objects(calls: Called, name: str = "name", arguments: str = "arguments") -> list[dict[str, Any]]:
    return [{name: called, arguments: given} for called, given in calls]


def _each(start: str, end: str = "", arguments: str = "arguments") -> Render:
    """An object a call, each between markers."""
    return lambda calls: "".join(f"{start}{_json(item)}{end}" for item in _objects(calls, arguments=arguments))


def _listed(start: str, end: str = "", name: str = "name", arguments: str = "arguments") -> Render:
    """One list of all calls."""
    return lambda calls: f"{start}{_json(_objects(calls, name, arguments))}{end}" if calls else ""


def _by_name(calls: Called) -> str:
    return f"<|tools_prefix|>{_json([{name: arguments} for name, arguments in calls])}<|tools_suffix|>" if calls else ""


def _python(start: str, between: str, end: str) -> Render:
    def call(name: str, arguments: dict[str, Any]) -> str:
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"

    return lambda calls: start + between.join(call(*item) for item in calls) + end if calls else ""


def _xml(start: str, end: str, section: str, section_end: str, invoke: str, parameter: str, joint: str = "") -> Render:
    """Elements of elements. `invoke` and `parameter`: the opening tag, with the name as {}; the closing tag after a blank."""

    def element(tags: str, name: str, inner: str) -> str:
        opening, _, closing = tags.partition(" | ")
        return opening.format(name) + inner + closing

    def call(name: str, arguments: dict[str, Any]) -> str:
        inner = "".join(element(parameter, key, _plain(value)) + joint for key, value in arguments.items())
        return start + element(invoke, name, joint + inner) + end

    return lambda calls: section + joint.join(call(*item) for item in calls) + section_end if calls else ""


def _kimi(calls: Called) -> str:
    parts = [
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{_json(arguments)}<|tool_call_end|>"
        for number, (name, arguments) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(parts)}<|tool_calls_section_end|>" if parts else ""


_K3_TYPES = {str: "string", int: "number", bool: "boolean", type(None): "null", list: "array", dict: "object"}


def _kimi_k3(calls: Called) -> str:
    def tag(name: str, attributes: str, inner: str) -> str:
        return f"<|open|>{name}{attributes}<|sep|>{inner}<|close|>{name}<|sep|>"

    parts = []
    for number, (name, arguments) in enumerate(calls, 1):
        values = [tag("argument", f' key="{key}" type="{_K3_TYPES[type(v)]}"', _plain(v)) for key, v in arguments.items()]
        parts.append(tag("call", f' tool="{name}" index="{number}"', "".join(values)))
    return tag("tools", "", "".join(parts)) if parts else ""


def _pairs(start: str, end: str, suffix: str = "", separator: str = "") -> Render:
    def call(name: str, arguments: dict[str, Any]) -> str:
        values = "".join(
            f"<arg_key{suffix}>{key}</arg_key{suffix}>\n<arg_value{suffix}>{_plain(value)}</arg_value{suffix}>\n"
            for key, value in arguments.items()
        )
        return f"<tool_call{suffix}>{name}{separator}\n{values}</tool_call{suffix}>"

    return lambda calls: start + "\n".join(call(*item) for item in calls) + end if calls else ""


def _k2_horizon(calls: Called) -> str:
    def tag(name: str, inner: str) -> str:
        return f"<ifm|{name}>{inner}</ifm|{name}>"

    def call(name: str, arguments: dict[str, Any]) -> str:
        return tag("tool_call", name + "".join(tag("arg_key", key) + tag("arg_value", _plain(v)) for key, v in arguments.items()))

    return tag("tool_calls", "\n".join(call(*item) for item in calls)) if calls else ""


def _deepseek(before: str, after_name: str, end: str) -> Render:
    def call(name: str, arguments: dict[str, Any]) -> str:
        return f"<｜tool▁call▁begin｜>{before}{name}{after_name}{_json(arguments)}{end}<｜tool▁call▁end｜>"

    return lambda calls: f"<｜tool▁calls▁begin｜>{''.join(call(*item) for item in calls)}<｜tool▁calls▁end｜>" if calls else ""


def _dsml(wrapper: str, blank: str = "") -> Render:
    def element(name: str, attributes: str, inner: str) -> str:
        return f"<｜DSML｜{blank}{name}{attributes}>{inner}</｜DSML｜{blank}{name}>\n"

    def call(name: str, arguments: dict[str, Any]) -> str:
        values = [
            element("parameter", f' name="{key}" string="{_json(isinstance(value, str))}"', _plain(value))
            for key, value in arguments.items()
        ]
        return element("invoke", f' name="{name}"', "\n" + "".join(values))

    return lambda calls: "\n\n" + element(wrapper, "", "\n" + "".join(call(*item) for item in calls)) if calls else ""


def _mistral(calls: Called) -> str:
    return "".join(f"[TOOL_CALLS]{name}{_json(arguments)}" for name, arguments in calls)


def _gemma(start: str, end: str, quote: str) -> Render:
    return lambda calls: "".join(f"{start}call:{name}{_brace(arguments, quote)}{end}" for name, arguments in calls)


def _elements(name: str, value: Any) -> str:
    """MiniMax M3's: an element of elements for an object or a list."""
    mark = "]<]minimax[>["
    if isinstance(value, dict):
        inner = "".join(_elements(key, item) for key, item in value.items())
    elif isinstance(value, list):
        inner = "".join(_elements("item", item) for item in value)
    else:
        inner = _plain(value)
    return f"{mark}<{name}>{inner}{mark}</{name}>\n"


def _minimax_m3(calls: Called) -> str:
    parts = []
    for name, arguments in calls:
        inner = "".join(_elements(key, value) for key, value in arguments.items())
        parts.append(f']<]minimax[>[<invoke name="{name}">\n{inner}]<]minimax[>[</invoke>\n')
    return f"\n]<]minimax[>[<tool_call>\n{''.join(parts)}]<]minimax[>[</tool_call>" if parts else ""


def _harmony(calls: Called) -> str:
    header = "<|start|>assistant<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"
    return "".join(header.format(name) + _json(arguments) + "<|call|>" for name, arguments in calls)


def _inkling(calls: Called) -> str:
    message = '<|message_model|>{0}<|content_invoke_tool_json|>{{"name":"{0}","args":{1}}}<|end_message|>'
    return "".join(message.format(name, _json(arguments)) for name, arguments in calls)


def _muse(calls: Called) -> str:
    render = _xml("", "", "<atem:function_calls>\n", "\n</atem:function_calls>", *_ATEM)
    return "".join(f"<|start|>assistant to={call[0]}<|message|>{render([call])}<|eot|>" for call in calls)


@dataclass(frozen=True)
class Written:
    """How a format writes: its thoughts' name and their markers, its calls, and what stands around content. `leads`: calls are calls only
    where no content comes before them."""

    thoughts: str
    start: str
    end: str
    render: Render
    around: tuple[str, str] = ("", "")
    leads: bool = False


def _thinking(render: Render, thoughts: str = "think", **more: Any) -> Written:
    return Written(thoughts, "<think>", "</think>", render, **more)


_XML = ("<function={}> | </function>", "<parameter={}>\n | \n</parameter>", "\n")
_INVOKE = ('<invoke name="{}"> | </invoke>', '<parameter name="{}"> | </parameter>', "\n")
_STEP = ("<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_end｜>", "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>")
_STEP_XML = ('<steptml:invoke name="{}"> | </steptml:invoke>', '<steptml:parameter name="{}"> | </steptml:parameter>', "\n")
_MINICPM = ('<function name="{}"> | </function>', '<param name="{}"><![CDATA[ | ]]></param>', "\n")
_ATEM = ('<atem:invoke name="{}"> | </atem:invoke>', '<atem:parameter name="{}"> | </atem:parameter>', "\n")
_COHERE = _listed("<|START_ACTION|>", "<|END_ACTION|>", "tool_name", "parameters")
_K3 = ("<|open|>think<|sep|>", "<|close|>think<|sep|>")

FORMATS = {
    "apertus": _thinking(_by_name),
    "cohere_command3": Written(
        "cohere_command3", "<|START_THINKING|>", "<|END_THINKING|>", _COHERE, ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    ),
    "cohere_command4": Written("cohere_command4", "<|START_THINKING|>", "<|END_THINKING|>", _COHERE, ("<|START_TEXT|>", "<|END_TEXT|>")),
    "deepseek_v3": _thinking(_deepseek("function<｜tool▁sep｜>", "\n```json\n", "\n```"), "deepseek_r1"),
    "deepseek_v31": _thinking(_deepseek("", "<｜tool▁sep｜>", ""), "deepseek_v3"),
    "deepseek_v32": _thinking(_dsml("function_calls"), "deepseek_v3"),
    "deepseek_v4": _thinking(_dsml("tool_calls"), "deepseek_v4"),
    "deepseek_v41": _thinking(_dsml("calls", " "), "deepseek_v41"),
    "dots": _thinking(_xml("", "", "<dots_function_call>", "</dots_function_call>", *_INVOKE)),
    "ernie45": _thinking(_each("<tool_call>\n", "\n</tool_call>"), "ernie45", around=("<response>\n", "\n</response>")),
    "functiongemma": _thinking(_gemma("<start_function_call>", "<end_function_call>", "<escape>")),
    "gemma4": Written("gemma4", "<|channel>thought\n", "<channel|>", _gemma("<|tool_call>", "<tool_call|>", '<|"|>')),
    "gigachat3": _thinking(_each("<|function_call|>")),
    "glm45": _thinking(_pairs("\n", ""), "glm45"),
    "granite": Written("granite", "Here is my thought process:", "Here is my response:", _listed("<|tool_call|>")),
    "granite4": _thinking(_each("<tool_call>\n", "\n</tool_call>")),
    "granite-20b-fc": _thinking(_each("<function_call> ")),
    "hermes": _thinking(_each("\n<tool_call>\n", "\n</tool_call>")),
    "hunyuan_a13b": _thinking(_listed("<tool_calls>", "</tool_calls>"), "hunyuan_a13b", around=("<answer>\n", "\n</answer>")),
    "hy_v3": Written(
        "hy_v3", "<think:opensource>", "</think:opensource>",
        _pairs("<tool_calls:opensource>\n", "\n</tool_calls:opensource>", ":opensource", "<tool_sep:opensource>"),
    ),
    "hy_v4": Written(
        "hy_v4", "<think:opensource>", "</think:opensource>", _pairs("<tool_calls:opensource>", "</tool_calls:opensource>", ":opensource")
    ),
    "inkling": Written(
        "inkling", "<|content_thinking|>", "<|end_message|>", _inkling, ("<|message_model|><|content_text|>", "<|end_message|>")
    ),
    "internlm": _thinking(_each("<|action_start|><|plugin|>\n", "<|action_end|>", "parameters")),
    "jamba": _thinking(_listed("<tool_calls>", "</tool_calls>")),
    "k2_horizon": Written("k2_horizon", "<ifm|think>", "</ifm|think>", _k2_horizon),
    "kimi_k2": _thinking(_kimi, "kimi_k2"),
    "kimi_k3": Written("kimi_k3", *_K3, _kimi_k3, ("<|open|>response<|sep|>", "<|close|>response<|sep|>")),
    "lfm2": _thinking(_python("<|tool_call_start|>[", ", ", "]<|tool_call_end|>")),
    "ling3": _thinking(_pairs("\n", ""), "ling3"),
    "llama3_json": _thinking(lambda calls: "<|python_tag|>" + "; ".join(map(_json, _objects(calls))) if calls else ""),
    "llama4_json": _thinking(lambda calls: "<|python_start|>" + "; ".join(map(_json, _objects(calls))) + "<|python_end|>" if calls else ""),
    "llama4_pythonic": _thinking(_python("<|python_start|>[", ", ", "]<|python_end|>")),
    "longcat": _thinking(_each("<longcat_tool_call>\n", "\n</longcat_tool_call>")),
    "minicpm5": _thinking(_xml("", "", "", "", *_MINICPM)),
    "minimax_m2": Written("minimax_m2", "", "</think>", _xml("", "", "\n<minimax:tool_call>\n", "\n</minimax:tool_call>", *_INVOKE)),
    "minimax_m3": Written("minimax_m3", "<mm:think>", "</mm:think>", _minimax_m3),
    "mistral": Written("mistral", "[THINK]", "[/THINK]", _mistral),
    "muse_glimmer": Written(
        "muse_glimmer", " to=self<|message|>", "<|eom|>", _muse, ("<|start|>assistant to=user<|message|>", "<|eom|>")
    ),
    "olmo3": _thinking(_python("<function_calls>", "\n", "</function_calls>"), "olmo3"),
    "openai": Written(
        "openai_gptoss", "<|channel|>analysis<|message|>", "<|end|>", _harmony,
        ("<|start|>assistant<|channel|>final<|message|>", "<|end|>"),
    ),
    "phi4_mini_json": _thinking(_listed("functools")),
    "poolside_v1": _thinking(_pairs("\n", ""), "poolside_v1"),
    "pythonic": _thinking(_python("[", ", ", "]"), leads=True),
    "qwen3_coder": _thinking(_xml("\n<tool_call>\n", "\n</tool_call>", "", "", *_XML), "qwen3"),
    "seed_oss": Written(
        "seed_oss", "<seed:think>", "</seed:think>", _xml("\n<seed:tool_call>\n", "\n</seed:tool_call>", "", "", *_XML)
    ),
    "step3": _thinking(_xml(*_STEP, *_STEP_XML), "step3"),
    "step3p5": _thinking(_xml("\n<tool_call>\n", "\n</tool_call>", "", "", *_XML), "step3p5"),
    "xlam": _thinking(_listed("[TOOL_CALLS]")),
}  # fmt: skip
VOCABULARIES = {transcript.file: (transcript.tokens, transcript.special) for transcript in read_transcripts()}


def test_every_format_is_written() -> None:
    assert set(FORMATS) >= distinct(CALLS)


@pytest.mark.parametrize("name", FORMATS)
@given(thought=WORDS, content=st.none() | WORDS, calls=CALLED, data=st.data())
@settings(max_examples=60, deadline=None)
def test_what_was_written_is_read(name: str, thought: str, content: str | None, calls: Called, data: st.DataObject) -> None:
    written = FORMATS[name]
    tokenizer = tiny_tokenizer(*VOCABULARIES[name])
    output_format = load_format(tokenizer, None, name, written.thoughts)
    assert output_format is not None
    if written.leads and calls:
        content = None
    answer = content.join(written.around) if content else ""
    text = written.start + thought + written.end + answer + written.render(calls)
    expected: list[dict[str, Any]] = [{"reasoning": thought}] + ([{"content": content}] if content else [])
    expected += [{"call": function, "arguments": arguments} for function, arguments in calls]
    options = ParseOptions(tools=TOOLS, tool_choice="auto", template_kwargs={"thinking": True}, reasoning_effort="high")
    ids = tokenizer.encode(text, add_special_tokens=False)
    checked(run(output_format.parser(options), [(text, ids)]), expected)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    checked(run(output_format.parser(options), [(part, ()) for part in parts]), expected)
