"""Names for cache content: one hash per full block of a prompt, chained, so that equal hashes mean equal KV.

A block's hash covers everything before it (through its parent's hash) and, position by position, the token id or,
inside an image span, the image's digest and the offset in it: placeholders of different pictures never collide. The
cache salt sits at the start of the chain. Does not know which blocks exist or who has them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import numpy as np

from hydra_engine.core.ids import BlockHash
from hydra_engine.core.media import ImageItem

_HASH_BYTES = 32
# A run is a tag, a count and its content; with fixed widths two different blocks never encode to the same bytes.
_TEXT_RUN = struct.Struct("<BI")
_IMAGE_RUN = struct.Struct("<BII")  # then the digest
_TEXT, _IMAGE = 0, 1


def chain_seed(block_size: int, cache_salt: str = "") -> BlockHash:
    """The parent of the first block. Requests with different salts, or caches with different block sizes, share
    nothing."""
    data = struct.pack("<I", block_size) + cache_salt.encode("utf-8", "surrogatepass")
    return BlockHash(blake2b(data, digest_size=_HASH_BYTES, person=b"hydra-seed").digest())


def block_hashes(
    token_ids: Sequence[int], images: Sequence[ImageItem], *, block_size: int, cache_salt: str = ""
) -> tuple[BlockHash, ...]:
    """The hashes of the full blocks of a sequence, in order; a partly filled last block has none.

    `images` are the spans in order; a span may cross blocks and may reach beyond the tokens given.
    """
    assert block_size > 0, "a block has at least one token"
    parent = chain_seed(block_size, cache_salt)
    found = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        digest = blake2b(parent, digest_size=_HASH_BYTES, person=b"hydra-block")
        for run in _runs(token_ids, images, start, start + block_size):
            digest.update(run)
        parent = BlockHash(digest.digest())
        found.append(parent)
    return tuple(found)


def _runs(token_ids: Sequence[int], images: Sequence[ImageItem], start: int, end: int) -> Iterator[bytes]:
    """Positions [start, end) as maximal runs of text and of single images."""
    position = start
    for image in images:
        if image.end <= position or image.start >= end:
            continue
        if image.start > position:
            yield _text_run(token_ids[position : image.start])
            position = image.start
        stop = min(image.end, end)
        yield _IMAGE_RUN.pack(_IMAGE, stop - position, position - image.start) + image.digest
        position = stop
    if position < end:
        yield _text_run(token_ids[position:end])


def _text_run(token_ids: Sequence[int]) -> bytes:
    return _TEXT_RUN.pack(_TEXT, len(token_ids)) + np.asarray(token_ids, dtype="<i8").tobytes()
