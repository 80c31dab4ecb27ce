"""Image features by content: which pictures have features, who needs them, and which image-cache blocks hold them.

Two images with the same key (the same picture under the same salt) share one entry, be they of two requests or two
places of one prompt, so a picture is encoded once while any of them needs it. After its last user the features stay
where they are until their blocks are needed for something else. Does not know requests' states, plans or pixels, nor
which request goes first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hydra_engine.cache.manager import CacheManager
from hydra_engine.cache.prefix import feature_hashes
from hydra_engine.core.ids import BlockHash, FeatureKey, RequestId
from hydra_engine.core.plans import BlockIds
from hydra_engine.core.state import ImageProgress

ImageUser = tuple[RequestId, int]  # (request, index of the image in its prompt)


@dataclass(slots=True, eq=False)
class _Entry:
    num_tokens: int
    progress: ImageProgress = ImageProgress.WAITING
    users: dict[ImageUser, None] = field(default_factory=dict)  # in the order in which they came


class FeatureCache:
    """An entry WAITS (no blocks), is ENCODING (a vision plan in flight writes its blocks) or is ENCODED (its blocks may
    be read), and so is every image that uses it. Without users an entry exists only while it is ENCODING.

    While an entry WAITS nothing of it can be found in the cache, so an image that waits really has to be encoded.
    `keeps` False: keys are taken for unique, nothing is found later.
    """

    def __init__(self, blocks: CacheManager[FeatureKey], *, keeps: bool = True) -> None:
        self._blocks = blocks
        self._keeps = keeps
        self._entries: dict[FeatureKey, _Entry] = {}

    @property
    def num_blocks(self) -> int:
        return self._blocks.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that could be had, those with features that no image needs now included."""
        return self._blocks.num_free

    @property
    def num_held(self) -> int:
        return self._blocks.num_held

    @property
    def num_users(self) -> int:
        return sum(len(entry.users) for entry in self._entries.values())

    def blocks_for(self, num_tokens: int) -> int:
        return self._blocks.blocks_for(num_tokens)

    # ---- users

    def need(self, user: ImageUser, key: FeatureKey, num_tokens: int) -> ImageProgress:
        """One more user of these features; says how far they are. The first user finds them ENCODED if they are still
        in the cache, which takes blocks out of the free ones, never from other images."""
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
        """The user needs the features no longer. Those of the last one become reusable room."""
        entry = self._entries[key]
        del entry.users[user]
        self._release_unused(key, entry)

    def users(self, key: FeatureKey) -> tuple[ImageUser, ...]:
        """The oldest first."""
        return tuple(self._entries[key].users)

    def progress(self, key: FeatureKey) -> ImageProgress:
        return self._entries[key].progress

    def block_ids(self, key: FeatureKey) -> BlockIds:
        """int32 [blocks] of features that are ENCODING or ENCODED."""
        return self._blocks.tables[key].block_ids

    def held(self) -> Iterator[tuple[FeatureKey, ImageProgress, int]]:
        """(key, ENCODING or ENCODED, blocks) of everything that holds blocks."""
        for key, table in self._blocks.tables.items():
            yield key, self._entries[key].progress, table.num_blocks

    # ---- features come and go

    def reserve(self, key: FeatureKey) -> bool:
        """WAITING to ENCODING, with blocks to write to; False and no change if there are not enough."""
        entry = self._entries[key]
        assert entry.progress == ImageProgress.WAITING, "only what waits is encoded"
        if not self._blocks.grow(key, entry.num_tokens, capacity=entry.num_tokens):
            return False
        entry.progress = ImageProgress.ENCODING
        return True

    def finish(self, key: FeatureKey, *, failed: bool) -> None:
        """ENCODING to ENCODED, or back to WAITING with nothing kept: images that shared a failed encode lose time only.
        Features whose users have all gone meanwhile become reusable room at once."""
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
        """ENCODED to WAITING: the blocks are needed elsewhere, and the features are lost."""
        entry = self._entries[key]
        assert entry.progress == ImageProgress.ENCODED, "only encoded features can be evicted"
        self._blocks.free(key)
        if self._keeps:
            self._blocks.forget(self._hashes(key, entry.num_tokens))
        entry.progress = ImageProgress.WAITING

    def forget_unused(self) -> None:
        """Features that no image needs now are not found again."""
        self._blocks.forget_unheld()

    # ---- inside

    def _hashes(self, key: FeatureKey, num_tokens: int) -> Iterator[BlockHash]:
        return feature_hashes(key, self._blocks.blocks_for(num_tokens))

    def _restore(self, key: FeatureKey, num_tokens: int) -> bool:
        """Takes hold of features that the cache still has. A remainder of them is of no use and is forgotten."""
        hashes = list(self._hashes(key, num_tokens))
        if len(self._blocks.find(hashes)) < len(hashes):
            self._blocks.forget(hashes)
            return False
        self._blocks.adopt(key, hashes, capacity=num_tokens)
        return True

    def _release_unused(self, key: FeatureKey, entry: _Entry) -> None:
        if not entry.users and entry.progress != ImageProgress.ENCODING:
            del self._entries[key]
            self._blocks.free(key)

    def check(self) -> None:
        """Raises AssertionError unless entries and blocks agree."""
        self._blocks.check()
        holding = {key for key, entry in self._entries.items() if entry.progress != ImageProgress.WAITING}
        assert holding == self._blocks.tables.keys(), "entries and blocks disagree"
        for key, entry in self._entries.items():
            assert entry.users or entry.progress == ImageProgress.ENCODING, "features are held for no image"
            found = self._blocks.find(self._hashes(key, entry.num_tokens))
            if self._keeps and entry.progress == ImageProgress.ENCODED:
                assert found == self._blocks.tables[key].blocks(), "encoded features cannot be found"
            else:
                assert not found, "features can be found that are not there"
        blocks = [block for table in self._blocks.tables.values() for block in table.blocks()]
        assert len(blocks) == len(set(blocks)), "two pictures share a block"
