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
from hydra_engine.intake import pixels
from hydra_engine.intake.child import Job
from hydra_engine.intake.decode import inspected
from hydra_engine.intake.pixels import Fit
from hydra_engine.intake.sandbox import Sandbox

Encode = Callable[..., bytes]
Picture = Callable[..., Image.Image]
SQUARE = Fit(28, 28, 28, Image.Resampling.BICUBIC)

# A child with a fault: pictures 13 pixels wide set it off.
FAULTY = """
import os, signal, sys, time
from hydra_engine.intake import child
honest = child.answer
child.CPU_SECONDS = 0
def answer(job):
    if job.container.width == 13:
        {fault}
    return honest(job)
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
    "half an answer": "os.write(int(sys.argv[1]), honest(job)[:100]); os._exit(0)",
}


def job(data: bytes, target: Fit = SQUARE) -> Job:
    return Job(inspected(data, MediaConfig()), target)


def expected(data: bytes, target: Fit = SQUARE) -> bytes:
    return pixels.fit(pixels.decode(inspected(data, MediaConfig())), target).tobytes()


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    sandbox = Sandbox()
    yield sandbox
    sandbox.close()


def test_the_childs_pixels_are_ours(sandbox: Sandbox, encoded: Encode, picture: Picture) -> None:
    targets = [SQUARE, Fit(20, 40, 28, Image.Resampling.LANCZOS), Fit(50, 10, 0, Image.Resampling.BILINEAR)]
    for format in ("PNG", "JPEG", "GIF", "WEBP", "BMP"):
        for width, height in ((40, 30), (1, 1), (7, 300)):
            data = encoded(picture(width, height), format)
            for target in targets:
                assert sandbox.render(job(data, target)) == expected(data, target)
    rgba = encoded(picture(40, 30, channels=4))
    assert sandbox.render(job(rgba)) == expected(rgba)
    assert len(sandbox._idle) == 1


def test_broken_pictures_keep_the_child(sandbox: Sandbox, encoded: Encode, picture: Picture) -> None:
    good = encoded(picture(40, 30))
    broken = good[:60] + b"\xff" * 8 + good[68:]
    for _ in range(20):
        with pytest.raises(InvalidImage, match="damaged"):
            sandbox.render(job(broken))
        assert sandbox.render(job(good)) == expected(good)
    assert len(sandbox._idle) == 1


@pytest.mark.parametrize("fault", FAULTS)
def test_a_decoder_that_fails_costs_one_picture(encoded: Encode, picture: Picture, fault: str) -> None:
    sandbox = Sandbox(
        [sys.executable, "-c", FAULTY.format(fault=FAULTS[fault])], answer_seconds=1 if fault == "sleep" else 20
    )
    good, bad = encoded(picture(40, 30)), encoded(picture(13, 13))
    try:
        assert sandbox.render(job(good)) == expected(good)
        doomed = sandbox._idle[0]
        begin = time.monotonic()
        with pytest.raises(InvalidImage, match="decoder failed") as caught:
            sandbox.render(job(bad))
        assert time.monotonic() - begin < 10 and "status" not in caught.value.message
        assert not doomed.is_alive and sandbox._idle == []
        assert sandbox.render(job(good)) == expected(good)
    finally:
        sandbox.close()


def test_a_childs_memory_is_limited(encoded: Encode, picture: Picture) -> None:
    sandbox = Sandbox([sys.executable, "-c", FAULTY.format(fault="bytearray(2 << 30)")])
    good, bad = encoded(picture(40, 30)), encoded(picture(13, 13))
    try:
        with pytest.raises(InvalidImage):
            sandbox.render(job(bad))
        assert sandbox.render(job(good)) == expected(good)
    finally:
        sandbox.close()


def test_a_child_that_died_while_idle_is_replaced(sandbox: Sandbox, encoded: Encode, picture: Picture) -> None:
    good = encoded(picture(40, 30))
    sandbox.warm_up()
    (child,) = sandbox._idle
    child._process.send_signal(signal.SIGTERM)  # ignored
    assert sandbox.render(job(good)) == expected(good) and sandbox._idle == [child]
    child._process.kill()
    child._process.wait()
    assert sandbox.render(job(good)) == expected(good)
    assert sandbox._idle != [child]


def test_threads_share_children_and_closing_ends_them(encoded: Encode, picture: Picture) -> None:
    sandbox, results = Sandbox(), []
    files = [encoded(picture(40, 30, seed=seed)) for seed in range(8)]

    def work(data: bytes) -> None:
        results.extend(sandbox.render(job(data)) == expected(data) for _ in range(10))

    threads = [threading.Thread(target=work, args=(files[n % 8],)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 30
    children = list(sandbox._idle)
    assert 1 <= len(children) <= 3
    sandbox.close()
    assert not any(child.is_alive for child in children)


def test_the_child_holds_no_secrets_and_no_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_API_KEY", "secret")
    sandbox = Sandbox()
    sandbox.warm_up()
    pid = sandbox._idle[0]._process.pid
    with open(f"/proc/{pid}/environ", "rb") as file:
        assert b"secret" not in file.read()
    assert len(os.listdir(f"/proc/{pid}/fd")) == 4  # three times nothing and the socket
    sandbox.close()
    assert not os.path.exists(f"/proc/{pid}")


def test_no_child_means_try_again_later(encoded: Encode) -> None:
    for command in (["/nonexistent/python"], [sys.executable, "-c", "raise SystemExit(1)"]):
        sandbox = Sandbox(command)
        with pytest.raises(Unavailable):
            sandbox.render(job(encoded()))
        sandbox.close()


async def test_an_intake_can_start_its_child_before_the_first_picture(make_intake: Callable[..., object]) -> None:
    intake = make_intake().intake  # type: ignore[attr-defined]
    await asyncio.wait_for(intake.warm_up(), 30)
    assert len(intake._sandbox._idle) == 1
    text_only = make_intake(vision=False).intake  # type: ignore[attr-defined]
    await text_only.warm_up()
    assert text_only._sandbox._idle == []
