"""The live half of the page before a scripted engine whose gauges a test sets: lanes, queues, caches, limits, dots."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hydra_engine.core.instances import Condition
from hydra_engine.core.outputs import StageSpan, Usage
from hydra_engine.core.reports import BudgetReport, InstanceSummary, LimitSummary, StepReport, TransferReport
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.server.page import events as page_module
from hydra_engine.telemetry.trace import LiveRequest
from tests.page.conftest import OpenTab, Scripted
from tests.server.stub import StubEngine, example_status, instances_of

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


def show(served: Scripted, pd0: dict[str, Any] | None = None, **changes: Any) -> None:
    """Shows one instance that encodes and one that does the rest, the latter in this state, with these gauges and
    limits."""
    now = time.monotonic()
    language = StepReport(True, now - 0.001, 3, 2, 0, 131)
    busy = {"language_step": language, "num_decoding": 2, "transfer": TransferReport(pulled=4, pulled_bytes=4_000_000)}
    serving = example_status(**({"time_s": now} | busy | changes))
    encoding = example_status(time_s=now, vision_step=StepReport(True, now - 0.001, 0, 0, 2, 1152))
    served.engine.reports = {"e0": encoding, "pd0": serving}
    served.engine.states = instances_of("E+PD", e0={"status": encoding}, pd0={"status": serving, **(pd0 or {})})
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


@pytest.mark.slow
def test_lanes_queues_caches_and_limits(served: Scripted, new_tab: OpenTab) -> None:
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
    assert "3.8 MiB fetched" in values["move"].inner_text()
    meters = (("cache-kv", "25", "100", "400 / 1,600 tokens"), ("cache-image", "4", "8", "256 / 512 features"))
    for mark, used, total, words in meters:
        meter = card.get_by_test_id(mark)
        assert (meter.get_attribute("data-used"), meter.get_attribute("data-total")) == (used, total)
        assert words in meter.inner_text()
    limit = card.get_by_test_id("budget")
    assert "98 % of steps within 40 ms" in limit.inner_text()
    limit.hover()
    tip = tab.page.locator("#tooltip").inner_text()
    assert "96 prompt tokens" in tip and "1,024 patches" in tip and "12 ms of encoding beside it" in tip
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


@pytest.mark.slow
def test_a_lost_instance_is_not_green_and_its_gauges_are_not_of_now(served: Scripted, new_tab: OpenTab) -> None:
    show(served)
    tab = new_tab(served.url).open()
    tab.wait("[data-testid=connection][data-health=good]")
    dot = "getComputedStyle(document.querySelector('.connection i')).backgroundColor"
    good = tab.page.evaluate(dot)
    show(served, pd0={"condition": Condition.STARTING, "status": None})
    tab.wait("[data-testid=connection][data-health=fair]")
    assert tab.page.locator(".connection b").inner_text() == "pd0 starting"
    card = tab.page.locator("[data-testid=instance][data-name=pd0][data-gone=true]")
    assert "Nothing runs here now." in card.inner_text()
    assert not card.locator("[data-stream=language]").is_visible() and not card.get_by_test_id("cache-kv").is_visible()
    served.engine.state = "instance_lost"
    tab.wait("[data-testid=connection][data-health=bad]")
    bad = tab.page.evaluate(dot)
    assert tab.page.locator(".connection b").inner_text() == "instance lost" and bad != good


@pytest.mark.slow
def test_attainment_goodput_and_errors(scripted: Serve, new_tab: OpenTab) -> None:
    served = scripted()
    show(served)
    tab = new_tab(served.url).open()
    assert "of 0 requests" in tab.get("tile-goodput").inner_text()
    for limits in ({"ttft_ms": 500}, {"ttft_ms": 500}, {"ttft_ms": 500}, {"ttft_ms": 100}):
        body = {"messages": [{"role": "user", "content": "x"}], **limits}
        assert tab.page.request.post(served.url + "/v1/chat/completions", data=body).ok
    tab.wait("[data-testid=tile-goodput][data-attainment='0.7500']")
    assert "limits kept 75 %" in tab.get("tile-goodput").inner_text()
    assert (tab.get("tile-goodput").get_attribute("data-tip") or "").endswith("TTFT 75 %")
    assert "limit 500 ms" in tab.get("tile-ttft").inner_text()


@pytest.mark.slow
def test_requests_are_dots_that_go_where_the_requests_go(served: Scripted, new_tab: OpenTab) -> None:
    tab = new_tab(served.url).open()
    tab.wait("[data-testid=instance]")
    assert not tab.get("topology").is_visible()  # of a single instance there is nothing to see
    show(served, {"node": "host-b"})
    tab.wait("[data-testid=topology-node][data-name=pd0]")
    assert tab.page.locator("#topology text.machine").all_text_contents() == ["on host-b"]
    assert "pd0 (PD on host-b)" in (tab.page.locator("#topology svg").get_attribute("aria-label") or "")
    assert tab.page.locator("#topology text.kind").all_text_contents() == ["features"]
    places = []
    for stage, instance in (("queue", ""), ("encode", "e0"), ("prefill", "pd0"), ("decode", "pd0")):
        served.engine.running = [LiveRequest("chatcmpl-7", time.monotonic(), None, 0, stage, instance)]
        dot = tab.page.locator(
            f"[data-testid=topology-dot][data-instance='{instance}'].{ {'queue': 'wait'}.get(stage, stage) }"
        )
        dot.wait_for()
        places.append(dot.evaluate("d => d.style.transform"))
    assert len(set(places)) == 3 and places[2] == places[3]
    assert tab.page.locator("#topology-legend").inner_text() == "1 request running"
    # Each stage that a snapshot has told is a bar of its own.
    row = tab.get("timeline").locator("[data-request-id='chatcmpl-7']")
    assert row.locator("rect").evaluate_all("all => all.map(e => e.classList[1])") == [
        *("wait", "encode", "prefill", "decode")
    ]
    assert row.locator(".name").inner_text() == "writing the answer"
    served.engine.running = []
    tab.page.locator("[data-testid=topology-dot]").wait_for(state="detached")


@pytest.mark.slow
def test_motion_stops_for_those_who_ask(served: Scripted, new_tab: OpenTab) -> None:
    show(served)
    served.engine.running = [LiveRequest("chatcmpl-7", time.monotonic(), None, 0, "decode", "pd0")]
    tab = new_tab(served.url, reduced_motion="reduce").open()
    duration = tab.wait("[data-testid=topology-dot]").evaluate("d => getComputedStyle(d).transitionDuration")
    assert set(duration.split(", ")) == {"0s"}
    served.engine.ring.add("chatcmpl-8", time.monotonic() - 1, SPANS)
    tab.wait("[data-testid=timeline-row][data-request-id='chatcmpl-8']")
    assert tab.get("topology-dot").count() == 1


@pytest.mark.slow
def test_the_window_slides_zooms_tells_and_can_be_taken_along(served: Scripted, new_tab: OpenTab) -> None:
    show(served)
    tab = new_tab(served.url).open()
    window = tab.get("timeline")
    assert "No requests in this time" in window.inner_text()
    arrival = time.monotonic() - 1.2
    served.engine.ring.add("chatcmpl-abc", arrival, SPANS, Usage(1187, 20, 1152, 0, 2))
    served.engine.running = [LiveRequest("chatcmpl-run", arrival, arrival + 0.5, 12, "decode", "pd0")]
    row = window.locator("[data-request-id='chatcmpl-abc']")
    row.wait_for()
    marks = ("data-stage", "data-start-ms", "data-end-ms")
    found = row.get_by_test_id("timeline-span").evaluate_all(
        f"all => all.map(e => {list(marks)}.map(n => e.getAttribute(n)))"
    )
    assert sorted(found) == sorted([s.stage, f"{s.start_s * 1e3:.3f}", f"{s.end_s * 1e3:.3f}"] for s in SPANS)
    assert row.locator(".name").inner_text() == "2 pictures · 1,187 tokens"
    assert "decode 500 ms" in (row.get_attribute("aria-label") or "")
    assert window.locator("[data-request-id='chatcmpl-run'] .running.decode").count() == 1
    box = "document.querySelector('[data-request-id=\"chatcmpl-abc\"] .track').getAttribute('viewBox')"
    first = tab.page.evaluate(box)
    tab.wait_for(f"{box} !== '{first}'")
    tab.press("60 s")
    assert tab.page.evaluate(box).split()[2] == "60000"
    tab.press("1 s")
    assert window.locator("[data-request-id='chatcmpl-run'] .track").get_attribute("viewBox").split()[2] == "1000"
    tab.press("10 s")

    def shown() -> tuple[float, float]:
        start, _, width, _ = map(float, tab.page.evaluate(box).split())
        return start, width

    # The wheel zooms where the pointer is, and what is shown then stands still.
    row.scroll_into_view_if_needed()
    area = row.locator(".track").bounding_box()
    x, y = area["x"] + area["width"] * 0.9, area["y"] + 5
    start, width = shown()
    tab.page.mouse.move(x, y)
    tab.page.mouse.wheel(0, -300)
    tab.wait_for(f"+{box}.split(' ')[2] < {width / 1.5}")
    zoomed = shown()
    assert zoomed[0] + 0.9 * zoomed[1] == pytest.approx(start + 0.9 * width, abs=300)
    tab.page.wait_for_timeout(400)
    assert shown() == zoomed and tab.get("pause").inner_text() == "Live"
    assert tab.page.locator(".cursor").inner_text().startswith("−")
    # A drag moves it, and opens nothing.
    tab.page.mouse.down()
    tab.page.mouse.move(x - 200, y, steps=4)
    tab.page.mouse.up()
    moved = shown()
    assert moved[1] == zoomed[1] and moved[0] - zoomed[0] == pytest.approx(200 * zoomed[1] / area["width"], rel=0.05)
    assert not tab.get("request-details").is_visible()
    # Keys do the same.
    row.focus()
    tab.page.keyboard.press("-")
    tab.page.keyboard.press("ArrowLeft")
    assert shown()[1] > moved[1] and shown()[0] < moved[0]
    tab.get("pause").click()
    tab.wait_for(f"{box}.split(' ')[0] > {moved[0] + 1}")
    tab.get("pause").click()
    paused = shown()
    tab.page.wait_for_timeout(400)
    assert shown() == paused
    tab.press("30 s")
    # Details come into view, and their row is marked.
    row.locator(".name").click()
    details = tab.get("request-details")
    assert details.locator("code").inner_text() == "abc" and row.get_attribute("aria-expanded") == "true"
    bottom = details.evaluate("d => d.getBoundingClientRect().bottom")
    assert bottom <= tab.page.viewport_size["height"]
    assert details.locator("[data-row]").evaluate_all("all => all.map(e => e.dataset.row)") == [
        *("intake", "encode", "move", "prefill", "decode")
    ]
    tab.press("By lane")
    lanes = window.locator("[data-lane]")
    assert lanes.evaluate_all("all => all.map(e => [e.dataset.lane, e.querySelectorAll('rect').length])") == [
        ["e0 vision", 1],
        ["pd0 language", 2],
    ]
    assert lanes.last.locator(".name").evaluate("e => e.scrollWidth <= e.clientWidth")
    with tab.page.expect_download() as waiting:
        tab.get("download-trace").click()
    events = json.loads(waiting.value.path().read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"requests", "e0", "pd0", "vision", "language", "language decode", "chatcmpl-abc"} <= names
    complete = [event for event in events if event["ph"] == "X" and "request" in event["args"]]
    assert [event["name"] for event in complete] == [span.stage for span in SPANS]
    assert complete[2]["ts"] == 100_000 and complete[2]["dur"] == 200_000 and complete[2]["args"]["tokens"] == 576


@pytest.mark.slow
def test_slices_of_one_row_of_a_trace_never_overlap(served: Scripted, new_tab: OpenTab) -> None:
    tab = new_tab(served.url).open()
    overlaps, slices, rows = tab.page.evaluate("""async () => {
      const { traceOf } = await import("/ui/trace.js");
      let seed = 7;
      const random = () => (seed = (seed * 16807) % 2147483647) / 2147483647;
      const stages = [["prefill", "language"], ["decode", "language"], ["encode", "vision"], ["pull_kv", "transfer"]];
      const spans = () => Array.from({ length: 20 }, () => {
        const [stage, lane] = stages[Math.floor(random() * 4)], start_s = random();
        const end_s = start_s + random() / 5, batch = 1 + Math.floor(random() * 3);
        return { stage, lane, start_s, end_s, instance: "pd0", batch, tokens: 1 };
      });
      const requests = Array.from({ length: 50 }, (_, id) => ({ id: `r${id}`, arrival_s: random(), spans: spans() }));
      const events = traceOf(requests).traceEvents.filter((event) => event.ph === "X");
      const rows = Map.groupBy(events, (event) => `${event.pid} ${event.tid}`);
      let overlaps = 0;
      for (const row of rows.values()) {
        const sorted = row.toSorted((one, other) => one.ts - other.ts);
        for (let i = 1; i < sorted.length; i += 1) overlaps += sorted[i].ts < sorted[i - 1].ts + sorted[i - 1].dur;
      }
      return [overlaps, events.length, rows.size];
    }""")
    assert (overlaps, slices) == (0, 2000) and rows > 50


@pytest.mark.slow
def test_a_hidden_tab_closes_its_stream_and_catches_up(served: Scripted, new_tab: OpenTab) -> None:
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


@pytest.mark.slow
def test_what_is_no_longer_news_is_grey(served: Scripted, new_tab: OpenTab, monkeypatch: pytest.MonkeyPatch) -> None:
    show(served)
    tab = new_tab(served.url).open()
    tab.expected = ("ERR_", "Failed to load")
    assert not tab.get("age").is_visible()
    tab.page.context.set_offline(True)
    tab.page.evaluate("dispatchEvent(new PageTransitionEvent('pageshow', {persisted: true}))")
    tab.wait("[data-testid=connection][data-state=lost]")
    assert tab.get("age").inner_text().startswith("No news for ")
    grey = "getComputedStyle(document.querySelector('.tiles')).filter"
    assert tab.page.evaluate(grey) == "grayscale(1)"
    tab.page.context.set_offline(False)
    tab.wait("[data-testid=connection][data-state=open]")
    assert tab.page.evaluate(grey) == "none" and not tab.get("age").is_visible()
    # A stream that is open and says nothing.
    monkeypatch.setattr(page_module, "PERIOD_S", 60.0)
    tab.wait("[data-testid=connection][data-state=silent]")
    assert tab.page.evaluate(grey) == "grayscale(1)" and tab.get("age").is_visible()
    monkeypatch.undo()
    served.engine.state = "loading"
    tab.page.evaluate("dispatchEvent(new PageTransitionEvent('pageshow', {persisted: true}))")
    tab.wait_for("document.querySelector('.connection b').textContent === 'loading'")


@pytest.mark.slow
def test_defaults_of_the_server_are_placeholders(served: Scripted, new_tab: OpenTab) -> None:
    served.engine.default_sampling_params = SamplingParams(temperature=0.2, top_k=20)
    tab = new_tab(served.url).open()
    tab.press("Settings")
    tab.wait("[data-testid=temperature][placeholder='0.2']")
    found = {mark: tab.get(mark).get_attribute("placeholder") for mark in ("top-k", "top-p", "max-tokens")}
    assert found == {"top-k": "20", "top-p": "1", "max-tokens": "no limit"}
    narrow = "[...document.querySelectorAll('.settings input')].every(e => e.scrollWidth <= e.clientWidth)"
    assert tab.page.evaluate(narrow)


@pytest.mark.slow
def test_a_first_visit_begins_in_the_chat_and_says_what_else_there_is(
    scripted: Serve, new_tab: OpenTab, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    served = scripted(engine=StubEngine(model_name=f"{tmp_path}/model"))
    tab = new_tab(served.url, view="").open()
    tab.wait(".model[title]")
    chip = tab.get("model-name")
    assert chip.inner_text() == "model" and str(tmp_path) in (chip.get_attribute("title") or "")
    assert not tab.page.locator(".live").is_visible()
    hint = tab.page.locator("#empty")
    assert "“Engine”, above, shows what the server does now; “Split” shows both." in hint.inner_text()
    tab.page.set_viewport_size({"width": 820, "height": 900})
    tab.page.get_by_role("button", name="Split").wait_for(state="hidden")
    assert "“Engine”, above, shows what the server does now." in hint.inner_text()


@pytest.mark.slow
def test_chat_engine_or_both_and_the_choice_is_remembered(served: Scripted, new_tab: OpenTab) -> None:
    show(served)
    tab = new_tab(served.url).open()

    def shown() -> tuple[bool, bool]:
        return tab.page.locator(".chat").is_visible(), tab.page.locator(".live").is_visible()

    seen = [shown()]
    for name in ("Chat", "Engine"):
        tab.press(name)
        seen.append(shown())
    assert seen == [(True, True), (True, False), (False, True)]
    wide = tab.get("timeline").bounding_box()
    assert wide["width"] > 1300
    tab.page.reload()
    tab.wait("[data-testid=instance]")
    assert shown() == (False, True)
    # The timeline takes what a higher screen has.
    tab.page.set_viewport_size({"width": 1440, "height": 1400})
    assert tab.get("timeline").bounding_box()["height"] > wide["height"] + 300
    tab.press("Split")
    tab.page.set_viewport_size({"width": 1000, "height": 900})
    tab.page.locator(".live").wait_for(state="hidden")  # the page learns its size after this call
    assert shown() == (True, False) and not tab.page.get_by_role("button", name="Split").is_visible()
    tab.press("Engine")
    assert shown() == (False, True)


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


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_contrast_and_the_choice_of_a_theme(served: Scripted, new_tab: OpenTab, scheme: str) -> None:
    show(served, budget=BudgetReport(tpot_limit_s=0.04, decode_steps=1))
    served.engine.ring.add("chatcmpl-abc", time.monotonic() - 1.2, SPANS)
    served.engine.pieces = [
        "# Words\n`code` and [a](https://example.org)\n\n> quoted\n\n",
        "```py\nimport os  # x\n```",
    ]
    tab = new_tab(served.url, color_scheme=scheme).open()
    assert tab.page.evaluate(_CONTRAST) == []
    tab.ask("x")
    tab.answered()
    tab.get("usage").click()
    tab.press("Settings")
    tab.wait("[data-request-id='chatcmpl-abc']")
    tab.wait(".hljs-keyword")
    assert tab.page.evaluate(_CONTRAST) == []
    tab.press("Chat")  # with the list
    tab.wait("[data-testid=talk]")
    assert tab.page.evaluate(_CONTRAST) == []
    tab.press("Split")
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


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 820])
def test_narrow_pages_have_tabs_and_room_for_fingers(served: Scripted, new_tab: OpenTab, width: int) -> None:
    show(served, budget=BudgetReport(tpot_limit_s=0.04, decode_steps=1))
    served.engine.ring.add("chatcmpl-abc", time.monotonic() - 1.2, SPANS)
    served.engine.pieces = ["```\n" + "x" * 300 + "\n```\n\n", "| a | b |\n|---|---|\n|" + " word" * 60 + "| c |\n"]
    tab = new_tab(served.url, viewport={"width": width, "height": 740}, has_touch=True).open()
    small = """() => {
      const all = "button, .button, input:not(.hidden), select, textarea, summary, .row[role=button]";
      const height = (e) => (e.getClientRects().length ? e.getBoundingClientRect().height : 44);
      return [...document.querySelectorAll(all)].filter((e) => height(e) < 44).map((e) => e.outerHTML.slice(0, 80));
    }"""
    sideways = "Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)"
    assert tab.page.evaluate(small) == [] and tab.page.evaluate(sideways) <= width
    tab.ask("a" * 200)
    tab.answered()
    summary, figures = (tab.page.locator(f".stages {part}").bounding_box() for part in ("summary", ".figures"))
    tools = tab.page.locator(".below .tools").bounding_box()
    assert figures["height"] < 24 and figures["x"] + figures["width"] <= width
    if width < 600:  # a line of their own, below the buttons
        assert figures["width"] == summary["width"] and figures["y"] >= tools["y"] + tools["height"] - 2
    tab.get("usage").click()
    tab.press("Settings")
    assert tab.page.evaluate(small) == [] and tab.page.evaluate(sideways) <= width
    send = tab.get("send").bounding_box()
    assert send["x"] + send["width"] <= width and send["y"] + send["height"] <= 740
    tab.press("Engine")
    tab.wait("[data-request-id='chatcmpl-abc']")
    assert tab.page.evaluate(small) == [] and tab.page.evaluate(sideways) <= width
    left, right = tab.page.evaluate("""() => {
      const [card, area] = [".tiles", ".live"].map((name) => document.querySelector(name).getBoundingClientRect());
      return [card.left - area.left, area.right - card.right];
    }""")
    assert left == right
