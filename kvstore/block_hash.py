"""Names of prefix blocks: equal in every process and on every machine, and different for different bytes.

key(block i) = blake2b(key(block i - 1), token ids of block i); key(block -1) = blake2b(fingerprint, salt).
A key names the block and all before it, so one lookup tells whether a whole prefix is the same.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import NewType

import numpy as np

BlockKey = NewType("BlockKey", bytes)

KEY_BYTES = 16
"""Two different prefixes share a key with a probability of about n² / 2¹²⁹ among n of them."""


def root_key(fingerprint: bytes, salt: str) -> BlockKey:
    """The parent of first blocks: nothing computed under another fingerprint or salt has a key below it."""
    length = len(fingerprint).to_bytes(8, "little")  # so that no byte can move from one to the other
    salted = length + fingerprint + salt.encode("utf-8", "surrogatepass")
    return BlockKey(blake2b(salted, digest_size=KEY_BYTES).digest())


def extend_keys(parent: BlockKey, token_ids: Sequence[int], block_size: int) -> list[BlockKey]:
    """Keys of the complete blocks of `token_ids`, which follow the block named `parent`; ids below 2**32."""
    tokens = np.asarray(token_ids, dtype="<u4")
    keys = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        block = tokens[start : start + block_size].tobytes()
        parent = BlockKey(blake2b(parent + block, digest_size=KEY_BYTES).digest())
        keys.append(parent)
    return keys


def complete_keys(
    root: BlockKey, keys: Sequence[BlockKey], token_ids: Sequence[int], block_size: int
) -> tuple[BlockKey, ...]:
    """Of all the complete blocks of `token_ids` below `root`; `keys` are those of the first."""
    parent = keys[-1] if keys else root
    return (*keys, *extend_keys(parent, token_ids[len(keys) * block_size :], block_size))


def segment_key(key: BlockKey) -> BlockKey:
    """Names the state segment of a block. A key like any other, so that stores and directories, which know
    bytes and not what they are, hold both alike."""
    return BlockKey(blake2b(key, digest_size=KEY_BYTES, person=b"state segment").digest())
