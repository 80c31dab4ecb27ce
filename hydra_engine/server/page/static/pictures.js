// Pictures that wait to be sent: chosen, dropped or pasted, as data URLs with thumbnails. The server decides what is valid.

import { byId, bytes, el } from "./dom.js";
import { pictureButton } from "./zoom.js";

const TYPES = new Set(["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"]);
const MAX_PICTURES = 16;
const MAX_BYTES = 20 << 20;

export class Pictures {
  #list = byId("pictures");
  #waiting = [];
  #complain;
  #changed;

  /** `complain(problem)` shows it; `changed()` hears of every change. */
  constructor(complain, changed) {
    this.#complain = complain;
    this.#changed = changed;
    const input = byId("image-input");
    input.addEventListener("change", async () => {
      await this.add(input.files);
      input.value = "";
      byId("prompt").focus();
    });
    document.addEventListener("paste", (event) => {
      if (!event.clipboardData?.files.length) return;
      event.preventDefault();
      this.add(event.clipboardData.files);
      byId("prompt").focus();
    });
    this.#takeDrops(byId("drop"));
  }

  get waiting() {
    return this.#waiting;
  }

  set waiting(pictures) {
    this.#waiting = pictures.slice(0, MAX_PICTURES);
    this.#draw();
  }

  async add(files) {
    for (const file of [...files]) {
      const problem = this.#problemOf(file);
      if (problem) {
        this.#complain(problem);
        continue;
      }
      const url = await readFile(file);
      if (url) this.waiting = [...this.#waiting, { name: file.name || "pasted picture", size: file.size, url }];
      else this.#complain(`${file.name} cannot be read.`);
    }
  }

  #problemOf(file) {
    if (!TYPES.has(file.type)) return `${file.name || "That"} is not a PNG, JPEG, WebP, GIF or BMP picture.`;
    if (file.size > MAX_BYTES) return `${file.name} is larger than ${bytes(MAX_BYTES)}.`;
    return this.#waiting.length >= MAX_PICTURES ? `A message can have ${MAX_PICTURES} pictures.` : "";
  }

  #draw() {
    this.#changed();
    this.#list.replaceChildren(...this.#waiting.map((picture) => {
      const remove = () => {
        this.waiting = this.#waiting.filter((other) => other !== picture);
        byId("prompt").focus();
      };
      return el("li", { class: "picture", "data-testid": "image-preview" },
        pictureButton(picture),
        el("span", { class: "size" }, bytes(picture.size)),
        el("button", { type: "button", class: "remove", "aria-label": `Remove ${picture.name}`, onclick: remove }, "×"));
    }));
  }

  #takeDrops(veil) {
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
    const show = (shown) => { veil.hidden = !shown; };
    document.addEventListener("dragover", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      show(true);
    });
    document.addEventListener("dragleave", (event) => show(Boolean(event.relatedTarget)));
    document.addEventListener("drop", (event) => {
      show(false);
      if (!hasFiles(event)) return;
      event.preventDefault();
      this.add(event.dataTransfer.files);
    });
  }
}

export function readFile(file) {
  return new Promise((resolve) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => resolve(null);
    reader.readAsDataURL(file);
  });
}
