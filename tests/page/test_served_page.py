"""The page before the demo model as a person serves it: right answers, real stages, and what it looks like.

Keeps screenshots: idle, an answer, load on three instances, narrow, dark.
"""

from __future__ import annotations

import base64
import itertools
import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.page.conftest import PICTURES, OpenTab, sync_api
from tests.server.test_served import Served

pytestmark = pytest.mark.usefixtures("browser")

QUESTION, ANSWER = "How many red objects are there?", "There are two red objects."
PICTURE = PICTURES / "diamonds.png"


@pytest.fixture(scope="module")
def demo() -> Iterator[Served]:
    server = Served("--ttft-slo", "2s")
    yield server
    server.end()


def load(url: str, seconds: float, num_clients: int = 6) -> threading.Thread:
    """Clients with long and short answers, every other one with a picture, for so long."""
    picture = "data:image/png;base64," + base64.b64encode(PICTURE.read_bytes()).decode()
    text, image = {"type": "text", "text": QUESTION}, {"type": "image_url", "image_url": {"url": picture}}
    end = time.monotonic() + seconds

    def client(number: int) -> None:
        for turn in itertools.count():
            if time.monotonic() > end:
                return
            body = {
                "messages": [{"role": "user", "content": [image, text] if number % 2 else [text]}],
                **{"ignore_eos": True, "temperature": 0, "max_tokens": 60 + 110 * number},
                "cache_salt": f"{number} {turn}",
            }
            head = {"Content-Type": "application/json"}
            request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), head)
            urllib.request.urlopen(request, timeout=60).close()

    def all_of_them() -> None:
        clients = [threading.Thread(target=client, args=(number,)) for number in range(num_clients)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join()

    thread = threading.Thread(target=all_of_them)
    thread.start()
    return thread


@pytest.mark.slow
def test_a_picture_a_question_and_where_the_time_went(demo: Served, new_tab: OpenTab) -> None:
    tab = new_tab(demo.url).open()
    tab.wait("[data-testid=instance]")
    tab.page.locator("#one-topic").wait_for()
    assert tab.get("model-name").inner_text() == "demo"
    assert "begin a new chat" in tab.page.locator("#one-topic").inner_text()
    tab.wait("[data-testid=sample]")
    tab.shot("page-idle")
    # A picture that no other test of this server sends: a cached one is not encoded.
    tab.press("Describe the picture.")
    assert tab.answered().startswith("There is a blue triangle in the top-centre, a pink star")
    tab.get("usage").click()
    facts = tab.get("counts").inner_text().split(" · ")
    id = tab.get("answer-timeline").get_attribute("data-request-id")
    assert "picture)" in facts[0] and "ended by stop" in facts
    spans = tab.get("answer-timeline").get_by_test_id("timeline-span")
    read = spans.evaluate_all("all => all.map(e => [e.dataset.stage, +e.dataset.startMs, +e.dataset.endMs])")
    assert {"preprocess", "encode", "prefill", "decode"} <= {stage for stage, _, _ in read}
    assert all(0 <= start <= end < 60_000 for _, start, end in read)
    # The same request in the live half.
    row = tab.get("timeline").locator(f"[data-testid=timeline-row][data-request-id='{id}']")
    sync_api.expect(row.get_by_test_id("timeline-span")).to_have_count(len(read))  # events come behind the answer
    assert row.locator(".name").inner_text().startswith("1 picture · ")
    tab.wait("[data-testid=tile-goodput]:not([data-attainment=''])")


@pytest.mark.slow
def test_what_is_copied_can_be_run_where_the_picture_is(demo: Served, new_tab: OpenTab, tmp_path: Path) -> None:
    tab = new_tab(demo.url, permissions=["clipboard-read", "clipboard-write"]).open()
    tab.wait("[data-testid=sample]")
    tab.press(QUESTION)
    assert tab.answered() == ANSWER
    tab.get("usage").click()
    (tmp_path / PICTURE.name).write_bytes(PICTURE.read_bytes())
    for name, command in (("Copy as curl", ["bash", "-c"]), ("Copy as Python", [sys.executable, "-c"])):
        tab.press(name)
        tab.page.get_by_role("button", name="Copied").first.wait_for()
        text = tab.page.evaluate("navigator.clipboard.readText()")
        assert "base64" in text and len(text) < 2000
        done = subprocess.run([*command, text], capture_output=True, text=True, cwd=tmp_path, timeout=60)
        assert ANSWER in done.stdout, done.stderr
        tab.page.get_by_role("button", name=name).wait_for()


@pytest.mark.slow
def test_a_picture_that_is_none_spoils_nothing(demo: Served, new_tab: OpenTab) -> None:
    tab = new_tab(demo.url).open()
    tab.expected = ("400",)
    tab.get("image-input").set_input_files({"name": "fake.png", "mimeType": "image/png", "buffer": b"no picture"})
    tab.wait("[data-testid=image-preview]")
    tab.ask("Describe the picture.")
    tab.wait("[data-testid=note]:not([hidden])")
    assert tab.page.locator(".message").count() == 0
    tab.press("Remove fake.png")
    tab.ask("What is two plus three?")
    assert tab.answered() == "Two plus three is five."


@pytest.mark.slow
def test_under_load_lanes_are_busy_and_counts_move(demo: Served, new_tab: OpenTab) -> None:
    tab = new_tab(demo.url).open()
    working = load(demo.url, 1.5)
    try:
        lane = tab.page.locator("[data-testid=stream-util][data-stream=language]")
        tab.wait_for("+document.querySelector('[data-stream=language]')?.dataset.value > 0.2")
        tab.wait_for("document.querySelector('[data-stream=language] .now').textContent.includes('decode')")
        tab.wait("[data-testid=timeline-row] .running.decode")
        assert lane.locator(".bar .decode").evaluate("e => e.getBoundingClientRect().width") > 0
        assert int(tab.get("cache-kv").get_attribute("data-used") or 0) > 0
    finally:
        working.join()
    tab.wait_for("+document.querySelector('[data-testid=cache-kv]').dataset.used === 0")


PLACES = {"page-narrow": (360, 760), "page-tablet": (820, 1100), "page-answer": (1440, 900), "page-wide": (1920, 1080)}


@pytest.mark.drawn
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_it_looks_like(demo: Served, new_tab: OpenTab, scheme: str) -> None:
    """Screenshots to be looked at, idle and with answers, and that nothing sticks out."""
    for name, (width, height) in PLACES.items():
        options = {"viewport": {"width": width, "height": height}, "has_touch": width < 1000}
        tab = new_tab(demo.url, color_scheme=scheme, **options).open()
        tab.wait("[data-testid=sample]")
        tab.shot(f"{name}-{scheme}-idle")
        tab.press("Where is the yellow diamond?")
        assert tab.answered() == "The yellow diamond is in the bottom-right."
        tab.get("usage").click()
        tab.page.mouse.move(5, 5)
        tab.page.wait_for_timeout(500)
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
        tab.shot(f"{name}-{scheme}")
        tab.press("Engine")
        tab.page.wait_for_timeout(500)
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
        tab.shot(f"{name}-{scheme}-engine")


@pytest.mark.slow
def test_load_on_three_instances(new_tab: OpenTab) -> None:
    server = Served("--topology", "E+P+D")
    try:
        tab = new_tab(server.url).open()
        tab.wait("[data-testid=instance] >> nth=2")
        tab.press(QUESTION)
        assert tab.answered() == ANSWER
        stages = (
            tab.get("answer-timeline")
            .get_by_test_id("timeline-span")
            .evaluate_all("all => all.map(e => e.dataset.stage)")
        )
        assert {"encode", "pull_features", "prefill", "pull_kv", "decode"} <= set(stages)
        working = load(server.url, 18.0, 10)
        stop = time.monotonic() + 14
        seen: set[str | None] = set()
        while time.monotonic() < stop:
            seen |= set(tab.get("topology-dot").evaluate_all("all => all.map(d => d.dataset.instance)"))
            tab.page.wait_for_timeout(100)
        tab.press("10 s")
        tab.shot("page-load")
        tab.press("Engine")
        tab.page.wait_for_timeout(500)
        tab.shot("page-engine")
        working.join()
        assert "d0" in seen
    finally:
        server.end()
