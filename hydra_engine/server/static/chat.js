// The conversation: sends it, streams answers into the page, stops them, and keeps it over a reload.

import { eventsOf, request, ServerError } from "./api.js";
import { AnswerView } from "./answer.js";
import { Conversation } from "./conversation.js";
import { byId, bytes, el, setText } from "./dom.js";
import { Pictures } from "./pictures.js";
import { Speaker } from "./speech.js";

const SETTINGS = "hydra.settings";
const FIELDS = ["system", "temperature", "top_p", "max_tokens", "seed", "detail"];
const NUMBERS = new Set(["temperature", "top_p", "max_tokens", "seed"]);
const IDEAS = ["Describe the picture.", "How many red objects are there?", "What is two plus three?"];
const SAVE_MS = 1000; // while an answer grows

export class Chat {
  #conversation = new Conversation();
  #pictures = new Pictures((problem) => this.#complain(problem));
  #speaker = new Speaker(byId("spoken"));
  #views = new Map(); // turn -> AnswerView
  #running = null; // AbortController of the answer that streams
  #onDenied;
  model = "";

  constructor({ onDenied }) {
    this.#onDenied = onDenied;
    this.#conversation.load();
    for (const turn of this.#conversation.turns) this.#show(turn).finish?.();
    this.#drawEmpty();
    this.#follow();
    this.#restoreSettings();
    this.#listen();
  }

  #listen() {
    const prompt = byId("prompt");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    prompt.addEventListener("input", () => this.#complain(""));
    byId("stop").addEventListener("click", () => this.#running?.abort());
    byId("clear").addEventListener("click", () => this.clear());
    byId("settings-button").addEventListener("click", () => {
      const settings = byId("settings");
      settings.hidden = !settings.hidden;
      byId("settings-button").setAttribute("aria-expanded", String(!settings.hidden));
    });
    byId("settings").addEventListener("input", () => this.#keepSettings());
    byId("ideas").append(...IDEAS.map((idea) => el("button", { type: "button", class: "quiet small", onclick: () => {
      prompt.value = idea;
      prompt.focus();
    } }, idea)));
    addEventListener("pagehide", () => this.#conversation.save());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.#running) this.#running.abort();
    });
  }

  async send() {
    const prompt = byId("prompt");
    const text = prompt.value.trim();
    if (this.#running || (!text && !this.#pictures.length)) return;
    const bad = FIELDS.map(byId).find((field) => !field.checkValidity());
    if (bad) {
      byId("settings").hidden = false;
      bad.reportValidity();
      return;
    }
    const pictures = this.#pictures.take();
    prompt.value = "";
    this.#complain("");
    const turn = { role: "user", text, pictures };
    this.#conversation.turns.push(turn);
    this.#show(turn);
    await this.#ask();
  }

  clear() {
    this.#running?.abort();
    this.#conversation.clear();
    this.#views.clear();
    byId("messages").replaceChildren();
    this.#drawEmpty();
    byId("prompt").focus();
  }

  // ---- one answer

  async #ask() {
    const settings = this.#settings();
    const body = this.#conversation.requestBody(settings);
    const turn = { role: "assistant", text: "", facts: null, error: null, settings };
    this.#conversation.turns.push(turn);
    const view = this.#show(turn);
    view.wait();
    this.#drawEmpty();
    this.#follow();
    this.#setRunning(new AbortController());
    this.#speaker.begin();
    try {
      await this.#stream(body, turn, view, this.#running.signal);
    } catch (error) {
      if (error.name === "AbortError") {
        turn.facts = { ...turn.facts, reason: "stopped" };
      } else if (error instanceof ServerError) {
        turn.error = { message: error.message, code: error.code, retryAfter: error.retryAfter };
        if (error.status === 401) this.#onDenied();
      } else {
        turn.error = { message: `The page failed: ${error.message}` };
        throw error;
      }
    } finally {
      this.#setRunning(null);
      const atEnd = this.#atEnd();
      view.finish();
      if (atEnd) this.#follow();
      this.#speaker.finish(turn.error ? "" : "End of the answer.");
      this.#conversation.save();
    }
  }

  async #stream(body, turn, view, signal) {
    const began = performance.now();
    let saved = began;
    const response = await request("v1/chat/completions", { body, signal });
    for await (const chunk of eventsOf(response)) {
      const choice = chunk.choices[0];
      const added = choice?.delta?.content ?? "";
      const facts = { ...turn.facts, id: chunk.id };
      if (chunk.usage) facts.tokens = tokensOf(chunk.usage);
      if (added && !turn.text) facts.firstMs = performance.now() - began;
      if (choice?.finish_reason) facts.reason = choice.finish_reason;
      if (chunk.metrics) Object.assign(facts, measured(chunk.metrics));
      turn.facts = facts;
      if (!added) continue;
      const atEnd = this.#atEnd();
      turn.text += added;
      view.grow();
      this.#speaker.add(added);
      if (atEnd) requestAnimationFrame(() => this.#follow());
      if (performance.now() - saved > SAVE_MS) {
        saved = performance.now();
        this.#conversation.save();
      }
    }
    if (!turn.facts?.reason) throw new ServerError("The answer broke off before its end.");
  }

  #retry(turn) {
    if (this.#running) return;
    const { turns } = this.#conversation;
    const at = turns.indexOf(turn);
    for (const later of turns.splice(at)) {
      this.#views.get(later)?.element.remove();
      this.#views.delete(later);
    }
    this.#ask();
  }

  /** The request that led to this answer, and its pictures' names and types. */
  #bodyOf(turn) {
    const before = new Conversation();
    before.turns = this.#conversation.turns.slice(0, this.#conversation.turns.indexOf(turn));
    const pictures = before.turns.flatMap((other) => other.pictures ?? []).filter((picture) => picture.url);
    const named = pictures.map(({ name, url }) => ({ name, type: url.slice(5, url.indexOf(";")) }));
    return [before.requestBody(turn.settings ?? this.#settings()), named];
  }

  // ---- the page

  #show(turn) {
    const view = turn.role === "user"
      ? { element: questionOf(turn) }
      : new AnswerView(turn, { bodyOf: (asked) => this.#bodyOf(asked), retry: (asked) => this.#retry(asked) });
    this.#views.set(turn, view);
    byId("messages").append(view.element);
    return view;
  }

  #setRunning(controller) {
    const stop = byId("stop"), send = byId("send");
    const focused = document.activeElement;
    this.#running = controller;
    stop.hidden = !controller;
    send.hidden = Boolean(controller);
    if (focused === send || focused === stop) byId("prompt").focus();
  }

  #drawEmpty() {
    byId("empty").hidden = this.#conversation.turns.length > 0;
    byId("clear").hidden = this.#conversation.turns.length === 0;
  }

  #complain(problem) {
    const note = byId("note");
    note.hidden = !problem;
    setText(note, problem);
  }

  /** What scrolls is the conversation on wide screens and the page on narrow ones. */
  #scroller() {
    const talk = byId("talk");
    return getComputedStyle(talk).overflowY === "auto" ? talk : document.scrollingElement;
  }

  #atEnd() {
    const area = this.#scroller();
    const end = area === byId("talk") ? area.scrollHeight : byId("composer").offsetTop + byId("composer").offsetHeight;
    return end - area.scrollTop - area.clientHeight < 60;
  }

  #follow() {
    const area = this.#scroller();
    if (area === byId("talk")) area.scrollTop = area.scrollHeight;
    else if (this.#conversation.turns.length) byId("composer").scrollIntoView({ block: "end" });
  }

  // ---- settings

  #settings() {
    const settings = { model: this.model || undefined };
    for (const name of FIELDS) {
      const text = byId(name).value.trim();
      if (text) settings[name] = NUMBERS.has(name) ? Number(text) : text;
    }
    return settings;
  }

  #keepSettings() {
    try {
      sessionStorage.setItem(SETTINGS, JSON.stringify(this.#settings()));
    } catch { /* they hold until the reload */ }
  }

  #restoreSettings() {
    try {
      const kept = JSON.parse(sessionStorage.getItem(SETTINGS) ?? "{}");
      for (const name of FIELDS) if (kept[name] !== undefined) byId(name).value = kept[name];
    } catch { /* defaults, then */ }
  }
}

function questionOf({ text, pictures = [] }) {
  const shown = pictures.map(({ name, size, url }) => el("figure", {},
    url ? el("img", { src: url, alt: name }) : el("span", { class: "gone" }, "not kept"),
    el("figcaption", {}, `${name}, ${bytes(size)}`)));
  return el("li", { class: "message user" }, el("span", { class: "hidden" }, "You: "),
    shown.length ? el("div", { class: "sent" }, ...shown) : null, text ? el("p", {}, text) : null);
}

function tokensOf(usage) {
  const { image_tokens = 0, cached_tokens = 0 } = usage.prompt_tokens_details ?? {};
  return { in: usage.prompt_tokens, out: usage.completion_tokens, image: image_tokens, cached: cached_tokens };
}

function measured({ ttft_s, tpot_s, e2e_s, timeline }) {
  return { ttft_s, tpot_s, total_s: e2e_s, timeline };
}
