"""DeepSeek V3.2 and V4: DSML, elements whose names carry a token, with each value's type in an attribute."""

from __future__ import annotations

from canter.text.parsing.format import GAP, KEY, NAME, SKIP, Calls, Detection, Family, Rule, State, Thoughts, off_unless_on
from canter.text.parsing.options import ParseOptions

_INVOKE, _INVOKE_END = '<｜DSML｜invoke name="', "</｜DSML｜invoke>"
_PARAMETER, _PARAMETER_END = '<｜DSML｜parameter name="', "</｜DSML｜parameter>"


def _dsml(wrapper: str) -> Calls:
    start, end = f"<｜DSML｜{wrapper}>", f"</｜DSML｜{wrapper}>"
    return Calls(
        states={
            "PREAMBLE": SKIP,
            "NAME": NAME,
            "PARAMETERS": GAP,
            "KEY": KEY,
            "TEXT": State("value", value_type="text"),
            "JSON": State("value", value_type="json"),
            "VALUE": State("value"),
            "BETWEEN": State("skip", on_text="CONTENT"),
        },
        rules=(
            Rule("CONTENT REASONING BETWEEN", start, "PREAMBLE"),
            Rule("PREAMBLE BETWEEN PARAMETERS", _INVOKE, "NAME"),
            Rule("NAME", '">', "PARAMETERS"),
            Rule("PARAMETERS TEXT JSON VALUE", _PARAMETER, "KEY"),
            Rule("KEY", '" string="true">', "TEXT"),
            Rule("KEY", '" string="false">', "JSON"),
            Rule("KEY", '">', "VALUE"),
            Rule("TEXT JSON VALUE", _PARAMETER_END, "PARAMETERS"),
            Rule("PARAMETERS TEXT JSON VALUE", _INVOKE_END, "BETWEEN"),
            Rule("PREAMBLE BETWEEN PARAMETERS TEXT JSON VALUE CONTENT", end, "CONTENT"),
        ),
    )


_thinks = off_unless_on("thinking", "enable_thinking")


def _v4_thinks(options: ParseOptions) -> bool:
    effort = options.template_kwargs.get("reasoning_effort", options.reasoning_effort)
    return _thinks(options) and effort != "none"


V32 = _dsml("function_calls")
V4 = _dsml("tool_calls")

FAMILY = Family(
    calls={"deepseek_v32": V32, "deepseek_v4": V4},
    thoughts={"deepseek_v4": Thoughts(enabled=_v4_thinks)},
    detect=(
        Detection(calls="deepseek_v32", thoughts="deepseek_v3", template=("｜DSML｜", "function_calls")),
        Detection(calls="deepseek_v4", thoughts="deepseek_v4", template=("｜DSML｜", "tool_calls"), without=("function_calls",)),
    ),
)
