// What is shown: the chat, the engine, or both beside each other where there is room for both. The choice is remembered.

import { byId, setPressed } from "./dom.js";

const STORE = "hydra.mode";
const ROOM = matchMedia("(min-width: 1100px)");

export class Modes {
  #chosen = "chat";
  #buttons = [...document.querySelectorAll("[data-choose]")];
  #onChange;

  /** `onChange()` when what is shown has changed. */
  constructor(onChange) {
    this.#onChange = onChange;
    try {
      const kept = localStorage.getItem(STORE);
      if (this.#buttons.some((button) => button.dataset.choose === kept)) this.#chosen = kept;
    } catch { /* storage is off */ }
    for (const button of this.#buttons) button.addEventListener("click", () => this.#choose(button.dataset.choose));
    ROOM.addEventListener("change", () => this.#show());
    document.querySelector(".skip").addEventListener("click", (event) => {
      event.preventDefault();
      (this.shown === "engine" ? byId("window") : byId("prompt")).focus();
    });
    this.#show();
  }

  get shown() {
    return document.body.dataset.mode;
  }

  #choose(mode) {
    this.#chosen = mode;
    try {
      localStorage.setItem(STORE, mode);
    } catch { /* it holds until the reload */ }
    this.#show();
    this.#onChange();
  }

  #show() {
    const shown = this.#chosen === "split" && !ROOM.matches ? "chat" : this.#chosen;
    document.body.dataset.mode = shown;
    setPressed(this.#buttons, this.#buttons.find((button) => button.dataset.choose === shown));
  }
}
