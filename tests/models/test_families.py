"""Every family against transformers: one pass, chunks, single tokens, mixed batches, block sizes, half precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from canter.core.state_specs import SnapshotMode
from tests.models.families import FAMILIES, NUM_TOKENS, Family, oracle_logits, rounded_oracle_logits, save_oracle, token_ids
from tests.models.harness import Harness
from tests.models.loading import load

TOLERANCE = 1e-4
PROVIDERS = ["reference", "native"]


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.fixture(scope="module")
def directory(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_oracle(family, tmp_path_factory.mktemp(family.name))


@pytest.fixture(params=PROVIDERS)
def provider(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("CANTER_KERNELS", request.param)
    return request.param


@pytest.mark.parametrize("block_size", [4, 16])
def test_any_chunking_gives_the_logits_of_transformers(family: Family, directory: Path, provider: str, block_size: int) -> None:
    loaded = load(directory, max_model_len=family.max_model_len)
    expected = oracle_logits(family)[0]
    for chunks in ([NUM_TOKENS], [5, 1, 7, 2, 3], [1]):
        logits = Harness(loaded, block_size).run(token_ids()[0].tolist(), chunks)
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("block_size", [4, 16])
def test_requests_in_a_mixed_batch_do_not_disturb_each_other(family: Family, directory: Path, provider: str, block_size: int) -> None:
    harness = Harness(load(directory, max_model_len=family.max_model_len), block_size)
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


def test_bfloat16_stays_close(family: Family, directory: Path, provider: str) -> None:
    loaded = load(directory, "bfloat16", family.max_model_len)
    logits = Harness(loaded, 16).run(token_ids()[0].tolist(), [9, 1, 1, 12])
    similarity = torch.nn.functional.cosine_similarity(logits.flatten(), rounded_oracle_logits(family).flatten(), dim=0)
    assert similarity > family.bfloat16_similarity


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_the_same_bits_alone_and_in_company(
    family: Family, directory: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANTER_KERNELS", "native")
    loaded = load(directory, dtype, family.max_model_len)
    ids = token_ids().tolist()
    alone = Harness(loaded, 4, seed=1).run(ids[0], [1])
    harness = Harness(loaded, 4, seed=2)
    a, b = harness.request(ids[0]), harness.request(ids[1])
    for n, m in ((1, 4), (6, 1), (2, 9), (14, 1)):
        harness.step([(b, m), (a, n)])
    assert torch.equal(torch.cat(a.logits), alone)


@pytest.mark.parametrize("snapshots", [SnapshotMode.ALIGN, SnapshotMode.ALL])
def test_requests_go_on_from_a_cached_prefix_at_each_boundary(
    family: Family, directory: Path, provider: str, snapshots: SnapshotMode
) -> None:
    """And begin anew once it is evicted. Aligned states are kept where steps end: here on each boundary."""
    harness = Harness(load(directory, max_model_len=family.max_model_len), 4, snapshots=snapshots, interval=4)
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
