// The conversation: sends it, streams answers into the page, stops them, asks again, and keeps it over a reload. What the
// server refuses before a word of an answer leaves the conversation and goes back to where it was written.

import { eventsOf, newRequestId, request, ServerError } from "./api.js";
import { AnswerView, inWords } from "./answer.js";
import { copyButton } from "./clipboard.js";
import { Composer } from "./composer.js";
import { Conversation } from "./conversation.js";
import { byId, bytes, el } from "./dom.js";
import { Follower } from "./follow.js";
import { icon } from "./icons.js";
import { Settings } from "./settings.js";
import { Speaker } from "./speech.js";
import { waitingWords } from "./waiting.js";
import { pictureButton } from "./zoom.js";

const SAVE_MS = 1000; // while an answer grows

export class Chat {
  #conversation = new Conversation();
  #composer;
  #follower = new Follower(byId("talk"), byId("to-end"));
  #speaker = new Speaker(byId("spoken"));
  #views = new Map(); // turn -> {element}, answers as AnswerView
  #running = null; // {abort, id, view, began, waits} of the answer that streams
  #editing = null; // the question that what is written is to replace
  #onDenied;
  #snapshot = null;
  #settings = new Settings();
  model = "";

  constructor({ onDenied }) {
    this.#onDenied = onDenied;
    this.#conversation.load();
    const unanswered = this.#conversation.takeUnanswered(); // the page was left meanwhile
    this.#composer = new Composer({ onSend: () => this.send(), said: () => this.#said() });
    if (unanswered) this.#composer.giveBack(unanswered);
    this.#drawAll();
    this.#follower.toEnd();
    byId("stop").addEventListener("click", () => this.#running?.abort.abort());
    byId("clear").addEventListener("click", () => this.clear());
    byId("edit-cancel").addEventListener("click", () => this.#edit(null));
    addEventListener("pagehide", () => this.#conversation.save());
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || byId("zoom").open) return;
      if (this.#running) this.#running.abort.abort();
      else if (this.#editing) this.#edit(null);
    });
  }

  /** With each snapshot: what the running request waits for now. */
  update(snapshot) {
    this.#snapshot = snapshot;
    this.model = snapshot.model;
    this.#settings.showDefaults(snapshot.default_sampling_params);
    if (this.#running?.waits) this.#drawWaiting();
  }

  async send() {
    if (this.#running || !this.#settings.check()) return;
    const written = this.#composer.take();
    if (!written) return;
    if (this.#editing) this.#cut(this.#editing);
    this.#edit(null);
    await this.ask(written);
  }

  /** Asks this, which stands nowhere yet. */
  async ask({ text, pictures }) {
    if (this.#running) return;
    const turn = { role: "user", text, pictures };
    this.#conversation.turns.push(turn);
    this.#show(turn);
    await this.#answer();
  }

  clear() {
    this.#running?.abort.abort();
    this.#edit(null);
    const { turns } = this.#conversation;
    this.#conversation.turns = [];
    this.#drawAll();
    this.#composer.focus();
    this.#composer.notice("The conversation is cleared.", () => this.#bringBack(turns));
  }

  // ---- one answer

  async #answer() {
    const settings = { model: this.model || undefined, ...this.#settings.values };
    const body = this.#conversation.requestBody(settings);
    const turn = { role: "assistant", thought: "", text: "", facts: null, error: null, settings };
    this.#conversation.turns.push(turn);
    const view = this.#show(turn);
    const running = { abort: new AbortController(), id: newRequestId(), view, began: performance.now(), waits: true };
    this.#setRunning(running);
    this.#drawWaiting();
    const clock = setInterval(() => { if (running.waits) this.#drawWaiting(); }, 250);
    this.#drawEmpty();
    this.#follower.toEnd();
    this.#speaker.begin();
    let problem = null;
    try {
      await this.#stream(body, turn, running);
    } catch (error) {
      if (error.name === "AbortError") turn.facts = { ...turn.facts, reason: "stopped" };
      else if (error instanceof ServerError) problem = error;
      else problem = new ServerError(`The page failed: ${error.message}`);
      if (problem?.status === 401) this.#onDenied();
      if (problem && !(error instanceof ServerError)) throw error;
    } finally {
      clearInterval(clock);
      this.#setRunning(null);
      this.#finish(turn, problem);
    }
  }

  #finish(turn, problem) {
    if (this.#conversation.turns.at(-1) !== turn) return; // cleared meanwhile
    if (turn.text || turn.thought) {
      if (problem) turn.error = { message: problem.message, code: problem.code, retryAfter: problem.retryAfter };
      this.#views.get(turn).finish();
    } else if (problem || turn.facts?.reason === "stopped") {
      this.#composer.giveBack(this.#conversation.takeUnanswered());
      this.#drawAll();
      if (problem) this.#composer.complain(inWords(problem.message, problem.retryAfter), problem.code);
    } else {
      this.#views.get(turn).finish();
    }
    this.#follower.follow();
    this.#speaker.finish(problem ? "" : "End of the answer.");
    this.#conversation.save();
  }

  async #stream(body, turn, running) {
    let saved = running.began;
    const response = await request("v1/chat/completions", { body, signal: running.abort.signal, id: running.id });
    for await (const chunk of eventsOf(response)) {
      const choice = chunk.choices[0];
      const added = choice?.delta?.content ?? "", thought = choice?.delta?.reasoning_content ?? "";
      const facts = { ...turn.facts, id: chunk.id };
      if (chunk.usage) facts.tokens = tokensOf(chunk.usage);
      if ((added || thought) && running.waits) facts.firstMs = performance.now() - running.began;
      if (choice?.finish_reason) facts.reason = choice.finish_reason;
      if (chunk.metrics) Object.assign(facts, measured(chunk.metrics));
      turn.facts = facts;
      if (!added && !thought) continue;
      running.waits = false;
      turn.text += added;
      turn.thought += thought;
      running.view.grow(() => this.#follower.follow());
      this.#speaker.add(added);
      if (performance.now() - saved > SAVE_MS) {
        saved = performance.now();
        this.#conversation.save();
      }
    }
    if (!turn.facts?.reason) throw new ServerError("The answer broke off before its end.");
  }

  #drawWaiting() {
    const { view, id, began } = this.#running;
    view.wait(waitingWords(`chatcmpl-${id}`, this.#snapshot, (performance.now() - began) / 1e3));
  }

  // ---- what has been said

  #again(turn) {
    if (this.#running || !this.#settings.check()) return;
    this.#cut(turn);
    this.#answer();
  }

  /** Takes this turn and all behind it out, with a way back. */
  #cut(turn) {
    const { turns } = this.#conversation;
    const before = [...turns];
    turns.splice(turns.indexOf(turn));
    this.#drawAll();
    this.#composer.notice(before.length - turns.length > 2 ? "Later turns are removed." : "The answer is replaced.", () => this.#bringBack(before));
  }

  #bringBack(turns) {
    this.#running?.abort.abort();
    this.#conversation.turns = turns;
    this.#drawAll();
    this.#follower.toEnd();
    this.#conversation.save();
  }

  /** What is written next replaces this question and all behind it; null: it does not. */
  #edit(turn) {
    if (this.#editing) this.#composer.put({ text: "" });
    this.#editing = turn;
    byId("edit-note").hidden = !turn;
    if (!turn) return;
    this.#composer.put(turn);
    this.#composer.focus();
  }

  #said() {
    return this.#conversation.turns.filter((turn) => turn.role === "user" && turn.text).map((turn) => turn.text);
  }

  /** The request that led to this answer, and its pictures' names and types. */
  #bodyOf(turn) {
    const before = new Conversation();
    before.turns = this.#conversation.turns.slice(0, this.#conversation.turns.indexOf(turn));
    const pictures = before.turns.flatMap((other) => other.pictures ?? []).filter((picture) => picture.url);
    const named = pictures.map(({ name, url }) => ({ name, type: url.slice(5, url.indexOf(";")) }));
    return [before.requestBody(turn.settings), named];
  }

  // ---- the page

  #drawAll() {
    const { turns } = this.#conversation;
    for (const [turn, view] of this.#views) {
      if (turns.includes(turn)) continue;
      view.element.remove();
      this.#views.delete(turn);
    }
    for (const turn of turns) if (!this.#views.has(turn)) this.#show(turn).finish?.();
    this.#drawEmpty();
  }

  #show(turn) {
    const view = turn.role === "user"
      ? { element: this.#questionOf(turn) }
      : new AnswerView(turn, { bodyOf: (asked) => this.#bodyOf(asked), again: (asked) => this.#again(asked) });
    this.#views.set(turn, view);
    byId("messages").append(view.element);
    return view;
  }

  #questionOf(turn) {
    const { text, pictures = [] } = turn;
    const shown = pictures.map((picture) => el("figure", {},
      picture.url ? pictureButton(picture) : el("span", { class: "gone" }, "not kept"),
      el("figcaption", {}, `${picture.name}, ${bytes(picture.size)}`)));
    const edit = el("button", { type: "button", class: "quiet icon", "aria-label": "Edit", title: "Edit", onclick: () => {
      if (!this.#running) this.#edit(turn);
    } }, icon("edit"));
    return el("li", { class: "message user" }, el("div", { class: "bubble" }, el("span", { class: "hidden" }, "You: "),
      shown.length ? el("div", { class: "sent" }, ...shown) : null, text ? el("p", {}, text) : null),
    el("div", { class: "tools" }, text ? copyButton("Copy", () => text) : null, edit));
  }

  #setRunning(running) {
    const stop = byId("stop"), send = byId("send");
    const focused = document.activeElement;
    this.#running = running;
    stop.hidden = !running;
    send.hidden = Boolean(running);
    if (focused === send || focused === stop) this.#composer.focus();
  }

  #drawEmpty() {
    byId("empty").hidden = this.#conversation.turns.length > 0;
    byId("clear").hidden = this.#conversation.turns.length === 0;
  }
}

function tokensOf(usage) {
  const { image_tokens = 0, cached_tokens = 0 } = usage.prompt_tokens_details ?? {};
  return { in: usage.prompt_tokens, out: usage.completion_tokens, image: image_tokens, cached: cached_tokens };
}

function measured({ ttft_s, tpot_s, e2e_s, timeline }) {
  return { ttft_s, tpot_s, total_s: e2e_s, timeline };
}
