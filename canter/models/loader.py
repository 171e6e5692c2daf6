"""From a config and the tensors of a checkpoint to a model that is ready to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from tqdm import tqdm

from canter.checkpoint.model_config import ModelConfig
from canter.checkpoint.tensors import TensorSource
from canter.core.errors import ConfigError
from canter.core.logging import get_logger
from canter.core.state_specs import CACHE_STORAGE, SharedState, StateSpec
from canter.layers.build import Build
from canter.layers.quant import open_scheme
from canter.models.contract import Model, ModelArgs
from canter.models.registry import get_model_class
from canter.models.weights import LoadOptions, LoadPlan

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights in place. `dtype` is named as in `core.config.DTYPES`, `cache_dtype` as in `CACHE_STORAGE`."""

    model: Model
    args: ModelArgs
    architecture: str
    dtype: str
    cache_dtype: str
    num_bytes: int
    """Memory that all parameters take together; rows that stay in the file are not in it."""

    @property
    def vocab_size(self) -> int:
        return self.args.vocab_size

    def state_specs(self, block_size: int) -> Mapping[int, StateSpec | SharedState]:
        """layer id -> what it remembers, in blocks of `block_size` tokens."""
        return self.model.state_specs(self.args, block_size, self.cache_dtype, self.dtype)


def load_model(
    config: ModelConfig,
    source: TensorSource,
    dtype: str,
    device: torch.device | str = "cpu",
    cache_dtype: str | None = None,
    max_model_len: int | None = None,
    quantization: str = "auto",
) -> LoadedModel:
    """Build the model of a config on `device` in `dtype` and fill it from `source`.

    `cache_dtype`: type of cached keys and values (None: `dtype`). `max_model_len`: tokens that a request may reach
    (None: the model's own context); ropes that are stretched to fit take their frequencies from it. `quantization`: as in
    `EngineConfig`, or "auto" for what the checkpoint holds. On a terminal a bar shows how far it is. Raises
    `UnsupportedModelError` for what Canter can't serve and `CheckpointError` for what does not fit together.
    """
    cache_dtype = cache_dtype or dtype
    model, args, plan = _plan(config, source, dtype, device, cache_dtype, max_model_len, quantization)
    with tqdm(total=0, desc="Loading weights", unit="B", unit_scale=True, unit_divisor=1024, disable=None, leave=False) as bar:

        def report(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        plan.load(report)
    logger.info("%s", describe_weights(plan))
    return LoadedModel(model, args, config.architecture, dtype, cache_dtype, plan.num_bytes)


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a step takes of a model's weights: bytes to read, and format -> weights that each token is multiplied by, in the layers
    and in the output matrix."""

    num_bytes: int
    layers: dict[str, int]
    output: dict[str, int]


def step_cost(config: ModelConfig, source: TensorSource, dtype: str, quantization: str = "auto") -> StepCost:
    """Of a model on the CPU, loaded in `dtype` with this `quantization`. No weights are read."""
    plan = _plan(config, source, dtype, "cpu", dtype, 1, quantization)[2]
    return StepCost(plan.step_bytes, plan.num_weights("product"), plan.num_weights("output"))


def describe_weights(plan: LoadPlan) -> str:
    """One sentence: how much memory the weights take, and in which formats."""
    formats = sorted(plan.bytes_by_format.items(), key=lambda item: -item[1])
    named = ", ".join(f"{name} {nbytes / 2**20:,.1f}" for name, nbytes in formats)
    rows = f"; {plan.file_bytes / 2**20:,.1f} MiB of embeddings stay in the file" if plan.file_bytes else ""
    return f"Weights take {plan.num_bytes / 2**20:,.1f} MiB ({named}){rows}."


def _plan(
    config: ModelConfig,
    source: TensorSource,
    dtype: str,
    device: torch.device | str,
    cache_dtype: str,
    max_model_len: int | None,
    quantization: str,
) -> tuple[Model, ModelArgs, LoadPlan]:
    """A model that is not filled, and the plan that fills it."""
    model_class = get_model_class(config.architecture)
    args = model_class.Args.from_hf(config.hf)
    cache_storage = getattr(torch, CACHE_STORAGE[cache_dtype])
    build = Build(device, getattr(torch, dtype), max_model_len or config.facts.context_length, cache_storage)
    model = model_class(args, build)
    return model, args, LoadPlan(build, model_class.WEIGHTS, args.num_layers, source, _options(config, quantization, build))


def _options(config: ModelConfig, quantization: str, build: Build) -> LoadOptions:
    stored = config.facts.quantization
    if quantization == "int8" and not build.packed:
        place = f"{str(build.dtype).removeprefix('torch.')} on {build.device}"
        raise ConfigError(f"quantization int8 needs the native kernels, which serve float32 and bfloat16 on the CPU, not {place}.")
    scheme = open_scheme(stored, config.quantization) if stored not in ("none", "gguf") else None
    return LoadOptions(scheme, keep_codes=quantization != "none", int8=quantization == "int8")
