// What has been said, in this tab's storage so that a reload keeps it, and as messages of a request. Storage is small:
// pictures that do not fit are shown no more after a reload, and later requests go without them.

const STORE = "hydra.conversation";
const MAX_STORED = 4_000_000; // characters

export class Conversation {
  turns = []; // {role, text, pictures?, facts?, error?, request?}

  load() {
    try {
      const turns = JSON.parse(sessionStorage.getItem(STORE) ?? "[]");
      if (Array.isArray(turns)) this.turns = turns;
    } catch { /* nothing that can be read */ }
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
    try {
      sessionStorage.setItem(STORE, JSON.stringify(turns.toReversed()));
    } catch { /* full or off: the page goes on without */ }
  }

  clear() {
    this.turns = [];
    this.save();
  }

  /** The body of the request that the turns so far ask for. */
  requestBody(settings) {
    const messages = [];
    if (settings.system) messages.push({ role: "system", content: settings.system });
    for (const turn of this.turns) {
      if (turn.role === "assistant" && !turn.text) continue;
      messages.push({ role: turn.role, content: contentOf(turn, settings.detail) });
    }
    const { model, temperature, top_p, max_tokens, seed } = settings;
    return {
      model, messages, temperature, top_p, max_tokens, seed,
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
