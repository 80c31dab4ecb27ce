// The few numbers at the top, each with its last three minutes.

import { byId, count, duration, el, percent, plural, rate, setText } from "./dom.js";
import { loadOf, median, quantile } from "./history.js";
import { Spark } from "./spark.js";

const LENGTH = 180; // seconds
const MINUTE_S = 60;

export class Tiles {
  #tiles = {};

  constructor() {
    for (const [name, title] of [["tokens", "Tokens per second"], ["ttft", "First token"], ["running", "Running"], ["goodput", "Errors"]]) {
      const value = el("b", {}, "–"), note = el("small", {}, "\u00a0"), spark = new Spark(LENGTH), head = el("span", { class: "title" }, title);
      const tile = el("div", { class: "tile", "data-testid": `tile-${name}` }, head, value, note, spark.element);
      byId("tiles").append(tile);
      this.#tiles[name] = { head, value, note, spark, tile };
    }
  }

  update(history) {
    const { latest, samples } = history;
    const recent = samples.slice(-5);
    const mean = recent.length ? recent.reduce((sum, sample) => sum + sample.tokens, 0) / recent.length : 0;
    const first = history.recent(MINUTE_S).map((request) => request.ttft_s).filter((ttft_s) => ttft_s !== null);
    const [running, waiting] = loadOf(latest);
    this.#set("tokens", rate(mean), `${count(history.generated)} in all`, samples.map((sample) => sample.tokens), 1);
    const slow = first.length ? `p95 ${duration(quantile(first, 0.95))}` : "last minute";
    const note = latest.ttft_limit_s ? `${slow} · limit ${duration(latest.ttft_limit_s)}` : `median, ${slow}`;
    this.#set("ttft", first.length ? duration(median(first)) : "–", note,
      samples.map((sample) => sample.ttft), latest.ttft_limit_s);
    this.#set("running", count(running), `${count(waiting)} waiting`, samples.map((sample) => sample.running + sample.waiting), 1);
    this.#goodput(history);
  }

  #goodput({ latest: { outcomes }, samples }) {
    const minute = samples.slice(-MINUTE_S);
    const good = minute.reduce((sum, sample) => sum + sample.goodput, 0) / Math.max(minute.length, 1);
    const { limited } = outcomes;
    const { head, tile } = this.#tiles.goodput;
    tile.dataset.attainment = limited ? (outcomes.good / limited).toFixed(4) : "";
    setText(head, limited ? "Goodput" : "Errors");
    if (!limited) {
      this.#set("goodput", count(outcomes.failed), `of ${plural(outcomes.finished + outcomes.failed, "request")}`,
        samples.map((sample, index) => sample.failed - (samples[index - 1] ?? sample).failed), 1);
      return;
    }
    const shares = Object.entries(outcomes.verdicts).filter(([, [, all]]) => all)
      .map(([limit, [met, all]]) => `${limit.toUpperCase()} ${percent(met / all)}`);
    tile.dataset.tip = `Requests that kept all their limits, per second. Limits kept so far: ${shares.join(", ")}`;
    this.#set("goodput", `${rate(good)} /s`, `limits kept ${percent(outcomes.good / limited)}`, samples.map((sample) => sample.goodput), 0.1);
  }

  #set(name, value, note, values, top) {
    const tile = this.#tiles[name];
    setText(tile.value, value);
    setText(tile.note, note);
    tile.spark.draw(values, top);
  }
}
