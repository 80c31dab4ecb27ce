// The last seconds of all requests, sliding: a row for each request, or for each lane of each instance, where overlap shows.
// Bars are placed once, in milliseconds; what slides is the view box of each row.

import { byId, duration, el, setAttributes, setPressed, svg } from "./dom.js";
import { GROUPS, groupOf, isWait } from "./stages.js";
import { drawTimeline, spanOf, spoken } from "./timeline.js";
import { downloadTrace } from "./trace.js";

const MAX_ROWS = 40;

export class Window {
  #seconds = 30;
  #view = "requests";
  #paused = false;
  #rows = new Map(); // key -> {element, track, version}
  #origin = null; // seconds on the server's clock that are 0 in the drawing
  #list = el("div", { class: "rows" });
  #axis = el("div", { class: "row axis", "aria-hidden": "true" }, el("span", { class: "name" }), el("div", { class: "labels" }));
  #empty = el("p", { class: "nothing" }, "No requests lately. Send one, and its stages appear here.");
  #history = null;

  constructor() {
    byId("window").append(this.#list, this.#empty, this.#axis);
    byId("legend").append(...Object.entries(GROUPS).map(([group, label]) => el("span", {}, el("i", { class: group }), label)));
    this.#buttons("[data-seconds]", (button) => { this.#seconds = Number(button.dataset.seconds); });
    this.#buttons("[data-view]", (button) => {
      this.#view = button.dataset.view;
      this.#clear();
    });
    byId("pause").addEventListener("click", () => {
      this.#paused = !this.#paused;
      setAttributes(byId("pause"), { "aria-pressed": this.#paused });
      byId("pause").textContent = this.#paused ? "Go on" : "Pause";
      if (!this.#paused && this.#history) this.update(this.#history);
    });
    byId("download").addEventListener("click", () => { if (this.#history) downloadTrace(this.#history.requests); });
    this.#list.addEventListener("click", (event) => this.#showDetails(event.target.closest("[data-request-id]")));
    this.#list.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      this.#showDetails(event.target.closest("[data-request-id]"));
    });
    this.#drawAxis();
  }

  #buttons(selector, choose) {
    const buttons = [...document.querySelectorAll(selector)];
    for (const button of buttons) {
      button.addEventListener("click", () => {
        setPressed(buttons, button);
        choose(button);
        this.#drawAxis();
        if (this.#history) this.#redraw(this.#history);
      });
    }
  }

  update(history) {
    this.#history = history;
    if (!this.#paused) this.#redraw(history);
  }

  #redraw(history) {
    const now = history.latest.time_s;
    if (this.#origin === null || now < this.#origin) {
      this.#origin = now;
      this.#clear();
    }
    const from = now - this.#seconds;
    if (this.#view === "requests") this.#drawRequests(history, from, now);
    else this.#drawLanes(history, from, now);
    const box = `${this.#ms(from)} 0 ${this.#seconds * 1e3} 10`;
    for (const { track } of this.#rows.values()) track.setAttribute("viewBox", box);
    this.#empty.hidden = this.#rows.size > 0;
    this.#axis.hidden = !this.#rows.size;
  }

  #ms(time_s) {
    return (time_s - this.#origin) * 1e3;
  }

  #clear() {
    this.#rows.clear();
    this.#list.replaceChildren();
  }

  // ---- a row a request, the youngest first

  #drawRequests(history, from, now) {
    const ended = history.requests.filter((request) => request.end_s >= from);
    const shown = [...ended, ...history.running].toSorted((one, other) => other.arrival_s - one.arrival_s).slice(0, MAX_ROWS);
    this.#keep(new Set(shown.map((request) => request.id)));
    shown.forEach((request, index) => {
      const row = this.#row(request.id, shortId(request.id), { "data-request-id": request.id, tabindex: "0", role: "button" });
      if (request.spans) this.#drawEnded(row, request);
      else this.#drawRunning(row, request, now);
      if (this.#list.children[index] !== row.element) this.#list.insertBefore(row.element, this.#list.children[index] ?? null);
    });
  }

  #drawEnded(row, request) {
    if (row.version === "ended") return;
    row.version = "ended";
    const least = this.#seconds; // of milliseconds: a thousandth of the width
    const base = this.#ms(request.arrival_s);
    const spans = request.spans.toSorted((one, other) => isWait(other.stage) - isWait(one.stage));
    row.track.replaceChildren(...spans.map((span) => spanOf(span, base + span.start_s * 1e3, (span.end_s - span.start_s) * 1e3, least)));
    setAttributes(row.element, { "aria-label": `Request ${shortId(request.id)}. ${spoken(request.spans, request.end_s - request.arrival_s)}` });
  }

  /** Its spans come with its end; until then there is what the front knows. */
  #drawRunning(row, { arrival_s, first_token_s, stage, num_tokens, instance }, now) {
    if (row.version !== "running") {
      row.version = "running";
      row.track.replaceChildren(svg("rect", { y: 4, height: 2 }), svg("rect", { y: 1, height: 8 }));
    }
    const [before, after] = row.track.children;
    const turned = first_token_s ?? now;
    const tip = `${stage}${instance ? ` on ${instance}` : ""}, ${num_tokens} tokens so far, ${duration(now - arrival_s)}`;
    setAttributes(before, { class: "span wait running", x: this.#ms(arrival_s), width: Math.max((turned - arrival_s) * 1e3, 1), "data-tip": tip });
    setAttributes(after, { class: `span ${groupOf(stage)} running`, x: this.#ms(turned), width: Math.max((now - turned) * 1e3, 0), "data-tip": tip });
    setAttributes(row.element, { "aria-label": `Request ${row.element.dataset.requestId}: ${stage}`, "data-stage": stage });
  }

  // ---- a row a lane

  #drawLanes(history, from, now) {
    const keys = history.latest.instances.flatMap(({ name, role }) => [
      ...(role.includes("E") ? [`${name} vision`] : []), ...(/[PD]/.test(role) ? [`${name} language`] : [])]);
    this.#keep(new Set(keys));
    const steps = new Map(keys.map((key) => [key, new Map()]));
    for (const { arrival_s, spans, end_s } of history.requests) {
      if (end_s < from || arrival_s > now) continue;
      for (const span of spans) {
        const start = this.#ms(arrival_s + span.start_s), width = (span.end_s - span.start_s) * 1e3;
        if (span.batch) steps.get(`${span.instance} ${span.lane}`)?.set(`${span.stage} ${start.toFixed(1)} ${width.toFixed(1)}`, [span, start, width]);
      }
    }
    keys.forEach((key, index) => {
      const row = this.#row(key, key, { "data-lane": key });
      const version = [...steps.get(key).keys()].join();
      if (row.version !== version) {
        row.version = version;
        row.track.replaceChildren(...[...steps.get(key).values()].map(([span, start, width]) => {
          const bar = spanOf(span, start, width, this.#seconds);
          // Runs of decodes lie across the chunks of others: below them.
          if (span.stage === "decode") setAttributes(bar, { y: 6, height: 3 });
          else if (span.lane === "language") setAttributes(bar, { y: 1, height: 4 });
          return bar;
        }));
      }
      if (this.#list.children[index] !== row.element) this.#list.append(row.element);
    });
  }

  // ---- rows

  #row(key, name, attributes) {
    let row = this.#rows.get(key);
    if (!row) {
      const track = svg("svg", { class: "track", preserveAspectRatio: "none", "aria-hidden": "true" });
      const element = el("div", { class: "row", "data-testid": "timeline-row", ...attributes }, el("span", { class: "name" }, name), track);
      row = { element, track, version: null };
      this.#rows.set(key, row);
    }
    return row;
  }

  #keep(keys) {
    for (const [key, row] of this.#rows) {
      if (keys.has(key)) continue;
      row.element.remove();
      this.#rows.delete(key);
    }
  }

  #drawAxis() {
    const labels = this.#axis.lastElementChild;
    const shares = this.#seconds === 10 ? [0, 1 / 2] : [0, 1 / 3, 2 / 3];
    labels.replaceChildren(...shares.map((share) => {
      const label = el("span", {}, `−${Math.round((1 - share) * this.#seconds)} s`);
      label.style.left = `${100 * share}%`;
      return label;
    }), el("span", { class: "now" }, "now"));
  }

  #showDetails(row) {
    const details = byId("request-details");
    const request = row && this.#history.requests.find((other) => other.id === row.dataset.requestId);
    details.hidden = !request;
    if (!request) return;
    const close = el("button", { type: "button", class: "quiet small", onclick: () => {
      details.hidden = true;
      row.focus();
    } }, "Close");
    details.replaceChildren(el("header", {}, el("code", {}, request.id), el("span", { class: "spacer" }), close),
      drawTimeline(request.spans, { id: request.id, ttft_s: request.ttft_s, total_s: request.end_s - request.arrival_s }));
  }
}

const shortId = (id) => id.replace(/^(chatcmpl|cmpl)-/, "").slice(0, 8);
