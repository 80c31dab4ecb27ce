// Thumbnails, and the whole picture or the video in a dialog that a click or Escape closes.

import { byId, el } from "./dom.js";
import { icon } from "./icons.js";

/** What is on the web is not fetched for this: there is its name. */
export function pictureButton({ kind, name, url, poster }) {
  const seen = kind === "video" ? poster : url;
  if (!url.startsWith("data:")) return el("span", { class: "plain", title: url }, icon("picture"), el("span", {}, "on the web"));
  return el("button", { type: "button", class: `thumbnail ${kind === "video" ? "video" : ""}`, title: `${kind === "video" ? "Play" : "Show"} ${name}`, "aria-label": name,
    onclick: () => show(kind, name, url) },
  seen ? el("img", { src: seen, alt: "" }) : el("span", { class: "plain" }, icon("film")),
  kind === "video" && seen ? el("span", { class: "play" }, icon("play")) : null);
}

function show(kind, name, url) {
  const dialog = byId("zoom");
  const whole = kind === "video" ? el("video", { src: url, controls: true, autoplay: true, "aria-label": name }) : el("img", { src: url, alt: name });
  const note = el("p", {}, name);
  whole.addEventListener("error", () => { note.textContent = `${name} cannot be shown by this browser; the server may still read it.`; });
  dialog.replaceChildren(whole, note, el("button", { type: "button", onclick: () => dialog.close() }, "Close"));
  dialog.onclick = (event) => { if (event.target !== whole) dialog.close(); };
  dialog.onclose = () => dialog.replaceChildren(); // a video stops
  dialog.showModal();
}
