"""Which blocks hold a prefix: key to block ids. Equal blocks are kept side by side, so that block tables only grow."""

from __future__ import annotations

from collections.abc import Iterator


class PrefixIndex:
    """Maps a key (chain hash and group) to the blocks that hold it; several when requests computed the same at once."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int | dict[int, None]] = {}

    def __len__(self) -> int:
        """Number of distinct keys."""
        return len(self._blocks)

    def get(self, key: bytes) -> int | None:
        """The oldest block of this key, or None."""
        found = self._blocks.get(key)
        return next(iter(found)) if isinstance(found, dict) else found

    def add(self, key: bytes, block_id: int) -> None:
        found = self._blocks.get(key)
        if found is None:
            self._blocks[key] = block_id
        elif isinstance(found, dict):
            found[block_id] = None
        else:
            self._blocks[key] = {found: None, block_id: None}

    def remove(self, key: bytes, block_id: int) -> None:
        """Remove exactly this block. Raises `KeyError` when the key does not name it."""
        found = self._blocks[key]
        if isinstance(found, dict):
            del found[block_id]
            if len(found) == 1:
                self._blocks[key] = next(iter(found))
        elif found == block_id:
            del self._blocks[key]
        else:
            raise KeyError(block_id)

    def clear(self) -> None:
        self._blocks.clear()

    def items(self) -> Iterator[tuple[bytes, int]]:
        """Every (key, block id) pair."""
        for key, found in self._blocks.items():
            for block_id in (found,) if isinstance(found, int) else found:
                yield key, block_id
