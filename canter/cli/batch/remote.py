"""What a batch does over HTTP: ask a running server, fetch the input, send the output."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

import httpx

from canter.cli.api import CONNECT_SECONDS, LOOPBACK, ServerError, api_root
from canter.core.errors import CanterError
from canter.server.batch import Answer

RETRY_STATUSES = (429, 503)


class ServerCaller:
    """Asks a running server. `url` is its API root, as `canter chat` takes it."""

    def __init__(self, url: str, api_key: str | None, concurrency: int, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._root = api_root(url).removesuffix("/v1")
        key = api_key or os.environ.get("OPENAI_API_KEY")
        self._http = httpx.AsyncClient(
            headers={"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {}),
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
            transport=transport,
            trust_env=urlsplit(self._root).hostname not in LOOPBACK,  # a proxy can't reach this machine
        )

    async def __aenter__(self) -> ServerCaller:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._http.aclose()

    async def ask(self, path: str, body: bytes, request_id: str) -> Answer:
        """Run one request. Raises `ServerError` when the server can't be reached."""
        try:
            response = await self._http.post(self._root + path, content=body, headers={"X-Request-Id": request_id})
        except httpx.HTTPError as error:
            raise ServerError(f"The connection to {self._root} broke: {error or type(error).__name__}. Run again to go on.") from error
        wait = response.headers.get("retry-after", "")
        retry_after = float(wait) if response.status_code in RETRY_STATUSES and wait.isdigit() else None
        return Answer(response.status_code, response.content, retry_after)


def is_url(name: str) -> bool:
    return urlsplit(name).scheme in ("http", "https")


def fetch(url: str, folder: str | None) -> Path:
    """GET a file into a temporary one; the caller removes it."""
    path = temporary_file(folder, Path(urlsplit(url).path).suffix)
    try:
        with open(path, "wb") as file, httpx.stream("GET", url, follow_redirects=True, timeout=60.0) as response:
            response.raise_for_status()
            for chunk in response.iter_bytes():
                file.write(chunk)
    except (httpx.HTTPError, OSError) as error:
        path.unlink()
        raise CanterError(f"Can't fetch {url}: {error}.") from error
    return path


def send(path: Path, url: str) -> None:
    """PUT a file."""
    try:
        with open(path, "rb") as file:
            httpx.put(url, content=file, timeout=60.0).raise_for_status()
    except (httpx.HTTPError, OSError) as error:
        raise CanterError(f"Can't send the results to {url}: {error}. They are in {path}.") from error


def temporary_file(folder: str | None, suffix: str) -> Path:
    """An empty file of its own."""
    try:
        handle, name = tempfile.mkstemp(prefix="canter-batch-", suffix=suffix, dir=folder)
    except OSError as error:
        raise CanterError(f"Can't make a temporary file in {folder!r}: {error.strerror}.") from error
    os.close(handle)
    return Path(name)
