// The stream of snapshots: opened while the tab is seen, opened again when it breaks, asked for what was missed.

import { eventsOf, request } from "./api.js";

const AGAIN_MS = [500, 1000, 2000, 5000];

/** `onSnapshot(snapshot)`; `onState(state, words)` with connecting, open, lost, denied, full or hidden. */
export class Feed {
  #onSnapshot;
  #onState;
  #abort = null;
  #timer = 0;
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
    this.#abort?.abort();
    this.#abort = null;
  }

  async #watch() {
    const abort = this.#abort = new AbortController();
    this.#onState("connecting", "connecting");
    try {
      const response = await request(`ui/events?since=${this.#since}`, { signal: abort.signal });
      for await (const snapshot of eventsOf(response)) {
        if (abort.signal.aborted) return;
        this.#failures = 0;
        this.#since = snapshot.number;
        this.#onState("open", snapshot.state === "ok" ? "connected" : snapshot.state.replaceAll("_", " "));
        this.#onSnapshot(snapshot);
      }
      this.#again("lost", "connection lost");
    } catch (error) {
      if (abort.signal.aborted || error.name === "AbortError") return;
      if (error.status === 401) this.#onState("denied", "needs a key");
      else if (error.status === 503) this.#again("full", "too many viewers");
      else this.#again("lost", "connection lost");
    }
  }

  #again(state, words) {
    this.#onState(state, words);
    const wait = AGAIN_MS[Math.min(this.#failures, AGAIN_MS.length - 1)];
    this.#failures += 1;
    this.#timer = setTimeout(() => this.start(), wait);
  }
}
