"""One constraint with everything that decides what it compiles to: the key under which a grammar is kept."""

from __future__ import annotations

import json
from dataclasses import dataclass

from canter.core.structured_outputs import StructuredOutputsConfig, StructuredOutputsParams


@dataclass(frozen=True, slots=True)
class Constraint:
    """`kind` is one of `core.structured_outputs.CONSTRAINTS`; `text` its value (choices as a JSON list)."""

    kind: str
    text: str
    any_whitespace: bool = True
    additional_properties: bool = True
    whitespace_pattern: str | None = None

    @classmethod
    def of(cls, params: StructuredOutputsParams, config: StructuredOutputsConfig) -> Constraint:
        value = getattr(params, params.kind)
        return cls(
            params.kind,
            value if isinstance(value, str) else json.dumps(value),
            not (params.disable_any_whitespace or config.disable_any_whitespace),
            not (params.disable_additional_properties or config.disable_additional_properties),
            params.whitespace_pattern,
        )

    @property
    def num_chars(self) -> int:
        return len(self.text)
