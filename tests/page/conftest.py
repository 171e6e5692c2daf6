"""The browser, and where its pictures go."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.page.browser import Browser, Page, find_browser
from tests.page.canned import CannedServer


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip("there is no Chromium here (Debian: apt-get install chromium fonts-dejavu-core)")
    browser = Browser(program)
    yield browser
    browser.close()


@pytest.fixture
def tab(browser: Browser) -> Iterator[Page]:
    page = browser.page()
    yield page
    page.close()


@pytest.fixture
def canned() -> Iterator[CannedServer]:
    server = CannedServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Page, str], None]:
    """Takes a screenshot: into CANTER_SCREENSHOTS, where `make test-page` puts those of the documentation, or where nobody looks."""
    folder = Path(os.environ.get("CANTER_SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return lambda page, name: page.screenshot(folder / f"{name}.png")
