// The settings of requests: kept in the tab, taken over from a conversation that is opened; empty ones show what the server takes instead.

import { byId, el } from "./dom.js";

const STORE = "hydra.settings";
const NUMBERS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.1 }, "1"],
  ["top_p", "Top p", { min: 0, max: 1, step: 0.05 }, "1"],
  ["top_k", "Top k", { min: -1, step: 1 }, "off"],
  ["min_p", "Min p", { min: 0, max: 1, step: 0.05 }, "0"],
  ["repetition_penalty", "Repetition", { min: 0.1, max: 2, step: 0.05 }, "1"],
  ["max_tokens", "Max tokens", { min: 1, step: 1 }, "no limit"],
  ["seed", "Seed", { step: 1 }, "random"],
];
export const FIELDS = ["system", ...NUMBERS.map(([name]) => name), "detail"];

export class Settings {
  constructor() {
    byId("detail").parentElement.before(...NUMBERS.map(([name, label, bounds, placeholder]) => el("label", {}, label,
      el("input", { id: name, "data-testid": name.replace("_", "-"), type: "number", inputmode: "decimal", placeholder, ...bounds }))));
    const button = byId("settings-button"), settings = byId("settings");
    button.addEventListener("click", () => this.#show(settings.hidden));
    settings.addEventListener("input", () => this.#keep());
    this.#restore();
  }

  get values() {
    const values = {};
    for (const name of FIELDS) {
      const field = byId(name), text = field.value.trim();
      if (text) values[name] = field.type === "number" ? Number(text) : text;
    }
    return values;
  }

  set values(values) {
    for (const name of FIELDS) byId(name).value = values[name] ?? (name === "detail" ? "auto" : "");
    this.#keep();
  }

  /** Whether all can be sent; the first that cannot is shown. */
  check() {
    const bad = FIELDS.map(byId).find((field) => !field.checkValidity());
    if (!bad) return true;
    this.#show(true);
    bad.reportValidity();
    return false;
  }

  /** `defaults`: what the server takes for what a request leaves out. */
  showDefaults(defaults) {
    for (const [name, , , otherwise] of NUMBERS) byId(name).placeholder = String(defaults[name] ?? otherwise);
  }

  #show(shown) {
    byId("settings").hidden = !shown;
    byId("settings-button").setAttribute("aria-expanded", String(shown));
    if (shown) byId("settings").scrollIntoView({ block: "nearest" });
  }

  #keep() {
    const kept = this.values;
    byId("settings-button").classList.toggle("changed", Object.keys(kept).some((name) => name !== "detail" || kept.detail !== "auto"));
    try {
      sessionStorage.setItem(STORE, JSON.stringify(kept));
    } catch { /* they hold until the reload */ }
  }

  #restore() {
    try {
      const kept = JSON.parse(sessionStorage.getItem(STORE) ?? "{}");
      for (const name of FIELDS) if (kept[name] !== undefined) byId(name).value = kept[name];
    } catch { /* defaults, then */ }
    this.#keep();
  }
}
