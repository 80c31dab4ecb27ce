// Markdown as DOM nodes, while it streams. Text becomes text nodes and links are http(s) only; raw HTML stays text.
// Blocks that have not changed since the last call keep their nodes, so selections and scroll positions survive.

import { el } from "./dom.js";

const MAX_DEPTH = 6;
const MAX_LINK = 2000; // characters of a link in brackets
const drawn = new WeakMap(); // container -> sources of its blocks

/** Makes `container` show `text`, which usually is the last one with something behind it. */
export function renderMarkdown(container, text) {
  const blocks = blocksOf(text.split("\n"), 0);
  const before = drawn.get(container) ?? [];
  let same = 0;
  while (same < blocks.length && same < before.length && blocks[same].source === before[same]) same += 1;
  while (container.childNodes.length > same) container.lastChild.remove();
  for (const block of blocks.slice(same)) container.append(block.draw());
  drawn.set(container, blocks.map((block) => block.source));
}

// ---- blocks: a source, by which a block is known again, and a function that draws it

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}(?:(?:- *){3,}|(?:\* *){3,}|(?:_ *){3,})$/;
const ITEM = /^( {0,12})([-*+]|\d{1,9}[.)])( {1,4}|\t)(.*)$/;

function blocksOf(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [end, draw] = blockAt(lines, at, depth);
    blocks.push({ source: lines.slice(at, end).join("\n"), draw });
    at = end;
  }
  return blocks;
}

function blockAt(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return code(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) {
    const title = heading[2].replace(/[ \t]#{1,6}[ \t]*$/, "");
    // The page has h1 to h3 of its own.
    return [at + 1, () => el(`h${Math.min(heading[1].length + 3, 6)}`, {}, inline(title))];
  }
  if (RULE.test(line)) return [at + 1, () => el("hr")];
  if (depth < MAX_DEPTH && line.startsWith(">")) return quote(lines, at, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return list(lines, at, depth);
  if (isTable(lines, at)) return table(lines, at);
  return paragraph(lines, at, depth);
}

function code(lines, at, [, fence, language]) {
  let end = at + 1;
  const closes = (line) => line.trim().length >= fence.length && !line.trim().replaceAll(fence[0], "");
  while (end < lines.length && !closes(lines[end])) end += 1;
  const text = lines.slice(at + 1, end).join("\n");
  const attributes = language ? { "data-language": language } : {};
  return [Math.min(end + 1, lines.length), () => el("pre", { tabindex: "0", ...attributes }, el("code", {}, text))];
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && lines[end].startsWith(">")) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(/^> ?/, ""));
  return [end, () => el("blockquote", {}, ...blocksOf(inner, depth + 1).map((block) => block.draw()))];
}

function list(lines, at, depth) {
  const [, indent, marker] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(marker);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const match = ITEM.exec(lines[end]);
    const begins = match && match[1].length <= indent.length + 1 && /\d/.test(match[2]) === ordered;
    if (begins && !RULE.test(lines[end])) {
      items.push({ width: match[1].length + match[2].length + 1, lines: [match[4]] });
    } else if (!items.length || !belongs(lines, end, items.at(-1))) {
      break;
    } else {
      const { width } = items.at(-1);
      const own = lines[end].length - lines[end].trimStart().length;
      items.at(-1).lines.push(lines[end].slice(Math.min(own, width)));
    }
    end += 1;
  }
  const start = ordered && parseInt(marker, 10) !== 1 ? { start: parseInt(marker, 10) } : {};
  return [end, () => el(ordered ? "ol" : "ul", start, ...items.map((item) => listItem(item.lines, depth)))];
}

/** Whether a line continues the item: indented, or a plain line that follows its text directly. */
function belongs(lines, at, item) {
  const line = lines[at];
  if (!line.trim()) {
    const next = lines.slice(at + 1, at + 3).find((other) => other.trim()) ?? "";
    return /^( {2,}|\t)/.test(next) || ITEM.test(next);
  }
  if (/^( {2,}|\t)/.test(line)) return true;
  const starts = FENCE.test(line) || HEADING.test(line) || RULE.test(line) || ITEM.test(line) || line.startsWith(">");
  return !starts && Boolean(lines[at - 1].trim()) && Boolean(item.lines.at(-1)?.trim());
}

function listItem(lines, depth) {
  const blocks = blocksOf(lines, depth + 1);
  const nodes = blocks.map((block) => block.draw());
  // A tight item has its text directly in it.
  if (nodes[0]?.nodeName === "P") return el("li", {}, ...nodes[0].childNodes, ...nodes.slice(1));
  return el("li", {}, ...nodes);
}

function cellsOf(line) {
  const cells = line.trim().replace(/^\|/, "").replace(/([^\\])\|$/, "$1").split(/(?<!\\)\|/);
  return cells.map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function isTable(lines, at) {
  if (at + 1 >= lines.length || !lines[at].includes("|") || !lines[at + 1].includes("-")) return false;
  const rule = cellsOf(lines[at + 1]);
  return rule.length === cellsOf(lines[at]).length && rule.every((cell) => /^:?-+:?$/.test(cell));
}

function table(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const head = cellsOf(lines[at]);
  const sides = cellsOf(lines[at + 1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "centre" : "right") : ""));
  const rows = lines.slice(at + 2, end).map(cellsOf);
  const cell = (tag, text, column) => el(tag, sides[column] ? { class: sides[column] } : {}, inline(text ?? ""));
  return [end, () => el("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Table" }, el("table", {},
    el("thead", {}, el("tr", {}, ...head.map((text, column) => cell("th", text, column)))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...head.map((_, column) => cell("td", row[column], column)))))))];
}

function paragraph(lines, at, depth) {
  let end = at + 1;
  const ends = (line) => !line.trim() || FENCE.test(line) || HEADING.test(line) || RULE.test(line)
    || (depth < MAX_DEPTH && (line.startsWith(">") || ITEM.test(line)));
  while (end < lines.length && !ends(lines[end]) && !isTable(lines, end)) end += 1;
  const text = lines.slice(at, end).map((line) => line.trim()).join("\n");
  return [end, () => el("p", {}, inline(text))];
}

// ---- inline

const SPECIAL = /[\\`[!*_~h\n]/g;
const ADDRESS = /https?:\/\/[^\s<>"`]{1,2000}/y;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];

/** Inline markup of one paragraph as a fragment. */
function inline(text, depth = 0) {
  const fragment = document.createDocumentFragment();
  const missing = new Set(); // delimiters that close nowhere behind here
  let plain = "";
  let at = 0;
  const add = (node, end) => {
    if (plain) fragment.append(plain);
    plain = "";
    fragment.append(node);
    at = end;
  };
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const found = SPECIAL.exec(text);
    const next = found ? found.index : text.length;
    plain += text.slice(at, next);
    at = next;
    if (at >= text.length) break;
    const special = text[at];
    const made = special === "\n" ? [el("br"), at + 1]
      : special === "`" ? codeSpan(text, at, missing)
      : special === "[" || special === "!" ? link(text, at, depth)
      : special === "h" ? address(text, at)
      : special === "\\" ? null
      : emphasis(text, at, depth, missing);
    if (made) {
      add(...made);
    } else if (special === "\\" && PUNCTUATION.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
    } else {
      const run = special === "`" ? runAt(text, at) : 1;
      plain += text.slice(at, at + run);
      at += run;
    }
  }
  if (plain) fragment.append(plain);
  return fragment;
}

function runAt(text, at) {
  let end = at;
  while (text[end] === text[at]) end += 1;
  return end - at;
}

function codeSpan(text, at, missing) {
  const length = runAt(text, at);
  const fence = "`".repeat(length);
  if (missing.has(fence)) return null;
  let end = text.indexOf(fence, at + length);
  while (end >= 0 && runAt(text, end) !== length) end = text.indexOf(fence, end + runAt(text, end));
  if (end < 0) {
    missing.add(fence);
    return null;
  }
  const inner = text.slice(at + length, end).replaceAll("\n", " ");
  return [el("code", {}, /^ .*[^ ].* $/.test(inner) ? inner.slice(1, -1) : inner), end + length];
}

function link(text, at, depth) {
  const open = text[at] === "!" ? at + 1 : at;
  if (text[open] !== "[" || depth >= MAX_DEPTH) return null;
  const limit = text.slice(open, open + MAX_LINK);
  const middle = limit.indexOf("](");
  const end = middle < 0 ? -1 : limit.indexOf(")", middle);
  if (end < 0) return null;
  const target = limit.slice(middle + 2, end).trim().split(/\s/)[0];
  const anchor = anchorTo(target);
  if (!anchor) return null;
  anchor.append(inline(limit.slice(1, middle), MAX_DEPTH)); // no links in links; a picture is a link to it
  if (!anchor.textContent) anchor.append(target);
  return [anchor, open + end + 1];
}

function address(text, at) {
  ADDRESS.lastIndex = at;
  const found = ADDRESS.exec(text);
  if (!found || /[A-Za-z0-9]/.test(text[at - 1] ?? "")) return null;
  let target = found[0].replace(/[.,:;!?'*_~]+$/, "");
  if (target.endsWith(")") && !target.includes("(")) target = target.slice(0, -1);
  const anchor = anchorTo(target);
  if (!anchor) return null;
  anchor.append(target);
  return [anchor, at + target.length];
}

function anchorTo(target) {
  try {
    const url = new URL(target);
    if (url.protocol !== "http:" && url.protocol !== "https:") return null;
    return el("a", { href: url.href, rel: "noopener noreferrer", target: "_blank" });
  } catch {
    return null;
  }
}

function emphasis(text, at, depth, missing) {
  const found = MARKS.find(([mark]) => text.startsWith(mark, at));
  if (!found || depth >= MAX_DEPTH) return null;
  const [mark, tag] = found;
  const first = at + mark.length;
  if (missing.has(mark) || !text[first]?.trim() || (mark[0] === "_" && /\w/.test(text[at - 1] ?? ""))) return null;
  const end = closing(text, first, mark);
  if (end < 0) {
    missing.add(mark);
    return null;
  }
  return [el(tag, {}, inline(text.slice(first, end), depth + 1)), end + mark.length];
}

/** Where `mark` closes: behind something that is no space, and for underscores at the end of a word. */
function closing(text, from, mark) {
  for (let at = text.indexOf(mark, from + 1); at >= 0; at = text.indexOf(mark, at + 1)) {
    const run = runAt(text, at);
    const end = at + run - mark.length; // of a longer run the last ones, so that *** closes both
    const fits = mark.length === 2 ? run >= 2 : run !== 2;
    if (fits && text[at - 1].trim() && (mark[0] !== "_" || !/\w/.test(text[at + run] ?? ""))) return end;
    at += run - 1;
  }
  return -1;
}
