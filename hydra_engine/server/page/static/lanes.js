// A card for each instance: what its two lanes run now, its queues by stage, its caches, and what its limits allow.

import { byId, bytes, count, duration, el, percent, plural, setAttributes, setText } from "./dom.js";
import { Spark } from "./spark.js";

const SPARK = 60; // samples, one a second

export class Lanes {
  #cards = new Map();

  update(history) {
    const names = history.latest.instances.map((instance) => instance.name);
    if (names.join() !== [...this.#cards.keys()].join()) {
      this.#cards = new Map(names.map((name) => [name, new Card(name)]));
      byId("instances").replaceChildren(...[...this.#cards.values()].map((card) => card.element));
    }
    for (const instance of history.latest.instances) this.#cards.get(instance.name).update(instance, history);
  }
}

class Card {
  #role = el("span", { class: "role" });
  #condition = el("span", { class: "condition" });
  #device = el("span", { class: "device" });
  #lanes = { vision: new LaneRow("vision", "Vision"), language: new LaneRow("language", "Language") };
  #queues = Object.fromEntries(["encode", "prefill", "decode", "move"].map((name) => [name, new Queue(name)]));
  #meters = { kv: new Meter("cache-kv", "KV cache"), image: new Meter("cache-image", "Picture cache") };
  #budget = new Meter("budget", "Token limit");
  #gauges;
  #nothing = el("p", { class: "nothing" });

  constructor(name) {
    this.#gauges = [
      el("div", { class: "lanes" }, ...Object.values(this.#lanes).map((lane) => lane.element)),
      el("div", { class: "queues" }, ...Object.values(this.#queues).map((queue) => queue.element)),
      el("div", { class: "meters" }, ...Object.values(this.#meters).map((meter) => meter.element), this.#budget.element),
    ];
    this.#budget.element.tabIndex = 0; // its tooltip
    this.element = el("article", { class: "card instance", "data-testid": "instance", "data-name": name, "aria-label": `Instance ${name}` },
      el("header", {}, el("h3", {}, name), this.#role, this.#condition, el("span", { class: "spacer" }), this.#device), ...this.#gauges, this.#nothing);
  }

  update(instance, history) {
    const { status, role } = instance;
    drawRole(this.#role, role);
    const words = instance.restarts ? `${instance.condition}, ${plural(instance.restarts, "restart")}` : instance.condition;
    setText(this.#condition, words);
    setAttributes(this.#condition, { "data-condition": instance.condition });
    setText(this.#device, instance.device);
    // What a process said that has gone is of the past.
    const gone = instance.condition !== "ready" || !status;
    setAttributes(this.element, { "data-role": role, "data-gone": gone });
    this.#gauges.forEach((gauge) => { gauge.hidden = gone; });
    setText(this.#nothing, gone ? "Nothing runs here now." : "");
    if (gone) return;
    for (const [name, lane] of Object.entries(this.#lanes)) lane.update(instance, history, name);
    this.#drawQueues(status, role);
    this.#meters.kv.update(status.kv_blocks_used, status.kv_blocks_total,
      status.kv_blocks_used * instance.kv_block_size, status.kv_blocks_total * instance.kv_block_size, "tokens");
    this.#meters.image.update(status.image_blocks_used, status.image_blocks_total,
      status.image_blocks_used * instance.image_block_size, status.image_blocks_total * instance.image_block_size, "features");
    this.#drawBudget(status.budget, status);
  }

  #drawQueues(status, role) {
    const { vision_step: vision } = status;
    const encoding = vision.running ? vision.images : 0;
    this.#queues.encode.update(role.includes("E"), status.num_encoding, encoding ? `${plural(encoding, "picture")} now` : "waiting");
    const prefilling = Math.max(status.num_running - status.num_decoding, 0);
    this.#queues.prefill.update(role.includes("P"), prefilling + status.num_waiting, `${count(status.num_waiting)} waiting`);
    this.#queues.decode.update(role.includes("D"), status.num_decoding, status.num_arriving ? `${count(status.num_arriving)} coming` : "running");
    const { transfer } = status;
    const moving = transfer.offers + transfer.pulls;
    const moves = moving > 0 || transfer.pulled > 0 || transfer.offered > 0;
    this.#queues.move.update(moves, moving, transfer.pulled ? `${bytes(transfer.pulled_bytes)} fetched` : `${count(transfer.offered)} offered`);
  }

  /** The share of decode steps that kept the limit; how the next step is bounded by it is for those who ask. */
  #drawBudget(budget, status) {
    const { element } = this.#budget;
    element.hidden = !budget.tpot_limit_s;
    if (!budget.tpot_limit_s) return;
    const kept = budget.decode_steps - budget.late_steps;
    const words = budget.decode_steps ? `${percent(kept / budget.decode_steps)} of steps within ${duration(budget.tpot_limit_s)}` : `${duration(budget.tpot_limit_s)}, no steps yet`;
    this.#budget.show(kept, budget.decode_steps, words, words);
    element.hidden = false;
    setAttributes(element, {
      "data-late": budget.late_steps, "data-steps": status.language_steps,
      "data-tip": `So that tokens stay on time, the next step takes up to ${plural(budget.token_budget, "prompt token")} and ${count(budget.image_budget)} patches`
        + `${budget.vision_s < 0 ? "" : `, with up to ${duration(budget.vision_s)} of encoding beside it`}`,
    });
  }
}

/** The letters of a role as badges in the colours of their stages. */
export function drawRole(element, role) {
  if (element.dataset.role === role) return;
  element.dataset.role = role;
  const groups = { E: "encode", P: "prefill", D: "decode" };
  element.replaceChildren(...[...role].map((letter) => el("i", { class: groups[letter], title: groups[letter] }, letter)));
}

class LaneRow {
  #lane;
  #now = el("span", { class: "now" });
  #bar = el("span", { class: "bar", "aria-hidden": "true" });
  #parts = {};
  #share = el("span", { class: "share" });
  #spark;

  constructor(lane, title) {
    this.#lane = lane;
    this.#spark = new Spark(SPARK, lane);
    for (const group of lane === "vision" ? ["encode"] : ["decode", "prefill"]) {
      this.#parts[group] = el("i", { class: group });
      this.#bar.append(this.#parts[group]);
    }
    this.element = el("div", { class: "lane", "data-testid": "stream-util", "data-stream": lane },
      el("span", { class: "name" }, title), this.#spark.element, this.#share, this.#bar, this.#now);
  }

  update({ name, role, status }, history, lane) {
    const serves = lane === "vision" ? role.includes("E") : /[PD]/.test(role);
    this.element.hidden = !serves;
    if (!serves) return;
    const share = history.busy(name, lane);
    const step = status[`${lane}_step`];
    const active = step.running || share > 0.02;
    setText(this.#now, active ? wordsOf(step, this.#lane) : "idle");
    setText(this.#share, percent(share));
    setAttributes(this.element, { "data-value": share.toFixed(3), "data-running": step.running });
    const prefill = step.tokens ? Math.max(step.tokens - step.decodes, 0) / step.tokens : 0;
    if (lane === "vision") {
      this.#parts.encode.style.width = `${100 * share}%`;
    } else {
      this.#parts.prefill.style.width = `${100 * share * prefill}%`;
      this.#parts.decode.style.width = `${100 * share * (1 - prefill)}%`;
    }
    this.#spark.draw(history.samples.slice(-SPARK).map((sample) => sample.busy[`${name} ${lane}`] ?? null), 1);
  }
}

function wordsOf(step, lane) {
  if (lane === "vision") return `encode ${plural(step.images, "picture")}, ${plural(step.tokens, "patch").replace("patchs", "patches")}`;
  const parts = [];
  if (step.prefills) parts.push(`prefill ${plural(step.prefills, "prompt")}, ${plural(step.tokens - step.decodes, "token")}`);
  if (step.decodes) parts.push(`decode ${count(step.decodes)}`);
  return parts.join(" + ") || "idle";
}

class Queue {
  #number = el("b", {}, "0");
  #note = el("small", {});

  constructor(group) {
    const title = { encode: "Encode", prefill: "Prefill", decode: "Decode", move: "Moving" }[group];
    this.element = el("div", { class: `queue ${group}`, "data-testid": `queue-${group}` }, el("span", {}, title), this.#number, this.#note);
  }

  update(shown, number, note) {
    this.element.hidden = !shown;
    setText(this.#number, count(number));
    setText(this.#note, note);
    setAttributes(this.element, { "data-value": number });
  }
}

class Meter {
  #fill = el("i", {});
  #words = el("span", { class: "words" });

  constructor(testid, title) {
    this.element = el("div", { class: "meter", "data-testid": testid, role: "meter", "aria-label": title, "aria-valuemin": "0" },
      el("span", { class: "name" }, title), this.#words, el("span", { class: "bar" }, this.#fill));
  }

  /** In blocks, and in what fits into them. */
  update(used, all, usedUnits, allUnits, unit) {
    this.show(used, all, `${count(usedUnits)} / ${count(allUnits)} ${unit}`, `${count(usedUnits)} of ${count(allUnits)} ${unit}`);
    setAttributes(this.element, { "data-used": used, "data-total": all });
  }

  show(used, all, words, spoken) {
    this.element.hidden = !all;
    this.#fill.style.width = `${(100 * used) / Math.max(all, 1)}%`;
    setText(this.#words, words);
    setAttributes(this.element, { "aria-valuenow": used, "aria-valuemax": all, "aria-valuetext": spoken });
  }
}
