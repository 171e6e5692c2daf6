from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from canter.checkpoint.gguf_reader import GGML_TYPES, GGUFFile, GGUFParts
from canter.core.errors import CheckpointError, UnsupportedModelError
from tests.checkpoint import samples


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(num_tensors: int = 0, num_keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)


def info(name: str = "a", dims: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def open_bytes(tmp_path: Path, content: bytes) -> GGUFFile:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return GGUFFile(path)


def test_types_are_those_of_the_gguf_package() -> None:
    for number, (name, elements, nbytes) in GGML_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (name, (elements, nbytes))


def test_reads_what_the_gguf_package_writes(tmp_path: Path) -> None:
    tensors = samples.llama_tensors()
    file = GGUFFile(samples.write_llama(tmp_path / "m.gguf", {"some.flag": True, "some.numbers": [1.5, -2.0], "some.bools": [True, False]}))
    assert file.version == 3
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["llama.block_count"] == samples.LAYERS
    assert file.metadata["tokenizer.ggml.tokens"] == samples.TOKENS
    assert file.metadata["some.flag"] is True
    assert file.metadata["some.numbers"] == [1.5, -2.0]
    assert file.metadata["some.bools"] == [True, False]
    assert "nothing" not in file.metadata and file.metadata.get("nothing", 7) == 7
    assert list(file.tensors) == list(tensors)
    for name, values in tensors.items():
        assert file.tensors[name].shape == values.shape
    plain = file.tensors["blk.0.attn_q.weight"]
    np.testing.assert_array_equal(np.frombuffer(file.data(plain), "<f4").reshape(plain.shape), tensors["blk.0.attn_q.weight"])
    packed = file.tensors["blk.0.attn_v.weight"]
    assert (packed.type_name, packed.nbytes) == ("Q8_0", packed.num_elements // 32 * 34)


def test_every_scalar_type(tmp_path: Path) -> None:
    values = [(0, "B", 200), (1, "b", -3), (2, "H", 60000), (3, "h", -300), (4, "I", 1 << 31), (5, "i", -5), (6, "f", 0.5), (7, "?", True)]
    values += [(10, "Q", 1 << 63), (11, "q", -(1 << 62)), (12, "d", 0.1)]
    keys = b"".join(text(f"k{kind}") + struct.pack("<I" + code, kind, value) for kind, code, value in values)
    arrays = b"".join(text(f"a{kind}") + struct.pack(f"<IIQ2{code}", 9, kind, 2, value, value) for kind, code, value in values)
    metadata = open_bytes(tmp_path, header(num_keys=2 * len(values)) + keys + arrays).metadata
    for kind, _, value in values:
        assert metadata[f"k{kind}"] == value
        assert metadata[f"a{kind}"] == [value, value]


def test_finds_strings_without_decoding(tmp_path: Path) -> None:
    metadata = GGUFFile(samples.write_llama(tmp_path / "m.gguf")).metadata
    wanted = ["<|im_end|>", "t0", "t1", "absent", "t"]
    found = {"<|im_end|>": samples.VOCAB - 2, "t0": 0, "t1": 1}
    assert metadata.find_strings("tokenizer.ggml.tokens", wanted) == found
    assert metadata["tokenizer.ggml.tokens"] == samples.TOKENS
    assert metadata.find_strings("tokenizer.ggml.tokens", wanted) == found
    assert metadata.find_strings("tokenizer.ggml.token_type", wanted) == {}
    assert metadata.find_strings("absent", wanted) == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"GG", "magic: expected 4 bytes at offset 0, found the end of the file after 2"),
        (b"GGML" + bytes(20), "magic: expected b'GGUF', found b'GGML'"),
        (header(num_tensors=1 << 60), "number of tensors: expected a count that fits"),
        (header(num_keys=1 << 60), "number of keys: expected a count that fits"),
        (header(num_keys=1) + text("k") + struct.pack("<I", 13) + bytes(8), "key 'k': expected a value type of 0 to 12, found 13"),
        (header(num_keys=1) + text("k") + struct.pack("<IIQ", 9, 9, 1), "key 'k': expected an array of numbers, booleans or strings"),
        (header(num_keys=1) + text("k") + struct.pack("<IIQ", 9, 8, 1 << 61), "key 'k': expected a count that fits"),
        (header(num_keys=1) + text("k") + struct.pack("<IIQQ", 9, 8, 1, 1 << 63), "key 'k': expected 9223372036854775816 bytes"),
        (header(num_keys=1) + text("k") + struct.pack("<IIQQQ", 9, 8, 2, 8, 0), "key 'k': expected 2 strings, found the end of the file"),
        (header(num_keys=1) + text("k") + struct.pack("<IQ", 8, 3) + b"ab", "key 'k': expected 3 bytes"),
        (header(num_keys=1) + text("k") + struct.pack("<IQ", 8, 2) + b"\xff\xfe", "key 'k': expected UTF-8"),
        (header(num_keys=2) + 2 * (text("k") + struct.pack("<IB", 0, 1)), "key 'k': expected one value, found a second one"),
        (header(num_keys=1) + struct.pack("<Q", 65536) + bytes(70000), "name of key 0: expected at most 65535 bytes, found 65536"),
        (
            header(num_keys=1) + text("general.alignment") + struct.pack("<II", 4, 24),
            "'general.alignment': expected a power of two, found 24",
        ),
        (header(1) + info(dims=()) + bytes(64), "tensor 'a': expected 1 to 4 dimensions, found 0"),
        (header(1) + info(dims=(1, 1, 1, 1, 1)) + bytes(64), "tensor 'a': expected 1 to 4 dimensions, found 5"),
        (header(1) + info(dims=(0,)) + bytes(64), r"tensor 'a': expected sizes of at least 1.*found \[0\]"),
        (header(1) + info(dims=(33, 2), kind=2) + bytes(64), r"tensor 'a': .*multiple of 32 as Q4_0 needs, found \[2, 33\]"),
        (header(1) + info(offset=8) + bytes(64), "tensor 'a': expected an offset that is a multiple of 32, found 8"),
        (header(1) + info(dims=(64,)) + bytes(64), "tensor 'a': expected its 256 bytes to end at"),
        (header(1) + info(dims=(1 << 63, 1 << 63)) + bytes(64), "it is truncated"),
        (header(2) + 2 * info() + bytes(64), "tensor 'a': expected one tensor of this name, found a second one"),
        (header(2) + info(dims=(16,)) + info("b", (16,), 0, 32) + bytes(200), "tensor 'b': expected an offset of at least"),
    ],
)
def test_damage_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_bytes(tmp_path, content)


@pytest.mark.parametrize(("version", "shown"), [(1, "1"), (4, "4"), (3 << 24, "big-endian")])
def test_other_versions_are_refused(tmp_path: Path, version: int, shown: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"version: expected 2 or 3, found .*{shown}"):
        open_bytes(tmp_path, header(version=version))


def test_unknown_tensor_types_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="tensor 'a': element type 99"):
        open_bytes(tmp_path, header(1) + info(kind=99) + bytes(64))


def test_strings_that_are_not_utf8_are_named_when_read(tmp_path: Path) -> None:
    content = header(num_keys=1) + text("k") + struct.pack("<IIQ", 9, 8, 2) + text("a") + struct.pack("<Q", 1) + b"\xff"
    metadata = open_bytes(tmp_path, content).metadata
    with pytest.raises(CheckpointError, match="key 'k': element 1 is not UTF-8"):
        metadata["k"]


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="can't read the file: No such file"):
        GGUFFile(tmp_path / "absent.gguf")


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = samples.write_llama(tmp_path / "whole.gguf")
    whole, end = path.read_bytes(), max(info.offset + info.nbytes for info in GGUFFile(path).tensors.values())
    for size in [*range(0, 2000, 7), *range(2000, end, 997), end - 1]:
        with pytest.raises(CheckpointError):
            open_bytes(tmp_path, whole[:size])
    open_bytes(tmp_path, whole[:end])


def test_parts_must_be_complete_and_disjoint(tmp_path: Path) -> None:
    tensors = samples.llama_tensors()
    names = list(tensors)
    first = samples.write_gguf(tmp_path / "a.gguf", "llama", {"split.count": 2}, {name: tensors[name] for name in names[:5]})
    second = samples.write_gguf(tmp_path / "b.gguf", "llama", {"split.count": 2}, {name: tensors[name] for name in names[5:]})
    parts = GGUFParts([first, second])
    assert list(parts.tensors) == names
    np.testing.assert_array_equal(np.frombuffer(parts.data(names[-1]), "<f4").reshape(tensors[names[-1]].shape), tensors[names[-1]])
    with pytest.raises(CheckpointError, match=r"split.count.*2 parts, found 1"):
        GGUFParts([first])
    with pytest.raises(CheckpointError, match=f"tensor '{names[0]}' is also in"):
        GGUFParts([first, first])
