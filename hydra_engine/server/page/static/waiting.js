// What a request waits for, in words, from what the server says of those that run.

import { count, plural } from "./dom.js";

/** One sentence about where the request is; `snapshot` may be null, and may not know of it yet. */
export function waitingWords(id, snapshot, elapsed_s) {
  const found = snapshot?.running.find((request) => request.id === id);
  const words = found ? wordsOf(found, snapshot.running) : "waiting for the first token";
  const sentence = words[0].toUpperCase() + words.slice(1);
  return elapsed_s >= 1 ? `${sentence} · ${elapsed_s.toFixed(0)} s` : sentence;
}

/** The same for tooltips and labels. `running` are all that run. */
export function wordsOf({ stage, done, of, arrival_s }, running) {
  switch (stage) {
    case "preprocess":
      return "preparing the prompt and its pictures";
    case "queue": {
      const before = running.filter((other) => other.stage === "queue" && other.arrival_s < arrival_s).length;
      return before ? `queued behind ${plural(before, "request")}` : "queued";
    }
    case "encode":
      return of ? `encoding picture ${count(Math.min(done + 1, of))} of ${count(of)}` : "encoding pictures";
    case "prefill":
      return of ? `reading the prompt, ${count(done)} of ${plural(of, "token")}` : "reading the prompt";
    case "transfer":
      return `moving ${of ? "features" : "KV"} to the next instance`;
    case "decode":
      return "writing the answer";
    case "lost":
      return "an instance was lost, trying again";
    default:
      return stage;
  }
}
