"""The safetensors container: an 8-byte length, a JSON header, and the tensors' bytes, which the header covers without gap or overlap."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canter.checkpoint.json_files import parse_json_object, read_json_object
from canter.checkpoint.mapped_file import MappedFile
from canter.core.errors import CheckpointError, UnsupportedModelError

# name in the header -> (our name, bytes of an element)
DTYPES: dict[str, tuple[str, int]] = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_DIMENSIONS = 8
_MAX_SIZE = 1 << 48


@dataclass(frozen=True, slots=True)
class SafetensorsInfo:
    """One tensor of a file; `offset` is in bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


class SafetensorsFile:
    """An open safetensors file: `tensors` by name in file order, and `data(info)` for a tensor's bytes.

    Everything is checked on opening: the header's length and form, types, shapes against byte ranges, gaps and overlaps, and that
    the file ends where the last tensor does. Raises `CheckpointError` naming the tensor, what was expected and what was found.
    """

    def __init__(self, path: Path | str) -> None:
        self._file = MappedFile(Path(path))
        self.path = self._file.path
        header, data_start = self._read_header()
        header.pop("__metadata__", None)
        infos = [self._parse(name, entry, data_start) for name, entry in header.items()]
        infos.sort(key=lambda info: (info.offset, info.nbytes))
        self._check_cover(infos, data_start)
        self.tensors = {info.name: info for info in infos}

    def _fail(self, what: str, expected: str, found: object) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}: expected {expected}, found {str(found)[:200]}.")

    def _read_header(self) -> tuple[dict[str, Any], int]:
        size = self._file.size
        if size < 8:
            raise self._fail("header length", "8 bytes", f"{size}: the file is truncated")
        (length,) = struct.unpack_from("<Q", self._file.buffer)
        if length > min(size - 8, _MAX_HEADER_BYTES):
            limit = f"at most {_MAX_HEADER_BYTES} bytes within a file of {size}"
            raise self._fail("header length", limit, f"{length}: the file is truncated or no safetensors file")
        return parse_json_object(self._file.buffer[8 : 8 + length], f"{self.path}: header"), 8 + length

    def _parse(self, name: str, entry: Any, data_start: int) -> SafetensorsInfo:
        what = f"tensor {name!r}"
        if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
            raise self._fail(what, "dtype, shape and data_offsets", entry)
        code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(code, str) or code not in DTYPES:
            raise UnsupportedModelError(f"{self.path}: {what}: expected a dtype of {', '.join(DTYPES)}, found {str(code)[:80]!r}.")
        if not _is_counts(shape) or len(shape) > _MAX_DIMENSIONS:
            raise self._fail(what, f"a shape of at most {_MAX_DIMENSIONS} sizes", shape)
        if not _is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise self._fail(what, "data_offsets of a start and an end", offsets)
        dtype, width = DTYPES[code]
        nbytes = width
        for length in shape:
            nbytes *= length
        if nbytes != offsets[1] - offsets[0]:
            raise self._fail(what, f"{nbytes} bytes for {code} {shape}", f"{offsets[1] - offsets[0]}")
        if data_start + offsets[1] > self._file.size:
            end = data_start + offsets[1]
            raise self._fail(what, f"its bytes to end at {end}", f"a file of {self._file.size} bytes: it is truncated")
        return SafetensorsInfo(name, tuple(shape), dtype, data_start + offsets[0], nbytes)

    def _check_cover(self, infos: list[SafetensorsInfo], data_start: int) -> None:
        end = data_start
        for info in infos:
            if info.offset != end:
                trouble = "an overlap" if info.offset < end else "a gap"
                raise self._fail(f"tensor {info.name!r}", f"its bytes to start at {end}", f"{info.offset}: {trouble}")
            end += info.nbytes
        if end != self._file.size:
            raise self._fail("size", f"{end} bytes, where the last tensor ends", self._file.size)

    def data(self, info: SafetensorsInfo) -> memoryview:
        """The bytes of a tensor: a view on the memory map."""
        return self._file.slice(info.offset, info.nbytes)

    def release(self, info: SafetensorsInfo) -> None:
        """The pages of a tensor are not needed for now (`MappedFile.release`)."""
        self._file.release(info.offset, info.nbytes)

    def release_all(self) -> None:
        """No page is needed for now."""
        self._file.release_all()


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(entry) is int and 0 <= entry < _MAX_SIZE for entry in value)


def read_index(path: Path) -> dict[str, str]:
    """The `weight_map` of a model.safetensors.index.json: tensor name -> file name in the same directory."""
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: key 'weight_map': expected an object of tensor and file names, found {str(weight_map)[:80]}.")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file:
            raise CheckpointError(f"{path}: tensor {name!r}: expected a .safetensors file in the same directory, found {str(file)[:80]!r}.")
    return weight_map
