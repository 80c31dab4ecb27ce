// Thumbnails, and the whole picture in a dialog that a click or Escape closes.

import { byId, el } from "./dom.js";

export function pictureButton({ name, url }) {
  return el("button", { type: "button", class: "thumbnail", title: `Show ${name}`, onclick: () => show(name, url) },
    el("img", { src: url, alt: name }));
}

function show(name, url) {
  const dialog = byId("zoom");
  dialog.replaceChildren(el("img", { src: url, alt: name }), el("p", {}, name),
    el("button", { type: "button", onclick: () => dialog.close() }, "Close"));
  dialog.onclick = (event) => { if (event.target !== dialog.querySelector("img")) dialog.close(); };
  dialog.showModal();
}
