"""Rules by which an instance accepts requests. A request that can never fit is refused with the limit and a remedy, one
that meets a full queue with a time to retry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hydra_engine.core.instances import Role
from hydra_engine.core.request import Request
from hydra_engine.errors import InvalidRequest, RequestTooLarge, Unavailable, retry_after_s


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes of one instance, in blocks and in tokens (KV) or feature rows (images) per block."""

    role: Role
    num_kv_blocks: int
    kv_block_size: int
    num_image_blocks: int
    image_block_size: int


def check_fits(request: Request, limits: Limits, stages: Role | None = None, num_state_blocks: int = 0) -> None:
    """Raises Unavailable if the role lacks one of these stages (None: all of the role), InvalidRequest if the prompt is
    empty and not only images are encoded (E), and RequestTooLarge if the stages cannot run to their end even alone on
    this instance. `num_state_blocks`: KV blocks that it needs beside those of its tokens."""
    stages = limits.role if stages is None else stages
    if stages & limits.role != stages:
        raise Unavailable(
            f"stages {stages.letters} are asked of an instance that serves {limits.role.letters} now; send the request "
            "again",
            code="wrong_role",
        )
    if stages != Role.E:
        if not request.prompt_token_ids:
            raise InvalidRequest("the prompt is empty; send at least one token", param="messages")
        num_generated = request.max_new_tokens if Role.D in stages else len(request.generated_token_ids)
        _check_kv(request, limits, num_generated, num_state_blocks)
    if stages == Role.E or Role.P in stages:
        _check_images(request, limits)


def _check_images(request: Request, limits: Limits) -> None:
    """Raises RequestTooLarge if the features of a single image exceed the image cache."""
    for index, image in enumerate(request.images):
        blocks = -(-image.num_tokens // limits.image_block_size)
        if blocks > limits.num_image_blocks:
            raise RequestTooLarge(
                f"image {index + 1} needs {blocks} blocks of the image cache for its {image.num_tokens} tokens, this "
                f"deployment has {limits.num_image_blocks}; send a smaller image, or serve with a larger "
                "--image-cache-gib",
                param="messages",
            )


def _check_kv(request: Request, limits: Limits, num_generated: int, num_state_blocks: int) -> None:
    """Raises RequestTooLarge if the KV of the prompt and `num_generated` tokens exceeds the KV cache without
    `num_state_blocks`."""
    blocks = -(-(request.num_prompt + num_generated) // limits.kv_block_size) + num_state_blocks
    if blocks <= limits.num_kv_blocks:
        return
    room = max(limits.num_kv_blocks - num_state_blocks, 0) * limits.kv_block_size
    if room > request.num_prompt and num_generated:
        param, remedy = "max_tokens", f"lower max_tokens to at most {room - request.num_prompt}"
    else:
        param, remedy = "messages", "shorten the prompt or send smaller images"
    raise RequestTooLarge(
        f"{request.num_prompt} prompt tokens and up to {num_generated} new ones need {blocks} KV blocks, this "
        f"deployment has {limits.num_kv_blocks} ({room} tokens); {remedy}, or serve with a larger --kv-cache-gib",
        param=param,
    )


def check_queue(num_live: int, max_queue: int, finish_times: Sequence[float]) -> None:
    """Raises Unavailable if `num_live`, the requests accepted and not finished, has reached `max_queue`. The time to
    retry follows from `finish_times`, when the latest requests finished."""
    if num_live >= max_queue:
        raise Unavailable(
            f"{num_live} requests are queued or running, the limit (max_queue) is {max_queue}; try again later",
            code="overloaded",
            retry_after_s=retry_after_s(num_live, finish_times),
        )
