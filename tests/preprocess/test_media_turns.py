"""Turns of clients: when their pictures and videos are opened and decoded, and which are not decoded at all."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image

from hydra_engine.clock import MonotonicClock
from hydra_engine.errors import ContextLengthExceeded, InvalidRequest
from hydra_engine.models.specs.base import ProcessorSpec
from hydra_engine.preprocess import preprocessor
from hydra_engine.preprocess.media import media as module
from hydra_engine.preprocess.media.images import num_bytes
from hydra_engine.preprocess.media.media import MediaLoader
from hydra_engine.preprocess.media.opening import Decoders
from hydra_engine.preprocess.sandbox.processor import ImageProcessor, ProcessedPicture

Encode = Callable[..., bytes]
Make = Callable[..., Any]
SMALL, LARGE = (30, 40), (60, 50)


class Gate:
    """Stands for decoders: notes the sizes of what begins, and lets nothing of one size end before it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, held: tuple[int, int] | None = None) -> None:
        self.begun: list[tuple[int, int]] = []
        self._held = held
        self._open = threading.Event()

        def gated(decoders: Decoders, job: Any) -> bytes:
            size = (job.container.width, job.container.height)
            self.begun.append(size)
            if size == self._held:
                self._open.wait(20)
            return bytes(num_bytes(job.views))

        monkeypatch.setattr(Decoders, "render", gated)

    def open(self) -> None:
        self._open.set()


def pictures(encoded: Encode, size: tuple[int, int], count: int) -> list[bytes]:
    return [encoded(Image.new("RGB", size, (number, 0, 0))) for number in range(count)]


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(20_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError


# ---- whose turn it is


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LARGE_PIXELS", LARGE[0] * LARGE[1])


async def test_large_pictures_that_wait_hold_no_thread(
    make_preprocessor: Make, encoded: Encode, monkeypatch: pytest.MonkeyPatch, large: None
) -> None:
    kitchen, gate = make_preprocessor(), Gate(monkeypatch, held=LARGE)
    alice = [
        asyncio.create_task(kitchen.prepare("?", images=[data], client="alice")) for data in pictures(encoded, LARGE, 4)
    ]
    await until(lambda: LARGE in gate.begun)
    for data in pictures(encoded, SMALL, 3):
        await asyncio.wait_for(kitchen.prepare("?", images=[data], client="bob"), 20)
    assert gate.begun.count(LARGE) == 1 and not any(task.done() for task in alice)
    gate.open()
    assert all(result.pixels for result in await asyncio.gather(*alice))


async def test_a_large_picture_does_not_wait_behind_its_clients_small_ones(
    make_preprocessor: Make, encoded: Encode, monkeypatch: pytest.MonkeyPatch, large: None
) -> None:
    """A large picture does not wait for the same client's small ones, and so does not delay other clients' large
    ones."""
    kitchen, gate = make_preprocessor(media={"decode_workers": 1}), Gate(monkeypatch, held=(33, 33))
    first = asyncio.create_task(kitchen.prepare("?", images=pictures(encoded, (33, 33), 1), client="carol"))
    await until(lambda: bool(gate.begun))
    loader = kitchen.preprocessor._loader
    sent = [(LARGE, "alice"), *[(SMALL, "alice")] * 20, (LARGE, "bob")]
    tasks = []
    for number, (size, client) in enumerate(sent):
        image = encoded(Image.new("RGB", size, (0, number, 0)))
        tasks.append(asyncio.create_task(kitchen.prepare("?", images=[image], client=client)))
        await until(lambda number=number: len(loader._workers._threads._queue) == number + 1)
    gate.open()
    await asyncio.gather(first, *tasks)
    assert gate.begun.index(LARGE) <= 3
    assert gate.begun[gate.begun.index(LARGE) + 1 :].index(LARGE) <= 4  # bob's


async def test_one_large_picture_at_a_time_also_when_nobody_waits_for_it_any_more(
    make_preprocessor: Make, encoded: Encode, monkeypatch: pytest.MonkeyPatch, large: None
) -> None:
    kitchen, gate = make_preprocessor(), Gate(monkeypatch, held=LARGE)
    deserted, *others = (
        asyncio.create_task(kitchen.prepare("?", images=[data])) for data in pictures(encoded, LARGE, 3)
    )
    await until(lambda: LARGE in gate.begun)
    deserted.cancel()
    await asyncio.gather(deserted, return_exceptions=True)
    await kitchen.prepare("?", images=pictures(encoded, SMALL, 1))
    assert gate.begun.count(LARGE) == 1
    gate.open()
    await asyncio.gather(*others)
    assert gate.begun.count(LARGE) == 3


async def test_a_picture_that_is_being_decoded_keeps_no_second_thread_waiting(
    make_preprocessor: Make, encoded: Encode, monkeypatch: pytest.MonkeyPatch
) -> None:
    kitchen, gate = make_preprocessor(), Gate(monkeypatch, held=LARGE)
    (data,) = pictures(encoded, LARGE, 1)
    alice = [asyncio.create_task(kitchen.prepare("?", images=[data] * count)) for count in (1, 1, 2)]
    await until(lambda: LARGE in gate.begun)
    await asyncio.wait_for(kitchen.prepare("?", images=pictures(encoded, SMALL, 1)), 20)
    alice[1].cancel()  # whoever leaves takes it from nobody
    gate.open()
    first, _, twice = await asyncio.gather(*alice, return_exceptions=True)
    assert first.pixels * 2 == twice.pixels and gate.begun.count(LARGE) == 1


PROCESSOR = ProcessorSpec(
    "", "", "", 0, 0, bidirectional=False, inputs=(), patch_size=1, trust_remote_code=False, loader=""
)


async def test_the_models_own_processor_runs_as_often_as_there_are_workers(
    make_preprocessor: Make, encoded: Encode, monkeypatch: pytest.MonkeyPatch, large: None
) -> None:
    """Large pictures still go one at a time."""
    spec = make_preprocessor().preprocessor._spec
    spec = replace(spec, vision=replace(spec.vision, processor=PROCESSOR))
    loader = MediaLoader(spec, module.MediaConfig(decode_workers=3), MonotonicClock())
    monkeypatch.setattr(loader._decoders, "render", lambda job: bytes(3 * math.prod(job.views[0].canvas)))
    gate, begun = threading.Event(), []

    def process(_: ImageProcessor, digest: Any, size: tuple[int, int], pixels: bytes) -> ProcessedPicture:
        begun.append(size)
        gate.wait(20)
        return ProcessedPicture(digest, *size, pixels, num_tokens=1)

    monkeypatch.setattr(ImageProcessor, "process", process)

    def load(data: bytes) -> asyncio.Task[Any]:
        parts = [module.ImagePart(data, "images")]
        return asyncio.create_task(loader.load(parts, loader.resolve_sources(parts)))

    small = [load(data) for data in pictures(encoded, SMALL, 4)]
    await until(lambda: len(begun) == 3)
    gate.set()
    await asyncio.gather(*small)
    gate.clear()
    begun.clear()
    tasks = [load(data) for data in pictures(encoded, LARGE, 2)]
    await until(lambda: len(begun) == 1 and len(loader._large._queue) == 1)
    gate.set()
    await asyncio.gather(*tasks)
    assert len(begun) == 2
    loader.close()


# ---- what is not decoded


@pytest.mark.parametrize("num", [1, 3])
async def test_what_does_not_fit_the_context_is_not_decoded(
    make_preprocessor: Make, encoded: Encode, monkeypatch: pytest.MonkeyPatch, num: int
) -> None:
    gate, images = Gate(monkeypatch), pictures(encoded, SMALL, num)
    prompt = "<image>" * num
    fits = await make_preprocessor().prepare(prompt, images=images, raw=True, sampling={"max_tokens": 5})
    exact, gate.begun[:] = len(fits.request.prompt_token_ids) + 5, []
    kitchen = make_preprocessor(max_model_len=exact)
    with pytest.raises(ContextLengthExceeded, match=f"you requested {exact + 1} tokens") as caught:
        await kitchen.prepare(prompt, images=images, raw=True, sampling={"max_tokens": 6})
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
    assert gate.begun == []
    again = await kitchen.prepare(prompt, images=images, raw=True, sampling={"max_tokens": 5})
    assert again.pixels == fits.pixels and len(gate.begun) == num


async def test_nor_are_more_pixels_than_a_request_may_have(
    make_preprocessor: Make, encoded: Encode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pixels of the files take time to decode, and those that the tower takes need memory."""
    kitchen, gate = make_preprocessor(media={"max_image_pixels": SMALL[0] * SMALL[1]}), Gate(monkeypatch)
    few = pictures(encoded, SMALL, 16)
    for more, place in ((pictures(encoded, (1, 1), 1), 16), (few[:1], 16)):
        with pytest.raises(InvalidRequest, match="more than 19200 pixels together; send fewer or smaller") as caught:
            await kitchen.prepare("?", images=[*few, *more])
        assert (caught.value.code, caught.value.param) == ("image_too_large", f"images[{place}]")
    monkeypatch.setattr(preprocessor, "MAX_PIXEL_BYTES", 1)
    for some in (few[:1], few):
        with pytest.raises(InvalidRequest, match="MiB of pixels; at most 0 MiB are allowed: give fewer"):
            await kitchen.prepare("?", images=some)
    assert gate.begun == []
    monkeypatch.undo()
    assert len((await kitchen.prepare("?", images=few)).pixels) == 16


async def test_nor_are_pictures_in_memory(make_preprocessor: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr("hydra_engine.preprocess.media.opening.render", lambda *args: made.append(args))
    images = [Image.new("RGB", SMALL)] * 2
    with pytest.raises(ContextLengthExceeded):
        await make_preprocessor(max_model_len=8).prepare("<image><image>", images=images, raw=True)
    assert made == []


async def test_what_is_opened_and_waits_is_bounded(
    make_preprocessor: Make, encoded: Encode, monkeypatch: pytest.MonkeyPatch
) -> None:
    Gate(monkeypatch)
    images = pictures(encoded, SMALL, 4)
    expected = await make_preprocessor().prepare("?", images=images)
    monkeypatch.setattr(module, "_MAX_OPENED_BYTES", 2 * len(images[0]))
    kitchen, num_opened = make_preprocessor(), []
    opener = kitchen.preprocessor._loader._opener
    monkeypatch.setattr(opener, "open", lambda *args: num_opened.append(1) or type(opener).open(opener, *args))
    assert (await kitchen.prepare("?", images=images)).pixels == expected.pixels
    assert 4 < len(num_opened) <= 8 and kitchen.preprocessor._loader._opened.held == 0
    await kitchen.prepare("?", images=images)  # known now
    assert len(num_opened) <= 12
