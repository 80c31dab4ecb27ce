"""The chat half of the page in a real browser, before a scripted engine: streams, stops, errors, keys, reloads."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable

import pytest

from hydra_engine.errors import InvalidRequest, RequestFailed, Unavailable
from hydra_engine.telemetry.trace import LiveRequest
from tests.calls import plain
from tests.page.conftest import PICTURES, ROOT, OpenTab, Scripted, Tab

pytestmark = pytest.mark.usefixtures("browser")
Serve = Callable[..., Scripted]

STAR = PICTURES / "stars.png"
_GIVE = """([kind, names, types, data]) => {
  const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
  const files = new DataTransfer();
  names.forEach((name, i) => files.items.add(new File([bytes], name, {type: types[i]})));
  if (kind === "paste") {
    document.body.dispatchEvent(new ClipboardEvent("paste", {clipboardData: files, bubbles: true}));
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


def add_star(tab: Tab) -> None:
    tab.get("image-input").set_input_files([STAR])
    tab.wait("[data-testid=image-preview]")


def asked(served: Scripted) -> list[str]:
    """Texts of the latest request, turn by turn."""
    contents = [m["content"] for m in plain(served.engine.submissions[-1].messages)]
    return [content if isinstance(content, str) else content[-1].get("text", "") for content in contents]


@pytest.mark.slow
def test_pictures_come_by_button_by_drop_and_by_paste(served: Scripted, new_tab: OpenTab) -> None:
    tab = new_tab(served.url).open()
    tab.get("image-input").set_input_files([STAR, PICTURES / "shapes.png"])
    tab.wait("[data-testid=image-preview] >> nth=1")
    give(tab, "drop", ("dropped.png", "image/png"), ("notes.txt", "text/plain"))
    tab.wait("[data-testid=image-preview] >> nth=2")
    assert tab.get("note").inner_text() == "notes.txt is not a PNG, JPEG, WebP, GIF or BMP picture."
    give(tab, "paste", ("", "image/png"))
    tab.wait("[data-testid=image-preview] >> nth=3")
    assert tab.get("image-preview").locator("img").first.evaluate("i => i.decode().then(() => i.naturalWidth)") > 0
    assert tab.get("image-preview").locator(".size").first.inner_text() == "3 KiB"
    tab.press("Remove shapes.png")
    assert tab.get("image-preview").count() == 3
    tab.ask("What is that?")
    assert tab.answered() == "What is that?"
    [submission] = served.engine.submissions
    parts = plain(submission.messages)[-1]["content"]
    assert [part["type"] for part in parts] == ["image_url"] * 3 + ["text"]
    url = parts[0]["image_url"]["url"]
    assert base64.b64decode(url.removeprefix("data:image/png;base64,")) == STAR.read_bytes()
    assert tab.get("image-preview").count() == 0 and tab.page.locator(".sent img").count() == 3
    # A picture is shown whole where it is clicked, until Escape.
    tab.press("stars.png")
    dialog = tab.page.get_by_role("dialog")
    assert dialog.locator("img").bounding_box()["width"] > tab.page.locator(".sent img").first.bounding_box()["width"]
    tab.page.keyboard.press("Escape")
    dialog.wait_for(state="hidden")
    # A picture without words is a message too, and earlier ones go along.
    add_star(tab)
    tab.get("send").click()
    tab.wait(".message.assistant >> nth=1")
    tab.answered()
    messages = plain(served.engine.submissions[-1].messages)
    assert [m["role"] for m in messages] == ["user", "assistant", "user"] and len(messages[2]["content"]) == 1


@pytest.mark.slow
def test_a_sample_is_asked_with_one_click(served: Scripted, new_tab: OpenTab) -> None:
    tab = new_tab(served.url).open()
    tab.wait("[data-testid=sample] >> nth=3")
    tab.press("How many red objects are there?")
    assert tab.answered() == "How many red objects are there?"
    assert tab.page.evaluate("document.activeElement.dataset.testid") == "prompt"
    picture = plain(served.engine.submissions[0].messages)[0]["content"][0]["image_url"]["url"]
    assert base64.b64decode(picture.split(",")[1]) == (PICTURES / "diamonds.png").read_bytes()


@pytest.mark.slow
def test_a_refused_picture_does_not_stay_in_the_conversation(served: Scripted, new_tab: OpenTab) -> None:
    tab = new_tab(served.url).open()
    tab.expected = ("400", "503")
    tab.ask("first")
    assert tab.answered() == "first"
    served.engine.refusal = InvalidRequest("image 1 of 1 cannot be decoded", param="messages")
    add_star(tab)
    tab.ask("What is that?")
    tab.wait("[data-testid=note]:not([hidden])")
    assert tab.get("note").inner_text().startswith("Image 1 of 1 cannot be decoded.")
    assert tab.page.locator(".message").count() == 2 and tab.get("image-preview").count() == 1
    assert tab.get("prompt").input_value() == "What is that?"
    # Without it the conversation goes on as if it had never been sent.
    served.engine.refusal = None
    tab.press("Remove stars.png")
    tab.ask("What is two plus three?")
    tab.wait(".message.assistant >> nth=1")
    assert tab.answered() == "What is two plus three?"
    assert asked(served) == ["first", "first", "What is two plus three?"]
    served.engine.refusal = Unavailable("the model is still loading", code="not_ready", retry_after_s=2)
    tab.ask("And now?")
    tab.wait("[data-testid=note]:not([hidden])")
    assert tab.get("note").inner_text() == "The model is still loading. Try again in 2 s. not_ready"
    # Stopped before a word: the same.
    served.engine.refusal, served.engine.prefill_s = None, 5.0
    tab.get("send").click()
    tab.get("stop").click()
    tab.wait_for("document.querySelector('#prompt').value === 'And now?'")
    assert tab.page.locator(".message").count() == 4 and not tab.get("note").is_visible()


@pytest.mark.slow
def test_what_breaks_off_keeps_its_words_and_can_be_asked_again(served: Scripted, new_tab: OpenTab) -> None:
    tab = new_tab(served.url).open()
    served.engine.error, served.engine.fail_after = RequestFailed("the model gave no number"), 2
    tab.ask("one two three four")
    tab.wait_for("document.querySelector('[data-testid=error]')?.textContent.includes('gave no number.')")
    assert tab.get("answer").inner_text() == "one two"
    served.engine.error = None
    tab.press("Answer again")
    tab.wait_for("document.querySelector('[data-testid=answer]').textContent.includes('four')")
    assert tab.answered() == "one two three four" and tab.get("error").count() == 0
    assert asked(served) == ["one two three four"]
    # Good answers can be asked again too, and the one before can be had back.
    served.engine.answer = "another one"
    tab.press("Answer again")
    tab.wait_for("document.querySelector('[data-testid=answer]').textContent === 'another one'")
    tab.answered()
    tab.press("Undo")
    assert tab.get("answer").all_inner_texts() == ["one two three four"]


@pytest.mark.slow
def test_an_answer_grows_where_it_stands_and_stop_keeps_what_is_there(served: Scripted, new_tab: OpenTab) -> None:
    served.engine.token_s = 0.02
    served.engine.pieces = [f"word{i}.\n\n" for i in range(10_000)]  # more than any browser takes to come to the stop
    served.engine.answer = " ".join(served.engine.pieces)
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
    # The end is followed until one scrolls up.
    tab.wait_for("document.querySelector('#talk').scrollHeight > document.querySelector('#talk').clientHeight + 300")
    left = (
        "(() => { const t = document.querySelector('#talk'); return t.scrollHeight - t.scrollTop - t.clientHeight; })()"
    )
    tab.wait_for(f"{left} < 40")
    tab.page.mouse.move(300, 300)
    tab.page.mouse.wheel(0, -200)
    tab.wait_for(f"{left} > 150")
    top = "document.querySelector('#talk').scrollTop"
    tab.page.wait_for_timeout(150)
    stayed = tab.page.evaluate(top)
    tab.page.wait_for_timeout(250)
    assert tab.page.evaluate(top) == stayed and tab.get("to-end").is_visible()
    tab.get("to-end").click()
    tab.wait_for(f"{left} < 40")
    tab.page.wait_for_timeout(100)
    assert tab.page.evaluate(left) < 80 and not tab.get("to-end").is_visible()
    tab.page.evaluate("document.querySelector('#talk').scrollTop -= 200")
    tab.page.wait_for_timeout(100)
    assert tab.page.evaluate(left) >= 190
    tab.get("stop").click()
    text = tab.answered()
    assert text.startswith("word0.") and "word9999." not in text
    figures = tab.get("usage").inner_text().split(" · ")
    assert figures[0].startswith("first token ") and figures[1].endswith(" tokens/s") and figures[3] == "stopped"
    assert 5 < float(figures[1].split()[0]) <= 50  # a token takes 20 ms, and a loaded machine more
    tab.wait_for("!document.querySelector('#spoken').textContent")
    tab.wait_for("document.activeElement.id === 'prompt'")
    tab.until(lambda: len(served.engine.cancelled) == 1)  # the server sees it in its own time


@pytest.mark.slow
def test_what_a_request_waits_for_stands_where_its_answer_will(served: Scripted, new_tab: OpenTab) -> None:
    served.engine.intake_s = 600
    tab = new_tab(served.url).open()
    with tab.page.expect_request("**/v1/chat/completions") as waiting:
        tab.ask("Describe both.")
    id = "chatcmpl-" + waiting.value.headers["x-request-id"]
    now = time.monotonic()
    words = []
    for stage, done, of in (("encode", 1, 2), ("queue", None, None), ("prefill", 512, 1187), ("decode", None, None)):
        other = LiveRequest("chatcmpl-other", now - 1, None, 0, "queue", "epd0")
        served.engine.running = [other, LiveRequest(id, now, None, 0, stage, "epd0", done, of)]
        start = {"encode": "Encoding", "queue": "Queued", "prefill": "Reading", "decode": "Writing"}[stage]
        tab.wait_for(f"document.querySelector('[data-testid=status]').textContent.startsWith('{start}')")
        words.append(tab.get("status").inner_text().split(" · ")[0])
    assert words == [
        "Encoding picture 2 of 2",
        "Queued behind 1 request",
        "Reading the prompt, 512 of 1,187 tokens",
        "Writing the answer",
    ]
    tab.get("stop").click()


@pytest.mark.slow
def test_counts_and_stages_stand_under_the_answer(served: Scripted, new_tab: OpenTab) -> None:
    tab = new_tab(served.url).open()
    add_star(tab)
    tab.ask("one two three")
    tab.answered()
    assert tab.get("usage").inner_text() == "first token 200 ms · 33.3 tokens/s · 3 tokens"
    timeline = tab.get("answer-timeline")
    assert timeline.locator(".folded rect").count() == 2 and not tab.get("counts").is_visible()
    tab.get("usage").click()
    counts = tab.get("counts").inner_text()
    assert counts == "19 prompt tokens (3 text, 16 picture) · 3 tokens out · ended by stop"
    request_id = timeline.get_attribute("data-request-id")
    rows = timeline.get_by_test_id("timeline-row")
    assert [row.get_attribute("data-request-id") for row in rows.all()] == [request_id] * 2
    spans = timeline.get_by_test_id("timeline-span")
    read = [[span.get_attribute(f"data-{name}") for name in ("stage", "start-ms", "end-ms")] for span in spans.all()]
    assert read == [["fetch", "0.000", "10.000"], ["prefill", "100.000", "200.000"]]
    spans.last.hover()
    tip = tab.page.locator("#tooltip").inner_text()
    assert "prefill: 100 ms" in tip and "in a batch of 3" in tip
    assert "prefill 100 ms" in timeline.get_by_role("group").get_attribute("aria-label")


@pytest.mark.slow
def test_settings_are_sent_and_wrong_ones_are_not(served: Scripted, new_tab: OpenTab) -> None:
    tab = new_tab(served.url).open()
    tab.press("Settings")
    fields = {
        **{"system": "Be brief.", "temperature": "0.5", "top-p": "0.9", "top-k": "40", "min-p": "0.05"},
        **{"repetition-penalty": "1.1", "max-tokens": "2", "seed": "7"},
    }
    for mark, value in fields.items():
        tab.get(mark).fill(value)
    tab.ask("one two three")
    assert tab.answered() == "one two"
    assert "cut at the token limit" in tab.get("usage").inner_text()
    [submission] = served.engine.submissions
    sampling = submission.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.seed) == (0.5, 0.9, 2, 7)
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (40, 0.05, 1.1)
    assert plain(submission.messages)[0] == {"role": "system", "content": "Be brief."}
    tab.get("temperature").fill("9")
    tab.ask("more")
    assert len(served.engine.submissions) == 1 and tab.get("prompt").input_value() == "more"


@pytest.mark.slow
def test_a_reload_keeps_conversation_and_draft(served: Scripted, new_tab: OpenTab) -> None:
    tab = new_tab(served.url).open()
    tab.press("Settings")
    tab.get("seed").fill("11")
    add_star(tab)
    tab.ask("**bold** words")
    tab.answered()
    before = tab.page.locator("#messages").inner_text()
    add_star(tab)
    tab.get("prompt").fill("not yet")
    tab.page.reload()
    tab.wait(".message.assistant")
    assert tab.page.locator("#messages").inner_text() == before
    assert tab.get("prompt").input_value() == "not yet" and tab.get("image-preview").count() == 1
    assert tab.page.locator(".sent img").count() == 1 and tab.page.locator(".text strong").inner_text() == "bold"
    assert tab.get("seed").input_value() == "11" and tab.get("answer-timeline").count() == 1
    tab.get("new-chat").click()
    tab.wait("#empty")
    tab.page.reload()
    tab.wait("#empty")
    assert tab.page.locator(".message").count() == 0


# The browser tells half a second late that something is stored.
LATE = """Object.defineProperty(IDBTransaction.prototype, "oncomplete", {
  set(heard) { this.addEventListener("complete", () => setTimeout(heard, 500)); } })"""


@pytest.mark.slow
def test_a_reload_before_the_question_is_known_to_be_stored_keeps_the_answer(
    served: Scripted, new_tab: OpenTab
) -> None:
    tab = new_tab(served.url)
    tab.page.add_init_script(LATE)
    tab.open()
    tab.ask("one")
    tab.answered()
    tab.page.reload()
    tab.wait(".message.assistant")
    assert tab.get("answer").inner_text() == "one"
    tab.wait("[data-testid=talk] [aria-current]", state="attached")
    assert tab.get("talk").count() == 1


@pytest.mark.slow
def test_a_reload_in_the_middle_keeps_the_words_and_the_edit(served: Scripted, new_tab: OpenTab) -> None:
    tab = new_tab(served.url).open()
    tab.ask("one two")
    tab.answered()
    tab.press("Edit")
    tab.get("prompt").fill("one two three")
    replaces = tab.page.locator("#edit-note")
    assert replaces.is_visible()
    tab.page.reload()
    tab.wait(".message.assistant")
    assert replaces.is_visible() and tab.get("prompt").input_value() == "one two three"
    served.engine.token_s, served.engine.pieces = 0.05, [f"w{i} " for i in range(2000)]
    tab.get("send").click()
    tab.wait_for("document.querySelector('[data-testid=answer]')?.textContent.includes('w9 ')")
    assert not replaces.is_visible() and tab.page.locator(".message").count() == 2
    tab.page.reload()
    tab.wait(".message.assistant")
    assert "w9 " in tab.get("answer").inner_text() and asked(served) == ["one two three"]
    # The edit of one conversation is not another's.
    tab.press("Edit")
    tab.get("new-chat").click()
    tab.wait("#empty")
    assert not replaces.is_visible() and tab.get("prompt").input_value() == ""


@pytest.mark.slow
def test_the_focus_stays_where_one_writes(served: Scripted, new_tab: OpenTab) -> None:
    focused = "document.activeElement.dataset.testid === 'prompt'"
    for key in ("Enter", " "):
        tab = new_tab(served.url).open()
        tab.get("sample").nth(1).focus()
        tab.page.keyboard.press(key)
        tab.answered()
        assert tab.page.evaluate(focused)
    again = tab.page.get_by_role("button", name="Answer again")
    again.focus()
    tab.page.keyboard.press("Enter")
    tab.wait_for(focused)


@pytest.mark.slow
def test_refusals_are_sentences_and_say_things_once(served: Scripted, new_tab: OpenTab) -> None:
    tab = new_tab(served.url).open()
    tab.expected = ("400", "503")
    full = "4 requests are queued or running, the limit (max_queue) is 4; try again later"
    cases = {
        "4 requests are queued or running, the limit (max_queue) is 4. Try again in 15 s. overloaded": Unavailable(
            full, code="overloaded", retry_after_s=15
        ),
        "The topology is being changed already. Try again in 2 s. not_ready": Unavailable(
            "the topology is being changed already; try again when that has ended", code="not_ready", retry_after_s=2
        ),
        "max_tokens must be 1 or more. invalid_value": InvalidRequest("max_tokens must be 1 or more"),
    }
    for words, refusal in cases.items():
        served.engine.refusal = refusal
        tab.ask("x")
        tab.wait("[data-testid=note]:not([hidden])")
        shown = tab.get("note").inner_text()
        assert shown.split(". ")[:-1] == words.split(". ")[:-1]


@pytest.mark.slow
def test_a_turn_is_edited_and_what_was_sent_comes_back_by_arrow_up(served: Scripted, new_tab: OpenTab) -> None:
    tab = new_tab(served.url).open()
    tab.wait_for("document.activeElement.id === 'prompt'")  # one can write at once
    for number, text in enumerate(("one", "two")):
        tab.page.keyboard.type(text)
        tab.page.keyboard.press("Enter")
        tab.wait(f".message.assistant >> nth={number}")
        tab.answered()
    prompt = tab.get("prompt")
    seen = []
    for key in ("ArrowUp", "ArrowUp", "ArrowUp", "ArrowDown", "ArrowDown"):
        prompt.press(key)
        seen.append(prompt.input_value())
    assert seen == ["two", "one", "one", "two", ""]
    tab.page.get_by_role("button", name="Edit").first.click()
    assert prompt.input_value() == "one"
    prompt.fill("three")
    prompt.press("Enter")
    tab.wait_for("document.querySelectorAll('.message').length === 2")
    assert tab.answered() == "three" and asked(served) == ["three"]
    tab.press("Undo")
    assert tab.get("answer").all_inner_texts() == ["one", "two"]
    tab.page.get_by_role("button", name="Edit").last.click()
    tab.press("Cancel")
    assert prompt.input_value() == "" and tab.page.locator(".message").count() == 4


@pytest.mark.slow
def test_the_key_is_asked_for_kept_in_the_tab_and_never_copied(scripted: Serve, new_tab: OpenTab) -> None:
    served = scripted(api_key=("open sesame",))
    tab = new_tab(served.url, permissions=["clipboard-read", "clipboard-write"])
    tab.expected = ("401",)
    tab.open(state="denied")
    state = "document.querySelector('.connection b').textContent"
    assert tab.get("key-form").is_visible() and tab.page.evaluate(state) == "needs a key"
    tab.wait_for("document.activeElement.id === 'key'")
    tab.get("key").fill("wrong")
    tab.page.keyboard.press("Enter")
    tab.wait_for(f"{state} === 'wrong key'")
    tab.wait("[data-testid=key-form]:not([hidden])")
    assert "That key was refused." in tab.get("key-form").inner_text()
    tab.get("key").fill("open sesame")
    tab.page.keyboard.press("Enter")
    tab.wait("[data-testid=connection][data-state=open]")
    tab.ask("hello")
    assert tab.answered() == "hello"
    tab.page.reload()
    tab.wait(".message.assistant")
    tab.wait("[data-testid=connection][data-state=open]")
    kept = tab.page.evaluate("[{...localStorage}, document.cookie, sessionStorage['hydra.key']]")
    assert kept == [{"hydra.mode": "split", "hydra.keyed": "true"}, "", "open sesame"]
    tab.get("usage").click()
    for name in ("Copy as curl", "Copy as Python"):
        tab.press(name)
        tab.page.get_by_role("button", name="Copied").first.wait_for()
        copied = tab.page.evaluate("navigator.clipboard.readText()")
        assert "HYDRA_API_KEY" in copied and "sesame" not in copied and "hello" in copied


@pytest.mark.slow
def test_by_keyboard_alone(served: Scripted, new_tab: OpenTab) -> None:
    served.engine.token_s = 0.02
    tab = new_tab(served.url).open()
    keys = tab.page.keyboard
    tab.page.evaluate("document.activeElement.blur()")
    tab.page.locator(".skip").focus()
    keys.press("Enter")
    assert tab.page.evaluate("document.activeElement.id") == "prompt"
    keys.type("one")
    keys.press("Shift+Enter")
    keys.insert_text("two " * 100)
    keys.press("Enter")
    tab.wait_for("document.querySelector('[data-testid=answer]')?.textContent.includes('two two')")
    keys.press("Escape")
    tab.wait_for("document.querySelector('[data-testid=usage]')?.textContent.includes('stopped')")
    assert tab.page.evaluate("document.activeElement.id") == "prompt"
    assert plain(served.engine.submissions[0].messages)[0]["content"].startswith("one\ntwo")
    # Everything that can be reached has a name and shows where the focus is.
    seen = set()
    for _ in range(40):
        keys.press("Tab")
        name, outline = tab.page.evaluate("""() => {
          const e = document.activeElement;
          const label = e.getAttribute("aria-label") || e.labels?.[0]?.textContent || e.textContent || e.title;
          const shown = e.id === "image-input" ? e.previousElementSibling : e.id === "prompt" ? e.parentElement : e;
          const style = getComputedStyle(shown);
          return [label.trim(), style.outlineStyle !== "none" || style.boxShadow !== "none"];
        }""")
        assert name and (outline or tab.page.evaluate("document.activeElement === document.body")), name
        seen.add(name)
    assert {
        "Attach pictures",
        "Settings",
        "New chat",
        "Send",
        "Pause",
        "10 s",
        "By lane",
        "Engine",
        "Copy",
        "Answer again",
    } <= seen


def test_no_text_of_a_model_becomes_markup(served: Scripted, new_tab: OpenTab) -> None:
    served.engine.answer = (
        '<img src=x onerror="window.hit=1"> <script>window.hit=1</script> [a](javascript:window.hit=1) '
        "[b](https://example.org/x) ![c](https://example.org/y.png) `<b>`"
    )
    tab = new_tab(served.url, permissions=["clipboard-read", "clipboard-write"]).open()
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
    # Thoughts are folded, and code can be copied.
    served.engine.pieces = ["<think>\nfirst", " this", "\n</think>\n\n", "```sh\nls -l <dir>\n```"]
    tab.ask("y")
    tab.wait(".message.assistant >> nth=1")
    tab.answered()
    thought = tab.page.locator(".message.assistant").last.locator(".thought")
    assert thought.locator("summary").inner_text() == "Thoughts" and not thought.get_by_text("first this").is_visible()
    assert "think" not in tab.get("answer").last.inner_text()
    tab.press("Copy code")
    tab.page.get_by_role("button", name="Copied").wait_for()
    assert tab.page.evaluate("navigator.clipboard.readText()") == "ls -l <dir>"
    # So are those that the server gives apart from the text, and they go along with later questions.
    served.engine.chat_template = (ROOT / "tests" / "templates" / "qwen35.jinja").read_text()
    served.engine.pieces = ["second <b>", " thought", "\n</think>\n\n", "Five", "."]
    tab.ask("z")
    tab.wait(".message.assistant >> nth=2")
    assert tab.answered() == "Five."
    thought = tab.page.locator(".message.assistant").last.locator(".thought")
    assert thought.locator(".text").text_content() == "second <b> thought" and thought.locator("b").count() == 0
    tab.ask("w")
    tab.wait(".message.assistant >> nth=3")
    tab.answered()
    turn = plain(served.engine.submissions[-1].messages)[-2]
    assert (turn["reasoning_content"], turn["content"]) == ("second <b> thought", "Five.")


@pytest.mark.slow
def test_pictures_are_kept_in_the_tab_as_far_as_there_is_room(served: Scripted, new_tab: OpenTab) -> None:
    tab = new_tab(served.url).open()
    kept, urls, contents = tab.page.evaluate("""async () => {
      const { Conversation } = await import("/ui/conversation.js");
      const { TabStore } = await import("/ui/store.js");
      const one = new Conversation();
      for (const name of ["old", "new"]) {
        one.turns.push({role: "user", text: name, pictures: [{name, size: 1, url: "data:" + "x".repeat(2500000)}]});
      }
      const kept = await new TabStore().put(one);
      const other = Object.assign(new Conversation(), await new TabStore().get(one.id));
      const { messages } = other.requestBody({detail: "auto"});
      return [kept, other.turns.map((turn) => turn.pictures[0].url.length), messages.map((m) => typeof m.content)];
    }""")
    assert (kept, urls, contents) == ("words", [0, 2_500_005], ["string", "object"])
