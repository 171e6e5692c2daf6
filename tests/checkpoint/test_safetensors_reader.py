from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save, save_file

from canter.checkpoint.safetensors_reader import SafetensorsFile, read_index
from canter.core.errors import CheckpointError, UnsupportedModelError


def pack(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def open_bytes(tmp_path: Path, content: bytes) -> SafetensorsFile:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    return SafetensorsFile(path)


def test_reads_what_the_safetensors_package_writes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {f"t.{dtype}": rng.integers(0, 2, (3, 5)).astype(dtype) for dtype in ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u1", "?")}
    tensors |= {"scalar": np.array(2.5, np.float32), "empty": np.zeros((0, 4), np.float32)}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    file = SafetensorsFile(path)
    assert set(file.tensors) == set(tensors)
    for name, values in tensors.items():
        info = file.tensors[name]
        assert (info.shape, info.dtype) == (values.shape, values.dtype.name)
        assert file.data(info).tobytes() == values.tobytes()
    offsets = [info.offset for info in file.tensors.values()]
    assert offsets == sorted(offsets)


def test_types_without_a_numpy_name(tmp_path: Path) -> None:
    codes = {"BF16": ("bfloat16", 2), "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1)}
    for code, (name, width) in codes.items():
        file = open_bytes(tmp_path, pack({"t": entry(code, [3], [0, 3 * width])}, bytes(3 * width)))
        assert file.tensors["t"].dtype == name


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"1234567", "header length: expected 8 bytes, found 7"),
        (struct.pack("<Q", 1 << 63) + b"{}", "header length: expected at most 100000000 bytes within a file of 10"),
        (pack(b"[]"), "header: expected a JSON object, found list"),
        (pack(b"{nonsense"), "header: expected JSON"),
        (pack(b"\xff\xff\xff"), "header: expected JSON"),
        (pack(b'{"a":' + b"[" * 100_000), "header: the JSON is nested too deeply"),
        (pack(b'{"a":{},"a":{}}'), "header: expected JSON: name 'a' occurs twice"),
        (pack({"a": 5}), "tensor 'a': expected dtype, shape and data_offsets, found 5"),
        (pack({"a": {"dtype": "F32"}}), "tensor 'a': expected dtype, shape and data_offsets"),
        (pack({"a": entry(shape="2")}, bytes(8)), "tensor 'a': expected a shape"),
        (pack({"a": entry(shape=[2.0])}, bytes(8)), "tensor 'a': expected a shape"),
        (pack({"a": entry(shape=[-2])}, bytes(8)), "tensor 'a': expected a shape"),
        (pack({"a": entry(shape=[True, 2])}, bytes(8)), "tensor 'a': expected a shape"),
        (pack({"a": entry(shape=[1] * 9)}, bytes(8)), "tensor 'a': expected a shape of at most 8 sizes"),
        (pack({"a": entry(shape=[10**4000])}, bytes(8)), "tensor 'a': expected a shape"),
        (pack({"a": entry(offsets=[8, 0])}, bytes(8)), "tensor 'a': expected data_offsets"),
        (pack({"a": entry(offsets=[0])}, bytes(8)), "tensor 'a': expected data_offsets"),
        (pack({"a": entry(shape=[3])}, bytes(8)), r"tensor 'a': expected 12 bytes for F32 \[3\], found 8"),
        (pack({"a": entry()}, bytes(7)), "tensor 'a': expected its bytes to end at .*: it is truncated"),
        (pack({"a": entry(), "b": entry()}, bytes(8)), "tensor 'b': expected its bytes to start at .*: an overlap"),
        (pack({"a": entry(offsets=[4, 12])}, bytes(12)), "tensor 'a': expected its bytes to start at .*: a gap"),
        (pack({"a": entry()}, bytes(9)), "size: expected .* bytes, where the last tensor ends, found"),
    ],
)
def test_damage_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_bytes(tmp_path, content)


@pytest.mark.parametrize("dtype", ["F4", "f32", 7, ["F32"]])
def test_unknown_types_are_refused(tmp_path: Path, dtype: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="tensor 'a': expected a dtype of F64, F32"):
        open_bytes(tmp_path, pack({"a": entry(dtype)}, bytes(8)))


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = save({"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, np.int8)})
    for size in range(len(whole)):
        with pytest.raises(CheckpointError):
            open_bytes(tmp_path, whole[:size])


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "key 'weight_map': expected an object"),
        ({"weight_map": {}}, "key 'weight_map': expected an object"),
        ({"weight_map": {"a": "../b.safetensors"}}, "tensor 'a': expected a .safetensors file in the same directory"),
        ({"weight_map": {"a": "/etc/b.safetensors"}}, "tensor 'a': expected a .safetensors file in the same directory"),
        ({"weight_map": {"a": "b.bin"}}, "tensor 'a': expected a .safetensors file"),
        ({"weight_map": {"a": 3}}, "tensor 'a': expected a .safetensors file"),
    ],
)
def test_an_index_that_makes_no_sense(tmp_path: Path, index: Any, message: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        read_index(path)
