import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from PIL import Image

from hydra_engine.config import MediaConfig
from hydra_engine.errors import InvalidImage, Unavailable
from hydra_engine.models.specs.base import View
from hydra_engine.preprocess.media import images
from hydra_engine.preprocess.media.images import inspected
from hydra_engine.preprocess.media.opening import Decoders
from hydra_engine.preprocess.sandbox.image_child import ImageJob

Encode = Callable[..., bytes]
Picture = Callable[..., Image.Image]
SQUARE = (View((30, 40), (28, 28), (-1, -6), (28, 28)),)

# A child with a fault: pictures 13 pixels wide set it off.
FAULTY = """
import os, signal, sys, time
from hydra_engine.preprocess.sandbox import image_child as child
honest = child.answer
child.CPU_SECONDS = 0
def answer(job, memory):
    if job.container.width == 13:
        {fault}
    return honest(job, memory)
child.answer = answer
child.main()
"""
FAULTS = {
    "segmentation fault": "os.kill(os.getpid(), signal.SIGSEGV)",
    "abort": "os.abort()",
    "exit": "os._exit(0)",
    "exception": "raise RuntimeError",
    "endless loop": "while True: pass",
    "sleep": "time.sleep(60)",
    "silence and death": "os.close(int(sys.argv[1])); time.sleep(60)",
    "nonsense": "return b'xyz'",
    "the end before the answer": "os.close(int(sys.argv[1])); os._exit(0)",
}


def job(data: bytes, views: tuple[View, ...] = SQUARE, resample: str = "bicubic") -> ImageJob:
    return ImageJob(inspected(data, MediaConfig()), views, resample)


def expected(data: bytes, views: tuple[View, ...] = SQUARE, resample: str = "bicubic") -> bytes:
    return images.render([images.decode(inspected(data, MediaConfig()))], views, resample)


def is_running(pid: int) -> bool:
    """True if the process runs, or has ended and was not waited for."""
    return os.path.exists(f"/proc/{pid}")


@pytest.fixture
def decoders() -> Iterator[Decoders]:
    decoders = Decoders()
    yield decoders
    decoders.close()


def test_the_childs_pixels_are_ours(decoders: Decoders, encoded: Encode, picture: Picture) -> None:
    tiled = (View.whole(20, 40), View((50, 24), (60, 40), (4, 9), (20, 20)))
    targets = [(SQUARE, "bicubic"), (tiled, "lanczos"), ((View.whole(50, 10),), "bilinear"), ((), "nearest")]
    for format in ("PNG", "JPEG", "GIF", "WEBP", "BMP"):
        for width, height in ((40, 30), (1, 1), (7, 300)):
            data = encoded(picture(width, height), format)
            for views, resample in targets:
                assert decoders.render(job(data, views, resample)) == expected(data, views, resample)
    rgba = encoded(picture(40, 30, channels=4))
    assert decoders.render(job(rgba)) == expected(rgba)
    assert len(decoders.pictures.pids()) == 1


def test_broken_pictures_keep_the_child(decoders: Decoders, encoded: Encode, picture: Picture) -> None:
    good = encoded(picture(40, 30))
    broken = good[:60] + b"\xff" * 8 + good[68:]
    for _ in range(20):
        with pytest.raises(InvalidImage, match="damaged"):
            decoders.render(job(broken))
        assert decoders.render(job(good)) == expected(good)
    assert len(decoders.pictures.pids()) == 1


@pytest.mark.quick("abort")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_decoder_that_fails_costs_one_picture(encoded: Encode, picture: Picture, fault: str) -> None:
    decoders = Decoders(
        [sys.executable, "-c", FAULTY.format(fault=FAULTS[fault])], answer_seconds=1 if fault == "sleep" else 60
    )
    good, bad = encoded(picture(40, 30)), encoded(picture(13, 13))
    try:
        assert decoders.render(job(good)) == expected(good)
        (doomed,) = decoders.pictures.pids()
        begin = time.monotonic()
        with pytest.raises(InvalidImage, match="decoder failed") as caught:
            decoders.render(job(bad))
        assert time.monotonic() - begin < 30 and "status" not in caught.value.message
        assert not is_running(doomed) and decoders.pictures.pids() == []
        assert decoders.render(job(good)) == expected(good)
    finally:
        decoders.close()


def test_a_child_cannot_change_the_size_of_shared_memory(encoded: Encode, picture: Picture) -> None:
    """The parent would fail on reading beyond the end."""
    fault = """
        for name in os.listdir("/proc/self/fd"):
            path = "/proc/self/fd/" + name
            if os.path.exists(path) and "pixels" in os.readlink(path):
                for size in (0, 1 << 30):
                    try:
                        os.truncate(path, size)
                    except OSError:
                        memory[:] = 77
                        if size:
                            return child.Decoded()
    """
    decoders = Decoders([sys.executable, "-c", FAULTY.format(fault=fault.strip())])
    try:
        assert decoders.render(job(encoded(picture(13, 13)))) == b"\x4d" * len(expected(encoded(picture(13, 13))))
    finally:
        decoders.close()


@pytest.mark.slow
def test_shared_memory_grows_and_large_memory_is_given_back(encoded: Encode, picture: Picture) -> None:
    decoders, data, sizes = Decoders(), encoded(picture(8, 8)), []
    small, large = (View.whole(8, 8),), (View.whole(5000, 5000),)
    try:
        for views in (small, large, large, small):
            assert decoders.render(job(data, views, "nearest")) == expected(data, views, "nearest")
            sizes.append(decoders.pictures._idle[0]._memory.size)
            descriptors = [os.path.realpath(entry.path) for entry in os.scandir("/proc/self/fd")]
            assert sum("memfd:pixels" in path for path in descriptors) == 1
    finally:
        decoders.close()
    assert sizes == [4 << 20, 75_000_000, 75_000_000, 4 << 20]


def test_a_childs_memory_is_limited(encoded: Encode, picture: Picture) -> None:
    decoders = Decoders([sys.executable, "-c", FAULTY.format(fault="bytearray(2 << 30)")])
    good, bad = encoded(picture(40, 30)), encoded(picture(13, 13))
    try:
        with pytest.raises(InvalidImage):
            decoders.render(job(bad))
        assert decoders.render(job(good)) == expected(good)
    finally:
        decoders.close()


def test_a_child_that_died_while_idle_is_replaced(decoders: Decoders, encoded: Encode, picture: Picture) -> None:
    good = encoded(picture(40, 30))
    decoders.warm_up(1)
    (pid,) = decoders.pictures.pids()
    assert decoders.render(job(good)) == expected(good) and decoders.pictures.pids() == [pid], (
        "the one that was started"
    )
    os.kill(pid, signal.SIGTERM)  # ignored
    assert decoders.render(job(good)) == expected(good) and decoders.pictures.pids() == [pid]
    os.kill(pid, signal.SIGKILL)
    assert decoders.render(job(good)) == expected(good)
    assert len(decoders.pictures.pids()) == 1 and decoders.pictures.pids() != [pid]


def test_threads_share_children_and_closing_ends_them(encoded: Encode, picture: Picture) -> None:
    decoders, results = Decoders(), []
    files = [encoded(picture(40, 30, seed=seed)) for seed in range(8)]

    def work(data: bytes) -> None:
        results.extend(decoders.render(job(data)) == expected(data) for _ in range(10))

    threads = [threading.Thread(target=work, args=(files[n % 8],)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 30
    children = decoders.pictures.pids()
    assert 1 <= len(children) <= 3
    decoders.close()
    assert not any(map(is_running, children)) and decoders.pictures.pids() == []


def test_the_child_holds_no_secrets_and_no_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_API_KEY", "secret")
    decoders = Decoders()
    decoders.pictures.start()
    (pid,) = decoders.pictures.pids()
    with open(f"/proc/{pid}/environ", "rb") as file:
        assert b"secret" not in file.read()
    assert len(os.listdir(f"/proc/{pid}/fd")) == 4  # three times nothing and the socket
    decoders.close()
    assert not os.path.exists(f"/proc/{pid}")


def test_one_that_did_not_start_is_noticed_by_the_first_picture(encoded: Encode, picture: Picture) -> None:
    for seconds in (0.0, 0.3):  # still starting, gone
        decoders = Decoders([sys.executable, "-c", "raise SystemExit(1)"])
        decoders.warm_up(1)
        time.sleep(seconds)
        with pytest.raises(Unavailable):
            decoders.render(job(encoded()))
        decoders.close()


def test_no_child_means_try_again_later(encoded: Encode) -> None:
    for command in (["/nonexistent/python"], [sys.executable, "-c", "raise SystemExit(1)"]):
        decoders = Decoders(command)
        with pytest.raises(Unavailable):
            decoders.render(job(encoded()))
        decoders.close()


async def test_as_many_children_are_started_as_pictures_are_decoded_at_once(
    make_preprocessor: Callable[..., object],
) -> None:
    loader = make_preprocessor().preprocessor._loader  # type: ignore[attr-defined]
    await asyncio.wait_for(loader.warm_up(), 30)
    assert len(loader._decoders.pictures.pids()) == loader._limits.decode_workers > 1
    text_only = make_preprocessor(vision=False).preprocessor._loader  # type: ignore[attr-defined]
    await text_only.warm_up()
    assert text_only._decoders.pictures.pids() == []
