// A line that says what has been done, with a way back for a while.

import { el } from "./dom.js";

const SHOWN_MS = 10_000;

export class Notice {
  #element;
  #timer = 0;

  constructor(element) {
    this.#element = element;
  }

  hide() {
    clearTimeout(this.#timer);
    this.#element.hidden = true;
  }

  /** `undo`: what a button does; null: there is none. */
  show(words, undo = null) {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.hide(), SHOWN_MS);
    this.#element.hidden = false;
    this.#element.replaceChildren(words, ...(undo ? [el("button", { type: "button", class: "quiet small", onclick: () => {
      this.hide();
      undo();
    } }, "Undo")] : []));
  }
}
