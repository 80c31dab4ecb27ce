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


@pytest.mark.slow
def test_common_markdown(page: Any) -> None:
    found = [(text, page.evaluate(_RENDER, text)) for text, _ in CASES]
    assert found == CASES


def test_every_beginning_looks_as_if_it_had_come_at_once(page: Any) -> None:
    """Blocks that are complete keep their nodes."""
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


# What an answer looks like must not depend on where the pieces of its stream end.
ANSWERS = [
    "<think>\nfirst *this*\n\nthen `that`\n</think>\n\n```sh\nls -l <dir>\n```\n\nend",
    "a thought whose mark the prompt has\n\n- a\n</think>\n\n# T\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n1. x\n2. y\n",
    "[a] and [b][c]\n\nx\n\ny\n\n[a]: https://h.org/x\n[c]: https://k.org\n",
    "a\r\rb\r\n\r\nc\r\rd\r```\re\r```\rf",
    "$x$\n\n$$\ny\n$$\n\n<b>x</b> <script>1</script>\n\n> q\n> r\n\n- [ ] a\n- [x] b\n\n  c\n\ntext\n===\n\n![i](https://h.org/p)",
    "1. a\n\n   b\n\n2. c\n\n- d\n\n      e\n***\nf\n",
    "  \n<think></think>\n\nx\n\ny",
    "<think>only thoughts\n\n```py\nx=1\n",
    "```\n<think>\n```\n</think>\n\nx <think>y</think>",
    "\n\n\n[a]: https://h.org\n",
    "<thin king",
    " \n ",
    "",
]
_SPLITS = """async (texts) => {
  const { AnswerView } = await import("/ui/answer.js");
  const frame = globalThis.requestAnimationFrame;
  globalThis.requestAnimationFrame = (draw) => { draw(); return 0; };
  const drawn = (pieces) => {
    const turn = { text: "", facts: null, error: null, settings: {} };
    const view = new AnswerView(turn, { bodyOf: () => [{ messages: [] }, []], again() {} });
    view.wait("");
    for (const piece of pieces) {
      turn.text += piece;
      view.grow(() => {});
    }
    view.finish();
    return view.element;
  };
  const cases = [];
  for (const text of texts) {
    const whole = drawn([text]), ways = [[...text]];
    for (let end = 0; end <= text.length; end += 1) {
      ways.push([text.slice(0, end), text.slice(end)]);
      for (let next = end + 1; next < text.length; next += 23) {
        ways.push([text.slice(0, end), text.slice(end, next), text.slice(next)]);
      }
    }
    for (const pieces of ways) cases.push([whole, drawn(pieces), pieces]);
  }
  globalThis.requestAnimationFrame = frame;
  // Code and formulas are finished by libraries, which take their time to come.
  const differs = ([whole, element]) => whole.outerHTML !== element.outerHTML;
  const settled = () => !cases.some(differs) && cases.some(([whole]) => whole.querySelector(".hljs-built_in, .katex"));
  for (let i = 0; i < 100 && !settled(); i += 1) await new Promise((resolve) => setTimeout(resolve, 20));
  return [cases.length, cases.filter(differs).map(([, , pieces]) => pieces)];
}"""


@pytest.mark.slow
def test_an_answer_looks_the_same_wherever_its_pieces_end(page: Any) -> None:
    num_cases, wrong = page.evaluate(_SPLITS, ANSWERS)
    assert wrong == [] and num_cases > 1000


@pytest.mark.slow
def test_an_answer_that_cannot_be_drawn_ends_with_its_text_and_an_error(page: Any) -> None:
    while_growing, at_the_end = page.evaluate(
        """async () => {
          const { AnswerView } = await import("/ui/answer.js");
          const { parser } = await import("/ui/markdown.js");
          const parse = parser.parse, reported = [];
          const report = globalThis.reportError, frame = globalThis.requestAnimationFrame;
          globalThis.reportError = (error) => reported.push(error.message);
          globalThis.requestAnimationFrame = (draw) => { draw(); return 0; };
          const looks = (growing) => {
            parser.parse = () => { throw new Error("no such rule"); };
            const turn = { text: "**a** <b>\\nc", facts: null, error: null, settings: {} };
            const view = new AnswerView(turn, { bodyOf: () => [{ messages: [] }, []], again() {} });
            view.wait("Waiting");
            let drawn = 0;
            if (growing) for (let i = 0; i < 3; i += 1) view.grow(() => { drawn += 1; });
            parser.parse = growing ? parse : parser.parse;
            view.finish();
            parser.parse = parse;
            const find = (mark) => view.element.querySelector(`[data-testid=${mark}]`)?.textContent;
            return [view.element.className, find("answer"), find("error"), find("status"),
              view.element.querySelectorAll(".tools button").length, drawn, reported.splice(0)];
          };
          try {
            return [looks(true), looks(false)];
          } finally {
            parser.parse = parse;
            Object.assign(globalThis, { reportError: report, requestAnimationFrame: frame });
          }
        }"""
    )
    error = "The page cannot draw this answer: no such rule."
    expected = ["message assistant", "**a** <b>\nc", error, "", 2]
    assert while_growing == [*expected, 3, ["no such rule"]]
    assert at_the_end == [*expected, 0, ["no such rule"]]


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


@pytest.mark.slow
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
