from __future__ import annotations

import json

import pytest

from canter.cli.main import main
from canter.kernels.ops import OPS


def test_every_op_is_listed_with_its_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in OPS) and "Native code:" in out


def test_a_type_that_native_code_lacks_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--dtype", "float16", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    (row,) = [row for row in data["ops"] if row["op"] == "linear" and row["dtype"] == "float16"]
    assert row["provider"] == "reference" and "float16" in row["reason"]
    assert data["isa"] in data["isas"]
