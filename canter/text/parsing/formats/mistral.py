"""Mistral: a list of objects after a token (tokenizers up to v10), or the token, a name and its arguments for each call."""

from __future__ import annotations

from canter.text.parsing.args.json_body import JsonArguments, JsonCalls
from canter.text.parsing.call_tags import WrittenCalls, json_list
from canter.text.parsing.emitter import mistral_id
from canter.text.parsing.format import Calls, Detection, Family, Named, Rule, State, Thoughts, never, plain_name


def read_header(text: str) -> Named | None:
    """The name; v13 writes an id behind it."""
    name, _, call_id = text.partition("[CALL_ID]")
    named = plain_name(name)
    return Named(named.name, call_id.strip() or None) if named is not None else None


MISTRAL = Calls(
    states={
        "MARKED": State("skip", on_text="HEADER"),
        "LIST": State("body", body=JsonCalls, on_text="CONTENT"),
        "HEADER": State("name", read_name=read_header),
        "ARGUMENTS": State("body", body=JsonArguments, on_text="CONTENT"),
    },
    rules=(
        Rule("CONTENT REASONING LIST ARGUMENTS", "[TOOL_CALLS]", "MARKED"),
        Rule("MARKED", "[", "LIST", keeps=True),
        Rule("MARKED", "{", "LIST", keeps=True),
        Rule("HEADER", "[CALL_ID]", "HEADER"),
        Rule("HEADER", "[ARGS]", "ARGUMENTS"),
        Rule("HEADER", "{", "ARGUMENTS", keeps=True),
    ),
    new_id=mistral_id,
    # The tokenizer's version says which of these a model writes.
    written=WrittenCalls(
        "[TOOL_CALLS]",
        lambda name: (f"[TOOL_CALLS]{name}", f"[TOOL_CALLS]{name}[ARGS]"),
        "",
        also=(
            WrittenCalls(
                "[TOOL_CALLS]", lambda name: f"[TOOL_CALLS]{name}[CALL_ID]", "", number="[a-zA-Z0-9]{9}", opening=lambda _: "[ARGS]"
            ),
            json_list("[TOOL_CALLS]", "", blank=" "),
        ),
    ),
)

FAMILY = Family(
    calls={"mistral": MISTRAL},
    thoughts={"mistral": Thoughts(("[THINK]",), ("[/THINK]",), opens=never)},
    detect=(
        Detection(calls="mistral", template=("[TOOL_CALLS]",)),
        Detection(calls="mistral", thoughts="mistral", template=("[TOOL_CALLS]", "[THINK]")),
    ),
)
