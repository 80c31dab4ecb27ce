"""Media, texts and bodies that take long: alice sends many, bob one of each, and waits for few of hers."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import zlib
from functools import partial
from importlib.util import find_spec
from typing import Any

from tests.campaigns.hostile.pictures import data_url, noise, png
from tests.campaigns.siege import oracles
from tests.campaigns.siege.clients import CHAT, beside
from tests.campaigns.siege.miniatures import miniature
from tests.campaigns.siege.oracles import Finding
from tests.campaigns.siege.running import Server
from tests.campaigns.siege.stage import Case, Stage

_ALMOST_ALL = 1960  # tokens of the demo's context of 2,048; 16 pictures have 144
_BODY: dict[str, Any] = {"model": "demo", "max_tokens": 1}


def _with_pictures(*pictures: bytes) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": data_url(picture)}} for picture in pictures]
    return _BODY | {"messages": [{"role": "user", "content": parts}]}


def one_bit(side: int, number: int) -> bytes:
    """A picture of few bytes and many pixels, another one for each number."""
    rows = bytearray(bytes(side // 8 + 1) * side)
    rows[1:5] = number.to_bytes(4, "big")
    return png(side, side, zlib.compress(bytes(rows), 9), depth=1, colour=0)


async def _beside(stage: Stage, theirs: list[Any], path: str, mine: Any, mine_path: str, queue: str) -> list[Finding]:
    """Bob's request, begun when alice's have arrived. Hers are given up then."""
    async with beside(stage.alice.post(path, body) for body in theirs):
        answer = await stage.bob.post(mine_path, mine)
    findings = [] if answer.status == 200 else [Finding("turn", f"bob: {answer.status} {answer.body[:200]!r}")]
    return findings + await stage.turns(queue)


async def pictures(stage: Stage) -> list[Finding]:
    """16 of 34 million pixels each, one bit a pixel, 5 KiB a picture."""
    rng = stage.rng
    large = [one_bit(5_800, rng.randrange(1 << 30)) for _ in range(16)]
    theirs = [_with_pictures(*large[i : i + 4]) for i in range(0, 16, 4)]
    return await _beside(stage, theirs, CHAT, _with_pictures(noise(rng, 40, 41)), CHAT, "picture")


async def measured_first(stage: Stage) -> list[Finding]:
    """Large pictures beside words that almost fill the context: refused before one of them is decoded."""
    alice, words = stage.alice, "word " * 100
    count = json.loads((await alice.post("/tokenize", {"model": "demo", "prompt": words})).body)["count"]
    body = _with_pictures(*(one_bit(5_800, stage.rng.randrange(1 << 30)) for _ in range(16)))
    body["messages"].insert(0, {"role": "user", "content": "word " * (_ALMOST_ALL * 100 // count)})
    answer = await alice.post(CHAT, body)
    decoded = {
        queue for queue, what, _ in (await stage.server.state())["events"] if "large" in queue and what == "begin"
    }
    findings = [Finding("turn", f"decoded before it was measured: {queue}") for queue in decoded]
    return findings + [Finding("blame", f"too long: {answer.status} {answer.code}")] * (answer.status != 400)


async def many_pictures(stage: Stage) -> list[Finding]:
    """Twenty large pictures and a thousand small ones: refused. Then four requests of two hundred, beside bob's."""
    rng, alice = stage.rng, stage.alice
    large = [one_bit(5_800, rng.randrange(1 << 30)) for _ in range(20)]
    small = [noise(rng, 8, 8) for _ in range(40)]
    findings = []
    for pictures, code in ((large, "image_too_large"), (small * 25, "too_many_images")):
        answer = await alice.post(CHAT, _with_pictures(*pictures))
        if (answer.status, answer.code) != (400, code):
            findings.append(Finding("blame", f"{len(pictures)} pictures: {answer.status} {answer.code}"))
    theirs = [_with_pictures(*(noise(rng, 8, 8) for _ in range(200))) for _ in range(4)]
    return findings + await _beside(stage, theirs, CHAT, _with_pictures(noise(rng, 40, 41)), CHAT, "picture")


async def texts(stage: Stage) -> list[Finding]:
    rng, path = stage.rng, "/tokenize"
    theirs = [{"model": "demo", "prompt": _text(rng, 130_000)} for _ in range(40)]
    return await _beside(stage, theirs, path, {"model": "demo", "prompt": _text(rng, 2_500)}, path, "prompts")


async def bodies(stage: Stage) -> list[Finding]:
    """Six of 20 MB, each most of a second of parsing."""
    large = b'{"model":"demo","prompt":"' + b'\\"' * 10_000_000 + b'"}'
    mine = _with_pictures(noise(stage.rng, 330, 330))
    return await _beside(stage, [large] * 6, "/v1/completions", mine, CHAT, "bod")


async def videos(stage: Stage) -> list[Finding]:
    """Ten of 140 million pixels each, at a model that takes videos; bob has a video and a picture."""
    if find_spec("av") is None:
        stage.skipped.append("turns/videos, for PyAV is not installed")
        return []
    from tests.campaigns.hostile.videos import another, still

    rng, film = stage.rng, await asyncio.to_thread(still, 4000, 2240, 16)
    server = await asyncio.to_thread(
        partial(Server, "--served-model-name", "demo", model=str(await miniature("qwen2_vl")), topology="EPD")
    )
    try:
        await asyncio.to_thread(server.wait_ready)
        alice, bob = server.client("alice"), server.client("bob")
        theirs = [_with_video(another(film, rng.randrange(1 << 60))) for _ in range(10)]
        mine = [_with_video(another(film, 0)), _with_pictures(noise(rng, 40, 41))]
        await server.state(reset=True)
        async with beside(alice.post(CHAT, body) for body in theirs):
            answers = await asyncio.gather(*(bob.post(CHAT, body) for body in mine))
            state = await server.state()
        findings = [Finding("turn", f"bob: {one.status} {one.body[:200]!r}") for one in answers if one.status != 200]
        whose = json.loads((await bob.get("/siege")).body)["client"]
        return findings + oracles.turn(map(tuple, state["events"]), whose, ["pictures and videos"])
    finally:
        server.kill()


def _with_video(video: bytes) -> dict[str, Any]:
    url = "data:video/mp4;base64," + base64.b64encode(video).decode()
    return _BODY | {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": url}}]}]}


def _text(rng: random.Random, chars: int) -> str:
    return "".join(rng.choice("abcdefghij klmnop qrstu vwxyz") for _ in range(chars))


CASES = [
    Case("turns", "pictures", pictures),
    Case("turns", "videos", videos, alone=True),
    Case("turns", "measured first", measured_first),
    Case("turns", "many pictures", many_pictures),
    Case("turns", "texts", texts),
    Case("turns", "large bodies", bodies),
]
