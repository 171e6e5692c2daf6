"""Calls as JSON objects or lists of them, each family with markers of its own, and the thoughts of these families."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from canter.text.parsing.args.json_body import JsonCalls
from canter.text.parsing.call_tags import BLANK, Unmarked, WrittenCalls, json_begin, json_list, objects_like, quoted
from canter.text.parsing.format import ANSWER, CONTENT, SKIP, Calls, Detection, Family, Rule, State, Thoughts, never, on_unless_off
from canter.text.parsing.formats.hermes import HERMES

_BODY = State("body", body=JsonCalls, on_text="CONTENT")
_UNMARKED = State("body", body=partial(JsonCalls, declared_only=True), on_text="CONTENT")
_START = State("content", on_text="CONTENT")


def _between(start: str, end: str, written: WrittenCalls, sources: str = "CONTENT REASONING", body: State = _BODY) -> Calls:
    return Calls(
        states={"CALLS": body},
        rules=(Rule(f"{sources} CALLS", start, "CALLS"), Rule("CONTENT CALLS", end, "CONTENT")),
        written=written,
    )


# A list, which the first versions write without a marker too.
GRANITE = Calls(
    states={"START": _START, "CALLS": _BODY, "UNMARKED": _UNMARKED},
    rules=(
        *(Rule("CONTENT REASONING CALLS UNMARKED", marker, "CALLS") for marker in ("<|tool_call|>", "<tool_call>")),
        Rule("CONTENT CALLS", "</tool_call>", "CONTENT"),
        Rule("START", "[", "UNMARKED", keeps=True),
    ),
    initial="START",
    written=replace(
        json_list("<|tool_call|>", "", blank=" "),
        unmarked=Unmarked("[", "]", objects_like(r"\[")),
        also=(json_list("<tool_call>", "", blank=" "),),
    ),
)
GRANITE_20B = Calls(
    states={"CALLS": _BODY},
    rules=(Rule("CONTENT REASONING CALLS", "<function_call>", "CALLS"),),
    written=WrittenCalls("<function_call>", json_begin('<function_call> {"name": '), "}"),
)

# The word is a marker only where a list follows it.
PHI4_MINI = Calls(
    states={"MARKED": SKIP, "CALLS": _BODY},
    rules=(Rule("CONTENT REASONING CALLS", "functools", "MARKED"), Rule("MARKED", "[", "CALLS", keeps=True)),
    written=WrittenCalls("functools[", json_begin(), "}", section="]", separator=", ", unlike=rf"(?s:.*functools{BLANK}+\[.*)"),
)

INTERNLM = Calls(
    states={"ACTION": SKIP, "CALLS": _BODY},
    rules=(
        Rule("CONTENT REASONING CALLS", "<|action_start|>", "ACTION"),
        Rule("ACTION", "<|plugin|>", "CALLS"),
        Rule("ACTION CALLS CONTENT", "<|action_end|>", "CONTENT"),
    ),
    written=WrittenCalls("<|action_start|>", json_begin('<|action_start|><|plugin|>\n{"name": ', ', "parameters": '), "}<|action_end|>"),
)

# In a thought, the model only talks of its calls. Hunyuan writes a list, MiniMax M1 an object a line.
HUNYUAN = _between(
    "<tool_calls>",
    "</tool_calls>",
    replace(
        json_list("<tool_calls>", "</tool_calls>"),
        also=(WrittenCalls("<tool_calls>", json_begin(), "}", section="\n</tool_calls>", opens=("<tool_calls>\n",), separator="\n"),),
    ),
    sources="CONTENT",
)

# A list that begins the answer or follows the thought, bare or fenced; or one that is marked in the way of another family.
XLAM = Calls(
    states={"START": _START, "AFTER": State("skip", on_text="START"), "CALLS": _BODY, "UNMARKED": _UNMARKED, "FENCE": SKIP},
    rules=(
        *(Rule("CONTENT START REASONING CALLS UNMARKED", marker, "CALLS") for marker in ("[TOOL_CALLS]", "<tool_call>")),
        Rule("CONTENT CALLS", "</tool_call>", "CONTENT"),
        *(Rule("START", opener, "UNMARKED", keeps=True) for opener in ("[", "{")),
        Rule("CONTENT START", "```json", "FENCE"),
        *(Rule("FENCE", opener, "UNMARKED", keeps=True) for opener in ("[", "{")),
        Rule("UNMARKED", "```", "CONTENT"),
        Rule("CONTENT", "</think>", "AFTER"),
    ),
    initial="START",
    written=replace(
        json_list("[TOOL_CALLS]", ""),
        unmarked=Unmarked("[", "]", objects_like(r"(?:.*(?:```json|</think>))?(?:[\s\x1c-\x1f]*\[)?")),
        also=(json_list("<tool_call>", "</tool_call>"),),
    ),
)

_COHERE_BODY = State("body", body=partial(JsonCalls, names=("tool_name",), arguments=("parameters",)), on_text="CONTENT")
COHERE = _between(
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    WrittenCalls(
        "<|START_ACTION|>",
        lambda name: '    {"tool_call_id": "',
        "}",
        number="[0-9]{1,4}",
        opening=lambda name: f'", "tool_name": {quoted(name)}, "parameters": ',
        section="\n]<|END_ACTION|>",
        opens=("<|START_ACTION|>[\n",),
        separator=",\n",
        texts=tuple((f"<|START_{word}|>", f"<|END_{word}|>") for word in ("RESPONSE", "TEXT")),
    ),
    body=_COHERE_BODY,
)


def _cohere_thoughts(answer: str) -> Thoughts:
    """`answer`: what the markers around the answer say."""
    start, end = f"<|START_{answer}|>", f"<|END_{answer}|>"
    return Thoughts(
        ("<|START_THINKING|>",), ("<|END_THINKING|>",), opens=never, trims_start=True,
        rules=(Rule(f"CONTENT {ANSWER}", start, ANSWER), Rule("CONTENT", end, CONTENT)),
    )  # fmt: skip


_APERTUS = json_list("<|tools_prefix|>", "<|tools_suffix|>", before="{", between=": ")
_APERTUS_BODY = State("body", body=partial(JsonCalls, key_is_name=True), on_text="CONTENT")

# The header of another message than the answer; the answer itself has none.
GIGACHAT3 = Calls(
    states={"START": _START, "MESSAGE": State("skip", on_text="CONTENT"), "ROLE": SKIP, "CALLS": _BODY},
    rules=(
        Rule("CONTENT REASONING CALLS", "<|function_call|>", "CALLS"),
        Rule("CONTENT CALLS", "<|message_sep|>", "MESSAGE"),
        Rule("START MESSAGE", "function call", "ROLE"),
        Rule("ROLE", "<|role_sep|>", "CALLS"),
    ),
    initial="START",
    written=WrittenCalls(
        "<|message_sep|>",
        json_begin(),
        "}",
        section="",
        opens=("<|message_sep|>\n\nfunction call<|role_sep|>\n",),
        separator=None,
        unlike=rf"(?s:.*function call{BLANK}*<\|role_sep\|>.*)",
        unmarked=Unmarked("function call<|role_sep|>\n", ""),
        texts=(("<|message_sep|>", None),),
        also=(WrittenCalls("<|function_call|>", json_begin('<|function_call|>{"name": '), "}"),),
    ),
)

_EITHER = ("Here is", "Here's")
GRANITE_THOUGHTS = Thoughts(
    tuple(f"{words} my thought process:" for words in _EITHER), tuple(f"{words} my response:" for words in _EITHER),
    opens=never, trims_start=True, takes_strays=False,
)  # fmt: skip

ERNIE_THOUGHTS = Thoughts(
    enabled=on_unless_off("enable_thinking"), trims_start=True,
    rules=(Rule(f"CONTENT {ANSWER}", "<response>", ANSWER), Rule("CONTENT", "</response>", CONTENT, trims=True)),
)  # fmt: skip

HUNYUAN_THOUGHTS = Thoughts(
    enabled=on_unless_off("enable_thinking"), needs_opening=True, opens=never, trims_start=True,
    rules=(Rule(f"CONTENT {ANSWER}", "<answer>", ANSWER), Rule("CONTENT", "</answer>", CONTENT, trims=True)),
)  # fmt: skip

FAMILY = Family(
    calls={
        "granite": GRANITE,
        "granite4": HERMES,
        "granite-20b-fc": GRANITE_20B,
        "phi4_mini_json": PHI4_MINI,
        "internlm": INTERNLM,
        "jamba": _between(
            "<tool_calls>",
            "</tool_calls>",
            WrittenCalls(
                "<tool_calls>", json_begin('    {"name": '), "}", section="\n]</tool_calls>", opens=("<tool_calls>[\n",), separator=",\n"
            ),
        ),
        "xlam": XLAM,
        "hunyuan_a13b": HUNYUAN,
        "minimax": HUNYUAN,  # MiniMax M1
        "ernie45": HERMES,
        "gigachat3": GIGACHAT3,
        "apertus": _between("<|tools_prefix|>", "<|tools_suffix|>", _APERTUS, body=_APERTUS_BODY),
        "cohere_command3": COHERE,
        "cohere_command4": COHERE,
    },
    thoughts={
        "granite": GRANITE_THOUGHTS,
        "ernie45": ERNIE_THOUGHTS,
        "hunyuan_a13b": HUNYUAN_THOUGHTS,
        "cohere_command3": _cohere_thoughts("RESPONSE"),
        "cohere_command4": _cohere_thoughts("TEXT"),
    },
    detect=(
        Detection(calls="granite", template=("<|start_of_role|>", "<|tool_call|>")),
        Detection(calls="granite", thoughts="granite", template=("<|start_of_role|>", "<|tool_call|>", "my thought process:")),
        Detection(calls="granite4", template=("<|start_of_role|>", "<tool_call>"), without=("<|tool_call|>",), weight=1),
        Detection(calls="granite-20b-fc", template=("<function_call>",), without=("<start_function_call>",)),
        Detection(calls="phi4_mini_json", template=("functools[",)),
        Detection(calls="internlm", template=("<|action_start|>", "<|plugin|>")),
        Detection(calls="jamba", template=("<tool_calls>", "<|bom|>")),
        Detection(calls="hunyuan_a13b", thoughts="hunyuan_a13b", template=("<tool_calls>", "<answer>")),
        Detection(calls="ernie45", thoughts="ernie45", template=("<tool_call>", "<response>"), weight=1),
        Detection(calls="gigachat3", template=("<|message_sep|>", "<|role_sep|>", "function call")),
        Detection(calls="apertus", template=("<|tools_prefix|>",)),
        Detection(calls="cohere_command3", thoughts="cohere_command3", template=("<|START_ACTION|>", "<|START_RESPONSE|>")),
        Detection(calls="cohere_command4", thoughts="cohere_command4", template=("<|START_ACTION|>", "<|START_TEXT|>")),
    ),
)
