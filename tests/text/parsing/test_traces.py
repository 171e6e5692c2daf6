"""Delta by delta: what goes out when. And faults that other engines' users have met, each under its thread."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest

from canter.text.parsing.args import json_text
from canter.text.parsing.args.brace_body import BraceArguments
from canter.text.parsing.args.element_body import ElementArguments
from canter.text.parsing.args.tagged import TaggedArguments
from canter.text.parsing.events import CallArguments, CallEnd, CallStart, ContentText, Event, ReasoningText
from canter.text.parsing.load import load_format, plain_format
from canter.text.parsing.machine import Machine
from canter.text.parsing.options import ParseOptions, Tool
from canter.text.tokenizer import Tokenizer
from tests.text.parsing.reading import read_transcripts, told
from tests.text.parsing.vocabulary import encode_plain, tiny_tokenizer

TOOL = Tool("f", {"type": "object", "properties": {"count": {"type": "integer"}, "text": {"type": "string"}}})
MARKERS = {transcript.file: (transcript.tokens, transcript.special) for transcript in read_transcripts()}


def parser_of(
    calls: str | None, thoughts: str | None = None, file: str = "", prompt: str = "", **options: Any
) -> tuple[Machine, Tokenizer]:
    tokenizer = tiny_tokenizer(*MARKERS[file or calls or thoughts or ""])
    output_format = load_format(tokenizer, None, calls, thoughts)
    assert output_format is not None
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    return output_format.parser(ParseOptions(**{"tools": (TOOL,), "tool_choice": "auto", **options}), ids, prompt), tokenizer


def feed_each(parser: Machine, tokenizer: Tokenizer, deltas: Sequence[str]) -> list[list[Event]]:
    return [parser.feed(delta, tokenizer.encode(delta, add_special_tokens=False)) for delta in deltas]


def text_only(calls: str | None, deltas: Sequence[str], truncated: bool = False, **more: Any) -> list[dict[str, Any]]:
    parser, _ = parser_of(calls, **more)
    events = [event for delta in deltas for event in parser.feed(delta)]
    return told(events + parser.finish(truncated))


def test_kimi_delta_by_delta() -> None:
    parser, tokenizer = parser_of("kimi_k2")
    deltas = [
        "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.get_weather:0", "<|tool_call_argument_begin|>",
        '{"city":', ' "Tokyo"}', "<|tool_call_end|>", "<|tool_calls_section_end|>", " later text",
    ]  # fmt: skip
    assert feed_each(parser, tokenizer, deltas) == [
        [], [], [], [],
        [CallStart(0, "functions.get_weather:0", "get_weather"), CallArguments(0, '{"city":')],
        [CallArguments(0, ' "Tokyo"')],
        [CallArguments(0, "}"), CallEnd(0)],
        [], [],
    ]  # fmt: skip
    assert parser.finish() == []


def test_qwen3_xml_streams_strings_and_waits_for_the_rest() -> None:
    parser, tokenizer = parser_of("qwen3_xml", file="qwen3_coder")
    start = feed_each(parser, tokenizer, ["<tool_call>", "\n<function=f>", "\n<parameter=count>\n5"])
    assert [event.text for delta in start for event in delta if isinstance(event, CallArguments)] == ['{"count": ']
    assert feed_each(parser, tokenizer, ["\n</parameter>\n<parameter=text>\nhel"]) == [[CallArguments(0, '5, "text": "hel')]]
    assert feed_each(parser, tokenizer, ["lo\n</parameter>"]) == [[CallArguments(0, 'lo"')]]
    assert feed_each(parser, tokenizer, ["\n</function>"]) == [[CallArguments(0, "}"), CallEnd(0)]]


def test_look_alike_text_is_content_once_ids_are_seen() -> None:
    parser, tokenizer = parser_of("hermes")
    prose = "use <tool_call> tags"
    assert told(parser.feed(prose, encode_plain(tokenizer, prose)) + parser.finish()) == [{"content": prose}]


def test_an_end_of_thought_waits_for_its_text() -> None:
    parser, tokenizer = parser_of(None, "deepseek_r1")
    end = tokenizer.token_to_id("</think>")
    assert end is not None
    assert parser.feed("so", [*tokenizer.encode("so far", False), end]) == [ReasoningText("so")]
    assert parser.feed(" far</think>yes", tokenizer.encode("yes", False)) == [ReasoningText(" far"), ContentText("yes")]
    assert parser.num_reasoning_tokens == len(tokenizer.encode("so far", False))


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_thoughts_are_counted_without_their_markers(size: int) -> None:
    parser, tokenizer = parser_of(None, "think")
    ids = tokenizer.encode("<think>Let me see.</think>Yes.", False)
    for at in range(0, len(ids), size):
        parser.feed(tokenizer.decode(ids[at : at + size], False), ids[at : at + size])
    assert parser.num_reasoning_tokens == len(tokenizer.encode("Let me see.", False))


def test_without_a_format_a_required_call_is_read_all_the_same() -> None:
    parser = plain_format(tiny_tokenizer()).parser(ParseOptions(tools=(TOOL,), tool_choice="named", named_tool="f"))
    events = parser.feed('{"text": "a') + parser.feed('b"}') + parser.finish()
    assert told(events)[0]["raw"] == '{"text": "ab"}'


def test_ids_go_on_from_the_conversation() -> None:
    for calls, pattern in (("hermes", r"chatcmpl-tool-[0-9a-f]{32}"), ("mistral", r"[0-9a-zA-Z]{9}")):
        text = '<tool_call>{"name": "f"}</tool_call>' if calls == "hermes" else "[TOOL_CALLS]f{}"
        said = text_only(calls, [text])
        assert re.fullmatch(pattern, said[0]["id"])
    said = text_only("kimi_k2", ['[{"name": "f", "parameters": {}}]'], tool_choice="required", num_previous_calls=3)
    assert said[0]["id"] == "functions.f:3"


# Threads of vLLM's tracker.

HERMES = '<tool_call>{"name": "f", "arguments": {"text": "日本語 é 🎉", "count": 2}}</tool_call>'


@pytest.mark.parametrize("cut", [1, 2, 5, 1000])
def test_19056_unicode_arguments_stay_what_they_are(cut: int) -> None:
    said = text_only("hermes", [HERMES[at : at + cut] for at in range(0, len(HERMES), cut)])
    assert said[0]["raw"] == '{"text": "日本語 é 🎉", "count": 2}'


def test_35421_arguments_written_as_a_string_are_not_escaped_twice() -> None:
    said = text_only("hermes", ['<tool_call>{"name": "f", "arguments": "{\\"count\\": 2}"}</tool_call>'])
    assert json.loads(said[0]["raw"]) == {"count": 2}


@pytest.mark.parametrize("cut", range(1, 40))
def test_43267_and_36056_large_pieces_lose_nothing(cut: int) -> None:
    text = "Hm.<tool_call>\n<function=f>\n<parameter=text>\na = b > c\n</parameter>\n</function>\n</tool_call>"
    said = text_only("qwen3_coder", [text[at : at + cut] for at in range(0, len(text), cut)])
    assert [said[0], json.loads(said[1]["raw"])] == [{"content": "Hm."}, {"text": "a = b > c"}]


def test_45834_a_thought_that_the_prompt_has_opened_is_a_thought() -> None:
    parser, tokenizer = parser_of("qwen3_coder", "qwen3", prompt="<|im_end|>assistant\n<think>\n")
    assert feed_each(parser, tokenizer, ["Hm", "</think>", "Yes"]) == [[ReasoningText("Hm")], [], [ContentText("Yes")]]


@pytest.mark.parametrize("end", ["<", "</", "</｜DSML｜", "</｜DSML｜parameter"])
def test_53227_a_closing_tag_that_was_cut_off_is_no_part_of_the_value(end: str) -> None:
    text = '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="text" string="true">abc'
    said = text_only("deepseek_v32", [text, end], truncated=True)
    assert (said[0]["raw"], said[0]["ended"]) == ('{"text": "abc', False)


def test_52846_and_42878_text_goes_out_while_it_grows() -> None:
    parser, _ = parser_of("deepseek_v32")
    parser.feed('<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="text" string="true">')
    assert [parser.feed(word) for word in ("a ", "b ", "c")] == [[CallArguments(0, word)] for word in ("a ", "b ", "c")]


@pytest.mark.parametrize("truncated", [True, False])
def test_47903_and_47137_a_call_that_was_cut_off_shows_no_markup(truncated: bool) -> None:
    text = 'Hm. <tool_call>{"name": "f", "arguments": {"text": "ab'
    for deltas in ([text], list(text)):
        said = text_only("hermes", deltas, truncated)
        assert said[0] == {"content": "Hm."}
        assert said[1]["raw"].startswith('{"text": "ab') and said[1]["ended"] != truncated
    assert text_only("hermes", ['Hm. <tool_call>{"na'], truncated=True) == [{"content": "Hm."}]


def test_47734_and_27641_no_name_is_given_twice_and_no_bracket_is_missing() -> None:
    text = (
        '<tool_call>\n{"name": "f", "arguments": {"a": {"b": {}}}}\n</tool_call>\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    )
    said = text_only("hermes", list(text))
    assert [(call["call"], call["raw"]) for call in said] == [("f", '{"a": {"b": {}}}'), ("f", "{}")]


def test_48294_nested_braces_do_not_end_a_call() -> None:
    said = text_only("llama3_json", list('{"name": "f", "parameters": {"text": "}}{", "count": 1}}; {"name": "f", "parameters": {}}'))
    assert [call["raw"] for call in said] == ['{"text": "}}{", "count": 1}', "{}"]


@pytest.mark.parametrize("cut", [1, 7, 1000])
def test_48020_and_48342_deepseek_v3_sections_in_pieces(cut: int) -> None:
    call = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"text": "```"}\n```<｜tool▁call▁end｜>'
    text = f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"
    said = text_only("deepseek_v3", [text[at : at + cut] for at in range(0, len(text), cut)])
    assert [(call["call"], call["raw"]) for call in said] == [("f", '{"text": "```"}')]


def test_41967_gemma_tokens_that_come_together() -> None:
    parser, tokenizer = parser_of("gemma4", "gemma4")
    text = '<|channel>thought\nHm.<channel|><|tool_call>call:f{count:1,text:<|"|>a<|"|>}<tool_call|><|tool_call>call:f{}<tool_call|>'
    said = told(parser.feed(text, tokenizer.encode(text, False)) + parser.finish())
    assert [said[0], *[call["raw"] for call in said[1:]]] == [{"reasoning": "Hm."}, '{"count": 1, "text": "a"}', "{}"]


def test_46437_an_output_that_is_no_harmony_is_content() -> None:
    assert text_only("openai", ["Just ", "text"]) == [{"content": "Just text"}]


def test_37184_and_38441_kimi_header_and_arguments_in_one_piece() -> None:
    call = "<|tool_call_begin|>functions.f:2<|tool_call_argument_begin|>{}<|tool_call_end|>"
    text = f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"
    parser, tokenizer = parser_of("kimi_k2", "kimi_k2")
    events = parser.feed("Hm.</think>So." + text, tokenizer.encode("Hm.</think>So." + text, False)) + parser.finish()
    said = told(events)
    assert said[:2] == [{"reasoning": "Hm."}, {"content": "So."}]
    assert (said[2]["id"], said[2]["raw"]) == ("functions.f:2", "{}")


def test_sglang_34214_and_ollama_9632_content_streams_though_there_are_tools() -> None:
    parser, tokenizer = parser_of("hermes")
    assert feed_each(parser, tokenizer, ["The", " answer", " is", " <b"]) == [[ContentText(t)] for t in ("The", " answer", " is", " <b")]


def test_40816_text_before_a_thought_is_content() -> None:
    parser, tokenizer = parser_of(None, "think", prompt="<|im_end|>assistant\n")
    deltas = feed_each(parser, tokenizer, ["Well. ", "<think>", "Hm.", "</think>", "Yes."])
    said = told([event for delta in deltas for event in delta] + parser.finish())
    assert said == [{"content": "Well."}, {"reasoning": "Hm."}, {"content": "Yes."}]


# Work grows with the text, not with its square.

FILLER = 'if (a < b) { return \\"x > y\\"; } // [1, 2]\\n' * 5000  # 200 kB and more, with what could begin markers

STEP = "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
HY3 = "<tool_calls:opensource><tool_call:opensource>f<tool_sep:opensource>"
K3 = '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
M3 = "]<]minimax[>["


def _count_characters(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, counts: list[int]) -> None:
    original = getattr(owner, name)

    def counted(self: Any, text: str, *rest: Any) -> Any:
        counts.append(len(text) - (rest[0] if rest and name != "_take" else 0))
        return original(self, text, *rest)

    monkeypatch.setattr(owner, name, counted)


@pytest.mark.parametrize(
    ("calls", "head", "tail", "escaped"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"text": "', '"}}</tool_call>', True),
        ("kimi_k2", '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"text": "', '"}<|tool_call_end|>', True),
        ("qwen3_coder", "<function=f><parameter=text>", "\n</parameter></function>", False),
        ("glm45", "<tool_call>f<arg_key>text</arg_key><arg_value>", "</arg_value></tool_call>", False),
        ("mistral", '[TOOL_CALLS]f{"text": "', '"}', True),
        ("gemma4", '<|tool_call>call:f{text:<|"|>', '<|"|>}<tool_call|>', False),
        ("functiongemma", "<start_function_call>call:f{text:<escape>", "<escape>}<end_function_call>", False),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": {"text": "', '"}}]', True),
        ("cohere_command4", '<|START_ACTION|>[{"tool_name": "f", "parameters": {"text": "', '"}}]<|END_ACTION|>', True),
        ("apertus", '<|tools_prefix|>[{"f": {"text": "', '"}}]<|tools_suffix|>', True),
        ("dots", '<dots_function_call><invoke name="f"><parameter name="text">', "\n</parameter></invoke></dots_function_call>", False),
        ("step3", f'{STEP}<steptml:invoke name="f"><steptml:parameter name="text">', "\n</steptml:parameter></steptml:invoke>", False),
        ("minicpm5", '<function name="f"><param name="text"><![CDATA[', "]]></param></function>", False),
        ("hy_v3", f"{HY3}<arg_key:opensource>text</arg_key:opensource><arg_value:opensource>", "</arg_value:opensource>", False),
        ("kimi_k3", f'{K3}<|open|>argument key="text" type="string"<|sep|>', "<|close|>argument<|sep|><|close|>call<|sep|>", False),
        ("minimax_m3", f'{M3}<tool_call>{M3}<invoke name="f">{M3}<text>', f"{M3}</text>{M3}</invoke>{M3}</tool_call>", False),
        ("minimax_m3", f'{M3}<tool_call>{M3}<invoke name="f">{M3}<other>', f"{M3}</other>{M3}</invoke>{M3}</tool_call>", False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", [4, 1_000_000])
def test_200_kb_of_arguments_in_linear_work(
    calls: str, head: str, tail: str, escaped: bool, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lexed: list[int] = []
    taken: list[int] = []
    written: list[int] = []
    _count_characters(monkeypatch, Machine, "_lex_slice", lexed)
    _count_characters(monkeypatch, Machine, "_take", taken)
    _count_characters(monkeypatch, json_text.JsonText, "feed", written)
    _count_characters(monkeypatch, TaggedArguments, "feed", written)
    _count_characters(monkeypatch, BraceArguments, "feed", written)
    _count_characters(monkeypatch, ElementArguments, "feed", written)
    value = json.loads(f'"{FILLER}"')
    text = head + (FILLER if escaped else value) + tail
    said = text_only(calls, [text[at : at + size] for at in range(0, len(text), size)])
    assert list(json.loads(said[0]["raw"]).values()) == [value]
    assert len(FILLER) > 200_000
    num_deltas = len(text) // size + 1
    for counts in (lexed, taken, written):
        assert sum(counts) <= 1.5 * len(text) and len(counts) <= 2 * num_deltas + len(text) / 10
