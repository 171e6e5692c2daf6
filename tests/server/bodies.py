"""Every POST route with the body that it takes, found out by asking it, and the places in that body where a value can stand."""

from __future__ import annotations

import json
import tempfile
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import msgspec

from canter.server import body as body_module
from canter.server.app import ROUTES
from canter.server.args import ServerArgs
from canter.server.routes import admin
from tests.fake_core import FakeCore
from tests.server.helpers import Harness, with_harness

MESSAGES = [{"role": "user", "content": "hi"}]
GIVEN = {"request_id": "r", "choices": [{"index": 0, "token_ids": [1], "finish_reason": "length"}]}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [104]},
    "/api/generate": {"prompt": "hi", "stream": False, "options": {"num_predict": 2}},
    "/api/chat": {"messages": MESSAGES, "stream": False, "options": {"num_predict": 2}},
    "/api/show": {"model": "m"},
    "/completion": {"prompt": "hi", "n_predict": 2},
    "/completions": {"prompt": "hi", "n_predict": 2},
    "/v1/chat/completions/render": {"messages": MESSAGES},
    "/v1/completions/render": {"prompt": "hi"},
    "/v1/responses/render": {"input": "hi"},
    "/v1/messages/render": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/chat/completions/derender": {"generate_response": GIVEN},
    "/v1/completions/derender": {"generate_responses": [GIVEN]},
    "/inference/v1/generate": {"token_ids": [104], "sampling_params": {"max_tokens": 2}},
    "/inference/v1/abort_requests": {"request_ids": []},
    "/abort_requests": {"request_ids": []},
    "/start_profile": {},
}
"""Path -> a body that is answered with 200, for every POST route that reads one."""
BODILESS = {"/ping", "/v1/responses/{response_id}/cancel", "/reset_prefix_cache", "/pause", "/resume", "/stop_profile"}
CHATS = ("/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/responses", "/v1/chat/completions/render", "/v1/messages/count_tokens")
"""Routes with a conversation; the input of a response is one too."""


def open_options() -> dict[str, Any]:
    """Everything on that opens a route."""
    return {
        "enable_scale_out": True,
        "enable_dev_mode": True,
        "enable_server_load_tracking": True,
        "enable_tokenizer_info_endpoint": True,
        "profile_dir": tempfile.gettempdir(),
    }


def post_paths() -> list[str]:
    routes = (*ROUTES, *admin.routes(ServerArgs(**open_options())))
    return [route.path for route in routes if "POST" in (route.methods or ())]


def conversation(path: str, content: Any) -> dict[str, Any]:
    """The good body of a route of `CHATS` with one message of the user."""
    messages = [{"role": "user", "content": content}]
    return GOOD[path] | ({"input": messages} if "responses" in path else {"messages": messages})


@cache
def kinds_of(path: str) -> tuple[type[msgspec.Struct], dict[str, type[msgspec.Struct]]]:
    """What a route decodes its body into, and the kinds of those fields that are bodies by themselves."""
    seen: list[type[msgspec.Struct]] = []
    layout = body_module._layout

    def watched(kind: type[msgspec.Struct]) -> Any:
        seen.append(kind)
        return layout(kind)

    async def look(h: Harness) -> tuple[type[msgspec.Struct], dict[str, type[msgspec.Struct]]]:
        nested = {}
        assert (await h.http.post(path, json=GOOD[path])).status_code == 200
        kind = seen[0]
        for field in msgspec.structs.fields(kind):
            if field.type is msgspec.Raw:
                seen.clear()
                await h.http.post(path, json=GOOD[path] | {field.encode_name: {}})
                nested[field.encode_name] = seen[1]
        return kind, nested

    with mock.patch.object(body_module, "_layout", watched):
        return with_harness(look, FakeCore(), **open_options())


MARK = "@value@"


@dataclass(frozen=True)
class Place:
    """Where a value can stand: the route, the way to it, and the good body with `MARK` there."""

    path: str
    where: str
    body: str

    def with_value(self, text: str) -> bytes:
        """The body with a value, written as JSON."""
        return self.body.replace(json.dumps(MARK), text).encode()

    @property
    def names(self) -> list[str]:
        """The names of which an error must say one: that of the field, or of one that it is in."""
        return self.where.replace("[]", "").split(".")


def places(path: str, *wanted: Any) -> Iterator[Place]:
    """Every place in a route's body whose type is one of `wanted` (`list`: any list), fields of structs in fields included."""
    kind, nested = kinds_of(path)
    for where, filled in _struct_places(kind, frozenset(wanted), frozenset(), nested):
        yield Place(path, where, json.dumps(_merged(GOOD[path], filled)))


def _merged(good: Any, filled: Any) -> Any:
    """What is filled in laid over what is good."""
    if isinstance(good, dict) and isinstance(filled, dict):
        return good | {name: _merged(good.get(name), value) for name, value in filled.items()}
    if isinstance(good, list) and isinstance(filled, list) and good and filled:
        return [_merged(good[0], filled[0]), *filled[1:]]
    return filled


def _struct_places(
    kind: type[msgspec.Struct], wanted: frozenset[Any], above: frozenset[type], nested: dict[str, type[msgspec.Struct]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    if kind in above:
        return
    for field in msgspec.structs.fields(kind):
        name = field.encode_name
        type_ = nested.get(name, field.type)
        for rest, value in _places(type_, wanted, above | {kind}):
            yield name + rest, {name: value}


def _places(type_: Any, wanted: frozenset[Any], above: frozenset[type]) -> Iterator[tuple[str, Any]]:
    if type_ in wanted or (list in wanted and typing.get_origin(type_) is list):
        yield "", MARK
    origin = typing.get_origin(type_)
    if origin in (typing.Union, types.UnionType):
        for part in typing.get_args(type_):
            yield from _places(part, wanted, above)
    elif origin is list:
        for rest, value in _places(typing.get_args(type_)[0], wanted, above):
            yield f"[]{rest}", [value]
    elif origin is tuple:
        parts = typing.get_args(type_)
        for i, part in enumerate(parts):
            for rest, value in _places(part, wanted, above):
                yield f"[]{rest}", [value if j == i else example(other) for j, other in enumerate(parts)]
    elif origin is dict:
        for rest, value in _places(typing.get_args(type_)[1], wanted, above):
            yield f"[]{rest}", {"1": value}
    elif isinstance(type_, type) and issubclass(type_, msgspec.Struct):
        for where, filled in _struct_places(type_, wanted, above, {}):
            yield f".{where}", required(type_) | filled


def required(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The fields that a struct must have."""
    return {field.encode_name: example(field.type) for field in msgspec.structs.fields(kind) if field.required}


def example(type_: Any) -> Any:
    """A value of a type, as small as can be."""
    origin, parts = typing.get_origin(type_), typing.get_args(type_)
    if origin in (typing.Union, types.UnionType):
        return example(parts[0])
    if origin is typing.Literal:
        return parts[0]
    if origin is tuple:
        return [example(part) for part in parts]
    if origin is not None:
        return origin()
    if isinstance(type_, type) and issubclass(type_, msgspec.Struct):
        return required(type_)
    return {str: "text", int: 1, float: 1.0, bool: False, Any: "text"}.get(type_)
