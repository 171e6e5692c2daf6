"""The guide's example is code that works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from canter.core.sampling_params import SamplingParams
from canter.logits_processors.interface import AddedRow, BatchUpdate, LogitsBatch, ProcessorConfig

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "write-a-logits-processor.md"


def test_the_example() -> None:
    names: dict[str, Any] = {}
    exec(GUIDE.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0], names)
    kind = names["FavourOne"]
    processor = kind(ProcessorConfig(6, 4, 100, torch.device("cpu")))
    params = [SamplingParams(extra_args={"favour": 2}), SamplingParams(extra_args={"favour": 4, "favour_by": 1.5}), SamplingParams()]
    assert [processor.applies_to(p) for p in params] == [True, True, False]
    with pytest.raises(ValueError, match="favour"):
        kind.validate_params(SamplingParams(extra_args={"favour": "x"}))
    processor.update_state(BatchUpdate(added=[AddedRow(3, params[0], [1], 1), AddedRow(0, params[1], [1, 5], 1)]))
    tokens = [torch.tensor([1]), torch.tensor([1, 5])]
    logits = processor.apply(torch.zeros(2, 6), LogitsBatch([3, 0], tokens, [1, 1]))
    assert logits.tolist() == [[0, 0, 5, 0, 0, 0], [0, 0, 0, 0, 1.5, 0]]
    processor.update_state(BatchUpdate(removed=[3, 0]))
    assert not processor.rows
