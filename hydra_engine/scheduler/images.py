"""How far the images of all requests are, and what follows when their features come and go.

All images with one picture are as far as its features are. Features are encoded here or elsewhere; the connector is
told of every change. Carries out what the planners decide; who may take whose blocks is in `policy.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping

from hydra_engine.cache.features import FeatureCache
from hydra_engine.core.ids import FeatureKey, RequestId
from hydra_engine.core.state import ImageProgress, RequestState
from hydra_engine.scheduler import policy
from hydra_engine.scheduler.hooks import Connector
from hydra_engine.scheduler.timeline import Timeline

Holder = tuple[FeatureKey, list[tuple[RequestState, int]], int]


class ImageTracker:
    def __init__(
        self,
        features: FeatureCache,
        states: Mapping[RequestId, RequestState],
        timelines: Mapping[RequestId, Timeline],
        connector: Connector,
        requeue: Callable[[RequestState], None],
    ) -> None:
        self.patches_waiting = 0  # of images that need an encode here, once for each request that needs it
        self._features = features
        self._states = states
        self._timelines = timelines
        self._connector = connector
        self._requeue = requeue

    # ---- requests

    def arrive(self, state: RequestState, cached_tokens: int, now: float) -> None:
        """A new request; images before `cached_tokens` need nothing if their KV stays where it is."""
        for index, image in enumerate(state.request.images):
            self.patches_waiting += image.num_patches * (index not in state.remote_images)
            covered = state.remote_kv is not None or image.end <= cached_tokens
            self._set(state, index, ImageProgress.CACHED if covered else self._need(state, index), now)

    def recheck(self, state: RequestState, cached_tokens: int, now: float) -> None:
        """Images that counted on cached KV and are not covered by it any more need features, which may be there or on
        their way."""
        for index, image in enumerate(state.request.images):
            if state.images[index] == ImageProgress.CACHED and image.end > cached_tokens:
                progress = self._need(state, index)
                if progress == ImageProgress.WAITING:
                    self._waits(state, index, now)
                self._set(state, index, progress, now)

    def lose_kv(self, state: RequestState) -> None:
        """Images whose KV is gone are CACHED until they are looked at again."""
        for index, progress in enumerate(state.images):
            if progress == ImageProgress.CONSUMED:
                state.images[index] = ImageProgress.CACHED

    def consume(self, state: RequestState, now: float) -> None:
        """Lets go of the features that are not needed any more, for the KV of the whole span is there."""
        for index, image in enumerate(state.request.images):
            progress = state.images[index]
            if progress != ImageProgress.CONSUMED and image.end <= state.num_computed:
                if progress <= ImageProgress.ENCODED:
                    self._features.drop((state.request.id, index), state.image_keys[index])
                self._set(state, index, ImageProgress.CONSUMED, now)

    def release(self, state: RequestState, index: int, now: float) -> bool:
        """The target of an encode job has the features of this image, or does not want them; True if that was the last
        one. Nothing happens if they are not offered."""
        if state.images[index] == ImageProgress.ENCODED:
            self._features.drop((state.request.id, index), state.image_keys[index])
            self._set(state, index, ImageProgress.CONSUMED, now)
        return all(progress == ImageProgress.CONSUMED for progress in state.images)

    def end(self, state: RequestState) -> None:
        """The request is about to end: nothing is encoded for it any more."""
        for index, progress in enumerate(state.images):
            if progress == ImageProgress.WAITING and index not in state.remote_images:
                self.patches_waiting -= state.request.images[index].num_patches

    def drop(self, state: RequestState) -> None:
        """What a request that has ended holds."""
        for index, progress in enumerate(state.images):
            if progress <= ImageProgress.ENCODED:
                self._features.drop((state.request.id, index), state.image_keys[index])

    # ---- features

    def make_room(
        self, state: RequestState, index: int, num_blocks: int, reserved: int, now: float, *, may_evict: bool
    ) -> bool:
        """Whether the image can have its blocks, after evicting those of later images if it must and may and nothing is
        put aside for an earlier one."""
        features = self._features
        if features.num_free >= reserved + num_blocks:
            return True
        if reserved or not may_evict:
            return False
        missing = num_blocks - features.num_free
        for key in policy.features_to_evict(state, index, self.encoded(), missing):
            self.evict(key, now)
        return features.num_free >= num_blocks

    def reserve(self, state: RequestState, index: int, now: float) -> None:
        """The image gets blocks and its features will be written for this request, and for all others with the same
        picture."""
        key = state.image_keys[index]
        granted = self._features.reserve(key)
        assert granted, "room was made and is gone"
        state.images_planned.add(index)
        self._follow(key, now)

    def finish(self, key: FeatureKey, now: float, *, failed: bool) -> list[RequestState]:
        """An encode or a pull has come back. Returns the requests that it was for, as far as they still need it.

        An encode that failed ends the request that it was planned for, which is not this method's business; those that
        shared it wait again.
        """
        users = self._features.users(key)
        self._features.finish(key, failed=failed)
        if users:
            self._follow(key, now)
        return [self._states[request_id] for request_id in dict.fromkeys(r for r, _ in users)]

    def settle_others(self, users: Iterable[RequestState], own: Container[RequestId], now: float) -> None:
        """Others had the same picture; some of them may have waited for nothing else."""
        for state in users:
            if state.request.id not in own and state.ending is None and not state.waits_for_images:
                self.settled(state, now)

    def settled(self, state: RequestState, now: float) -> None:
        """The last image that a request waited for is ready, by the work of others."""
        timeline = self._timelines[state.request.id]
        timeline.images_found(now)
        if not state.num_scheduled:
            timeline.waits_for("queue", now)

    def evict(self, key: FeatureKey, now: float) -> None:
        """Frees the blocks of encoded features; images that need them wait for them again."""
        self._features.evict(key)
        for request_id, index in self._features.users(key):
            self._waits(self._states[request_id], index, now)
        self._follow(key, now)

    def encoded(self) -> Iterator[Holder]:
        """(key, images that use it, blocks) of all features that wait in the cache."""
        for key, progress, num_blocks in self._features.held():
            if progress == ImageProgress.ENCODED:
                yield key, [(self._states[request_id], i) for request_id, i in self._features.users(key)], num_blocks

    # ---- inside

    def _need(self, state: RequestState, index: int) -> ImageProgress:
        num_tokens = state.request.images[index].num_tokens
        return self._features.need((state.request.id, index), state.image_keys[index], num_tokens)

    def _waits(self, state: RequestState, index: int, now: float) -> None:
        if ImageProgress.WAITING not in state.images:
            state.image_wait_since_s = now
        if index not in state.remote_images:
            self._timelines[state.request.id].encode_waits(now)

    def _follow(self, key: FeatureKey, now: float) -> None:
        """All images that use these features are as far as the features are."""
        progress = self._features.progress(key)
        for request_id, index in self._features.users(key):
            state = self._states[request_id]
            self._set(state, index, progress, now)
            self._requeue(state)

    def _set(self, state: RequestState, index: int, progress: ImageProgress, now: float) -> None:
        before, state.images[index] = state.images[index], progress
        if state.ending is not None:
            return
        if index not in state.remote_images:
            change = (progress == ImageProgress.WAITING) - (before == ImageProgress.WAITING)
            self.patches_waiting += change * state.request.images[index].num_patches
        self._connector.on_image(state, index, now)
