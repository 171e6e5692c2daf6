"""Every family against transformers: one pass, chunks, single tokens, mixed batches, block sizes, half precision."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from canter.core.state_specs import SnapshotMode
from canter.models.loader import LoadedModel
from tests.models.families import (
    FAMILIES,
    HYBRIDS,
    NUM_TOKENS,
    Family,
    bfloat16_oracle_logits,
    oracle_logits,
    save_oracle,
    token_ids,
)
from tests.models.harness import Harness
from tests.models.loading import load

TOLERANCE = 1e-4
ROUNDING = 1e-3
"""What the cosine between logits in bfloat16 and exact ones of the same weights may lack of 1."""
Models = Callable[[str, str], LoadedModel]
"""Provider, type -> a family's model."""


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.fixture(scope="module")
def models(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Each is loaded once."""
    directory = save_oracle(family, tmp_path_factory.mktemp(family.name))

    @cache
    def loaded(provider: str, dtype: str) -> LoadedModel:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CANTER_KERNELS", provider)
            return load(directory, dtype, family.max_model_len)

    return loaded


# The reference has no code of its own for a size of blocks: each of these tests gives it another one.
@pytest.mark.parametrize(("provider", "block_size"), [("reference", 4), ("native", 4), ("native", 16)])
def test_any_chunking_gives_the_logits_of_transformers(family: Family, models: Models, provider: str, block_size: int) -> None:
    expected = oracle_logits(family)[0]
    # Of the others, the mixed batches below take steps of single tokens.
    for chunks in ([NUM_TOKENS], [5, 1, 7, 2, 3], *([[1]] if (provider, block_size) == ("native", 4) else ())):
        logits = Harness(models(provider, "float32"), block_size).run(token_ids()[0].tolist(), chunks)
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("provider", "block_size"), [("reference", 16), ("native", 16)])
def test_requests_in_a_mixed_batch_do_not_disturb_each_other(family: Family, models: Models, provider: str, block_size: int) -> None:
    harness = Harness(models(provider, "float32"), block_size)
    ids = token_ids().tolist()
    a, b, c = (harness.request(ids[i][:length]) for i, length in enumerate((NUM_TOKENS, 9, 14)))
    harness.step([(b, 3), (a, 11)])
    harness.step([(a, 1), (b, 1), (c, 13)])
    harness.step([(c, 1), (b, 5), (a, 6)])
    while a.num_computed < NUM_TOKENS:
        harness.step([(a, 1)])
    for i, request in enumerate((a, b, c)):
        torch.testing.assert_close(torch.cat(request.logits), oracle_logits(family)[i, : request.num_computed], atol=TOLERANCE, rtol=0)
    assert (a.num_computed, b.num_computed, c.num_computed) == (NUM_TOKENS, 9, 14)


@pytest.mark.parametrize("provider", ["reference", "native"])
def test_bfloat16_rounds_no_more_than_it_must(family: Family, models: Models, provider: str) -> None:
    """Where states carry each rounding on, even transformers may miss the bound; then it is the bound, with room for a rounding that
    falls another way."""
    exact, loaded = oracle_logits(family), models(provider, "bfloat16")
    harness = Harness(loaded, 16)
    requests = [harness.request(ids) for ids in token_ids().tolist()]
    for n in (9, 1, 1, 12):
        harness.step([(request, n) for request in requests])
    lost = _lost(torch.stack([torch.cat(request.logits) for request in requests]), exact)
    assert lost < ROUNDING or lost < 1.25 * _lost(bfloat16_oracle_logits(family), exact)


def _lost(logits: Tensor, exact: Tensor) -> float:
    """1 less the cosine."""
    return 1.0 - float(torch.nn.functional.cosine_similarity(logits.double().flatten(), exact.double().flatten(), dim=0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_the_same_bits_alone_and_in_company(family: Family, models: Models, dtype: str) -> None:
    loaded = models("native", dtype)
    ids = token_ids().tolist()
    alone = Harness(loaded, 4, seed=1).run(ids[0], [1])
    harness = Harness(loaded, 4, seed=2)
    a, b = harness.request(ids[0]), harness.request(ids[1])
    for n, m in ((1, 4), (6, 1), (2, 9), (14, 1)):
        harness.step([(b, m), (a, n)])
    assert torch.equal(torch.cat(a.logits), alone)


def test_requests_go_on_from_a_cached_prefix_at_each_boundary(family: Family, models: Models) -> None:
    """And begin anew once it is evicted. Aligned states are kept where steps end: here on each boundary. To attention such a step is one
    of the chunks above, whoever computes it; states are kept by the operations themselves, so there the reference must do it, too."""
    ways = [("native", SnapshotMode.ALIGN)]
    if family in HYBRIDS:
        ways += [("native", SnapshotMode.ALL), ("reference", SnapshotMode.ALIGN), ("reference", SnapshotMode.ALL)]
    for provider, snapshots in ways:
        _go_on(family, Harness(models(provider, "float32"), 4, snapshots=snapshots, interval=4), snapshots)


def _go_on(family: Family, harness: Harness, snapshots: SnapshotMode) -> None:
    ids, expected = token_ids()[0].tolist(), oracle_logits(family)[0]
    first = harness.request(ids)
    for n in [4] * 5 if snapshots is SnapshotMode.ALIGN else [3, 14, 3]:
        harness.step([(first, n)])
        harness.publish(first)
    harness.cache.free(first.cache)
    for boundary in range(4, 21, 4):
        request = harness.resume(ids, boundary)
        assert request.num_computed == boundary
        harness.step([(request, 2)])
        harness.step([(request, NUM_TOKENS - boundary - 2)])
        torch.testing.assert_close(torch.cat(request.logits), expected[boundary:], atol=TOLERANCE, rtol=0)
        harness.cache.free(request.cache)
    harness.evict()
    request = harness.resume(ids, 20)
    assert request.num_computed == 0
    harness.step([(request, NUM_TOKENS)])
    torch.testing.assert_close(torch.cat(request.logits), expected, atol=TOLERANCE, rtol=0)
