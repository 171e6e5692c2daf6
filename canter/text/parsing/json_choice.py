"""How an output reads when the request says that a function must be called: a grammar has the model write JSON."""

from __future__ import annotations

from canter.text.parsing.args.json_body import JsonArguments, JsonCalls
from canter.text.parsing.emitter import Emitter
from canter.text.parsing.format import CONTENT, Rule, State
from canter.text.parsing.options import ParseOptions

START = "JSON_START"


def _listed(emitter: Emitter) -> JsonCalls:
    return JsonCalls(emitter, arguments=("parameters", "arguments"))


def _named(emitter: Emitter) -> JsonArguments:
    emitter.name_call(emitter.options.named_tool or "")
    return JsonArguments(emitter)


def choice_states(options: ParseOptions) -> dict[str, State]:
    """States for a request that requires a call: a list of calls, or the bare arguments of the function it names."""
    body = _named if options.tool_choice == "named" else _listed
    return {START: State("content", on_text=CONTENT), "JSON_BODY": State("body", body=body, on_text=CONTENT)}


def choice_rules(options: ParseOptions) -> tuple[Rule, ...]:
    openers = "{" if options.tool_choice == "named" else "[{"
    return tuple(Rule(START, opener, "JSON_BODY", keeps=True) for opener in openers)
