from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canter.checkpoint.gguf_quants import BLOCK_LAYOUT, dequantize
from canter.core.errors import CheckpointError, UnsupportedModelError

# float16 patterns that scales are least often tried with: zeros, denormals, the largest, infinities, NaNs, negatives
ODD_HALVES = (0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFE01, 0x3C00, 0xBC00)
# where the float16 scales lie in a block
SCALE_OFFSETS = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
TYPES = list(BLOCK_LAYOUT)


def reference(data: np.ndarray, type_name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(data.reshape(1, -1), getattr(gguf.GGMLQuantizationType, type_name)).reshape(-1)


def assert_same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.dtype == np.float32
    nan = np.isnan(theirs)
    np.testing.assert_array_equal(np.isnan(ours), nan)
    np.testing.assert_array_equal(ours.view(np.uint32)[~nan], theirs.view(np.uint32)[~nan])


def test_layout_is_that_of_the_gguf_package() -> None:
    for name, layout in BLOCK_LAYOUT.items():
        assert layout == gguf.GGML_QUANT_SIZES[getattr(gguf.GGMLQuantizationType, name)]


@pytest.mark.parametrize("type_name", TYPES)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_blocks=st.integers(1, 9), odd=st.lists(st.sampled_from(ODD_HALVES), min_size=2, max_size=2))
def test_random_blocks_dequantise_bit_for_bit(type_name: str, seed: int, num_blocks: int, odd: list[int]) -> None:
    elements, nbytes = BLOCK_LAYOUT[type_name]
    blocks = np.random.default_rng(seed).integers(0, 256, (num_blocks, nbytes), dtype=np.uint8)
    for offset, half in zip(SCALE_OFFSETS.get(type_name, ()), odd, strict=False):
        blocks[num_blocks // 2, offset : offset + 2] = np.frombuffer(half.to_bytes(2, "little"), np.uint8)
    assert_same_bits(dequantize(blocks.reshape(-1), type_name, num_blocks * elements), reference(blocks, type_name))


@pytest.mark.parametrize("type_name", TYPES)
def test_many_blocks_span_chunks(type_name: str) -> None:
    elements, nbytes = BLOCK_LAYOUT[type_name]
    num_blocks = 3 * 65536 // elements + 5
    data = np.random.default_rng(1).integers(0, 256, num_blocks * nbytes, dtype=np.uint8)
    out = np.full(num_blocks * elements, np.nan, np.float32)
    values = dequantize(data, type_name, num_blocks * elements, out)
    assert values.base is out or values is out
    assert_same_bits(out, reference(data, type_name))


def test_every_code_of_q4_0() -> None:
    block = np.array([0x00, 0x3C, *range(0, 256, 17)], np.uint8)  # scale 1, byte i holds code i twice
    np.testing.assert_array_equal(dequantize(block, "Q4_0", 32), np.tile(np.arange(-8, 8), 2))


def test_data_at_odd_addresses() -> None:
    data = np.random.default_rng(2).integers(0, 256, 1 + 144 * 4, dtype=np.uint8)
    assert_same_bits(dequantize(data[1:], "Q4_K", 1024), reference(data[1:].copy(), "Q4_K"))


def test_unknown_type_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"IQ2_XXS is not supported.*Q4_K"):
        dequantize(np.zeros(66, np.uint8), "IQ2_XXS", 256)


@pytest.mark.parametrize(("size", "count"), [(17, 32), (19, 32), (18, 31), (0, 32)])
def test_sizes_that_disagree_are_refused(size: int, count: int) -> None:
    with pytest.raises(CheckpointError, match=f"{count} elements of Q4_0 take 18 bytes for every 32; found {size}"):
        dequantize(np.zeros(size, np.uint8), "Q4_0", count)
