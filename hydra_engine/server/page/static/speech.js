// Tells screen readers an answer sentence by sentence: a live region that got every token would stutter. What has been told leaves
// the region, or whoever reads through the page would meet every answer twice.

import { el } from "./dom.js";

const TOLD_MS = 5000; // long enough for screen readers to take it up

const END = /[.!?:]["')\]]*\s|\n/g;

export class Speaker {
  #region;
  #text = "";
  #said = 0;

  constructor(region) {
    this.#region = region;
  }

  begin() {
    this.#text = "";
    this.#said = 0;
  }

  add(text) {
    this.#text += text;
    let end = this.#said;
    END.lastIndex = this.#said;
    for (let found = END.exec(this.#text); found; found = END.exec(this.#text)) end = END.lastIndex;
    this.#say(end);
  }

  finish(last = "") {
    this.#say(this.#text.length);
    if (last) this.#tell(last);
  }

  #say(end) {
    const sentence = this.#text.slice(this.#said, end).trim();
    this.#said = end;
    if (sentence) this.#tell(sentence);
  }

  #tell(text) {
    const line = el("p", {}, text);
    this.#region.append(line);
    setTimeout(() => line.remove(), TOLD_MS);
  }
}
