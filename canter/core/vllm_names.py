"""vLLM's engine arguments that Canter lacks: a command line that carries over gets a sentence, not a guess.

Also the one place that words an unknown argument, for `LLM(...)` keywords and for flags alike.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_ONE_DEVICE = "Canter runs a model on one device"
_NO_MULTIMODAL = "Canter serves text only"
_NO_LORA = "Canter has no LoRA adapters"
_NO_OFFLOAD = "Canter keeps weights and cache on the device"

VLLM_ONLY: dict[str, str] = {
    "allowed_local_media_path": _NO_MULTIMODAL,
    "allowed_media_domains": _NO_MULTIMODAL,
    "attention_backend": "Canter picks each kernel when the model loads",
    "calculate_kv_scales": "fp8 caches have no scales, int8 ones one for each token and head",
    "compilation_config": "Canter does not compile models",
    "config_format": "the format is read from the files",
    "convert": "Canter only generates",
    "cpu_offload_gb": _NO_OFFLOAD,
    "data_parallel_size": _ONE_DEVICE,
    "disable_custom_all_reduce": _ONE_DEVICE,
    "distributed_executor_backend": _ONE_DEVICE,
    "download_dir": "hub models go to the hub's own cache; set HF_HOME to move it",
    "enable_expert_parallel": _ONE_DEVICE,
    "enable_lora": _NO_LORA,
    "enable_prompt_embeds": "prompts are text or token ids",
    "enable_sleep_mode": "Canter does not sleep",
    "hf_token": "set HF_TOKEN in the environment",
    "fully_sharded_loras": _NO_LORA,
    "kv_offloading_size": _NO_OFFLOAD,
    "kv_transfer_config": "Canter keeps the cache in one process",
    "limit_mm_per_prompt": _NO_MULTIMODAL,
    "load_format": "the format is read from the files",
    "logprobs_mode": "logprobs are always those of the raw logits",
    "lora_dtype": _NO_LORA,
    "lora_modules": _NO_LORA,
    "mamba_cache_dtype": "states of convolutions have the activations' type",
    "mamba_ssm_cache_dtype": "states of scans are always float32",
    "max_cpu_loras": _NO_LORA,
    "max_lora_rank": _NO_LORA,
    "max_loras": _NO_LORA,
    "mm_processor_cache_gb": _NO_MULTIMODAL,
    "mm_processor_kwargs": _NO_MULTIMODAL,
    "model_impl": "Canter has one implementation of each model",
    "pipeline_parallel_size": _ONE_DEVICE,
    "pooler_config": "Canter only generates",
    "prefix_caching_hash_algo": "Canter has one way to hash a prefix",
    "profiler_config": "name a folder for traces with profile_dir",
    "runner": "Canter only generates",
    "skip_tokenizer_init": "Canter always loads the tokenizer",
    "speculative_config": "Canter has no speculative decoding",
    "stream_interval": "requests set stream_interval themselves",
    "swap_space": "preempted requests are computed again",
    "tensor_parallel_size": _ONE_DEVICE,
    "tokenizer_mode": "Canter has one kind of tokenizer",
    "tokenizer_revision": "the tokenizer's revision is the model's",
    "trust_remote_code": "Canter never runs code that a checkpoint brings",
}
"""Argument -> why there is none, a clause."""


def explain_unknown(name: str, known: Iterable[str], what: str = "argument") -> str:
    """The sentence for a name that is no argument: vLLM's gets its reason, a misspelt one its nearest match.

    `name` and `known` may be spelt as keywords (`max_num_seqs`) or flags (`--max-num-seqs`); the answer keeps the spelling.
    """
    reason = VLLM_ONLY.get(name.lstrip("-").replace("-", "_"))
    if reason is not None:
        return f"Canter has no {name}, which is vLLM's: {reason}. Leave it out."
    near = difflib.get_close_matches(name, sorted(known), 1)
    return f"Unknown {what} {name}." + (f" Did you mean {near[0]}?" if near else "")
