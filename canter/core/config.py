"""Engine arguments: one flat set, from which the CLI flags, the `LLM(...)` keywords and the reference page are made.

Names follow vLLM. `resolve` is pure: arguments and facts in, values and the reason for each automatic choice out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from canter.core.errors import ConfigError
from canter.core.state_specs import SnapshotMode
from canter.core.structured_outputs import StructuredOutputsConfig
from canter.core.vllm_names import explain_unknown

DEFAULT_MODEL = "smollm2-135m-instruct"
"""The bundled model: served when no model is named."""

DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("auto", "none", "int8", "gguf", "awq", "gptq", "compressed-tensors")
DEVICES = ("auto", "cpu", "cuda")
MAMBA_CACHE_MODES = ("none", "align", "all")
MAMBA_BLOCK_SIZE = 256
KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "int8_per_token_head")


def arg(default: Any, doc: str, choices: tuple[Any, ...] | None = None, short: str | None = None, group: str = "engine") -> Any:
    """A field of `EngineArgs` with what the CLI and the reference page say of it."""
    metadata = {"doc": doc, "choices": choices, "short": short, "group": group}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def check_names(arguments: type[Any], names: Iterable[str], what: str) -> None:
    """Raise `ConfigError` for the first name that is no field of the dataclass `arguments`."""
    known = {f.name for f in dataclasses.fields(arguments)}
    for name in names:
        if name not in known:
            raise ConfigError(explain_unknown(name, known, what))


def check_choices(arguments: Any) -> None:
    """Raise `ConfigError` for a field of a dataclass made with `arg` whose value is not among its choices."""
    for f in dataclasses.fields(arguments):
        choices, value = f.metadata["choices"], getattr(arguments, f.name)
        if choices and value not in choices and not (value is None and f.default is None):
            raise ConfigError(f"{f.name} must be one of {', '.join(map(str, choices))}, got {value!r}.")


@dataclass(kw_only=True)
class EngineArgs:
    """Everything that shapes an engine. Unknown keywords raise with the nearest match (`EngineArgs.parse`)."""

    model: str = arg(
        DEFAULT_MODEL, "A directory, a GGUF file, a hub name (owner/name, or owner/name:file.gguf), or the bundled model.", group="model"
    )
    tokenizer: str | None = arg(
        None, "Take the tokenizer from this directory, GGUF file or hub name instead of the model's.", group="model"
    )
    revision: str | None = arg(None, "Branch, tag or commit of a hub model.", group="model")
    dtype: str = arg(
        "auto", "Type of weights and activations; auto takes the checkpoint's (float32 for GGUF files on the CPU).", DTYPES, group="model"
    )
    quantization: str | None = arg(
        None,
        "Form of the weights; default, and auto: that of the checkpoint (the blocks of a GGUF file; codes of AWQ, GPTQ and "
        "compressed-tensors). none: dequantised to dtype. int8: floats are rounded to int8 with a scale for every 32 of a row, as GGUF's "
        "Q8_0. The others must be what the checkpoint is.",
        QUANTIZATIONS,
        short="-q",
        group="model",
    )
    max_model_len: int | None = arg(
        None,
        "Most tokens of a request, prompt and output together; default: the model's own context, or what the cache holds.",
        group="model",
    )
    generation_config: str = arg(
        "auto",
        "Where default sampling parameters come from: auto (the model's generation_config.json), vllm (neutral), or a directory.",
        group="model",
    )
    override_generation_config: dict[str, Any] = arg(dict, "JSON object laid over the generation config.", group="model")
    hf_overrides: dict[str, Any] = arg(dict, "JSON object laid over the model's config.json.", group="model")
    seed: int = arg(0, "Seed of requests that bring none: the same requests in the same order draw the same tokens.", group="model")
    max_logprobs: int = arg(20, "Most logprobs a request may ask for; -1 for the whole vocabulary.", group="model")
    reasoning_config: dict[str, Any] = arg(
        dict,
        "JSON object with reasoning_start_str and reasoning_end_str, what begins and ends a thought of the model, for "
        "thinking_token_budget. Default: the pair that the tokenizer has, such as <think> and </think>. The end may be longer "
        "than the model's own marker: it is what a thought is cut off with.",
        group="model",
    )
    tool_call_parser: str | None = arg(
        None,
        "How the model writes tool calls, such as hermes, qwen3_coder, llama3_json or mistral. Default: as its chat template tells, if "
        "reasoning_parser isn't given either.",
        group="model",
    )
    reasoning_parser: str | None = arg(
        None,
        "How the model writes its thoughts, such as qwen3, deepseek_r1 or openai_gptoss. Default: as its chat template tells, if "
        "tool_call_parser isn't given either.",
        group="model",
    )
    structured_outputs_config: dict[str, Any] = arg(
        dict,
        "JSON object: backend (auto or guidance: llguidance; xgrammar: that, with llguidance for what it doesn't take; needs the extra "
        "xgrammar), enable_in_reasoning (constrain thoughts, too), disable_jump_forward (a step for each token, forced or not), and, for "
        "every request, disable_any_whitespace and disable_additional_properties.",
        group="model",
    )
    logits_processors: list[str] = arg(
        list,
        "Logits processors to load, each module:Class, the name of an installed one (entry points canter.logits_processors), or the "
        "bundled ngram-ban. Requests give them arguments with vllm_xargs.",
        group="model",
    )
    device: str = arg("auto", "Where the model runs.", DEVICES)
    num_threads: int | None = arg(None, "CPU threads of the engine; default: the processors that this process may use.")
    enforce_eager: bool = arg(
        False, "Call every kernel from Python, layer by layer, instead of one recorded program a step: for debugging."
    )
    block_size: int = arg(16, "Tokens in a cache block.")
    kv_cache_memory_bytes: int | None = arg(
        None, "Bytes for the cache (K, M, G suffixes allowed); default: sized from free memory, see gpu_memory_utilization.", group="cache"
    )
    gpu_memory_utilization: float | None = arg(
        None,
        "Share of the free memory that the cache may take once the weights are loaded; default: 0.92 on a GPU; on the CPU 0.5, and "
        "at most 4 GiB or what one request of full length needs.",
        group="cache",
    )
    num_gpu_blocks_override: int | None = arg(None, "Exactly this many cache blocks, whatever the memory.", group="cache")
    kv_cache_dtype: str = arg(
        "auto",
        "Type of cached keys and values; auto takes the model's, and float16 beside the blocks of a GGUF file on the CPU. float16 cuts "
        "values off at 65504, fp8 (which is fp8_e4m3) at 448; int8_per_token_head keeps a float scale for each token and head.",
        KV_CACHE_DTYPES,
        group="cache",
    )
    enable_prefix_caching: bool = arg(True, "Reuse the cache of prompts that begin alike.", group="cache")
    mamba_cache_mode: str | None = arg(
        None,
        "Where states of recurrent layers are kept for later requests. align: where a step ends on a boundary, and steps are cut so that "
        "they do. all: at every boundary, which takes more memory. none: nowhere, so that no prefix of such a model is reused. Default: "
        "align; all without chunked prefill; none without prefix caching.",
        MAMBA_CACHE_MODES,
        group="cache",
    )
    mamba_block_size: int | None = arg(
        None, "Tokens from one such boundary to the next, a multiple of block_size. Default: 256, or the next multiple.", group="cache"
    )
    max_num_seqs: int = arg(128, "Most requests that run at once.", group="scheduler")
    max_num_batched_tokens: int = arg(2048, "Most tokens that one step computes.", group="scheduler")
    long_prefill_token_threshold: int = arg(
        0, "Most prompt tokens that one request gets in a step; 0 for no limit of its own.", group="scheduler"
    )
    max_prefill_slowdown: float = arg(
        2.5,
        "While some generate, compute so little of prompts longer than a step in each that it takes at most so many times as long as one "
        "without any: such prompts take longer then. 0 for no such limit, the default of LLM and run-batch.",
        group="scheduler",
    )
    enable_chunked_prefill: bool = arg(
        True, "Split prompts that exceed a step's tokens. Without it such prompts are refused.", group="scheduler"
    )
    scheduling_policy: str = arg(
        "fcfs", "Order of requests: first come, or by the priority field (lower first).", ("fcfs", "priority"), group="scheduler"
    )
    async_scheduling: bool = arg(True, "Schedule the next step while this one computes.", group="scheduler")
    max_num_queued_reqs: int | None = arg(None, "Most requests that may wait; more are refused with 503. Default: 4096.", group="scheduler")
    max_num_queued_tokens: int | None = arg(
        None, "Most prompt tokens that may wait, all requests together; more are refused with 503. Default: no limit.", group="scheduler"
    )
    queue_timeout: float | None = arg(
        None, "Most seconds that a request may wait for its first step; then it is refused with 503. Default: no limit.", group="scheduler"
    )
    disable_log_stats: bool = arg(False, "Don't log throughput every ten seconds.")

    @classmethod
    def parse(cls, **keywords: Any) -> EngineArgs:
        """Build from keywords; an unknown one raises `ConfigError` naming the nearest known, or why vLLM's is not there."""
        check_names(cls, keywords, "engine argument")
        args = cls(**keywords)
        args.verify()
        return args

    def verify(self) -> None:
        """Check every value by itself; contradictions between values are `resolve`'s."""
        check_choices(self)
        for name in (
            "max_model_len",
            "block_size",
            "mamba_block_size",
            "num_gpu_blocks_override",
            "max_num_seqs",
            "max_num_batched_tokens",
            "num_threads",
            "kv_cache_memory_bytes",
            "max_num_queued_reqs",
            "max_num_queued_tokens",
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}.")
        if not isinstance(self.long_prefill_token_threshold, int) or self.long_prefill_token_threshold < 0:
            raise ConfigError(f"long_prefill_token_threshold must be an integer of at least 0, got {self.long_prefill_token_threshold!r}.")
        slowdown = self.max_prefill_slowdown
        if isinstance(slowdown, bool) or not isinstance(slowdown, int | float) or not (slowdown == 0 or 1 < slowdown < math.inf):
            raise ConfigError(f"max_prefill_slowdown must be 0 or a number above 1, got {slowdown!r}.")
        timeout = self.queue_timeout
        if timeout is not None and (isinstance(timeout, bool) or not 0 < timeout < math.inf):
            raise ConfigError(f"queue_timeout must be a number of seconds above 0, got {timeout!r}.")
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization must be above 0 and at most 1, got {self.gpu_memory_utilization!r}.")
        names = self.logits_processors
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) and name for name in names):
            raise ConfigError(f"logits_processors must be a list of names, got {names!r}.")
        if not isinstance(self.reasoning_config, dict):
            raise ConfigError(f"reasoning_config must be a JSON object, got {self.reasoning_config!r}.")
        StructuredOutputsConfig.parse(self.structured_outputs_config)
        if not isinstance(self.max_logprobs, int) or self.max_logprobs < -1:
            raise ConfigError(f"max_logprobs must be -1 or an integer of at least 0, got {self.max_logprobs!r}.")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What `resolve` needs to know of a model before it is built."""

    architecture: str
    dtype: str
    """The checkpoint's own type: float32, bfloat16 or float16; GGUF files say float32, what they dequantise to."""
    context_length: int
    quantization: str = "none"
    """How the checkpoint's weights are quantised: none, gguf, awq, gptq or compressed-tensors."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What `resolve` needs to know of the machine."""

    kind: str
    num_threads: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Resolved values; components take the ones they need, never the whole."""

    model: str
    architecture: str
    device: str
    num_threads: int
    dtype: str
    quantization: str
    """How weights are computed: none, int8, or what the checkpoint holds."""
    kv_cache_dtype: str
    max_model_len: int
    block_size: int
    mamba_cache_mode: SnapshotMode
    mamba_block_size: int
    """Tokens from one place where recurrent states are kept to the next; with mode none, as many as no request has."""
    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int
    max_prefill_slowdown: float
    enable_chunked_prefill: bool
    enable_prefix_caching: bool
    scheduling_policy: str
    async_scheduling: bool
    enforce_eager: bool
    max_num_queued_reqs: int
    max_num_queued_tokens: int | None
    queue_timeout: float | None
    max_logprobs: int
    seed: int


def resolve(args: EngineArgs, model: ModelFacts, device: DeviceFacts) -> tuple[EngineConfig, list[str]]:
    """Settle every automatic choice. Returns the configuration and one sentence for each choice that was made."""
    reasons: list[str] = []
    kind = args.device if args.device != "auto" else device.kind
    dtype = args.dtype
    if dtype == "auto":
        dtype = model.dtype
        if dtype == "float16" and kind == "cpu":
            dtype = "bfloat16"
            reasons.append("dtype bfloat16: the checkpoint is float16, which CPUs compute slowly.")
        else:
            reasons.append(f"dtype {dtype}: the checkpoint's.")
    quantization = _quantization(args.quantization, model, reasons)
    kv_cache_dtype = _kv_cache_dtype(args.kv_cache_dtype, dtype, quantization, kind, reasons)
    max_model_len = args.max_model_len or model.context_length
    if args.max_model_len is not None and args.max_model_len > model.context_length:
        raise ConfigError(f"max_model_len must be at most the model's context of {model.context_length} tokens, got {args.max_model_len}.")
    if args.max_model_len is None:
        reasons.append(f"max_model_len {max_model_len}: the model's context.")
    budget = args.max_num_batched_tokens
    if not args.enable_chunked_prefill and budget < max_model_len:
        raise ConfigError(
            f"Without chunked prefill, max_num_batched_tokens ({budget}) must be at least max_model_len ({max_model_len}). "
            "Raise the one, lower the other, or leave enable_chunked_prefill on."
        )
    if budget < args.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens ({budget}) must be at least max_num_seqs ({args.max_num_seqs}), or running requests would starve."
        )
    mode, interval = _snapshots(args, max_model_len)
    threads = args.num_threads or device.num_threads
    config = EngineConfig(
        model=args.model,
        architecture=model.architecture,
        device=kind,
        num_threads=threads,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=max_model_len,
        block_size=args.block_size,
        mamba_cache_mode=mode,
        mamba_block_size=interval,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=args.long_prefill_token_threshold,
        max_prefill_slowdown=args.max_prefill_slowdown,
        enable_chunked_prefill=args.enable_chunked_prefill,
        enable_prefix_caching=args.enable_prefix_caching,
        scheduling_policy=args.scheduling_policy,
        async_scheduling=args.async_scheduling,
        enforce_eager=args.enforce_eager,
        max_num_queued_reqs=args.max_num_queued_reqs or 4096,
        max_num_queued_tokens=args.max_num_queued_tokens,
        queue_timeout=args.queue_timeout,
        max_logprobs=args.max_logprobs,
        seed=args.seed,
    )
    return config, reasons


def _snapshots(args: EngineArgs, max_model_len: int) -> tuple[SnapshotMode, int]:
    """When recurrent states are kept, and at multiples of how many tokens."""
    if args.mamba_cache_mode is None:
        kept = SnapshotMode.ALIGN if args.enable_chunked_prefill else SnapshotMode.ALL
        mode = kept if args.enable_prefix_caching else SnapshotMode.NONE
    else:
        mode = SnapshotMode(args.mamba_cache_mode)
    if mode is not SnapshotMode.NONE and not args.enable_prefix_caching:
        raise ConfigError(f"mamba_cache_mode {mode} needs prefix caching, which is off. Leave one of the two out.")
    if mode is SnapshotMode.ALIGN and not args.enable_chunked_prefill:
        raise ConfigError("mamba_cache_mode align cuts prompts at boundaries, so chunked prefill must be on. Use all, or leave it out.")
    size = args.block_size
    interval = args.mamba_block_size or -(-MAMBA_BLOCK_SIZE // size) * size
    if interval % size:
        raise ConfigError(f"mamba_block_size must be a multiple of block_size ({size}), got {interval}.")
    return mode, -(-max_model_len // size) * size if mode is SnapshotMode.NONE else interval


def _quantization(asked: str | None, model: ModelFacts, reasons: list[str]) -> str:
    """The form that weights are computed in, checked against what the checkpoint holds."""
    held = model.quantization
    if asked in (None, "auto"):
        if held != "none":
            reasons.append(f"quantization {held}: the checkpoint's.")
        return held
    if asked == "int8" and held != "none":
        raise ConfigError(f"quantization int8 rounds checkpoints of floats; this one is quantised already ({held}). Leave it at auto.")
    if asked not in ("none", "int8", held):
        what = "holds floats" if held == "none" else f"is {held}"
        raise ConfigError(f"quantization {asked} does not fit: the checkpoint {what}. Leave it at auto.")
    return asked


def _kv_cache_dtype(asked: str, dtype: str, quantization: str, device: str, reasons: list[str]) -> str:
    """auto is the activations' type; beside the blocks of a GGUF file, float32 keys and values would only cost memory and time."""
    if asked != "auto":
        return "fp8_e4m3" if asked == "fp8" else asked
    if quantization == "gguf" and device == "cpu" and dtype == "float32":
        reasons.append("kv_cache_dtype float16: the weights are GGUF blocks, coarser than that; float32 would double the cache.")
        return "float16"
    return dtype


def parse_bytes(text: str) -> int:
    """ "512M" -> 536870912. Plain integers and the suffixes K, M, G, T (powers of 1024, an optional i and B)."""
    cleaned = text.strip().upper().removesuffix("B").removesuffix("I")
    factor = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}.get(cleaned[-1:], 1)
    digits = cleaned[:-1] if factor != 1 else cleaned
    try:
        value = float(digits) * factor
    except ValueError:
        raise ConfigError(f"Expected a number of bytes such as 512M or 2G, got {text!r}.") from None
    if not math.isfinite(value) or value < 1:
        raise ConfigError(f"Expected a number of bytes such as 512M or 2G, got {text!r}.")
    return int(value)
