"""Following a thought through an output's tokens, and stop strings that leave it alone."""

from __future__ import annotations

import pytest

from canter.client.outputs import RequestState
from canter.core.messages import RequestDelta
from canter.core.sampling_params import OutputKind, SamplingParams
from canter.text.thinking import ThoughtWatch
from tests.fakes import fake_tokenizer

START, END = [1], [2, 3]


@pytest.mark.parametrize(
    ("start", "prompt", "tokens", "inside"),
    [
        (START, [9], [1, 5, 2, 3, 6, 1], "1111"),  # a thought at the start, and no second one
        (START, [9], [5, 1, 2, 3], ""),  # an output that begins with anything else has none
        (START, [1, 7], [5, 2, 5, 2, 3, 6], "11111"),  # the prompt has it open
        (START, [1, 2, 3], [5, 6], ""),  # and here closed again
        ([4, 1], [9], [4, 1, 2, 3, 5], "1111"),
        ([4, 1], [9], [4, 5, 2, 3], "1"),  # not its marker after all
        ([], [1], [5, 2, 3], ""),
    ],
)
def test_what_belongs_to_a_thought(start: list[int], prompt: list[int], tokens: list[int], inside: str) -> None:
    watch = ThoughtWatch(start, END, prompt)
    assert "".join(str(int(watch.feed(token))) for token in tokens).rstrip("0") == inside


@pytest.mark.parametrize("in_thoughts", (False, True))
def test_stop_strings_leave_thoughts_alone(in_thoughts: bool) -> None:
    params = SamplingParams(
        stop=["b"],
        stop_in_thoughts=in_thoughts,
        thinking_start_ids=[ord("<")],
        thinking_end_ids=[ord(">")],
        output_kind=OutputKind.FINAL_ONLY,
    )
    state = RequestState("r", None, [ord("x")], params, fake_tokenizer())
    output = state.feed(RequestDelta("r", list(b"<abc>abc")))
    assert output is not None and output.outputs[0].text == ("<a" if in_thoughts else "<abc>a")
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "b")
