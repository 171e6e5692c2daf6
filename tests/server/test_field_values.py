"""Every number, text and list of every body that any POST route takes, with values that nobody sends in good faith.

The places are found by walking the schemas, so that a new field is covered without a word here; a new route needs a good body in
`tests.server.bodies`. (llama.cpp's CVE-2026-21869, a negative `n_discard`, was such a field.)
"""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from canter.core.config import EngineArgs
from tests.server.bodies import BODILESS, GOOD, Place, open_options, places, post_paths
from tests.server.helpers import Harness, with_harness

SECONDS = 20.0
"""No request of these takes one; what takes so long hangs."""
MAX_ERROR_BYTES = 16 * 1024
NUMBERS = (
    "-1", "0", "-2147483648", "2147483648", "-9223372036854775808", "9223372036854775807", "9223372036854775808",
    "18446744073709551616", "1e308", "1e400", "-1e400", "1" + "0" * 400, "1" + "0" * 5000, "NaN",
    "Infinity", "true", '"1"', '"NaN"', "1.5", "1e-400",
    "-0.0", "5.0", "[]", "{}", "null",
)  # fmt: skip
TEXTS = (
    '""',
    '"\\u0000"',
    '"\\ud800"',
    '"\\r\\n\\u001b[31m"',
    '"%s{0}{{ 7 * 7 }}${x}"',
    json.dumps("x" * 200_000),
    "1",
    "true",
    "[]",
    "null",
)
OTHERS = ("true", '"x"', "5", "{}", "[[]]", "[null]", "null")
NO_FIELD = ("not valid JSON", "The prompt has")
"""What is wrong with the whole body, or with all texts of it together."""


def test_every_route_has_its_good_body() -> None:
    assert set(post_paths()) == GOOD.keys() | BODILESS


def complaint(response: httpx.Response, place: Place, value: str) -> str | None:
    """What is wrong with an answer, if it is neither one nor a short refusal that names the field."""
    told = f"{place.path} {place.where} = {value:.40}: {response.status_code} {response.text:.400}"
    if response.status_code == 200:
        return None
    if value == "null" and is_optional(place):
        return told
    if response.status_code not in (400, 404, 413) or len(response.content) > MAX_ERROR_BYTES:
        return told
    error = response.json()["error"]
    message, param = (error, "") if isinstance(error, str) else (error["message"], error.get("param") or "")
    named = any(name in message or name in param for name in place.names) or any(text in message for text in NO_FIELD)
    return None if named or response.status_code == 413 else told


def is_optional(place: Place) -> bool:
    """Whether null there means what leaving the field out does."""
    return place.names == [place.where] and place.where not in GOOD[place.path]


def ask_all(path: str, found: list[Place], values: tuple[str, ...], **options: object) -> None:
    async def body(h: Harness) -> None:
        headers = {"content-type": "application/json"}
        complaints = []
        for place in found:
            for value in values:
                asked = h.http.post(path, content=place.with_value(value), headers=headers)
                complaints.append(complaint(await asyncio.wait_for(asked, SECONDS), place, value))
                if path == "/start_profile":
                    await h.http.post("/stop_profile")
        assert not any(complaints), "\n".join(filter(None, complaints))
        assert not h.engine.core.requests, "an answer came, but the engine works on"
        assert (await h.chat(max_tokens=2)).status_code == 200

    with_harness(body, seconds=300, **options, **open_options())


@pytest.mark.parametrize("path", GOOD)
def test_numbers(path: str) -> None:
    ask_all(path, list(places(path, int, float)), NUMBERS)


def places_with_lifted_bounds(path: str) -> list[Place]:
    return [place for place in places(path, int) if any(part in place.where for part in ("priority", "prob"))]


@pytest.mark.parametrize("path", [path for path in GOOD if places_with_lifted_bounds(path)])
def test_numbers_where_priorities_are_on_and_logprobs_unbounded(path: str) -> None:
    """Two bounds that a server's own arguments lift."""
    ask_all(path, places_with_lifted_bounds(path), NUMBERS, engine_args=EngineArgs(scheduling_policy="priority", max_logprobs=-1))


@pytest.mark.parametrize("path", GOOD)
def test_texts(path: str) -> None:
    ask_all(path, list(places(path, str)), TEXTS)


@pytest.mark.parametrize("path", GOOD)
def test_lists(path: str) -> None:
    ask_all(path, list(places(path, list)), OTHERS)
