// The requests that the page has seen, as Chrome trace JSON for ui.perfetto.dev: a process for each instance with rows for
// its lanes, and one for the requests. Made here; nothing is sent anywhere.

import { el } from "./dom.js";

export function traceOf(requests) {
  const origin = Math.min(...requests.map((request) => request.arrival_s));
  const rows = new Rows();
  const slices = requests.flatMap(({ id, arrival_s, spans }) => spans.map((span) => ({
    id, span, start: Math.round((arrival_s - origin + span.start_s) * 1e6), end: Math.round((arrival_s - origin + span.end_s) * 1e6),
  }))).toSorted((one, other) => one.start - other.start || other.end - one.end);
  const steps = new Map(); // what several requests have in common
  const events = [];
  for (const slice of slices) {
    const { id, span, start, end } = slice;
    events.push(eventOf(slice, rows.place("requests", span.lane === "vision" ? `${id} pictures` : id, start, end), { request: id }));
    if (!span.batch) continue;
    const key = [span.instance, span.lane, span.stage, start, end].join();
    const step = steps.get(key) ?? { ...slice, ids: [] };
    step.ids.push(id);
    steps.set(key, step);
  }
  for (const step of steps.values()) {
    const { span: { instance, lane, stage }, start, end } = step;
    events.push(eventOf(step, rows.place(instance, stage === "decode" ? `${lane} decode` : lane, start, end), { requests: step.ids }));
  }
  return { traceEvents: [...rows.names(), ...events], displayTimeUnit: "ms" };
}

function eventOf({ span: { stage, lane, instance, batch, tokens, cause }, start, end }, place, args) {
  return { name: stage, cat: lane, ph: "X", ...place, ts: start, dur: end - start, args: { ...args, instance, batch, tokens, cause } };
}

/** Numbers for processes and rows. Slices of one row never overlap, or viewers would draw them wrongly. */
class Rows {
  #processes = new Map();
  #rows = new Map(); // "process row" -> {pid, tid, name, until}

  /** In the first of `row`, `row 2`, .. that is free; to be called in order of start. */
  place(process, row, start, end) {
    if (!this.#processes.has(process)) this.#processes.set(process, this.#processes.size + 1);
    for (let number = 1; ; number += 1) {
      const name = number > 1 ? `${row} ${number}` : row;
      const key = `${process} ${name}`;
      if (!this.#rows.has(key)) this.#rows.set(key, { pid: this.#processes.get(process), tid: this.#rows.size + 1, name, until: -Infinity });
      const found = this.#rows.get(key);
      if (found.until > start) continue;
      found.until = end;
      return { pid: found.pid, tid: found.tid };
    }
  }

  names() {
    return [
      ...[...this.#processes].map(([name, pid]) => ({ name: "process_name", ph: "M", pid, args: { name } })),
      ...[...this.#rows.values()].map(({ pid, tid, name }) => ({ name: "thread_name", ph: "M", pid, tid, args: { name } })),
    ];
  }
}

export function downloadTrace(requests) {
  const url = URL.createObjectURL(new Blob([JSON.stringify(traceOf(requests))], { type: "application/json" }));
  el("a", { href: url, download: "hydra-trace.json" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
