"""Damaged files: whatever is cut, flipped or overwritten, reading either works or raises `CheckpointError`, in bounded time and memory."""

from __future__ import annotations

import contextlib
import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from canter.checkpoint.model_config import read_model_config
from canter.checkpoint.resolve import resolve
from canter.checkpoint.tensors import open_tensors
from canter.core.errors import CheckpointError
from tests.checkpoint import samples

FUZZ = settings(max_examples=150, deadline=20_000, suppress_health_check=[HealthCheck.function_scoped_fixture])
EDGES = (0, 1, 2, 31, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


@st.composite
def damage(draw: st.DrawFn, whole: bytes, header: int) -> bytes:
    """Some of: bytes flipped, words overwritten with edge values, a piece cut out or doubled, the end cut off; mostly in the header."""
    content = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, min(header, len(content) - 9)) | st.integers(0, len(content) - 9))
        kind = draw(st.sampled_from(["flip", "u32", "u64", "cut", "double", "truncate"]))
        if kind == "flip":
            content[at] ^= draw(st.integers(1, 255))
        elif kind in ("u32", "u64"):
            width = 4 if kind == "u32" else 8
            content[at : at + width] = (draw(st.sampled_from(EDGES)) % 2 ** (8 * width)).to_bytes(width, "little")
        elif kind == "cut":
            del content[at : at + draw(st.integers(1, 64))]
        elif kind == "double":
            content[at:at] = content[at : at + draw(st.integers(1, 64))]
        else:
            del content[at:]
        if len(content) < 16:
            break
    return bytes(content)


def read_everything(path: Path, num_bytes: int) -> None:
    files = resolve(str(path))
    read_model_config(files, {})
    with open_tensors(files) as source:
        assert sum(source.get(name).num_elements for name in source.names()) <= 8 * num_bytes
        for tensor in source:
            if tensor.dtype.startswith(("gguf:", "float32", "float16", "bfloat16")):
                assert tensor.to_float32().nbytes <= 32 * num_bytes


@pytest.fixture(scope="module")
def whole_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    factors = np.linspace(1, 8, samples.HIDDEN // samples.HEADS // 2, dtype=np.float32)
    extra = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0, "general.alignment": 32, "split.count": 1}
    tensors = samples.llama_tensors() | {"rope_freqs.weight": factors}
    return samples.write_llama(tmp_path_factory.mktemp("fuzz") / "m.gguf", extra, tensors).read_bytes()


@FUZZ
@given(data=st.data())
def test_damaged_gguf_files(tmp_path: Path, whole_gguf: bytes, data: st.DataObject) -> None:
    content = data.draw(damage(whole_gguf, 3000))
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with contextlib.suppress(CheckpointError):
        read_everything(path, len(content))


CONFIG = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64}
WHOLE_SAFETENSORS = save({"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, np.float16), "c": np.ones((2, 2), np.int64)})


def write_safetensors(root: Path, content: bytes) -> Path:
    (root / "config.json").write_text(json.dumps(CONFIG))
    (root / "model.safetensors").write_bytes(content)
    return root


@FUZZ
@given(data=st.data())
def test_damaged_safetensors_files(tmp_path: Path, data: st.DataObject) -> None:
    content = data.draw(damage(WHOLE_SAFETENSORS, len(WHOLE_SAFETENSORS)))
    with contextlib.suppress(CheckpointError):
        read_everything(write_safetensors(tmp_path, content), len(content))


NUMBERS = st.integers(-2, 40) | st.sampled_from(EDGES) | st.floats(width=32) | st.booleans() | st.none() | st.text(max_size=3)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "I8", "BOOL", "F4", "X"]) | NUMBERS,
        "shape": st.lists(NUMBERS, max_size=10) | NUMBERS,
        "data_offsets": st.lists(NUMBERS, max_size=3) | NUMBERS,
    }
)
VALUES = st.recursive(
    NUMBERS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4), max_leaves=10
)


@FUZZ
@given(header=st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), ENTRIES | VALUES, max_size=3), size=st.integers(0, 40))
def test_safetensors_headers_of_any_content(tmp_path: Path, header: dict[str, Any], size: int) -> None:
    text = json.dumps(header).encode()
    with contextlib.suppress(CheckpointError):
        read_everything(write_safetensors(tmp_path, struct.pack("<Q", len(text)) + text + bytes(size)), len(text) + size + 8)


@FUZZ
@given(config=VALUES, known=st.dictionaries(st.sampled_from(["architectures", "max_position_embeddings", "text_config", "dtype"]), VALUES))
def test_configurations_of_any_content(tmp_path: Path, config: Any, known: dict[str, Any]) -> None:
    write_safetensors(tmp_path, WHOLE_SAFETENSORS)
    content = {**config, **known} if isinstance(config, dict) else config
    (tmp_path / "config.json").write_text(json.dumps(content))
    with contextlib.suppress(CheckpointError):
        read_model_config(resolve(str(tmp_path)), {})


@FUZZ
@given(
    key=st.sampled_from(sorted({**samples.llama_metadata(), **samples.tokenizer_metadata()})), value=NUMBERS | st.lists(st.integers(0, 9))
)
def test_gguf_keys_of_any_value(tmp_path: Path, key: str, value: Any) -> None:
    if isinstance(value, int) and not 0 <= value < 2**32:
        value = float(value)
    path = samples.write_llama(tmp_path / "m.gguf", {key: None if value == [] else value})
    with contextlib.suppress(CheckpointError):
        read_everything(path, path.stat().st_size)


@pytest.mark.parametrize("count", [2**20, 2**32 - 1, 2**62, 2**64 - 1])
@pytest.mark.parametrize("place", ["tensors", "keys", "array", "string", "dims"])
def test_huge_counts_take_no_memory(tmp_path: Path, place: str, count: int) -> None:
    key = struct.pack("<Q", 1) + b"k"
    bodies = {
        "tensors": struct.pack("<QQ", count, 0),
        "keys": struct.pack("<QQ", 0, count),
        "array": struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 8, count),
        "string": struct.pack("<QQ", 0, 1) + key + struct.pack("<IQ", 8, count),
        "dims": struct.pack("<QQ", 1, 0) + key + struct.pack("<I4QIQ", 4, count, count, count, count, 1, 0),
    }
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + bodies[place] + bytes(4096))
    tracemalloc.start()
    with pytest.raises(CheckpointError):
        read_everything(path, path.stat().st_size)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
