// Names, groups and colours of stages: the same stage looks the same everywhere. Colours are in style.css, by group.

export const GROUPS = {
  intake: "Intake",
  encode: "Encode",
  prefill: "Prefill",
  decode: "Decode",
  move: "Moving",
  wait: "Waiting",
};

const STAGES = {
  fetch: ["intake", "intake", "fetching pictures"],
  preprocess: ["intake", "intake", "preparing pictures"],
  tokenize: ["intake", "intake", "tokenizing"],
  encode_wait: ["wait", "encode", "waiting for the encoder"],
  encode: ["encode", "encode", "encode"],
  prefill_wait: ["wait", "prefill", "waiting for prefill"],
  cached: ["cached", "prefill", "found in the cache"],
  prefill: ["prefill", "prefill", "prefill"],
  decode_wait: ["wait", "decode", "waiting between tokens"],
  decode: ["decode", "decode", "decode"],
  preempted: ["preempted", "prefill", "gave up its memory"],
  offered_features: ["wait", "move", "features waiting to be fetched"],
  offered_kv: ["wait", "move", "KV waiting to be fetched"],
  pull_features: ["move", "move", "moving features"],
  pull_kv: ["move", "move", "moving KV"],
  // of requests that still run, and where an instance was lost
  queue: ["wait", "prefill", "queued"],
  transfer: ["move", "move", "moving features or KV"],
  lost: ["lost", "prefill", "instance lost, tried again"],
};

const UNKNOWN = ["wait", "intake", ""];

export const groupOf = (stage) => (STAGES[stage] ?? UNKNOWN)[0];
/** The row of an answer's timeline: a wait stands where what it waits for stands. */
export const rowOf = (stage) => (STAGES[stage] ?? UNKNOWN)[1];
export const labelOf = (stage) => (STAGES[stage] ?? UNKNOWN)[2] || stage;
export const isWait = (stage) => groupOf(stage) === "wait";
