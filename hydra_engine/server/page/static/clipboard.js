// Copies text, and buttons that say for a moment that it is done.

import { el } from "./dom.js";
import { icon } from "./icons.js";

const SAID_MS = 1500;

export async function copy(text) {
  if (navigator.clipboard && window.isSecureContext) {
    await navigator.clipboard.writeText(text);
    return;
  }
  // Plain HTTP from another machine: no clipboard API there.
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** An icon with a name. `text()` is what is copied. */
export function copyButton(name, text) {
  const button = el("button", { type: "button", class: "quiet icon", "aria-label": name, title: name }, icon("copy"));
  button.addEventListener("click", async () => {
    await copy(text());
    const show = (shown, words) => {
      button.replaceChildren(icon(shown));
      button.setAttribute("aria-label", words);
      button.title = words;
    };
    show("check", "Copied");
    setTimeout(() => show("copy", name), SAID_MS);
  });
  return button;
}
