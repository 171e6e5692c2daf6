"""`GET /openapi.json`, and `GET /docs`: the same as a page without scripts. They tell what every server of this version tells."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Iterable
from html import escape
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from canter.server.args import ServerArgs

OPEN_PATHS = frozenset({"/openapi.json", "/docs"})

STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, "DejaVu Sans", sans-serif; --line: light-dark(#d5d9d6, #394247);
  --soft: light-dark(#56605c, #a3afaa); --accent: light-dark(#1f6352, #7cc7b1); }
body { max-width: 60rem; margin: 0 auto; padding: 1rem; background: light-dark(#fff, #16191b); color: light-dark(#1c2321, #e6eae8); }
a { color: var(--accent); }
h2 { margin-top: 2rem; border-bottom: 1px solid var(--line); }
details { margin: .4rem 0; border: 1px solid var(--line); border-radius: .5rem; padding: .4rem .8rem; }
summary { cursor: pointer; overflow-wrap: anywhere; }
summary b { color: var(--accent); display: inline-block; min-width: 5rem; }
summary span { color: var(--soft); margin-left: .8rem; }
p { white-space: pre-line; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0; border-top: 1px solid var(--line); }
code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: .9em; }
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
POLICY = f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
HEADERS = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}


def routes(args: ServerArgs) -> list[Route]:
    """The rows, unless they are turned off."""
    if args.disable_fastapi_docs:
        return []
    return [Route("/openapi.json", openapi, methods=["GET"]), Route("/docs", docs, methods=["GET"])]


async def openapi(request: Request) -> Response:
    """The OpenAPI document of this server's routes."""
    document = request.app.state.api_document
    body = await asyncio.to_thread(lambda: document.json)
    return Response(body, media_type="application/json")


async def docs(request: Request) -> Response:
    """The OpenAPI document as a page to read."""
    document = request.app.state.api_document
    body = await asyncio.to_thread(lambda: render(document.tree))
    return Response(body, headers=HEADERS, media_type="text/html; charset=utf-8")


def render(tree: dict[str, Any]) -> str:
    """An OpenAPI document as HTML: its operations by tag, then the structs that they use."""
    by_tag: dict[str, list[str]] = {}
    for path, methods in tree["paths"].items():
        for method, operation in methods.items():
            by_tag.setdefault(operation["tags"][0], []).append(_operation(method, path, operation))
    title = f"{escape(tree['info']['title'])} {escape(tree['info']['version'])}"
    parts = [f"<h2>{escape(tag)}</h2>{''.join(operations)}" for tag, operations in by_tag.items()]
    parts.append("<h2>Bodies</h2>")
    parts += [_component(name, component) for name, component in sorted(tree["components"]["schemas"].items())]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}: the API</title><style>{STYLE}</style></head><body><h1>{title}: the API</h1>"
        f'<p>{escape(tree["info"]["description"])} For programs: <a href="openapi.json">openapi.json</a>.</p>{"".join(parts)}</body></html>'
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    rows = [[parameter["name"], f"{parameter['in']}: {_type(parameter['schema'])}"] for parameter in operation["parameters"]]
    if "requestBody" in operation:
        rows += [["body", _type(media["schema"])] for media in operation["requestBody"]["content"].values()]
    for status, response in operation["responses"].items():
        answers = [f"{escape(kind)}: {_type(media['schema'])}" for kind, media in response.get("content", {}).items()]
        rows.append([status, "<br>".join(answers) or "no body"])
    head = f"<summary><b>{method.upper()}</b><code>{escape(path)}</code><span>{escape(operation['summary'])}</span></summary>"
    return f"<details>{head}<p>{escape(operation['description'])}</p>{_table(rows)}</details>"


def _component(name: str, component: dict[str, Any]) -> str:
    rows = [
        [field + ("" if field in component["required"] else " (optional)"), _type(schema), _default(schema)]
        for field, schema in component["properties"].items()
    ]
    head = f"<summary><code>{escape(name)}</code></summary>"
    return f'<details id="{escape(name)}">{head}<p>{escape(component["description"])}</p>{_table(rows)}</details>'


def _table(rows: Iterable[list[str]]) -> str:
    """The first cell of a row is plain text, the others are markup already."""
    cells = ("".join([f"<th><code>{escape(first)}</code></th>", *(f"<td>{cell}</td>" for cell in rest)]) for first, *rest in rows)
    return f'<div class="wide"><table>{"".join(f"<tr>{row}</tr>" for row in cells)}</table></div>'


def _default(schema: dict[str, Any]) -> str:
    given = schema.get("default")
    return "" if given is None else f"default {escape(str(given))}"


def _type(schema: dict[str, Any]) -> str:
    """A schema in a few words, with links to structs."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(f"<code>{escape(str(value))}</code>" for value in schema["enum"])
    if "contentSchema" in schema:
        return f"lines of {_type(schema['contentSchema'])}"
    if "data" in schema.get("properties", {}):
        return f"events of {_type(schema['properties']['data']['contentSchema'])}"
    if "prefixItems" in schema:
        return f"list of {', '.join(map(_type, schema['prefixItems']))}"
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'])}"
    if schema.get("type") == "object":
        return f"object of {_type(schema.get('additionalProperties') or {})}"
    return escape(schema.get("type", "anything"))
