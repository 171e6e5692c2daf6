"""Random numbers as a pure function of (seed, position, stream, token): no state, so neither batch nor history matters.

A row's key is 64 bits, made from its seed and the position by the splitmix64 finaliser (Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", 2014). A token's bits come from a 32-bit multiply-xorshift hash of the
token's salt with both halves of the key injected; the multipliers are those of lowbias32 (C. Wellons, "Prospecting for
hash functions", 2018). All of it is integer arithmetic that wraps, hence equal on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
MASK_64 = (1 << 64) - 1

HASH_1 = 0x7FEB352D
HASH_2 = 0x846CA68B
HASH_3 = 0x9E3779B1

UNIFORM_SCALE = (1.0 - 2.0**-24) * 2.0**-31
"""Takes [0.5, 2^31] to (0, 1): the largest product is 1 - 2^-24, the greatest float32 below 1."""


def signed(value: int, bits: int) -> int:
    """The two's complement reading of the low `bits` bits."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def mix64(value: int) -> int:
    """The splitmix64 finaliser: a bijection of [0, 2^64) in which each input bit flips half of the output bits."""
    value &= MASK_64
    value = ((value ^ (value >> 30)) * MIX_1) & MASK_64
    value = ((value ^ (value >> 27)) * MIX_2) & MASK_64
    return value ^ (value >> 31)


def stream_offset(stream: int) -> int:
    """What tells the draws of one stream from those of another, below 2^64."""
    return (stream * MIX_1 + GOLDEN) & MASK_64


def _shift_right(x: Tensor, amount: int, bits: int) -> Tensor:
    """Logical shift; torch's own on signed integers copies the sign."""
    return torch.bitwise_right_shift(x, amount).bitwise_and_((1 << (bits - amount)) - 1)


def position_keys(seed_keys: Tensor, positions: Tensor, stream: int = 0) -> Tensor:
    """Keys of rows: seed_keys [L] int64 (`seed_key`), positions [L] int64 -> [L, 2] int32."""
    offset = signed(stream_offset(stream), 64)
    x = positions.mul(signed(GOLDEN, 64)).add_(seed_keys).add_(offset)
    x.bitwise_xor_(_shift_right(x, 30, 64)).mul_(signed(MIX_1, 64))
    x.bitwise_xor_(_shift_right(x, 27, 64)).mul_(signed(MIX_2, 64))
    x.bitwise_xor_(_shift_right(x, 31, 64))
    return x.view(torch.int32).view(-1, 2)


def token_salts(vocab_size: int, device: torch.device) -> Tensor:
    """A well mixed number for each token id: [vocab_size] int32. Constant; build it once."""
    x = torch.arange(vocab_size, dtype=torch.int32, device=device).add_(1)
    x.bitwise_xor_(_shift_right(x, 16, 32)).mul_(HASH_1)
    x.bitwise_xor_(_shift_right(x, 15, 32)).mul_(signed(HASH_2, 32))
    return x.bitwise_xor_(_shift_right(x, 16, 32))


def random_bits(keys: Tensor, salts: Tensor) -> Tensor:
    """31 random bits for each (row, token): keys [L, 2] int32, salts [W] or [L, W] int32 -> [L, W] int32, at least 0."""
    x = torch.bitwise_xor(salts, keys[:, :1]).add_(keys[:, 1:]).mul_(HASH_1)
    x.bitwise_xor_(_shift_right(x, 15, 32)).mul_(signed(HASH_2, 32))
    x.bitwise_xor_(_shift_right(x, 16, 32)).mul_(signed(HASH_3, 32))
    # The sign-copying shift clears the sign bit and leaves the others uniform.
    return x.bitwise_xor_(torch.bitwise_right_shift(x, 15))


def uniform(keys: Tensor, salts: Tensor) -> Tensor:
    """Uniform numbers in (0, 1), float32, with all the digits that float32 has near 0. Shapes as `random_bits`."""
    return random_bits(keys, salts).to(torch.float32).add_(0.5).mul_(UNIFORM_SCALE)


def negative_gumbel(keys: Tensor, salts: Tensor) -> Tensor:
    """Minus standard Gumbel noise: log(-log1p(-u)). Shapes as `random_bits`.

    Large noise comes from small u, where float32 resolves best; with log(u) it would come from u near 1 and be cut off
    at 16.6. Here the largest noise is 22.2.
    """
    x = random_bits(keys, salts).to(torch.float32).add_(0.5).mul_(-UNIFORM_SCALE)
    return x.log1p_().neg_().log_()


def gumbel(keys: Tensor, salts: Tensor) -> Tensor:
    """Standard Gumbel noise, float32. Shapes as `random_bits`."""
    return negative_gumbel(keys, salts).neg_()
