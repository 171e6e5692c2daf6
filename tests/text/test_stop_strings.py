"""Stop strings against a naive search over the whole text."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canter.text.stop_strings import StopChecker

WORDS = st.lists(st.text("ab<|", min_size=1, max_size=5), min_size=1, max_size=5)


def naive(text: str, stop: list[str], include: bool, skip: int = 0) -> tuple[str, str | None]:
    """What is left of `text`, and the stop string: the first to be complete, the longest of those that end there."""
    for end in range(skip, len(text) + 1):
        found = [word for word in stop if text[skip:end].endswith(word)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@settings(max_examples=500, deadline=None)
@given(text=st.text("ab<|", max_size=60), stop=WORDS, include=st.booleans(), cuts=st.lists(st.integers(0, 60), max_size=20))
def test_equals_the_naive_search_however_the_text_is_cut(text: str, stop: list[str], include: bool, cuts: list[int]) -> None:
    expected, matched = naive(text, stop, include)
    checker = StopChecker(stop, include)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    shown = ""
    for start, end in pairwise(bounds):
        piece, found = checker.feed(text[start:end])
        shown += piece
        assert expected.startswith(shown), "text of a stop string was let through"
        assert found == checker.matched
    shown += checker.flush()
    assert (shown, checker.matched) == (expected, matched)


@settings(max_examples=300, deadline=None)
@given(text=st.text("ab<|", max_size=40), stop=WORDS, include=st.booleans())
def test_holds_back_no_more_than_it_must(text: str, stop: list[str], include: bool) -> None:
    checker = StopChecker(stop, include)
    shown, found = checker.feed(text)
    if found is None:
        held = text[len(shown) :]
        assert held == "" if include else any(word.startswith(held) and word != held for word in stop) or held == ""
        longer = [n for n in range(len(held) + 1, len(text) + 1) if any(w.startswith(text[-n:]) for w in stop)]
        assert include or not longer


@settings(max_examples=200, deadline=None)
@given(tokens=st.lists(st.text("ab", max_size=3), max_size=20), stop=WORDS, min_tokens=st.integers(0, 10), include=st.booleans())
def test_the_first_tokens_are_not_searched(tokens: list[str], stop: list[str], min_tokens: int, include: bool) -> None:
    checker = StopChecker(stop, include, min_tokens)
    shown = "".join(checker.feed(token, count)[0] for count, token in enumerate(tokens, 1)) + checker.flush()
    text, skip = "".join(tokens), len("".join(tokens[:min_tokens]))
    assert (shown, checker.matched) == naive(text, stop, include, skip)


def test_nothing_comes_after_a_match() -> None:
    checker = StopChecker(["END"])
    assert checker.feed("abc EN") == ("abc ", None)
    assert checker.feed("D more") == ("", "END")
    assert checker.feed("still more") == ("", "END")
    assert checker.flush() == ""


def test_held_text_comes_back_when_it_was_no_stop_string() -> None:
    checker = StopChecker(["</tool>"])
    assert checker.feed("a </to") == ("a ", None)
    assert checker.feed("p>") == ("</top>", None)
    assert checker.feed("<") == ("", None)
    assert checker.flush() == "<"


def test_without_stop_strings_everything_passes() -> None:
    checker = StopChecker([])
    assert checker.feed("anything") == ("anything", None)
    assert checker.flush() == ""


def test_stop_string_kept_in_the_output() -> None:
    checker = StopChecker(["END", "\n\n"], include=True)
    assert checker.feed("abE") == ("abE", None)
    assert checker.feed("ND tail") == ("ND", "END")


@pytest.mark.parametrize("text", ["a" * 200_000, "ab" * 100_000])
def test_time_is_linear_in_hostile_text(text: str) -> None:
    checker = StopChecker(["a" * 4095 + "b"] * 32 + ["ab" * 2000 + "c"] * 32)
    start = time.process_time()
    for at in range(0, len(text), 50):
        checker.feed(text[at : at + 50])
    assert checker.matched is None
    assert time.process_time() - start < 5
