// Talks to the server: the key, errors in its words, event streams read with fetch() (EventSource cannot send a key).

const KEY = "hydra.key";
let memoryKey = "";

export function apiKey() {
  try {
    return sessionStorage.getItem(KEY) ?? memoryKey;
  } catch {
    return memoryKey;
  }
}

export function setApiKey(key) {
  memoryKey = key;
  try {
    sessionStorage.setItem(KEY, key);
  } catch { /* this page's memory has it */ }
}

export class ServerError extends Error {
  constructor(message, { status = 0, code = null, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }
}

/** Also where the page came over plain HTTP. */
export function newRequestId() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** `id` becomes the request's own. */
export async function request(path, { body, signal, id } = {}) {
  const headers = id ? { "X-Request-Id": id } : {};
  if (apiKey()) headers.Authorization = `Bearer ${apiKey()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST", headers, signal, cache: "no-store",
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached.");
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  const facts = { status: response.status, retryAfter: response.headers.get("Retry-After") };
  try {
    const { error } = await response.json();
    return new ServerError(error.message, { ...facts, code: error.code ?? error.type });
  } catch {
    return new ServerError(`The server answered with status ${response.status}.`, facts);
  }
}

/** The `data` of each event. Throws a ServerError for an event that is one, and where the stream breaks off. */
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { value, done } = await read(reader);
      if (done) return;
      buffer += value;
      const events = buffer.split("\n\n");
      buffer = events.pop();
      for (const event of events) {
        const data = event.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
        if (data === "[DONE]") return;
        if (!data) continue;
        const parsed = JSON.parse(data);
        if (parsed.error) throw new ServerError(parsed.error.message, { code: parsed.error.code ?? parsed.error.type });
        yield parsed;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The connection to the server broke off.");
  }
}
