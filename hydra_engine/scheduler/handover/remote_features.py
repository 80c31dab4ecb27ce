"""Image features between instances: remote images that others are asked for and offer, and those of encode jobs that
are offered to others.

Several instances may offer an image. Does not know who they are, nor when anything is copied.
"""

from __future__ import annotations

from hydra_engine.core.ids import RequestId
from hydra_engine.core.state import ImageProgress, RequestState
from hydra_engine.scheduler.handover.events import FeaturesEvent, FeaturesGoneEvent, UnneededEvent
from hydra_engine.scheduler.handover.remote_events import RemoteEvents
from hydra_engine.scheduler.request_table import RequestTable


class RemoteFeatures:
    """Others have been asked for every remote image that WAITS (`images_asked`) and have offered it or will do so. An
    offer is known (`image_offers`) only while the image WAITS or is ENCODING; one whose copy is in flight is not among
    them."""

    def __init__(self, requests: RequestTable, events: RemoteEvents) -> None:
        self.offers: dict[int, tuple[RequestState, int]] = {}  # those that are known and not being copied
        self._requests = requests
        self._events = events

    # ---- remote images

    def ask(self, state: RequestState, index: int) -> None:
        """For an image that waits; one that is here is needed no more."""
        progress = state.images[index]
        if progress == ImageProgress.WAITING and index not in state.images_asked:
            state.images_asked.add(index)
            self._events.need(state.request.id, index)
        elif progress > ImageProgress.ENCODING and index in state.image_offers:
            state.images_asked.discard(index)
            self._refuse(state, index)

    def offered(self, request_id: RequestId, index: int, offer: int) -> None:
        """Several instances may offer an image, and all but one may be about to take that back, so none is refused
        before the features are here."""
        state = self._requests.states.get(request_id)
        if state is None or state.ending is not None or not self._is_needed(state, index):
            self._events.tell(UnneededEvent(offer))
            return
        state.images_asked.add(index)
        state.image_offers.setdefault(index, []).append(offer)
        self.offers[offer] = state, index

    @staticmethod
    def _is_needed(state: RequestState, index: int) -> bool:
        if index in state.remote_images and state.images[index] <= ImageProgress.ENCODING:
            return True
        state.images_asked.discard(index)
        return False

    def claim(self, state: RequestState, index: int) -> int:
        """The latest offer of an image; it is copied now, or refused, and known no longer."""
        offer = state.image_offers[index][-1]
        self.offer_gone(offer)
        return offer

    def offer_gone(self, offer: int) -> None:
        """Unknown offers are ignored, and so are those that are being copied: the copy will not be valid."""
        if offer in self.offers:
            state, index = self.offers.pop(offer)
            state.image_offers[index].remove(offer)
            if not state.image_offers[index]:
                del state.image_offers[index]

    def _refuse(self, state: RequestState, index: int) -> None:
        while index in state.image_offers:
            self._events.tell(UnneededEvent(self.claim(state, index)))

    # ---- encode jobs

    def tell_target(self, state: RequestState, index: int, now: float) -> None:
        """Features of an encode job are here, or not any more."""
        progress, features = state.images[index], self._requests.features
        request_id, num_tokens = state.request.id, state.request.images[index].num_tokens
        if progress == ImageProgress.ENCODED:
            block_ids = features.block_ids(state.image_keys[index])[: features.blocks_for(num_tokens)]
            self._events.tell(FeaturesEvent(request_id, index, tuple(block_ids.tolist())))
            state.offered_s[index] = now
        elif index in state.offered_s:
            since_s = state.offered_s.pop(index)
            self._requests.timelines[request_id].offered("offered_features", since_s, now, num_tokens)
            if progress == ImageProgress.WAITING:
                self._events.tell(FeaturesGoneEvent(request_id, index))

    # ---- both

    def end(self, state: RequestState) -> None:
        """The request is about to end: nothing is offered any more, nothing wanted."""
        for index, progress in enumerate(state.images):
            if state.is_encode_job and progress == ImageProgress.ENCODED:
                self._events.tell(FeaturesGoneEvent(state.request.id, index))
        for index in list(state.image_offers):
            self._refuse(state, index)
        self._events.forget_needs(state.request.id)
