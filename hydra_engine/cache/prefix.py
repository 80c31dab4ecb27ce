"""Prefix caching: the hashes of cache content, and the cached blocks of a request.

Each full block of a prompt has one hash, chained, so that equal hashes mean equal KV. It covers everything before the
block (through its parent's hash) and, position by position, the token id or, inside an image span, the image's digest,
its rotary positions and the offset in it: placeholders of different pictures never collide. The cache salt is at the
start of the chain. The features of one image have one hash per image-cache block, under the same salt. Does not know
queues, budgets or which request starts.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from hydra_engine.cache.blocks import CacheManager
from hydra_engine.core.ids import BlockHash, FeatureKey, ImageDigest, RequestId
from hydra_engine.core.request import ImageItem, Request
from hydra_engine.core.state import RequestState

_HASH_BYTES = 32
# A run is a tag, a count and its content. The tag determines the width of the content, so two different blocks never
# encode to the same bytes.
_TEXT_RUN = struct.Struct("<BI")
_IMAGE_RUN = struct.Struct("<BII")  # then the digest, then the rotary positions if it has some
_ROPE = struct.Struct("<5q")
_TEXT, _IMAGE, _IMAGE_WITH_ROPE = 0, 1, 2
_TOKEN_BYTES = 8


def chain_seed(block_size: int, cache_salt: str = "") -> BlockHash:
    """The parent hash of the first block. Requests with different salts, and caches with different block sizes, share
    nothing."""
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
    """Positions [start, end) as maximal runs of text and of single images; `tokens` begin at position `first`."""

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
    """The bytes of an image run. KV of a span depends on its features and, if the model has them, on its rotary
    positions, which also determine the positions of the text behind it."""
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
    """Hashes of the image-cache blocks with one picture's features, in order."""
    for index in range(num_blocks):
        data = key + index.to_bytes(4, "little")
        yield BlockHash(blake2b(data, digest_size=_HASH_BYTES, person=b"hydra-feature").digest())


# ---- KV of requests


class PrefixCache:
    """Prefix lookup for requests, and publication of the blocks that they compute.

    The hashes of a request are computed at the first lookup, and extended as its answer fills blocks. Publication is
    postponed until it makes a difference, so that it takes no time between two steps.

    `enabled` False: nothing is found or published. `shares_features`: images with the same picture have the same key.
    """

    def __init__(self, kv: CacheManager[RequestId], *, enabled: bool, shares_features: bool) -> None:
        self._kv = kv
        self._block_size = kv.block_size
        self._enabled = enabled
        self._shares_features = shares_features
        # (request, its full blocks) in the order in which their KV was known to be finite
        self._unpublished: list[tuple[RequestState, int]] = []

    def find(self, state: RequestState) -> list[int]:
        """The cached blocks of the longest usable prefix of the request.

        At least one token is left over, since computing it gives the next token; the prefix does not end inside a
        `whole` image. Empty for a request whose prompt is scored here.
        """
        if not self._enabled or (state.scores_prompt and not state.external_kv):
            return []
        self.publish()
        usable = (state.num_tokens - 1) // self._block_size
        found = self._kv.find(self._hashes(state, usable)[:usable])
        for image in reversed(state.request.images):  # cutting one off may land in one before it
            if image.bidirectional and image.start < len(found) * self._block_size < image.end:
                del found[image.start // self._block_size :]
        return found

    def publish_later(self, filled: Sequence[tuple[RequestState, int]]) -> None:
        """Queues the full blocks that requests have computed for the next `publish`: (request, number of its blocks).

        Called only after a token was sampled behind them: a NaN spoils everything behind it, so finite logits prove
        that all KV before them is sound. Blocks of a row that fails are never found.
        """
        if self._enabled:
            self._unpublished += filled

    def publish(self) -> None:
        """Makes queued blocks findable. Called before every lookup and before blocks are freed; cheapest while a step
        runs."""
        for state, full in self._unpublished:
            if full > state.num_published:
                hashes = self._hashes(state, full)
                self._kv.set_hashes(state.request.id, state.num_published, hashes[state.num_published : full])
                state.num_published = full
        self._unpublished.clear()

    def feature_keys(self, request: Request) -> tuple[FeatureKey, ...]:
        """Keys of the features of the request's images; unique ones if features are not shared."""
        if not self._shares_features:
            return tuple(FeatureKey(b"%d.%d" % (request.id, index)) for index in range(len(request.images)))
        return tuple(feature_key(image.digest, request.cache_salt) for image in request.images)

    def _hashes(self, state: RequestState, num_blocks: int) -> list[BlockHash]:
        """Hashes of the request's first `num_blocks` full blocks or more."""
        chain = state.block_hashes
        if len(chain) < num_blocks:
            request, size = state.request, self._block_size
            tokens = state.tokens(len(chain) * size, num_blocks * size)
            extend_chain(chain, tokens, request.images, block_size=size, cache_salt=request.cache_salt)
        return chain
