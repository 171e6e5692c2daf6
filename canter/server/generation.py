"""The one generation pipeline. `prepare` makes a job of prompts and wishes, `stream` runs it, `fold` sums a stream up.

It knows no dialect: routes bring plain values and encode the outputs that come.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from canter.beam_search import BeamSearchParams
from canter.client.hub import most_live
from canter.client.outputs import RequestOutput, merge_outputs
from canter.client.protocol import EngineClient
from canter.core.config import EngineArgs
from canter.core.errors import EngineNotReadyError, InvalidRequestError
from canter.core.messages import EngineInfo
from canter.core.sampling_params import OutputKind, SamplingParams
from canter.core.structured_outputs import StructuredOutputsConfig, StructuredOutputsParams
from canter.core.vocabulary import Vocabulary
from canter.server.beam_search import BeamRun, beam_params
from canter.server.merging import merge_streams
from canter.server.model_text import ModelText
from canter.server.reading import Reading, read_outputs
from canter.server.tools import ToolUse, named_tools, strict_calls
from canter.server.traffic import Traffic
from canter.structured.compiler import GrammarCompiler
from canter.text.chat_template import RESERVED_VARIABLES, ChatTemplate
from canter.text.parsing.load import plain_format
from canter.text.parsing.options import ParseOptions
from canter.text.prepare import eos_token_ids, finish_params
from canter.text.thinking import free_thoughts

T = TypeVar("T")

INLINE_CHARS = 4096
"""Shorter texts are tokenised on the event loop: handing them to a thread would take longer."""
MAX_TOKEN_CHARS = 256
"""No token of a byte-level vocabulary stands for so much text: what is longer than a context of such tokens can't fit."""
MAX_TEXT_CHARS = 2**23
"""Most text that is tokenised for one request, whatever the model: the library hands over so many ids at once while others wait."""
MAX_CACHE_SALT_CHARS = 128
MAX_PRIORITY = 2**31
TEMPLATE_RESERVED = RESERVED_VARIABLES | {"self"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt ready to run. `text` is None when the user sent token ids."""

    text: str | None
    token_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a request asks for, dialect left behind. `sampling` holds only what the user gave, under `SamplingParams`' names."""

    sampling: Mapping[str, Any]
    stream: bool
    default_max_tokens: int | None = None
    """Tokens to generate when neither request nor model says; None for all that fit."""
    max_tokens_name: str = "max_tokens"
    truncate_prompt_tokens: int | None = None
    truncation_side: str = "left"
    """What is cut off: the prompt's beginning (left) or its end (right)."""
    priority: int = 0
    cache_salt: str | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    constraint: StructuredOutputsParams | None = None
    """The grammar that the answer obeys: behind the thought, where `reading` knows of thoughts."""
    reading: Reading | None = None
    """How the answer is read; None where all of it is content."""


@dataclass(frozen=True, slots=True)
class Job:
    """Prompts with their parameters, ready for `Generation.stream`."""

    request_id: str
    prompts: list[Prompt]
    params: list[SamplingParams]
    priority: int
    cache_salt: str | None
    beams: list[BeamSearchParams] | None = None
    """A beam search for each prompt, in place of sampling."""
    reading: Reading | None = None
    holds_calls: bool = False
    """Whether the grammar of the answer is one for its calls, which nobody has asked for by name."""

    def engine_id(self, number: int) -> str:
        """The id of one of the prompts in the engine."""
        return self.request_id if len(self.prompts) == 1 else f"{self.request_id}-{number}"

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)


class Generation:
    """The pipeline over one engine and one model's text side."""

    def __init__(
        self,
        client: EngineClient,
        text: ModelText,
        args: EngineArgs,
        traffic: Traffic | None = None,
        on_calls_read: Callable[[str, bool, bool], None] | None = None,
    ) -> None:
        self.client = client
        self.text = text
        self.traffic = traffic or Traffic(client)
        self._args = args
        self._on_calls_read = on_calls_read
        self._grammars = StructuredOutputsConfig.parse(args.structured_outputs_config)
        self._compiler = GrammarCompiler(self._vocabulary, self._grammars, checks_only=True)

    @property
    def info(self) -> EngineInfo:
        if self.client.info is None:
            raise EngineNotReadyError("The model is still loading. Try again in a moment.")
        return self.client.info

    def _vocabulary(self) -> Vocabulary:
        size = self.info.vocab_size
        return self.text.tokenizer.vocabulary(size, eos_token_ids(self.text.tokenizer, self.text.generation_config, size))

    def reading(
        self,
        use: ToolUse,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
        num_previous_calls: int = 0,
        show_reasoning: bool = True,
        keep_special_tokens: bool = False,
        request_type: str = "other",
    ) -> Reading | None:
        """How an answer with these tools is to be read; None where all of it is content. Raises `InvalidRequestError` when nobody knows
        how the model writes a call."""
        known = self.text.output_format
        if use.choice == "auto" and (known is None or not known.reads_tools):
            raise InvalidRequestError(
                "tools can't be served as they are: it isn't known how this model writes calls. Start the server with --tool-call-parser, "
                "or set tool_choice to required or a function, which makes the model write JSON.",
                "tools",
            )
        if known is not None and not use.tools:
            known = known.without_calls() if known.reads_thoughts else None
        if known is None and use.choice not in ("required", "named"):
            return None
        options = ParseOptions(
            tools=use.tools,
            tool_choice=use.choice,
            named_tool=use.named,
            parallel_tool_calls=use.parallel,
            template_kwargs=template_kwargs or {},
            reasoning_effort=reasoning_effort,
            num_previous_calls=num_previous_calls,
            keep_special_tokens=keep_special_tokens,
        )
        return Reading(known or plain_format(self.text.tokenizer), options, show_reasoning, request_type)

    async def encode(self, text: str, add_special_tokens: bool, must_fit: bool = False) -> Prompt:
        """Tokenise a text; a long one in a thread, so that other requests go on. `must_fit`: refuse what is too long for the context."""
        [prompt] = await self.encode_all([text], add_special_tokens, must_fit)
        return prompt

    async def encode_all(self, texts: list[str], add_special_tokens: bool, must_fit: bool = False) -> list[Prompt]:
        """Tokenise several texts as `encode` does one."""
        tokenizer = self.text.tokenizer
        if sum(map(len, texts)) <= INLINE_CHARS:
            return [Prompt(text, tokenizer.encode(text, add_special_tokens)) for text in texts]
        if (total := sum(map(len, texts))) > MAX_TEXT_CHARS:
            raise InvalidRequestError(
                f"The prompt has {total} characters; this server tokenises at most {MAX_TEXT_CHARS} at once.", "prompt"
            )
        limit, longest = self.info.max_model_len * MAX_TOKEN_CHARS, max(map(len, texts))
        if must_fit and longest > limit and tokenizer.token_bytes is not None:
            raise InvalidRequestError(
                f"The prompt has {longest} characters, more than the model's context of {self.info.max_model_len} tokens can hold. "
                "Shorten it, or set truncate_prompt_tokens.",
                "prompt",
            )
        # As a batch, also of one: the library keeps the interpreter to itself while it encodes a single text.
        encoded = await asyncio.to_thread(tokenizer.encode_batch, texts, add_special_tokens)
        return [Prompt(text, token_ids) for text, token_ids in zip(texts, encoded, strict=True)]

    async def decode(self, token_ids: list[int]) -> str:
        """The text of token ids, special tokens included; of many in a thread, so that other requests go on."""
        return await _off_loop(len(token_ids), lambda: self.text.tokenizer.decode(token_ids, skip_special_tokens=False))

    async def token_strings(self, token_ids: list[int]) -> list[str]:
        """Each token as the vocabulary spells it; of many in a thread."""
        id_to_token = self.text.tokenizer.id_to_token
        return await _off_loop(len(token_ids), lambda: [id_to_token(token_id) or "" for token_id in token_ids])

    def check_length(self, length: int) -> None:
        """Raises `InvalidRequestError` for a prompt of so many tokens that no room is left for an answer."""
        context = self.info.max_model_len
        if length >= context:
            raise InvalidRequestError(
                f"The prompt has {length} tokens, but the model's context is {context} tokens, prompt and answer together. "
                f"Shorten the prompt to at most {context - 1} tokens, or set truncate_prompt_tokens.",
                "prompt",
            )

    def check_token_ids(self, token_ids: Sequence[int], name: str) -> Prompt:
        """A prompt that came as token ids. Raises `InvalidRequestError` for one outside the vocabulary."""
        vocab_size = self.info.vocab_size
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
            wrong = next(t for t in token_ids if not 0 <= t < vocab_size)
            raise InvalidRequestError(f"{name} must hold token ids in [0, {vocab_size}), got {wrong}.", name)
        return Prompt(None, list(token_ids))

    async def render(
        self, messages: list[dict[str, Any]], kwargs: Mapping[str, Any], template: ChatTemplate | None = None, **options: Any
    ) -> str:
        """Conversation to text with the model's chat template, or another. `kwargs` are the user's own template variables."""
        chosen = template or self.text.chat_template
        reserved = sorted(TEMPLATE_RESERVED & set(kwargs))
        if reserved:
            raise InvalidRequestError(f"chat_template_kwargs may not set {', '.join(reserved)}.", "chat_template_kwargs")
        size = sum(len(str(message.get("content") or "")) for message in messages)
        if template is not None:
            size = INLINE_CHARS + 1  # who wrote it may have meant to hold others up
        return await _off_loop(size, lambda: chosen.render(messages, **options, **kwargs))

    def prompt_text(self, prompt: Prompt) -> str:
        """A prompt as text: as it was given or rendered, or what its token ids say."""
        return prompt.text if prompt.text is not None else self.text.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)

    def prepare(self, request_id: str, prompts: list[Prompt], wishes: Wishes) -> Job:
        """Check everything that can be checked before the engine sees it. Raises `InvalidRequestError` naming the field."""
        _check_cache_salt(wishes.cache_salt)
        self._check_priority(wishes.priority)
        prompts = [self._truncated(prompt, wishes) for prompt in prompts]
        rooms = [self._room(prompt, wishes) for prompt in prompts]
        limits = [self._max_tokens(room, wishes) for room in rooms]
        beams = self._beams(limits, wishes)
        base = self._sampling(wishes)
        self._check_number(len(prompts) * base.n)
        params = [base if limit == base.max_tokens else base.clone(max_tokens=limit) for limit in limits]
        holds_calls = wishes.constraint is None and base.structured_outputs is not None
        return Job(request_id, prompts, params, wishes.priority, wishes.cache_salt, beams, wishes.reading, holds_calls)

    async def admit(self, job: Job) -> None:
        """Return once the job's grammar is known to compile. Raises `InvalidRequestError` for one that doesn't."""
        constraint = job.params[0].structured_outputs
        if constraint is None:
            return
        try:
            await self._compiler.check(constraint)
        except InvalidRequestError as error:
            raise named_tools(error) if job.holds_calls else error from None

    def stream(self, job: Job) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Run a job: (number of the prompt, output) as they come. Closing it aborts what still runs."""
        most_held = most_live(self.info, self._args)
        sources = [self._watched(job, i, most_held) for i in range(len(job.prompts))]
        outputs = sources[0] if len(sources) == 1 else merge_streams(sources)
        if job.reading is None:
            return outputs
        return read_outputs(outputs, job.reading, [prompt.token_ids for prompt in job.prompts], self._call_counter(job, job.reading))

    def _call_counter(self, job: Job, reading: Reading) -> Callable[[bool], None] | None:
        if self._on_calls_read is None or not reading.reads_calls:
            return None
        return partial(self._on_calls_read, reading.request_type, job.params[0].output_kind is OutputKind.DELTA)

    def _watched(self, job: Job, number: int, most_held: int) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        request_id = job.engine_id(number)
        scheduling: dict[str, Any] = {"priority": job.priority, "cache_salt": job.cache_salt}
        if job.beams is None:
            prompt = job.prompts[number]
            outputs = self.client.generate(request_id, prompt.token_ids, job.params[number], prompt=prompt.text, **scheduling)
            return self.traffic.watch(number, request_id, outputs, most_held)
        run = BeamRun(self.client, self.info, self.text.tokenizer, job.beams[number], job.params[number], **scheduling)
        prompt = job.prompts[number]
        return self.traffic.watch(number, request_id, run.run(request_id, prompt.text, prompt.token_ids), most_held, run.abort)

    def _sampling(self, wishes: Wishes) -> SamplingParams:
        """Model's defaults below the user's values, checked against model and server. A beam search has no use for the defaults."""
        values = {**self.text.defaults, **wishes.sampling}
        if wishes.use_beam_search:
            values = {**wishes.sampling, "temperature": 1.0}  # 0, which says the same here, would forbid several choices
        values["output_kind"] = OutputKind.DELTA if wishes.stream else OutputKind.FINAL_ONLY
        values["max_tokens"] = self._max_tokens(self.info.max_model_len, wishes)
        values["structured_outputs"] = wishes.constraint
        if wishes.reading is not None:
            values["structured_outputs"] = wishes.constraint or strict_calls(wishes.reading.format, wishes.reading.options)
            values["skip_special_tokens"] = False  # the reader needs them, and leaves out those that nobody wants
            values["stop_in_thoughts"] = not wishes.reading.format.reads_thoughts
        info, text = self.info, self.text
        params = finish_params(SamplingParams(**values), text.tokenizer, text.generation_config, info.vocab_size, text.thinking)
        params.verify_vocabulary(info.vocab_size, self._args.max_logprobs)
        if not params.stop_in_thoughts and text.thinking is not None and not self._grammars.enable_in_reasoning:
            params = free_thoughts(params, text.thinking)
        return params.clone(top_k=info.vocab_size) if params.top_k > info.vocab_size else params

    def _beams(self, limits: list[int], wishes: Wishes) -> list[BeamSearchParams] | None:
        """The searches of a request that wants them. Their lengths are those of its prompts' answers."""
        if not wishes.use_beam_search:
            if wishes.length_penalty != 1.0:
                raise InvalidRequestError(
                    "length_penalty ranks the sequences of a beam search: it needs use_beam_search.", "length_penalty"
                )
            return None
        if wishes.stream:
            raise InvalidRequestError("use_beam_search can't be streamed: its sequences are known only at the end.", "stream")
        return [beam_params(wishes.sampling, wishes.length_penalty, limit) for limit in limits]

    def _truncated(self, prompt: Prompt, wishes: Wishes) -> Prompt:
        """Cut a prompt that asks for it to `truncate_prompt_tokens`, or with -1 to whatever leaves room to answer."""
        keep = wishes.truncate_prompt_tokens
        if keep is None:
            return prompt
        if keep < -1 or keep == 0:
            raise InvalidRequestError(f"truncate_prompt_tokens must be -1 or at least 1, got {keep}.", "truncate_prompt_tokens")
        if keep == -1:
            keep = max(1, self.info.max_model_len - (wishes.sampling.get("max_tokens") or 1))
        elif keep > self.info.max_model_len:
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be at most the context of {self.info.max_model_len} tokens, got {keep}.",
                "truncate_prompt_tokens",
            )
        if len(prompt.token_ids) <= keep:
            return prompt
        return Prompt(None, prompt.token_ids[-keep:] if wishes.truncation_side == "left" else prompt.token_ids[:keep])

    def _room(self, prompt: Prompt, wishes: Wishes) -> int:
        """Tokens that the context leaves for the answer."""
        context, length = self.info.max_model_len, len(prompt.token_ids)
        if length == 0:
            raise InvalidRequestError("The prompt is empty: at least one token is needed.", "prompt")
        self.check_length(length)
        wanted = wishes.sampling.get("max_tokens")
        if wanted is not None and length + wanted > context:
            raise InvalidRequestError(
                f"The prompt has {length} tokens and {wishes.max_tokens_name} is {wanted}, together {length + wanted}, but the model's "
                f"context is {context} tokens. Shorten the prompt, or set {wishes.max_tokens_name} to at most {context - length}.",
                wishes.max_tokens_name,
            )
        return context - length

    def _max_tokens(self, room: int, wishes: Wishes) -> int:
        given = wishes.sampling.get("max_tokens")
        if given is not None:
            return int(given)
        default = wishes.default_max_tokens or self.text.defaults.get("max_tokens")
        return room if default is None else min(room, default)

    def _check_number(self, num_choices: int) -> None:
        """A request that could never be taken in must not be told to try again."""
        most = most_live(self.info, self._args)
        if num_choices > most:
            raise InvalidRequestError(
                f"The request asks for {num_choices} choices, all prompts together; this server takes in at most {most} at once.", "n"
            )

    def _check_priority(self, priority: int) -> None:
        if not -MAX_PRIORITY <= priority < MAX_PRIORITY:
            raise InvalidRequestError(f"priority must be an integer of 32 bits, got {priority}.", "priority")
        if priority != 0 and self._args.scheduling_policy != "priority":
            raise InvalidRequestError("priority needs a server started with --scheduling-policy priority.", "priority")


async def fold(stream: AsyncIterator[tuple[int, RequestOutput]]) -> list[RequestOutput]:
    """The sum of a stream: one output for each prompt, in order, its choices sorted by index."""
    results: dict[int, RequestOutput] = {}
    async for number, output in stream:
        known = results.get(number)
        results[number] = output if known is None else merge_outputs(known, output, OutputKind.DELTA)
    for result in results.values():
        result.outputs.sort(key=lambda choice: choice.index)
    return [results[number] for number in sorted(results)]


async def _off_loop(size: int, work: Callable[[], T]) -> T:
    return work() if size <= INLINE_CHARS else await asyncio.to_thread(work)


def _check_cache_salt(salt: str | None) -> None:
    if salt is None:
        return
    if not 1 <= len(salt) <= MAX_CACHE_SALT_CHARS or any(c in "@/\\\0" for c in salt):
        raise InvalidRequestError(
            f"cache_salt must have 1 to {MAX_CACHE_SALT_CHARS} characters, none of them @, /, \\ or NUL.", "cache_salt"
        )
