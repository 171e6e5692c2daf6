"""One object per request: token deltas in, text, logprobs and outputs out. No I/O and no clock but the one passed in."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from canter.core import errors
from canter.core.errors import CanterError, EngineError
from canter.core.messages import FINISH_ABORT, FINISH_STOP, RequestDelta
from canter.core.plan import TokenLogprobs
from canter.core.sampling_params import OutputKind, SamplingParams
from canter.text.detokenizer import IncrementalDetokenizer
from canter.text.parsing.events import Event
from canter.text.stop_strings import StopChecker
from canter.text.thinking import ThoughtWatch
from canter.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token at one position. `rank` 1 is the most likely."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""Token id -> logprob at one position. The chosen token comes first, then the most likely, best first."""


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a request: what is new (DELTA) or everything so far, as the request's output kind says."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    events: list[Event] | None = None
    """What a parser made of `text`; None where nobody parses, and all of it is content."""
    num_reasoning_tokens: int = 0
    """Of all tokens so far, as far as a parser can tell."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Wall-clock seconds (`time.time()`) of a request's life; 0 means not reached."""

    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    num_generation_tokens: int = 0
    first_token_latency: float = 0.0


def merge_metrics(parts: Sequence[RequestMetrics]) -> RequestMetrics:
    """Of several engine requests as one: from the first to begin to the last to end."""

    def first(name: str) -> float:
        return min((value for part in parts if (value := getattr(part, name))), default=0.0)

    return RequestMetrics(
        arrival_time=first("arrival_time"),
        queued_ts=first("queued_ts"),
        scheduled_ts=first("scheduled_ts"),
        first_token_ts=first("first_token_ts"),
        last_token_ts=max((part.last_token_ts for part in parts), default=0.0),
        num_generation_tokens=sum(part.num_generation_tokens for part in parts),
        first_token_latency=first("first_token_latency"),
    )


@dataclass(slots=True)
class RequestOutput:
    """What a request has to show. `prompt_logprobs` begins with None: nothing predicts the first token.

    Under DELTA `prompt_logprobs` come once, with the first output. `error` is set in the last output of a request
    that the engine refused or could not finish; `outputs` then have the finish reason "error".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    error: CanterError | None = None


class TokenTexts:
    """Text of single tokens, decoded once each. One per tokenizer; holds at most its vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __getitem__(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._decode(token_id)
        return text

    def _decode(self, token_id: int) -> str:
        """Unlike a decoded text, a token keeps the space that it begins with."""
        table = self._tokenizer.token_bytes
        if table is not None:
            return table.bytes_of(token_id).decode(errors="replace")
        return self._tokenizer.decode([token_id], skip_special_tokens=False)


def format_logprobs(position: TokenLogprobs, texts: TokenTexts | None, ranked: bool = True) -> PositionLogprobs:
    """The dictionary of one position. The chosen token's entry stays first, also when it is among the most likely.

    Not `ranked`: the others are those that the request named, of unknown rank.
    """
    ids, values = position.token_ids, position.logprobs
    result = {ids[0]: Logprob(values[0], position.rank, texts[ids[0]] if texts else None)}
    for rank, (token_id, value) in enumerate(zip(ids[1:], values[1:], strict=True), 1):
        if token_id not in result:
            result[token_id] = Logprob(value, rank if ranked else None, texts[token_id] if texts else None)
    return result


def error_of(delta: RequestDelta) -> CanterError:
    """The error that a delta reports, as the class of `core.errors` that it names."""
    message = delta.error or "The engine failed while it worked on this request."
    kind = getattr(errors, delta.error_type or "", EngineError)
    return kind(message) if isinstance(kind, type) and issubclass(kind, CanterError) else EngineError(message)


_stop_checkers: WeakValueDictionary[tuple[object, ...], StopChecker] = WeakValueDictionary()


def _stop_strings(params: SamplingParams) -> StopChecker:
    """A fresh checker, to be copied before use. Copies share the tables, which are large for long stop strings: all choices
    of a request, and all its prompts, need them once."""
    key = (params.include_stop_str_in_output, params.min_tokens, *params.stop_strings)
    checker = _stop_checkers.get(key)
    if checker is None:
        checker = _stop_checkers[key] = StopChecker(params.stop_strings, params.include_stop_str_in_output, params.min_tokens)
    return checker


class RequestState:
    """One choice of one prompt, which is one request of the engine.

    `tokenizer` None (or `params.detokenize` False) leaves texts empty; stop strings then don't exist.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        *,
        index: int = 0,
        arrival_time: float = 0.0,
        texts: TokenTexts | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.index = index
        self.metrics = RequestMetrics(arrival_time=arrival_time)
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.needs_abort = False
        self.error: CanterError | None = None
        self._texts = texts if texts is not None else TokenTexts(tokenizer) if tokenizer is not None else None
        self._detokenizer: IncrementalDetokenizer | None = None
        self._stop: StopChecker | None = None
        self._stop_strings: StopChecker | None = None  # kept, so that others can share it
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer, prompt_token_ids, params.skip_special_tokens, params.spaces_between_special_tokens
            )
            if params.stop_strings:
                self._stop_strings = _stop_strings(params)
                self._stop = copy.copy(self._stop_strings)
        self._thought: ThoughtWatch | None = None
        if self._stop is not None and not params.stop_in_thoughts and params.thinking_end_ids:
            self._thought = ThoughtWatch(params.thinking_start_ids, params.thinking_end_ids, prompt_token_ids)
        self._has_shown = False
        self._text: list[str] = []
        self._token_ids: list[int] = []
        # All tokens so far: what the request needs to go on in another engine.
        self.output_token_ids: list[int] = [] if params.output_kind is OutputKind.DELTA else self._token_ids
        self._logprobs: list[PositionLogprobs] | None = None if params.logprobs is None else []
        self._cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None if params.prompt_logprobs is None else [None]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def feed(self, delta: RequestDelta) -> RequestOutput | None:
        """Take what the engine says is new. None while there is nothing to show; always an output at the end.

        Deltas after the end (the engine's answer to an abort, tokens computed meanwhile) are ignored.
        """
        if self.finished:
            return None
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        self.num_preemptions = max(self.num_preemptions, delta.num_preemptions)
        if delta.prompt_logprobs and self._prompt_logprobs is not None:
            self._prompt_logprobs.extend(format_logprobs(p, self._texts) for p in delta.prompt_logprobs)
        self._take_tokens(delta)
        self._take_times(delta)
        if delta.finish_reason is not None and not self.finished:
            self._finish(delta)
        return self._next_output()

    def give_up(self) -> None:
        """Nobody reads any more: end with the reason "abort" and no output."""
        self.finish_reason = self.finish_reason or FINISH_ABORT

    def _take_tokens(self, delta: RequestDelta) -> None:
        """Append tokens one by one where a stop string may end the output between two of them, else all at once."""
        ids, logprobs = delta.new_token_ids, delta.logprobs
        if not ids:
            return
        hidden = delta.finish_reason == FINISH_STOP and self._is_hidden(ids[-1])
        if self._stop is None:
            self._record(ids, logprobs)
            if self._detokenizer is not None:
                self._text.append(self._detokenizer.append(ids[:-1] if hidden else ids))
            return
        for i, token_id in enumerate(ids):
            self._record([token_id], logprobs[i : i + 1] if logprobs else None)
            if hidden and i == len(ids) - 1:
                return
            text = self._detokenizer.append([token_id]) if self._detokenizer else ""
            if self._thought is not None and self._thought.feed(token_id):
                self._text.append(text)
            elif self._check_stop(self._stop, text):
                return

    def _is_hidden(self, stop_token_id: int) -> bool:
        """Whether the token that ended the output is kept out of its text."""
        return not self.params.include_stop_str_in_output and stop_token_id in self.params.all_stop_token_ids

    def _check_stop(self, stop: StopChecker, text: str) -> bool:
        """Show the part of new text that no stop string can claim; True when a stop string has ended the output."""
        safe, matched = stop.feed(text, self.metrics.num_generation_tokens)
        self._text.append(safe)
        if matched is None:
            return False
        self.finish_reason, self.stop_reason = FINISH_STOP, matched
        self.needs_abort = True
        return True

    def _record(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> None:
        self._token_ids.extend(token_ids)
        if self.output_token_ids is not self._token_ids:
            self.output_token_ids.extend(token_ids)
        self.metrics.num_generation_tokens += len(token_ids)
        if self._logprobs is None or not logprobs:
            return
        for position in logprobs:
            self._logprobs.append(format_logprobs(position, self._texts, not self.params.logprob_token_ids))
        self._cumulative_logprob = (self._cumulative_logprob or 0.0) + sum(p.logprobs[0] for p in logprobs)

    def _take_times(self, delta: RequestDelta) -> None:
        if delta.times is None:
            return
        metrics, times = self.metrics, delta.times
        # The first engine that had the request knows when it began.
        metrics.queued_ts = metrics.queued_ts or times.queued
        metrics.scheduled_ts = metrics.scheduled_ts or times.scheduled
        metrics.last_token_ts = times.last_token or metrics.last_token_ts
        if times.first_token and not metrics.first_token_ts:
            metrics.first_token_ts = times.first_token
            metrics.first_token_latency = max(0.0, times.first_token - metrics.arrival_time)

    def _finish(self, delta: RequestDelta) -> None:
        """The engine has ended the request: give out the text held back so far. The engine's end is already told."""
        rest = self._detokenizer.flush() if self._detokenizer is not None else ""
        if self._stop is None:
            self._text.append(rest)
        elif not self._check_stop(self._stop, rest):
            self._text.append(self._stop.flush())
        self.needs_abort = False
        if not self.finished:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.error is not None:
            self.error = error_of(delta)

    def _next_output(self) -> RequestOutput | None:
        kind = self.params.output_kind
        if not self.finished:
            if kind is OutputKind.FINAL_ONLY or not self._token_ids:
                return None
            if kind is OutputKind.DELTA and self._detokenizer is not None and not any(self._text):
                return None  # text is being held back: its tokens and logprobs go out together with it
            if kind is OutputKind.DELTA and self._has_shown and len(self._token_ids) < self.params.stream_interval:
                return None
        text = "".join(self._text)
        output = CompletionOutput(
            self.index, text, self._token_ids, self._cumulative_logprob, self._logprobs, self.finish_reason, self.stop_reason
        )
        prompt_logprobs = self._prompt_logprobs
        if kind is OutputKind.DELTA:
            self._has_shown = True
            self._text, self._token_ids, self._prompt_logprobs = [], [], None
            self._logprobs = None if self._logprobs is None else []
        else:
            self._text = [text]
            if not self.finished:
                output.token_ids = self._token_ids.copy()
                output.logprobs = None if self._logprobs is None else self._logprobs.copy()
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            prompt_logprobs,
            [output],
            self.finished,
            self.metrics,
            self.num_cached_tokens,
            self.error,
        )


def fan_out(request_id: str, params: SamplingParams) -> list[tuple[str, SamplingParams]]:
    """The engine's requests for `n` choices: ids "i_id", seeds `seed + i`.

    Prompt logprobs are the same for all, so only the first computes them; a stream needs them with each first output.
    """
    if params.n == 1:
        return [(request_id, params)]
    children = []
    for i in range(params.n):
        seed = None if params.seed is None else _wrapped_seed(params.seed + i)
        prompt_logprobs = params.prompt_logprobs if i == 0 or params.output_kind is OutputKind.DELTA else None
        children.append((f"{i}_{request_id}", params.clone(n=1, seed=seed, prompt_logprobs=prompt_logprobs)))
    return children


def _wrapped_seed(seed: int) -> int:
    """Into the range of a signed 64-bit integer; -1 would mean no seed, so it moves on to the next."""
    wrapped = (seed + 2**63) % 2**64 - 2**63
    return -2 if wrapped == -1 else wrapped


@dataclass(slots=True)
class _Latest:
    """What the choices of a group have shown so far, for outputs that hold all of them."""

    outputs: dict[int, CompletionOutput] = field(default_factory=dict)
    prompt_logprobs: list[PositionLogprobs | None] | None = None


class RequestGroup:
    """One request of a user: one `RequestState` for each of its `n` choices, and their outputs brought together."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        *,
        arrival_time: float = 0.0,
        texts: TokenTexts | None = None,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.states = {
            child_id: RequestState(child_id, prompt, prompt_token_ids, child, tokenizer, index=i, arrival_time=arrival_time, texts=texts)
            for i, (child_id, child) in enumerate(fan_out(request_id, params))
        }
        self._latest = _Latest()

    @property
    def finished(self) -> bool:
        return all(state.finished for state in self.states.values())

    @property
    def unfinished_ids(self) -> list[str]:
        return [child_id for child_id, state in self.states.items() if not state.finished]

    def feed(self, delta: RequestDelta) -> RequestOutput | None:
        """Give a delta to the choice it belongs to; the output, if there is one, carries the user's request id."""
        return self._gather(self.states[delta.request_id].feed(delta))

    def _gather(self, output: RequestOutput | None) -> RequestOutput | None:
        if output is None or len(self.states) == 1:
            return output
        output.request_id = self.request_id
        output.finished = self.finished or output.error is not None
        if output.finished:
            output.metrics = merge_metrics([state.metrics for state in self.states.values()])
        if self.params.output_kind is OutputKind.DELTA:
            return output
        self._latest.outputs[output.outputs[0].index] = output.outputs[0]
        self._latest.prompt_logprobs = output.prompt_logprobs or self._latest.prompt_logprobs
        if self.params.output_kind is OutputKind.FINAL_ONLY and not output.finished:
            return None
        output.outputs = [self._latest.outputs[i] for i in sorted(self._latest.outputs)]
        output.prompt_logprobs = self._latest.prompt_logprobs
        return output


def merge_outputs(older: RequestOutput, newer: RequestOutput, kind: OutputKind) -> RequestOutput:
    """One output that says what two in a row say. DELTA outputs are joined choice by choice, in place; others supersede."""
    if kind is not OutputKind.DELTA:
        return newer
    by_index = {output.index: output for output in older.outputs}
    for output in newer.outputs:
        known = by_index.get(output.index)
        if known is None:
            older.outputs.append(output)
        else:
            _extend(known, output)
    older.prompt_logprobs = older.prompt_logprobs or newer.prompt_logprobs
    older.finished, older.error, older.metrics = newer.finished, newer.error, newer.metrics
    older.num_cached_tokens = max(older.num_cached_tokens, newer.num_cached_tokens)
    return older


def _extend(known: CompletionOutput, new: CompletionOutput) -> None:
    known.text += new.text
    known.token_ids.extend(new.token_ids)
    known.cumulative_logprob = new.cumulative_logprob
    if new.logprobs is not None:
        known.logprobs = (known.logprobs or []) + new.logprobs
    known.finish_reason, known.stop_reason = new.finish_reason, new.stop_reason
    if new.events is not None:
        known.events = (known.events or []) + new.events
    known.num_reasoning_tokens = max(known.num_reasoning_tokens, new.num_reasoning_tokens)
