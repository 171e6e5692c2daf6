"""Outputs of models written by hand, and what they say: one file a format in `transcripts/`.

A file begins with lines `key: JSON`: `calls` and `thoughts` (the names of the format), `tokens` (its markers), `special`. Then come
transcripts: a line `=== title`, lines `key: JSON` (`options` of the request, `prompt`, the text that ends the prompt, `needs_ids`),
a line `<<<`, the output up to a line `>>>`, and what it says, a JSON object a line: {"reasoning": ...}, {"content": ...} or
{"call": name, "arguments": {...}} with "id" where the format fixes it. Text between U+27E6 and U+27E7 is tokenised as ordinary text.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from canter.text.detokenizer import IncrementalDetokenizer
from canter.text.parsing.events import CallArguments, CallEnd, CallStart, ContentText, Event, ReasoningText
from canter.text.parsing.load import load_format
from canter.text.parsing.machine import Machine
from canter.text.parsing.options import ParseOptions, Tool
from canter.text.tokenizer import Tokenizer
from tests.text.parsing.vocabulary import encode_plain, tiny_tokenizer

DIRECTORY = Path(__file__).parent / "transcripts"

TOOLS = (
    Tool("get_weather", {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}),
    Tool("ping", {"type": "object", "properties": {}}),
    Tool("write_file", {"type": "object", "properties": {"path": {"type": "string"}, "content": {"type": "string"}}}),
    Tool(
        "search",
        {
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "limit": {"type": ["integer", "null"]},
                "exact": {"type": "boolean"},
                "ratio": {"type": "number"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "filter": {"type": "object", "properties": {"year": {"type": "integer"}, "lang": {"type": "string"}}},
                "sort": {"anyOf": [{"enum": ["asc", "desc"]}, {"type": "null"}]},
            },
        },
    ),
)


@dataclass(frozen=True)
class Transcript:
    file: str
    title: str
    calls: str | None
    thoughts: str | None
    tokens: tuple[str, ...]
    special: tuple[str, ...]
    output: str
    said: list[dict[str, Any]]
    options: dict[str, Any] = field(default_factory=dict)
    prompt: str = ""
    needs_ids: bool = False

    def __str__(self) -> str:
        return f"{self.file}: {self.title}"

    def tokenizer(self, byte_level: bool = True) -> Tokenizer:
        return tiny_tokenizer(self.tokens, self.special, byte_level)

    def parser(self, tokenizer: Tokenizer) -> Machine:
        output_format = load_format(tokenizer, None, self.calls, self.thoughts)
        assert output_format is not None
        ids = tokenizer.encode(self.prompt, add_special_tokens=False) if self.prompt else []
        return output_format.parser(ParseOptions(**{"tools": TOOLS, "tool_choice": "auto", **self.options}), ids, self.prompt)

    @property
    def text(self) -> str:
        return self.output.replace("\u27e6", "").replace("\u27e7", "")

    def token_ids(self, tokenizer: Tokenizer) -> list[int]:
        ids: list[int] = []
        for part in re.split("(\u27e6.*?\u27e7)", self.output, flags=re.DOTALL):
            plain = part.startswith("\u27e6")
            ids += encode_plain(tokenizer, part[1:-1]) if plain else tokenizer.encode(part, add_special_tokens=False)
        return ids

    def pieces(self, tokenizer: Tokenizer) -> list[tuple[str, int]]:
        """Token by token: the text that its detokenizer gives, and the id."""
        ids = self.token_ids(tokenizer)
        prompt = tokenizer.encode(self.prompt, add_special_tokens=False) if self.prompt else []
        detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=False)
        pieces = [(detokenizer.append([token_id]), token_id) for token_id in ids]
        rest = detokenizer.flush()
        return [*pieces[:-1], (pieces[-1][0] + rest, pieces[-1][1])] if pieces else []


@cache
def read_transcripts() -> tuple[Transcript, ...]:
    return tuple(transcript for path in sorted(DIRECTORY.glob("*.txt")) for transcript in _read_file(path))


def _read_file(path: Path) -> list[Transcript]:
    head, *sections = re.split(r"^=== ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    common = _keys(head)
    return [_read_section(path.stem, common, section) for section in sections]


def _keys(text: str) -> dict[str, Any]:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return {key: json.loads(value) for key, value in (line.split(":", 1) for line in lines)}


def _read_section(file: str, common: dict[str, Any], section: str) -> Transcript:
    title, _, rest = section.partition("\n")
    head, output, said = re.match(r"(.*?)^<<<\n(.*?)\n?^>>>$(.*)", rest, re.DOTALL | re.MULTILINE).groups()  # type: ignore[union-attr]
    keys = {**common, **_keys(head)}
    events = [json.loads(line) for line in said.splitlines() if line.strip()]
    tokens, special = tuple(keys.pop("tokens", ())), tuple(keys.pop("special", ("<|end|>",)))
    return Transcript(
        file=file, title=title.strip(), tokens=tokens, special=special, output=output, said=events,
        calls=keys.pop("calls", None), thoughts=keys.pop("thoughts", None), **keys,
    )  # fmt: skip


def told(events: list[Event]) -> list[dict[str, Any]]:
    """Events as transcripts write them; texts of one kind in a row are one. Fails on events that no reader could use."""
    said: list[dict[str, Any]] = []
    started: dict[int, dict[str, Any]] = {}
    for event in events:
        match event:
            case ReasoningText(text) | ContentText(text):
                assert text
                kind = "reasoning" if isinstance(event, ReasoningText) else "content"
                if said and kind in said[-1]:
                    said[-1][kind] += text
                else:
                    said.append({kind: text})
            case CallStart(index, call_id, name):
                assert index == len(started) and name and call_id
                assert all(call["ended"] for call in started.values())
                started[index] = {"call": name, "raw": "", "id": call_id, "ended": False}
                said.append(started[index])
            case CallArguments(index, text):
                assert text and index in started and not started[index]["ended"]
                started[index]["raw"] += text
            case CallEnd(index):
                assert not started[index]["ended"]
                started[index]["ended"] = True
    return said


def checked(said: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Compare what was said with what a transcript expects; all calls must have ended."""
    plain = []
    for item, wanted in zip(said, [*expected, *[{}] * len(said)], strict=False):
        if "call" not in item:
            plain.append(item)
            continue
        assert item["ended"], item
        call = {"call": item["call"], "arguments": json.loads(item["raw"], parse_constant=_refuse)}
        if "id" in wanted:
            call["id"] = item["id"]
        plain.append(call)
    assert json.dumps(plain, ensure_ascii=False) == json.dumps(expected, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")
