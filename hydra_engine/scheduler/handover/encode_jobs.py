"""How much of the image cache features of encode jobs may hold, until the instances that they are for have them."""

from __future__ import annotations

from itertools import chain

from hydra_engine.core.state import ImageProgress, RequestState
from hydra_engine.scheduler import policy
from hydra_engine.scheduler.request_table import RequestTable


class EncodeJobQuota:
    """Features of encode jobs leave room for the largest image that a request of this instance waits for, so that
    nobody here waits for another instance to fetch something; an image too large for that counts as any other. Only
    jobs give way for it, so the oldest job always gets on."""

    def __init__(self, requests: RequestTable) -> None:
        self._requests = requests
        self._num_blocks = 0  # while a vision step is filled

    def refresh(self) -> None:
        """A vision step is about to be filled."""
        self._num_blocks = self._requests.features.num_blocks - self._largest_local()

    def _largest_local(self) -> int:
        """Blocks of the largest image that a request of this instance lacks; 0 where there are no jobs."""
        requests = self._requests
        if not requests.jobs:
            return 0
        sizes = (
            requests.features.blocks_for(image.num_tokens)
            for state in chain(requests.encoding, requests.prefilling)
            for image, progress in zip(state.request.images, state.images, strict=True)
            if progress <= ImageProgress.ENCODING
        )
        return max(sizes, default=0)

    def has_room(self, state: RequestState, index: int, num_blocks: int, now: float, *, may_take: bool) -> bool:
        """For an image of a job, after taking the blocks of later jobs if it must and may."""
        requests, quota = self._requests, self._num_blocks
        if num_blocks > quota or quota == requests.features.num_blocks:
            return True
        if (excess := self._held_by_jobs() + num_blocks - quota) <= 0:
            return True
        if may_take:
            of_jobs = (
                holder for holder in requests.images.encoded() if all(user.is_encode_job for user, _ in holder[1])
            )
            for key in policy.features_to_take(state, index, of_jobs, excess):
                requests.images.take(key, now)
        return self._held_by_jobs() + num_blocks <= quota

    def _held_by_jobs(self) -> int:
        requests = self._requests
        held = ((requests.features.users(key), num_blocks) for key, _, num_blocks in requests.features.held())
        return sum(n for users, n in held if all(requests.states[request_id].is_encode_job for request_id, _ in users))
