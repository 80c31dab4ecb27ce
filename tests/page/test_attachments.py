"""Pictures and videos in a real browser: what the model takes, what is too large, and how a video looks."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from hydra_engine.core.prompting import MediaLimits
from tests.calls import plain
from tests.page.conftest import OpenTab, Scripted, Tab
from tests.page.test_chat import STAR, give

pytestmark = pytest.mark.usefixtures("browser")
Serve = Callable[..., Scripted]

VIDEOS = MediaLimits(2, 4000, 1, 100_000)


@pytest.fixture
def film(tmp_path: Path) -> Path:
    """A second of orange."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="webm") as file:
        stream = file.add_stream("libvpx", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for _ in range(10):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), (255, 140, 0), np.uint8), format="rgb24")
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    path = tmp_path / "film.webm"
    path.write_bytes(buffer.getvalue())
    return path


def refused(tab: Tab, *files: Any) -> str:
    """The sentence for what is chosen; nothing is attached."""
    number = tab.get("image-preview").count()
    tab.page.evaluate("document.querySelector('#note').hidden = true")
    tab.get("image-input").set_input_files(list(files))
    tab.wait("[data-testid=note]:not([hidden])")
    assert tab.get("image-preview").count() == number
    return str(tab.get("note").inner_text())


def zeros(name: str, kind: str, size: int) -> dict[str, Any]:
    return {"name": name, "mimeType": kind, "buffer": bytes(size)}


@pytest.mark.slow
def test_a_video_is_attached_shown_sent_and_kept(served: Scripted, new_tab: OpenTab, film: Path) -> None:
    served.engine.media_limits = VIDEOS
    tab = new_tab(served.url).open()
    tab.page.get_by_text("Drop a picture or a video here, or ask something").wait_for()
    assert "video/mp4" in (tab.get("image-input").get_attribute("accept") or "")
    tab.get("image-input").set_input_files([film])
    tab.wait("[data-testid=image-preview] img")
    colour = tab.page.evaluate("""async () => {
      const image = document.querySelector("[data-testid=image-preview] img");
      await image.decode();
      const canvas = Object.assign(document.createElement("canvas"), {width: 1, height: 1});
      canvas.getContext("2d").drawImage(image, 0, 0, 1, 1);
      return [...canvas.getContext("2d").getImageData(0, 0, 1, 1).data];
    }""")
    assert colour[0] > 200 and 90 < colour[1] < 190 and colour[2] < 70
    words = "A conversation can have 1 video here; begin a new chat, or remove one."
    assert refused(tab, film) == words
    # What no browser plays is a plain tile.
    tab.press("Remove film.webm")
    give(tab, "drop", ("odd.avi", "video/x-msvideo"))
    tab.wait("[data-testid=image-preview] .plain svg")
    tab.press("Remove odd.avi")
    tab.get("image-input").set_input_files([film])
    tab.ask("What happens?")
    tab.answered()
    [part, text] = plain(served.engine.submissions[0].messages)[-1]["content"]
    url = part["video_url"]["url"]
    assert (part["type"], text["text"]) == ("video_url", "What happens?")
    assert base64.b64decode(url.removeprefix("data:video/webm;base64,")) == film.read_bytes()
    assert refused(tab, film) == words  # it goes along with the next question
    tab.page.reload()
    tab.wait(".sent .thumbnail.video img")
    tab.press("film.webm")
    tab.wait_for("document.querySelector('#zoom video')?.currentTime > 0.1")
    tab.page.keyboard.press("Escape")
    tab.page.get_by_role("dialog").wait_for(state="hidden")
    tab.page.locator("video").wait_for(state="detached")
    tab.ask("And then?")
    tab.wait(".message.assistant >> nth=1")
    tab.answered()
    assert plain(served.engine.submissions[-1].messages)[0]["content"][0] == part


@pytest.mark.slow
def test_what_the_model_or_the_server_does_not_take_is_refused_before_the_upload(
    scripted: Serve, new_tab: OpenTab, film: Path
) -> None:
    served = scripted(max_body_bytes=1 << 16)
    served.engine.media_limits = MediaLimits(2, 40_000)
    tab = new_tab(served.url).open()
    tab.page.on("request", lambda request: tab.problems.append(request.url) if request.method == "POST" else None)
    tab.wait_for("document.querySelector('#image-input').accept.endsWith('bmp')")
    assert refused(tab, film) == "This model takes no videos; send pictures instead."
    assert refused(tab, zeros("a.heic", "image/heic", 9)) == "a.heic is not a PNG, JPEG, WebP, GIF or BMP picture."
    assert refused(tab, zeros("a.png", "image/png", 50_000)) == "a.png has 49 KiB; a picture may have 39 KiB here."
    tab.get("image-input").set_input_files([zeros("b.png", "image/png", 30_000)])
    tab.wait("[data-testid=image-preview]")
    words = "c.png does not fit: all of a conversation may have 64 KiB here."
    assert refused(tab, zeros("c.png", "image/png", 20_000)) == words
    tab.get("image-input").set_input_files([STAR])
    tab.wait("[data-testid=image-preview] >> nth=1")
    assert refused(tab, STAR) == "A conversation can have 2 pictures here; begin a new chat, or remove one."
    # Other models, on the same page: the server has been started again.
    served.engine.media_limits = VIDEOS
    tab.wait_for("document.querySelector('#image-input').accept.includes('video/mp4')")
    words = "big.mp4 has 98 KiB; a video may have 98 KiB here."
    assert refused(tab, zeros("big.mp4", "video/mp4", 100_001)) == words
    words = "a.txt is not a PNG, JPEG, WebP, GIF or BMP picture, nor an MP4, MOV, WebM, MKV or AVI video."
    assert refused(tab, zeros("a.txt", "text/plain", 1)) == words
    served.engine.media_limits = MediaLimits()
    tab.page.locator("#attach").wait_for(state="hidden")
    assert tab.page.locator("#lead").inner_text() == "Ask something"
    give(tab, "paste", ("x.png", "image/png"))
    tab.page.get_by_text("This model takes no pictures.").wait_for()
    assert tab.page.locator(".samples img:visible").count() == 0 < tab.page.locator(".samples button:visible").count()
