"""GGML block formats to float32, in numpy.

Bit for bit what the `gguf` package computes: each value is the same float32 products and differences in the same order.
A block is a run of elements of a row with its own scale; the record types below are the blocks as they lie in the file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from canter.core.errors import CheckpointError, UnsupportedModelError

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Array = npt.NDArray[Any]

Words = npt.NDArray[np.uint64]

_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_IQ4_TABLE = bytes(value & 255 for value in _IQ4_VALUES).ljust(256, b"\0")
_CHUNK_ELEMENTS = 1 << 16  # the temporaries of a chunk stay in the second-level cache


def _record(*fields: tuple[str, str, int]) -> np.dtype[np.void]:
    """A block's layout from (name, element type, count); a count of 1 makes a scalar field."""
    return np.dtype([(name, code, (count,)) if count > 1 else (name, code) for name, code, count in fields])


_D, _DMIN, _M = ("d", "<f2", 1), ("dmin", "<f2", 1), ("m", "<f2", 1)
_RECORDS: dict[str, tuple[int, np.dtype[np.void]]] = {
    "Q4_0": (32, _record(_D, ("qs", "u1", 16))),
    "Q4_1": (32, _record(_D, _M, ("qs", "u1", 16))),
    "Q5_0": (32, _record(_D, ("qh", "u1", 4), ("qs", "u1", 16))),
    "Q5_1": (32, _record(_D, _M, ("qh", "u1", 4), ("qs", "u1", 16))),
    "Q8_0": (32, _record(_D, ("qs", "i1", 32))),
    "IQ4_NL": (32, _record(_D, ("qs", "u1", 16))),
    "Q2_K": (256, _record(("scales", "u1", 16), ("qs", "u1", 64), _D, _DMIN)),
    "Q3_K": (256, _record(("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), _D)),
    "Q4_K": (256, _record(_D, _DMIN, ("scales", "u1", 12), ("qs", "u1", 128))),
    "Q5_K": (256, _record(_D, _DMIN, ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128))),
    "Q6_K": (256, _record(("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), _D)),
    "IQ4_XS": (256, _record(_D, ("scales_h", "<u2", 1), ("scales_l", "u1", 4), ("qs", "u1", 128))),
}

BLOCK_LAYOUT: dict[str, tuple[int, int]] = {"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2)} | {
    name: (elements, record.itemsize) for name, (elements, record) in _RECORDS.items()
}
"""Type name -> (elements, bytes) of a block, for every type that `dequantize` takes."""


def _column(field: Array) -> Floats:
    """A block's scalar as a float32 column, [n, 1]."""
    return field.astype(np.float32)[:, None]


def _words(field: Array, *shape: int) -> Words:
    """Byte fields [n, bytes] as words of eight bytes, [n, *shape, words]: bit operations then work on eight codes at a time."""
    return np.ascontiguousarray(field).view(np.uint64).reshape(len(field), *shape, -1)


def _bytewise(value: int) -> np.uint64:
    """A word with `value` in each of its eight bytes."""
    return np.uint64(value * 0x0101010101010101)


_LOW1, _LOW2, _LOW4 = _bytewise(1), _bytewise(3), _bytewise(15)


def _nibbles(qs: Array) -> Words:
    """[n, 16] bytes to [n, 4] words of codes: the low halves, then the high halves."""
    words = _words(qs)
    return np.concatenate([words & _LOW4, words >> 4 & _LOW4], axis=1)


def _fifth_bits(qh: Array) -> Words:
    """4 bytes a block to [n, 4] words: 16 in byte j where bit j is set."""
    bits = np.unpackbits(np.ascontiguousarray(qh), axis=1, bitorder="little")
    return bits.view(np.uint64) << np.uint64(4)


def _store(codes: Words, out: Floats, offset: int = 0) -> None:
    """out = the bytes of `codes`, less `offset`."""
    small = codes.view(np.uint8).reshape(out.shape)
    small -= np.uint8(offset)  # wraps, and is read back as signed
    out[...] = small.view(np.int8)


def _q4_0(block: Array, out: Floats) -> None:
    _store(_nibbles(block["qs"]), out, 8)
    out *= _column(block["d"])


def _q4_1(block: Array, out: Floats) -> None:
    _store(_nibbles(block["qs"]), out)
    out *= _column(block["d"])
    out += _column(block["m"])


def _q5_0(block: Array, out: Floats) -> None:
    _store(_nibbles(block["qs"]) | _fifth_bits(block["qh"]), out, 16)
    out *= _column(block["d"])


def _q5_1(block: Array, out: Floats) -> None:
    _store(_nibbles(block["qs"]) | _fifth_bits(block["qh"]), out)
    out *= _column(block["d"])
    out += _column(block["m"])


def _q8_0(block: Array, out: Floats) -> None:
    out[...] = block["qs"]
    out *= _column(block["d"])


def _store_iq4(codes: Words, out: Floats) -> None:
    """out = the table's values for the bytes of `codes`."""
    values = np.frombuffer(codes.tobytes().translate(_IQ4_TABLE), np.int8)
    out[...] = values.reshape(out.shape)


def _iq4_nl(block: Array, out: Floats) -> None:
    _store_iq4(_nibbles(block["qs"]), out)
    out *= _column(block["d"])


def _scale(out: Floats, scales: Floats, minima: Floats | None = None) -> None:
    """out [n, 256] times scales [n, s] minus minima [n, s], each over a run of 256 / s elements."""
    runs = out.reshape(len(out), scales.shape[1], -1)
    runs *= scales[:, :, None]
    if minima is not None:
        runs -= minima[:, :, None]


def _crumbs(qs: Array) -> Words:
    """[n, 64] bytes of four 2-bit codes to [n, 2, 4, 4] words: of every 32 bytes first all lowest pairs of bits, then the next."""
    halves = _words(qs, 2)
    return np.stack([halves >> shift & _LOW2 for shift in (0, 2, 4, 6)], axis=2)


def _q2_k(block: Array, out: Floats) -> None:
    _store(_crumbs(block["qs"]), out)
    scales = block["scales"]
    _scale(out, _column(block["d"]) * (scales & 15).astype(np.float32), _column(block["dmin"]) * (scales >> 4).astype(np.float32))


def _q3_k_scales(packed: Array) -> Floats:
    """12 bytes to 16 scales of 6 bits, less 32: low nibbles of bytes 0 to 7, then their high ones; top bits in bytes 8 to 11."""
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    top = np.concatenate([packed[:, 8:] >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)
    scales: Floats = (low | top << 4).astype(np.float32)
    return scales - np.float32(32)


def _run_bits(packed: Array) -> Words:
    """[n, 32] bytes to [n, 8, 4] words: byte j of run s is bit s of byte j."""
    words = _words(packed)
    return np.stack([words >> run & _LOW1 for run in range(8)], axis=1)


def _q3_k(block: Array, out: Floats) -> None:
    codes = _crumbs(block["qs"]).reshape(-1, 8, 4) | _run_bits(block["hmask"]) << np.uint64(2)
    _store(codes, out, 4)
    _scale(out, _column(block["d"]) * _q3_k_scales(block["scales"]))


def _k_scales(block: Array) -> tuple[Floats, Floats]:
    """12 bytes to 8 scales and 8 minima of 6 bits, times the block's own: [n, 8] each."""
    a, b, c = (block["scales"][:, start : start + 4] for start in (0, 4, 8))
    scales = np.concatenate([a & 63, c & 15 | a >> 2 & 48], axis=1).astype(np.float32)
    minima = np.concatenate([b & 63, c >> 4 | b >> 2 & 48], axis=1).astype(np.float32)
    return _column(block["d"]) * scales, _column(block["dmin"]) * minima


def _wide_nibbles(qs: Array) -> Words:
    """[n, 128] bytes to [n, 8, 4] words of codes: of every 32 bytes the low halves, then the high halves."""
    quarters = _words(qs, 4)
    return np.stack([quarters & _LOW4, quarters >> 4 & _LOW4], axis=2).reshape(-1, 8, 4)


def _q4_k(block: Array, out: Floats) -> None:
    _store(_wide_nibbles(block["qs"]), out)
    _scale(out, *_k_scales(block))


def _q5_k(block: Array, out: Floats) -> None:
    _store(_wide_nibbles(block["qs"]) | _run_bits(block["qh"]) << np.uint64(4), out)
    _scale(out, *_k_scales(block))


def _q6_k(block: Array, out: Floats) -> None:
    low, high = _words(block["ql"], 2), _words(block["qh"], 2)
    nibbles = np.concatenate([low & _LOW4, low >> 4 & _LOW4], axis=2)  # of every 128 elements
    pairs = np.concatenate([high >> shift & _LOW2 for shift in (0, 2, 4, 6)], axis=2)
    _store(nibbles | pairs << np.uint64(4), out, 32)
    _scale(out, _column(block["d"]) * block["scales"].astype(np.float32))


def _iq4_xs(block: Array, out: Floats) -> None:
    groups = _words(block["qs"], 8)
    _store_iq4(np.concatenate([groups & _LOW4, groups >> 4 & _LOW4], axis=2), out)
    low = np.stack([block["scales_l"] & 15, block["scales_l"] >> 4], axis=2).reshape(-1, 8)
    top = block["scales_h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    _scale(out, _column(block["d"]) * ((low | top << 4).astype(np.float32) - np.float32(32)))


_DECODERS: dict[str, Callable[[Array, Floats], None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "IQ4_NL": _iq4_nl,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_XS": _iq4_xs,
}


def _plain(data: Bytes, type_name: str, out: Floats) -> None:
    if type_name == "BF16":
        np.left_shift(data.view("<u2"), 16, out=out.view(np.uint32), dtype=np.uint32)
    else:
        out[...] = data.view("<f4" if type_name == "F32" else "<f2")


def _blocks(data: Bytes, type_name: str, out: Floats) -> None:
    elements, record = _RECORDS[type_name]
    blocks, decode, values = data.view(record), _DECODERS[type_name], out.reshape(-1, elements)
    step = _CHUNK_ELEMENTS // elements
    with np.errstate(invalid="ignore", over="ignore"):  # damaged scales make infinities and NaNs; the values say so themselves
        for start in range(0, len(values), step):
            decode(blocks[start : start + step], values[start : start + step])


def dequantize(data: Bytes, type_name: str, num_elements: int, out: Floats | None = None) -> Floats:
    """The float32 values of the blocks in `data` (uint8, 1-D): `num_elements` of them, in `out` if given, else in a fresh array.

    Raises `UnsupportedModelError` for a type outside `BLOCK_LAYOUT`, `CheckpointError` where the sizes don't agree.
    """
    if type_name not in BLOCK_LAYOUT:
        raise UnsupportedModelError(f"GGUF type {type_name} is not supported; supported: {', '.join(BLOCK_LAYOUT)}.")
    elements, nbytes = BLOCK_LAYOUT[type_name]
    if num_elements % elements or data.size != num_elements // elements * nbytes:
        raise CheckpointError(
            f"{num_elements} elements of {type_name} take {nbytes} bytes for every {elements}; found {data.size} bytes in all."
        )
    out = np.empty(num_elements, np.float32) if out is None else out.reshape(-1)[:num_elements]
    convert = _plain if type_name in ("F32", "F16", "BF16") else _blocks
    convert(np.ascontiguousarray(data), type_name, out)
    return out
