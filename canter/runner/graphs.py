"""Steps of a model: its forward and its logits, recorded once and replayed for any batch, or eager where that can't be.

A recording binds the addresses of weights and caches; everything that varies comes with the step. Both kinds give the
same bits: a program makes the calls that the eager forward makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from canter.core.logging import get_logger
from canter.kernels.native import program, record
from canter.kernels.native.program import NativeProgram
from canter.kernels.recorder import RecordError, Rows
from canter.layers.build import num_moves
from canter.layers.context import StepContext
from canter.runner.state_inputs import StateInputs, checked

logger = get_logger(__name__)


class Model(Protocol):
    """What a runner asks of a model; see `models/contract.py`."""

    def forward(self, token_ids: Tensor, ctx: StepContext) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class Steps(Protocol):
    """Runs a model's steps. `eager_reason`: why it runs them eagerly, or None where it replays a program.

    Results may lie in memory that the next call of the same function uses again: whoever keeps them copies them.
    """

    @property
    def eager_reason(self) -> str | None: ...

    def forward(self, token_ids: Tensor, ctx: StepContext) -> Tensor:
        """[T] token ids -> hidden states [T, H]. Writes the caches of `ctx`."""
        ...

    def logits(self, hidden: Tensor, indices: Tensor) -> Tensor:
        """Logits [L, V] float32 of the rows `indices` [L] of what `forward` returned."""
        ...


class EagerSteps:
    """Every op called from Python, layer by layer."""

    def __init__(self, model: Model, reason: str) -> None:
        self._model = model
        self.eager_reason: str | None = reason

    def forward(self, token_ids: Tensor, ctx: StepContext) -> Tensor:
        return self._model.forward(token_ids, ctx)

    def logits(self, hidden: Tensor, indices: Tensor) -> Tensor:
        # The whole hidden state is its own selection when every row has one token.
        return self._model.logits(hidden if len(indices) == hidden.shape[0] else hidden[indices])


class StepProgram:
    """A model's forward and logits as programs. Raises `RecordError` for a model that can't be recorded.

    Bound to weights and caches as they are: a forward that finds that some have moved (`layers.build.weights_moved`) records
    again first. Their memory is kept until then, so that a program never reads what is no longer there.
    """

    eager_reason: str | None = None

    def __init__(self, model: Model, caches: list[dict[str, Tensor]], group_of_layer: list[int], inputs: Sequence[StateInputs]) -> None:
        self._model, self._caches, self._group_of_layer, self._inputs = model, caches, group_of_layer, inputs
        self._record()

    def forward(self, token_ids: Tensor, ctx: StepContext) -> Tensor:
        """As the model's. The result is valid until the next forward."""
        if num_moves() != self._moves:
            self._record()
        rows, requests = token_ids.shape[0], ctx.num_reqs
        given = [
            checked(token_ids, torch.int64, rows),
            checked(ctx.positions, torch.int64, rows),
            checked(ctx.query_start_loc, torch.int32, requests + 1),
            checked(ctx.seq_lens, torch.int32, requests),
        ]
        slots = [x.data_ptr() for x in given]
        slots.append(requests)
        for inputs, group in zip(self._inputs, ctx.groups, strict=True):
            tensors, values = inputs.slots(group, rows, requests)
            given += tensors
            slots += values
        return self._forward.run(rows, slots)

    def logits(self, hidden: Tensor, indices: Tensor) -> Tensor:
        """As the model's, of rows of `hidden`. The result is valid until the next call."""
        hidden = checked(hidden, self._hidden_dtype, hidden.shape[0])
        indices = checked(indices, torch.int64, indices.shape[0])
        return self._logits.run(indices.shape[0], [hidden.data_ptr(), hidden.shape[0], indices.data_ptr()])

    @property
    def programs(self) -> tuple[NativeProgram, NativeProgram]:
        """Of the forward and of the logits."""
        return self._forward, self._logits

    def _record(self) -> None:
        moves = num_moves()
        recorder = program.new_recorder()
        token_ids = recorder.given("token_ids", torch.int64)
        ctx = StepContext(
            positions=recorder.given("positions", torch.int64),  # type: ignore[arg-type]
            query_start_loc=recorder.given("query_start_loc", torch.int32),  # type: ignore[arg-type]
            seq_lens=recorder.given("seq_lens", torch.int32),  # type: ignore[arg-type]
            num_reqs=Rows(),  # type: ignore[arg-type]
            groups=[],
            group_of_layer=self._group_of_layer,
            caches=self._caches,
        )
        recorder.slot("num_reqs")
        ctx.groups += [inputs.symbols(recorder, i) for i, inputs in enumerate(self._inputs)]
        num_slots = len(recorder.slots)
        hidden = self._model.forward(token_ids, ctx)  # type: ignore[arg-type]
        if len(recorder.slots) != num_slots:
            raise RecordError(f"slots that no step fills: {', '.join(slot.name for slot in recorder.slots[num_slots:])}")
        self._forward = NativeProgram(recorder, hidden)  # type: ignore[arg-type]

        head = program.new_recorder()
        rows = head.given("hidden", hidden.dtype, *hidden.shape[1:])
        head.slot("num_hidden")
        chosen = record.gather(rows, "num_hidden", head.given("indices", torch.int64))
        self._logits = NativeProgram(head, self._model.logits(chosen))  # type: ignore[arg-type]
        self._hidden_dtype = hidden.dtype
        constants = *recorder.constants, *head.constants
        self._kept = [*(tensor.untyped_storage() for tensor in constants), *recorder.kept, *head.kept]
        self._moves = moves


def make_steps(
    model: Model, caches: list[dict[str, Tensor]], group_of_layer: list[int], inputs: Sequence[StateInputs], eager: bool
) -> Steps:
    """A program of the model where it can be recorded and `eager` does not forbid it; why not is logged."""
    if eager:
        return EagerSteps(model, "--enforce-eager")
    try:
        return StepProgram(model, caches, group_of_layer, inputs)
    except Exception as error:  # whatever a model does with symbols: eagerly it serves, or says itself what is wrong
        reason = str(error) if isinstance(error, RecordError) else f"{type(error).__name__}: {error}"
        logger.info("Steps run eagerly, since the model can't be recorded: %s.", reason)
        return EagerSteps(model, reason)
