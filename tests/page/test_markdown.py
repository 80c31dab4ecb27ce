"""markdown.js in a real browser: what becomes of common markdown, while it streams too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.page.conftest import Scripted


@pytest.fixture
def page(browser: Any, scripted: Callable[..., Scripted]) -> Iterator[Any]:
    context = browser.new_context()
    page = context.new_page()
    page.goto(scripted().url)
    yield page
    context.close()


_RENDER = """async (text) => {
  const { renderMarkdown } = await import("/ui/markdown.js");
  const box = document.createElement("div");
  renderMarkdown(box, text);
  return box.innerHTML;
}"""

CASES = [
    ("plain", "<p>plain</p>"),
    ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
    ("# Title #\n### Third", "<h4>Title</h4><h6>Third</h6>"),
    (
        "**bold** *it* __b__ _i_ ~~no~~",
        "<p><strong>bold</strong> <em>it</em> <strong>b</strong> <em>i</em> <del>no</del></p>",
    ),
    ("***both***", "<p><strong><em>both</em></strong></p>"),
    ("**a *b* c**", "<p><strong>a <em>b</em> c</strong></p>"),
    ("2 * 3 * 4 and snake_case_name", "<p>2 * 3 * 4 and snake_case_name</p>"),
    ("**open and `tick", "<p>**open and `tick</p>"),
    (r"\*no\* \\", r"<p>*no* \</p>"),
    ("`a*b*` ``x`y``", "<p><code>a*b*</code> <code>x`y</code></p>"),
    ("```py\nx = 1\n\n# c\n```\nend", '<pre tabindex="0" data-language="py"><code>x = 1\n\n# c</code></pre><p>end</p>'),
    ("```\nopen <b>", '<pre tabindex="0"><code>open &lt;b&gt;</code></pre>'),
    ("- a\n- b\n  - c\n- d", "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>"),
    ("3. x\n4. y", '<ol start="3"><li>x</li><li>y</li></ol>'),
    ("text\n* item\nlazy\n\nnext", "<p>text</p><ul><li>item<br>lazy</li></ul><p>next</p>"),
    ("1. a\n\n   more\n2. b", "<ol><li>a<p>more</p></li><li>b</li></ol>"),
    ("> q\n> r\n\ns", "<blockquote><p>q<br>r</p></blockquote><p>s</p>"),
    ("---", "<hr>"),
    (
        "| a | b |\n|---|--:|\n| 1 | `x\\|y` |\n| 2 |",
        '<div class="table" tabindex="0" role="group" aria-label="Table"><table>'
        '<thead><tr><th>a</th><th class="right">b</th></tr></thead>'
        '<tbody><tr><td>1</td><td class="right"><code>x|y</code></td></tr>'
        '<tr><td>2</td><td class="right"></td></tr></tbody></table></div>',
    ),
    ("a | b\nno table", "<p>a | b<br>no table</p>"),
    ("[x](ftp://h/y) [y](//h)", "<p>[x](ftp://h/y) [y](//h)</p>"),
    (
        "see https://h.org/a_b. ok",
        '<p>see <a href="https://h.org/a_b" rel="noopener noreferrer" target="_blank">https://h.org/a_b</a>. ok</p>',
    ),
    ("<b onclick=x>&amp;", "<p>&lt;b onclick=x&gt;&amp;amp;</p>"),
    ("", ""),
]


def test_common_markdown(page: Any) -> None:
    found = [(text, page.evaluate(_RENDER, text)) for text, _ in CASES]
    assert found == CASES


def test_every_beginning_looks_as_if_it_had_come_at_once(page: Any) -> None:
    """And blocks that are complete keep their nodes."""
    text = "\n\n".join(text for text, _ in CASES)
    wrong, kept = page.evaluate(
        """async (text) => {
          const { renderMarkdown } = await import("/ui/markdown.js");
          const box = document.createElement("div"), wrong = [];
          let first = null, kept = true;
          for (let end = 1; end <= text.length; end += 1) {
            renderMarkdown(box, text.slice(0, end));
            const fresh = document.createElement("div");
            renderMarkdown(fresh, text.slice(0, end));
            if (box.innerHTML !== fresh.innerHTML) wrong.push(end);
            if (end === 10) first = box.firstChild;
            if (end > 10 && box.firstChild !== first) kept = false;
          }
          return [wrong, kept];
        }""",
        text,
    )
    assert wrong == [] and kept


def test_hostile_text_takes_no_more_than_its_length(page: Any) -> None:
    """Four times as much text: not far from four times as long."""
    units = ["*", "_a", "`", "``x", "[", "![a](", "> ", "- ", "|", "https://", "\\", "**a ", "1. ", "*a_b "]
    times = page.evaluate(
        """async (units) => {
          const { renderMarkdown } = await import("/ui/markdown.js");
          const time = (unit, count) => {
            const began = performance.now();
            renderMarkdown(document.createElement("div"), unit.repeat(count));
            return performance.now() - began;
          };
          return units.map((unit) => [unit, time(unit, 5000), time(unit, 20000)]);
        }""",
        units,
    )
    assert [found for found in times if found[2] > 40 * max(found[1], 5)] == []
