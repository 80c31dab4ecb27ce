"""markdown.js in a real browser: what it adds to markdown-it, while text streams, and that nobody can slow it down."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.page.conftest import Scripted


@pytest.fixture(scope="module")
def page(browser: Any, shared_server: Scripted) -> Iterator[Any]:
    context = browser.new_context()
    page = context.new_page()
    problems: list[str] = []
    page.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
    page.goto(shared_server.url)
    yield page
    context.close()
    assert problems == []  # above all, nothing that the policy has refused


_RENDER = """async (text) => {
  const { renderMarkdown } = await import("/ui/markdown.js");
  const box = document.createElement("div");
  renderMarkdown(box, text, { growing: true });
  return box.innerHTML.replace(/>\\n+</g, "><");
}"""

LINK = 'rel="noopener noreferrer" target="_blank"'
CASES = [
    ("plain", "<p>plain</p>"),
    ("one\ntwo\n\nthree", "<p>one<br>\ntwo</p><p>three</p>"),
    ("# Title #\n### Third", "<h4>Title</h4><h6>Third</h6>"),
    ("2 * 3 * 4 and snake_case_name", "<p>2 * 3 * 4 and snake_case_name</p>"),
    ("**open and `tick", "<p>**open and `tick</p>"),
    ("```\nopen <b>", '<pre tabindex="0"><code>open &lt;b&gt;</code></pre>'),
    ("```py x\nx = 1\n\n", '<pre tabindex="0" data-language="py"><code>x = 1\n</code></pre>'),
    ("- a\n- b\n  - c\n- d", "<ul><li>a</li><li>b\n<ul><li>c</li></ul></li><li>d</li></ul>"),
    ("3. x\n4. y", '<ol start="3"><li>x</li><li>y</li></ol>'),
    (
        "- [ ] open\n- [x] done\n- [y] neither",
        '<ul><li class="task"><span class="box" role="img" aria-label="to do"></span> open</li>'
        '<li class="task"><span class="box" role="img" aria-label="done" data-done=""></span> done</li>'
        "<li>[y] neither</li></ul>",
    ),
    (
        "| a | b |\n|:-:|--:|\n| 1 | `x\\|y` |\n| 2 |",
        '<div class="table" tabindex="0" role="group" aria-label="Table"><table>'
        '<thead><tr><th class="center">a</th><th class="right">b</th></tr></thead>'
        '<tbody><tr><td class="center">1</td><td class="right"><code>x|y</code></td></tr>'
        '<tr><td class="center">2</td><td class="right"></td></tr></tbody></table></div>',
    ),
    ("[x](ftp://h/y) [y](//h) [z](/v1)", "<p>[x](ftp://h/y) [y](//h) [z](/v1)</p>"),
    ("see https://h.org/a_b. ok", f'<p>see <a href="https://h.org/a_b" {LINK}>https://h.org/a_b</a>. ok</p>'),
    ("![c](https://h.org/y.png)", f'<p><a href="https://h.org/y.png" {LINK}>c</a></p>'),
    ("<b onclick=x>", "<p>&lt;b onclick=x&gt;</p>"),
    (
        r"$x^2$ is $5 to $10, \(a<b\)",
        '<p><span class="math" data-tex="x^2">$x^2$</span> is $5 to $10, '
        '<span class="math" data-tex="a&lt;b">\\(a&lt;b\\)</span></p>',
    ),
    (
        "a\n$$\nx\n$$\nb \\[y\\]",
        '<p>a</p><div class="math" data-tex="x" data-display="">$$\nx\n$$</div>'
        '<p>b <span class="math" data-tex="y" data-display="">\\[y\\]</span></p>',
    ),
    ("$ 5 and 6 $ and $$", "<p>$ 5 and 6 $ and $$</p>"),
    ("", ""),
]


def test_common_markdown(page: Any) -> None:
    found = [(text, page.evaluate(_RENDER, text)) for text, _ in CASES]
    assert found == CASES


def test_every_beginning_looks_as_if_it_had_come_at_once(page: Any) -> None:
    """And blocks that are complete keep their nodes."""
    text = "\n\n".join(text for text, _ in CASES) + "\n\n1. a\n\n2. b\n\n> q\n#x\n\n- a\n\n- b\ntext\n===\n"
    wrong, kept = page.evaluate(
        """async (text) => {
          const { renderMarkdown } = await import("/ui/markdown.js");
          const box = document.createElement("div"), wrong = [];
          let first = null, kept = true;
          for (let end = 1; end <= text.length; end += 1) {
            renderMarkdown(box, text.slice(0, end), { growing: true });
            const fresh = document.createElement("div");
            renderMarkdown(fresh, text.slice(0, end), { growing: true });
            if (box.innerHTML !== fresh.innerHTML) wrong.push(end);
            if (end === 10) first = box.firstChild;
            if (end > 10 && box.firstChild !== first) kept = false;
          }
          return [wrong, kept];
        }""",
        text,
    )
    assert wrong == [] and kept


def test_a_long_answer_costs_what_is_added(page: Any) -> None:
    """The parser sees the last blocks only, however long the text has become."""
    seen = page.evaluate(
        """async () => {
          const { parser, renderMarkdown } = await import("/ui/markdown.js");
          const box = document.createElement("div"), parse = parser.parse;
          let seen = 0;
          parser.parse = (text, env) => { seen = Math.max(seen, text.length); return parse.call(parser, text, env); };
          let text = "";
          for (let line = 0; line < 300; line += 1) {
            text += `Sentence ${line} of a paragraph with *words*.\n\n`;
            renderMarkdown(box, text, { growing: true });
          }
          parser.parse = parse;
          return [seen, box.childNodes.length];
        }"""
    )
    assert seen[0] < 500 and seen[1] == 300


def test_formulas_and_code_are_finished_by_their_libraries(page: Any) -> None:
    text = (
        "$\\frac{a}{\\sqrt b}$ and \\(\\unknown x\\)\n\n```python\nimport os  # x\n```\n\n$$\\href{https://x.org}{y}$$"
    )
    found = page.evaluate(
        """async (text) => {
          const { renderMarkdown } = await import("/ui/markdown.js");
          const box = document.createElement("div");
          document.querySelector("#messages").append(box);
          renderMarkdown(box, text);
          const done = () => box.querySelector(".hljs-keyword") && box.querySelectorAll(".katex").length === 3;
          for (let i = 0; i < 300 && !done(); i += 1) await new Promise((resolve) => setTimeout(resolve, 10));
          const found = [
            box.querySelector(".hljs-keyword")?.textContent, box.querySelector(".math").getAttribute("aria-label"),
            box.querySelectorAll(".katex").length, box.querySelectorAll("a").length,
            box.textContent.includes("unknown"),
          ];
          box.remove();
          return found;
        }""",
        text,
    )
    assert found == ["import", "\\frac{a}{\\sqrt b}", 3, 0, True]


@pytest.mark.slow
def test_hostile_text_takes_no_more_than_its_length(page: Any) -> None:
    """Four times as much text: not far from four times as long."""
    units = ["*", "_a", "`", "``x", "[", "![a](", "> ", "- ", "|", "https://", "\\", "**a ", "1. ", "*a_b "]
    units += ["$a ", "$", r"\(", "$$\n", "\\[ x\n", "<think>"]
    times = page.evaluate(
        """async (units) => {
          const { renderMarkdown } = await import("/ui/markdown.js");
          const time = (unit, count) => {
            const began = performance.now();
            renderMarkdown(document.createElement("div"), unit.repeat(count), { growing: true });
            return performance.now() - began;
          };
          return units.map((unit) => [unit, time(unit, 3000), time(unit, 12000)]);
        }""",
        units,
    )
    assert [found for found in times if found[2] > 40 * max(found[1], 5)] == []
