"""`GET /`: the built-in page, and the files that it is made of. They are read once and hold nothing secret, so they need no key."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from canter.server.args import ServerArgs

INDEX = "index.html"
TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
MODULES = ("answer.js", "api.js", "app.js", "dom.js", "markdown.js", "message.js", "metrics.js", "settings.js", "sse.js")
ASSETS = (*MODULES, "icon.svg", "page.css")
OPEN_PATHS = frozenset({"/", *(f"/page/{name}" for name in ASSETS)})
"""Paths that a browser asks for before anybody could type in a key."""

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; base-uri 'self'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Nothing from elsewhere, no script in the markup, and no text that becomes markup: the last two forbid innerHTML and its like."""

HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    tag: str


def routes(args: ServerArgs) -> list[Route]:
    """The page's rows, unless it is turned off."""
    if args.disable_page:
        return []
    return [Route("/", page, methods=["GET"]), Route("/page/{name}", page_file, methods=["GET"])]


async def page(request: Request) -> Response:
    """The page itself. Its links are relative; below a proxy's path they start there."""
    file = _read(INDEX)
    root = request.scope.get("root_path", "").rstrip("/")
    if root:
        base = f'<meta charset="utf-8">\n<base href="{escape(root)}/">'.encode()
        body = file.body.replace(b'<meta charset="utf-8">', base, 1)
        file = _File(body, _tag(body))
    return _response(request, file, "text/html; charset=utf-8")


async def page_file(request: Request) -> Response:
    """A script, style or picture of the page."""
    name = request.path_params["name"]
    if name not in ASSETS:
        raise HTTPException(404)
    return _response(request, _read(name), TYPES[name[name.rindex(".") :]])


def _response(request: Request, file: _File, media_type: str) -> Response:
    """The file, or 304 for a browser that has it: it asks each time, so that a new version shows at once."""
    headers = {**HEADERS, "ETag": file.tag}
    if file.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers=headers, media_type=media_type)


@cache
def _read(name: str) -> _File:
    body = (files("canter.server") / "page" / name).read_bytes()
    return _File(body, _tag(body))


def _tag(body: bytes) -> str:
    return f'"{hashlib.sha256(body).hexdigest()[:32]}"'
