"""Faults that users of vLLM's parsers have met, each under its thread. More of them are in test_traces.py and test_python_calls.py."""

from __future__ import annotations

import json
from typing import Any

import pytest

from canter.text.parsing.events import CallArguments, CallEnd, CallStart
from tests.text.parsing.reading import told
from tests.text.parsing.test_rendered import FORMATS, TOOLS
from tests.text.parsing.test_traces import feed_each, parser_of, text_only

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
TWO = [("get_weather", {"text": "a b", "count": 2}), ("ping", {"list": [1], "inner": {"a": "x"}})]


def kimi_call(header: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{header}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def called(said: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(item["call"], json.loads(item["raw"])) for item in said if "call" in item]


def test_38353_content_between_a_thought_and_the_calls_is_kept() -> None:
    parser, tokenizer = parser_of("kimi_k2", "kimi_k2", prompt="<think>")
    deltas = ["Hm.", "</think>", "First", " I look.", SECTION, kimi_call("functions.f:0", "{}"), SECTION_END]
    said = told([event for events in feed_each(parser, tokenizer, deltas) for event in events] + parser.finish())
    assert said[:2] == [{"reasoning": "Hm."}, {"content": "First I look."}]
    assert called(said) == [("f", {})]


def test_38274_one_call_ends_and_the_next_begins_in_one_delta() -> None:
    first, second = kimi_call("functions.f:0", '{"count": 1}'), kimi_call("functions.f:1", '{"count": 2}')
    parser, tokenizer = parser_of("kimi_k2")
    cut = len(first) - len("1}<|tool_call_end|>")
    rest = first[cut:] + second
    deltas = [SECTION + first[:cut], rest[: rest.index('{"count": 2')], '{"count": 2', "}<|tool_call_end|>" + SECTION_END]
    events = feed_each(parser, tokenizer, deltas)
    assert events[1] == [CallArguments(0, "1}"), CallEnd(0)]
    assert called(told([event for delta in events for event in delta] + parser.finish())) == [("f", {"count": 1}), ("f", {"count": 2})]


def test_37445_a_section_of_more_than_8_kb() -> None:
    text = "x" * 20_000
    whole = SECTION + kimi_call("functions.f:0", json.dumps({"text": text})) + SECTION_END
    for size in (100, len(whole)):
        said = text_only("kimi_k2", [whole[at : at + size] for at in range(0, len(whole), size)])
        assert called(said) == [("f", {"text": text})]


@pytest.mark.parametrize("calls", ["deepseek_v32", "deepseek_v4", "deepseek_v41"])
def test_40801_no_fragment_of_a_marker_is_shown_wherever_it_is_cut(calls: str) -> None:
    text = "So." + FORMATS[calls].render(TWO)
    for cut in range(1, len(text)):
        said = text_only(calls, [text[:cut], text[cut:]], tools=TOOLS)
        assert said[0] == {"content": "So."} and called(said) == TWO


def test_44741_gemma_calls_whose_boundaries_come_in_one_delta() -> None:
    parser, tokenizer = parser_of("gemma4", tools=TOOLS)
    text = FORMATS["gemma4"].render(TWO)
    middle = text.index("a b")
    first, second = feed_each(parser, tokenizer, [text[:middle], text[middle:]])
    assert [type(event) for event in first] == [CallStart, CallArguments]
    assert [type(event) for event in second] == [CallArguments, CallEnd, CallStart, CallArguments, CallEnd]
    assert called(told(first + second + parser.finish())) == TWO


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("lag", [0, 1, 4])
def test_56077_a_draft_of_several_tokens_mangles_no_key(size: int, lag: int) -> None:
    """The ids of a step come together, and the text may come later than they do."""
    parser, tokenizer = parser_of("qwen3_coder", "qwen3", prompt="<think>\n", tools=TOOLS)
    ids = tokenizer.encode("Hm.\n</think>\n" + FORMATS["qwen3_coder"].render(TWO), False)
    texts = [tokenizer.decode([token_id], False) for token_id in ids]
    events, shown = [], 0
    for at in range(0, len(ids), size):
        upto = max(shown, min(at + size, len(ids)) - lag)
        events += parser.feed("".join(texts[shown:upto]), ids[at : at + size])
        shown = upto
    events += parser.feed("".join(texts[shown:]), [])
    assert called(told(events + parser.finish())) == TWO


@pytest.mark.parametrize("calls", FORMATS)
def test_55079_and_48342_where_the_stream_is_cut_changes_no_format(calls: str) -> None:
    """Two calls in one delta, and in two at every place."""
    parser, tokenizer = parser_of(calls, tools=TOOLS)
    ids = tokenizer.encode(FORMATS[calls].render(TWO), False)
    texts = [tokenizer.decode([token_id], False) for token_id in ids]
    for cut in range(len(ids)):
        parser, _ = parser_of(calls, tools=TOOLS)
        events = parser.feed("".join(texts[:cut]), ids[:cut]) + parser.feed("".join(texts[cut:]), ids[cut:])
        assert called(told(events + parser.finish())) == TWO


@pytest.mark.parametrize("calls", FORMATS)
def test_18412_every_call_has_an_id_of_its_own(calls: str) -> None:
    said = text_only(calls, [FORMATS[calls].render(TWO)], tools=TOOLS)
    assert all(item["id"] for item in said) and len({item["id"] for item in said}) == 2


@pytest.mark.parametrize("calls", ["internlm", "gigachat3", "granite", "granite-20b-fc"])
def test_48347_and_47907_a_call_that_comes_in_one_delta(calls: str) -> None:
    parser, tokenizer = parser_of(calls, tools=TOOLS)
    text = FORMATS[calls].render(TWO[:1])
    assert called(told(parser.feed(text, tokenizer.encode(text, False)) + parser.finish())) == TWO[:1]


@pytest.mark.parametrize("calls", ["xlam", "hunyuan_a13b"])
def test_47901_a_call_after_one_without_arguments_keeps_its_own(calls: str) -> None:
    text = FORMATS[calls].render([("ping", {}), TWO[0]])
    assert called(text_only(calls, list(text), tools=TOOLS)) == [("ping", {}), TWO[0]]


def test_31443_a_call_that_is_complete_at_once_has_its_name() -> None:
    parser, tokenizer = parser_of("glm47", file="glm45", tools=TOOLS)
    events = feed_each(parser, tokenizer, ["<tool_call>", "ping", "</tool_call>"])
    assert events[0] == events[1] == []
    assert [type(event) for event in events[2]] == [CallStart, CallArguments, CallEnd]
    assert called(told(events[2])) == [("ping", {})]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_20028_mistral_small_names_its_calls_outside_of_the_object(size: int) -> None:
    text = '[TOOL_CALLS]get_weather[ARGS]{"text": "it\'s {a}", "count": 2}[TOOL_CALLS]ping[ARGS]{}'
    said = text_only("mistral", [text[at : at + size] for at in range(0, len(text), size)], tools=TOOLS)
    assert called(said) == [("get_weather", {"text": "it's {a}", "count": 2}), ("ping", {})]


def inkling(text: str, size: int, prompt: str = "<|message_model|>", **options: Any) -> list[dict[str, Any]]:
    """What is read of Inkling's output, so many tokens at a time."""
    parser, tokenizer = parser_of("inkling", "inkling", prompt=prompt, tools=TOOLS, **options)
    ids = tokenizer.encode(text, False)
    runs = [ids[at : at + size] for at in range(0, len(ids), size)]
    events = [event for run in runs for event in parser.feed(tokenizer.decode(run, skip_special_tokens=False), run)]
    return told(events + parser.finish())


def inkling_call(arguments: str, header: str = "ping") -> str:
    return f'{header}<|content_invoke_tool_json|>{{"name":"ping","args":{arguments}}}<|end_message|>'


INKLING_SIZES = pytest.mark.parametrize("size", [1, 2, 7, 1000])


@INKLING_SIZES
@pytest.mark.parametrize("prompt", ["<|message_model|>", ""])
def test_33181_a_turn_that_opens_with_a_call_shows_no_name(size: int, prompt: str) -> None:
    (call,) = inkling(inkling_call('{"count":1}') + "<|content_model_end_sampling|>", size, prompt)
    assert called([call]) == [("ping", {"count": 1})]


@INKLING_SIZES
def test_32861_text_behind_a_call_stays(size: int) -> None:
    said = inkling(inkling_call("{}") + "<|message_model|><|content_text|>So.<|end_message|>", size)
    assert called(said) == [("ping", {})] and said[1:] == [{"content": "So."}]


@INKLING_SIZES
def test_32861_a_payload_that_is_no_call_is_content_and_hides_no_later_call(size: int) -> None:
    broken = 'ping<|content_invoke_tool_json|>{"name": <|end_message|><|message_model|>'
    said = inkling(broken + inkling_call('{"count":1}'), size)
    assert said[0] == {"content": '{"name":'} and called(said) == [("ping", {"count": 1})] and len(said) == 2


@pytest.mark.parametrize("kept", ["", "{", '{"na', '{"name":"ping"', '{"name":"ping","args"'])
def test_32861_a_call_that_is_cut_off_before_its_arguments_leaves_nothing(kept: str) -> None:
    parser, tokenizer = parser_of("inkling", "inkling", prompt="<|message_model|>", tools=TOOLS)
    events = feed_each(parser, tokenizer, ["ping<|content_invoke_tool_json|>" + kept])
    assert told([event for delta in events for event in delta] + parser.finish(truncated=True)) == []


@INKLING_SIZES
@pytest.mark.parametrize("thoughts", ["inkling", None])
@pytest.mark.parametrize("end", ["<|end_message|>", "<|content_model_end_sampling|>", "<|end_message|><|content_model_end_sampling|>"])
def test_51387_and_49865_the_end_of_a_plain_text_is_not_shown(size: int, thoughts: str | None, end: str) -> None:
    parser, tokenizer = parser_of("inkling", thoughts, prompt="<|message_model|>", tools=TOOLS)
    ids = tokenizer.encode("<|content_text|>Greg lives in Bozeman." + end, False)
    runs = [ids[at : at + size] for at in range(0, len(ids), size)]
    events = [event for run in runs for event in parser.feed(tokenizer.decode(run, skip_special_tokens=False), run)]
    assert told(events + parser.finish()) == [{"content": "Greg lives in Bozeman."}]


@INKLING_SIZES
def test_49876_a_text_and_a_call_without_a_thought(size: int) -> None:
    said = inkling("<|content_text|>Looking.<|end_message|><|message_model|>" + inkling_call('{"count":1}', ""), size)
    assert said[0] == {"content": "Looking."} and called(said) == [("ping", {"count": 1})] and len(said) == 2


MUSE_CALL = "<|message|>" + FORMATS["muse_glimmer"].render([("ping", {"count": 1})]).split("<|message|>")[1]


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_2354_a_header_in_the_midst_of_a_thought_is_not_shown(size: int) -> None:
    text = " to=self<|message|>I ping. to=ping" + MUSE_CALL
    parser, tokenizer = parser_of("muse_glimmer", "muse_glimmer", prompt="<|start|>assistant", tools=TOOLS)
    ids = tokenizer.encode(text, False)
    runs = [ids[at : at + size] for at in range(0, len(ids), size)]
    events = [event for run in runs for event in parser.feed(tokenizer.decode(run, skip_special_tokens=False), run)]
    said = told(events + parser.finish())
    assert said[0] == {"reasoning": "I ping."} and called(said) == [("ping", {"count": 1})] and len(said) == 2


@pytest.mark.parametrize("header", ["<|start|>", "<|start|>assistant", "<|start|>assistant to=", "<|start|>assistant to=user"])
def test_235_a_header_that_is_cut_off_is_not_shown(header: str) -> None:
    said = text_only("muse_glimmer", [" to=self<|message|>Hm.<|eom|>", header], truncated=True, thoughts="muse_glimmer")
    assert said == [{"reasoning": "Hm."}]


def test_51655_json_in_a_text_stays_text() -> None:
    text = " to=get_weather" + FORMATS["muse_glimmer"].render([("get_weather", {"text": '{"span": 1}'})]).split(" to=get_weather")[1]
    assert called(text_only("muse_glimmer", [text], tools=TOOLS)) == [("get_weather", {"text": '{"span": 1}'})]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("inkling", "<|content_thinking|>Hm.<|end_message|><|message_model|>" + inkling_call("{}"), '{"name":"ping","args":{}}'),
        ("muse_glimmer", " to=self<|message|>Hm.<|eom|><|start|>assistant to=ping<|message|><atem:a><|eot|>", "<atem:a>"),
    ],
)
def test_what_is_for_a_function_is_content_where_nobody_reads_calls(name: str, text: str, said: str) -> None:
    assert text_only(None, [text], thoughts=name, tools=()) == [{"reasoning": "Hm."}, {"content": said}]
