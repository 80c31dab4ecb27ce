"""Hashes of cache content: of KV blocks, chained, and of image features.

Each full block of a sequence has one hash, chained, so that equal hashes mean equal KV. It covers everything before the
block (through its parent's hash) and, position by position, the token id or, inside an image span, the image's digest,
its rotary positions and the offset in it: placeholders of different pictures never collide. The cache salt is at the
start of the chain. The features of one image have one hash per image-cache block, under the same salt.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from hydra_engine.core.ids import BlockHash, FeatureKey, ImageDigest
from hydra_engine.core.request import ImageItem

_HASH_BYTES = 32
# A run is a tag, a count and its content. The tag determines the width of the content, so two different blocks never
# encode to the same bytes.
_TEXT_RUN = struct.Struct("<BI")
_IMAGE_RUN = struct.Struct("<BII")  # then the digest, then the rotary positions if it has some
_ROPE = struct.Struct("<5q")
_TEXT, _IMAGE, _IMAGE_WITH_ROPE = 0, 1, 2
_TOKEN_BYTES = 8


def chain_seed(block_size: int, cache_salt: str = "") -> BlockHash:
    """The parent hash of the first block of a chain. Requests with different salts, and caches with different block
    sizes, share nothing."""
    data = struct.pack("<I", block_size) + cache_salt.encode("utf-8", "surrogatepass")
    return BlockHash(blake2b(data, digest_size=_HASH_BYTES, person=b"hydra-seed").digest())


def extend_chain(
    chain: list[BlockHash],
    token_ids: Sequence[int],
    images: Sequence[ImageItem],
    *,
    block_size: int,
    cache_salt: str = "",
) -> None:
    """Appends the hashes of the next full blocks of a sequence to `chain`; a partly filled last block has none.

    `token_ids`: its tokens from position `len(chain) * block_size` on. `images`: its spans in order; a span may cross
    blocks and may reach beyond the given tokens.
    """
    assert block_size > 0, "a block has at least one token"
    first = len(chain) * block_size
    parent = chain[-1] if chain else chain_seed(block_size, cache_salt)
    tokens = struct.pack(f"<{len(token_ids)}q", *token_ids)
    text_block = _TEXT_RUN.pack(_TEXT, block_size)
    spans = [image for image in images if image.end > first]
    for start in range(first, first + len(token_ids) - block_size + 1, block_size):
        end = start + block_size
        while spans and spans[0].end <= start:
            del spans[0]
        digest = blake2b(parent, digest_size=_HASH_BYTES, person=b"hydra-block")
        if not spans or spans[0].start >= end:
            digest.update(text_block)
            digest.update(tokens[(start - first) * _TOKEN_BYTES : (end - first) * _TOKEN_BYTES])
        elif spans[0].start <= start and end <= spans[0].end:  # most blocks of a prompt with pictures
            digest.update(_image_run(spans[0], block_size, start - spans[0].start))
        else:
            for run in _runs(tokens, spans, start, end, first):
                digest.update(run)
        parent = BlockHash(digest.digest())
        chain.append(parent)


def _runs(tokens: bytes, images: Sequence[ImageItem], start: int, end: int, first: int) -> Iterator[bytes]:
    """Yields the bytes that stand for positions [start, end) in a block's hash, one item per run of text or of one
    image. `tokens`: the token ids from position `first` on, 8 bytes each."""

    def text(position: int, stop: int) -> bytes:
        ids = tokens[(position - first) * _TOKEN_BYTES : (stop - first) * _TOKEN_BYTES]
        return _TEXT_RUN.pack(_TEXT, stop - position) + ids

    position = start
    for image in images:
        if image.start >= end:
            break
        if image.start > position:
            yield text(position, image.start)
            position = image.start
        stop = min(image.end, end)
        yield _image_run(image, stop - position, position - image.start)
        position = stop
    if position < end:
        yield text(position, end)


def _image_run(image: ImageItem, count: int, offset: int) -> bytes:
    """Returns the bytes that stand for positions [offset, offset + count) of an image's span in a block's hash: the
    picture's digest and, if the model has multimodal rotary positions, those of the span, since KV depends on both."""
    rope = image.rope
    if rope is None:
        return _IMAGE_RUN.pack(_IMAGE, count, offset) + image.digest
    positions = _ROPE.pack(rope.time, rope.row, rope.column, rope.columns, rope.text_delta)
    return _IMAGE_RUN.pack(_IMAGE_WITH_ROPE, count, offset) + image.digest + positions


# ---- image features


def feature_key(digest: ImageDigest, cache_salt: str = "") -> FeatureKey:
    """Key of a picture's features. Requests with different salts share none."""
    data = digest + cache_salt.encode("utf-8", "surrogatepass")
    return FeatureKey(blake2b(data, digest_size=_HASH_BYTES, person=b"hydra-image").digest())


def feature_hashes(key: FeatureKey, num_blocks: int) -> Iterator[BlockHash]:
    """Yields the hashes of the image-cache blocks with one picture's features, in order."""
    for index in range(num_blocks):
        data = key + index.to_bytes(4, "little")
        yield BlockHash(blake2b(data, digest_size=_HASH_BYTES, person=b"hydra-feature").digest())
