"""The progress of the images of all requests, and the effects of features that arrive or are evicted.

All images with the same picture share one progress, that of its features. Features are encoded here or loaded by the
connector, which is notified of every change. Carries out what the planners decide; the rules of eviction are in
`policy.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping

from hydra_engine.cache.features import FeatureCache
from hydra_engine.core.ids import FeatureKey, RequestId
from hydra_engine.core.plans import BlockIds
from hydra_engine.core.state import ImageProgress, RequestState
from hydra_engine.scheduler import policy
from hydra_engine.scheduler.hooks import Connector
from hydra_engine.scheduler.timeline import Timeline

EncodedFeatures = tuple[FeatureKey, list[tuple[RequestState, int]], int]  # (key, images that use the features, blocks)


class ImageTracker:
    """The image progress of all requests. `patches_waiting`: number of patches of images that wait for an encode here,
    counted once for each image that needs it, even if several have the same picture."""

    def __init__(
        self,
        features: FeatureCache,
        states: Mapping[RequestId, RequestState],
        timelines: Mapping[RequestId, Timeline],
        connector: Connector,
        requeue: Callable[[RequestState], None],
    ) -> None:
        self.patches_waiting = 0
        self._features = features
        self._states = states
        self._timelines = timelines
        self._connector = connector
        self._requeue = requeue

    # ---- requests

    def arrive(self, state: RequestState, cached_tokens: int, now: float) -> None:
        """Sets the progress of a new request's images: CACHED if they end within the first `cached_tokens` tokens or
        the KV is loaded, else that of their features, of which they become users. Updates `patches_waiting` and
        notifies the connector."""
        for index, image in enumerate(state.request.images):
            self.patches_waiting += image.num_patches * (index not in state.external_images)
            covered = state.external_kv or image.end <= cached_tokens
            self._set(state, index, ImageProgress.CACHED if covered else self._need(state, index), now)

    def recheck(self, state: RequestState, cached_tokens: int, now: float) -> None:
        """Makes CACHED images that end behind the first `cached_tokens` tokens users of their features, which may be
        encoded already or in flight; if not, the images wait for them. The caller requeues the request."""
        for index, image in enumerate(state.request.images):
            if state.images[index] == ImageProgress.CACHED and image.end > cached_tokens:
                progress = self._need(state, index)
                if progress == ImageProgress.WAITING:
                    self._begin_image_wait(state, index, now)
                self._set(state, index, progress, now)

    def on_kv_freed(self, state: RequestState) -> None:
        """Sets consumed images back to CACHED when the KV of a request is freed; the next lookup decides whether they
        need features again."""
        for index, progress in enumerate(state.images):
            if progress == ImageProgress.CONSUMED:
                state.images[index] = ImageProgress.CACHED

    def consume(self, state: RequestState, now: float) -> None:
        """Marks the images whose whole span has KV now as CONSUMED and releases their features."""
        for index, image in enumerate(state.request.images):
            progress = state.images[index]
            if progress != ImageProgress.CONSUMED and image.end <= state.num_computed:
                if progress <= ImageProgress.ENCODED:
                    self._features.drop((state.request.id, index), state.image_keys[index])
                self._set(state, index, ImageProgress.CONSUMED, now)

    def release_features(self, state: RequestState, index: int, now: float) -> bool:
        """Releases an encode job's features of one image, which were fetched or refused; no effect if it has none.
        Returns True if all images of the job are CONSUMED."""
        if state.images[index] == ImageProgress.ENCODED:
            self._features.drop((state.request.id, index), state.image_keys[index])
            self._set(state, index, ImageProgress.CONSUMED, now)
        return all(progress == ImageProgress.CONSUMED for progress in state.images)

    def end(self, state: RequestState) -> None:
        """Subtracts the patches of a request that is about to end from `patches_waiting`."""
        for index, progress in enumerate(state.images):
            if progress == ImageProgress.WAITING and index not in state.external_images:
                self.patches_waiting -= state.request.images[index].num_patches

    def drop(self, state: RequestState) -> None:
        """Removes an ended request from the users of all features that it holds or waits for."""
        for index, progress in enumerate(state.images):
            if progress <= ImageProgress.ENCODED:
                self._features.drop((state.request.id, index), state.image_keys[index])

    # ---- features

    def allocate(
        self, state: RequestState, index: int, reserved: int, now: float, *, may_evict: bool
    ) -> BlockIds | None:
        """Allocates and returns blocks for features that are about to be written, and sets all images with the same
        picture to ENCODING. None if too few are free beyond those `reserved` for earlier images. Evicts features of
        later images only with `may_evict`, with nothing reserved, and if that frees enough."""
        features, key = self._features, state.image_keys[index]
        missing = features.blocks_for(state.request.images[index].num_tokens) + reserved - features.pool.num_free
        if missing > 0:
            if reserved or not may_evict:
                return None
            for victim in policy.features_to_evict(state, index, self.encoded_features(), missing):
                self.evict(victim, now)
        if not features.reserve(key):
            return None
        state.images_planned.add(index)
        self._copy_progress(key, now)
        return features.block_ids(key)

    def finish(self, key: FeatureKey, now: float, *, failed: bool) -> list[RequestState]:
        """Records the end of an encode or a load. Returns the requests with images that use the features, ended but not
        forgotten ones included.

        If it `failed`, these images wait again; the caller ends the request that the encode was for.
        """
        users = self._features.users(key)
        self._features.finish(key, failed=failed)
        if users:
            self._copy_progress(key, now)
        return [self._states[request_id] for request_id in dict.fromkeys(r for r, _ in users)]

    def is_needed(self, key: FeatureKey) -> bool:
        """True if a request that has not ended uses the features, which are ENCODING."""
        return any(self._states[request_id].ending is None for request_id, _ in self._features.users(key))

    def end_image_waits(self, users: Iterable[RequestState], own: Container[RequestId], now: float) -> None:
        """Ends the image wait in the timelines of those `users` of features that wait for no more images. Leaves out
        ended requests and those in `own`, for which the encode itself is recorded."""
        for state in users:
            if state.request.id not in own and state.ending is None and not state.waits_for_images:
                self.end_image_wait(state, now)

    def end_image_wait(self, state: RequestState, now: float) -> None:
        """Ends the image wait in the timeline of a request whose last image was not encoded for itself (shared, loaded
        or cached). It waits in the queue from now on, unless a chunk is in flight."""
        timeline = self._timelines[state.request.id]
        timeline.end_encode_wait(now)
        if not state.num_scheduled:
            timeline.start_wait("queue", now)

    def evict(self, key: FeatureKey, now: float) -> None:
        """Frees the blocks of encoded features; images that use them wait again."""
        self._features.evict(key)
        for request_id, index in self._features.users(key):
            self._begin_image_wait(self._states[request_id], index, now)
        self._copy_progress(key, now)

    def encoded_features(self) -> Iterator[EncodedFeatures]:
        """Yields the encoded features that images of requests use."""
        for key, progress, num_blocks in self._features.held_blocks():
            if progress == ImageProgress.ENCODED:
                yield key, [(self._states[request_id], i) for request_id, i in self._features.users(key)], num_blocks

    # ---- inside

    def _need(self, state: RequestState, index: int) -> ImageProgress:
        """Adds the image to the users of its features and returns their progress."""
        num_tokens = state.request.images[index].num_tokens
        return self._features.need((state.request.id, index), state.image_keys[index], num_tokens)

    def _begin_image_wait(self, state: RequestState, index: int, now: float) -> None:
        """Records that an image of the request waits for features from `now` on; in the timeline only if it is encoded
        here. Called before its progress is set to WAITING."""
        if ImageProgress.WAITING not in state.images:
            state.image_wait_since_s = now
        if index not in state.external_images:
            self._timelines[state.request.id].start_encode_wait(now)

    def _copy_progress(self, key: FeatureKey, now: float) -> None:
        """Copies the progress of the features to all images that use them, and moves their requests to the queues of
        their phases."""
        progress = self._features.progress(key)
        for request_id, index in self._features.users(key):
            state = self._states[request_id]
            self._set(state, index, progress, now)
            self._requeue(state)

    def _set(self, state: RequestState, index: int, progress: ImageProgress, now: float) -> None:
        """Sets the progress of an image. Unless the request has ended, also updates `patches_waiting` and notifies the
        connector."""
        before, state.images[index] = state.images[index], progress
        if state.ending is not None:
            return
        if index not in state.external_images:
            change = (progress == ImageProgress.WAITING) - (before == ImageProgress.WAITING)
            self.patches_waiting += change * state.request.images[index].num_patches
        if state.connector_state is not None:
            self._connector.on_image(state, index, now)
