// The open conversation: sends it, streams answers into the page, stops them, asks again. What the server refuses before a word
// of an answer leaves the conversation and goes back to where it was written.

import { eventsOf, newRequestId, request, ServerError } from "./api.js";
import { AnswerView, inWords } from "./answer.js";
import { copyButton } from "./clipboard.js";
import { Composer } from "./composer.js";
import { Conversation } from "./conversation.js";
import { byId, bytes, el, setText } from "./dom.js";
import { Follower } from "./follow.js";
import { icon } from "./icons.js";
import { Library } from "./library.js";
import { Settings } from "./settings.js";
import { Speaker } from "./speech.js";
import { waitingWords } from "./waiting.js";
import { pictureButton } from "./zoom.js";

const SAVE_MS = 1000; // while an answer grows

export class Chat {
  library;
  settings = new Settings();
  model = "";
  #composer;
  #follower = new Follower(byId("talk"), byId("to-end"));
  #speaker = new Speaker(byId("spoken"));
  #views = new Map(); // turn -> {element}, answers as AnswerView
  #running = null; // {abort, id, view, began, waits} of the answer that streams
  #onDenied;
  #snapshot = null;
  #media = ""; // what the server takes, as text

  /** `listed()`: the list of conversations has changed. */
  constructor({ onDenied, listed }) {
    this.#onDenied = onDenied;
    this.library = new Library({
      listed, opened: () => this.#opened(), busy: () => Boolean(this.#running),
      problem: (words) => this.#composer.notice(words),
    });
    this.#composer = new Composer({
      onSend: () => this.send(), said: () => this.#said(),
      sent: () => this.#conversation.attached(this.#edited),
    });
    this.library.start();
    byId("stop").addEventListener("click", () => this.#running?.abort.abort());
    byId("new-chat").addEventListener("click", () => this.begin());
    byId("edit-cancel").addEventListener("click", () => this.#edit(null));
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || byId("zoom").open) return;
      if (this.#running) this.#running.abort.abort();
      else if (this.#composer.edited !== null) this.#edit(null);
    });
  }

  get #conversation() {
    return this.library.open;
  }

  /** The question that what is written is to replace; null: none. */
  get #edited() {
    const { id, at } = this.#composer.edited ?? {};
    const turn = id === this.#conversation.id ? this.#conversation.turns[at] : null;
    return turn?.role === "user" ? turn : null;
  }

  /** With each snapshot: what the running request waits for now. */
  update(snapshot) {
    this.#snapshot = snapshot;
    this.model = snapshot.model;
    this.settings.showDefaults(snapshot.default_sampling_params);
    const media = snapshot.media && JSON.stringify([snapshot.media, snapshot.max_body_bytes]);
    if (media && media !== this.#media) {
      this.#media = media;
      this.#composer.limits = { ...snapshot.media, max_body_bytes: snapshot.max_body_bytes };
    }
    this.#drawOtherModel();
    if (this.#running?.waits) this.#drawWaiting();
  }

  async send() {
    if (this.#running || !this.settings.check()) return;
    const written = this.#composer.take();
    if (!written) return;
    if (this.#edited) this.#cut(this.#edited);
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

  /** A new conversation; the one so far stays in the list. */
  begin() {
    if (this.#conversation.turns.length) this.library.choose();
    this.#composer.focus();
  }

  /** Another conversation is open, or this one has changed elsewhere. */
  #opened() {
    this.#running?.abort.abort();
    const conversation = this.#conversation;
    if (!this.#edited) this.#edit(null);
    const unanswered = conversation.takeUnanswered(); // the page was left meanwhile
    if (unanswered) this.#composer.giveBack(unanswered);
    this.#composer.notice("");
    this.#composer.complain("");
    const { settings } = conversation.turns.findLast((turn) => turn.settings) ?? {};
    if (settings) this.settings.values = settings;
    byId("edit-note").hidden = !this.#edited;
    this.#drawAll();
    this.#follower.toEnd();
  }

  // ---- one answer

  async #answer() {
    const conversation = this.#conversation;
    const settings = { ...(this.model ? { model: this.model } : {}), ...this.settings.values };
    const body = conversation.requestBody(settings);
    const turn = { role: "assistant", thought: "", text: "", facts: null, error: null, settings };
    conversation.turns.push(turn);
    this.library.save();
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
      this.#finish(conversation, turn, problem);
    }
  }

  #finish(conversation, turn, problem) {
    if (conversation !== this.#conversation || conversation.turns.at(-1) !== turn) { // left, or brought back as it was
      if (conversation.turns.includes(turn)) this.library.save(conversation);
      return;
    }
    if (turn.text || turn.thought) {
      if (problem) turn.error = { message: problem.message, code: problem.code, retryAfter: problem.retryAfter };
      this.#views.get(turn).finish();
    } else if (problem || turn.facts?.reason === "stopped") {
      this.#composer.giveBack(conversation.takeUnanswered());
      this.#drawAll();
      if (problem) this.#composer.complain(inWords(problem.message, problem.retryAfter), problem.code);
    } else {
      this.#views.get(turn).finish();
    }
    this.#follower.follow();
    this.#speaker.finish(problem ? "" : "End of the answer.");
    this.library.save();
  }

  async #stream(body, turn, running) {
    let saved = running.began;
    const response = await request("v1/chat/completions", { body, signal: running.abort.signal, id: running.id });
    for await (const chunk of eventsOf(response)) {
      const choice = chunk.choices[0];
      const added = choice?.delta?.content ?? "", thought = choice?.delta?.reasoning_content ?? "";
      const facts = { ...turn.facts, id: chunk.id };
      if (chunk.usage) facts.tokens = tokensOf(chunk.usage);
      if (added || thought) facts.lastMs = performance.now() - running.began;
      if ((added || thought) && running.waits) facts.firstMs = facts.lastMs;
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
        this.library.save();
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
    if (this.#running || !this.settings.check()) return;
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

  /** Of the open conversation: opening another one takes the notice away. */
  #bringBack(turns) {
    this.#running?.abort.abort();
    this.#conversation.turns = turns;
    this.#drawAll();
    this.#follower.toEnd();
    this.library.save();
  }

  /** What is written next replaces this question and all behind it; null: it does not. */
  #edit(turn) {
    if (this.#composer.edited !== null) this.#composer.put({ text: "" });
    this.#composer.edited = turn && { id: this.#conversation.id, at: this.#conversation.turns.indexOf(turn) };
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
    const pictures = before.attached().filter(({ url }) => url.startsWith("data:"));
    const named = pictures.map(({ name, url }) => ({ name, type: url.slice(5, url.indexOf(";")) }));
    return [before.requestBody(turn.settings), named];
  }

  // ---- the page

  #drawAll() {
    const { turns } = this.#conversation;
    const focused = byId("messages").contains(document.activeElement);
    for (const [turn, view] of this.#views) {
      if (turns.includes(turn)) continue;
      view.element.remove();
      this.#views.delete(turn);
    }
    for (const turn of turns) if (!this.#views.has(turn)) this.#show(turn).finish?.();
    if (focused && !byId("messages").contains(document.activeElement)) this.#composer.focus();
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
      el("figcaption", {}, picture.size ? `${picture.name}, ${bytes(picture.size)}` : picture.name)));
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
    byId("new-chat").hidden = this.#conversation.turns.length === 0;
    this.#drawOtherModel();
  }

  /** Says so where the answers are another model's than this server's. */
  #drawOtherModel() {
    const models = new Set(this.#conversation.turns.map((turn) => turn.settings?.model).filter((model) => model && model !== this.model));
    const note = byId("other-model");
    note.hidden = !models.size || !this.model || this.#running;
    if (!note.hidden) setText(note, `${[...models].map(shortName).join(" and ")} answered here before; ${shortName(this.model)} answers now.`);
  }
}

/** A model's name; of a path the last folder. */
export const shortName = (model) => (/^[./~]/.test(model) ? model.split("/").findLast(Boolean) : model);

function tokensOf(usage) {
  const { image_tokens = 0, cached_tokens = 0 } = usage.prompt_tokens_details ?? {};
  return { in: usage.prompt_tokens, out: usage.completion_tokens, image: image_tokens, cached: cached_tokens };
}

function measured({ ttft_s, tpot_s, e2e_s, timeline }) {
  return { ttft_s, tpot_s, total_s: e2e_s, timeline };
}
