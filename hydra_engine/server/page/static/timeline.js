// The stage timeline of one request: folded, a coloured bar; open, a row for each kind of work, waits beside what they wait
// for, one axis in time.

import { count, duration, el, svg } from "./dom.js";
import { GROUPS, groupOf, isWait, labelOf, rowOf } from "./stages.js";

const ROWS = ["intake", "encode", "move", "prefill", "decode"];
const SCALE = 1000; // units of the drawing's width

/** `spans`: {stage, start_s, end_s, instance, batch, tokens, cause} since the arrival; `facts`: {id, ttft_s, total_s}. */
export function drawTimeline(spans, { id, ttft_s = null, total_s = 0 }) {
  const end = endOf(spans, total_s);
  const rows = ROWS.filter((row) => spans.some((span) => rowOf(span.stage) === row));
  const figure = el("div", { class: "timeline", role: "group", "aria-label": spoken(spans, end) });
  for (const row of rows) {
    const own = spans.filter((span) => rowOf(span.stage) === row);
    const busy = own.filter((span) => !isWait(span.stage)).reduce((sum, span) => sum + span.end_s - span.start_s, 0);
    figure.append(el("div", { class: "row", "data-testid": "timeline-row", "data-request-id": id, "data-row": row },
      el("span", { class: "name" }, GROUPS[row]),
      trackOf(own, end, ttft_s),
      el("span", { class: "sum" }, duration(busy))));
  }
  figure.append(axis(end));
  return figure;
}

/** All in one line: who worked on it when. */
export function foldedTimeline({ timeline, total_s = 0 }) {
  const end = endOf(timeline, total_s);
  const bar = svg("svg", { class: "folded", viewBox: `0 0 ${SCALE} 10`, preserveAspectRatio: "none", role: "img", "aria-label": spoken(timeline, end) });
  for (const span of timeline) {
    if (isWait(span.stage)) continue;
    const x = (span.start_s * SCALE) / end, width = ((span.end_s - span.start_s) * SCALE) / end;
    bar.append(svg("rect", { class: groupOf(span.stage), x, y: 0, width: Math.max(width, SCALE / 100), height: 10 }));
  }
  return bar;
}

const endOf = (spans, total_s) => Math.max(total_s, ...spans.map((span) => span.end_s), 1e-4);

function trackOf(spans, end, ttft_s) {
  const track = svg("svg", { class: "track", viewBox: `0 0 ${SCALE} 10`, preserveAspectRatio: "none", "aria-hidden": "true" });
  const scale = SCALE / end;
  for (const span of workLast(spans)) track.append(spanOf(span, span.start_s * scale, (span.end_s - span.start_s) * scale));
  if (ttft_s !== null && ttft_s <= end) {
    track.append(svg("line", { class: "first-token", x1: ttft_s * scale, x2: ttft_s * scale, y1: 0, y2: 10 }));
  }
  return track;
}

/** Work lies over waits. */
export const workLast = (spans) => spans.toSorted((one, other) => isWait(other.stage) - isWait(one.stage));

/** One span as a bar: work is solid, a wait is thin. However short it is, its outline is a pixel wide. */
export function spanOf(span, x, width, about = "") {
  const wait = isWait(span.stage);
  return svg("rect", {
    class: `span ${groupOf(span.stage)}`, x, width, y: wait ? 4 : 1, height: wait ? 2 : 8,
    "data-testid": "timeline-span", "data-stage": span.stage, "data-tip": tipOf(span) + about,
    "data-start-ms": (span.start_s * 1e3).toFixed(3), "data-end-ms": (span.end_s * 1e3).toFixed(3),
  });
}

function tipOf(span) {
  const facts = [`${labelOf(span.stage)}: ${duration(span.end_s - span.start_s)}`];
  facts.push(`${duration(span.start_s)} to ${duration(span.end_s)} after the request came`);
  if (span.tokens) facts.push(`${count(span.tokens)} ${span.lane === "vision" ? "patches" : "tokens"}`);
  if (span.batch > 1) facts.push(`in a batch of ${span.batch}`);
  if (span.cause) facts.push(`for ${span.cause}`);
  if (span.instance && span.instance !== "front") facts.push(`on ${span.instance}`);
  for (const blame of span.blame ?? []) facts.push(`${duration(blame.seconds)} lost to ${blame.kind}`);
  return facts.join(" · ");
}

function axis(end) {
  const step = tickStep(end);
  const ticks = svg("svg", { class: "ticks", viewBox: `0 0 ${SCALE} 4`, preserveAspectRatio: "none", "aria-hidden": "true" });
  const labels = el("span", { class: "labels", "aria-hidden": "true" });
  for (let at = 0; at <= end * 1.0001; at += step) {
    ticks.append(svg("line", { x1: (at / end) * SCALE, x2: (at / end) * SCALE, y1: 0, y2: 4 }));
    if (at > end * 0.93) continue; // no room for its label
    const label = el("span", {}, at ? duration(at) : "0");
    label.style.left = `${(100 * at) / end}%`;
    labels.append(label);
  }
  return el("div", { class: "row axis" }, el("span", { class: "name" }), el("div", {}, ticks, labels),
    el("span", { class: "sum" }, duration(end)));
}

/** 1, 2 or 5 times a power of ten, for about four ticks. */
export function tickStep(end) {
  const power = 10 ** Math.floor(Math.log10(end / 4));
  return power * [1, 2, 5, 10].find((factor) => (factor * power * 5) >= end);
}

/** The same in words. */
export function spoken(spans, end) {
  const sums = new Map();
  for (const span of spans) {
    const label = labelOf(span.stage);
    sums.set(label, (sums.get(label) ?? 0) + span.end_s - span.start_s);
  }
  const parts = [...sums].map(([label, seconds]) => `${label} ${duration(seconds)}`);
  return `Stages in ${duration(end)}: ${parts.join(", ")}`;
}
