"""From a config and the tensors of a checkpoint to a model that is ready to run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tqdm import tqdm

from canter.checkpoint.model_config import ModelConfig
from canter.checkpoint.tensors import TensorSource
from canter.core.state_specs import CACHE_STORAGE, StateSpec
from canter.layers.build import Build
from canter.models.contract import Model, ModelArgs
from canter.models.registry import get_model_class
from canter.models.weights import load_weights


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights in place. `dtype` is named as in `core.config.DTYPES`, `cache_dtype` as in `CACHE_STORAGE`."""

    model: Model
    args: ModelArgs
    architecture: str
    dtype: str
    cache_dtype: str
    num_bytes: int
    """Of all parameters together."""

    @property
    def vocab_size(self) -> int:
        return self.args.vocab_size

    def state_specs(self, block_size: int) -> dict[int, StateSpec]:
        """layer id -> what it remembers, in blocks of `block_size` tokens."""
        return self.model.state_specs(self.args, block_size, self.cache_dtype)


def load_model(
    config: ModelConfig,
    source: TensorSource,
    dtype: str,
    device: torch.device | str = "cpu",
    cache_dtype: str | None = None,
    max_model_len: int | None = None,
) -> LoadedModel:
    """Build the model of a config on `device` in `dtype` and fill it from `source`.

    `cache_dtype`: type of cached keys and values (None: `dtype`). `max_model_len`: tokens that a request may reach
    (None: the model's own context); ropes that are stretched to fit take their frequencies from it. On a terminal a
    bar shows how far it is. Raises `UnsupportedModelError` for what Canter can't serve and `CheckpointError` for what
    does not fit together.
    """
    model_class = get_model_class(config.architecture)
    args = model_class.Args.from_hf(config.hf)
    cache_dtype = cache_dtype or dtype
    build = Build(device, getattr(torch, dtype), max_model_len or config.facts.context_length, getattr(torch, CACHE_STORAGE[cache_dtype]))
    model = model_class(args, build)
    with tqdm(total=0, desc="Loading weights", unit="B", unit_scale=True, unit_divisor=1024, disable=None, leave=False) as bar:

        def report(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        load_weights(model.parameters, model_class.WEIGHTS, args.num_layers, source, report)
    num_bytes = sum(parameter.tensor.nbytes for parameter in model.parameters.values())
    return LoadedModel(model, args, config.architecture, dtype, cache_dtype, num_bytes)
