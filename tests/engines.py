"""Tiny checkpoints, request sets and a device that is late: what engine tests share."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from canter.core.config import EngineArgs
from canter.core.messages import AddRequest, RequestDelta
from canter.core.plan import TokenLogprobs
from canter.core.sampling_params import SamplingParams
from canter.device import CpuDevice, HostCopy
from canter.engine.build import build_engine
from canter.engine.core import EngineCore

VOCAB_SIZE = 131
CONTEXT = 256


def tiny_config(family: str) -> Any:
    """A configuration whose every constant differs from its neighbours, so that a swapped axis fails."""
    import transformers

    common = dict(
        vocab_size=VOCAB_SIZE, hidden_size=48, intermediate_size=80, num_attention_heads=6, num_key_value_heads=2, head_dim=12,
        max_position_embeddings=CONTEXT, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    if family == "llama":
        return transformers.LlamaConfig(**common, num_hidden_layers=3, tie_word_embeddings=False)
    if family == "gemma3":
        types = ["sliding_attention", "sliding_attention", "full_attention"] * 2
        return transformers.Gemma3TextConfig(**common, num_hidden_layers=6, sliding_window=7, layer_types=types, query_pre_attn_scalar=16)
    if family == "lfm2":
        types = ["conv", "full_attention", "conv", "conv"]
        return transformers.Lfm2Config(**common, num_hidden_layers=4, layer_types=types, conv_L_cache=3, block_auto_adjust_ff_dim=False)
    if family == "mamba2":
        sizes = dict(vocab_size=VOCAB_SIZE, hidden_size=48, num_hidden_layers=3, bos_token_id=1, eos_token_id=2, pad_token_id=0)
        return transformers.Mamba2Config(**sizes, expand=2, num_heads=6, head_dim=16, state_size=20, n_groups=2, conv_kernel=4)
    if family == "zamba2":
        sizes = dict(n_mamba_heads=6, mamba_d_state=20, mamba_ngroups=2, adapter_rank=5, num_mem_blocks=2, use_mem_rope=True)
        types = ["linear_attention", "hybrid", "hybrid", "hybrid"]
        del common["head_dim"]
        return transformers.Zamba2Config(**common, **sizes, num_hidden_layers=4, layers_block_type=types)
    raise ValueError(family)


def tiny_checkpoint(folder: Path, family: str, seed: int = 0) -> Path:
    """Save a randomised tiny model in the Hugging Face layout; returns its directory."""
    import transformers

    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(family)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("A_log", "dt_bias")):
                parameter.copy_(torch.randn_like(parameter))
            elif parameter.dim() == 1:
                parameter.copy_((0.0 if family == "gemma3" and "norm" in name else 1.0) + 0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    path = folder / family
    model.save_pretrained(path)
    return path


def engine(model: Path | str, device: Any = None, **changes: Any) -> EngineCore:
    """An engine core with a small cache, for tests. What a step computes does not depend on how long others took."""
    arguments: dict[str, Any] = dict(
        model=str(model), num_gpu_blocks_override=400, max_num_seqs=64, num_threads=1, max_prefill_slowdown=0.0
    )
    return build_engine(EngineArgs.parse(**{**arguments, **changes}), device=device)


def model_runner(core: EngineCore) -> Any:
    """The runner that runs the model, whatever stands around it."""
    runner: Any = core._runner
    return getattr(runner, "_runner", runner)


def run(core: EngineCore, requests: list[AddRequest], together: bool = True) -> dict[str, list[int]]:
    """Run requests to their ends, all at once or one after another; returns each one's output tokens."""
    tokens: dict[str, list[int]] = {r.request_id: [] for r in requests}
    finishes: dict[str, str] = {}
    waiting = deque([requests] if together else [[r] for r in requests])
    while waiting or core.has_work():
        if not core.has_work():
            for request in waiting.popleft():
                core.add_request(request)
        for delta in core.step():
            assert delta.request_id not in finishes, "a delta after the finish"
            tokens[delta.request_id].extend(delta.new_token_ids)
            if delta.finish_reason is not None:
                assert delta.error is None, delta.error
                finishes[delta.request_id] = delta.finish_reason
    assert finishes.keys() == tokens.keys()
    return tokens


def mixed_requests(count: int, vocab_size: int = VOCAB_SIZE, longest: int = 90, max_tokens: int = 24, seed: int = 7) -> list[AddRequest]:
    """Greedy and seeded requests of many lengths, some sharing a prefix, with every sampling option somewhere."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(3, vocab_size, 40).tolist()
    options: list[dict[str, Any]] = [
        dict(temperature=0.0),
        dict(temperature=1.0),
        dict(temperature=0.8, top_k=20),
        dict(temperature=1.2, top_p=0.9),
        dict(temperature=0.9, min_p=0.05, top_k=50, top_p=0.95),
        dict(temperature=0.0, repetition_penalty=1.3),
        dict(temperature=0.7, presence_penalty=0.6, frequency_penalty=0.4),
        dict(temperature=1.0, logit_bias={5: 4.0, 9: -3.0}, min_tokens=6),
        dict(temperature=0.0, bad_words_token_ids=[[11], [12, 13]]),
        dict(temperature=1.0, allowed_token_ids=list(range(20, 60))),
    ]
    requests = []
    for i in range(count):
        own = rng.integers(3, vocab_size, int(rng.integers(1, longest))).tolist()
        prompt = shared[: int(rng.integers(8, 40))] + own if i % 3 == 0 else own
        chosen = options[i % len(options)]
        length = max(int(rng.integers(2, max_tokens + 1)), chosen.get("min_tokens", 0))
        params = SamplingParams(max_tokens=length, seed=100 + i, eos_token_ids=[2], **chosen)
        requests.append(AddRequest(f"r{i}", prompt, params))
    return requests


class LateDevice(CpuDevice):
    """A device that computes nothing until a result is asked for: the latest that a device can be.

    Launched work runs in order, at the moment when somebody waits for something launched at the same time or later.
    """

    def __init__(self) -> None:
        super().__init__(num_threads=1, asynchronous=False)
        self.queued: deque[_Late] = deque()
        self.most_queued = 0

    def launch(self, work: Callable[[], Any]) -> Any:
        late = _Late(self, work)
        self.queued.append(late)
        self.most_queued = max(self.most_queued, len(self.queued))
        return late

    def copy_to_host(self, tensors: list[torch.Tensor]) -> HostCopy:
        return super().copy_to_host([t.clone() for t in tensors])


class _Late:
    def __init__(self, device: LateDevice, work: Callable[[], Any]) -> None:
        self._device, self._work = device, work
        self._outcome: Any = None

    def done(self) -> bool:
        return self._outcome is not None

    def run(self) -> None:
        self._outcome = CpuDevice.launch(self._device, self._work)

    def result(self) -> Any:
        while self._outcome is None:
            self._device.queued.popleft().run()
        return self._outcome.result()


@dataclass
class Result:
    """Everything that the deltas of one request have told."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    def take(self, delta: RequestDelta) -> None:
        assert self.finish_reason is None, "a delta after the finish"
        self.token_ids += delta.new_token_ids
        self.logprobs += delta.logprobs or []
        if delta.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "prompt logprobs came twice"
            self.prompt_logprobs = delta.prompt_logprobs
        self.finish_reason, self.stop_reason, self.error = delta.finish_reason, delta.stop_reason, delta.error
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        self.num_preemptions = delta.num_preemptions


def results(core: EngineCore, requests: list[AddRequest]) -> dict[str, Result]:
    """Run requests together to their ends, errors included."""
    found = {request.request_id: Result() for request in requests}
    for request in requests:
        core.add_request(request)
    while core.has_work():
        for delta in core.step():
            found[delta.request_id].take(delta)
    assert all(result.finish_reason is not None for result in found.values())
    return found


def add_tokenizer(path: Path, vocab_size: int = VOCAB_SIZE, **config: Any) -> Path:
    """Give a checkpoint words w3, w4, ... as tokens 3, 4, ...; 1 and 2 are <s> and </s>."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, vocab_size)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(path / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}w9{% endif %}"
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template, **config}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def add_letters(path: Path) -> Path:
    """Give a checkpoint the letters of ASCII as tokens, so that outputs can obey a grammar; ids that are left are pairs of letters."""
    letters = [*map(chr, range(33, 127)), "\u0120", "\u010a"]  # as byte-level vocabularies write space and line feed
    tokens = ["<unk>", "<s>", "</s>", *letters, *(f"w{letter}" for letter in letters)][:VOCAB_SIZE]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    add_tokenizer(path, unk_token="<unk>")
    backend.save(str(path / "tokenizer.json"))
    return path


class Oracle:
    """transformers' model of a checkpoint, in float32, without a cache."""

    def __init__(self, path: Path | str) -> None:
        import transformers

        self._model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[tokens, vocabulary] float32."""
        with torch.inference_mode():
            return self._model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0].float()
