// Where a message is written: text that grows, pictures and videos, what was said before by arrow keys, and a draft that a reload keeps.

import { loadDraft, saveDraft } from "./conversation.js";
import { byId, el } from "./dom.js";
import { Notice } from "./notice.js";
import { Pictures } from "./pictures.js";

export class Composer {
  /** The question that what is written is to replace: {id, at}, its conversation and its place there; or null. */
  edited = null;
  #prompt = byId("prompt");
  #pictures;
  #notice = new Notice(byId("notice"));
  #said;
  #recalled = 0; // how many messages ago the text is from
  #timer = 0;

  /** `onSend()`; `said()` gives the texts sent so far, oldest first; `sent()` the pictures and videos that go along with the next message. */
  constructor({ onSend, said, sent }) {
    this.#said = said;
    this.#pictures = new Pictures({ complain: (problem) => this.complain(problem), changed: () => this.#keep(), sent });
    const draft = loadDraft();
    this.put(draft);
    this.edited = draft.edited;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      onSend();
    });
    this.#prompt.addEventListener("keydown", (event) => {
      if (event.isComposing) return;
      if (event.key === "Enter" && !event.shiftKey) {
        event.preventDefault();
        onSend();
      } else if (event.key === "ArrowUp" && (!this.#prompt.value || this.#recalled)) this.#recall(event, 1);
      else if (event.key === "ArrowDown" && this.#recalled) this.#recall(event, -1);
    });
    this.#prompt.addEventListener("input", () => {
      this.#recalled = 0;
      this.complain("");
      this.#keep();
    });
    addEventListener("pagehide", () => saveDraft(this.#draft));
    // A keyboard that covers half a phone comes when it is asked for.
    if (matchMedia("(pointer: fine)").matches) this.#prompt.focus();
  }

  get #draft() {
    return { text: this.#prompt.value, pictures: this.#pictures.waiting, edited: this.edited };
  }

  set limits(limits) {
    this.#pictures.limits = limits;
  }

  /** What is to be sent, which then stands here no more; null where there is nothing. */
  take() {
    const { text, pictures } = this.#draft;
    if (!text.trim() && !pictures.length) return null;
    this.put({ text: "", pictures: [] });
    this.complain("");
    return { text: text.trim(), pictures };
  }

  put({ text, pictures = [] }) {
    this.#prompt.value = text;
    this.#recalled = 0;
    this.#pictures.waiting = pictures.filter((picture) => picture.url);
  }

  /** Gives back what could not be sent, before what has been written since. */
  giveBack({ text, pictures = [] }) {
    const { text: newer, pictures: more } = this.#draft;
    this.put({ text: [text, newer].filter(Boolean).join("\n"), pictures: [...pictures, ...more] });
  }

  focus() {
    this.#prompt.focus();
  }

  /** Says why nothing was sent; "" takes it back. `code` is the server's word for it. */
  complain(problem, code = "") {
    const note = byId("note");
    note.hidden = !problem;
    note.replaceChildren(problem, ...(code ? [" ", el("span", { class: "code" }, code)] : []));
  }

  /** Says what has been done, with a way back for a while; "" takes it back. */
  notice(words, undo = null) {
    if (words) this.#notice.show(words, undo);
    else this.#notice.hide();
  }

  #recall(event, step) {
    const said = this.#said();
    const at = Math.max(this.#recalled + step, 0);
    if (at > said.length) return;
    event.preventDefault();
    this.#prompt.value = at ? said.at(-at) : "";
    this.#recalled = at;
  }

  #keep() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => saveDraft(this.#draft), 300);
  }
}
