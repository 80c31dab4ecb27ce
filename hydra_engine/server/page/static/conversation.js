// What has been said, in this tab's storage so that a reload keeps it, and as messages of a request. Storage is small:
// pictures that do not fit are shown no more after a reload, and later requests go without them.

const STORE = "hydra.conversation";
const DRAFT = "hydra.draft";
const MAX_STORED = 4_000_000; // characters

export class Conversation {
  turns = []; // {role, text, thought?, pictures?, facts?, error?, settings?}

  load() {
    const turns = read(STORE);
    if (Array.isArray(turns)) this.turns = turns;
  }

  save() {
    let room = MAX_STORED;
    const turns = this.turns.toReversed().map((turn) => {
      const pictures = turn.pictures?.map((picture) => {
        room -= picture.url.length;
        return room >= 0 ? picture : { ...picture, url: "" };
      });
      return { ...turn, pictures };
    });
    write(STORE, turns.toReversed());
  }

  /** Takes a last question out that has no word of an answer, and gives it back: no request is to have it. */
  takeUnanswered() {
    const last = this.turns.at(-1);
    if (last?.role !== "assistant" || last.text || last.thought) return null;
    return this.turns.splice(this.turns.lastIndexOf(last) - 1)[0];
  }

  /** The body of the request that the turns so far ask for. */
  requestBody(settings) {
    const messages = [];
    if (settings.system) messages.push({ role: "system", content: settings.system });
    for (const turn of this.turns) {
      const reasoning = turn.thought ? { reasoning_content: turn.thought } : {};
      messages.push({ role: turn.role, ...reasoning, content: contentOf(turn, settings.detail) });
    }
    const { system: _system, detail: _detail, ...sampling } = settings;
    return {
      ...sampling, messages,
      stream: true, stream_options: { include_usage: true, continuous_usage_stats: true }, return_metrics: true,
    };
  }
}

function contentOf(turn, detail) {
  const pictures = (turn.pictures ?? []).filter((picture) => picture.url);
  if (!pictures.length) return turn.text;
  const parts = pictures.map(({ url }) => ({
    type: "image_url", image_url: detail === "auto" ? { url } : { url, detail },
  }));
  return turn.text ? [...parts, { type: "text", text: turn.text }] : parts;
}

// ---- what waits to be sent

export const loadDraft = () => read(DRAFT) ?? { text: "", pictures: [] };

export function saveDraft({ text, pictures }) {
  const small = pictures.reduce((sum, { url }) => sum + url.length, 0) < MAX_STORED / 4;
  write(DRAFT, { text, pictures: small ? pictures : [] });
}

function read(key) {
  try {
    return JSON.parse(sessionStorage.getItem(key));
  } catch {
    return null; // nothing that can be read
  }
}

function write(key, value) {
  try {
    sessionStorage.setItem(key, JSON.stringify(value));
  } catch { /* full or off: the page goes on without */ }
}
