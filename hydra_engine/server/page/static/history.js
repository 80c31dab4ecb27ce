// What the page remembers of the last minutes: one sample a second from counters, requests that have ended, and where those
// that run have been seen. Counters make gaps honest: after a pause the first sample is the mean over it.

const SAMPLES = 300;
const SAMPLE_S = 1;
const BUSY_WINDOW_S = 1;
const MAX_REQUESTS = 400;

export class History {
  samples = []; // {time_s, tokens, running, waiting, ttft, goodput, busy: {"epd0 vision": share}}
  requests = []; // {id, arrival_s, spans, pictures, prompt_tokens, tokens, ttft_s, end_s}, oldest first
  running = []; // of the latest snapshot, with stretches: [{stage, instance, from_s, to_s}]
  latest = null;
  generated = 0; // tokens, also of processes that have gone
  #before = null;
  #lanes = new Map(); // "epd0 vision" -> [{time_s, busy_s}] of the last second
  #shares = new Map();

  add(snapshot) {
    if (this.latest && snapshot.number < this.latest.number) this.#forget(); // another server
    this.latest = snapshot;
    const before = new Map(this.running.map((request) => [request.id, request.stretches]));
    this.running = snapshot.running.map((request) => ({ ...request, stretches: stretchesOf(request, before.get(request.id), snapshot.time_s) }));
    for (const request of snapshot.ended) this.requests.push(requestOf(request));
    if (this.requests.length > MAX_REQUESTS) this.requests.splice(0, this.requests.length - MAX_REQUESTS);
    for (const instance of snapshot.instances) {
      if (instance.status && instance.condition === "ready") this.#measureLanes(instance);
      else this.#forgetLanes(instance);
    }
    this.#sample(snapshot);
  }

  /** Busy share of a lane over the last second. */
  busy(instance, lane) {
    return this.#shares.get(`${instance} ${lane}`) ?? 0;
  }

  /** Requests that ended within the last `seconds`. */
  recent(seconds) {
    const from = (this.latest?.time_s ?? 0) - seconds;
    return this.requests.filter((request) => request.end_s >= from);
  }

  #measureLanes({ name, status }) {
    for (const lane of ["vision", "language"]) {
      const key = `${name} ${lane}`;
      const readings = this.#lanes.get(key) ?? [];
      this.#lanes.set(key, readings);
      const last = readings.at(-1);
      if (last && status.time_s < last.time_s) readings.length = 0;
      if (last?.time_s === status.time_s) continue;
      readings.push({ time_s: status.time_s, busy_s: busySeconds(status, lane) });
      while (readings.length > 2 && status.time_s - readings[1].time_s >= BUSY_WINDOW_S) readings.shift();
      const span = status.time_s - readings[0].time_s;
      const share = span > 0 ? (readings.at(-1).busy_s - readings[0].busy_s) / span : 0;
      this.#shares.set(key, Math.min(Math.max(share, 0), 1));
    }
  }

  #forgetLanes({ name }) {
    for (const lane of ["vision", "language"]) {
      this.#lanes.delete(`${name} ${lane}`);
      this.#shares.delete(`${name} ${lane}`);
    }
  }

  #sample(snapshot) {
    const now = { time_s: snapshot.time_s, tokens: total(snapshot, "generation_tokens"), good: snapshot.outcomes.good };
    const before = this.#before;
    if (before && now.time_s - before.time_s < SAMPLE_S) return;
    this.#before = now;
    if (!before) {
      this.generated = now.tokens;
      return;
    }
    const seconds = now.time_s - before.time_s;
    const first = this.recent(10).map((request) => request.ttft_s).filter((ttft_s) => ttft_s !== null);
    this.generated += Math.max(now.tokens - before.tokens, 0);
    this.samples.push({
      time_s: now.time_s,
      tokens: Math.max(now.tokens - before.tokens, 0) / seconds,
      goodput: Math.max(now.good - before.good, 0) / seconds,
      running: loadOf(snapshot)[0],
      waiting: loadOf(snapshot)[1],
      ttft: first.length ? median(first) : null,
      failed: snapshot.outcomes.failed,
      busy: Object.fromEntries(this.#shares),
    });
    if (this.samples.length > SAMPLES) this.samples.shift();
  }

  #forget() {
    this.samples = [];
    this.requests = [];
    this.running = [];
    this.#before = null;
    this.#lanes.clear();
    this.#shares.clear();
  }
}

/** [running, waiting]: what instances say, or where requests are that none of them has. */
export function loadOf(snapshot) {
  const waiting = snapshot.running.filter(({ stage }) => ["preprocess", "queue", "lost"].includes(stage)).length;
  return [Math.max(total(snapshot, "num_running"), snapshot.running.length - waiting),
    Math.max(total(snapshot, "num_waiting") + total(snapshot, "num_encoding"), waiting)];
}

export function total(snapshot, name) {
  return snapshot.instances.reduce((sum, { status }) => sum + (status?.[name] ?? 0), 0);
}

export const median = (values) => quantile(values, 0.5);

export function quantile(values, share) {
  const sorted = values.toSorted((one, other) => one - other);
  return sorted[Math.min(Math.floor(sorted.length * share), sorted.length - 1)];
}

/** A step that runs counts as far as it has come, or long steps would look idle until they end. */
function busySeconds(status, lane) {
  const step = status[`${lane}_step`];
  return status[`${lane}_busy_s`] + (step.running ? Math.max(status.time_s - step.since_s, 0) : 0);
}

const spanOfArray = ([stage, start_s, end_s, instance, lane, batch, tokens, cause]) => (
  { stage, start_s, end_s, instance, lane, batch, tokens, cause });

function requestOf({ spans: arrays, ...request }) {
  const spans = arrays.map(spanOfArray);
  const end_s = request.arrival_s + Math.max(0, ...spans.map((span) => span.end_s));
  return { ...request, spans, end_s, ttft_s: firstToken(spans) };
}

/** Where it has been, as far as snapshots have told: a new stretch where its stage or its instance is another one. */
function stretchesOf({ arrival_s, first_token_s, stage, instance }, stretches = [], now) {
  const last = stretches.at(-1);
  if (last?.stage === stage && last.instance === instance) {
    last.to_s = now;
    return stretches;
  }
  const from_s = stage === "decode" && first_token_s ? first_token_s : last?.to_s ?? arrival_s;
  if (last) last.to_s = from_s;
  return [...stretches, { stage, instance, from_s, to_s: now }];
}

/** It comes with the last prefill before the first decode. */
function firstToken(spans) {
  const until = Math.min(...spans.filter((span) => span.stage === "decode").map((span) => span.start_s), Infinity);
  const prefills = spans.filter((span) => span.stage === "prefill" && span.start_s < until);
  return prefills.length ? Math.max(...prefills.map((span) => span.end_s)) : null;
}
