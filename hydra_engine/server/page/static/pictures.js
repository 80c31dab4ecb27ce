// Pictures and videos that wait to be sent: chosen, dropped or pasted, with thumbnails. The server has the last word on them.

import { byId, bytes, el } from "./dom.js";
import { accepted, attachmentOf, problemOf } from "./files.js";
import { pictureButton } from "./zoom.js";

export class Pictures {
  #list = byId("pictures");
  #waiting = [];
  #limits = null;
  #hooks;

  /** Hooks: `complain(problem)` shows it; `changed()` hears of every change; `sent()` gives what of earlier messages goes along. */
  constructor(hooks) {
    this.#hooks = hooks;
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
    this.#waiting = pictures;
    this.#draw();
  }

  /** What the server takes in one request. */
  set limits(limits) {
    this.#limits = limits;
    const [some, videos] = [limits.max_images > 0, limits.max_videos > 0];
    byId("attach").hidden = !some && !videos;
    byId("image-input").disabled = !some && !videos;
    byId("image-input").accept = accepted(limits);
    byId("samples").toggleAttribute("data-without-pictures", !some);
    byId("attach-kinds").textContent = videos ? " pictures or videos" : " pictures";
    byId("lead").textContent = !some && !videos ? "Ask something" : `Drop a picture${videos ? " or a video" : ""} here, or ask something`;
  }

  async add(files) {
    for (const file of [...files]) {
      const problem = problemOf(file, [...this.#hooks.sent(), ...this.#waiting], this.#limits);
      const attachment = problem ? null : await attachmentOf(file);
      if (attachment) this.waiting = [...this.#waiting, attachment];
      else this.#hooks.complain(problem || `${file.name} cannot be read.`);
    }
  }

  #draw() {
    this.#hooks.changed();
    this.#list.replaceChildren(...this.#waiting.map((picture) => {
      const remove = () => {
        this.waiting = this.#waiting.filter((other) => other !== picture);
        byId("prompt").focus();
      };
      return el("li", { class: "picture", "data-testid": "image-preview" },
        pictureButton(picture),
        el("span", { class: "size" }, picture.size ? bytes(picture.size) : ""),
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
