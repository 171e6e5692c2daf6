"""DeepSeek V3.2 to V4.1: DSML, elements whose names carry a token, with each value's type in an attribute."""

from __future__ import annotations

from canter.text.parsing.argument_tags import WrittenArguments
from canter.text.parsing.call_tags import WrittenCalls
from canter.text.parsing.format import GAP, KEY, NAME, SKIP, Calls, Detection, Family, Rule, State, Thoughts, off_unless_on
from canter.text.parsing.options import ParseOptions

_TOKEN = "｜DSML｜"


def _dsml(wrapper: str, blank: str = "") -> Calls:
    """`blank`: what stands between the token and an element's name."""

    def element(name: str) -> tuple[str, str]:
        return f'<{_TOKEN}{blank}{name} name="', f"</{_TOKEN}{blank}{name}>"

    start, end = f"<{_TOKEN}{blank}{wrapper}>", f"</{_TOKEN}{blank}{wrapper}>"
    (invoke, invoke_end), (parameter, parameter_end) = element("invoke"), element("parameter")
    arguments = WrittenArguments(
        parameter,
        "",
        f"{parameter_end}\n",
        (parameter_end, parameter, invoke_end, end),
        lambda kind: f'" string="{"true" if kind == "string" else "false"}">',
    )
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
            Rule("PREAMBLE BETWEEN PARAMETERS", invoke, "NAME"),
            Rule("NAME", '">', "PARAMETERS"),
            Rule("PARAMETERS TEXT JSON VALUE", parameter, "KEY"),
            Rule("KEY", '" string="true">', "TEXT"),
            Rule("KEY", '" string="false">', "JSON"),
            Rule("KEY", '">', "VALUE"),
            Rule("TEXT JSON VALUE", parameter_end, "PARAMETERS"),
            Rule("PARAMETERS TEXT JSON VALUE", invoke_end, "BETWEEN"),
            Rule("PREAMBLE BETWEEN PARAMETERS TEXT JSON VALUE CONTENT", end, "CONTENT"),
        ),
        preserved=(_TOKEN,),
        written=WrittenCalls(
            start, lambda name: f'{invoke}{name}">\n', f"{invoke_end}\n", section=end, opens=(f"{start}\n",), arguments=arguments
        ),
    )


_thinks = off_unless_on("thinking", "enable_thinking")


def _v4_thinks(options: ParseOptions) -> bool:
    effort = options.template_kwargs.get("reasoning_effort", options.reasoning_effort)
    return _thinks(options) and effort != "none"


V32 = _dsml("function_calls")
V4 = _dsml("tool_calls")
V41 = _dsml("calls", blank=" ")
V4_THOUGHTS = Thoughts(enabled=_v4_thinks)

FAMILY = Family(
    calls={"deepseek_v32": V32, "deepseek_v4": V4, "deepseek_v41": V41},
    thoughts={"deepseek_v4": V4_THOUGHTS, "deepseek_v41": V4_THOUGHTS},
    detect=(
        Detection(calls="deepseek_v32", thoughts="deepseek_v3", template=("｜DSML｜", "function_calls")),
        Detection(calls="deepseek_v4", thoughts="deepseek_v4", template=("｜DSML｜", "tool_calls"), without=("function_calls",)),
        Detection(calls="deepseek_v41", thoughts="deepseek_v41", template=("｜DSML｜ calls",), weight=1),
    ),
)
