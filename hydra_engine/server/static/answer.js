// One answer on the page: its text while it streams, then counts, stage timeline, buttons, and an error in the server's
// words where there is one.

import { count, duration, el, rate, setText } from "./dom.js";
import { renderMarkdown } from "./markdown.js";
import { asCurl, asPython, copy } from "./snippets.js";
import { drawTimeline } from "./timeline.js";

export class AnswerView {
  #turn;
  #text = el("div", { class: "text", "data-testid": "answer" });
  #usage = el("p", { class: "usage", "data-testid": "usage" });
  #below = el("div", { class: "below" });
  #frame = 0;
  #retry;
  #bodyOf;

  /** `bodyOf(turn)` gives the request that this answers, and its pictures; `retry(turn)` asks again. */
  constructor(turn, { bodyOf, retry }) {
    this.#turn = turn;
    this.#bodyOf = bodyOf;
    this.#retry = retry;
    this.element = el("li", { class: "message assistant" }, this.#text, this.#usage, this.#below);
  }

  /** Before the first token. */
  wait() {
    this.element.classList.add("busy");
    setText(this.#usage, "waiting for the first token");
  }

  /** The text has grown: drawn with the next frame, and not more often. */
  grow() {
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      this.#drawText();
    });
  }

  #drawText() {
    renderMarkdown(this.#text, this.#turn.text);
    const { tokens, firstMs } = this.#turn.facts ?? {};
    if (this.element.classList.contains("busy") && tokens) {
      setText(this.#usage, `${count(tokens.out)} tokens out · first token ${duration(firstMs / 1e3)}`);
    }
  }

  finish() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    this.element.classList.remove("busy");
    this.#drawText();
    const { facts, error } = this.#turn;
    this.#usage.replaceChildren(...(facts ? factsOf(facts) : []));
    this.#below.replaceChildren();
    if (error) this.#below.append(this.#errorOf(error));
    if (facts?.timeline?.length) this.#below.append(timelineOf(facts));
    this.#below.append(this.#buttons());
  }

  #errorOf(error) {
    const code = error.code ? el("span", { class: "code" }, error.code) : null;
    const wait = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
    return el("div", { class: "error", role: "alert", "data-testid": "error" }, el("p", {}, error.message, wait), code);
  }

  #buttons() {
    const copying = (label, text) => {
      const button = el("button", { type: "button", class: "quiet small", onclick: async () => {
        await copy(text());
        button.textContent = "Copied";
        setTimeout(() => { button.textContent = label; }, 1500);
      } }, label);
      return button;
    };
    const buttons = el("div", { class: "buttons" });
    if (this.#turn.text) buttons.append(copying("Copy", () => this.#turn.text));
    const snippet = (make) => () => make(...this.#bodyOf(this.#turn), new URL(".", location.href).href.replace(/\/$/, ""));
    buttons.append(copying("Copy as curl", snippet(asCurl)), copying("Copy as Python", snippet(asPython)));
    if (this.#turn.error) {
      buttons.append(el("button", { type: "button", class: "quiet small", onclick: () => this.#retry(this.#turn) }, "Ask again"));
    }
    return buttons;
  }
}

function factsOf({ tokens, ttft_s, tpot_s, reason, id }) {
  const facts = [];
  if (tokens) {
    const pictures = tokens.image ? ` (${count(tokens.in - tokens.image)} text + ${count(tokens.image)} picture)` : "";
    const cached = tokens.cached ? `, ${count(tokens.cached)} of them cached` : "";
    facts.push([`${count(tokens.in)} in${pictures}${cached}`], [`${count(tokens.out)} out`]);
  }
  if (ttft_s !== null && ttft_s !== undefined) facts.push([`first token ${duration(ttft_s)}`]);
  if (tpot_s) facts.push([`${rate(1 / tpot_s)} tok/s`]);
  if (reason) facts.push([reason]);
  if (id) facts.push([id, "id"]);
  return facts.map(([text, kind]) => el("span", { class: kind }, text));
}

function timelineOf({ timeline, id, ttft_s, total_s }) {
  return el("details", { class: "stages", open: true, "data-testid": "answer-timeline" },
    el("summary", {}, "Stages"), drawTimeline(timeline, { id, ttft_s, total_s }));
}
