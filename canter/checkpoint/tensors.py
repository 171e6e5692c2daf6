"""The tensors of a checkpoint, whatever its format: names as in Hugging Face checkpoints, bytes as they lie in the file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from canter.checkpoint.gguf_config import read_config
from canter.checkpoint.gguf_names import hf_name, hf_shape
from canter.checkpoint.gguf_quants import BLOCK_LAYOUT, Bytes, Floats, dequantize
from canter.checkpoint.gguf_reader import GGUFFile, GGUFParts
from canter.checkpoint.gguf_transforms import ROW_ORDERS, Transform, transform_for
from canter.checkpoint.resolve import CheckpointFiles
from canter.checkpoint.safetensors_reader import SafetensorsFile, read_index
from canter.core.errors import CheckpointError, UnsupportedModelError

_FLOAT_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the file holds it.

    `shape` is outermost first. `dtype` is float32, float16, bfloat16, int8 and so on, or "gguf:" and a GGUF type, F32 among them.
    `data` is a 1-D uint8 view on the memory map. `transform` is applied to the dequantised float32 values of that shape to get
    those of the Hugging Face checkpoint, None where they are the same.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    data: Bytes
    transform: Transform | None = None

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def block_type(self) -> str | None:
        """The GGUF name of how the values are stored, whatever the file's format: F32, BF16, Q4_K; None for other than floats."""
        return self.dtype.removeprefix("gguf:") if self.dtype.startswith("gguf:") else _FLOAT_TYPES.get(self.dtype)

    @property
    def row_index(self) -> npt.NDArray[np.int64] | None:
        """Which stored row each row of the tensor is; None where they lie in order."""
        return self.transform.row_index(self.shape[0]) if isinstance(self.transform, ROW_ORDERS) else None

    @property
    def has_stored_values(self) -> bool:
        """Whether the values are those of the file, though rows may lie in another order."""
        return self.transform is None or isinstance(self.transform, ROW_ORDERS)

    def to_float32(self) -> Floats:
        """The values as a fresh float32 array of `shape`, `transform` applied.

        Raises `UnsupportedModelError` for other than float types.
        """
        if self.block_type is None:
            raise UnsupportedModelError(f"Tensor {self.name!r}: expected floats, found {self.dtype}.")
        values = dequantize(self.data, self.block_type, self.num_elements).reshape(self.shape)
        return values if self.transform is None else self.transform(values)


@dataclass(frozen=True, slots=True)
class _Entry:
    tensor: StoredTensor
    release: Callable[[], None]


class TensorSource:
    """The tensors of an open checkpoint. Nothing is read before it is used, and iterating keeps one tensor in memory at a time."""

    def __init__(self, entries: dict[str, _Entry], files: Sequence[GGUFFile | SafetensorsFile], where: str) -> None:
        self._entries, self._files, self._where = entries, files, where

    def names(self) -> list[str]:
        """All names, in file order."""
        return list(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, name: str) -> StoredTensor:
        """The named tensor. Raises `CheckpointError` when the checkpoint has none of this name."""
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self._where}: tensor {name!r}: expected it, found none among {len(self._entries)}.")
        return entry.tensor

    def __iter__(self) -> Iterator[StoredTensor]:
        """All tensors in file order. The pages of one are given back when the next is asked for; its data stays readable."""
        for entry in list(self._entries.values()):
            yield entry.tensor
            entry.release()

    def release(self, name: str) -> None:
        """Give the pages of the named tensor back, as iterating does; its data stays readable."""
        self._entries[name].release()

    def close(self) -> None:
        """Give all pages back and forget the files. Memory maps go when the last `StoredTensor` does."""
        for file in self._files:
            file.release_all()
        self._entries, self._files = {}, ()

    def __enter__(self) -> TensorSource:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def open_tensors(files: CheckpointFiles) -> TensorSource:
    """Open the weights of a checkpoint and check that the files are whole; see the readers for what they refuse."""
    entries, opened = _gguf_entries(files) if files.kind == "gguf" else _safetensors_entries(files)
    return TensorSource(entries, opened, files.name)


def _safetensors_entries(files: CheckpointFiles) -> tuple[dict[str, _Entry], list[SafetensorsFile]]:
    entries: dict[str, _Entry] = {}
    homes: dict[str, str] = {}
    opened = []
    for path in files.weight_files:
        file = SafetensorsFile(path)
        opened.append(file)
        for name, info in file.tensors.items():
            if name in entries:
                raise CheckpointError(f"{path}: tensor {name!r} is also in {homes[name]}.")
            tensor = StoredTensor(name, info.shape, info.dtype, _bytes(file.data(info)))
            entries[name] = _Entry(tensor, partial(file.release, info))
            homes[name] = path.name
    _check_index(files, homes)
    return entries, opened


def _bytes(data: memoryview) -> Bytes:
    return np.frombuffer(data, np.uint8)


def _check_index(files: CheckpointFiles, homes: dict[str, str]) -> None:
    """Every tensor that an index names must be in the file that it names."""
    index = files.find("model.safetensors.index.json")
    if index is None:
        return
    for name, file in read_index(index).items():
        if homes.get(name) != file:
            raise CheckpointError(f"{index}: tensor {name!r}: expected it in {file}, found it in {homes.get(name, 'no file')}.")


def _gguf_entries(files: CheckpointFiles) -> tuple[dict[str, _Entry], list[GGUFFile]]:
    parts = GGUFParts(files.weight_files)
    config = read_config(parts)
    arch: str = parts.metadata["general.architecture"]
    entries: dict[str, _Entry] = {}
    for gguf_name, info in parts.tensors.items():
        name = hf_name(arch, gguf_name)
        if name is None:
            continue
        if info.type_name not in BLOCK_LAYOUT:
            known = ", ".join(BLOCK_LAYOUT)
            raise UnsupportedModelError(f"{parts.path}: tensor {gguf_name!r}: expected a type of {known}, found {info.type_name}.")
        transform = transform_for(arch, gguf_name, config.get("num_attention_heads", 0), config.get("num_key_value_heads", 0))
        shape, data = hf_shape(arch, gguf_name, info.shape), _bytes(parts.data(gguf_name))
        tensor = StoredTensor(name, shape, f"gguf:{info.type_name}", data, transform)
        entries[name] = _Entry(tensor, partial(parts.home(gguf_name).release, info))
    return entries, parts.files
