// The requests that the page has seen, as Chrome trace JSON for ui.perfetto.dev. Made here; nothing is sent anywhere.

import { el } from "./dom.js";

export function traceOf(requests) {
  const origin = Math.min(...requests.map((request) => request.arrival_s));
  const events = [];
  requests.forEach(({ id, arrival_s, spans }, index) => {
    const rows = new Map(); // lane -> tid: spans of one row must not overlap
    for (const { stage, start_s, end_s, instance, lane, batch, tokens, cause } of spans) {
      const key = /^(offered|pull)_/.test(stage) ? stage : lane === "vision" ? "images" : "";
      if (!rows.has(key)) {
        rows.set(key, 8 * (index + 1) + rows.size);
        events.push({ name: "thread_name", ph: "M", pid: 1, tid: rows.get(key), args: { name: `${id} ${key}`.trim() } });
      }
      events.push({
        name: stage, cat: lane, ph: "X", pid: 1, tid: rows.get(key), ts: Math.round((arrival_s - origin + start_s) * 1e6),
        dur: Math.round((end_s - start_s) * 1e6), args: { request: id, instance, batch, tokens, cause },
      });
    }
  });
  return { traceEvents: [{ name: "process_name", ph: "M", pid: 1, args: { name: "requests" } }, ...events], displayTimeUnit: "ms" };
}

export function downloadTrace(requests) {
  const url = URL.createObjectURL(new Blob([JSON.stringify(traceOf(requests))], { type: "application/json" }));
  el("a", { href: url, download: "hydra-trace.json" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
