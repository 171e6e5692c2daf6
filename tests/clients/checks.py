"""What the clients' scripts share: a list of checks, run in order, one line of JSON for each. Standard library only."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

URL = os.environ.get("CANTER_URL", "")
KEY = os.environ.get("CANTER_KEY", "")
MODEL = os.environ.get("CANTER_MODEL", "")
CAPITAL = "What is the capital of France? Answer in one sentence."
COUNT = "Count from one to ten in words."
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"], "additionalProperties": False}
FUNCTIONS = ("weather", "time")
ASK = "What is the weather in Paris?"
EXAMPLES = [
    (f"What is the weather in {city}?", f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>')
    for city in ("Oslo", "Rome", "Lima")
]
"""Questions, and how a model answers that calls a function: from these the bundled model learns it."""

_checks: list[Callable[[], Any]] = []


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    """Register a check: a function, perhaps a coroutine, that raises when something is wrong."""
    _checks.append(function)
    return function


def shown_how() -> list[dict[str, str]]:
    """A conversation in which the model has called a function before, and is asked again."""
    turns = [[{"role": "user", "content": asked}, {"role": "assistant", "content": said}] for asked, said in EXAMPLES]
    return [*(message for turn in turns for message in turn), {"role": "user", "content": ASK}]


def raises(kind: type[BaseException], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The error of this class that a call ends with."""
    try:
        result = function(*args, **kwargs)
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} but {result!r:.300}")


def run(package: str) -> None:
    """Run the checks and tell what came of each; the exit code is 1 if one failed."""
    print(json.dumps({"version": version(package)}), flush=True)
    failed = False
    for function in _checks:
        problem = None
        try:
            result = function()
            if inspect.isawaitable(result):
                asyncio.run(_awaited(result))
        except Exception:
            failed, problem = True, traceback.format_exc()
        print(json.dumps({"check": function.__name__, "problem": problem}), flush=True)
    sys.exit(failed)


async def _awaited(result: Any) -> None:
    await result
