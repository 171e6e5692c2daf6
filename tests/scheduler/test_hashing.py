from __future__ import annotations

import subprocess
import sys

from canter.scheduler.cache.hashing import PrefixHasher, block_extras, chain_root, hash_block

TOKENS = list(range(8))


def chain(tokens: list[int], salt: str | None = None, block_size: int = 4) -> list[bytes]:
    hashes: list[bytes] = []
    PrefixHasher(block_size).extend(hashes, tokens, salt)
    return hashes


def test_salt_stands_in_the_first_block_and_the_chain_carries_it() -> None:
    assert block_extras(0, "s") == ("s",) and block_extras(1, "s") == () and block_extras(0, None) == ()
    plain, salted = chain(TOKENS), chain(TOKENS, "s")
    assert len(plain) == len(salted) == 2
    assert plain[0] != salted[0] and plain[1] != salted[1]
    assert salted[0] == hash_block(chain_root(4), TOKENS[:4], ("s",))
    assert salted[1] == hash_block(salted[0], TOKENS[4:])


def test_extras_with_relative_media_offsets_tell_shifted_items_apart() -> None:
    root = chain_root(4)
    at_two = [(("X", 2),), (("X", -2),)]
    at_three = [(("X", 3),), (("X", -1),)]
    hashes = []
    for extras in (at_two, at_three):
        first = hash_block(root, TOKENS[:4], extras[0])
        hashes += [first, hash_block(first, TOKENS[4:], extras[1])]
    assert len(set(hashes)) == 4
    assert hash_block(root, TOKENS[:4], ("L", ("X", 2))) != hash_block(root, TOKENS[:4], (("X", 2), "L"))


def test_grows_by_full_blocks_only() -> None:
    hasher, hashes = PrefixHasher(4), list[bytes]()
    hasher.extend(hashes, TOKENS[:3], None)
    assert hashes == []
    hasher.extend(hashes, TOKENS[:7], None)
    assert len(hashes) == 1
    hasher.extend(hashes, TOKENS, None)
    assert hashes == chain(TOKENS)


def test_a_block_names_its_whole_prefix() -> None:
    assert chain([9, *TOKENS[1:]])[1] != chain(TOKENS)[1]
    assert chain(TOKENS, block_size=8)[0] not in chain(TOKENS)
    assert chain(TOKENS, "")[0] != chain(TOKENS)[0]


def test_equal_in_every_process() -> None:
    code = "from tests.scheduler.test_hashing import *; print(chain(TOKENS, 's')[1].hex())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"})
    assert run.stdout.strip() == chain(TOKENS, "s")[1].hex()
    assert chain(TOKENS)[1].hex() == "94a59451b2568cb439ead9ef4209daee8eb39d7b00e19344da70232d05860729"
