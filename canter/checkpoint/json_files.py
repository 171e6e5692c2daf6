"""JSON files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from canter.core.errors import CheckpointError

_MAX_BYTES = 64 << 20


def read_json_object(path: Path) -> dict[str, Any]:
    """The object that the file holds. Raises `CheckpointError` when it can't be read, is no JSON, or is no object."""
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise CheckpointError(f"{path}: expected at most {_MAX_BYTES} bytes, found {size}.")
        return parse_json_object(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"{path}: can't read the file: {error.strerror or error}.") from None


def parse_json_object(text: bytes, what: str) -> dict[str, Any]:
    """The object in `text`, which errors call `what`. A name that occurs twice is an error."""
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise CheckpointError(f"{what}: the JSON is nested too deeply.") from None
    except ValueError as error:
        raise CheckpointError(f"{what}: expected JSON: {error}.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{what}: expected a JSON object, found {type(value).__name__}.")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"name {twice!r} occurs twice")
    return value
