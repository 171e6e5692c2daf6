"""API keys: every route needs one, but those that tell nothing of the model's work."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from canter.core.errors import AuthenticationError
from canter.server.errors import error_response

OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics"})


class AuthMiddleware:
    """Lets a request pass that brings a known key, as `Authorization: Bearer KEY` or `x-api-key: KEY`.

    Keys are kept and compared as SHA-256 digests in constant time, so that timing tells nothing. CORS preflights
    (OPTIONS) carry no key and pass: they only learn which headers are allowed.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], more_open_paths: frozenset[str] = frozenset()) -> None:
        self._app = app
        self._open = OPEN_PATHS | more_open_paths
        self._digests = [_digest(key.encode()) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] != "OPTIONS" and scope["path"] not in self._open_paths(scope):
            problem = self._problem(Headers(scope=scope))
            if problem is not None:
                await error_response(AuthenticationError(problem), scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _open_paths(self, scope: Scope) -> frozenset[str]:
        root = scope.get("root_path", "")
        return frozenset(root + path for path in self._open) if root else self._open

    def _problem(self, headers: Headers) -> str | None:
        """Why the request may not pass, or None."""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        candidates = [headers.get("x-api-key", "")]
        if scheme.lower() == "bearer":
            candidates.append(bearer.strip())
        given = [key for key in candidates if key]
        if not given:
            return "This server needs an API key: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
        if sum(self._matches(key) for key in given):  # no short cut: time must not depend on which key fits
            return None
        return "The API key is wrong."

    def _matches(self, key: str) -> bool:
        digest = _digest(key.encode("latin-1"))  # header bytes, as ASGI decoded them
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
