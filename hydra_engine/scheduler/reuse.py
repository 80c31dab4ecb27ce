"""Which of a request's KV blocks the cache has already, and which of its own it lends to others.

Blocks are found by the hashes of what they hold (`cache/prefix.py`); a request's hashes are computed once, the first
time that somebody asks, and extended as its answer fills blocks. Lending is put off until it makes a difference, so
that it costs nothing between two steps. Does not know queues, budgets or who may start.
"""

from __future__ import annotations

from collections.abc import Sequence

from hydra_engine.cache.manager import CacheManager
from hydra_engine.cache.prefix import extend_chain, feature_key
from hydra_engine.core.ids import BlockHash, FeatureKey, RequestId
from hydra_engine.core.media import ImageItem
from hydra_engine.core.request import Request
from hydra_engine.core.state import RequestState


class PrefixCache:
    """`enabled` False: nothing is found and nothing is lent. `shares_features`: images with the same picture have the
    same key."""

    def __init__(self, kv: CacheManager[RequestId], *, enabled: bool, shares_features: bool) -> None:
        self._kv = kv
        self._block_size = kv.block_size
        self.enabled = enabled
        self._shares_features = shares_features
        self._unpublished: list[
            tuple[RequestState, int]
        ] = []  # (request, its full blocks) in the order of their proofs

    def find(self, state: RequestState) -> list[int]:
        """The blocks that hold the longest usable beginning of what the request has to prefill. At least one token is
        left over, for the step that computes it gives the next one; none of it ends inside a `whole` image. None for
        one whose prompt is scored, but where its KV is pulled: whoever computes it scores it."""
        if not self.enabled or (state.scores_prompt and state.remote_kv is None):
            return []
        self.publish()
        usable = (state.num_tokens - 1) // self._block_size
        found = self._kv.find(self._hashes(state, usable)[:usable])
        del found[_outside_whole_images(len(found), self._block_size, state.request.images) :]
        return found

    def adopt(self, state: RequestState, num_blocks: int) -> None:
        """Begins the request's table with blocks that `find` has found."""
        if num_blocks:
            self._kv.adopt(state.request.id, state.block_hashes[:num_blocks], capacity=state.request.max_total_tokens)
        state.num_published = num_blocks
        state.num_prefilled = num_blocks * self._block_size

    def publish_later(self, state: RequestState) -> None:
        """Others may find the full blocks that the request has computed, from the next `publish` on.

        Only when a token has been sampled behind them: what is not a number spoils everything behind it, so finite
        logits are the proof that all KV before them is sound. Blocks of a row that fails are never found by anybody.
        """
        self.publish_all_later([(state, state.num_computed // self._block_size)])

    def publish_all_later(self, filled: Sequence[tuple[RequestState, int]]) -> None:
        """The same of several requests: (request, its full blocks)."""
        if self.enabled:
            self._unpublished += filled

    def publish(self) -> None:
        """Lends what is owed. To be called before blocks are looked for or freed; while a step runs it costs least."""
        if self._unpublished:
            for state, full in self._unpublished:
                self._publish(state, full)
            self._unpublished.clear()

    def _publish(self, state: RequestState, full: int) -> None:
        if full <= state.num_published:
            return
        hashes = self._hashes(state, full)
        for index in range(state.num_published, full):
            self._kv.set_hash(state.request.id, index, hashes[index])
        state.num_published = full

    def feature_keys(self, request: Request) -> tuple[FeatureKey, ...]:
        """What the features of its images are shared by; if they are not, keys that no other image has."""
        if not self._shares_features:
            return tuple(FeatureKey(b"%d.%d" % (request.id, index)) for index in range(len(request.images)))
        return tuple(feature_key(image.digest, request.cache_salt) for image in request.images)

    def _hashes(self, state: RequestState, num_blocks: int) -> list[BlockHash]:
        """Of at least that many blocks."""
        chain = state.block_hashes
        if len(chain) < num_blocks:
            request, size = state.request, self._block_size
            tokens = state.tokens(len(chain) * size, num_blocks * size)
            extend_chain(chain, tokens, request.images, block_size=size, cache_salt=request.cache_salt)
        return chain


def _outside_whole_images(num_blocks: int, block_size: int, images: tuple[ImageItem, ...]) -> int:
    """The largest number of blocks up to `num_blocks` that does not end inside an image whose rows see each other."""
    for image in reversed(images):  # cutting one off may land in one before it
        if image.whole and image.start < num_blocks * block_size < image.end:
            num_blocks = image.start // block_size
    return num_blocks
