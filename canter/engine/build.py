"""From engine arguments to an engine that serves: resolve, load, size the cache, warm up; each phase timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from canter.checkpoint.model_config import read_model_config
from canter.checkpoint.resolve import resolve as resolve_checkpoint
from canter.checkpoint.tensors import open_tensors
from canter.core.config import DeviceFacts, EngineArgs, EngineConfig, resolve
from canter.core.grammar import Grammars
from canter.core.logging import get_logger
from canter.core.messages import EngineInfo
from canter.core.state_specs import StateLayout, place_snapshots, plan_layout
from canter.core.structured_outputs import StructuredOutputsConfig
from canter.core.timeline import Timeline
from canter.device import Device, open_device
from canter.engine.core import EngineCore, Runner
from canter.engine.grammars import make_grammars
from canter.kernels import set_num_threads
from canter.logits_processors.interface import LogitsProcessor
from canter.logits_processors.loading import check_arguments, load_classes
from canter.models.loader import LoadedModel, load_model
from canter.runner.forced_tokens import ForcedTokens
from canter.runner.memory import CacheSize, cache_bytes, size_cache
from canter.runner.model_runner import ModelRunner
from canter.scheduler.cache.coordinator import CacheCoordinator
from canter.scheduler.cache.managers import CacheLimits
from canter.scheduler.scheduler import Scheduler

logger = get_logger(__name__)

OnPhase = Callable[[str, float], None]

PIPELINE_DEPTH = 2
"""Steps in flight with async scheduling: one that computes and one that is queued behind it."""


class _Phases:
    """Times the phases of start-up and tells whoever asked."""

    def __init__(self, on_phase: OnPhase | None) -> None:
        self.seconds: dict[str, float] = {}
        self._on_phase = on_phase

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start
        if self._on_phase is not None:
            self._on_phase(name, self.seconds[name])


def build_engine(args: EngineArgs, on_phase: OnPhase | None = None, device: Device | None = None) -> EngineCore:
    """Load a model and return an engine for it.

    `on_phase` hears each phase's name and seconds as it ends. `device` replaces the one that `args` name. Raises
    `ConfigError` or `CheckpointError` for what a user can mend.
    """
    phases = _Phases(on_phase)
    with phases("resolve"):
        files = resolve_checkpoint(args.model, args.revision)
        model_config = read_model_config(files, args.hf_overrides)
        device = device or open_device(args.device, args.num_threads, args.async_scheduling)
        set_num_threads(device.num_threads)
        facts = DeviceFacts(device.kind, device.num_threads, device.free_bytes())
        config, reasons = resolve(args, model_config.facts, facts)
        for reason in reasons:
            logger.info("%s", reason)
        plugins = load_classes(args.logits_processors)
    with phases("weights"), open_tensors(files) as source:
        loaded = load_model(
            model_config, source, config.dtype, device.torch_device, config.kv_cache_dtype, config.max_model_len, config.quantization
        )
    with phases("cache"):
        specs = loaded.state_specs(config.block_size)
        layout = plan_layout(place_snapshots(specs, config.mamba_cache_mode, config.mamba_block_size))
        size = _size_cache(args, config, layout, device)
        logger.info("%s", size.sentence)
        timeline = Timeline()
        grammars = make_grammars(args, loaded.vocab_size, device.num_threads)
        runner = _build_runner(config, loaded, layout, size, device, plugins, timeline, grammars)
    with phases("warm-up"):
        runner.warm_up()
    grammars.start()
    scheduler = Scheduler(
        layout,
        size.num_blocks,
        max_model_len=size.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        max_prefill_slowdown=config.max_prefill_slowdown,
        enable_chunked_prefill=config.enable_chunked_prefill,
        enable_prefix_caching=config.enable_prefix_caching,
        policy=config.scheduling_policy,
        max_num_queued_reqs=config.max_num_queued_reqs,
        max_num_queued_tokens=config.max_num_queued_tokens,
        queue_timeout=config.queue_timeout,
    )
    info = _describe(config, loaded.vocab_size, size, phases.seconds, runner.eager_reason)
    depth = PIPELINE_DEPTH if config.async_scheduling else 1
    stepper: Runner = runner
    if layout.can_roll_back and StructuredOutputsConfig.parse(args.structured_outputs_config).jumps_forward:
        stepper = ForcedTokens(runner, grammars, loaded.vocab_size)
    return EngineCore(scheduler, stepper, info, depth, check_params=partial(check_arguments, plugins), timeline=timeline, grammars=grammars)


def _size_cache(args: EngineArgs, config: EngineConfig, layout: StateLayout, device: Device) -> CacheSize:
    limits = CacheLimits(config.max_model_len, config.max_num_batched_tokens)
    empty = CacheCoordinator(layout, [2] * len(layout.pools), limits)

    def blocks_for(num_tokens: int) -> list[int]:
        return empty.max_blocks(num_tokens)

    available = args.kv_cache_memory_bytes
    if available is None:
        share = args.gpu_memory_utilization or device.default_utilization()
        available = int(device.free_bytes() * share)
        if args.gpu_memory_utilization is None:
            one_request = cache_bytes(layout, blocks_for(config.max_model_len))
            available = min(available, max(device.default_cache_bytes(), one_request))
    return size_cache(
        layout, blocks_for, config.max_model_len, config.max_num_seqs, available, args.num_gpu_blocks_override, args.max_model_len is None
    )


def _build_runner(
    config: EngineConfig,
    loaded: LoadedModel,
    layout: StateLayout,
    size: CacheSize,
    device: Device,
    plugins: list[type[LogitsProcessor]],
    timeline: Timeline,
    grammars: Grammars,
) -> ModelRunner:
    return ModelRunner(
        loaded.model,
        layout,
        size.num_blocks,
        device,
        vocab_size=loaded.vocab_size,
        max_num_rows=config.max_num_seqs,
        max_model_len=size.max_model_len,
        seed=config.seed,
        enforce_eager=config.enforce_eager,
        logits_processors=plugins,
        timeline=timeline,
        grammars=grammars,
    )


def _describe(config: EngineConfig, vocab_size: int, size: CacheSize, phases: dict[str, float], eager_reason: str | None) -> EngineInfo:
    return EngineInfo(
        model=config.model,
        architecture=config.architecture,
        vocab_size=vocab_size,
        max_model_len=size.max_model_len,
        dtype=config.dtype,
        device=config.device,
        block_size=config.block_size,
        num_blocks=sum(size.num_blocks) - len(size.num_blocks),
        cache_tokens=size.num_tokens,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        prefix_caching=config.enable_prefix_caching,
        phases=dict(phases),
        eager_reason=eager_reason,
    )
