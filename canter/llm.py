"""The offline API: `LLM` runs an engine in this process. Names, defaults and results follow vLLM's.

from canter import LLM, SamplingParams
llm = LLM("smollm2-135m-instruct")
print(llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text)
"""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any

from tqdm.auto import tqdm

from canter.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams, BeamSearchSequence, candidates, question
from canter.client.inprocess import InProcessClient
from canter.client.outputs import RequestOutput
from canter.core.config import DEFAULT_MODEL, EngineArgs
from canter.core.errors import InvalidRequestError
from canter.core.messages import EngineInfo, EngineStats
from canter.core.sampling_params import OutputKind, SamplingParams
from canter.core.structured_outputs import StructuredOutputsConfig, StructuredOutputsParams
from canter.engine.build import build_engine
from canter.text.chat_template import load_chat_template
from canter.text.model_text import load_model_text
from canter.text.prepare import finish_params
from canter.text.thinking import free_thoughts
from canter.text.tokenizer import Tokenizer

Prompt = str | Mapping[str, Any]
Message = Mapping[str, Any]
Progress = bool | Callable[..., Any]

PROMPT_KEYS = frozenset({"prompt", "prompt_token_ids", "cache_salt"})
DEFAULT_QUEUE = 4096

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "Metric",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]


@dataclass(frozen=True)
class Metric:
    """One figure of `LLM.get_metrics`: a Prometheus name, its kind (gauge or counter) and its value."""

    name: str
    kind: str
    value: float


@dataclass(frozen=True)
class _Job:
    """A prompt that is ready to run."""

    prompt: str | None
    token_ids: list[int]
    params: SamplingParams
    cache_salt: str | None
    priority: int


@dataclass
class _ProgressBar:
    """The bar over sequences, or nothing when it is switched off; its postfix tells the speed so far."""

    bar: Any | None
    started: float = field(default_factory=time.perf_counter)
    num_input: int = 0
    num_output: int = 0

    @classmethod
    def open(cls, use_tqdm: Progress, total: int) -> _ProgressBar:
        if use_tqdm is False:
            return cls(None)
        make = use_tqdm if callable(use_tqdm) else tqdm
        return cls(make(total=total, desc="Processed prompts", dynamic_ncols=True, postfix=_speed(0.0, 0.0)))

    def finish(self, output: RequestOutput) -> None:
        if self.bar is None:
            return
        self.num_input += len(output.prompt_token_ids)
        self.num_output += sum(len(choice.token_ids) for choice in output.outputs)
        seconds = max(time.perf_counter() - self.started, 1e-9)
        self.bar.postfix = _speed(self.num_input / seconds, self.num_output / seconds)
        self.bar.update(len(output.outputs))

    def advance(self, count: int) -> None:
        if self.bar is not None:
            self.bar.update(count)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C takes effect at the end of the block, for a step that is cut in two leaves an engine that nothing mends.

    A second one takes effect at once. Python calls signal handlers in the main thread only, so nothing is held in others.
    """
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        yield
        return
    held: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if held:
            usual(number, frame)
        held.append((number, frame))

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if held:
        usual(*held[0])


def _speed(tokens_in: float, tokens_out: float) -> str:
    return f"est. speed input: {tokens_in:.2f} toks/s, output: {tokens_out:.2f} toks/s"


class LLM:
    """A model, its tokenizer and an engine in this process.

    Keywords are the engine arguments (docs/reference/engine-arguments.md). An unknown one raises `ConfigError` with
    the nearest match. Not for use from several threads at once. A context manager; `shutdown` gives the memory back.
    """

    def __init__(self, model: str = DEFAULT_MODEL, *, chat_template: str | None = None, **engine_args: Any) -> None:
        engine_args.setdefault("disable_log_stats", True)
        engine_args.setdefault("max_prefill_slowdown", 0.0)
        self.args = EngineArgs.parse(model=model, **engine_args)
        self._text = load_model_text(self.args, chat_template)
        self._tokenizer = self._text.tokenizer
        self._core = build_engine(self.args)
        self.info: EngineInfo = self._core.info
        self._client = InProcessClient(self._core, self._tokenizer)
        self._num_requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: Progress = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts. Returns finished outputs, in the order of the prompts.

        A prompt is a string, `{"prompt": str}` or `{"prompt_token_ids": [int]}`, the last two with an optional
        `"cache_salt"`. `sampling_params` is one for all, or one each; None takes `get_default_sampling_params()`.
        `use_tqdm` may be a callable to use in tqdm's place. Everything is checked before anything runs.
        Raises `InvalidRequestError`.
        """
        entries = _as_list(prompts)
        params = self._params_for_each(sampling_params, len(entries))
        priorities = self._priorities(priority, len(entries))
        jobs = [self._job(i, *entry) for i, entry in enumerate(zip(entries, params, priorities, strict=True))]
        return self._run(jobs, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Progress = True,
        *,
        priority: Sequence[int] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of a list of conversations. Otherwise as `generate`."""
        if add_generation_prompt and continue_final_message:
            raise InvalidRequestError(
                "add_generation_prompt and continue_final_message exclude each other: set add_generation_prompt=False.",
                "continue_final_message",
            )
        template = self._text.chat_template if chat_template is None else load_chat_template(self._tokenizer, chat_template)
        prompts = []
        for conversation in _conversations(messages):
            text = template.render(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            # The template has written the special tokens already.
            token_ids = self._tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": token_ids})
        params = [self._with_free_thoughts(p) for p in self._params_for_each(sampling_params, len(prompts))]
        return self.generate(prompts, params, use_tqdm=use_tqdm, priority=priority)

    def _with_free_thoughts(self, params: SamplingParams) -> SamplingParams:
        """What an answer must obey binds its thoughts only if the engine is told so."""
        config = StructuredOutputsConfig.parse(self.args.structured_outputs_config)
        markers = self._text.thinking
        return params if markers is None or config.enable_in_reasoning else free_thoughts(params, markers)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: Progress = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt. `concurrency_limit` bounds the prompts searched at once.

        Every step asks the engine for one token of every live beam with `2 * beam_width` log-probabilities; the
        prefix cache makes each of these requests cost about one token.
        """
        jobs = [self._job(i, prompt, SamplingParams(temperature=0.0), 0) for i, prompt in enumerate(_as_list(prompts))]
        limit = concurrency_limit or len(jobs) or 1
        progress = _ProgressBar.open(use_tqdm, len(jobs))
        outputs: list[BeamSearchOutput] = []
        try:
            for start in range(0, len(jobs), limit):
                batch = jobs[start : start + limit]
                outputs += self._search(batch, params)
                progress.advance(len(batch))
        finally:
            progress.close()
        return outputs

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of a request that brings none: the model's generation config, as `generation_config` says."""
        return SamplingParams(**self._text.defaults)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix. False when requests still use the cache."""
        return bool(self._core.utility("reset_prefix_cache", []))

    def stats(self) -> EngineStats:
        """The engine's state now, as one value."""
        return self._core.stats()

    def get_metrics(self) -> list[Metric]:
        """The engine's gauges and counters, under vLLM's Prometheus names."""
        stats = self.stats()
        return [
            Metric("vllm:num_requests_running", "gauge", stats.num_running),
            Metric("vllm:num_requests_waiting", "gauge", stats.num_waiting),
            Metric("vllm:kv_cache_usage_perc", "gauge", stats.cache_usage),
            Metric("vllm:num_preemptions", "counter", stats.num_preemptions),
            Metric("vllm:prefix_cache_queries", "counter", stats.prefix_queries),
            Metric("vllm:prefix_cache_hits", "counter", stats.prefix_hits),
            Metric("canter:num_steps", "counter", stats.num_steps),
            Metric("canter:num_scheduled_tokens", "counter", stats.num_scheduled_tokens),
            Metric("canter:jump_ahead_tokens", "counter", stats.num_accepted_drafts),
        ]

    def shutdown(self) -> None:
        """Stop the engine and give its memory back. The object can't be used afterwards."""
        self._core.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        info = self.info
        return f"LLM(model={info.model!r}, architecture={info.architecture!r}, dtype={info.dtype!r}, device={info.device!r})"

    def _params_for_each(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        """One set of parameters for each prompt."""
        if given is None:
            return [self.get_default_sampling_params()] * count
        if isinstance(given, SamplingParams):
            return [given] * count
        if len(given) != count:
            raise InvalidRequestError(
                f"There are {count} prompts and {len(given)} sampling_params. Give one for all, or one for each.", "sampling_params"
            )
        return list(given)

    def _priorities(self, given: Sequence[int] | None, count: int) -> list[int]:
        if given is None:
            return [0] * count
        if len(given) != count:
            raise InvalidRequestError(f"There are {count} prompts and {len(given)} priorities. Give one for each.", "priority")
        if any(given) and self.args.scheduling_policy != "priority":
            raise InvalidRequestError('priority needs LLM(..., scheduling_policy="priority").', "priority")
        return list(given)

    def _job(self, index: int, prompt: Prompt, params: SamplingParams, priority: int) -> _Job:
        """Check one prompt with its parameters and make it ready. Errors name the prompt's place in the list."""
        text, token_ids, cache_salt = self._tokens_of(index, prompt)
        limit = self.info.max_model_len
        if params.truncate_prompt_tokens is not None:
            keep = limit - 1 if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens
            token_ids = token_ids[-keep:]
        if len(token_ids) >= limit:
            raise InvalidRequestError(
                f"Prompt {index} has {len(token_ids)} tokens; the model takes at most {limit} (max_model_len), prompt and output "
                "together, so a prompt may have at most one less. Shorten it, or set truncate_prompt_tokens.",
                "prompts",
            )
        finished = finish_params(params, self._tokenizer, self._text.generation_config, self.info.vocab_size, self._text.thinking)
        finished.verify_vocabulary(self.info.vocab_size, self.args.max_logprobs)
        self._core.check_params(finished)
        room = limit - len(token_ids)
        tokens = room if finished.max_tokens is None else finished.max_tokens
        return _Job(text, token_ids, finished.clone(max_tokens=tokens, output_kind=OutputKind.FINAL_ONLY), cache_salt, priority)

    def _tokens_of(self, index: int, prompt: Prompt) -> tuple[str | None, list[int], str | None]:
        """Text (if there is one), token ids and cache salt of a prompt in any of its forms."""
        fields = _prompt_fields(index, prompt)
        text = fields.get("prompt")
        token_ids = fields.get("prompt_token_ids")
        if token_ids is None:
            token_ids = self._tokenizer.encode(text or "")
        _check_token_ids(index, token_ids, self.info.vocab_size)
        return text, list(token_ids), fields.get("cache_salt")

    def _run(self, jobs: list[_Job], use_tqdm: Progress) -> list[RequestOutput]:
        """Run jobs to their end. Whatever interrupts it, no request stays behind in the engine."""
        progress = _ProgressBar.open(use_tqdm, sum(job.params.n for job in jobs))
        order = {self._next_id(): job for job in jobs}
        results: dict[str, RequestOutput] = {}
        try:
            for output in self._outputs(order):
                if output.error is not None:
                    raise output.error
                results[output.request_id] = output
                progress.finish(output)
        except BaseException:
            self._client.abort([request_id for request_id in order if request_id not in results])
            raise
        finally:
            progress.close()
        return [results[request_id] for request_id in order]

    def _outputs(self, jobs: Mapping[str, _Job]) -> Iterable[RequestOutput]:
        """Finished outputs as they come. Jobs enter the engine's queue as it has room for them."""
        waiting = deque(jobs.items())
        while waiting or self._client.has_unfinished():
            with _interrupts_held():
                self._add_waiting(waiting)
                outputs = self._client.step()
            yield from (output for output in outputs if output.finished)

    def _add_waiting(self, waiting: deque[tuple[str, _Job]]) -> None:
        room = (self.args.max_num_queued_reqs or DEFAULT_QUEUE) - self._core.stats().num_waiting
        # With nothing running, a job that the queue can't hold is the engine's to refuse.
        while waiting and (waiting[0][1].params.n <= room or not self._client.has_unfinished()):
            request_id, job = waiting.popleft()
            room -= job.params.n
            self._client.add(request_id, job.token_ids, job.params, prompt=job.prompt, priority=job.priority, cache_salt=job.cache_salt)

    def _next_id(self) -> str:
        self._num_requests += 1
        return str(self._num_requests - 1)

    def _search(self, jobs: list[_Job], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """Search for several prompts at once, in step with each other."""
        eos = frozenset(jobs[0].params.eos_token_ids) if jobs else frozenset()
        searches = [BeamSearch(job.token_ids, params, eos) for job in jobs]
        ask = question(params.beam_width, self.info.vocab_size)
        for step in range(params.max_tokens):
            live = [
                (search, job)
                for search, job in zip(searches, jobs, strict=True)
                if search.beams and len(job.token_ids) + step < self.info.max_model_len
            ]
            beams = [(beam, job) for search, job in live for beam in search.beams]
            if not beams:
                break
            outputs = iter(self._run([_Job(None, beam.tokens, ask, job.cache_salt, 0) for beam, job in beams], False))
            for search, _ in live:
                search.advance([candidates(next(outputs), params.beam_width) for _ in search.beams])
        return [BeamSearchOutput([self._with_text(s, len(search.prompt_token_ids)) for s in search.result()]) for search in searches]

    def _with_text(self, sequence: BeamSearchSequence, num_prompt_tokens: int) -> BeamSearchSequence:
        return dataclasses.replace(sequence, text=self._tokenizer.decode(sequence.tokens[num_prompt_tokens:]))


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    return [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)


def _prompt_fields(index: int, prompt: Prompt) -> Mapping[str, Any]:
    """A prompt in its mapping form, with known keys of the right types."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if not isinstance(prompt, Mapping):
        raise InvalidRequestError(
            f'Prompt {index} must be a string, {{"prompt": str}} or {{"prompt_token_ids": [int, ...]}}, got {type(prompt).__name__}.',
            "prompts",
        )
    unknown = sorted(set(prompt) - PROMPT_KEYS)
    if unknown or not {"prompt", "prompt_token_ids"} & set(prompt):
        found = f"unknown key {unknown[0]!r}" if unknown else "neither 'prompt' nor 'prompt_token_ids'"
        raise InvalidRequestError(f"Prompt {index} has {found}; it may have: {', '.join(sorted(PROMPT_KEYS))}.", "prompts")
    for key in ("prompt", "cache_salt"):
        if not isinstance(prompt.get(key), (str, type(None))):
            raise InvalidRequestError(f"{key!r} of prompt {index} must be a string, got {prompt[key]!r:.80}.", "prompts")
    return prompt


def _check_token_ids(index: int, token_ids: Any, vocab_size: int) -> None:
    if isinstance(token_ids, (str, bytes)) or not isinstance(token_ids, Sequence):
        raise InvalidRequestError(f"'prompt_token_ids' of prompt {index} must be a list of integers, got {token_ids!r:.80}.", "prompts")
    if not token_ids:
        raise InvalidRequestError(f"Prompt {index} is empty: at least one token is needed.", "prompts")
    for token_id in token_ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
            raise InvalidRequestError(f"Prompt {index} must hold token ids in [0, {vocab_size}), got {token_id!r:.80}.", "prompts")


def _conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[dict[str, Any]]]:
    """One conversation or several, as a list of conversations."""
    several: Sequence[Any] = [messages] if messages and isinstance(messages[0], Mapping) else messages
    conversations: list[list[dict[str, Any]]] = []
    for conversation in several:
        if isinstance(conversation, (str, Mapping)) or not all(isinstance(message, Mapping) for message in conversation):
            raise InvalidRequestError('messages must be a list of {"role": ..., "content": ...}, or a list of such lists.', "messages")
        conversations.append([dict(message) for message in conversation])
    return conversations
