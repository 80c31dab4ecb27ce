// One answer on the page: what it waits for, its text while it streams, then one line of figures with its stages as a
// coloured bar, which opens, and an error in the server's words where there is one.

import { copyButton } from "./clipboard.js";
import { count, duration, el, plural, rate, setText, shortId } from "./dom.js";
import { icon } from "./icons.js";
import { renderMarkdown } from "./markdown.js";
import { asCurl, asPython } from "./snippets.js";
import { drawTimeline, foldedTimeline } from "./timeline.js";

const THOUGHT = /^\s*(?:<think>)?([\s\S]*?)<\/think>\s*|^\s*<think>([\s\S]*)$/;

export class AnswerView {
  #turn;
  #thought = el("details", { class: "thought", hidden: true }, el("summary", {}), el("div", { class: "text" }));
  #text = el("div", { class: "text", "data-testid": "answer" });
  #status = el("p", { class: "status", "data-testid": "status" });
  #below = el("div", { class: "below" });
  #frame = 0;
  #failure = null; // to draw the text
  #actions;

  /** `actions`: bodyOf(turn), the request that this answers, and its pictures; again(turn) asks for another answer. */
  constructor(turn, actions) {
    this.#turn = turn;
    this.#actions = actions;
    this.element = el("li", { class: "message assistant" }, this.#thought, this.#text, this.#status, this.#below);
  }

  /** Before the first token. */
  wait(words) {
    this.element.classList.add("busy");
    setText(this.#status, words);
  }

  /** The text has grown: drawn with the next frame, and not more often. `drawn()` is called then. */
  grow(drawn) {
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      this.#draw(true);
      const { tokens, firstMs } = this.#turn.facts ?? {};
      if (tokens) setText(this.#status, `${plural(tokens.out, "token")} · first after ${duration(firstMs / 1e3)}`);
      drawn();
    });
  }

  /** A text that cannot be drawn stands as it came. */
  #draw(growing) {
    try {
      if (!this.#failure) this.#drawText(growing);
    } catch (error) {
      this.#failure = error;
      reportError(error);
    }
    if (this.#failure) this.#text.replaceChildren(el("pre", {}, this.#turn.text));
  }

  #drawText(growing) {
    const { thought: told = "", text } = this.#turn;
    const [found, closed, open] = THOUGHT.exec(text) ?? [""];
    const thought = [told, closed ?? open ?? ""].map((part) => part.trim()).filter(Boolean).join("\n\n");
    const thinking = growing && (open !== undefined || (told && !text));
    this.#thought.hidden = !thought;
    setText(this.#thought.firstChild, thinking ? "Thinking" : "Thoughts");
    renderMarkdown(this.#thought.lastChild, thought, { growing: Boolean(thinking) });
    renderMarkdown(this.#text, text.slice(found.length), { growing });
  }

  finish() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    this.element.classList.remove("busy");
    this.#draw(false);
    const errors = this.#turn.error ? [this.#turn.error] : [];
    if (this.#failure) errors.push({ message: `The page cannot draw this answer: ${this.#failure.message}` });
    setText(this.#status, "");
    this.#below.replaceChildren(...errors.map(errorOf), this.#tools(), this.#details());
  }

  #tools() {
    const again = el("button", { type: "button", class: "quiet icon", "aria-label": "Answer again", title: "Answer again", onclick: () => this.#actions.again(this.#turn) }, icon("redo"));
    return el("div", { class: "tools" }, copyButton("Copy", () => this.#turn.text), again);
  }

  #details() {
    const { facts } = this.#turn;
    const base = new URL(".", location.href).href.replace(/\/$/, "");
    const copying = (name, text) => el("span", { class: "copying" }, copyButton(`Copy ${name}`, text), name);
    const summary = el("summary", { "data-testid": "usage" }, ...(facts?.timeline?.length ? [foldedTimeline(facts)] : []),
      el("span", { class: "figures" }, figuresOf(facts ?? {})));
    return el("details", { class: "stages", "data-testid": "answer-timeline", "data-request-id": facts?.id }, summary,
      facts?.timeline?.length ? drawTimeline(facts.timeline, facts) : null,
      facts?.tokens ? el("p", { class: "counts", "data-testid": "counts" }, countsOf(facts)) : null,
      el("div", { class: "buttons" },
        copying("as curl", () => asCurl(...this.#actions.bodyOf(this.#turn), base)),
        copying("as Python", () => asPython(...this.#actions.bodyOf(this.#turn), base)),
        facts?.id ? copying(`request id ${shortId(facts.id)}`, () => facts.id) : null));
  }
}

function errorOf({ message, code, retryAfter }) {
  return el("div", { class: "error", role: "alert", "data-testid": "error" },
    el("p", {}, inWords(message, retryAfter)), code ? el("span", { class: "code" }, code) : null);
}

/** The server's message as a sentence, and when to try again, which a message may say too. Names of fields stay as they are. */
export function inWords(message, retryAfter) {
  const words = retryAfter ? message.replace(/[;,.] (please )?try again[^;,.]*\.?$/i, "") : message;
  const begun = words.replace(/^[a-z]+(?=[\s,;:])/, (word) => word[0].toUpperCase() + word.slice(1));
  const sentence = /[.!?]$/.test(begun) ? begun : `${begun}.`;
  return retryAfter ? `${sentence} Try again in ${retryAfter} s.` : sentence;
}

/** The server's times; of an answer that did not come to its end those that the page has seen. */
function figuresOf({ tokens, ttft_s = null, tpot_s = null, firstMs, lastMs, reason }) {
  const parts = [], seen_s = (lastMs - firstMs) / 1e3;
  const first_s = ttft_s ?? (firstMs === undefined ? null : firstMs / 1e3);
  const speed = tpot_s ? 1 / tpot_s : ttft_s === null && tokens?.out > 1 && seen_s > 0 ? (tokens.out - 1) / seen_s : 0;
  if (first_s !== null) parts.push(`first token ${duration(first_s)}`);
  if (speed) parts.push(`${rate(speed)} tokens/s`);
  if (tokens) parts.push(plural(tokens.out, "token"));
  if (reason && reason !== "stop") parts.push(reason === "length" ? "cut at the token limit" : reason);
  return parts.join(" · ") || "Details";
}

function countsOf({ tokens, reason }) {
  const pictures = tokens.image ? ` (${count(tokens.in - tokens.image)} text, ${count(tokens.image)} picture)` : "";
  const cached = tokens.cached ? `, ${count(tokens.cached)} of them cached` : "";
  return `${plural(tokens.in, "prompt token")}${pictures}${cached} · ${plural(tokens.out, "token")} out · ended by ${reason ?? "an error"}`;
}
