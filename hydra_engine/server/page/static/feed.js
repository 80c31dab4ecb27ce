// The stream of snapshots: opened while the tab is seen, opened again when it breaks, asked for what was missed.

import { apiKey, eventsOf, request } from "./api.js";

const AGAIN_MS = [500, 1000, 2000, 5000];
const SILENT_MS = 3000; // four snapshots a second are the rule

/** `onSnapshot(snapshot)`; `onState(state, words)` with connecting, open, silent, lost, denied or full. */
export class Feed {
  #onSnapshot;
  #onState;
  #abort = null;
  #timer = 0;
  #watchdog = 0;
  #failures = 0;
  #since = 0;

  constructor({ onSnapshot, onState }) {
    this.#onSnapshot = onSnapshot;
    this.#onState = onState;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.stop() : this.start()));
    addEventListener("pagehide", () => this.stop());
    addEventListener("pageshow", (event) => { if (event.persisted) this.start(); });
  }

  start() {
    this.stop();
    if (!document.hidden) this.#watch();
  }

  stop() {
    clearTimeout(this.#timer);
    clearTimeout(this.#watchdog);
    this.#abort?.abort();
    this.#abort = null;
  }

  async #watch() {
    const abort = this.#abort = new AbortController();
    this.#onState("connecting", "connecting");
    this.#expect();
    try {
      const response = await request(`ui/events?since=${this.#since}`, { signal: abort.signal });
      for await (const snapshot of eventsOf(response)) {
        if (abort.signal.aborted) return;
        this.#failures = 0;
        this.#since = snapshot.number;
        this.#expect();
        this.#onState("open", healthWords(snapshot), healthOf(snapshot));
        this.#onSnapshot(snapshot);
      }
      this.#again("lost", "connection lost");
    } catch (error) {
      if (abort.signal.aborted || error.name === "AbortError") return;
      clearTimeout(this.#watchdog);
      if (error.status === 401) this.#onState("denied", apiKey() ? "wrong key" : "needs a key");
      else if (error.status === 503) this.#again("full", "too many viewers");
      else this.#again("lost", "connection lost");
    }
  }

  /** The next snapshot, soon. */
  #expect() {
    clearTimeout(this.#watchdog);
    this.#watchdog = setTimeout(() => this.#onState("silent", "no answer"), SILENT_MS);
  }

  #again(state, words) {
    clearTimeout(this.#watchdog);
    this.#onState(state, words);
    const wait = AGAIN_MS[Math.min(this.#failures, AGAIN_MS.length - 1)];
    this.#failures += 1;
    this.#timer = setTimeout(() => this.start(), wait);
  }
}

/** good, fair (it serves, or will soon) or bad. */
function healthOf({ state, instances }) {
  if (state === "loading" || state === "draining") return "fair";
  if (state !== "ok") return "bad";
  return instances.every(({ condition }) => condition === "ready") ? "good" : "fair";
}

function healthWords({ state, instances }) {
  if (state !== "ok") return state.replaceAll("_", " ");
  const missing = instances.filter(({ condition }) => condition !== "ready");
  return missing.length ? `${missing.map(({ name, condition }) => `${name} ${condition}`).join(", ")}` : "connected";
}
