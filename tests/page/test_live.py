"""The live half of the page before a scripted engine whose gauges a test sets: lanes, queues, caches, limits, dots."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from hydra_engine.core.messages import BudgetReport, InstanceSummary, LimitSummary, StepReport, TransferReport
from hydra_engine.core.outputs import StageSpan
from hydra_engine.observe.live import LiveRequest
from tests.page.conftest import OpenTab, Scripted
from tests.server.stub import example_status, instances_of

pytestmark = pytest.mark.usefixtures("browser")
Serve = Callable[..., Scripted]

SPANS = (
    StageSpan("tokenize", 0.0, 0.05),
    StageSpan("encode_wait", 0.05, 0.1, "e0", "vision"),
    StageSpan("encode", 0.1, 0.3, "e0", "vision", 2, 576),
    StageSpan("pull_features", 0.3, 0.32, "pd0", "transfer"),
    StageSpan("prefill", 0.32, 0.5, "pd0", "language", 1, 600),
    StageSpan("decode", 0.5, 1.0, "pd0", "language", 4, 20),
)


def show(served: Scripted, **changes: Any) -> None:
    """One instance that encodes and one that does the rest, the latter with these gauges and limits."""
    now = time.monotonic()
    language = StepReport(True, now - 0.001, 3, 2, 0, 131)
    busy = {"language_step": language, "num_decoding": 2, "transfer": TransferReport(pulled=4, pulled_bytes=4_000_000)}
    serving = example_status(**({"time_s": now} | busy | changes))
    encoding = example_status(time_s=now, vision_step=StepReport(True, now - 0.001, 0, 0, 2, 1152))
    served.engine.reports = {"e0": encoding, "pd0": serving}
    served.engine.states = instances_of("E+PD", e0={"status": encoding}, pd0={"status": serving})
    limits = LimitSummary(tpot_limit_s=0.04, ttft_limit_s=0.5)
    served.engine.summaries = tuple(summary(name, limits) for name in ("e0", "pd0"))


def summary(name: str, limits: LimitSummary) -> InstanceSummary:
    texts = dict.fromkeys(("role", "model", "family", "device", "dtype", "backend"), "cpu")
    sizes = (
        "weights_bytes",
        "kv_cache_bytes",
        "image_cache_bytes",
        "num_kv_blocks",
        "num_image_blocks",
        "max_model_len",
    )
    rest = dict.fromkeys((*sizes, "token_budget", "image_budget", "threads"), 100)
    return InstanceSummary(
        name=name, **texts, **rest, deterministic=True, kv_block_size=16, image_block_size=64, load_s=1.0, limits=limits
    )


def test_lanes_queues_caches_and_limits(scripted: Serve, new_tab: OpenTab) -> None:
    served = scripted()
    budget = BudgetReport(
        tpot_limit_s=0.04, token_budget=96, image_budget=1024, vision_s=0.012, decode_steps=200, late_steps=4
    )
    show(served, budget=budget)
    tab = new_tab(served.url).open()
    card = tab.page.locator("[data-testid=instance][data-name=pd0]")
    card.wait_for()
    lane = card.locator("[data-testid=stream-util][data-stream=language]")
    assert lane.locator(".now").inner_text() == "prefill 2 prompts, 128 tokens + decode 3"
    assert not card.locator("[data-stream=vision]").is_visible()
    vision = tab.page.locator("[data-name=e0] [data-stream=vision]")
    assert vision.locator(".now").inner_text() == "encode 2 pictures, 1,152 patches"
    values = {name: card.get_by_test_id(f"queue-{name}") for name in ("encode", "prefill", "decode", "move")}
    assert not values.pop("encode").is_visible()
    assert {name: queue.get_attribute("data-value") for name, queue in values.items()} == {
        "prefill": "3",
        "decode": "2",
        "move": "0",
    }
    assert "4.0 MB fetched" in values["move"].inner_text()
    for mark, used, total, words in (("cache-kv", "25", "100", "400 / 1,600"), ("cache-image", "4", "8", "256 / 512")):
        meter = card.get_by_test_id(mark)
        assert (meter.get_attribute("data-used"), meter.get_attribute("data-total")) == (used, total)
        assert words in meter.inner_text()
    words = card.get_by_test_id("budget").inner_text()
    assert "limit 40 ms: 98 % of steps in time" in words and "96 prompt tokens" in words and "beside it 12 ms" in words
    # The busy share follows the counters.
    before = example_status().language_busy_s
    now = time.monotonic()
    for step in range(1, 12):
        show(
            served,
            time_s=now + step * 0.2,
            language_busy_s=before + step * 0.1,
            language_step=StepReport(False, 0.0, 3),
        )
        tab.page.wait_for_timeout(120)
    share = float(lane.get_attribute("data-value") or 0)
    assert 0.4 < share < 0.6 and lane.locator(".share").inner_text().endswith("%")
    assert tab.page.locator("#load").inner_text() == "6 running, 6 waiting"


def test_attainment_and_goodput(scripted: Serve, new_tab: OpenTab) -> None:
    served = scripted()
    show(served)
    tab = new_tab(served.url).open()
    assert "no limits set" in tab.get("tile-goodput").inner_text()
    for limits in ({"ttft_ms": 500}, {"ttft_ms": 500}, {"ttft_ms": 500}, {"ttft_ms": 100}):
        body = {"messages": [{"role": "user", "content": "x"}], **limits}
        assert tab.page.request.post(served.url + "/v1/chat/completions", data=body).ok
    tab.wait("[data-testid=tile-goodput][data-attainment='0.7500']")
    assert "limits kept 75 %" in tab.get("tile-goodput").inner_text()
    assert tab.get("tile-goodput").get_attribute("data-tip") == "requests that kept their limit: TTFT 75 %"
    assert "limit 500 ms" in tab.get("tile-ttft").inner_text()


def test_requests_are_dots_that_go_where_the_requests_go(scripted: Serve, new_tab: OpenTab) -> None:
    served = scripted()
    show(served)
    tab = new_tab(served.url).open()
    tab.wait("[data-testid=topology-node][data-name=pd0]")
    assert tab.page.locator("#topology text.kind").all_text_contents() == ["features"]
    places = []
    for stage, instance in (("queued", ""), ("encode", "e0"), ("prefill", "pd0"), ("decode", "pd0")):
        served.engine.running = [LiveRequest("chatcmpl-7", time.monotonic(), None, 0, stage, instance)]
        dot = tab.page.locator(
            f"[data-testid=topology-dot][data-instance='{instance}'].{ {'queued': 'wait'}.get(stage, stage) }"
        )
        dot.wait_for()
        places.append(dot.evaluate("d => d.style.transform"))
    assert len(set(places)) == 3 and places[2] == places[3]
    assert tab.page.locator("#topology-legend").inner_text() == "1 request running"
    served.engine.running = []
    tab.page.locator("[data-testid=topology-dot]").wait_for(state="detached")


def test_motion_stops_for_those_who_ask(scripted: Serve, new_tab: OpenTab) -> None:
    served = scripted()
    show(served)
    served.engine.running = [LiveRequest("chatcmpl-7", time.monotonic(), None, 0, "decode", "pd0")]
    tab = new_tab(served.url, reduced_motion="reduce").open()
    duration = tab.wait("[data-testid=topology-dot]").evaluate("d => getComputedStyle(d).transitionDuration")
    assert set(duration.split(", ")) == {"0s"}
    served.engine.ring.add("chatcmpl-8", time.monotonic() - 1, SPANS)
    tab.wait("[data-testid=timeline-row][data-request-id='chatcmpl-8']")
    assert tab.get("topology-dot").count() == 1


def test_the_window_slides_pauses_tells_and_can_be_taken_along(scripted: Serve, new_tab: OpenTab) -> None:
    served = scripted()
    show(served)
    tab = new_tab(served.url).open()
    window = tab.get("timeline")
    assert "No requests lately" in window.inner_text()
    arrival = time.monotonic() - 1.2
    served.engine.ring.add("chatcmpl-abc", arrival, SPANS)
    served.engine.running = [LiveRequest("chatcmpl-run", arrival, arrival + 0.5, 12, "decode", "pd0")]
    row = window.locator("[data-request-id='chatcmpl-abc']")
    row.wait_for()
    marks = ("data-stage", "data-start-ms", "data-end-ms")
    found = row.get_by_test_id("timeline-span").evaluate_all(
        f"all => all.map(e => {list(marks)}.map(n => e.getAttribute(n)))"
    )
    assert sorted(found) == sorted([s.stage, f"{s.start_s * 1e3:.3f}", f"{s.end_s * 1e3:.3f}"] for s in SPANS)
    assert "decode 500 ms" in (row.get_attribute("aria-label") or "")
    assert window.locator("[data-request-id='chatcmpl-run'] .running.decode").count() == 1
    box = "document.querySelector('[data-request-id=\"chatcmpl-abc\"] .track').getAttribute('viewBox')"
    first = tab.page.evaluate(box)
    tab.wait_for(f"{box} !== '{first}'")
    tab.get("pause").click()
    paused = tab.page.evaluate(box)
    tab.page.wait_for_timeout(600)
    assert tab.page.evaluate(box) == paused
    tab.page.get_by_role("button", name="60 s").click()
    assert tab.page.evaluate(box).split()[2] == "60000"
    tab.get("pause").click()
    tab.wait_for(f"{box}.split()[0] !== '{paused.split()[0]}'")
    row.click()
    assert tab.page.locator("#request-details code").inner_text() == "chatcmpl-abc"
    assert tab.page.locator("#request-details [data-row]").evaluate_all("all => all.map(e => e.dataset.row)") == [
        *("intake", "encode", "move", "prefill", "decode")
    ]
    tab.page.get_by_role("button", name="By lane").click()
    lanes = window.locator("[data-lane]")
    assert lanes.evaluate_all("all => all.map(e => [e.dataset.lane, e.querySelectorAll('rect').length])") == [
        ["e0 vision", 1],
        ["pd0 language", 2],
    ]
    with tab.page.expect_download() as waiting:
        tab.get("download-trace").click()
    events = json.loads(waiting.value.path().read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert [event["name"] for event in complete] == [span.stage for span in SPANS]
    assert complete[2]["ts"] == 100_000 and complete[2]["dur"] == 200_000 and complete[2]["args"]["tokens"] == 576


def test_a_hidden_tab_closes_its_stream_and_catches_up(scripted: Serve, new_tab: OpenTab) -> None:
    served = scripted()
    show(served)
    tab = new_tab(served.url).open()
    hide = """hidden => {
      Object.defineProperty(document, "hidden", {value: hidden, configurable: true});
      document.dispatchEvent(new Event("visibilitychange"));
    }"""
    with tab.page.expect_event("requestfailed", lambda request: "ui/events" in request.url):
        tab.page.evaluate(hide, True)
    served.engine.ring.add("chatcmpl-missed", time.monotonic() - 1, SPANS)
    with tab.page.expect_request("**/ui/events?since=0"):
        tab.page.evaluate(hide, False)
    tab.wait("[data-request-id='chatcmpl-missed']")


def test_a_lost_connection_is_shown_and_found_again(scripted: Serve, new_tab: OpenTab) -> None:
    served = scripted()
    show(served)
    tab = new_tab(served.url).open()
    tab.expected = ("ERR_", "Failed to load")
    tab.page.context.set_offline(True)
    tab.page.evaluate("dispatchEvent(new PageTransitionEvent('pageshow', {persisted: true}))")
    tab.wait("[data-testid=connection][data-state=lost]")
    tab.page.context.set_offline(False)
    tab.wait("[data-testid=connection][data-state=open]")
    served.engine.state = "loading"
    tab.wait_for("document.querySelector('.connection b').textContent === 'loading'")
    tab.wait_for("document.querySelector('#topology').textContent.includes('when the model has loaded')")


_CONTRAST = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const linear = (c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const light = (color) => color.slice(0, 3).map((c) => linear(c / 255))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] > 0.95) return c;
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || e.closest("svg, noscript, [hidden], .hidden") || !e.getClientRects().length) continue;
    const [a, b] = [light(parse(getComputedStyle(e).color)), light(ground(e))].sort((x, y) => y - x);
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < 4.5) low.push(`${e.className} ${e.textContent.trim().slice(0, 30)} ${contrast.toFixed(2)}`);
  }
  return low;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_and_the_choice_of_a_theme(scripted: Serve, new_tab: OpenTab, scheme: str) -> None:
    served = scripted()
    show(served, budget=BudgetReport(tpot_limit_s=0.04, decode_steps=1))
    served.engine.ring.add("chatcmpl-abc", time.monotonic() - 1.2, SPANS)
    tab = new_tab(served.url, color_scheme=scheme).open()
    tab.ask("# Words\n`code` and [a](https://example.org)\n\n> quoted")
    tab.answered()
    tab.page.get_by_role("button", name="Settings").click()
    tab.wait("[data-request-id='chatcmpl-abc']")
    assert tab.page.evaluate(_CONTRAST) == []
    ground = "getComputedStyle(document.body).backgroundColor"
    own = tab.page.evaluate(ground)
    button = tab.page.locator("#theme-button")
    seen = {}
    for _ in range(3):
        button.click()
        seen[button.inner_text().strip()] = tab.page.evaluate(ground)
    assert seen["Theme: light"] != seen["Theme: dark"] and seen["Theme: system"] == own == seen[f"Theme: {scheme}"]
    button.click()
    button.click()
    tab.page.reload()
    assert tab.page.evaluate(ground) == seen["Theme: dark"]


@pytest.mark.parametrize("width", [360, 800])
def test_narrow_pages_stack_and_have_room_for_fingers(scripted: Serve, new_tab: OpenTab, width: int) -> None:
    served = scripted()
    show(served, budget=BudgetReport(tpot_limit_s=0.04, decode_steps=1))
    served.engine.answer = "```\n" + "x" * 300 + "\n```"
    tab = new_tab(served.url, viewport={"width": width, "height": 740}, has_touch=True).open()
    tab.ask("a" * 200)
    tab.answered()
    tab.page.get_by_role("button", name="Settings").click()
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
    chat, live = (tab.page.locator(name).bounding_box() for name in (".chat", ".live"))
    assert chat and live and chat["y"] + chat["height"] <= live["y"] and chat["width"] == live["width"] == width
    small = tab.page.evaluate("""() => {
      const all = "button, .button, input:not(.hidden), select, textarea, summary";
      const height = (e) => (e.getClientRects().length ? e.getBoundingClientRect().height : 44);
      return [...document.querySelectorAll(all)].filter((e) => height(e) < 44).map((e) => e.outerHTML.slice(0, 80));
    }""")
    assert small == []
