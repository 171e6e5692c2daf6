"""The client of an engine core in the same process: synchronous, for offline use."""

from __future__ import annotations

import time
from collections.abc import Iterable

from canter.client.outputs import RequestGroup, RequestOutput, TokenTexts
from canter.client.protocol import EngineCoreLike
from canter.core.errors import InvalidRequestError
from canter.core.messages import AddRequest
from canter.core.sampling_params import SamplingParams
from canter.text.tokenizer import Tokenizer


class InProcessClient:
    """Adds requests to an engine core and steps it. Outputs come from `step`, under the ids given to `add`."""

    def __init__(self, core: EngineCoreLike, tokenizer: Tokenizer | None) -> None:
        self.core = core
        self._tokenizer = tokenizer
        self._texts = None if tokenizer is None else TokenTexts(tokenizer)
        self._groups: dict[str, RequestGroup] = {}
        self._by_child: dict[str, RequestGroup] = {}

    def add(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Queue a request. Raises what the engine refuses it with; then none of its choices stays."""
        if request_id in self._groups:
            raise InvalidRequestError(f"A request with the id {request_id!r} is already running.", "request_id")
        now = time.time()
        group = RequestGroup(request_id, prompt, prompt_token_ids, params, self._tokenizer, arrival_time=now, texts=self._texts)
        added: list[str] = []
        try:
            for child_id, state in group.states.items():
                self.core.add_request(AddRequest(child_id, prompt_token_ids, state.params, now, priority, cache_salt))
                added.append(child_id)
        except Exception:
            self.core.abort(added)
            raise
        self._groups[request_id] = group
        self._by_child.update((child_id, group) for child_id in group.states)

    def step(self) -> list[RequestOutput]:
        """Run one step of the engine. An output whose `error` is set ends a request that the engine could not finish."""
        outputs, stopped = [], []
        for delta in self.core.step():
            group = self._by_child.get(delta.request_id)
            if group is None:
                continue
            output = group.feed(delta)
            state = group.states[delta.request_id]
            if state.needs_abort:
                stopped.append(delta.request_id)
            if output is not None:
                outputs.append(output)
                if output.error is not None:
                    stopped.extend(group.unfinished_ids)
            if state.finished:
                self._forget(group, output)
        if stopped:
            self.core.abort(stopped)
        return outputs

    def has_unfinished(self) -> bool:
        return bool(self._groups)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests; they give no more outputs. Unknown ids are ignored."""
        for request_id in request_ids:
            group = self._groups.get(request_id)
            if group is not None:
                self.core.abort(group.unfinished_ids)
                self._drop(group)

    def _forget(self, group: RequestGroup, output: RequestOutput | None) -> None:
        if group.finished or (output is not None and output.error is not None):
            self._drop(group)

    def _drop(self, group: RequestGroup) -> None:
        self._groups.pop(group.request_id, None)
        for child_id in group.states:
            self._by_child.pop(child_id, None)
