"""The registry: torch-free to import, complete, and clear about what it lacks."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import transformers

from canter.core.errors import UnsupportedModelError
from canter.core.state_specs import StateKind, StateSpec
from canter.models.registry import RegistryRow, get_model_class, list_models
from canter.models.weights import WeightMap
from tests.models.families import FAMILIES


def test_importing_the_registry_does_not_import_torch() -> None:
    program = "import sys; from canter.models.registry import list_models; list_models(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_architectures_are_unique() -> None:
    names = [row.architecture for row in list_models()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("row", list_models(), ids=lambda row: row.architecture)
def test_every_row_names_a_model(row: RegistryRow) -> None:
    model_class = get_model_class(row.architecture)
    assert model_class.__name__ == row.class_name
    assert isinstance(model_class.WEIGHTS, WeightMap)
    assert callable(model_class.Args.from_hf) and callable(model_class.state_specs)
    assert row.family


def test_an_unknown_architecture_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'GPT5ForCausalLM' is not supported.*LlamaForCausalLM"):
        get_model_class("GPT5ForCausalLM")


PUBLISHED_AS = {"MiniMaxText01ForCausalLM": "MiniMaxForCausalLM", "MiniMaxM1ForCausalLM": "MiniMaxForCausalLM"}
"""Architectures of configs that transformers doesn't read, and its own of the same models."""


def test_rows_say_which_kinds_of_memory_families_have() -> None:
    """What the tiny configurations of the tests remember is what `canter models` says, all of them together."""
    seen: dict[str, set[StateKind]] = {}
    for family in FAMILIES:
        config = getattr(transformers, family.config_class)(**json.loads(json.dumps(dict(family.settings)))).to_dict()
        config = {family.nested: config} if family.nested else config
        model_class = get_model_class(family.architecture)
        specs = model_class.state_specs(model_class.Args.from_hf(config), 16, "float32", "float32")
        kinds = {spec.kind for spec in specs.values() if isinstance(spec, StateSpec)}
        seen.setdefault(family.architecture, set()).update(kinds)
    told = {row.architecture: set(row.memory) for row in list_models()}
    assert seen == {name: told[name] for name in seen}
    for name, same in PUBLISHED_AS.items():
        assert told.pop(name) == told[same]
    assert seen.keys() == told.keys(), "every architecture is tested"
