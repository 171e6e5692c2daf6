"""The hash chain that names cached prefixes.

A block's hash covers its tokens, its extras and its parent's hash, hence the whole prefix. The chain is the same in
every process and on every machine, so that hashes may be compared across engines.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import sha256

import msgspec

_CHAIN_VERSION = b"canter prefix chain 1"
_encode_extras = msgspec.msgpack.Encoder().encode

Extras = tuple[object, ...]
"""What tells equal tokens apart, of strings, integers and tuples. Order: adapter name, media items, cache salt."""


def block_extras(block_index: int, cache_salt: str | None) -> Extras:
    """The extras of one block. The salt stands in the first block only: the chain carries it on."""
    return (cache_salt,) if block_index == 0 and cache_salt is not None else ()


def chain_root(block_size: int) -> bytes:
    """The parent of every first block; differs by block size, so that chains of different sizes never meet."""
    return sha256(_CHAIN_VERSION + struct.pack("<q", block_size)).digest()


def hash_block(parent: bytes, token_ids: Sequence[int], extras: Extras = ()) -> bytes:
    """SHA-256 of parent, tokens (little-endian 64-bit) and extras (msgpack); the token count is fixed by the chain."""
    data = parent + struct.pack(f"<{len(token_ids)}q", *token_ids)
    if extras:
        data += _encode_extras(extras)
    return sha256(data).digest()


class PrefixHasher:
    """Extends a request's chain by the blocks that have filled up since the last call.

    `block_size`: tokens of a chain block, a divisor of every group's block size.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._root = chain_root(block_size)

    def extend(self, hashes: list[bytes], token_ids: Sequence[int], cache_salt: str | None) -> None:
        """Append to `hashes` the hash of each full block of `token_ids` that it lacks."""
        size = self.block_size
        for index in range(len(hashes), len(token_ids) // size):
            parent = hashes[-1] if hashes else self._root
            tokens = token_ids[index * size : (index + 1) * size]
            hashes.append(hash_block(parent, tokens, block_extras(index, cache_salt)))
