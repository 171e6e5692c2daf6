"""Thoughts between <think> and </think>, and nothing else."""

from __future__ import annotations

from canter.text.parsing.format import Detection, Family, Thoughts, on_unless_off

# A prompt that doesn't open the thought may still be one of R1's, whose first templates left that to the model: what comes before
# </think> is a thought in any case.
DEEPSEEK_R1 = Thoughts()

THINK = Thoughts(needs_opening=True)

FAMILY = Family(
    thoughts={
        "deepseek_r1": DEEPSEEK_R1,
        "think": THINK,
        "olmo3": THINK,
        "holo2": Thoughts(enabled=on_unless_off("thinking", "enable_thinking")),
    },
    detect=(Detection(thoughts="think", template=("<think>",), tokens=("<think>", "</think>"), weight=-1),),
)
