"""A headless Chromium, driven by the DevTools protocol through a pair of pipes: nothing to install but the browser."""

from __future__ import annotations

import base64
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
LAUNCHER = "import os, sys; r, w = map(int, sys.argv[1:3]); os.dup2(r, 3); os.dup2(w, 4); os.execvp(sys.argv[3], sys.argv[3:])"
SECONDS = 20.0
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, ""), "ArrowDown": (40, "")}
SHIFT = 8


def find_browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser process; each `page()` has storage of its own."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="canter-chromium-", ignore_cleanup_errors=True)
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        low = [os.dup(fd) for fd in (to_read, to_write)] if min(to_read, to_write) < 5 else []
        ends = low or [to_read, to_write]
        command = [
            program, "--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage",
            "--disable-background-networking", "--disable-component-update", "--force-color-profile=srgb", "--hide-scrollbars",
            f"--user-data-dir={self._profile.name}", *(["--no-sandbox"] if os.geteuid() == 0 else []), "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, *map(str, ends), *command], pass_fds=ends, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for fd in {to_read, to_write, *low}:
            os.close(fd)
        self._serial = 0
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._serial += 1
        number = self._serial
        box = self._answers[number] = queue.Queue()
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._write, json.dumps(message).encode() + b"\0")
        try:
            answer = box.get(timeout=SECONDS)
        except queue.Empty:
            raise AssertionError(f"the browser did not answer {method}") from None
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def page(self, width: int = 1100, height: int = 760) -> Page:
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, context)
        for domain in ("Page", "Runtime", "Log", "Accessibility", "DOM"):
            page.call(f"{domain}.enable")
        page.resize(width, height)
        return page

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(SECONDS)
        os.close(self._write)
        self._profile.cleanup()

    def _listen(self) -> None:
        rest = b""
        while piece := os.read(self._read, 1 << 16):
            *messages, rest = (rest + piece).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._answers.pop(message["id"]).put(message)
                elif page := self._pages.get(message.get("sessionId", "")):
                    page.on_event(message["method"], message["params"])
        os.close(self._read)


class Page:
    """A tab. `problems` holds what the console tells of errors, refused content among it."""

    def __init__(self, browser: Browser, session: str, context: str) -> None:
        self._browser = browser
        self._session = session
        self._context = context
        self.problems: list[str] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def on_event(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"].get("exception", {}).get("description")))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])

    def close(self) -> None:
        self._browser.call("Target.disposeBrowserContext", browserContextId=self._context)

    def open(self, url: str) -> None:
        """Go there; the page is ready when it knows the model, or says why it doesn't."""
        self.call("Page.navigate", url=url)
        self.wait("document.querySelector('#model:enabled, #notice:not([hidden])')")

    def eval(self, script: str) -> Any:
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, f"{script}: {result['exceptionDetails']}"
        return result["result"].get("value")

    def wait(self, script: str, seconds: float = SECONDS) -> None:
        """Until the expression is true."""
        deadline = time.monotonic() + seconds
        while not self.eval(f"Boolean({script})"):
            assert time.monotonic() < deadline, f"never true: {script}; the page says: {self.text('body')}"
            time.sleep(0.03)

    def text(self, selector: str) -> str:
        return self.eval(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def texts(self, selector: str) -> list[str]:
        return self.eval(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.innerText)")

    def is_visible(self, selector: str) -> bool:
        return self.eval(f"document.querySelector({json.dumps(selector)})?.checkVisibility() ?? false")

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of the element; another element in front of it is an error."""
        found = json.dumps(selector)
        x, y = self.eval(
            f"(() => {{ const e = document.querySelector({found}); e.scrollIntoView({{ block: 'nearest' }});"
            " const b = e.getBoundingClientRect();"
            " const at = [b.x + b.width / 2, b.y + b.height / 2]; const top = document.elementFromPoint(...at);"
            " if (!e.contains(top)) throw new Error('covered by ' + top?.outerHTML.slice(0, 200)); return at; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def fill(self, selector: str, text: str) -> None:
        self.eval(f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.focus(); e.select(); }})()")
        if text:
            self.type(text)
        else:
            self.call("Input.dispatchKeyEvent", type="keyDown", key="Delete", windowsVirtualKeyCode=46)
            self.call("Input.dispatchKeyEvent", type="keyUp", key="Delete", windowsVirtualKeyCode=46)

    def press(self, key: str, modifiers: int = 0) -> None:
        code, text = KEYS[key]
        about = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **about)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def choose(self, selector: str, value: str) -> None:
        """As if picked from the list, which headless browsers don't draw."""
        kinds = "['input', 'change'].forEach((kind) => e.dispatchEvent(new Event(kind, { bubbles: true })))"
        self.eval(f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.value = {json.dumps(value)}; {kinds}; }})()")

    def say(self, text: str) -> None:
        """Send a message and wait for the end of its answer."""
        self.begin(text)
        self.wait_idle()

    def begin(self, text: str) -> None:
        self.fill("#prompt", text)
        self.press("Enter")

    def wait_idle(self, seconds: float = SECONDS) -> None:
        self.wait("!document.body.classList.contains('busy')", seconds)

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, scheme: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def controls(self) -> list[tuple[str, str]]:
        """(role, name) of what can be operated, as a screen reader is told."""
        roles = {"button", "textbox", "combobox", "spinbutton", "link", "meter", "DisclosureTriangle"}
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node["ignored"] and node["role"]["value"] in roles
        ]
