"""The OpenAPI document: made of the routes that a server has, their entries in `OPERATIONS`, and the structs of their bodies."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec
from starlette.routing import Route

from canter.server.json_schema import SchemaBuilder
from canter.server.operations import EVENTS, JSON, OPERATIONS, Operation
from canter.version import __version__

_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_UNKNOWN = Operation("", "Others", media_type="*/*")
_TEXT = {"type": "string"}


class ApiDocument:
    """The document of an app, made when somebody asks for it."""

    def __init__(self, routes: Sequence[Route], open_paths: frozenset[str], root_path: str) -> None:
        self._routes = routes
        self._open_paths = open_paths
        self._root_path = root_path

    @cached_property
    def tree(self) -> dict[str, Any]:
        """The document as lists and dicts."""
        builder = SchemaBuilder()
        paths: dict[str, dict[str, Any]] = {}
        for route in self._routes:
            operation = OPERATIONS.get(route.endpoint, _UNKNOWN)
            for method in sorted((route.methods or set()) - {"HEAD"}):
                entry = paths.setdefault(_PARAMETER.sub(r"{\1}", route.path), {})
                entry[method.lower()] = _operation(builder, route, method, operation, route.path in self._open_paths)
        return {
            "openapi": "3.1.0",
            "info": {"title": "Canter", "version": __version__, "description": "An LLM server with the interfaces of several others."},
            "servers": [{"url": self._root_path or "/"}],
            "paths": paths,
            "components": {
                "schemas": builder.components,
                "securitySchemes": {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                },
            },
            # Either, or neither where the server asks for no key.
            "security": [{"bearer": []}, {"key": []}, {}],
        }

    @cached_property
    def json(self) -> bytes:
        return msgspec.json.encode(self.tree)


def missing_entries(routes: Sequence[Route]) -> list[str]:
    """A sentence for each route that `OPERATIONS` doesn't know."""
    unknown = [(route.path, route.endpoint) for route in routes if route.endpoint not in OPERATIONS]
    table = "OPERATIONS in canter/server/operations.py"
    return [f"{path} is in no documentation: add {endpoint.__module__}.{endpoint.__name__} to {table}." for path, endpoint in unknown]


def _operation(builder: SchemaBuilder, route: Route, method: str, operation: Operation, is_open: bool) -> dict[str, Any]:
    path_id = re.sub(r"\W+", "_", route.path).strip("_") or "root"
    entry: dict[str, Any] = {
        "operationId": f"{method.lower()}_{path_id}",
        "summary": operation.summary or route.path,
        "description": inspect.getdoc(route.endpoint) or "",
        "tags": [operation.tag],
        "parameters": _parameters(builder, route, operation),
        "responses": _responses(builder, operation),
    }
    if operation.body is not None:
        entry["requestBody"] = {"required": operation.body_required, "content": {JSON: {"schema": builder.body(operation.body)}}}
    if is_open:
        entry["security"] = []
    return entry


def _parameters(builder: SchemaBuilder, route: Route, operation: Operation) -> list[dict[str, Any]]:
    of_path = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in _PARAMETER.findall(route.path)]
    return of_path + [{"name": name, "in": "query", "schema": builder.of(kind)} for name, kind in operation.query.items()]


def _responses(builder: SchemaBuilder, operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.media_type is not None:
        content[operation.media_type] = {"schema": _any_of(builder, operation.answer)}
    if operation.chunk is not None:
        text = {**_TEXT, "contentMediaType": JSON, "contentSchema": _any_of(builder, operation.chunk)}
        content[operation.stream_type] = {"schema": _event(text) if operation.stream_type == EVENTS else text}
    error = {JSON: {"schema": builder.of(operation.error)}}
    found: dict[str, Any] = {"200": {"description": "Done", **({"content": content} if content else {})}}
    for status, kind in operation.statuses.items():
        found[str(status)] = {
            "description": "See the description",
            **({} if kind is None else {"content": {JSON: {"schema": builder.of(kind)}}}),
        }
    found["4XX"] = {"description": "The request can't be honoured; the message says why", "content": error}
    found["5XX"] = {"description": "The server can't answer now, or has failed", "content": error}
    return found


def _event(data: dict[str, Any]) -> dict[str, Any]:
    """The schema of each server-sent event, which is how tools read the schema of such a stream. A last one may hold [DONE]."""
    return {"type": "object", "properties": {"event": _TEXT, "data": data}, "required": ["data"]}


def _any_of(builder: SchemaBuilder, kinds: Any) -> dict[str, Any]:
    """One type, several in a tuple, or None for plain text."""
    if kinds is None:
        return dict(_TEXT)
    if isinstance(kinds, tuple):
        return {"anyOf": [builder.of(kind) for kind in kinds]}
    return builder.of(kinds)
