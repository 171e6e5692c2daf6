from __future__ import annotations

import pytest
import torch

from canter.core.plan import DRAFT_ON_DEVICE, NewRow, ScheduledRow, SchedulePlan
from canter.core.sampling_params import SamplingParams
from canter.device import CpuDevice
from canter.runner.input_batch import InputBatch, build_input_batch
from canter.runner.request_table import RequestTable
from canter.runner.verify import accept_drafts

DEVICE = CpuDevice(1, asynchronous=False)
BLOCK_SIZES = [4, 8]


@pytest.fixture(autouse=True, params=["native", "reference"])
def provider(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANTER_KERNELS", request.param)


def new_table(max_rows: int = 4, max_tokens: int = 64, drafts: int = 3) -> RequestTable:
    table = RequestTable(max_rows, max_tokens, BLOCK_SIZES, drafts, DEVICE)
    table.all_token_ids.fill_(-7)  # whatever stood there before must not be read
    for block_table in table.block_tables:
        block_table.fill_(99)
    return table


def add(table: RequestTable, request_id: str, token_ids: list[int], computed: int = 0, prompt: int | None = None) -> int:
    blocks = tuple([10 * g + i + 1 for i in range(-(-(len(token_ids) + 4) // size))] for g, size in enumerate(BLOCK_SIZES))
    return table.add(NewRow(request_id, token_ids, prompt or len(token_ids), computed, blocks, SamplingParams()))


def build(table: RequestTable, *rows: ScheduledRow) -> InputBatch:
    return build_input_batch(SchedulePlan(1, list(rows)), table, BLOCK_SIZES, [True, True])


def test_mixed_rows_are_gathered() -> None:
    table = new_table()
    add(table, "a", list(range(100, 110)))
    add(table, "b", list(range(200, 206)), computed=5)
    batch = build(table, ScheduledRow("b", 1, 5), ScheduledRow("a", 4, 0))
    assert batch.token_ids.tolist() == [205, 100, 101, 102, 103]
    assert batch.positions.tolist() == [5, 0, 1, 2, 3]
    assert batch.seq_lens.tolist() == [6, 4]
    assert batch.query_start_loc.tolist() == [0, 1, 5]
    assert batch.num_logits_np.tolist() == [1, 0], "a's prompt is not finished"
    assert batch.logits_indices.tolist() == [0]
    assert batch.slot_mappings[0].tolist() == [2 * 4 + 1, 1 * 4, 1 * 4 + 1, 1 * 4 + 2, 1 * 4 + 3]
    assert batch.slot_mappings[1].tolist() == [11 * 8 + 5, 11 * 8, 11 * 8 + 1, 11 * 8 + 2, 11 * 8 + 3]


def test_decode_row_with_drafts() -> None:
    """The first of the worked examples: all positions of a decode row with three drafts have logits."""
    table = new_table()
    row = add(table, "a", list(range(10)))
    table.all_token_ids[row, 10] = 55  # the last sampled token
    table.total_len[row] = 11
    table.num_computed[row] = 10
    batch = build(table, ScheduledRow("a", 4, 10, draft_token_ids=(7, 8, 9)))
    assert batch.positions.tolist() == [10, 11, 12, 13]
    assert batch.seq_lens.tolist() == [14]
    assert batch.token_ids.tolist() == [55, 7, 8, 9]
    assert batch.logits_indices.tolist() == [0, 1, 2, 3]
    assert batch.local_pos_np.tolist() == [0, 1, 2, 3]


def test_new_request_padded_with_device_drafts_keeps_its_prompt() -> None:
    """The second: the first logit stands at the prompt's last token, which is not overwritten."""
    table = new_table()
    row = add(table, "a", list(range(30, 40)), computed=9)
    table.draft_tokens[row] = torch.tensor([3, 4, 5])
    batch = build(table, ScheduledRow("a", 4, 9, draft_token_ids=(DRAFT_ON_DEVICE,) * 3))
    assert batch.token_ids.tolist() == [39, 3, 4, 5]
    assert batch.positions.tolist() == [9, 10, 11, 12]
    assert batch.num_logits_np.tolist() == [4]


def test_chunk_of_a_prompt_samples_nothing() -> None:
    """The third: four of ten prompt tokens."""
    table = new_table()
    add(table, "a", list(range(10)))
    batch = build(table, ScheduledRow("a", 4, 0))
    assert batch.num_logits_np.tolist() == [0]
    accept_drafts(table, batch, torch.empty(0, dtype=torch.int64), DEVICE)
    assert table.num_computed[table.row_of["a"]] == 4
    assert table.total_len[table.row_of["a"]] == 10


def test_accepted_drafts_advance_the_table() -> None:
    table = new_table()
    a, b = add(table, "a", list(range(10))), add(table, "b", list(range(20, 26)), computed=2)
    for row, token in ((a, 55),):
        table.all_token_ids[row, 10] = token
        table.total_len[row] = 11
        table.num_computed[row] = 10
    batch = build(table, ScheduledRow("a", 4, 10, draft_token_ids=(7, 8, 9)), ScheduledRow("b", 4, 2))
    accepted = accept_drafts(table, batch, torch.tensor([7, 8, 77, 66, 44]), DEVICE)  # a: two drafts right, then 77; b: 44
    assert accepted.num_sampled.tolist() == [3, 1]
    assert table.all_token_ids[a, 10:14].tolist() == [55, 7, 8, 77]
    assert (table.total_len[a], table.num_computed[a]) == (14, 13), "one draft was rejected"
    assert (table.total_len[b], table.num_computed[b]) == (7, 6)
    assert table.all_token_ids[b, 6] == 44
    following = build(table, ScheduledRow("a", 1, 13), ScheduledRow("b", 1, 6))
    assert following.token_ids.tolist() == [77, 44]
    assert following.positions.tolist() == [13, 6]


def test_rejecting_all_drafts_leaves_one_token() -> None:
    table = new_table()
    row = add(table, "a", list(range(5)), computed=4)
    batch = build(table, ScheduledRow("a", 3, 4, draft_token_ids=(7, 8)))
    accepted = accept_drafts(table, batch, torch.tensor([1, 8, 9]), DEVICE)  # the second would match, but stands on a wrong first
    assert accepted.num_sampled.tolist() == [1]
    assert (int(table.total_len[row]), int(table.num_computed[row])) == (6, 5)


def test_rows_are_reused_and_blocks_appended() -> None:
    table = new_table(max_rows=1)
    first = add(table, "a", list(range(10)))
    assert table.remove("a") == first
    assert table.remove("a") is None
    second = add(table, "b", [1, 2])
    assert second == first
    plan = SchedulePlan(1, [ScheduledRow("b", 1, 2, new_block_ids=([50, 51], []))])
    table.append_blocks(plan)
    before = int(table.num_blocks_np[0, second]) - 2
    assert table.block_tables[0][second, before : before + 2].tolist() == [50, 51]
    assert table.block_tables[0][second, before + 2 :].unique().tolist() == [0], "beyond a row's blocks stands the null block"
