"""The registry: torch-free to import, complete, and clear about what it lacks."""

from __future__ import annotations

import subprocess
import sys

import pytest

from canter.core.errors import UnsupportedModelError
from canter.models.registry import RegistryRow, get_model_class, list_models
from canter.models.weights import WeightMap


def test_importing_the_registry_does_not_import_torch() -> None:
    program = "import sys; from canter.models.registry import list_models; list_models(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_architectures_are_unique() -> None:
    names = [row.architecture for row in list_models()]
    assert len(names) == len(set(names)) == len(list_models())


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
