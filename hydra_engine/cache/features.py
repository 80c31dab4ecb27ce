"""Image features by content: the users of each picture's features, and the image-cache blocks that hold them.

Two images with the same key (the same picture under the same salt) share one entry, in one prompt or in two requests,
so a picture is encoded once while any image needs it. After its last user, features stay cached until their blocks are
needed. Does not know states of requests, plans or pixels, nor which request goes first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hydra_engine.cache.blocks import CacheManager
from hydra_engine.cache.hashes import feature_hashes
from hydra_engine.core.ids import BlockHash, FeatureKey, RequestId
from hydra_engine.core.plans import BlockIds
from hydra_engine.core.state import ImageProgress

ImageUser = tuple[RequestId, int]  # (request, index of the image in its prompt)


@dataclass(slots=True, eq=False)
class _Entry:
    """The features of one picture: their number, their progress and their users."""

    num_tokens: int
    progress: ImageProgress = ImageProgress.WAITING
    users: dict[ImageUser, None] = field(default_factory=dict)  # in order of arrival


class FeatureCache:
    """The features of all images that requests need, by key.

    An entry is WAITING (no blocks), ENCODING (a plan in flight writes its blocks) or ENCODED (its blocks may be read),
    like every image that uses it. Without users an entry exists only while it is ENCODING.

    While an entry is WAITING, none of its features can be found in the cache, so it really has to be encoded. `keeps`
    False: keys are assumed to be unique, and no features are kept for reuse.
    """

    def __init__(self, blocks: CacheManager[FeatureKey], *, keeps: bool = True) -> None:
        self._blocks = blocks
        self.pool = blocks.pool  # its counts; blocks of features without users are free
        self._keeps = keeps
        self._entries: dict[FeatureKey, _Entry] = {}

    def blocks_for(self, num_tokens: int) -> int:
        """Number of image-cache blocks that `num_tokens` features need."""
        return self._blocks.blocks_for(num_tokens)

    # ---- users

    def need(self, user: ImageUser, key: FeatureKey, num_tokens: int) -> ImageProgress:
        """Adds a user of these features and returns their progress. For the first user they are ENCODED if all of them
        are still cached; that needs no other blocks and evicts nothing. If only a part is left, it is forgotten."""
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(num_tokens)
            if self._keeps and self._restore(key, num_tokens):
                entry.progress = ImageProgress.ENCODED
        assert entry.num_tokens == num_tokens, "one picture has features of two sizes"
        assert user not in entry.users, f"request {user[0]} needs its image {user[1]} twice"
        entry.users[user] = None
        return entry.progress

    def drop(self, user: ImageUser, key: FeatureKey) -> None:
        """Removes a user. After the last one the blocks are free and, with `keeps`, ENCODED features reusable; while
        they are ENCODING, `finish` does that."""
        entry = self._entries[key]
        del entry.users[user]
        self._release_unused(key, entry)

    def users(self, key: FeatureKey) -> tuple[ImageUser, ...]:
        """Returns the users of the features in the order in which they were added."""
        return tuple(self._entries[key].users)

    def progress(self, key: FeatureKey) -> ImageProgress:
        return self._entries[key].progress

    def block_ids(self, key: FeatureKey) -> BlockIds:
        """Image-cache blocks of features that are ENCODING or ENCODED: int32 [blocks]. KeyError for others."""
        return self._blocks.tables[key].block_ids

    def held_blocks(self) -> Iterator[tuple[FeatureKey, ImageProgress, int]]:
        """Yields (key, ENCODING or ENCODED, number of blocks) of all features with blocks that are being written or
        have users."""
        for key, table in self._blocks.tables.items():
            yield key, self._entries[key].progress, table.num_blocks

    # ---- life of features

    def reserve(self, key: FeatureKey) -> bool:
        """Changes WAITING to ENCODING and allocates blocks, evicting reusable features if needed; False, and no change,
        if too few are free."""
        entry = self._entries[key]
        assert entry.progress == ImageProgress.WAITING, "only what waits is encoded"
        if not self._blocks.grow(key, entry.num_tokens, capacity=entry.num_tokens):
            return False
        entry.progress = ImageProgress.ENCODING
        return True

    def finish(self, key: FeatureKey, *, failed: bool) -> None:
        """Changes ENCODING to ENCODED or, if the encode or load `failed`, frees the blocks and changes it back to
        WAITING. Without users the entry is removed; ENCODED features are then reusable with `keeps`."""
        entry = self._entries[key]
        assert entry.progress == ImageProgress.ENCODING, "an encode ends that never began"
        if failed:
            self._blocks.free(key)
            entry.progress = ImageProgress.WAITING
        else:
            entry.progress = ImageProgress.ENCODED
            if self._keeps:
                self._blocks.set_hashes(key, 0, list(self._hashes(key, entry.num_tokens)))
        self._release_unused(key, entry)

    def evict(self, key: FeatureKey) -> None:
        """Changes ENCODED to WAITING: frees the blocks and forgets the features."""
        entry = self._entries[key]
        assert entry.progress == ImageProgress.ENCODED, "only encoded features can be evicted"
        self._blocks.free(key)
        if self._keeps:
            self._blocks.forget(self._hashes(key, entry.num_tokens))
        entry.progress = ImageProgress.WAITING

    # ---- inside

    def _hashes(self, key: FeatureKey, num_tokens: int) -> Iterator[BlockHash]:
        return feature_hashes(key, self._blocks.blocks_for(num_tokens))

    def _restore(self, key: FeatureKey, num_tokens: int) -> bool:
        """Acquires the blocks of features that are still cached; False unless all are. If only a part is left, it is
        useless and is forgotten."""
        hashes = list(self._hashes(key, num_tokens))
        if len(self._blocks.find(hashes)) < len(hashes):
            self._blocks.forget(hashes)
            return False
        self._blocks.adopt(key, hashes, capacity=num_tokens)
        return True

    def _release_unused(self, key: FeatureKey, entry: _Entry) -> None:
        """Removes an entry without users, unless it is ENCODING. Its blocks become free, ENCODED features reusable with
        `keeps`."""
        if not entry.users and entry.progress != ImageProgress.ENCODING:
            del self._entries[key]
            self._blocks.free(key)
