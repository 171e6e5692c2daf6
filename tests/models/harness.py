"""Runs a model the way the engine does: paged caches, block tables, chunks, batches. No scheduler, no runner.

Block ids are scrambled, every block starts out as garbage, and blocks behind a window are handed to nobody and
overwritten, so that a model which reads what it must not read fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from canter.core.state_specs import StateLayout, plan_layout
from canter.layers.context import GroupContext, StepContext
from canter.models.loader import LoadedModel
from canter.runner.graphs import EagerSteps, StepProgram, Steps

GARBAGE = 1e4
"""Finite, so that it can't hide behind a NaN check, and large, so that it shows in every logit that it reaches."""


@dataclass
class Request:
    """Tokens of one request and how many of them are computed."""

    token_ids: list[int]
    tables: list[list[int]]
    num_computed: int = 0
    logits: list[Tensor] = field(default_factory=list)


class Harness:
    """Caches for one model, and steps over requests of the caller's making, eagerly or `recorded`."""

    def __init__(self, loaded: LoadedModel, block_size: int, num_blocks: int = 400, seed: int = 0, recorded: bool = False) -> None:
        self.model, self.block_size = loaded.model, block_size
        specs = loaded.state_specs(block_size)
        self.layout: StateLayout = plan_layout(specs)
        self._rng = torch.Generator().manual_seed(seed)
        self._free = [torch.randperm(num_blocks - 1, generator=self._rng).add(1).tolist() for _ in self.layout.pools]
        storage = [
            [
                {f.name: torch.full((num_blocks, *f.shape), GARBAGE, dtype=getattr(torch, f.dtype)) for f in pool.fields}
                for _ in range(pool.num_slots)
            ]
            for pool in self.layout.pools
        ]
        self._storage = storage
        slots = self.layout.slot_of_layer()
        self._group_of_layer = [slots[layer][0] for layer in range(len(specs))]
        self.caches = [storage[slots[layer][1]][slots[layer][2]] for layer in range(len(specs))]
        self.steps: Steps = EagerSteps(self.model, "")
        if recorded:
            self.steps = StepProgram(self.model, self.caches, self._group_of_layer)

    def request(self, token_ids: Sequence[int]) -> Request:
        return Request(list(token_ids), [[] for _ in self.layout.groups])

    def step(self, work: Sequence[tuple[Request, int]]) -> None:
        """Compute the next `n` tokens of each (request, n) in one batch; logits of all of them go to the requests."""
        for request, n in work:
            self._reserve(request, request.num_computed + n)
        counts = torch.tensor([n for _, n in work], dtype=torch.int32)
        ctx = StepContext(
            positions=torch.cat([torch.arange(r.num_computed, r.num_computed + n) for r, n in work]),
            query_start_loc=torch.cat((torch.zeros(1, dtype=torch.int32), counts.cumsum(0).to(torch.int32))),
            seq_lens=torch.tensor([r.num_computed + n for r, n in work], dtype=torch.int32),
            num_reqs=len(work),
            groups=[self._group_context(g, work) for g in range(len(self.layout.groups))],
            group_of_layer=self._group_of_layer,
            caches=self.caches,
        )
        token_ids = torch.tensor([t for r, n in work for t in r.token_ids[r.num_computed : r.num_computed + n]])
        with torch.inference_mode():
            logits = self.steps.logits(self.steps.forward(token_ids, ctx), torch.arange(len(token_ids))).clone()
        assert logits.dtype == torch.float32
        for (request, n), rows in zip(work, logits.split([n for _, n in work]), strict=True):
            request.logits.append(rows)
            request.num_computed += n
            self._drop_behind_window(request)

    def run(self, token_ids: Sequence[int], chunks: Sequence[int]) -> Tensor:
        """One request alone, in these chunks (the last repeats until all is done): [T, V]."""
        request = self.request(token_ids)
        remaining = list(chunks)
        while request.num_computed < len(request.token_ids):
            n = remaining.pop(0) if len(remaining) > 1 else remaining[0]
            self.step([(request, min(n, len(request.token_ids) - request.num_computed))])
        return torch.cat(request.logits)

    def _reserve(self, request: Request, num_tokens: int) -> None:
        for group, table in zip(self.layout.groups, request.tables, strict=True):
            while len(table) * self.block_size < num_tokens:
                table.append(self._free[group.pool_id].pop())

    def _group_context(self, group_id: int, work: Sequence[tuple[Request, int]]) -> GroupContext:
        width = max(len(r.tables[group_id]) for r, _ in work) + 1
        block_table = torch.full((len(work), width), -1, dtype=torch.int32)
        slots = []
        for row, (request, n) in enumerate(work):
            table = torch.tensor(request.tables[group_id])
            block_table[row, : len(table)] = table
            positions = torch.arange(request.num_computed, request.num_computed + n)
            slots.append(table[positions // self.block_size] * self.block_size + positions % self.block_size)
        return GroupContext(block_table, torch.cat(slots))

    def _drop_behind_window(self, request: Request) -> None:
        """Replace blocks that no later token may see by the null block, and spoil what they held."""
        for group, table in zip(self.layout.groups, request.tables, strict=True):
            if group.spec.window is None:
                continue
            hidden = max(0, request.num_computed - group.spec.window + 1) // self.block_size
            for i in range(hidden):
                if table[i]:
                    for slot in range(len(group.layer_ids)):
                        for tensor in self._storage[group.pool_id][slot].values():
                            tensor[table[i]] = GARBAGE
                    table[i] = 0
