"""The description of the API: complete, valid, and true of what the server takes and gives."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import msgspec
import pytest
from starlette.responses import Response
from starlette.routing import Route

from canter.server.app import ROUTES
from canter.server.args import ServerArgs
from canter.server.json_schema import SchemaBuilder
from canter.server.openapi import missing_entries
from canter.server.operations import OPERATIONS
from tests.server.helpers import Harness, error_of, with_harness


def everything() -> dict[str, Any]:
    """Server arguments under which every route is there."""
    flags = {field.name: True for field in dataclasses.fields(ServerArgs) if field.name.startswith("enable_") and field.default is False}
    return {**flags, "enable_ssl_refresh": False, "profile_dir": "profiles"}


def document(**server: Any) -> dict[str, Any]:
    response = with_harness(lambda h: h.http.get("/openapi.json"), **server)
    assert response.status_code == 200 and response.headers["content-type"] == "application/json"
    return response.json()


def test_every_route_is_described() -> None:
    async def body(h: Harness) -> None:
        routes = h.app.routes
        assert len(routes) > len(ROUTES) + 5
        assert missing_entries(routes) == [], "\n".join(missing_entries(routes))
        assert {route.endpoint for route in routes} == set(OPERATIONS), "OPERATIONS has entries of routes that no flag brings"
        paths = (await h.http.get("/openapi.json")).json()["paths"]
        for route in routes:
            methods = {method.lower() for method in route.methods - {"HEAD"}}
            assert methods <= set(paths[re.sub(r":\w+\}", "}", route.path)])

    with_harness(body, **everything())


def test_a_route_without_an_entry_is_named() -> None:
    async def forgotten(request: object) -> Response:
        """Not in the table."""
        return Response()

    [sentence] = missing_entries([*ROUTES, Route("/forgotten", forgotten)])
    assert sentence.startswith("/forgotten is in no documentation: add ") and "OPERATIONS in canter/server/operations.py" in sentence


def test_the_document_holds_together() -> None:
    """`make test-api` has it judged by others."""
    tree = document(**everything())
    references = set(re.findall(r'"\$ref":\s*"#/components/schemas/([^"]+)"', json.dumps(tree)))
    assert references <= set(tree["components"]["schemas"]) and len(references) > 60
    ids = [operation["operationId"] for methods in tree["paths"].values() for operation in methods.values()]
    assert len(ids) == len(set(ids)) > 30
    assert all(operation["summary"] and operation["description"] for methods in tree["paths"].values() for operation in methods.values())


def test_bodies_answers_and_streams_of_chat() -> None:
    tree = document()
    chat = tree["paths"]["/v1/chat/completions"]["post"]
    assert chat["requestBody"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ChatRequest"}
    content = chat["responses"]["200"]["content"]
    assert content["application/json"]["schema"] == {"$ref": "#/components/schemas/ChatAnswer"}
    assert content["text/event-stream"]["schema"]["properties"]["data"]["contentSchema"] == {"$ref": "#/components/schemas/ChatChunk"}
    for status in ("4XX", "5XX"):
        assert chat["responses"][status]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ErrorBody"}
    request = tree["components"]["schemas"]["ChatRequest"]
    assert request["required"] == ["messages"]
    assert request["properties"]["temperature"] == {"anyOf": [{"type": "number"}, {"type": "null"}], "default": None}
    assert request["properties"]["stream"] == {"anyOf": [{"type": "boolean"}, {"type": "null"}], "default": False}
    assert "watermarking" in request["description"]
    llama = tree["components"]["schemas"]["llamacpp.CompletionRequest"]["description"]
    assert llama.count("Known, but refused") == 1  # two paths take it
    assert tree["paths"]["/v1/models/{model}"]["get"]["parameters"][0]["name"] == "model"
    assert tree["paths"]["/health"]["get"]["security"] == []
    assert "content" not in tree["paths"]["/health"]["get"]["responses"]["200"]


@pytest.mark.parametrize(
    ("kind", "schema"),
    [
        (int | None, {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
        (list[str], {"type": "array", "items": {"type": "string"}}),
        (dict[str, Any], {"type": "object", "additionalProperties": {}}),
        (str | msgspec.UnsetType, {"type": "string"}),
        (tuple[int, str], {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "minItems": 2, "maxItems": 2}),
        (msgspec.Raw, {}),
    ],
)
def test_schemas_of_types(kind: Any, schema: dict[str, Any]) -> None:
    assert SchemaBuilder().of(kind) == schema


class Tree(msgspec.Struct, rename={"own": "self"}):
    """Holds its own kind."""

    own: int
    children: list[Tree] = []


def test_a_struct_may_hold_itself() -> None:
    builder = SchemaBuilder()
    assert builder.of(Tree) == {"$ref": "#/components/schemas/Tree"}
    assert builder.components["Tree"] == {
        "type": "object",
        "description": "Holds its own kind.",
        "properties": {"self": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#/components/schemas/Tree"}}},
        "required": ["self"],
    }
    with pytest.raises(TypeError, match="no JSON schema is known"):
        builder.of(complex)


def test_the_page_of_the_document() -> None:
    response = with_harness(lambda h: h.http.get("/docs"), **everything())
    assert response.status_code == 200 and response.headers["content-type"] == "text/html; charset=utf-8"
    text = response.text
    assert not re.search(r"<script|<link|https?://|\son\w+=|\sstyle=", text)
    assert "sha256-" in response.headers["content-security-policy"]
    links = set(re.findall(r'href="#([^"]+)"', text))
    assert links and links <= set(re.findall(r'<details id="([^"]+)"', text))
    for route in ROUTES:
        assert re.sub(r":\w+\}", "}", route.path) in text


def test_the_document_needs_no_key_and_can_be_turned_off() -> None:
    async def closed(h: Harness) -> None:
        for path in ("/openapi.json", "/docs"):
            assert (await h.http.get(path)).status_code == 200

    async def off(h: Harness) -> None:
        for path in ("/openapi.json", "/docs"):
            error_of(await h.http.get(path), 404)

    with_harness(closed, api_key=["key"])
    with_harness(off, disable_fastapi_docs=True)
    assert json.dumps(document(root_path="/x")["servers"]) == '[{"url": "/x"}]'
