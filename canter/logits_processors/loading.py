"""From the names that `--logits-processors` gives to classes, and the check of the arguments that requests bring them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.metadata import entry_points

from canter.core.errors import CanterError, ConfigError, InvalidRequestError
from canter.core.sampling_params import SamplingParams
from canter.logits_processors.interface import LogitsProcessor
from canter.logits_processors.ngram_ban import NGramBan

BUNDLED: dict[str, type[LogitsProcessor]] = {"ngram-ban": NGramBan}
ENTRY_POINTS = "canter.logits_processors"


def load_classes(names: Sequence[str]) -> list[type[LogitsProcessor]]:
    """The classes of some names, in their order. Raises `ConfigError` for a name that leads to none."""
    classes = [load_class(name) for name in names]
    owners: dict[str, str] = {}
    for name, found in zip(names, classes, strict=True):
        for argument in found.arguments:
            if argument in owners:
                raise ConfigError(f"logits_processors {owners[argument]} and {name} both read {argument} of vllm_xargs. Load one of them.")
            owners[argument] = name
    return classes


def load_class(name: str) -> type[LogitsProcessor]:
    """A bundled processor, `module:Class`, or the name of an installed one."""
    if name in BUNDLED:
        return BUNDLED[name]
    module, colon, attribute = name.partition(":")
    if colon:
        try:
            found: object = importlib.import_module(module)
            for part in attribute.split("."):
                found = getattr(found, part)
        except Exception as error:  # whatever a module does when it is imported
            raise ConfigError(f"logits_processors: {name!r} can't be loaded: {type(error).__name__}: {error}.") from error
    else:
        found = _installed(name)
    if not isinstance(found, type) or not issubclass(found, LogitsProcessor):
        raise ConfigError(f"logits_processors: {name!r} is no subclass of canter.logits_processors.interface.LogitsProcessor.")
    return found


def _installed(name: str) -> object:
    known = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in known:
        raise ConfigError(f"logits_processors: no {name!r}. Give module:Class, or one of: {', '.join(sorted({*BUNDLED, *known}))}.")
    try:
        return known[name].load()
    except Exception as error:
        raise ConfigError(f"logits_processors: {name!r} can't be loaded: {type(error).__name__}: {error}.") from error


def check_arguments(classes: Sequence[type[LogitsProcessor]], params: SamplingParams) -> None:
    """Raise `InvalidRequestError` for arguments that no processor reads, or that one does not accept."""
    given = params.extra_args or {}
    known = frozenset().union(*(found.arguments for found in classes))
    for name in given:
        if name not in known:
            which = f"The loaded ones read: {', '.join(sorted(known))}." if known else "None is loaded (--logits-processors)."
            raise InvalidRequestError(f"vllm_xargs.{name:.80} is read by no logits processor. {which}", "vllm_xargs")
    for found in classes:
        try:
            found.validate_params(params)
        except CanterError:
            raise
        except (ValueError, TypeError) as error:
            raise InvalidRequestError(f"vllm_xargs: {error}", "vllm_xargs") from error
