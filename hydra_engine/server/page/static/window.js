// All requests over time: a row for each request, or for each lane of each instance, where overlap shows. Bars are placed
// once, in milliseconds; what slides and zooms is the view box of each row.

import { copyButton } from "./clipboard.js";
import { byId, count, duration, el, plural, setAttributes, setPressed, setText, shortId, svg } from "./dom.js";
import { GROUPS, groupOf, isWait } from "./stages.js";
import { drawTimeline, spanOf, spoken, tickStep, workLast } from "./timeline.js";
import { downloadTrace } from "./trace.js";
import { Viewport } from "./viewport.js";
import { wordsOf } from "./waiting.js";

const MAX_ROWS = 150;

export class Window {
  #history;
  #view = "requests";
  #port = new Viewport(() => this.#redraw());
  #rows = new Map(); // key -> {element, name, track, version}
  #origin = null; // seconds on the server's clock that are 0 in the drawing
  #chosen = ""; // the request whose details are open
  #list = el("div", { class: "rows", "data-testid": "timeline-rows" });
  #ticks = el("div", { class: "labels" });
  #axis = el("div", { class: "row axis", "aria-hidden": "true" }, el("span", { class: "name" }), this.#ticks);
  #cursor = el("div", { class: "cursor", "aria-hidden": "true", hidden: true }, el("span", {}));
  #empty = el("p", { class: "nothing" }, "No requests in this time. Send one, and its stages appear here.");

  constructor(history) {
    this.#history = history;
    const area = byId("window");
    area.append(this.#list, this.#empty, this.#axis, this.#cursor);
    byId("legend").append(...Object.entries(GROUPS).map(([group, label]) => el("span", {}, el("i", { class: group }), label)));
    this.#buttons("[data-seconds]", (button) => this.#port.follow(Number(button.dataset.seconds)));
    this.#buttons("[data-view]", (button) => {
      this.#view = button.dataset.view;
      this.#clear();
      this.#redraw();
    });
    byId("pause").addEventListener("click", () => (this.#port.live ? this.#port.hold() : this.#port.follow()));
    byId("download").addEventListener("click", () => downloadTrace(history.requests));
    this.#port.attach(area, () => this.#ticks.getBoundingClientRect());
    this.#list.addEventListener("click", (event) => this.#choose(event.target.closest("[data-request-id]")));
    this.#list.addEventListener("keydown", (event) => this.#key(event));
    area.addEventListener("pointermove", (event) => this.#point(event.clientX));
    area.addEventListener("pointerleave", () => { this.#cursor.hidden = true; });
  }

  #buttons(selector, choose) {
    for (const button of document.querySelectorAll(selector)) button.addEventListener("click", () => choose(button));
  }

  update() {
    this.#port.now = this.#history.latest.time_s;
    this.#redraw();
  }

  #redraw() {
    const port = this.#port, { latest } = this.#history;
    setPressed([...document.querySelectorAll("[data-view]")], document.querySelector(`[data-view=${this.#view}]`));
    const lengths = [...document.querySelectorAll("[data-seconds]")];
    setPressed(lengths, lengths.find((button) => port.live && Number(button.dataset.seconds) === port.seconds));
    setAttributes(byId("pause"), { "aria-pressed": !port.live });
    setText(byId("pause"), port.live ? "Pause" : "Live");
    if (!latest) return;
    if (this.#origin === null || latest.time_s < this.#origin) {
      this.#origin = latest.time_s;
      this.#clear();
    }
    if (this.#view === "requests") this.#drawRequests(port.from, port.end);
    else this.#drawLanes(port.from, port.end);
    const box = `${this.#ms(port.from)} 0 ${port.seconds * 1e3} 10`;
    for (const { track } of this.#rows.values()) setAttributes(track, { viewBox: box });
    this.#empty.hidden = this.#rows.size > 0;
    this.#axis.hidden = !this.#rows.size;
    this.#drawAxis();
  }

  #ms(time_s) {
    return (time_s - this.#origin) * 1e3;
  }

  #clear() {
    this.#rows.clear();
    this.#list.replaceChildren();
  }

  // ---- a row a request, the youngest first

  #drawRequests(from, end) {
    const { requests, running, latest } = this.#history;
    const seen = [...requests, ...running].filter((request) => request.arrival_s <= end && (request.end_s ?? latest.time_s) >= from);
    const shown = seen.toSorted((one, other) => other.arrival_s - one.arrival_s).slice(0, MAX_ROWS);
    this.#keep(new Set(shown.map((request) => request.id)));
    shown.forEach((request, index) => {
      const row = this.#row(request.id, { "data-request-id": request.id, role: "button" });
      if (request.spans) this.#drawEnded(row, request);
      else this.#drawRunning(row, request);
      const chosen = request.id === this.#chosen;
      setAttributes(row.element, { "aria-expanded": chosen, tabindex: chosen || (!index && !this.#rows.has(this.#chosen)) ? 0 : -1 });
      if (this.#list.children[index] !== row.element) this.#list.insertBefore(row.element, this.#list.children[index] ?? null);
    });
  }

  #drawEnded(row, request) {
    if (row.version === "ended") return;
    row.version = "ended";
    const base = this.#ms(request.arrival_s);
    const label = labelOf(request);
    setText(row.name, label);
    row.track.replaceChildren(...workLast(request.spans).map((span) =>
      spanOf(span, base + span.start_s * 1e3, (span.end_s - span.start_s) * 1e3, `\n${label}, request ${shortId(request.id)}`)));
    const took = request.end_s - request.arrival_s;
    row.name.dataset.tip = `${label}, ${plural(request.tokens, "token")} out, ${duration(took)}, request ${shortId(request.id)}`;
    setAttributes(row.element, { "aria-label": `${label}. Request ${shortId(request.id)}. ${spoken(request.spans, took)}`, "data-stage": "" });
  }

  /** Its spans come with its end; until then there is what each snapshot has said of it. */
  #drawRunning(row, request) {
    const { latest } = this.#history;
    row.version = "running";
    const words = wordsOf(request, latest.running);
    setText(row.name, words);
    row.name.dataset.tip = `${words}, ${plural(request.num_tokens, "token")} so far, request ${shortId(request.id)}`;
    const { stretches } = request;
    while (row.track.children.length > stretches.length) row.track.lastChild.remove();
    while (row.track.children.length < stretches.length) row.track.append(svg("rect", {}));
    stretches.forEach(({ stage, instance, from_s, to_s }, index) => {
      const wait = isWait(stage);
      setAttributes(row.track.children[index], {
        class: `span ${groupOf(stage)} running`, x: this.#ms(from_s), width: Math.max((to_s - from_s) * 1e3, 1), y: wait ? 4 : 1, height: wait ? 2 : 8,
        "data-tip": `${stage}${instance ? ` on ${instance}` : ""} for ${duration(to_s - from_s)}`,
      });
    });
    setAttributes(row.element, { "aria-label": `Request ${shortId(request.id)}: ${words}`, "data-stage": request.stage });
  }

  // ---- a row a lane

  #drawLanes(from, end) {
    const { requests, latest } = this.#history;
    const keys = latest.instances.flatMap(({ name, role }) => [
      ...(role.includes("E") ? [`${name} vision`] : []), ...(/[PD]/.test(role) ? [`${name} language`] : [])]);
    this.#keep(new Set(keys));
    const steps = new Map(keys.map((key) => [key, new Map()]));
    for (const { id, arrival_s, spans, end_s } of requests) {
      if (end_s < from || arrival_s > end) continue;
      for (const span of spans) {
        const start = this.#ms(arrival_s + span.start_s), width = (span.end_s - span.start_s) * 1e3;
        const own = span.batch && steps.get(`${span.instance} ${span.lane}`);
        const key = `${span.stage} ${start.toFixed(1)} ${width.toFixed(1)}`;
        if (own && !own.has(key)) own.set(key, [span, start, width, id]);
      }
    }
    keys.forEach((key, index) => {
      const row = this.#row(key, { "data-lane": key });
      setText(row.name, key);
      const version = [...steps.get(key).keys()].join();
      if (row.version !== version) {
        row.version = version;
        row.track.replaceChildren(...[...steps.get(key).values()].map(([span, start, width, id]) => {
          const bar = spanOf(span, start, width, `\nrequest ${shortId(id)}${span.batch > 1 ? ` and ${plural(span.batch - 1, "other")}` : ""}`);
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

  #row(key, attributes) {
    let row = this.#rows.get(key);
    if (!row) {
      const track = svg("svg", { class: "track", preserveAspectRatio: "none", "aria-hidden": "true" });
      const name = el("span", { class: "name" });
      row = { element: el("div", { class: "row", "data-testid": "timeline-row", ...attributes }, name, track), name, track, version: null };
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

  #key(event) {
    const row = event.target.closest("[data-request-id]");
    if (!row) return;
    const next = { ArrowDown: row.nextElementSibling, ArrowUp: row.previousElementSibling };
    if (event.key === "Enter" || event.key === " ") this.#choose(row);
    else if (event.key in next) next[event.key]?.focus();
    else return;
    event.preventDefault();
  }

  // ---- time

  #drawAxis() {
    const { from, end, seconds, live } = this.#port;
    const { time_s: now } = this.#history.latest;
    const step = tickStep(seconds);
    const labels = [];
    for (let ago = Math.ceil((now - end) / step) * step; ago <= now - from; ago += step) {
      const share = (now - ago - from) / seconds;
      if (share < 0.02 || share > 0.94) continue;
      const label = el("span", {}, Math.abs(ago) < step / 2 ? "now" : `−${ago >= 1 ? Number(ago.toFixed(3)) + " s" : duration(ago)}`);
      label.style.left = `${100 * share}%`;
      labels.push(label);
    }
    this.#ticks.replaceChildren(...labels, el("span", { class: "now" }, live ? "now" : ""));
  }

  /** A line under the pointer, with the time there. */
  #point(x) {
    const { left, width } = this.#ticks.getBoundingClientRect();
    this.#cursor.hidden = !this.#rows.size || x < left || x > left + width;
    if (this.#cursor.hidden || !this.#history.latest) return;
    const { from, seconds } = this.#port;
    const ago = this.#history.latest.time_s - from - ((x - left) / width) * seconds;
    this.#cursor.style.left = `${x - byId("window").getBoundingClientRect().left}px`;
    setText(this.#cursor.firstChild, ago >= 0 ? `−${duration(ago)}` : "");
  }

  // ---- one request

  #choose(row) {
    const request = row && this.#history.requests.find((other) => other.id === row.dataset.requestId);
    if (!request) return;
    const again = this.#chosen === request.id;
    this.#chosen = again ? "" : request.id;
    const details = byId("request-details");
    details.hidden = again;
    this.#redraw();
    row.focus();
    if (again) return;
    const close = el("button", { type: "button", class: "quiet small", onclick: () => this.#choose(row) }, "Close");
    details.replaceChildren(el("header", {}, el("b", {}, labelOf(request)), el("code", { title: request.id }, shortId(request.id)), copyButton("Copy request id", () => request.id), el("span", { class: "spacer" }), close),
      drawTimeline(request.spans, { id: request.id, ttft_s: request.ttft_s, total_s: request.end_s - request.arrival_s }));
    details.scrollIntoView({ block: "nearest" });
  }
}

/** "2 pictures · 1,187 tokens", of the prompt. */
function labelOf({ pictures, prompt_tokens, id }) {
  const parts = [pictures ? plural(pictures, "picture") : "", prompt_tokens ? `${count(prompt_tokens)} tokens` : ""].filter(Boolean);
  return parts.join(" · ") || shortId(id);
}
