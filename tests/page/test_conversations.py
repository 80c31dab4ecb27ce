"""The list of conversations in a real browser: kept, named, deleted, exported, imported, in two tabs, with a key."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.calls import plain
from tests.page.conftest import OpenTab, Scripted, Tab
from tests.page.test_chat import STAR, add_star, asked

pytestmark = pytest.mark.usefixtures("browser")
Serve = Callable[..., Scripted]


def another(tab: Tab) -> Tab:
    """Another tab of the same browser."""
    other = Tab(tab.page.context.new_page(), tab.url).open()
    other.problems = tab.problems
    return other


def names(tab: Tab) -> list[str]:
    return [name.strip() for name in tab.page.locator(".talk-name").all_text_contents()]


def say(tab: Tab, text: str) -> None:
    """Asks, and returns when the answer and the list are complete."""
    number = tab.page.locator(".message.user").count()
    tab.ask(text)
    tab.wait(f".message.user >> nth={number}")
    tab.answered()
    tab.wait("[data-testid=talk]:first-child [aria-current]", state="attached")  # the drawer may be closed


def press(tab: Tab, action: str, name: str) -> None:
    """A button of a conversation in the list, which is there while the pointer is."""
    tab.page.locator(".talks li", has=tab.page.get_by_role("button", name=f"{action} {name}", exact=True)).hover()
    tab.press(f"{action} {name}")


def kept(tab: Tab) -> Any:
    """[conversations, pictures] in the browser's database."""
    return tab.page.evaluate("""() => new Promise((resolve) => {
      const opening = indexedDB.open("hydra");
      opening.onupgradeneeded = () => { opening.transaction.abort(); };
      opening.onerror = () => resolve([0, 0]);
      opening.onsuccess = () => {
        const transaction = opening.result.transaction(["conversations", "media"]);
        const counts = ["conversations", "media"].map((name) => transaction.objectStore(name).count());
        transaction.oncomplete = () => resolve(counts.map((request) => request.result));
      };
    })""")


@pytest.mark.slow
def test_conversations_are_named_by_their_first_question_and_found_again(served: Scripted, new_tab: OpenTab) -> None:
    tab = new_tab(served.url, view="chat").open()
    assert names(tab) == [] and not tab.get("new-chat").is_visible()
    say(tab, "the first\nof two lines")
    tab.get("new-chat").click()
    tab.wait("#empty")
    assert tab.page.evaluate("document.activeElement.id") == "prompt"
    add_star(tab)
    say(tab, "the second")
    assert names(tab) == ["the second", "the first"]
    tab.page.reload()
    tab.wait(".message.assistant")
    assert tab.get("answer").all_inner_texts() == ["the second"] and tab.page.locator(".sent img").count() == 1
    # Renamed where it stands; Escape takes it back.
    for key, name in (("Escape", "the second"), ("Enter", "<b>Stars</b>")):
        press(tab, "Rename", "the second")
        tab.get("talk-name").fill("<b>Stars</b>")
        tab.page.keyboard.press(key)
        tab.page.locator(".talk-name").get_by_text(name, exact=True).wait_for()
        assert "Rename" in tab.page.evaluate("document.activeElement.getAttribute('aria-label')")
    tab.page.locator(".talk-open").last.click()
    tab.wait_for("document.querySelector('[data-testid=answer]').textContent.startsWith('the first')")
    say(tab, "more")
    assert asked(served) == ["the first\nof two lines", "the first of two lines", "more"]
    assert names(tab) == ["the first", "<b>Stars</b>"]
    # Deleted, and brought back with its picture.
    assert kept(tab) == [2, 1]
    press(tab, "Delete", "<b>Stars</b>")
    tab.wait("[data-testid=drawer-notice]:not([hidden])")
    assert names(tab) == ["the first"] and kept(tab) == [1, 0]
    tab.press("Undo")
    tab.wait("[data-testid=talk] >> nth=1")
    assert kept(tab) == [2, 1]
    tab.page.locator(".talk-open").last.click()
    tab.wait(".sent img")
    # A new tab begins anew and has the same list; deleting all leaves nothing.
    other = another(tab)
    other.wait("[data-testid=talk] >> nth=1")
    assert other.page.locator(".message").count() == 0
    tab.page.on("dialog", lambda dialog: dialog.accept())
    tab.press("Delete all")
    other.wait("#talks-empty")
    tab.wait("#empty")
    assert kept(tab) == [0, 0] and names(other) == []


@pytest.mark.slow
def test_two_tabs_write_over_nothing(served: Scripted, new_tab: OpenTab) -> None:
    tab = new_tab(served.url, view="chat").open()
    say(tab, "one")
    other = another(tab)
    other.page.locator(".talk-open").click()
    other.wait(".message.assistant")
    # What one tab says, the other one shows.
    say(other, "two")
    tab.wait_for("document.querySelectorAll('.message').length === 4")
    # Both go on at once: two conversations.
    served.engine.token_s, served.engine.pieces = 0.05, [f"w{i} " for i in range(60)]
    tab.ask("left")
    other.ask("right")
    for page in (tab, other):
        page.wait(".message.assistant >> nth=2")
        page.answered()
    tab.wait("[data-testid=talk] >> nth=1")
    tab.until(lambda: sorted(names(tab)) == ["one", "one (copy)"])
    last = {page.page.locator(".bubble p").last.inner_text() for page in (tab, other)}
    assert last == {"left", "right"} and kept(tab)[0] == 2
    seen = set()
    for row in range(2):
        tab.page.locator(".talk-open").nth(row).click()
        tab.wait(f"[data-testid=talk]:nth-child({row + 1}) [aria-current]")
        seen.add(tab.page.locator(".bubble p").last.inner_text())
    assert seen == last
    # What is deleted in one tab is not written again by the other.
    copy = other.page.locator("[aria-current] .talk-name").inner_text()
    served.engine.pieces = [f"w{i} " for i in range(4000)]
    other.ask("on and on")
    other.wait(".message.assistant >> nth=3")
    press(tab, "Delete", copy)
    other.wait("#empty")
    tab.page.wait_for_timeout(1500)
    assert kept(tab)[0] == 1


@pytest.mark.slow
def test_an_answer_stops_where_another_conversation_is_opened_and_keeps_its_words(
    served: Scripted, new_tab: OpenTab
) -> None:
    tab = new_tab(served.url, view="chat").open()
    served.engine.token_s, served.engine.pieces = 0.05, [f"w{i} " for i in range(2000)]
    tab.ask("go on")
    tab.wait_for("document.querySelector('[data-testid=answer]')?.textContent.includes('w5 ')")
    tab.get("new-chat").click()
    tab.wait("#empty")
    tab.until(lambda: len(served.engine.cancelled) == 1)
    tab.page.locator(".talk-open").click()
    tab.wait(".message.assistant")
    assert "w5 " in tab.answered() and "stopped" in tab.get("usage").inner_text()


SLOW_DATABASE = """
  const own = Object.getOwnPropertyDescriptor(IDBTransaction.prototype, "oncomplete");
  Object.defineProperty(IDBTransaction.prototype, "oncomplete", { set(done) {
    own.set.call(this, (event) => setTimeout(() => done(event), this.mode === "readonly" ? 1500 : 0));
  } });
"""


@pytest.mark.slow
def test_what_is_asked_before_the_conversations_are_read_is_answered(served: Scripted, new_tab: OpenTab) -> None:
    tab = new_tab(served.url, view="chat")
    tab.page.add_init_script(SLOW_DATABASE)
    say(tab.open(), "first")
    tab.page.wait_for_timeout(2000)
    assert names(tab) == ["first"] and asked(served) == ["first"]
    tab.page.reload()
    tab.wait("[data-testid=connection][data-state=open]")
    say(tab, "second")  # while the first one, open before, is read
    tab.page.wait_for_timeout(2000)
    assert names(tab) == ["second", "first"] and tab.page.locator(".message").count() == 2
    assert served.engine.cancelled == []


@pytest.mark.slow
def test_a_server_with_a_key_keeps_conversations_in_the_tab(scripted: Serve, new_tab: OpenTab) -> None:
    served = scripted(api_key=("open sesame",))
    tab = new_tab(served.url, view="chat", accept_downloads=True)
    tab.expected = ("401",)
    tab.open(state="denied")
    assert "Kept in this tab" in tab.page.locator("#drawer-where").inner_text()
    tab.get("key").fill("open sesame")
    tab.page.keyboard.press("Enter")
    tab.wait("[data-testid=connection][data-state=open]")
    add_star(tab)
    say(tab, "a secret")
    tab.page.reload()
    tab.wait(".sent img")
    tab.until(lambda: names(tab) == ["a secret"] and kept(tab) == [0, 0])
    with tab.page.expect_download() as waiting:
        tab.press("Export JSON")
    assert "sesame" not in waiting.value.path().read_text()
    # Deleted while its answer grows, it does not come back.
    served.engine.token_s, served.engine.pieces = 0.05, [f"w{i} " for i in range(2000)]
    tab.ask("go on")
    tab.wait(".message.assistant >> nth=1")
    press(tab, "Delete", "a secret")
    tab.wait("#empty")
    tab.until(lambda: len(served.engine.cancelled) == 1)
    tab.page.wait_for_timeout(100)
    assert names(tab) == [] and "secret" not in tab.page.evaluate("JSON.stringify({...sessionStorage})")
    tab.press("Undo")
    tab.wait("[data-testid=talk]")
    other = Tab(tab.page.context.new_page(), tab.url).open(state="denied")
    assert names(other) == [] and "secret" not in json.dumps(other.page.evaluate("({...localStorage})"))
    tab.page.on("dialog", lambda dialog: dialog.accept())
    tab.press("Delete all")
    tab.wait("#empty")
    assert "secret" not in tab.page.evaluate("JSON.stringify({...sessionStorage})")


CLOSED_ONCE = """() => {
  const transaction = IDBDatabase.prototype.transaction;
  IDBDatabase.prototype.transaction = function (...options) {
    IDBDatabase.prototype.transaction = transaction;
    this.close();
    return this.transaction(...options);
  };
}"""


@pytest.mark.slow
def test_what_does_not_fit_is_said_and_the_words_are_kept(served: Scripted, new_tab: OpenTab) -> None:
    tab = new_tab(served.url, view="chat")
    devtools = tab.page.context.new_cdp_session(tab.page)
    devtools.send("Storage.overrideQuotaForOrigin", {"origin": tab.url, "quotaSize": 250_000})
    tab.open()
    say(tab, "small")
    tab.get("image-input").set_input_files(
        [{"name": "large.png", "mimeType": "image/png", "buffer": STAR.read_bytes() + bytes(400_000)}]
    )
    tab.wait("[data-testid=image-preview]")
    say(tab, "large")
    tab.page.get_by_text("not all pictures and videos of this conversation are kept").wait_for()
    tab.page.reload()
    tab.wait(".message.assistant >> nth=1")
    assert tab.page.locator(".sent .gone").inner_text() == "not kept" and asked(served)[-1] == "large"
    # Data that is cleared under an open page ends nothing.
    devtools.send("Storage.clearDataForOrigin", {"origin": tab.url, "storageTypes": "indexeddb"})
    tab.get("new-chat").click()
    tab.wait("#empty")
    tab.page.evaluate(CLOSED_ONCE)  # which the browser may tell later
    say(tab, "after")
    tab.page.reload()
    tab.wait(".message.assistant")
    tab.until(lambda: names(tab) == ["after"] and kept(tab) == [1, 0])
    # Without a database the tab's storage is used.
    tab = new_tab(served.url, view="chat")
    tab.page.add_init_script("delete window.indexedDB; Object.defineProperty(window, 'indexedDB', {value: undefined})")
    tab.open()
    say(tab, "still")
    tab.page.reload()
    tab.wait(".message.assistant")
    tab.until(lambda: names(tab) == ["still"])


@pytest.mark.slow
def test_a_conversation_is_exported_and_imported_in_the_form_of_the_terminal(
    served: Scripted, new_tab: OpenTab, tmp_path: Path
) -> None:
    tab = new_tab(served.url, view="chat").open()
    tab.press("Settings")
    tab.get("system").fill("Be *brief*.")
    tab.get("seed").fill("7")
    add_star(tab)
    say(tab, "What is that?")
    with tab.page.expect_download() as waiting:
        tab.press("Export JSON")
    assert waiting.value.suggested_filename == "What-is-that.json"
    path = tmp_path / "What-is-that.json"
    waiting.value.save_as(path)
    saved = json.loads(path.read_text())
    assert list(saved) == ["model", "settings", "messages"] and saved["settings"] == {"seed": 7}
    answer = {"role": "assistant", "content": "What is that?"}
    assert saved["messages"] == [*plain(served.engine.submissions[0].messages), answer]
    with tab.page.expect_download() as waiting:
        tab.press("Export Markdown")
    text = waiting.value.path().read_text()
    assert text.startswith("# What is that?\n\n**System**\n\nBe *brief*.\n\n**You**\n\n*stars.png, 3 KiB*\n\nWhat")
    assert text.endswith("**stub**\n\nWhat is that?\n")
    # Into another browser, where nothing is set: the same messages go along, as it says under which model.
    other = new_tab(served.url, view="chat").open()
    saved["model"] = "../another/<b>model"
    saved["settings"] |= {"stop": "x"}
    path.write_text(json.dumps(saved))
    other.get("import-input").set_input_files([path])
    other.wait("[data-testid=drawer-notice]:not([hidden])")  # behind the save
    assert other.get("drawer-notice").inner_text() == "The page has no setting stop: it is not used."
    assert names(other) == ["What-is-that"] and other.get("system").input_value() == "Be *brief*."
    assert other.get("other-model").inner_text() == "<b>model answered here before; stub answers now."
    say(other, "And now?")
    question = {"role": "user", "content": "And now?"}
    assert plain(served.engine.submissions[-1].messages) == [*saved["messages"], question]
    assert served.engine.submissions[-1].sampling.seed == 7
    assert other.page.locator("#messages").inner_text().count("What is that?") == 2


def document(content: Any, role: str = "user") -> str:
    return json.dumps({"messages": [{"role": role, "content": content}]})


def picture(url: str) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": url}}]


WRONG = {
    "no": "wrong.json is not JSON.",
    "[]": "wrong.json has no list of messages",
    '{"messages": []}': "wrong.json has no list of messages",
    json.dumps({"messages": [{"role": "user", "content": "x"}] * 2001}): "wrong.json has more than 2,000 messages.",
    document("x", "tool"): 'Message 1 has the role "tool"; the page knows',
    document(5): "Message 1 has no content.",
    document([{"type": "input_audio"}]): "Message 1 has parts that the page does not know",
    document([{"type": "text", "text": "x"}, *picture("data:image/png;base64,AAAA")]): "Message 1 has parts that",
    document(picture("javascript:alert(1)")): "Message 1 has a picture that is neither data nor a web address.",
    document(picture("data:image/svg+xml;base64,AAAA")): "Message 1 has a picture whose data is no base64 of a format",
    document(picture("data:image/png;base64,AA\"'<AA")): "Message 1 has a picture whose data is no base64",
    document(picture("data:image/png;base64,AAAA"), "assistant"): "Message 1 has parts that the page does not know",
}


@pytest.mark.slow
def test_wrong_files_are_refused_in_a_sentence_and_text_stays_text(
    served: Scripted, new_tab: OpenTab, tmp_path: Path
) -> None:
    tab = new_tab(served.url, view="chat").open()
    path = tmp_path / "wrong.json"
    for text, words in WRONG.items():
        path.write_text(text)
        tab.get("import-input").set_input_files([path])
        tab.page.get_by_text(words).wait_for()
        assert tab.page.locator(".message").count() == 0 and names(tab) == []
    with path.open("wb") as file:
        file.truncate((64 << 20) + 1)
    tab.get("import-input").set_input_files([path])
    tab.page.get_by_text("wrong.json is larger than 64 MiB.").wait_for()
    # Nothing of a file becomes markup, and nothing on the web is fetched: that would be a problem of this tab.
    hostile = '<img src=x onerror="window.hit=1"><script>window.hit=1</script>'
    parts = [*picture("https://example.org/" + hostile), {"type": "text", "text": hostile}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": hostile, "reasoning_content": hostile},
    ]
    path = tmp_path / "<b>.json"
    path.write_text(json.dumps({"model": hostile, "messages": messages, "settings": {hostile: 1}}))
    tab.get("import-input").set_input_files([path])
    tab.wait("[data-testid=talk]")
    assert names(tab) == ["<b>"] and tab.page.evaluate("window.hit") is None
    assert tab.page.locator("#messages :is(img, script)").count() == 0
    assert hostile in tab.page.locator(".bubble p").inner_text() and tab.page.locator(".sent .plain").count() == 1
    with tab.page.expect_download() as waiting:
        tab.press("Export JSON")
    assert json.loads(waiting.value.path().read_text())["messages"] == messages
    # A question without an answer goes where one writes.
    path.write_text(document([{"type": "text", "text": "and now?"}]))
    tab.get("import-input").set_input_files([path])
    tab.wait_for("document.querySelector('#prompt').value === 'and now?'")


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 820, 1440])
def test_the_list_by_keyboard(served: Scripted, new_tab: OpenTab, width: int) -> None:
    tab = new_tab(served.url, view="chat", viewport={"width": width, "height": 740}).open()
    for text in ("one", "two"):
        tab.get("new-chat").click() if text == "two" else None
        say(tab, text)
    button, keys = tab.get("drawer-button"), tab.page.keyboard
    focused = "document.activeElement.textContent.trim() || document.activeElement.getAttribute('aria-label')"
    if width < 1100:
        assert not tab.page.locator("#drawer").is_visible()
        button.focus()
        keys.press("Enter")
        assert tab.page.evaluate("document.querySelector('.chat').inert") and tab.page.evaluate(focused) == "New chat"
        keys.press("Escape")
        assert not tab.page.locator("#drawer").is_visible() and tab.page.evaluate("document.activeElement.id") == (
            "drawer-button"
        )
        keys.press("Enter")
    else:
        tab.page.locator("#drawer-new").focus()
    keys.press("Tab")
    keys.press("Tab")
    assert tab.page.evaluate(focused) == "Rename two" and button.get_attribute("aria-expanded") == "true"
    keys.press("Enter")
    keys.type("second")
    keys.press("Enter")
    tab.page.locator(".talk-name").get_by_text("second").wait_for()
    keys.press("Tab")
    keys.press("Tab")
    assert tab.page.evaluate(focused).startswith("one")
    keys.press("Enter")
    tab.wait_for("document.querySelector('[data-testid=answer]').textContent === 'one'")
    tab.wait_for("document.activeElement.id === 'prompt'")
    assert tab.page.locator("#drawer").is_visible() == (width > 1100)
    assert not tab.page.evaluate("document.querySelector('.chat').inert")
    button.click()
    tab.page.reload()
    tab.wait(".message.assistant")
    assert not tab.page.locator("#drawer").is_visible()
