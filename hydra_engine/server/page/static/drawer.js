// The list of conversations: a column beside a wide chat, else a drawer over it. They are opened, named, deleted, exported and
// imported here.

import { byId, el, focusChat, setText } from "./dom.js";
import { asJson, asMarkdown, fileName, imported, lost, save, WrongFile } from "./exchange.js";
import { icon } from "./icons.js";
import { Notice } from "./notice.js";
import { shortName } from "./chat.js";

const STORE = "hydra.drawer";
const ROOM = matchMedia("(min-width: 1100px)");

export class Drawer {
  #drawer = byId("drawer");
  #button = byId("drawer-button");
  #notice = new Notice(byId("drawer-notice"));
  #chat;
  #renaming = ""; // the id of the one that gets a name
  #shown = ""; // the rows, as text
  #wanted = true; // as a column

  constructor(chat) {
    this.#chat = chat;
    try {
      this.#wanted = localStorage.getItem(STORE) !== "closed";
    } catch { /* storage is off */ }
    this.#button.addEventListener("click", () => this.#toggle());
    byId("drawer-close").addEventListener("click", () => this.#toggle());
    byId("drawer-veil").addEventListener("click", () => this.#toggle());
    byId("drawer-new").addEventListener("click", () => this.#leaveFor(() => chat.begin()));
    byId("delete-all").addEventListener("click", () => this.#deleteAll());
    byId("export-json").addEventListener("click", () => this.#export(asJson, "json", "application/json"));
    byId("export-markdown").addEventListener("click", () => this.#export(asMarkdown, "md", "text/markdown"));
    byId("import-input").addEventListener("change", (event) => this.#import(event.target));
    this.#drawer.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || this.#renaming || !this.#isOver) return;
      event.stopPropagation();
      this.#toggle();
    });
    ROOM.addEventListener("change", () => this.layOut());
    this.layOut();
    this.draw();
  }

  /** Over the page, not beside the chat. */
  get #isOver() {
    return getComputedStyle(this.#drawer).position === "absolute";
  }

  /** For another width, or another view of the page. */
  layOut() {
    this.#show(this.#wanted && !this.#isOver);
  }

  #toggle() {
    const shown = this.#drawer.hidden;
    if (!this.#isOver) {
      this.#wanted = shown;
      try {
        localStorage.setItem(STORE, shown ? "open" : "closed");
      } catch { /* it holds until the reload */ }
    }
    this.#show(shown);
    (shown ? byId("drawer-new") : this.#button).focus();
  }

  #show(shown) {
    this.#drawer.hidden = !shown;
    const over = shown && this.#isOver;
    byId("drawer-veil").hidden = !over;
    for (const part of document.querySelectorAll(".chat, .live")) part.inert = over;
    this.#button.setAttribute("aria-expanded", String(shown));
  }

  /** Closes a drawer that lies over what happens next. */
  #leaveFor(next) {
    if (this.#isOver) this.#show(false);
    next();
  }

  // ---- the list

  draw() {
    const { list, open, inTab } = this.#chat.library;
    const shown = JSON.stringify(list.map((talk) => [talk.id, talk.title, aboutOf(talk), talk.id === open.id]));
    if (!this.#renaming && shown !== this.#shown) { // not with every word of an answer: somebody may be about to click
      const focused = this.#drawer.contains(document.activeElement) ? document.activeElement.dataset.key : "";
      this.#shown = shown;
      byId("talks").replaceChildren(...list.map((talk) => this.#row(talk, talk.id === open.id)));
      if (focused) this.#drawer.querySelector(`[data-key="${focused}"]`)?.focus();
    }
    byId("talks-empty").hidden = list.length > 0;
    setText(byId("drawer-where"), inTab ? "Kept in this tab until it is closed, because this server needs a key." : "Kept in this browser only.");
    byId("delete-all").hidden = !list.length;
    for (const button of [byId("export-json"), byId("export-markdown")]) button.disabled = !open.turns.length;
  }

  #row(talk, current) {
    const action = (name, label, act) => el("button", { type: "button", class: "quiet icon", "aria-label": `${label} ${talk.title}`, title: label,
      "data-key": `${name} ${talk.id}`, onclick: act }, icon(name));
    return el("li", { "data-testid": "talk", "data-id": talk.id },
      el("button", { type: "button", class: "talk-open", "aria-current": current && "true", "data-key": `open ${talk.id}`, title: talk.title, onclick: () => this.#open(talk.id) },
        el("span", { class: "talk-name" }, talk.title),
        el("small", {}, aboutOf(talk))),
      action("edit", "Rename", () => this.#rename(talk)), action("remove", "Delete", () => this.#delete(talk)));
  }

  #open(id) {
    if (id === this.#chat.library.open.id) this.#leaveFor(focusChat);
    else this.#chat.library.choose(id).then(() => this.#leaveFor(focusChat));
  }

  #rename(talk) {
    const row = byId("talks").querySelector(`[data-id="${talk.id}"]`);
    const field = el("input", { type: "text", maxlength: "200", "aria-label": `Name of ${talk.title}`, value: talk.title, "data-testid": "talk-name" });
    const end = async (name) => {
      if (this.#renaming !== talk.id) return;
      this.#renaming = this.#shown = "";
      if (name && name !== talk.title) await this.#chat.library.rename(talk.id, name);
      this.draw();
      this.#drawer.querySelector(`[data-key="edit ${talk.id}"]`)?.focus();
    };
    field.addEventListener("keydown", (event) => {
      if (event.isComposing || (event.key !== "Enter" && event.key !== "Escape")) return;
      event.stopPropagation();
      end(event.key === "Enter" ? field.value.trim() : "");
    });
    field.addEventListener("blur", () => end(field.value.trim()));
    this.#renaming = talk.id;
    row.replaceChildren(field);
    field.select();
    field.focus();
  }

  async #delete(talk) {
    const { library } = this.#chat;
    const wasOpen = talk.id === library.open.id;
    const record = await library.delete(talk.id);
    byId("drawer-new").focus();
    if (!record) return;
    this.#notice.show(`“${talk.title}” is deleted.`, async () => {
      await library.restore(record);
      if (wasOpen && !library.open.turns.length) await library.choose(talk.id);
      this.#drawer.querySelector(`[data-key="open ${talk.id}"]`)?.focus();
    });
  }

  async #deleteAll() {
    const { library } = this.#chat;
    if (!confirm(`Delete all ${library.list.length} conversations? They cannot be brought back.`)) return;
    await library.deleteAll();
    this.#notice.show("All conversations are deleted.");
    byId("drawer-new").focus();
  }

  // ---- files

  #export(write, ending, type) {
    const { open } = this.#chat.library;
    const { settings } = open.turns.findLast((turn) => turn.settings) ?? { settings: this.#chat.settings.values };
    save(write(open, settings), `${fileName(open.title)}.${ending}`, type);
    const missing = ending === "json" ? lost(open) : 0;
    if (missing) this.#notice.show(`${missing} of its pictures and videos are not kept, and not in the file.`);
  }

  async #import(input) {
    const [file] = input.files;
    input.value = "";
    try {
      const { conversation, unused } = await imported(file);
      this.#chat.library.show(conversation);
      await this.#chat.library.save();
      this.#leaveFor(focusChat);
      if (unused) this.#notice.show(unused);
    } catch (error) {
      if (!(error instanceof WrongFile)) throw error;
      this.#notice.show(error.message);
    }
  }
}

const aboutOf = (talk) => [dayOf(talk.updated), shortName(talk.model)].filter(Boolean).join(" · ");

function dayOf(time) {
  const date = new Date(time), today = new Date().toDateString() === date.toDateString();
  return today ? date.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" }) : date.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
}
