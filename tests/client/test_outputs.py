from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canter.client.outputs import RequestGroup, RequestState, fan_out, merge_outputs
from canter.core.errors import EngineError, QueueFullError
from canter.core.messages import RequestDelta, RequestTimes
from canter.core.plan import TokenLogprobs
from canter.core.sampling_params import OutputKind, SamplingParams
from tests.fake_core import EOS_ID, fake_logprobs
from tests.fakes import fake_tokenizer

DELTA, CUMULATIVE, FINAL = OutputKind.DELTA, OutputKind.CUMULATIVE, OutputKind.FINAL_ONLY


def state(kind: OutputKind = DELTA, prompt: bytes = b"p", **params) -> RequestState:
    sampling = SamplingParams(output_kind=kind, max_tokens=100, eos_token_ids=[EOS_ID], **params)
    return RequestState("r", "p", list(prompt), sampling, fake_tokenizer(), arrival_time=10.0)


def delta(text: bytes | list[int], finish: str | None = None, **more) -> RequestDelta:
    return RequestDelta("r", list(text), finish, **more)


def feed_all(request: RequestState, deltas: list[RequestDelta]):
    return [output for output in map(request.feed, deltas) if output is not None]


def test_delta_outputs_hold_only_what_is_new() -> None:
    outputs = feed_all(state(), [delta(b"ab"), delta(b"c"), delta(b"d", "length")])
    assert [o.outputs[0].text for o in outputs] == ["ab", "c", "d"]
    assert [o.outputs[0].token_ids for o in outputs] == [[97, 98], [99], [100]]
    assert [o.finished for o in outputs] == [False, False, True]
    assert outputs[-1].outputs[0].finish_reason == "length"
    assert outputs[-1].outputs[0].finished()


def test_cumulative_outputs_hold_everything_and_stay_as_they_were() -> None:
    outputs = feed_all(
        state(CUMULATIVE, logprobs=0), [delta(b"a", logprobs=[fake_logprobs(97, 0)]), delta(b"b", logprobs=[fake_logprobs(98, 0)])]
    )
    assert [o.outputs[0].text for o in outputs] == ["a", "ab"]
    assert [o.outputs[0].token_ids for o in outputs] == [[97], [97, 98]]
    assert [len(o.outputs[0].logprobs) for o in outputs] == [1, 2]


def test_final_output_comes_once() -> None:
    outputs = feed_all(state(FINAL), [delta(b"ab"), delta(b"c", "stop")])
    assert len(outputs) == 1
    assert outputs[0].outputs[0].text == "abc"


def test_a_character_is_shown_when_its_last_byte_has_come() -> None:
    outputs = feed_all(state(), [delta([b]) for b in "é€".encode()] + [delta([EOS_ID], "stop")])
    assert [(o.outputs[0].text, o.outputs[0].token_ids) for o in outputs] == [
        ("é", [195, 169]),
        ("€", [226, 130, 172]),
        ("", [EOS_ID]),
    ]


def test_bytes_that_end_within_a_character_are_not_lost() -> None:
    assert feed_all(state(), [delta(b"\xe2\x82", "length")])[0].outputs[0].text == "�"


def test_a_stop_string_ends_the_output_and_asks_for_an_abort() -> None:
    request = state(stop=["END"])
    outputs = feed_all(request, [delta(b"xE"), delta(b"N"), delta(b"Dy")])
    assert [o.outputs[0].text for o in outputs] == ["x", ""]
    last = outputs[-1].outputs[0]
    assert (last.finish_reason, last.stop_reason) == ("stop", "END")
    assert outputs[-1].finished and request.needs_abort
    assert [t for o in outputs for t in o.outputs[0].token_ids] == list(b"xEND")
    assert request.feed(delta([], "abort")) is None


def test_a_stop_string_may_stay_in_the_output() -> None:
    outputs = feed_all(state(FINAL, stop="END", include_stop_str_in_output=True), [delta(b"xENDy")])
    assert outputs[0].outputs[0].text == "xEND"


def test_no_chunk_comes_while_text_is_held_back_and_its_tokens_come_with_it() -> None:
    request = state(stop=["abcd"], logprobs=0)
    steps = [request.feed(delta([b], logprobs=[fake_logprobs(b, 0)])) for b in b"abcx"]
    assert steps[:3] == [None, None, None]
    assert steps[3].outputs[0].text == "abcx"
    assert steps[3].outputs[0].token_ids == list(b"abcx")
    assert len(steps[3].outputs[0].logprobs) == 4


def test_text_held_back_comes_out_at_the_end() -> None:
    outputs = feed_all(state(stop=["xyz"]), [delta(b"axy"), delta([EOS_ID], "stop")])
    assert "".join(o.outputs[0].text for o in outputs) == "axy"


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    outputs = feed_all(state(FINAL, stop=["b"], min_tokens=3), [delta([c]) for c in b"abcdbz"])
    assert outputs[0].outputs[0].text == "abcd"


def test_the_token_that_stopped_is_counted_but_not_shown() -> None:
    outputs = feed_all(state(FINAL, stop_token_ids=[100]), [delta(b"ab"), delta(b"cd", "stop", stop_reason=100)])
    assert outputs[0].outputs[0].text == "abc"
    assert outputs[0].outputs[0].token_ids == list(b"abcd")
    assert outputs[0].outputs[0].stop_reason == 100
    shown = feed_all(state(FINAL, stop_token_ids=[100], include_stop_str_in_output=True), [delta(b"cd", "stop", stop_reason=100)])
    assert shown[0].outputs[0].text == "cd"


def test_special_tokens_are_left_out_unless_wanted() -> None:
    assert feed_all(state(FINAL), [delta([97, 257, 98], "length")])[0].outputs[0].text == "ab"
    assert feed_all(state(FINAL, skip_special_tokens=False), [delta([97, 257, 98], "length")])[0].outputs[0].text == "a<user>b"


def test_without_detokenization_tokens_still_stream() -> None:
    outputs = feed_all(state(detokenize=False), [delta(b"ab"), delta(b"c", "length")])
    assert [(o.outputs[0].text, o.outputs[0].token_ids) for o in outputs] == [("", [97, 98]), ("", [99])]


def test_logprobs_name_the_chosen_token_first_and_rank_the_rest() -> None:
    position = TokenLogprobs([120, 97, 120], [-2.0, -0.1, -2.0], 2)
    output = state(FINAL, logprobs=2).feed(delta(b"x", "length", logprobs=[position])).outputs[0]
    [entries] = output.logprobs
    assert list(entries) == [120, 97]
    assert (entries[120].logprob, entries[120].rank, entries[120].decoded_token) == (-2.0, 2, "x")
    assert (entries[97].logprob, entries[97].rank, entries[97].decoded_token) == (-0.1, 1, "a")
    assert output.cumulative_logprob == -2.0


def test_prompt_logprobs_begin_with_none_and_gather_over_deltas() -> None:
    request = state(prompt=b"abc", prompt_logprobs=1)
    assert request.feed(RequestDelta("r", [], prompt_logprobs=[fake_logprobs(98, 1)])) is None
    output = request.feed(RequestDelta("r", [120], prompt_logprobs=[fake_logprobs(99, 1)]))
    assert [None if p is None else list(p) for p in output.prompt_logprobs] == [None, [98], [99]]
    assert request.feed(delta(b"y")).prompt_logprobs is None


def test_times_become_metrics() -> None:
    output = state().feed(delta(b"a", "length", times=RequestTimes(11.0, 12.0, 13.5, 14.0), num_cached_tokens=7))
    metrics = output.metrics
    assert (metrics.arrival_time, metrics.queued_ts, metrics.scheduled_ts) == (10.0, 11.0, 12.0)
    assert (metrics.first_token_ts, metrics.last_token_ts, metrics.first_token_latency) == (13.5, 14.0, 3.5)
    assert metrics.num_generation_tokens == 1
    assert output.num_cached_tokens == 7


@pytest.mark.parametrize(
    ("name", "kind"), [("QueueFullError", QueueFullError), (None, EngineError), ("os", EngineError), ("Exception", EngineError)]
)
def test_errors_come_as_their_own_class(name: str | None, kind: type) -> None:
    output = state().feed(delta([], "error", error="why", error_type=name))
    assert type(output.error) is kind and str(output.error) == "why"
    assert output.finished and output.outputs[0].finish_reason == "error"


def test_fan_out_gives_ids_and_seeds() -> None:
    params = SamplingParams(n=3, seed=5, prompt_logprobs=1, output_kind=FINAL)
    children = fan_out("r", params)
    assert [child_id for child_id, _ in children] == ["0_r", "1_r", "2_r"]
    assert [child.seed for _, child in children] == [5, 6, 7]
    assert [child.n for _, child in children] == [1, 1, 1]
    assert [child.prompt_logprobs for _, child in children] == [1, None, None]
    assert fan_out("r", SamplingParams()) == [("r", SamplingParams())]


def test_fan_out_seeds_stay_in_range() -> None:
    seeds = [child.seed for _, child in fan_out("r", SamplingParams(n=3, seed=2**63 - 1))]
    assert seeds == [2**63 - 1, -(2**63), -(2**63) + 1]
    assert None not in [child.seed for _, child in fan_out("r", SamplingParams(n=4, seed=-3))]


def group(kind: OutputKind) -> RequestGroup:
    return RequestGroup("r", "p", [1], SamplingParams(n=2, output_kind=kind, max_tokens=9), fake_tokenizer())


def test_a_group_streams_its_choices_under_one_id() -> None:
    both = group(DELTA)
    first = both.feed(RequestDelta("1_r", [98]))
    assert (first.request_id, first.outputs[0].index, first.finished) == ("r", 1, False)
    assert not both.feed(RequestDelta("1_r", [98], "length")).finished
    assert both.unfinished_ids == ["0_r"]
    assert both.feed(RequestDelta("0_r", [97], "length")).finished
    assert both.finished


def test_a_group_gathers_all_choices() -> None:
    cumulative = group(CUMULATIVE)
    cumulative.feed(RequestDelta("1_r", [98]))
    assert [o.text for o in cumulative.feed(RequestDelta("0_r", [97])).outputs] == ["a", "b"]
    final = group(FINAL)
    assert final.feed(RequestDelta("1_r", [98], "length")) is None
    assert [o.text for o in final.feed(RequestDelta("0_r", [97], "stop")).outputs] == ["a", "b"]


@given(st.text(max_size=40), st.lists(st.integers(1, 6), min_size=1, max_size=60), st.sampled_from([[], ["ab"], ["b", "cc"], ["é"]]))
def test_merged_deltas_say_what_single_ones_say(text: str, cuts: list[int], stop: list[str]) -> None:
    """However tokens are dealt out to deltas, and however deltas are merged, the whole is the final output."""
    data = list(text.encode())
    pieces, at = [], 0
    for size in cuts:
        pieces.append(data[at : at + size])
        at += size
    pieces.append(data[at:])
    deltas = [delta(piece) for piece in pieces] + [delta([EOS_ID], "stop")]
    whole = feed_all(state(FINAL, stop=stop), deltas)[0].outputs[0]
    outputs = feed_all(state(DELTA, stop=stop), deltas)
    merged = outputs[0]
    for output in outputs[1:]:
        merged = merge_outputs(merged, output, DELTA)
    assert merged.outputs[0] == whole
    assert merged.finished


def test_choices_share_what_watches_for_their_stop_strings() -> None:
    params = SamplingParams(n=3, max_tokens=100, stop=["xy" * 50, "cd"], output_kind=DELTA)
    groups = [RequestGroup(name, None, [97], params, fake_tokenizer()) for name in ("r", "s")]
    states = [choice for group in groups for choice in group.states.values()]
    tables = {id(choice._stop._next) for choice in states if choice._stop is not None}
    assert len(tables) == 1
    first, second = states[:2]
    first.feed(delta(b"abc"))
    second.feed(delta(b"d"))
    assert not second.finished
    first.feed(delta(b"d"))
    assert first.finished and first.stop_reason == "cd" and not second.finished
