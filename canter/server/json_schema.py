"""JSON Schema of the bodies, read off their structs.

`msgspec.json.schema_components` refuses unions of structs and fields kept as they came, and some bodies have them.
"""

from __future__ import annotations

import dataclasses
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import UnsetType
from msgspec.structs import FieldInfo

PREFIX = "#/components/schemas/"
SCHEMA_MODULES = "canter.server.schemas."
_SCALARS: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    Any: {},
    object: {},
    msgspec.Raw: {},
}


class SchemaBuilder:
    """Makes schemas of types; those of structs gather in `components`, and are referred to."""

    def __init__(self) -> None:
        self.components: dict[str, dict[str, Any]] = {}
        self._bodies: set[type[msgspec.Struct]] = set()

    def body(self, kind: type[msgspec.Struct]) -> dict[str, Any]:
        """The schema of a request's body. Null stands for the default of any field that may be left out (see `body.parse`)."""
        reference = self.of(kind)
        if kind in self._bodies:
            return reference
        self._bodies.add(kind)
        component = self.components[component_name(kind)]
        for name, schema in component["properties"].items():
            if name not in component["required"] and not _takes_null(schema):
                default = {"default": schema.pop("default")} if "default" in schema else {}
                component["properties"][name] = {"anyOf": [schema, {"type": "null"}], **default}
        refused = sorted(getattr(kind, "UNSUPPORTED", {}))
        if refused:
            component["description"] += f"\n\nKnown, but refused unless they ask for nothing: {', '.join(refused)}."
        return reference

    def of(self, kind: Any) -> dict[str, Any]:
        """The schema of any type that bodies are made of; raises `TypeError` for others."""
        if kind in _SCALARS:
            return dict(_SCALARS[kind])
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return self._struct(kind)
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            return self._dataclass(kind)
        origin, arguments = get_origin(kind), get_args(kind)
        if origin in (Union, types.UnionType):
            return self._union(arguments)
        if origin is Literal:
            return {"enum": list(arguments)}
        if origin is list or kind is list:
            return {"type": "array", "items": self.of(arguments[0]) if arguments else {}}
        if origin is tuple and arguments[-1] is not Ellipsis:
            items = [self.of(argument) for argument in arguments]
            return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
        if origin is dict or kind is dict:
            return {"type": "object", "additionalProperties": self.of(arguments[1]) if arguments else {}}
        raise TypeError(f"no JSON schema is known for {kind!r}")

    def _union(self, arguments: tuple[Any, ...]) -> dict[str, Any]:
        schemas = [self.of(argument) for argument in arguments if argument is not UnsetType]
        return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}

    def _struct(self, kind: type[msgspec.Struct]) -> dict[str, Any]:
        name = component_name(kind)
        if name not in self.components:
            component: dict[str, Any] = {"type": "object", "description": (kind.__doc__ or "").strip(), "properties": {}}
            self.components[name] = component  # before its fields: one may hold the same kind again
            fields = msgspec.structs.fields(kind)
            component["properties"] = {field.encode_name: self._field(field) for field in fields}
            component["required"] = [field.encode_name for field in fields if field.required]
            if kind.__struct_config__.forbid_unknown_fields:
                component["additionalProperties"] = False
        return {"$ref": PREFIX + name}

    def _dataclass(self, kind: type[Any]) -> dict[str, Any]:
        name = component_name(kind)
        if name not in self.components:
            hints = get_type_hints(kind)
            self.components[name] = {
                "type": "object",
                "description": (kind.__doc__ or "").strip(),
                "properties": {field.name: self.of(hints[field.name]) for field in dataclasses.fields(kind)},
                "required": [field.name for field in dataclasses.fields(kind)],
            }
        return {"$ref": PREFIX + name}

    def _field(self, field: FieldInfo) -> dict[str, Any]:
        schema = self.of(field.type)
        if isinstance(field.default, (str, int, float, bool, type(None))):
            schema["default"] = field.default
        return schema


def component_name(kind: type[Any]) -> str:
    """The struct's name; dialects other than OpenAI's stand before theirs, because many call the same things by one name."""
    module = kind.__module__
    dialect = module.removeprefix(SCHEMA_MODULES) if module.startswith(SCHEMA_MODULES) else "openai"
    return kind.__name__ if dialect == "openai" else f"{dialect}.{kind.__name__}"


def _takes_null(schema: dict[str, Any]) -> bool:
    return schema.keys() <= {"default"} or {"type": "null"} in schema.get("anyOf", ())
