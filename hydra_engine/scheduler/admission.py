"""At the door: a request that can never fit is refused with quota and remedy, a full queue with a time to retry.

Sees a request and the sizes of the deployment, never what is running. Whoever passes will be served: the scheduler's
rules guarantee progress for anything that fits alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hydra_engine.core.request import Request
from hydra_engine.core.roles import Role
from hydra_engine.errors import InvalidRequest, RequestTooLarge, Unavailable, retry_after_s


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes of one instance, in blocks and in tokens (KV) or feature rows (images) per block."""

    role: Role
    num_kv_blocks: int
    kv_block_size: int
    num_image_blocks: int
    image_block_size: int


def check_fits(request: Request, limits: Limits, stages: Role | None = None) -> None:
    """Raises InvalidRequest or RequestTooLarge unless this part of the request (default: all that the role can do),
    alone on this instance, would run to its end."""
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
        _check_kv(request, limits, request.max_new_tokens if Role.D in stages else len(request.generated_token_ids))
    if stages == Role.E or Role.P in stages:
        _check_images(request, limits)


def _check_images(request: Request, limits: Limits) -> None:
    for index, image in enumerate(request.images):
        blocks = -(-image.num_tokens // limits.image_block_size)
        if blocks > limits.num_image_blocks:
            raise RequestTooLarge(
                f"image {index + 1} needs {blocks} blocks of the image cache for its {image.num_tokens} tokens, this "
                f"deployment has {limits.num_image_blocks}; send a smaller image, or serve with a larger "
                "--image-cache-gib",
                param="messages",
            )


def _check_kv(request: Request, limits: Limits, num_generated: int) -> None:
    wanted = request.num_prompt + num_generated
    blocks = -(-wanted // limits.kv_block_size)
    if blocks <= limits.num_kv_blocks:
        return
    room = limits.num_kv_blocks * limits.kv_block_size
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
    """Raises Unavailable when `max_queue` requests are accepted and not finished."""
    if num_live >= max_queue:
        raise Unavailable(
            f"{num_live} requests are queued or running, the limit (max_queue) is {max_queue}; try again later",
            code="overloaded",
            retry_after_s=retry_after_s(num_live, finish_times),
        )
