"""Runs a model the way the engine does: paged caches, block tables, chunks, batches. No scheduler, no runner.

Block ids are scrambled, every block starts out as garbage, and blocks that a table drops are handed to nobody and
overwritten, so that a model which reads what it must not read fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from canter.core.state_specs import SnapshotMode, StateLayout, place_snapshots, plan_layout
from canter.layers.context import GroupContext, StepContext
from canter.models.loader import LoadedModel
from canter.runner.graphs import EagerSteps, StepProgram, Steps
from canter.runner.state_inputs import StepRows, make_inputs
from canter.scheduler.cache.coordinator import CacheCoordinator, RequestCache
from canter.scheduler.cache.hashing import PrefixHasher
from canter.scheduler.cache.managers import CacheLimits

GARBAGE = 1e4
"""Finite, so that it can't hide behind a NaN check, and large, so that it shows in every logit that it reaches."""


@dataclass
class Request:
    """Tokens of one request and how many of them are computed."""

    token_ids: list[int]
    cache: RequestCache
    num_prompt_tokens: int
    num_computed: int = 0
    logits: list[Tensor] = field(default_factory=list)


class Harness:
    """Caches for one model, and steps over requests of the caller's making, eagerly or `recorded`.

    `interval`: tokens between the places where recurrent states are kept, in every step (`SnapshotMode.ALL`) or where one ends there.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        block_size: int,
        num_blocks: int = 400,
        seed: int = 0,
        recorded: bool = False,
        snapshots: SnapshotMode = SnapshotMode.ALIGN,
        interval: int = 8,
    ) -> None:
        self.model, self.block_size = loaded.model, block_size
        specs = place_snapshots(loaded.state_specs(block_size), snapshots, interval)
        self.layout: StateLayout = plan_layout(specs)
        limits = CacheLimits(max_model_len=4096, max_num_batched_tokens=4096)
        self.cache = CacheCoordinator(self.layout, [num_blocks] * len(self.layout.pools), limits)
        rng = torch.Generator().manual_seed(seed)
        self._scrambled = [torch.randperm(num_blocks, generator=rng).to(torch.int32) for _ in self.layout.pools]
        self._storage = [
            [
                {f.name: torch.full((num_blocks, *f.shape), GARBAGE, dtype=getattr(torch, f.dtype)) for f in pool.fields}
                for _ in range(pool.num_slots)
            ]
            for pool in self.layout.pools
        ]
        slots = self.layout.slot_of_layer()
        num_layers = max(slots) + 1
        self._group_of_layer = [slots[layer][0] if layer in slots else -1 for layer in range(num_layers)]
        self.caches = [self._storage[slots[layer][1]][slots[layer][2]] if layer in slots else {} for layer in range(num_layers)]
        self.inputs = make_inputs(self.layout.groups)
        self.steps: Steps = EagerSteps(self.model, "")
        if recorded:
            self.steps = StepProgram(self.model, self.caches, self._group_of_layer, self.inputs)

    def request(self, token_ids: Sequence[int], num_prompt_tokens: int | None = None) -> Request:
        num_prompt_tokens = num_prompt_tokens or len(token_ids)
        return Request(list(token_ids), self.cache.new_cache(num_prompt_tokens), num_prompt_tokens)

    def step(self, work: Sequence[tuple[Request, int]]) -> None:
        """Compute the next `n` tokens of each (request, n) in one batch; logits of all of them go to the requests."""
        for request, n in work:
            self._reserve(request, request.num_computed + n)
        counts = torch.tensor([n for _, n in work], dtype=torch.int32)
        query_start_loc = torch.cat((torch.zeros(1, dtype=torch.int32), counts.cumsum(0).to(torch.int32)))
        prompts = np.array([request.num_prompt_tokens for request, _ in work])
        rows = StepRows([r.num_computed for r, _ in work], counts.numpy(), prompts, query_start_loc)
        ctx = StepContext(
            positions=torch.cat([torch.arange(r.num_computed, r.num_computed + n) for r, n in work]),
            query_start_loc=query_start_loc,
            seq_lens=torch.tensor([r.num_computed + n for r, n in work], dtype=torch.int32),
            num_reqs=len(work),
            groups=[self._group_context(g, work, rows) for g in range(len(self.layout.groups))],
            group_of_layer=self._group_of_layer,
            caches=self.caches,
        )
        token_ids = torch.tensor([t for r, n in work for t in r.token_ids[r.num_computed : r.num_computed + n]])
        with torch.inference_mode():
            logits = self.steps.logits(self.steps.forward(token_ids, ctx), torch.arange(len(token_ids))).clone()
        assert logits.dtype == torch.float32
        for (request, n), tokens in zip(work, logits.split([n for _, n in work]), strict=True):
            request.logits.append(tokens)
            request.num_computed += n

    def publish(self, request: Request) -> None:
        """Let later requests begin with what this one has computed."""
        self.cache.publish(request.cache, self._hashes(request.token_ids), request.num_computed)

    def resume(self, token_ids: Sequence[int], max_tokens: int) -> Request:
        """A request that begins with the longest published prefix of at most so many tokens."""
        self.cache.begin_step()
        hit = self.cache.find_hit(self._hashes(token_ids), max_tokens)
        request = self.request(token_ids)
        assert self.cache.admit(request.cache, hit, hit.num_tokens, hit.num_tokens, [0] * len(self.cache.pools))
        request.num_computed = hit.num_tokens
        return request

    def evict(self) -> None:
        """Reuse every free block, and spoil what it held."""
        for pool, scrambled, slots in zip(self.cache.pools, self._scrambled, self._storage, strict=True):
            taken = pool.allocate(pool.num_free)
            pool.free(taken)
            for tensor in (tensor for slot in slots for tensor in slot.values()):
                tensor[scrambled[torch.tensor(taken)].long()] = GARBAGE

    def _hashes(self, token_ids: Sequence[int]) -> list[bytes]:
        hashes: list[bytes] = []
        PrefixHasher(self.cache.hash_block_size).extend(hashes, token_ids, None)
        return hashes

    def run(self, token_ids: Sequence[int], chunks: Sequence[int]) -> Tensor:
        """One request alone, in these chunks (the last repeats until all is done): [T, V]."""
        request = self.request(token_ids)
        remaining = list(chunks)
        while request.num_computed < len(request.token_ids):
            n = remaining.pop(0) if len(remaining) > 1 else remaining[0]
            self.step([(request, min(n, len(request.token_ids) - request.num_computed))])
        return torch.cat(request.logits)

    def _reserve(self, request: Request, num_tokens: int) -> None:
        """Slots for so many tokens; what the tables drop for it is spoiled."""
        before = [list(table.blocks) for table in request.cache.tables]
        assert self.cache.grow(request.cache, num_tokens, request.num_computed) is not None
        for group, table, blocks in zip(self.layout.groups, request.cache.tables, before, strict=True):
            pool, scrambled = self.cache.pools[group.pool_id], self._scrambled[group.pool_id]
            for old, now in zip(blocks, table.blocks, strict=False):
                if old != now and not pool.ref_counts[old] and pool.key_of(old) is None:
                    for slot in range(len(group.layer_ids)):
                        for tensor in self._storage[group.pool_id][slot].values():
                            tensor[scrambled[old]] = GARBAGE

    def _group_context(self, group_id: int, work: Sequence[tuple[Request, int]], rows: StepRows) -> GroupContext:
        group = self.layout.groups[group_id]
        size, scrambled = group.spec.block_size, self._scrambled[group.pool_id]
        tables = [request.cache.tables[group_id].blocks for request, _ in work]
        block_table = torch.full((len(work), max(map(len, tables)) + 1), -1, dtype=torch.int32)
        mappings = []
        for row, (request, n) in enumerate(work):
            table = scrambled[torch.tensor(tables[row])]
            block_table[row, : len(table)] = table
            positions = torch.arange(request.num_computed, request.num_computed + n)
            mappings.append(table[positions // size].long() * size + positions % size)
        return self.inputs[group_id].context(rows, block_table, torch.cat(mappings))
