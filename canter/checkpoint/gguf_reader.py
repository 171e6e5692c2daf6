"""The GGUF container, versions 2 and 3, little-endian: metadata and where each tensor lies.

Layout: magic, version, number of tensors, number of keys; the keys; the tensor infos; padding to `general.alignment`; the data.
Source: the format's specification in the ggml repository (docs/gguf.md).
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canter.checkpoint.mapped_file import MappedFile
from canter.core.errors import CheckpointError, UnsupportedModelError

# id -> (name, elements of a block, bytes of a block)
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}

# value type -> its letter in struct
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_STRUCTS = {kind: struct.Struct(f"<{letter}") for kind, letter in _SCALARS.items()}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_MAX_NAME_BYTES = 65535
_MAX_DIMENSIONS = 4
_MIN_KEY_BYTES = 8 + 4 + 1
_MIN_INFO_BYTES = 8 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class GGUFTensorInfo:
    """One tensor of a file: `shape` outermost first, `offset` in bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    nbytes: int

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class _LazyArray:
    """An array of the metadata that has been stepped over, not decoded: vocabularies hold hundreds of thousands of strings.

    Once it has been decoded, the file's pages under it are given back.
    """

    file: MappedFile
    key: str
    kind: int
    start: int
    end: int
    count: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return self._strings() if self.kind == _STRING else iter(self.decode())

    def __contains__(self, value: object) -> bool:
        return any(found == value for found in self)

    def decode(self) -> list[Any]:
        if self.kind == _STRING:
            return list(self._strings())
        values = list(struct.unpack_from(f"<{self.count}{_SCALARS[self.kind]}", self.file.buffer, self.start))
        self._release()
        return values

    def _strings(self) -> Iterator[str]:
        position, buffer, unpack = self.start, self.file.buffer, _U64.unpack_from
        for index in range(self.count):
            (length,) = unpack(buffer, position)
            position += 8 + length
            try:
                yield buffer[position - length : position].decode()
            except UnicodeDecodeError as error:
                raise CheckpointError(f"{self.file.path}: key {self.key!r}: element {index} is not UTF-8: {error.reason}.") from None
        self._release()

    def _release(self) -> None:
        self.file.release(self.start, self.end - self.start)

    def find(self, texts: Iterable[str]) -> dict[str, int]:
        """Where the given strings are, without decoding the rest."""
        if self.kind != _STRING:
            return {}
        needles = {text: _U64.pack(len(text.encode())) + text.encode() for text in texts}
        places = {self.file.buffer.find(needle, self.start, self.end): text for text, needle in needles.items()}
        places.pop(-1, None)
        return {places[position]: index for index, position in enumerate(self._positions(max(places, default=-1))) if position in places}

    def _positions(self, last: int) -> Iterator[int]:
        """Where each string's length lies, up to `last`."""
        position, unpack = self.start, _U64.unpack_from
        for _ in range(self.count):
            if position > last:
                return
            yield position
            position += 8 + unpack(self.file.buffer, position)[0]


class Metadata(Mapping[str, Any]):
    """The keys of a GGUF file: Python numbers, booleans, strings and lists. Lists are decoded when they are asked for, anew each
    time: a vocabulary that stays beside what is made of it would be tens of megabytes."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        return value.decode() if isinstance(value, _LazyArray) else value

    def walk(self, key: str) -> Any:
        """As `get`, but a list is a collection whose strings are decoded one by one, each time that it is walked."""
        return self._values.get(key)

    def find_strings(self, key: str, texts: Iterable[str]) -> dict[str, int]:
        """The index of each of `texts` in the list of strings at `key`; those that are not in it are left out."""
        value = self._values.get(key)
        return value.find(texts) if isinstance(value, _LazyArray) else {}

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class _Cursor:
    """Reads a GGUF header front to back; whatever does not fit in the file raises `CheckpointError` naming `what`."""

    def __init__(self, file: MappedFile) -> None:
        self.file, self.buffer, self.size, self.path, self.position = file, file.buffer, file.size, file.path, 0

    def fail(self, what: str, expected: str, found: object) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}: expected {expected}, found {found}.")

    def skip(self, nbytes: int, what: str) -> int:
        """Step over `nbytes`; returns where they start."""
        start, left = self.position, self.size - self.position
        if nbytes > left:
            raise self.fail(what, f"{nbytes} bytes at offset {start}", f"the end of the file after {left}: it is truncated or damaged")
        self.position += nbytes
        return start

    def number(self, layout: struct.Struct, what: str) -> Any:
        return layout.unpack_from(self.buffer, self.skip(layout.size, what))[0]

    def u32(self, what: str) -> int:
        return int(self.number(_U32, what))

    def u64(self, what: str) -> int:
        return int(self.number(_U64, what))

    def string(self, what: str, limit: int | None = None) -> str:
        length = self.u64(what)
        if limit is not None and length > limit:
            raise self.fail(what, f"at most {limit} bytes", length)
        start = self.skip(length, what)
        try:
            return self.buffer[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise self.fail(what, "UTF-8", error.reason) from None

    def skip_strings(self, count: int, what: str) -> int:
        """Step over `count` strings; returns where they start."""
        start = position = self.position
        unpack, last = _U64.unpack_from, self.size - 8
        for _ in range(count):
            if position > last:
                break
            position += 8 + unpack(self.buffer, position)[0]
        else:
            self.skip(position - start, what)
            return start
        raise self.fail(what, f"{count} strings", f"the end of the file at {self.size}: it is truncated or damaged")

    def count(self, smallest: int, what: str) -> int:
        """A number of things that take at least `smallest` bytes each: refused when they can't fit in the file."""
        count = self.u64(what)
        if count > (self.size - self.position) // smallest:
            raise self.fail(what, f"a count that fits in the {self.size - self.position} bytes left", count)
        return count


def _read_array(cursor: _Cursor, key: str) -> _LazyArray:
    what = f"key {key!r}"
    kind = cursor.u32(what)
    if kind == _STRING:
        count = cursor.count(8, what)
        start = cursor.skip_strings(count, what)
    elif kind in _SCALARS:
        width = _STRUCTS[kind].size
        count = cursor.count(width, what)
        start = cursor.skip(count * width, what)
    else:
        raise cursor.fail(what, "an array of numbers, booleans or strings", f"element type {kind}")
    return _LazyArray(cursor.file, key, kind, start, cursor.position, count)


def _read_value(cursor: _Cursor, key: str) -> Any:
    what = f"key {key!r}"
    kind = cursor.u32(what)
    if kind == _STRING:
        return cursor.string(what)
    if kind == _ARRAY:
        return _read_array(cursor, key)
    if kind not in _STRUCTS:
        raise cursor.fail(what, "a value type of 0 to 12", kind)
    return cursor.number(_STRUCTS[kind], what)


def _read_metadata(cursor: _Cursor, num_keys: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for index in range(num_keys):
        key = cursor.string(f"name of key {index}", _MAX_NAME_BYTES)
        if key in values:
            raise cursor.fail(f"key {key!r}", "one value", "a second one")
        values[key] = _read_value(cursor, key)
    return values


def _read_info(cursor: _Cursor, index: int) -> GGUFTensorInfo:
    """One tensor info; its `offset` is still relative to the start of the data."""
    name = cursor.string(f"name of tensor {index}", _MAX_NAME_BYTES)
    what = f"tensor {name!r}"
    num_dims = cursor.u32(what)
    if not 1 <= num_dims <= _MAX_DIMENSIONS:
        raise cursor.fail(what, f"1 to {_MAX_DIMENSIONS} dimensions", num_dims)
    dims = [cursor.u64(what) for _ in range(num_dims)]
    kind, offset = cursor.u32(what), cursor.u64(what)
    if kind not in GGML_TYPES:
        raise UnsupportedModelError(f"{cursor.path}: {what}: element type {kind} is not one that Canter knows.")
    type_name, block, block_bytes = GGML_TYPES[kind]
    if 0 in dims or dims[0] % block:
        raise cursor.fail(what, f"sizes of at least 1, rows a multiple of {block} as {type_name} needs", dims[::-1])
    info = GGUFTensorInfo(name, tuple(reversed(dims)), type_name, offset, 0)
    return GGUFTensorInfo(name, info.shape, type_name, offset, info.num_elements // block * block_bytes)


class GGUFFile:
    """An open GGUF file: `metadata`, `tensors` by GGUF name in file order, and `data(info)` for a tensor's raw blocks.

    Everything is checked on opening: counts, names, types, alignment, and that each tensor lies within the file and on no other.
    Raises `CheckpointError` naming the key or tensor, what was expected and what was found.
    """

    def __init__(self, path: Path | str) -> None:
        self._file = MappedFile(Path(path))
        self.path = self._file.path
        cursor = _Cursor(self._file)
        self.version = _read_version(cursor)
        num_tensors = cursor.count(_MIN_INFO_BYTES, "number of tensors")
        num_keys = cursor.count(_MIN_KEY_BYTES, "number of keys")
        values = _read_metadata(cursor, num_keys)
        self.metadata = Metadata(values)
        self.alignment = _alignment(cursor, values.get("general.alignment", 32))
        infos = [_read_info(cursor, index) for index in range(num_tensors)]
        self.tensors = self._place(cursor, infos)

    def _place(self, cursor: _Cursor, infos: list[GGUFTensorInfo]) -> dict[str, GGUFTensorInfo]:
        data_start = -(-cursor.position // self.alignment) * self.alignment
        tensors: dict[str, GGUFTensorInfo] = {}
        for info in infos:
            what, end = f"tensor {info.name!r}", data_start + info.offset + info.nbytes
            if info.name in tensors:
                raise cursor.fail(what, "one tensor of this name", "a second one")
            if info.offset % self.alignment:
                raise cursor.fail(what, f"an offset that is a multiple of {self.alignment}", info.offset)
            if end > self._file.size:
                raise cursor.fail(what, f"its {info.nbytes} bytes to end at {end}", f"a file of {self._file.size} bytes: it is truncated")
            tensors[info.name] = GGUFTensorInfo(info.name, info.shape, info.type_name, data_start + info.offset, info.nbytes)
        _check_disjoint(cursor, tensors)
        return tensors

    def data(self, info: GGUFTensorInfo) -> memoryview:
        """The raw blocks of a tensor: a view on the memory map."""
        return self._file.slice(info.offset, info.nbytes)

    def release(self, info: GGUFTensorInfo) -> None:
        """The pages of a tensor are not needed for now (`MappedFile.release`)."""
        self._file.release(info.offset, info.nbytes)

    def release_all(self) -> None:
        """No page is needed for now, those of the metadata neither."""
        self._file.release_all()


def _read_version(cursor: _Cursor) -> int:
    magic = cursor.buffer[cursor.skip(4, "magic") : 4]
    if magic != b"GGUF":
        raise cursor.fail("magic", "b'GGUF'", repr(magic))
    version = cursor.u32("version")
    if version not in (2, 3):
        found = f"{version} (a big-endian file?)" if version & 0xFFFF == 0 else version
        raise UnsupportedModelError(f"{cursor.path}: version: expected 2 or 3, found {found}.")
    return version


def _alignment(cursor: _Cursor, value: Any) -> int:
    if type(value) is not int or value < 1 or value & (value - 1) or value > 1 << 30:
        raise cursor.fail("key 'general.alignment'", "a power of two", repr(value))
    return value


def _check_disjoint(cursor: _Cursor, tensors: dict[str, GGUFTensorInfo]) -> None:
    ordered = sorted(tensors.values(), key=lambda info: info.offset)
    for before, after in itertools.pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            end = before.offset + before.nbytes
            raise cursor.fail(f"tensor {after.name!r}", f"an offset of at least {end}, where {before.name!r} ends", after.offset)


class GGUFParts:
    """A GGUF model in one file or split over several: the first part's metadata, the tensors of all."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.files = [GGUFFile(path) for path in paths]
        self.path, self.metadata = self.files[0].path, self.files[0].metadata
        declared = self.metadata.get("split.count", 1) or 1
        if declared != len(paths):
            raise CheckpointError(f"{self.path}: key 'split.count': the model has {declared} parts, found {len(paths)}.")
        self.tensors: dict[str, GGUFTensorInfo] = {}
        self._home: dict[str, GGUFFile] = {}
        for file in self.files:
            self._add(file)

    def _add(self, file: GGUFFile) -> None:
        for name, info in file.tensors.items():
            if name in self.tensors:
                raise CheckpointError(f"{file.path}: tensor {name!r} is also in {self._home[name].path}.")
            self.tensors[name], self._home[name] = info, file

    def data(self, name: str) -> memoryview:
        """The raw blocks of the named tensor."""
        return self._home[name].data(self.tensors[name])

    def home(self, name: str) -> GGUFFile:
        """The part that holds the named tensor."""
        return self._home[name]
