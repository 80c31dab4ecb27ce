"""The chat half of the page in a real browser, before a scripted engine: streams, stops, errors, keys, reloads."""

from __future__ import annotations

import base64
from collections.abc import Callable

import pytest

from hydra_engine.errors import RequestFailed, Unavailable
from tests.page.conftest import PICTURES, OpenTab, Scripted, Tab

pytestmark = pytest.mark.usefixtures("browser")
Serve = Callable[..., Scripted]

STAR = PICTURES / "stars.png"
_GIVE = """([kind, names, types, data]) => {
  const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
  const files = new DataTransfer();
  names.forEach((name, i) => files.items.add(new File([bytes], name, {type: types[i]})));
  if (kind === "paste") {
    document.querySelector("#prompt").dispatchEvent(new ClipboardEvent("paste", {clipboardData: files, bubbles: true}));
    return;
  }
  for (const type of ["dragover", "drop"]) {
    const event = new DragEvent(type, {dataTransfer: files, bubbles: true, cancelable: true});
    document.querySelector(".chat").dispatchEvent(event);
  }
}"""


def give(tab: Tab, kind: str, *files: tuple[str, str]) -> None:
    """Drops or pastes the same bytes under these names and types."""
    data = base64.b64encode(STAR.read_bytes()).decode()
    tab.page.evaluate(_GIVE, [kind, [name for name, _ in files], [kind for _, kind in files], data])


def test_pictures_come_by_button_by_drop_and_by_paste(scripted: Serve, new_tab: OpenTab) -> None:
    served = scripted()
    tab = new_tab(served.url).open()
    tab.get("image-input").set_input_files([STAR, PICTURES / "shapes.png"])
    tab.wait("[data-testid=image-preview] >> nth=1")
    give(tab, "drop", ("dropped.png", "image/png"), ("notes.txt", "text/plain"))
    tab.wait("[data-testid=image-preview] >> nth=2")
    assert tab.page.locator("#note").inner_text() == "notes.txt is not a PNG, JPEG, WebP, GIF or BMP picture."
    give(tab, "paste", ("", "image/png"))
    tab.wait("[data-testid=image-preview] >> nth=3")
    assert tab.get("image-preview").locator("img").first.evaluate("i => i.complete && i.naturalWidth") > 0
    assert tab.get("image-preview").locator(".size").first.inner_text() == "3 kB"
    tab.page.get_by_role("button", name="Remove shapes.png").click()
    assert tab.get("image-preview").count() == 3
    tab.ask("What is that?")
    assert tab.answered() == "What is that?"
    [submission] = served.engine.submissions
    parts = submission.messages[-1]["content"]
    assert [part["type"] for part in parts] == ["image_url"] * 3 + ["text"]
    url = parts[0]["image_url"]["url"]
    assert base64.b64decode(url.removeprefix("data:image/png;base64,")) == STAR.read_bytes()
    assert tab.get("image-preview").count() == 0 and tab.page.locator(".sent img").count() == 3
    # A picture without words is a message too, and earlier ones go along.
    tab.get("image-input").set_input_files([STAR])
    tab.wait("[data-testid=image-preview]")
    tab.get("send").click()
    tab.wait(".message.assistant >> nth=1")
    tab.answered()
    messages = served.engine.submissions[-1].messages
    assert [m["role"] for m in messages] == ["user", "assistant", "user"] and len(messages[2]["content"]) == 1


def test_an_answer_grows_where_it_stands_and_stop_keeps_what_is_there(scripted: Serve, new_tab: OpenTab) -> None:
    served = scripted()
    served.engine.token_s, served.engine.answer = 0.03, " ".join(f"word{i}." for i in range(400))
    tab = new_tab(served.url).open()
    before = tab.page.locator("#composer").bounding_box()
    tab.ask("Go on.")
    assert tab.get("stop").is_visible() and not tab.get("send").is_visible()
    tab.wait_for("document.querySelector('[data-testid=answer]')?.textContent.includes('word3.')")
    some = tab.get("answer").inner_text()
    tab.wait_for("document.querySelector('[data-testid=answer]').textContent.includes('word12.')")
    more = tab.get("answer").inner_text()
    assert more.startswith(some) and len(more) > len(some)
    # Told in sentences, not in tokens, and nothing has jumped.
    told = tab.page.locator("#spoken[aria-live=polite] p").all_inner_texts()
    assert told and all(line.startswith("word") and line.endswith(".") for line in told)
    assert tab.page.locator("#composer").bounding_box() == before
    tab.get("stop").click()
    text = tab.answered()
    assert text.startswith("word0. word1.") and "word399." not in text
    assert "stopped" in tab.get("usage").inner_text() and "out" in tab.get("usage").inner_text()
    tab.wait_for("document.activeElement.id === 'prompt'")
    assert len(served.engine.cancelled) == 1
    served.engine.token_s, served.engine.answer = 0.0, "Good."
    tab.ask("And now?")
    tab.wait(".message.assistant >> nth=1")
    assert tab.answered() == "Good."


def test_counts_and_stages_stand_under_the_answer(scripted: Serve, new_tab: OpenTab) -> None:
    tab = new_tab(scripted().url).open()
    tab.get("image-input").set_input_files([STAR])
    tab.wait("[data-testid=image-preview]")
    tab.ask("one two three")
    tab.answered()
    facts = tab.get("usage").locator("span").all_inner_texts()
    assert facts[:5] == ["19 in (3 text + 16 picture)", "3 out", "first token 200 ms", "33.3 tok/s", "stop"]
    request_id = facts[5]
    assert request_id.startswith("chatcmpl-")
    timeline = tab.get("answer-timeline")
    rows = timeline.get_by_test_id("timeline-row")
    assert [row.get_attribute("data-request-id") for row in rows.all()] == [request_id] * 2
    spans = timeline.get_by_test_id("timeline-span")
    read = [[span.get_attribute(f"data-{name}") for name in ("stage", "start-ms", "end-ms")] for span in spans.all()]
    assert read == [["fetch", "0.000", "10.000"], ["prefill", "100.000", "200.000"]]
    spans.last.hover()
    assert "prefill: 100 ms" in tab.page.locator("#tooltip").inner_text()
    assert "in a batch of 3" in tab.page.locator("#tooltip").inner_text()
    assert "prefill 100 ms" in timeline.get_by_role("group").get_attribute("aria-label")


def test_errors_stand_in_the_servers_words_and_can_be_asked_again(scripted: Serve, new_tab: OpenTab) -> None:
    served = scripted()
    tab = new_tab(served.url).open()
    tab.expected = ("503", "400")
    served.engine.refusal = Unavailable(
        "3 requests are queued already; try again later", code="overloaded", retry_after_s=7
    )
    tab.ask("one two three four")
    tab.wait("[data-testid=error][role=alert]")
    words = tab.get("error").inner_text()
    assert "3 requests are queued already; try again later Try again in 7 s." in words and "overloaded" in words
    served.engine.refusal = None
    served.engine.error, served.engine.fail_after = RequestFailed("the model gave no number"), 2
    tab.page.get_by_role("button", name="Ask again").click()
    tab.wait_for("document.querySelector('[data-testid=error]')?.textContent.includes('gave no number')")
    assert tab.get("answer").inner_text() == "one two" and tab.get("error").count() == 1
    served.engine.error = None
    tab.page.get_by_role("button", name="Ask again").click()
    tab.wait_for("document.querySelector('[data-testid=answer]').textContent.includes('four')")
    assert tab.answered() == "one two three four" and tab.get("error").count() == 0
    assert [m["role"] for m in served.engine.submissions[-1].messages] == ["user"]


def test_settings_are_sent_and_wrong_ones_are_not(scripted: Serve, new_tab: OpenTab) -> None:
    served = scripted()
    tab = new_tab(served.url).open()
    tab.page.get_by_role("button", name="Settings").click()
    for mark, value in (
        ("system", "Be brief."),
        ("temperature", "0.5"),
        ("top-p", "0.9"),
        ("max-tokens", "2"),
        ("seed", "7"),
    ):
        tab.get(mark).fill(value)
    tab.ask("one two three")
    assert tab.answered() == "one two"
    assert "length" in tab.get("usage").inner_text()
    [submission] = served.engine.submissions
    sampling = submission.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.seed) == (0.5, 0.9, 2, 7)
    assert submission.messages[0] == {"role": "system", "content": "Be brief."}
    tab.get("temperature").fill("9")
    tab.ask("more")
    assert len(served.engine.submissions) == 1 and tab.get("prompt").input_value() == "more"


def test_a_reload_keeps_the_conversation_and_clear_ends_it(scripted: Serve, new_tab: OpenTab) -> None:
    tab = new_tab(scripted().url).open()
    tab.page.get_by_role("button", name="Settings").click()
    tab.get("seed").fill("11")
    tab.get("image-input").set_input_files([STAR])
    tab.wait("[data-testid=image-preview]")
    tab.ask("**bold** words")
    tab.answered()
    before = tab.page.locator("#messages").inner_text()
    tab.page.reload()
    tab.wait(".message.assistant")
    assert tab.page.locator("#messages").inner_text() == before
    assert tab.page.locator(".sent img").count() == 1 and tab.page.locator(".text strong").inner_text() == "bold"
    assert tab.get("seed").input_value() == "11" and tab.get("answer-timeline").count() == 1
    tab.get("clear").click()
    assert tab.page.locator(".message").count() == 0 and tab.page.locator("#empty").is_visible()
    tab.page.reload()
    tab.wait("#empty")
    assert tab.page.locator(".message").count() == 0


def test_the_key_is_asked_for_kept_in_the_tab_and_never_copied(scripted: Serve, new_tab: OpenTab) -> None:
    served = scripted(api_key=("open sesame",))
    tab = new_tab(served.url, permissions=["clipboard-read", "clipboard-write"])
    tab.expected = ("401",)
    tab.open(state="denied")
    assert tab.get("key-form").is_visible()
    tab.wait_for("document.activeElement.id === 'key'")
    tab.get("key").fill("wrong")
    tab.page.keyboard.press("Enter")
    tab.wait("[data-testid=connection][data-state=denied]")
    tab.wait("[data-testid=key-form]:not([hidden])")
    tab.get("key").fill("open sesame")
    tab.page.keyboard.press("Enter")
    tab.wait("[data-testid=connection][data-state=open]")
    tab.ask("hello")
    assert tab.answered() == "hello"
    tab.page.reload()
    tab.wait("[data-testid=connection][data-state=open]")
    kept = tab.page.evaluate("[Object.values({...localStorage}).join(), document.cookie, sessionStorage['hydra.key']]")
    assert kept == ["", "", "open sesame"]
    for name in ("Copy as curl", "Copy as Python"):
        tab.page.get_by_role("button", name=name).click()
        tab.page.get_by_role("button", name="Copied").first.wait_for()
        copied = tab.page.evaluate("navigator.clipboard.readText()")
        assert "HYDRA_API_KEY" in copied and "sesame" not in copied and "hello" in copied


def test_by_keyboard_alone(scripted: Serve, new_tab: OpenTab) -> None:
    served = scripted()
    served.engine.token_s = 0.02
    tab = new_tab(served.url).open()
    keys = tab.page.keyboard
    keys.press("Tab")
    assert tab.page.evaluate("document.activeElement.className") == "skip"
    keys.press("Enter")
    assert tab.page.evaluate("document.activeElement.id") == "prompt"
    keys.type("one")
    keys.press("Shift+Enter")
    keys.insert_text("two " * 100)
    keys.press("Enter")
    tab.wait_for("document.querySelector('[data-testid=answer]')?.textContent.includes('two two')")
    keys.press("Escape")
    tab.wait_for("document.querySelector('[data-testid=usage]').textContent.includes('stopped')")
    assert tab.page.evaluate("document.activeElement.id") == "prompt"
    assert served.engine.submissions[0].messages[0]["content"].startswith("one\ntwo")
    # Everything that can be reached has a name and shows where the focus is.
    seen = set()
    for _ in range(40):
        keys.press("Tab")
        name, outline = tab.page.evaluate("""() => {
          const e = document.activeElement;
          const label = e.labels?.[0]?.textContent || e.getAttribute("aria-label") || e.textContent || e.title;
          const shown = e.id === "image-input" ? e.previousElementSibling : e;
          const style = getComputedStyle(shown);
          return [label.trim(), style.outlineStyle !== "none" || style.boxShadow !== "none"];
        }""")
        assert name and (outline or tab.page.evaluate("document.activeElement === document.body")), name
        seen.add(name)
    assert {"Pictures", "Settings", "Clear", "Send", "Pause", "10 s", "By lane", "Copy as curl"} <= seen


def test_no_text_of_a_model_becomes_markup(scripted: Serve, new_tab: OpenTab) -> None:
    served = scripted()
    served.engine.answer = (
        '<img src=x onerror="window.hit=1"> <script>window.hit=1</script> [a](javascript:window.hit=1) '
        "[b](https://example.org/x) ![c](https://example.org/y.png) `<b>`"
    )
    tab = new_tab(served.url).open()
    tab.ask("x")
    tab.answered()
    answer = tab.get("answer")
    assert answer.locator("img, script, b").count() == 0 and tab.page.evaluate("window.hit") is None
    links = answer.locator("a").evaluate_all("all => all.map(a => [a.href, a.rel, a.target])")
    assert links == [
        ["https://example.org/x", "noopener noreferrer", "_blank"],
        ["https://example.org/y.png", "noopener noreferrer", "_blank"],
    ]
    assert "[a](javascript:window.hit=1)" in answer.inner_text()


def test_pictures_are_kept_as_far_as_there_is_room(scripted: Serve, new_tab: OpenTab) -> None:
    tab = new_tab(scripted().url).open()
    urls, contents = tab.page.evaluate("""async () => {
      const { Conversation } = await import("/ui/conversation.js");
      const one = new Conversation();
      for (const name of ["old", "new"]) {
        one.turns.push({role: "user", text: name, pictures: [{name, size: 1, url: "data:" + "x".repeat(2500000)}]});
      }
      one.save();
      const other = new Conversation();
      other.load();
      const { messages } = other.requestBody({detail: "auto"});
      return [other.turns.map((turn) => turn.pictures[0].url.length), messages.map((m) => typeof m.content)];
    }""")
    assert urls == [0, 2_500_005] and contents == ["string", "object"]
