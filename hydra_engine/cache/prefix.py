"""Prefix caching: finds the cached blocks of a request's prompt by their hashes (`hashes.py`), and publishes the blocks
that requests compute. Does not know queues, budgets or which request starts.
"""

from __future__ import annotations

from collections.abc import Sequence

from hydra_engine.cache.blocks import CacheManager
from hydra_engine.cache.hashes import extend_chain, feature_key
from hydra_engine.cache.snapshots import StateSnapshots
from hydra_engine.core.ids import BlockHash, FeatureKey, RequestId
from hydra_engine.core.request import Request
from hydra_engine.core.state import RequestState


class PrefixCache:
    """Prefix lookup for requests, and publication of the blocks that they compute.

    The hashes of a request are computed at the first lookup, and extended as its answer fills blocks. Computed blocks
    are queued and published before the next lookup or before blocks are freed, so that publishing takes no time between
    two steps.

    `enabled` False: nothing is found or published. `shares_features`: images with the same picture have the same key.
    `snapshots`: of recurrent states, if the model has them; then a prefix is of use only if one belongs to its end.
    """

    def __init__(
        self,
        kv: CacheManager[RequestId],
        *,
        enabled: bool,
        shares_features: bool,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        self._kv = kv
        self._block_size = kv.block_size
        self._enabled = enabled
        self._snapshots = snapshots
        self._shares_features = shares_features
        # (request, its full blocks) in the order in which their KV was known to be finite
        self._unpublished: list[tuple[RequestState, int]] = []

    def find(self, state: RequestState) -> list[int]:
        """Returns the cached blocks of the longest usable prefix of the request's tokens, after publishing what is
        queued.

        At least one token is left over, since computing it gives the next token; the prefix does not end inside an
        image with bidirectional attention. Empty for a request whose prompt is scored here, and if not enabled.
        """
        if not self._enabled or (state.scores_prompt and not state.external_kv):
            return []
        self.publish()
        usable = (state.num_tokens - 1) // self._block_size
        found = self._kv.find(self._hashes(state, usable)[:usable])
        for image in reversed(state.request.images):  # cutting one off may land in one before it
            if image.bidirectional and image.start < len(found) * self._block_size < image.end:
                del found[image.start // self._block_size :]
        if self._snapshots is not None:
            del found[self._snapshots.num_blocks(state.block_hashes[: len(found)]) :]
        return found

    def publish_later(self, filled: Sequence[tuple[RequestState, int]]) -> None:
        """Queues the full blocks that requests have computed or loaded for the next `publish`: (request, number of its
        leading full blocks).

        Called only after a token was sampled behind them, here or where they were computed: a NaN spoils everything
        behind it, so finite logits prove that all KV before them is sound. Blocks of a row that fails are never found.
        """
        if self._enabled:
            self._unpublished += filled

    def publish(self) -> None:
        """Publishes the queued blocks: lookups can find them from now on. Called before every lookup and before blocks
        are freed; costs least while a step runs."""
        for state, full in self._unpublished:
            if full > state.num_published:
                hashes = self._hashes(state, full)
                self._kv.set_hashes(state.request.id, state.num_published, hashes[state.num_published : full])
                state.num_published = full
                if self._snapshots is not None:
                    self._snapshots.publish(state.request.id, hashes[:full])
        self._unpublished.clear()

    def feature_keys(self, request: Request) -> tuple[FeatureKey, ...]:
        """Returns the keys of the features of the request's images: by content, or unique ones if features are not
        shared."""
        if not self._shares_features:
            return tuple(FeatureKey(b"%d.%d" % (request.id, index)) for index in range(len(request.images)))
        return tuple(feature_key(image.digest, request.cache_salt) for image in request.images)

    def _hashes(self, state: RequestState, num_blocks: int) -> list[BlockHash]:
        """Returns the hashes of all full blocks of the request that were hashed so far, after computing missing ones up
        to `num_blocks`."""
        chain = state.block_hashes
        if len(chain) < num_blocks:
            request, size = state.request, self._block_size
            tokens = state.tokens(len(chain) * size, num_blocks * size)
            extend_chain(chain, tokens, request.images, block_size=size, cache_salt=request.cache_salt)
        return chain
