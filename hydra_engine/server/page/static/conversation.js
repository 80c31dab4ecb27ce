// What has been said, as turns and as messages of a request. Where conversations are kept is the library's business.

import { newRequestId } from "./api.js";

const DRAFT = "hydra.draft";
const MAX_DRAFT = 1_000_000; // characters of attached files in a draft
const MAX_NAME = 60;

export class Conversation {
  id = newRequestId();
  name = ""; // given by hand; "": the first question names it
  updated = 0; // milliseconds since 1970
  revision = ""; // of the copy that is kept; "": it is not kept yet
  turns = []; // {role, text, thought?, pictures?, facts?, error?, settings?}

  /** The first line of the first question, or a picture's name. */
  get title() {
    const first = this.turns.find((turn) => turn.role === "user");
    const line = first?.text.trim().split("\n")[0] || first?.pictures?.[0]?.name || "New chat";
    return this.name || (line.length > MAX_NAME ? `${line.slice(0, MAX_NAME - 1).trimEnd()}…` : line);
  }

  /** The model of the last answer; "" without one. */
  get model() {
    return this.turns.findLast((turn) => turn.settings?.model)?.settings.model ?? "";
  }

  /** Pictures and videos of the turns before this one, or of all. */
  attached(turn = null) {
    const end = turn ? this.turns.indexOf(turn) : this.turns.length;
    return this.turns.slice(0, end).flatMap(({ pictures }) => pictures ?? []).filter(({ url }) => url);
  }

  /** Takes a last question out that has no word of an answer, and gives it back: no request is to have it. */
  takeUnanswered() {
    const last = this.turns.at(-1);
    if (!last || (last.role === "assistant" && (last.text || last.thought))) return null;
    return this.turns.splice(this.turns.length - (last.role === "user" ? 1 : 2))[0];
  }

  messages({ system, detail = "auto" }) {
    const messages = system ? [{ role: "system", content: system }] : [];
    for (const turn of this.turns) {
      const reasoning = turn.thought ? { reasoning_content: turn.thought } : {};
      messages.push({ role: turn.role, ...reasoning, content: contentOf(turn, detail) });
    }
    return messages;
  }

  /** The body of the request that the turns so far ask for. */
  requestBody(settings) {
    const { system: _system, detail: _detail, ...sampling } = settings;
    return {
      ...sampling, messages: this.messages(settings),
      stream: true, stream_options: { include_usage: true, continuous_usage_stats: true }, return_metrics: true,
    };
  }
}

function contentOf(turn, detail) {
  const pictures = (turn.pictures ?? []).filter((picture) => picture.url);
  if (!pictures.length) return turn.text;
  const parts = pictures.map(({ kind, url }) => {
    if (kind === "video") return { type: "video_url", video_url: { url } };
    return { type: "image_url", image_url: detail === "auto" ? { url } : { url, detail } };
  });
  return turn.text ? [...parts, { type: "text", text: turn.text }] : parts;
}

// ---- what waits to be sent

/** {text, pictures, edited}: `edited` as in the composer. */
export function loadDraft() {
  try {
    return { text: "", pictures: [], edited: null, ...JSON.parse(sessionStorage.getItem(DRAFT)) };
  } catch {
    return { text: "", pictures: [], edited: null }; // nothing that can be read
  }
}

export function saveDraft({ pictures, ...draft }) {
  const small = pictures.reduce((sum, { url }) => sum + url.length, 0) < MAX_DRAFT;
  try {
    sessionStorage.setItem(DRAFT, JSON.stringify({ ...draft, pictures: small ? pictures : [] }));
  } catch { /* full or off: the page goes on without */ }
}
