// Formulas for markdown-it: $x$ and \(x\) in a line, $$x$$ and \[x\] in a line or as a block. Prices stay prices: a single
// dollar opens only before what is no space, and closes only behind what is no space and not before a digit.

const MAX_LINES = 200; // of a block
const OPENERS = [["$$", "$$", true], ["\\[", "\\]", true], ["\\(", "\\)", false], ["$", "$", false]];

export function math(md) {
  md.inline.ruler.before("escape", "math", inline);
  md.block.ruler.before("fence", "math_block", block, { alt: ["paragraph", "reference", "blockquote", "list"] });
  const draw = (tag) => (tokens, index) => {
    const { content, meta } = tokens[index];
    const escape = md.utils.escapeHtml;
    return `<${tag} class="math" data-tex="${escape(content)}"${meta.display ? " data-display" : ""}>${escape(meta.source)}</${tag}>`;
  };
  md.renderer.rules.math = draw("span");
  md.renderer.rules.math_block = draw("div");
}

function inline(state, silent) {
  const { src, pos } = state;
  if (src[pos] !== "$" && src[pos] !== "\\") return false;
  const opener = OPENERS.find(([open]) => src.startsWith(open, pos));
  if (!opener) return false;
  const [open, close, display] = opener;
  const from = pos + open.length;
  const end = closing(state, close, from, open === "$");
  if (end < 0) return false;
  if (!silent) push(state, "math", src.slice(from, end), src.slice(pos, end + close.length), display);
  state.pos = end + close.length;
  return true;
}

function closing(state, close, from, single) {
  const { src } = state;
  const missing = state.missing ??= new Set(); // what closes nowhere behind here
  if (single && !src[from]?.trim() || missing.has(close)) return -1;
  for (let at = src.indexOf(close, from); at >= 0; at = src.indexOf(close, at + 1)) {
    if (src[at - 1] === "\\" && close[0] === "$") continue;
    if (!single) return at > from ? at : -1;
    if (src[at - 1].trim() && at > from && !/\d/.test(src[at + 1] ?? "")) return at;
  }
  missing.add(close);
  return -1;
}

/** Lines from one that begins with the opener to one that ends with what closes it. */
function block(state, line, endLine, silent) {
  const textOf = (at) => state.src.slice(state.bMarks[at] + state.tShift[at], state.eMarks[at]);
  const first = textOf(line).trimEnd();
  const opener = OPENERS.find(([open, , display]) => display && first.startsWith(open));
  if (!opener || state.sCount[line] - state.blkIndent >= 4) return false;
  const [open, close] = opener;
  let last = line, added = first.slice(open.length), text = added;
  while (!added.endsWith(close)) {
    last += 1;
    const left = last < endLine && state.sCount[last] < state.blkIndent && textOf(last).trim();
    if (last >= Math.min(endLine, line + MAX_LINES) || left || added.includes(close)) return false;
    added = textOf(last).trimEnd();
    text += `\n${added}`;
  }
  if (added.indexOf(close) !== added.length - close.length) return false;
  if (silent) return true;
  const token = push(state, "math_block", text.slice(0, -close.length), open + text, true);
  token.block = true;
  token.map = [line, last + 1];
  state.line = last + 1;
  return true;
}

function push(state, type, content, source, display) {
  const token = state.push(type, "", 0);
  token.content = content.trim();
  token.meta = { source, display };
  return token;
}
