"""The built-in page as files over HTTP; `tests/page` has it in a browser."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import canter.server
from canter.server.routes.page import ASSETS, INDEX, OPEN_PATHS
from tests.server.helpers import Harness, error_of, with_harness

FOLDER = Path(canter.server.__file__).with_name("page")


def test_every_file_is_served_and_every_served_file_exists() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {INDEX, *ASSETS}

    async def body(h: Harness) -> None:
        for path in sorted(OPEN_PATHS):
            response = await h.http.get(path)
            assert response.status_code == 200 and response.content == (FOLDER / (path.rpartition("/")[2] or INDEX)).read_bytes()
            assert response.headers["x-content-type-options"] == "nosniff"
        assert (await h.http.get("/")).headers["content-type"] == "text/html; charset=utf-8"
        assert (await h.http.get("/page/app.js")).headers["content-type"].startswith("text/javascript")

    with_harness(body)


def test_nothing_comes_from_elsewhere() -> None:
    """No address of another host in the files, no script or style in the markup, and a policy that would stop both."""
    for path in FOLDER.iterdir():
        addresses = set(re.findall(r"https?://[\w.]+|(?<=[\"'(])//[\w.]+", path.read_text(encoding="utf-8")))
        assert addresses <= {"http://www.w3.org"}, path.name
    markup = (FOLDER / INDEX).read_text(encoding="utf-8")
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", markup)
    policy = with_harness(lambda h: h.http.get("/")).headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
    assert "unsafe" not in policy and "require-trusted-types-for 'script'" in policy and "frame-ancestors 'none'" in policy


def test_scripts_make_no_markup_of_text() -> None:
    for path in FOLDER.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|srcdoc", path.read_text(encoding="utf-8")
        )


@pytest.mark.parametrize(
    "name", ["", "x", "index.html", "%2e%2e", "%2e%2e%2fapp.py", "../app.py", "app.js/", "app.js%00", "APP.JS", "." * 5000]
)
def test_other_names_are_no_files(name: str) -> None:
    error_of(with_harness(lambda h: h.http.get(f"/page/{name}")), 404)


def test_a_browser_that_has_a_file_is_told_so() -> None:
    async def body(h: Harness) -> None:
        first = await h.http.get("/page/app.js")
        again = await h.http.get("/page/app.js", headers={"If-None-Match": f'W/"x", {first.headers["etag"]}'})
        assert (again.status_code, again.content) == (304, b"")
        assert (await h.http.get("/page/app.js", headers={"If-None-Match": '"x"'})).status_code == 200

    with_harness(body)


def test_the_page_needs_no_key_but_all_else_does() -> None:
    async def body(h: Harness) -> None:
        for path in OPEN_PATHS:
            assert (await h.http.get(path)).status_code == 200
        for path in ("/page/", "/page", "/page/x.js", "http://test//", "/v1/models"):
            error_of(await h.http.get(path), 401)

    with_harness(body, api_key=["key"])


def test_only_get() -> None:
    async def body(h: Harness) -> None:
        assert (await h.http.head("/")).status_code == 200
        for method in ("POST", "PUT", "DELETE"):
            error_of(await h.http.request(method, "/"), 405)

    with_harness(body)


def test_links_start_where_the_proxy_shows_the_server() -> None:
    async def body(h: Harness) -> None:
        h.http._transport.root_path = '/a"b'  # type: ignore[attr-defined]
        assert '<base href="/a&quot;b/">' in (await h.http.get('/a"b/')).text

    with_harness(body)
    assert "<base" not in with_harness(lambda h: h.http.get("/")).text


def test_the_page_can_be_turned_off() -> None:
    async def body(h: Harness) -> None:
        for path in OPEN_PATHS:
            error_of(await h.http.get(path), 404)
        assert (await h.chat(max_tokens=1)).status_code == 200

    with_harness(body, disable_page=True)
