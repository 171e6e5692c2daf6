"""GGUF decoding equals the gguf package bit for bit, for any bytes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from canter.checkpoint import gguf_quants
from canter.core.errors import CheckpointError
from canter.kernels import dequant
from canter.kernels.native.dequant import QUANT_TYPES

TYPES = sorted(QUANT_TYPES)
pytestmark = pytest.mark.usefixtures("isa")


def random_blocks(type_name: str, num_blocks: int, seed: int = 0) -> tuple[np.ndarray, int]:
    """Random bytes: every pattern of scales, infinities and NaN included."""
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    data = np.random.default_rng(seed).integers(0, 256, num_blocks * size, dtype=np.uint8)
    return data, num_blocks * elements


def oracle(data: np.ndarray, type_name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[type_name]).reshape(-1)


def assert_same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(found[~nan].view(np.uint32), expected[~nan].view(np.uint32))


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("num_blocks", (0, 1, 2, 700, 5003))
def test_float32_bits(type_name: str, num_blocks: int) -> None:
    data, count = random_blocks(type_name, num_blocks, num_blocks)
    out = torch.empty(count)
    dequant.dequantize(data, type_name, count, out)
    if num_blocks:
        assert_same_bits(out.numpy(), oracle(data, type_name))


@pytest.mark.parametrize("type_name", TYPES)
def test_bfloat16_is_float32_rounded(type_name: str) -> None:
    data, count = random_blocks(type_name, 1001)
    out = torch.empty(count, dtype=torch.bfloat16)
    dequant.dequantize(data, type_name, count, out)
    assert_same_bits(out.float().numpy(), torch.from_numpy(oracle(data, type_name).copy()).bfloat16().float().numpy())


@pytest.mark.parametrize("type_name", TYPES)
def test_unaligned_data(type_name: str) -> None:
    data, count = random_blocks(type_name, 33)
    shifted = np.concatenate([np.zeros(1, np.uint8), data])[1:]
    out = torch.empty(count)
    dequant.dequantize(shifted, type_name, count, out)
    assert_same_bits(out.numpy(), oracle(data, type_name))


def test_all_halves() -> None:
    data = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    out = torch.empty(1 << 16)
    dequant.dequantize(data, "F16", 1 << 16, out)
    assert_same_bits(out.numpy(), oracle(data, "F16"))


def test_other_outputs_take_the_reference() -> None:
    data = np.zeros(4 * 34, np.uint8)
    data[:2] = np.array([0.5], np.float16).view(np.uint8)
    data[2:34] = np.arange(32, dtype=np.uint8)
    out = torch.empty(128, dtype=torch.float16)
    dequant.dequantize(data, "Q8_0", 128, out)
    np.testing.assert_array_equal(out.float().numpy(), gguf_quants.dequantize(data, "Q8_0", 128))
    strided = torch.zeros(8, 32)[::2]
    dequant.dequantize(data, "Q8_0", 128, strided)
    assert strided[0].tolist() == [0.5 * i for i in range(32)]


@pytest.mark.parametrize("num_bytes,count", ((33, 32), (35, 32), (34, 64), (34, 31)))
def test_wrong_lengths_are_refused(num_bytes: int, count: int) -> None:
    with pytest.raises(CheckpointError, match="Q8_0"):
        dequant.dequantize(np.zeros(num_bytes, np.uint8), "Q8_0", count, torch.empty(count))


def test_out_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="not supported"):
        dequant.dequantize(np.zeros(34, np.uint8), "Q8_0", 32, torch.empty(31))
