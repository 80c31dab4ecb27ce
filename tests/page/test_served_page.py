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

from tests.page.conftest import PICTURES, OpenTab
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


def test_a_picture_a_question_and_where_the_time_went(demo: Served, new_tab: OpenTab, tmp_path: Path) -> None:
    tab = new_tab(demo.url, permissions=["clipboard-read", "clipboard-write"]).open()
    tab.wait("[data-testid=instance]")
    assert tab.get("model-name").inner_text() == "demo"
    tab.shot("page-idle")
    tab.get("image-input").set_input_files([PICTURE])
    tab.wait("[data-testid=image-preview]")
    tab.be_certain()
    tab.ask(QUESTION)
    assert tab.answered() == ANSWER
    facts = tab.get("usage").locator("span").all_inner_texts()
    assert "picture)" in facts[0] and "stop" in facts
    spans = tab.get("answer-timeline").get_by_test_id("timeline-span")
    read = spans.evaluate_all("all => all.map(e => [e.dataset.stage, +e.dataset.startMs, +e.dataset.endMs])")
    assert {"preprocess", "encode", "prefill", "decode"} <= {stage for stage, _, _ in read}
    assert all(0 <= start <= end < 60_000 for _, start, end in read)
    # The same request in the live half.
    request_id = facts[-1]
    row = tab.get("timeline").locator(f"[data-testid=timeline-row][data-request-id='{request_id}']")
    row.wait_for()
    assert row.get_by_test_id("timeline-span").count() == len(read)
    tab.wait("[data-testid=tile-goodput]:not([data-attainment=''])")
    tab.page.mouse.move(5, 5)
    tab.shot("page-answer")
    # What is copied can be run, where the picture is.
    (tmp_path / PICTURE.name).write_bytes(PICTURE.read_bytes())
    for name, command in (("Copy as curl", ["bash", "-c"]), ("Copy as Python", [sys.executable, "-c"])):
        tab.page.get_by_role("button", name=name).click()
        tab.page.get_by_role("button", name="Copied").first.wait_for()
        text = tab.page.evaluate("navigator.clipboard.readText()")
        assert "base64" in text and len(text) < 2000
        done = subprocess.run([*command, text], capture_output=True, text=True, cwd=tmp_path, timeout=60)
        assert ANSWER in done.stdout, done.stderr
        tab.page.wait_for_timeout(50)


def test_narrow_and_dark(demo: Served, new_tab: OpenTab) -> None:
    for name, options in (
        ("page-narrow", {"viewport": {"width": 360, "height": 760}, "has_touch": True}),
        ("page-dark", {"color_scheme": "dark"}),
    ):
        tab = new_tab(demo.url, **options).open()
        tab.get("image-input").set_input_files([PICTURES / "shapes.png"])
        tab.wait("[data-testid=image-preview]")
        tab.be_certain()
        tab.ask("Where is the yellow diamond?")
        assert tab.answered() == "The yellow diamond is in the bottom-right."
        tab.wait("[data-testid=timeline-row][data-request-id]")
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= tab.page.viewport_size["width"]
        tab.page.mouse.move(5, 5)
        tab.page.evaluate("document.activeElement.blur()")
        tab.shot(name, full_page=name == "page-narrow")


def test_under_load_lanes_are_busy_and_counts_move(demo: Served, new_tab: OpenTab) -> None:
    tab = new_tab(demo.url).open()
    working = load(demo.url, 3.0)
    try:
        lane = tab.page.locator("[data-testid=stream-util][data-stream=language]")
        tab.wait_for("+document.querySelector('[data-stream=language]')?.dataset.value > 0.2")
        tab.wait_for("document.querySelector('[data-stream=language] .now').textContent.includes('decode')")
        tab.wait("[data-testid=topology-dot].decode")
        tab.wait("[data-testid=timeline-row] .running.decode")
        assert lane.locator(".bar .decode").evaluate("e => e.getBoundingClientRect().width") > 0
        assert int(tab.get("cache-kv").get_attribute("data-used") or 0) > 0
    finally:
        working.join()
    tab.wait_for("+document.querySelector('[data-testid=cache-kv]').dataset.used === 0")


@pytest.mark.slow
def test_load_on_three_instances(new_tab: OpenTab) -> None:
    server = Served("--topology", "E+P+D")
    try:
        tab = new_tab(server.url).open()
        tab.wait("[data-testid=instance] >> nth=2")
        tab.be_certain()
        tab.get("image-input").set_input_files([PICTURE])
        tab.wait("[data-testid=image-preview]")
        tab.ask(QUESTION)
        assert tab.answered() == ANSWER
        stages = (
            tab.get("answer-timeline")
            .get_by_test_id("timeline-span")
            .evaluate_all("all => all.map(e => e.dataset.stage)")
        )
        assert {"encode", "pull_features", "prefill", "pull_kv", "decode"} <= set(stages)
        working = load(server.url, 16.0, 10)
        stop = time.monotonic() + 14
        seen: set[str | None] = set()
        while time.monotonic() < stop:
            seen |= set(tab.get("topology-dot").evaluate_all("all => all.map(d => d.dataset.instance)"))
            tab.page.wait_for_timeout(100)
        tab.page.get_by_role("button", name="10 s").click()
        tab.shot("page-load")
        working.join()
        assert "d0" in seen
    finally:
        server.end()
