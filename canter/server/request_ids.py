"""Ids of HTTP requests."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers
from starlette.types import Scope

SAFE_ID = re.compile(r"[\w.:@+/-]{1,128}", re.ASCII)
"""What a client may choose as an id, to be kept in logs and answers."""


def made_request_id(scope: Scope) -> str:
    """The server's own id of an HTTP request: made once, 32 hexadecimal digits."""
    made: str = scope.setdefault("canter.request_id", uuid.uuid4().hex)
    return made


def request_id_of(scope: Scope) -> str:
    """The client's own id where it is one, else the server's."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if SAFE_ID.fullmatch(given) else made_request_id(scope)
