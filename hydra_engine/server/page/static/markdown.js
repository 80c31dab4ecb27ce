// Markdown as it streams: markdown-it parses, KaTeX and highlight.js (loaded when first needed) finish what it leaves to
// them. HTML of the model stays text, links are http(s) only, and pictures are links. Blocks that have not changed keep
// their nodes, so selections and scroll positions survive, and only the last two are parsed again while text is added.

import { copyButton } from "./clipboard.js";
import { el } from "./dom.js";
import { math } from "./math.js";
import MarkdownIt from "./vendor/markdown-it/markdown-it.esm.min.mjs";

const LANGUAGES = new Set(["bash", "c", "cpp", "css", "diff", "go", "ini", "java", "javascript", "json", "python", "rust", "sql", "typescript", "xml", "yaml"]);
const ALIASES = { "c++": "cpp", golang: "go", html: "xml", js: "javascript", jsx: "javascript", patch: "diff", py: "python", rs: "rust", sh: "bash", shell: "bash", console: "bash", svg: "xml", toml: "ini", ts: "typescript", tsx: "typescript", yml: "yaml" };
const MAX_HIGHLIGHTED = 50_000; // characters of one block of code

export const parser = new MarkdownIt({ html: false, linkify: true, breaks: true, maxNesting: 20 });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
parser.validateLink = (url) => /^https?:\/\/[^/]/i.test(url);
parser.use(math).use(taskLists);
Object.assign(parser.renderer.rules, {
  image: (tokens, index) => {
    const address = escaped(tokens[index].attrGet("src"));
    return `<a href="${address}" rel="noopener noreferrer" target="_blank">${escaped(tokens[index].content) || address}</a>`;
  },
  fence: codeBlock,
  code_block: codeBlock,
  table_open: () => '<div class="table" tabindex="0" role="group" aria-label="Table"><table>',
  table_close: () => "</table></div>",
});
// A policy forbids attributes of style, which cells would be aligned with.
for (const name of ["th_open", "td_open"]) {
  parser.renderer.rules[name] = (tokens, index) => {
    const side = /right|center/.exec(tokens[index].attrGet("style") ?? "");
    return `<${tokens[index].tag}${side ? ` class="${side[0]}"` : ""}>`;
  };
}
parser.core.ruler.push("page", ({ tokens }) => {
  for (const token of tokens) {
    // The page has h1 to h3 of its own.
    if (token.tag[0] === "h" && token.type.startsWith("heading")) token.tag = `h${Math.min(Number(token.tag[1]) + 3, 6)}`;
    for (const inner of token.children ?? []) {
      if (inner.type === "link_open") inner.attrs.push(["rel", "noopener noreferrer"], ["target", "_blank"]);
    }
  }
});

function escaped(text) {
  return parser.utils.escapeHtml(text ?? "");
}

function codeBlock(tokens, index) {
  const language = tokens[index].info?.trim().split(/\s/)[0] ?? "";
  const attribute = language ? ` data-language="${escaped(language)}"` : "";
  return `<pre tabindex="0"${attribute}><code>${escaped(tokens[index].content.replace(/\n$/, ""))}</code></pre>`;
}

/** `[ ]` and `[x]` at the beginning of an item as boxes. */
function taskLists(md) {
  md.core.ruler.after("inline", "tasks", ({ tokens, Token }) => {
    for (let at = 2; at < tokens.length; at += 1) {
      const box = tokens[at].type === "inline" && tokens[at - 2].type === "list_item_open" && /^\[([ xX])\] /.exec(tokens[at].content);
      if (!box || tokens[at].children[0]?.type !== "text") continue;
      tokens[at].children[0].content = tokens[at].children[0].content.slice(3);
      const token = new Token("task", "", 0);
      token.meta = box[1] !== " ";
      tokens[at].children.unshift(token);
      tokens[at - 2].attrJoin("class", "task");
    }
  });
  md.renderer.rules.task = (tokens, index) => {
    const done = tokens[index].meta;
    return `<span class="box" role="img" aria-label="${done ? "done" : "to do"}"${done ? " data-done" : ""}></span>`;
  };
}

// ---- what a container shows: the HTML of its blocks before they were finished, and where the last two of them begin

const drawn = new WeakMap();

/** Makes `container` show `text`. While `growing`, the last block is not yet finished with formulas and colours. */
export function renderMarkdown(container, text, { growing = false } = {}) {
  const before = drawn.get(container);
  const resumed = growing && before?.growing && text.startsWith(before.text) ? before : null;
  const from = resumed?.resume ?? 0;
  const env = resumed?.env ?? {};
  const blocks = blocksOf(text.slice(from), env);
  const kept = resumed ? resumed.keptBlocks : 0;
  const known = before?.shown ?? [];
  const shown = [...known.slice(0, kept), ...blocks.map((block) => block.html)];
  let same = kept;
  while (same < shown.length && shown[same] === known[same]) same += 1;
  while (container.childNodes.length > same) container.lastChild.remove();
  for (const html of shown.slice(same)) container.append(nodeOf(html));
  const settled = growing ? Math.max(shown.length - 1, 0) : shown.length;
  for (let at = Math.min(before?.settled ?? 0, same); at < settled; at += 1) finish(container.childNodes[at]);
  drawn.set(container, {
    text, growing, shown, env, settled,
    keptBlocks: Math.max(shown.length - 2, 0),
    resume: blocks.length >= 2 ? from + blocks.at(-2).start : from,
  });
}

/** Top-level blocks: where each starts, and the HTML of its one node. */
function blocksOf(text, env) {
  const starts = [0]; // of lines, as the parser counts them
  for (const end of text.matchAll(/\r\n?|\n/g)) starts.push(end.index + end[0].length);
  const tokens = parser.parse(text, env);
  const blocks = [];
  for (let at = 0; at < tokens.length;) {
    let end = at + 1;
    for (let depth = tokens[at].nesting; depth > 0; end += 1) depth += tokens[end].nesting;
    const own = tokens.slice(at, end);
    blocks.push({ start: starts[own[0].map[0]], html: parser.renderer.render(own, parser.options, env) });
    at = end;
  }
  return blocks;
}

function nodeOf(html) {
  const template = document.createElement("template");
  template.innerHTML = html.trim();
  return template.content.firstChild;
}

// ---- what is done when a block is complete

function finish(block) {
  for (const code of block.matches("pre") ? [block] : block.querySelectorAll("pre")) finishCode(code);
  const formulas = block.matches("[data-tex]") ? [block] : [...block.querySelectorAll("[data-tex]")];
  if (formulas.length) typeset(formulas);
}

function finishCode(pre) {
  const code = pre.firstChild, text = code.textContent;
  const box = el("div", { class: "code", "data-language": pre.dataset.language ?? "" });
  pre.replaceWith(box);
  box.append(el("div", { class: "code-top" }, el("span", {}, pre.dataset.language ?? ""), copyButton("Copy code", () => text)), pre);
  const language = ALIASES[pre.dataset.language?.toLowerCase()] ?? pre.dataset.language?.toLowerCase();
  if (LANGUAGES.has(language) && text.length <= MAX_HIGHLIGHTED) highlight(code, text, language);
}

async function highlight(code, text, language) {
  const [{ default: core }, { default: grammar }] = await Promise.all([
    import("./vendor/highlight/core.min.js"), import(`./vendor/highlight/languages/${language}.min.js`)]);
  core.registerLanguage(language, grammar);
  code.innerHTML = core.highlight(text, { language, ignoreIllegals: true }).value;
}

let katex = null;

/** Formulas stand as their source until the library is here. Its nodes are made without attributes of style. */
async function typeset(formulas) {
  katex ??= load();
  const library = await katex;
  for (const formula of formulas) {
    const { tex, display } = formula.dataset;
    library.render(tex, formula, { displayMode: display !== undefined, throwOnError: false, trust: false, output: "html", strict: false, maxExpand: 200, maxSize: 20 });
    formula.setAttribute("aria-label", tex);
    formula.setAttribute("role", "math");
  }
}

async function load() {
  document.head.append(el("link", { rel: "stylesheet", href: new URL("./vendor/katex/katex.min.css", import.meta.url).href }));
  await import("./vendor/katex/katex.min.js");
  return globalThis.katex;
}
