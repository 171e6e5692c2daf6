"""Conversations to prompts: against transformers, at the edges, and with hostile templates."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from canter.core.errors import ConfigError, InvalidRequestError
from canter.text.chat_template import ChatTemplate, load_chat_template
from tests.text.vocabularies import build, byte_level, byte_level_metadata, small_byte_level

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PARTS = (
    "{% for message in messages %}[{{ message.role }}]{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }};{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
ONLY_PARTS = "{% for m in messages %}{% for part in m.content %}{{ part['text'] }}|{% endfor %}{% endfor %}"
TOOLS = (
    "{{ bos_token }}{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}{% for m in messages %}{{ m.role }}:"
    "{% if m.tool_calls %}{% for call in m.tool_calls %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
)
TEXT_ARGUMENTS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ '```' + c.function.arguments + '```' }}{% endfor %}{% endfor %}"
)
USER = {"role": "user", "content": "Hi <b>é</b>"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}],
}
CONVERSATION = [
    {"role": "system", "content": "S"},
    USER,
    {"role": "assistant", "content": "Hello  "},
    {"role": "user", "content": "More\n"},
]


def render(source: str, messages: list[dict[str, Any]] | None = None, **kwargs: Any) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(messages or [USER], **kwargs)


@pytest.mark.parametrize(
    "source",
    [
        CHATML,
        TOOLS,
        "{%- for m in messages -%}\n    {%- if m.role == 'user' %}\n  U: {{ m.content }}\n{% else %}A: {{ m.content|trim }}\n{% endif %}"
        "{% endfor %}",
        "{% generation %}{{ messages[0].content }}{% endgeneration %}!",
        "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{{ loop.length }}{{ loop.last }}{{ m.role }}"
        "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
        "{{ messages | tojson(indent=2) }}{{ {'b': 1, 'a': '<é>'} | tojson(sort_keys=true) }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + (m.content | length) %}{% endfor %}{{ ns.n }}",
        "{% macro f(m) %}<{{ m.role }}>{% endmacro %}{% for m in messages recursive %}{{ f(m) }}{% endfor %}"
        "{{ '%03d' % 7 }}{{ 'a,b'.split(',') | join('-') }}",
        "{% for m in messages if m.role != 'system' %}{{ m.content.strip() ~ eos_token }}{% else %}none{% endfor %}{{ undefined_name }}",
        "{% for k, v in messages[0].items() %}{{ k }}={{ v }}{% endfor %}{% for x in range(3) %}{{ x }}{% endfor %}"
        "{{ documents }}{{ extra }}",
    ],
)
@pytest.mark.parametrize("add", [True, False])
def test_equals_transformers(source: str, add: bool) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "<&é>"}}]
    documents = [{"title": "t", "text": "x"}]
    expected, _ = render_jinja_template(
        [CONVERSATION],
        tools=tools,
        documents=documents,
        chat_template=source,
        add_generation_prompt=add,
        bos_token="<s>",
        eos_token="</s>",
        extra=3,
    )
    assert render(source, CONVERSATION, tools=tools, documents=documents, add_generation_prompt=add, extra=3) == expected[0]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (CHATML, "string"),
        (PARTS, "openai"),
        (ONLY_PARTS, "openai"),
        ("{{ messages[0]['content'] }}", "string"),
        ("{{ messages | tojson }}", "string"),
        ("{{ raise_exception('no') }}", "string"),
    ],
)
def test_content_format(source: str, expected: str) -> None:
    assert ChatTemplate(source).content_format == expected


def test_parts_are_joined_for_templates_that_take_strings() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, {"type": "refusal", "refusal": "no"}, "c"]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb\nno\nc"
    assert render(PARTS, [{"role": "user", "content": parts}]) == "[user]a;b;no;c;"
    assert render(PARTS) == "[user]Hi <b>é</b>"
    assert render(ONLY_PARTS) == "Hi <b>é</b>|"


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "at least one message"),
        ("hello", "must be a list"),
        (["x"], r"messages\[0\] must be an object with a role"),
        ([{"content": "x"}], "with a role"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content must be a string or a list"),
        ([{"role": "user", "content": [3]}], r"content\[0\] must be an object"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text must be a string"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "takes text only, got a part of type 'image_url'"),
        ([USER, CALL | {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], "must be JSON"),
        ([USER, CALL | {"tool_calls": ["f"]}], "objects with a function"),
    ],
)
def test_messages_that_are_malformed(messages: Any, match: str) -> None:
    with pytest.raises(InvalidRequestError, match=match):
        ChatTemplate(TOOLS).render(messages)


def test_tool_calls() -> None:
    assert render(TOOLS, [USER, CALL]) == '<s>user:Hi <b>é</b>assistant:f{"a": "é"}'
    as_object = CALL | {"tool_calls": [{"function": {"name": "f", "arguments": {"a": "é"}}}]}
    assert render(TOOLS, [USER, as_object]) == render(TOOLS, [USER, CALL])
    assert render(TEXT_ARGUMENTS, [USER, CALL]) == '```{"a": "é"}```'
    assert render(TEXT_ARGUMENTS, [USER, as_object]) == '```{"a": "é"}```'


def test_absent_fields_and_reasoning() -> None:
    source = "{% for m in messages %}{{ m.content }}{{ 'name' in m }}{{ m.reasoning_content }}{{ m.reasoning }}{% endfor %}"
    assert render(source, [{"role": "assistant", "content": None, "name": None, "reasoning": "R"}]) == "FalseRR"


@pytest.mark.parametrize("text", ["the end", "im_end", "a", "", "x  ", " y\n", "<|im_end|>"])
def test_continue_final_message_leaves_it_open(text: str) -> None:
    prompt = render(CHATML, [USER, {"role": "assistant", "content": text}], continue_final_message=True)
    assert prompt == f"<|im_start|>user\nHi <b>é</b><|im_end|>\n<|im_start|>assistant\n{text}"


def test_continue_final_message_of_other_templates() -> None:
    stripping = "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}"
    assert render(stripping, [USER, {"role": "assistant", "content": "x  "}], continue_final_message=True).endswith("><x")
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render(PARTS, parts, continue_final_message=True) == "[assistant]a;b"
    with pytest.raises(InvalidRequestError, match="leaves out the end"):
        render("{{ messages[0].content }}", [USER, USER], continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="needs text"):
        render(PARTS, [{"role": "assistant", "content": []}], continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="exclude each other"):
        render(CHATML, add_generation_prompt=True, continue_final_message=True)


def test_a_template_without_tools_gets_none() -> None:
    assert render("{{ tools is none }}{{ documents is none }}", tools=[], documents=None) == "TrueTrue"


def test_the_clock() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2024, 7, 26))
    assert template.render([USER]) == "26 Jul 2024"


def test_what_the_template_says_reaches_the_user() -> None:
    with pytest.raises(InvalidRequestError, match="refused the messages: roles must alternate") as error:
        render("{{ raise_exception('roles must alternate') }}")
    assert error.value.param == "messages"


@pytest.mark.parametrize("name", ["messages", "tokenize", "chat_template", "bos_token", "conversation"])
def test_reserved_variables(name: str) -> None:
    template = ChatTemplate(CHATML)
    with pytest.raises((InvalidRequestError, TypeError), match=name):
        template.render([USER], **{name: True})


def test_a_model_without_template_says_what_to_do() -> None:
    with pytest.raises(InvalidRequestError, match="--chat-template"):
        load_chat_template(small_byte_level()).render([USER])


def test_a_template_that_does_not_compile() -> None:
    template = ChatTemplate("{% for m in messages %}\n{% if %}")
    with pytest.raises(InvalidRequestError, match="can't be read: line 2"):
        template.render([USER])
    with pytest.raises(ConfigError, match=r"--chat-template: .* line 1"):
        load_chat_template(small_byte_level(), "{% if")


def test_where_templates_come_from(tmp_path: Path) -> None:
    metadata = byte_level_metadata(byte_level()) | {
        "tokenizer.chat_template": "plain{{ bos_token }}",
        "tokenizer.chat_template.tool_use": "tool",
    }
    tokenizer = build(metadata | {"tokenizer.ggml.padding_token_id": 0})
    own = load_chat_template(tokenizer)
    assert own.render([USER]) == "plain<|im_start|>"
    assert own.render([USER], tools=[{"type": "function"}]) == "tool"
    (tmp_path / "t.jinja").write_text("file{{ pad_token }}")
    assert load_chat_template(tokenizer, tmp_path / "t.jinja").render([USER], tools=[{}]) == "file<|endoftext|>"
    assert load_chat_template(tokenizer, str(tmp_path / "t.jinja")).source == "file{{ pad_token }}"
    assert load_chat_template(tokenizer, "tool_use").render([USER]) == "tool"
    assert load_chat_template(tokenizer, "text {{ 1 + 1 }}").render([USER]) == "text 2"
    with pytest.raises(ConfigError, match="'nonesuch' is not a file that can be read"):
        load_chat_template(tokenizer, "nonesuch")


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Four gigabytes of address space more than the process has: a template that gets past its bounds fails here, not the machine."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in messages * 100000000 %}{% endfor %}",
        "{% for i in range(9999) %}{{ 'a' * 1000000 }}{% endfor %}",
        "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ 'x' * 10**11 }}",
        "{{ 'x' | center(10**11) }}",
        "{{ 'x'.ljust(10**11) }}",
        "{{ 'x'.rjust(width=10**11) }}",
        "{{ 'x'.zfill(10**11) }}",
        "{{ '\t'.expandtabs(10**10) }}",
        "{{ '{:>10000000000}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 10**5) }}",
        "{{ '{x:>10000000000}'.format_map({'x': 1}) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '%*d' % (10**10, 1) }}",
        "{{ '%9999999s' | format(1) }}",
        "{{ ('a' * 10**7).replace('a', 'b' * 10**7) }}",
        "{{ ('a' * 10**7) | replace('a', 'b' * 10**7) }}",
        "{{ ('a' * 10**7).join('b' * 10**7) }}",
        "{{ ('b' * 10**7) | join('a' * 10**7) }}",
        "{{ ('\n' * 10**6) | indent(10**6) }}",
        "{{ 1.5 | round(10**9, 'floor') }}",
        "{{ [1] | batch(10**10, 'x') | list }}",
        "{{ [1] | slice(10**10) | list }}",
        "{{ (1).to_bytes(10**11) }}",
        "{{ 'abc'.translate({97: 'xx'}) }}",
        "{{ [1] | tojson(indent=10**10) }}",
        "{{ (':' * 10**6 ~ '}').format() }}",
        "{{ ('<!-- -->' * 10**6) | striptags }}",
        "{{ ([[1]] * 10**6) | sum(start=[]) | length }}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id') }}",
        "{{ namespace.__init__.__globals__['os'] }}",
        "{{ lipsum.__globals__.os }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{% set n = namespace(_Namespace__attrs=1) %}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ ('{0.__class__.__mro__}' | format_map(1)) }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
        "{{ missing.attribute }}",
        "{{ 1 / 0 }}",
        "{{ undefined | tojson }}",
        "{% include 'x' %}",
        "{% import 'os' as os %}",
    ],
)
def test_hostile_templates_end_with_an_error_of_the_request(source: str) -> None:
    with pytest.raises(InvalidRequestError):
        render(source)


def test_ordinary_filters_and_methods_still_work() -> None:
    source = (
        "{{ 'a-b'.replace('-', '+') }}{{ '{:5d}|{x}'.format(3, x=1) }}{{ '%05.1f' % 2.25 }}{{ 'x'.center(3) }}{{ [1, 2] | join(', ') }}"
        "{{ 'a\nb' | indent(2) }}{{ 2.345 | round(1) }}{{ [1, 2, 3] | batch(2) | list }}{{ 'abc' | replace('b', 'x', 1) }}{{ 'a' ~ 1 }}"
        "{{ ','.join(['p', 'q']) }}{{ dict(a=1) | tojson }}{{ [3, 1] | sort }}{{ ('ab' * 2) | upper }}{{ 2 ** 10 }}"
    )
    assert render(source) == 'a+b    3|1002.2 x 1, 2a\n  b2.3[[1, 2], [3]]axca1p,q{"a": 1}[1, 3]ABAB1024'
