"""The built-in page in a real browser: over answers that the test writes, and over the bundled model."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Server, serve
from tests.fake_core import FakeCore, say
from tests.page.browser import SHIFT, Browser, Page
from tests.page.canned import DONE, CannedServer, chunk, script

pytestmark = [pytest.mark.slow, pytest.mark.browser]

ANSWER = ".message.assistant:last-child"
TEXT = f"{ANSWER} .body > .markdown"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@pytest.fixture(scope="module")
def real() -> Iterator[Server]:
    with serve("--max-model-len", "1024", "--kv-cache-memory-bytes", "256M", "--served-model-name", "SmolLM2-135M") as server:
        yield server


@pytest.mark.real
def test_a_chat_with_the_bundled_model(tab: Page, real: Server, picture: Callable[[Page, str], None]) -> None:
    question = "What is a horse's canter? Explain it in two sentences."
    tab.open(real.url + "/")
    assert tab.texts("#model option") == ["SmolLM2-135M"]
    fields = {"temperature": 0, "max_tokens": 96}
    for name, value in fields.items():
        tab.fill(f"[name={name}]", str(value))
    tab.fill("[name=system]", "You answer briefly.")
    tab.begin(question)
    tab.wait_idle(120)
    messages = [{"role": "system", "content": "You answer briefly."}, {"role": "user", "content": question}]
    direct = httpx.post(real.url + "/v1/chat/completions", json={"messages": messages, **fields}, timeout=120).json()
    said = direct["choices"][0]["message"]["content"]
    assert len(said) > 40 and tab.text(TEXT).split() == said.split()
    assert f"{direct['usage']['completion_tokens']} tokens" in tab.text(f"{ANSWER} .figures")
    tab.wait("document.querySelector('[data-figure=speed]').textContent !== '0'")
    tab.eval("document.querySelector('#prompt').blur()")
    picture(tab, "page-chat")
    assert tab.problems == []


@pytest.mark.real
def test_stop_ends_the_work_of_the_engine(tab: Page, real: Server) -> None:
    tab.open(real.url + "/")
    tab.fill("[name=max_tokens]", "900")
    tab.begin("Tell me a very long story.")
    tab.wait(f"document.querySelector('{TEXT}')?.innerText.length > 20")
    tab.click("#stop")
    tab.wait_idle()
    assert "You stopped this answer." in tab.text(ANSWER)
    real.wait_idle()
    before = real.metric("vllm:generation_tokens_total")
    assert before < 900
    tab.fill("[name=max_tokens]", "5")
    tab.say("Thanks.")  # the conversation goes on
    assert len(tab.texts(".message")) == 4 and tab.problems == []


WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": WEATHER}} for name in ("get_weather", "get_time")]
CALLS = """<think>
The user asks for the weather. I have a tool for that:

- the city is **Oslo**
- the unit is not said
</think>

I will look up the weather for you.
<tool_call>
{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}
</tool_call>
<tool_call>
{"name": "get_time", "arguments": {}}
</tool_call>"""


def test_reasoning_and_tool_calls_are_folded(tab: Page, picture: Callable[[Page, str], None]) -> None:
    """What the server makes of a model's text, and what the page makes of the server's chunks."""
    server = CannedServer(core=FakeCore(say(CALLS)), parsers=("hermes", "qwen3"))
    try:
        tab.open(server.url)
        tab.fill("[name=tools]", '{"no": "list"}')
        tab.begin("What will the weather be in Oslo?")
        assert tab.eval("document.activeElement.name") == "tools" and not server.bodies
        tab.fill("[name=tools]", json.dumps(TOOLS))
        tab.fill("#prompt", "")
        tab.say("What will the weather be in Oslo?")
        assert server.bodies[-1]["tools"] == TOOLS
        assert tab.texts(f"{ANSWER} summary") == ["Reasoning", "Tool call: get_weather", "Tool call: get_time"]
        assert tab.eval("[...document.querySelectorAll('details')].map((e) => e.open)") == [False, False, False]
        assert tab.text(TEXT) == "I will look up the weather for you."
        tab.eval("document.querySelector('#prompt').blur()")
        picture(tab, "page-folded")
        tab.click(".reasoning summary")
        tab.click(".tool summary")
        assert "the city is Oslo" in tab.text(".reasoning") and tab.texts(".reasoning strong") == ["Oslo"]
        assert json.loads(tab.text(".tool pre")) == {"city": "Oslo", "days": 2}
        tab.eval("document.querySelector('#prompt').blur()")
        picture(tab, "page-unfolded")
        tab.say("And tomorrow?")
        sent = server.bodies[-1]["messages"][1]
        assert [call["function"]["name"] for call in sent["tool_calls"]] == ["get_weather", "get_time"]
        assert sent["content"] == "I will look up the weather for you."
        assert tab.text(f"{ANSWER} .error") == "" and tab.problems == []
    finally:
        server.close()


def test_thoughts_under_both_names_are_shown_once(tab: Page, canned: CannedServer) -> None:
    calls = [{"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    canned.script = script(chunk(reasoning="Hm.", reasoning_content="Hm."), chunk(tool_calls=calls), chunk("tool_calls"), DONE)
    tab.open(canned.url)
    tab.say("Go")
    tab.click(".reasoning summary")
    assert tab.text(".reasoning .markdown") == "Hm."
    tab.say("And?")
    assert canned.bodies[-1]["messages"][1]["content"] is None


def test_a_reasoning_model_shows_that_it_thinks(tab: Page, canned: CannedServer) -> None:
    go_on = asyncio.Event()

    async def slowly(body: dict[str, Any]) -> AsyncIterator[bytes]:
        yield chunk(reasoning_content="Hmm.")
        await go_on.wait()
        yield chunk(content="Yes.") + chunk("stop") + DONE

    canned.script = slowly
    tab.open(canned.url)
    tab.begin("Well?")
    tab.wait("document.querySelector('.reasoning summary')?.innerText === 'Reasoning, under way'")
    assert tab.text(f"{ANSWER} .waiting") == "Thinking…" and tab.is_visible("#stop") and not tab.is_visible("#send")
    canned.call_soon(go_on.set)
    tab.wait_idle()
    assert tab.texts(f"{ANSWER} summary") == ["Reasoning"] and tab.text(TEXT) == "Yes."


@pytest.mark.parametrize("how", ["button", "escape", "new chat"])
def test_stop(tab: Page, canned: CannedServer, how: str) -> None:
    async def endless(body: dict[str, Any]) -> AsyncIterator[bytes]:
        while True:
            yield chunk(content="word ")
            await asyncio.sleep(0.01)

    canned.script = endless
    tab.open(canned.url)
    tab.begin("Go")
    tab.wait(f"document.querySelector('{TEXT}')?.innerText.includes('word word')")
    if how == "escape":
        tab.press("Escape")
    else:
        tab.click("#stop" if how == "button" else "#new-chat")
    tab.wait_idle()
    canned.wait(lambda: canned.num_left == 1)
    if how == "new chat":
        assert tab.texts(".message") == [] and tab.is_visible("#empty")
    else:
        assert "You stopped this answer." in tab.text(ANSWER) and "word word" in tab.text(TEXT)
    canned.script = script(chunk(content="Fine."), chunk("stop"), DONE)
    tab.say("Again")
    assert tab.text(TEXT) == "Fine." and tab.problems == []


def test_errors_are_told_in_the_words_of_the_server(tab: Page, canned: CannedServer) -> None:
    tab.open(canned.url)
    failed = b'data: {"error": {"message": "The engine has died.", "type": "X", "param": null, "code": 503}}\n\n'
    cases = [
        (script(chunk(content="Half an ans"), failed, DONE), "The engine has died.", "Half an ans"),
        (script(chunk(content="Cut")), "The connection ended before the answer was complete.", "Cut"),
        (script(chunk(content="Odd"), b"data: {nonsense\n\n", DONE), "The server sent an event that is not JSON.", "Odd"),
        (script(b"data: null\n\n", b": a comment\n\n", b"event: ping\ndata: {}\n\n", chunk(content="Good"), DONE), "", "Good"),
        (script(chunk(content="Long"), chunk("length"), DONE), "", "Long"),
    ]
    for answer, error, text in cases:
        canned.script = answer
        tab.say("Hello")
        assert tab.text(f"{ANSWER} .error") == error
        assert tab.text(TEXT) == text
    assert "the most tokens were reached" in tab.text(f"{ANSWER} .note")
    for status, body, told in [
        (400, b'{"error": {"message": "top_p must be above 0.", "code": 400}}', "top_p must be above 0."),
        (502, b"<html><script>window.pwned = 1</script>", "The server answered 502 Bad Gateway."),
    ]:
        canned.failure = (status, body)
        tab.say("Hello")
        assert tab.text(f"{ANSWER} .error") == told
    canned.failure = None
    canned.script = None
    tab.fill("[name=top_k]", "-1")
    tab.fill("[name=max_tokens]", "100000")  # the real server's own refusal
    tab.say("Hello")
    assert "max_tokens" in tab.text(f"{ANSWER} .error")
    tab.fill("[name=max_tokens]", "3")
    tab.click(f"{ANSWER} .foot button:nth-of-type(3)")
    tab.wait_idle()
    assert tab.text(f"{ANSWER} .error") == "" and tab.text(TEXT)


def test_a_server_that_is_gone(tab: Page) -> None:
    server = CannedServer()
    tab.open(server.url)
    server.close()
    tab.say("Hello?")
    assert tab.text(f"{ANSWER} .error") == "The server can't be reached."
    tab.wait("document.querySelector('[data-figure=running]').textContent === '–'")


HOSTILE = """<script>window.pwned = 1</script><img src=x onerror="window.pwned = 2"><svg onload="window.pwned = 3">

[run](javascript:window.pwned=4) [data](data:text/html,<script>window.pwned=5</script>) [file](file:///etc/passwd) [local](/metrics)
[tricky](java&#115;cript:alert(1)) [ok](https://example.org/a_(b)) <javascript:alert(1)> https://example.com/x?y="onclick=1

```html" onmouseover="window.pwned=6
</code></pre><script>window.pwned = 7</script>
```

# <iframe srcdoc="<script>window.pwned=8</script>">
- <style>body { display: none }</style>
> </div></body><base href="https://evil.example/">
"""


def test_hostile_output_stays_text(tab: Page, canned: CannedServer) -> None:
    call = [{"index": 0, "function": {"name": "<img src=x onerror=alert(1)>", "arguments": "<script>window.pwned = 9</script>"}}]
    canned.script = script(chunk(reasoning=HOSTILE), chunk(content=HOSTILE), chunk(tool_calls=call), chunk("stop"), DONE)
    tab.open(canned.url)
    tab.say(HOSTILE)
    tab.eval("document.querySelectorAll('#log details').forEach((e) => (e.open = true))")
    assert tab.eval("document.querySelectorAll('#log :is(script, img, svg, iframe, style, base, object, embed, form)').length") == 0
    assert tab.eval("[...new Set([...document.querySelectorAll('#log a')].map((a) => a.href))]") == [
        "https://example.org/a_(b)",
        "https://example.com/x?y=",
        "https://evil.example/",
    ]
    assert (
        tab.eval("[...document.querySelectorAll('#log *')].flatMap((e) => [...e.attributes]).filter((a) => /^on/.test(a.name)).length") == 0
    )
    assert tab.eval("typeof window.pwned") == "undefined"
    text = tab.text(TEXT)
    for part in ("<script>window.pwned = 1</script>", "[run](javascript:window.pwned=4)", "[local](/metrics)", "</code></pre><script>"):
        assert part in text
    assert tab.problems == []


def test_what_models_write_stays_cheap_to_show(tab: Page, canned: CannedServer) -> None:
    """Texts made to upset a parser: the page shows all of them, in one piece."""
    awkward = [
        "*" * 20000,
        "**a" * 7000,
        "x" + "`" * 20000,
        "[" * 20000,
        "> " * 5000 + "x",
        "- " * 3000 + "x",
        "_" * 20000,
        "[a](" * 5000,
        "#" * 9999,
    ]
    canned.script = script(*(chunk(content=text + "\n\n") for text in awkward), chunk(content="end"), chunk("stop"), DONE)
    tab.open(canned.url)
    tab.say("Go")
    assert tab.texts(f"{TEXT} > :last-child") == ["end"]


def test_markdown(tab: Page, canned: CannedServer) -> None:
    source = (
        "# Title\n\nA **strong _and_ soft** word, *one*, snake_case_name, 2 * 3 * 4, `a*b*`, \\*plain\\*.\nNext line\n\n"
        "1. one\n   - inner\n   - more\n2. two\n\n> quoted\n> text\n\n---\n\n```py\nif a < b:\n\n    pass\n```\n"
        'See https://example.org/x_y_z, [here](https://example.org "title").'
    )
    canned.script = script(*(chunk(content=letter) for letter in source), chunk("stop"), DONE)
    tab.open(canned.url)
    tab.say("Go")
    assert tab.eval(f"[...document.querySelector('{TEXT}').children].map((e) => e.localName)") == [
        "h3", "p", "ol", "blockquote", "hr", "div", "p",
    ]  # fmt: skip
    assert tab.texts(f"{TEXT} strong") == ["strong and soft"] and tab.texts(f"{TEXT} em") == ["and", "one"]
    assert "snake_case_name, 2 * 3 * 4" in tab.text(TEXT) and "*plain*." in tab.text(TEXT)
    assert tab.texts(f"{TEXT} ol > li > ul > li") == ["inner", "more"]
    assert tab.texts(f"{TEXT} pre code") == ["if a < b:\n\n    pass"]
    assert tab.eval(f"[...document.querySelectorAll('{TEXT} a')].map((a) => a.href)") == [
        "https://example.org/x_y_z",
        "https://example.org/",
    ]


def test_streams_cut_anywhere(tab: Page, canned: CannedServer) -> None:
    """Every byte on its own, characters of four bytes among them, under all three line ends."""
    stream = chunk(role="assistant") + chunk(content="Grüße, 世界 🐎") + chunk(content="!") + chunk("stop") + DONE
    for end in (b"\n", b"\r\n", b"\r"):
        canned.script = script(*(bytes([byte]) for byte in stream.replace(b"\n", end)))
        tab.open(canned.url)
        tab.say("Go")
        assert tab.text(TEXT) == "Grüße, 世界 🐎!" and tab.text(f"{ANSWER} .error") == ""


def test_the_parser_of_events(tab: Page, canned: CannedServer) -> None:
    tab.open(canned.url)
    stream = ":c\r\n\r\ndata: a\r\ndata:b\r\n\r\nevent: x\ndata\n\ndata:  two\n\nid: 1\rdata: z\r\rdata: never ended"
    expected = [
        {"name": "message", "data": "a\nb"},
        {"name": "x", "data": ""},
        {"name": "message", "data": " two"},
        {"name": "message", "data": "z"},
    ]
    for size in (1, 2, 3, 7, 1000):
        pieces = [stream[i : i + size] for i in range(0, len(stream), size)]
        found = tab.eval(
            f"import('./page/sse.js').then(({{ EventParser }}) => {{ const p = new EventParser();"
            f" return {json.dumps(pieces)}.flatMap((piece) => p.feed(piece)); }})"
        )
        assert found == expected, size


def test_regenerate_and_edit(tab: Page, canned: CannedServer) -> None:
    tab.open(canned.url)
    for number, text in enumerate(["first", "second"]):
        canned.script = script(chunk(content=f"answer {number}"), chunk("stop"), DONE)
        tab.say(text)
    canned.script = script(chunk(content="another"), chunk("stop"), DONE)
    tab.click(f"{ANSWER} .foot button:nth-of-type(3)")
    tab.wait_idle()
    said = [message["content"] for message in canned.bodies[-1]["messages"]]
    assert said == ["first", "answer 0", "second"] and tab.texts(TEXT) == ["another"]
    tab.click(".message:nth-of-type(1) .foot button:nth-of-type(2)")  # edit, and change one's mind
    tab.press("Escape")
    assert len(tab.texts(".message")) == 4
    tab.click(".message:nth-of-type(2) .foot button:nth-of-type(2)")  # an answer of the model: only its text changes
    tab.fill(".message textarea", "corrected")
    tab.click(".message .body > .row button")
    assert len(tab.texts(".message")) == 4 and "corrected" in tab.text(".message:nth-of-type(2)")
    tab.click(".message:nth-of-type(3) .foot button:nth-of-type(2)")
    tab.fill(".message textarea", "changed")
    tab.click(".message .body > .row button")
    tab.wait_idle()
    assert [message["content"] for message in canned.bodies[-1]["messages"]] == ["first", "corrected", "changed"]
    assert len(tab.texts(".message")) == 4 and tab.problems == []


def test_copy(tab: Page, canned: CannedServer) -> None:
    canned.script = script(chunk(content="Text:\n```\nlet x = 1;\n```"), chunk("stop"), DONE)
    tab.open(canned.url)
    tab.say("Go")
    tab.eval("window.copied = []; navigator.clipboard.writeText = async (text) => void copied.push(text)")
    tab.click(f"{ANSWER} .code button")
    tab.click(f"{ANSWER} .foot button")
    tab.wait("copied.length === 2")
    assert tab.eval("copied") == ["let x = 1;", "Text:\n```\nlet x = 1;\n```"]
    assert tab.text(f"{ANSWER} .foot button") == "Copied"


def test_settings_shape_the_request(tab: Page, canned: CannedServer) -> None:
    canned.script = script(chunk(content="ok"), chunk("stop"), DONE)
    tab.open(canned.url)
    tab.say("plain")
    assert canned.bodies[-1] == {
        "model": "m", "messages": [{"role": "user", "content": "plain"}], "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    given = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "max_tokens": 5, "seed": 42, "presence_penalty": -1,
        "frequency_penalty": 0.5, "repetition_penalty": 1.1,
    }  # fmt: skip
    for name, value in given.items():
        tab.fill(f"[name={name}]", str(value))
    tab.fill("[name=system]", "Be kind.")
    tab.say("shaped")
    body = canned.bodies[-1]
    assert {name: body[name] for name in given} == given
    assert body["messages"][0] == {"role": "system", "content": "Be kind."}
    tab.open(canned.url)  # kept over a reload
    assert tab.eval("document.querySelector('[name=temperature]').value") == "0.7"
    tab.fill("[name=top_p]", "7")
    tab.begin("refused")
    assert len(canned.bodies) == 2 and tab.eval("document.activeElement.name") == "top_p"
    assert tab.eval("document.querySelector('#prompt').value") == "refused"


def test_a_key_is_asked_for_and_stays_in_the_tab(browser: Browser) -> None:
    server = CannedServer(api_key=["schlüssel"])
    tab = browser.page()
    try:
        tab.open(server.url)
        tab.wait("document.activeElement.name === 'key'")
        assert "needs an API key" in tab.text("#notice") and "schlüssel" not in tab.text("#notice")
        tab.type("schlüssel")
        tab.press("Enter")
        tab.wait("document.querySelector('#model:enabled')")
        assert not tab.is_visible("#notice")
        tab.fill("[name=max_tokens]", "3")
        tab.say("Hello")
        assert tab.text(TEXT) and tab.text(f"{ANSWER} .error") == ""
        assert tab.eval("[sessionStorage.getItem('canter.key'), localStorage.length, document.cookie]") == ["schlüssel", 0, ""]
        assert "schlüssel" not in tab.eval("sessionStorage.getItem('canter.settings')")
    finally:
        tab.close()
        server.close()


def contrast(tab: Page, selector: str) -> float:
    """Between the text of an element and what it stands on (WCAG)."""
    return tab.eval(
        f"""(() => {{
          const light = (colour) => {{
            const parts = colour.match(/[\\d.]+/g).slice(0, 3).map((c) => c / 255);
            const [r, g, b] = parts.map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          }};
          const element = document.querySelector({json.dumps(selector)});
          let ground = element;
          while (getComputedStyle(ground).backgroundColor === "rgba(0, 0, 0, 0)") ground = ground.parentElement;
          const [low, high] = [getComputedStyle(element).color, getComputedStyle(ground).backgroundColor].map(light).sort((a, b) => a - b);
          return (high + 0.05) / (low + 0.05);
        }})()"""
    )


def test_light_and_dark_can_be_read(tab: Page, canned: CannedServer, picture: Callable[[Page, str], None]) -> None:
    good = "Here is a **Python** function:\n\n```python\ndef double(x: float) -> float:\n    return 2 * x\n```\n\nSee [the manual](https://docs.python.org/)."
    tab.resize(1100, 880)
    tab.open(canned.url)
    canned.script = script(chunk(reasoning="Simple."), chunk(content=good), chunk("stop"), DONE)
    tab.say("Write a function that doubles a number.")
    canned.script = script(chunk(content="The second "), b'data: {"error": {"message": "The engine has died.", "code": 503}}\n\n')
    tab.say("And one that halves it?")
    grounds = {}
    selectors = [
        "h1",
        "dt",
        "#keys",
        "#send",
        "summary",
        ".markdown p",
        ".markdown a",
        ".code pre",
        ".error",
        ".figures",
        ".hint",
        ".small",
    ]
    for scheme in ("light", "dark"):
        tab.prefer(scheme)
        grounds[scheme] = tab.eval("getComputedStyle(document.body).backgroundColor")
        assert {selector for selector in selectors if contrast(tab, selector) < 4.5} == set(), scheme
    assert grounds["light"] != grounds["dark"]
    tab.eval("document.querySelector('#prompt').blur()")
    picture(tab, "page-dark")
    tab.choose("[name=theme]", "light")
    assert tab.eval("getComputedStyle(document.body).backgroundColor") == grounds["light"]
    tab.open(canned.url)
    assert tab.eval("getComputedStyle(document.body).backgroundColor") == grounds["light"]


def test_narrow_screens(tab: Page, canned: CannedServer, picture: Callable[[Page, str], None]) -> None:
    tab.resize(360, 640)
    canned.script = script(chunk(content="word " * 30 + "\n```\n" + "x" * 300 + "\n```\n" + "y" * 300), chunk("stop"), DONE)
    tab.open(canned.url)
    assert not tab.is_visible("#settings")
    tab.say("Hello")
    assert tab.eval("document.documentElement.scrollWidth") == 360 and tab.eval("document.querySelector('#log').scrollWidth") <= 360
    for selector in ("#new-chat", "#toggle-settings", "#send", "#model"):
        assert tab.eval(
            f"(() => {{ const b = document.querySelector('{selector}').getBoundingClientRect(); return b.left >= 0 && b.right <= 360; }})()"
        )
    canned.script = script(chunk(content="Three steps:\n\n1. `make setup`\n2. `make demo`\n3. enjoy it"), chunk("stop"), DONE)
    tab.click("#new-chat")
    tab.say("How do I begin?")
    tab.eval("document.querySelector('#prompt').blur()")
    picture(tab, "page-narrow")
    tab.click("#toggle-settings")
    assert tab.is_visible("#settings") and tab.eval("document.activeElement.id") == "close-settings"
    tab.press("Escape")
    assert not tab.is_visible("#settings") and tab.eval("document.activeElement.id") == "toggle-settings"


def test_keyboard_and_screen_reader(tab: Page, canned: CannedServer) -> None:
    call = [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]
    canned.script = script(chunk(reasoning="r"), chunk(content="```\ncode\n```"), chunk(tool_calls=call), chunk("stop"), DONE)
    tab.open(canned.url)
    tab.wait("document.activeElement.id === 'prompt'")
    tab.type("two")
    tab.press("Enter", SHIFT)
    tab.type("lines")
    tab.press("Enter")
    tab.wait_idle()
    assert canned.bodies[-1]["messages"][0]["content"] == "two\nlines"
    assert tab.eval("document.activeElement.id") == "prompt" and tab.text("#status") == "The answer is complete."
    controls = tab.controls()
    assert len(controls) > 20 and [role for role, name in controls if not name] == []
    tab.eval("document.activeElement.blur(); getSelection().removeAllRanges(); document.body.focus()")
    reached = []
    for _ in range(60):
        tab.press("Tab")
        reached.append(
            tab.eval("(document.activeElement.textContent || document.activeElement.name || document.activeElement.id).trim().slice(0, 40)")
        )
    for wanted in (
        "Skip to the message field",
        "New chat",
        "Settings",
        "Reasoning",
        "Copy",
        "Tool call: f",
        "Regenerate",
        "Send",
        "temperature",
    ):
        assert wanted in reached
    assert tab.eval("document.documentElement.lang") == "en"
    assert tab.eval("document.querySelector('.message').getAttribute('aria-busy')") == "false"


def test_figures_are_polled_only_while_the_page_is_seen(tab: Page, canned: CannedServer) -> None:
    tab.open(canned.url)
    canned.wait(lambda: canned.scrapes >= 2)
    assert tab.text("[data-figure=running]") == "0" and tab.text("[data-figure=cache]").endswith("%")
    change = "document.dispatchEvent(new Event('visibilitychange'))"
    hide = f"Object.defineProperty(document, 'hidden', {{{{ value: {{}}, configurable: true }}}}); {change}"
    tab.eval(hide.format("true"))
    time.sleep(0.5)  # one may be under way
    before = canned.scrapes
    time.sleep(4.5)
    assert canned.scrapes == before
    tab.eval(hide.format("false"))
    canned.wait(lambda: canned.scrapes > before)


def test_metrics_are_read(tab: Page, canned: CannedServer) -> None:
    tab.open(canned.url)
    text = '# HELP a b\na{x="1 }",y="2"} 3\na{x="2"} 4.5\nb 1e3\nc_total{} NaN\n\n'
    found = tab.eval(f"import('./page/metrics.js').then((m) => Object.fromEntries(m.parseMetrics({json.dumps(text)})))")
    assert found["a"] == 7.5 and found["b"] == 1000


def test_images_only_where_the_model_takes_them(browser: Browser, canned: CannedServer, tmp_path: Path) -> None:
    tab = browser.page()
    server = CannedServer(models=[{"id": "sees", "input_modalities": ["text", "image"]}, {"id": "reads"}])
    try:
        tab.open(canned.url)
        assert not tab.is_visible("#images")
        server.script = script(chunk(content="A dot."), chunk("stop"), DONE)
        tab.open(server.url)
        assert tab.is_visible("#images") and not tab.is_visible("#remove-image")
        (tmp_path / "dot.png").write_bytes(base64.b64decode(PIXEL))
        root = tab.call("DOM.getDocument")["root"]["nodeId"]
        node = tab.call("DOM.querySelector", nodeId=root, selector="#image-file")["nodeId"]
        tab.call("DOM.setFileInputFiles", nodeId=node, files=[str(tmp_path / "dot.png")])
        tab.wait("document.querySelector('#image-name').textContent === 'dot.png'")
        tab.say("What is this?")
        image, text = server.bodies[-1]["messages"][0]["content"]
        assert image == {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
        assert text == {"type": "text", "text": "What is this?"}
        assert tab.eval("document.querySelector('.picture').naturalWidth") == 1 and not tab.is_visible("#remove-image")
        tab.choose("#model", "reads")
        assert not tab.is_visible("#images")
        assert tab.problems == []
    finally:
        tab.close()
        server.close()


def test_below_the_path_of_a_proxy(browser: Browser) -> None:
    server = CannedServer(prefix="/models/one")
    tab = browser.page()
    try:
        tab.open(server.url)
        tab.fill("[name=max_tokens]", "3")
        tab.say("Hello")
        assert tab.text(TEXT) and len(server.bodies) == 1 and tab.problems == []
    finally:
        tab.close()
        server.close()
