// Conversations as files: JSON as `hydra-engine chat` writes it with /save, and Markdown to read. A file that is imported may
// come from anywhere: what the page does not know is refused in a sentence, and all of it is only ever shown as text.

import { Conversation } from "./conversation.js";
import { bytes, plural } from "./dom.js";
import { readFile } from "./files.js";
import { FIELDS } from "./settings.js";

const MAX_BYTES = 64 << 20;
const MAX_MESSAGES = 2000;
const DATA = /^data:(image\/(png|jpeg|webp|gif|bmp)|video\/[\w.+-]+);base64,[A-Za-z0-9+/]+=*$/;
const WEB = /^https?:\/\//;

export function asJson(conversation, settings) {
  const { system: _system, detail: _detail, model: _model, ...sampling } = settings;
  const document = { model: conversation.model, settings: sampling, messages: conversation.messages(settings) };
  return `${JSON.stringify(document, null, 1)}\n`;
}

export function asMarkdown(conversation, settings) {
  const parts = [`# ${conversation.title}`];
  if (settings.system) parts.push("**System**", settings.system);
  for (const { role, text, pictures = [], settings: own } of conversation.turns) {
    parts.push(role === "user" ? "**You**" : `**${own?.model ?? "Answer"}**`);
    for (const { name, size } of pictures) parts.push(`*${name}${size ? `, ${bytes(size)}` : ""}*`);
    if (text) parts.push(text);
  }
  return `${parts.join("\n\n")}\n`;
}

/** How many pictures and videos a file of this conversation is without, because they are not kept. */
export const lost = ({ turns }) => turns.flatMap(({ pictures }) => pictures ?? []).filter(({ url }) => !url).length;

export function save(text, name, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export const fileName = (title) => title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 60) || "conversation";

/** What a file is refused for. */
export class WrongFile extends Error {}

/** The conversation in a file, and a sentence about what of it the page has no use for. Throws WrongFile. */
export async function imported(file) {
  if (file.size > MAX_BYTES) throw new WrongFile(`${file.name} is larger than ${bytes(MAX_BYTES)}.`);
  const text = await readFile(file, "readAsText");
  let document;
  try {
    document = JSON.parse(text);
  } catch {
    throw new WrongFile(`${file.name} is not JSON.`);
  }
  if (!Array.isArray(document?.messages) || !document.messages.length) {
    throw new WrongFile(`${file.name} has no list of messages, as Export JSON and /save of hydra-engine chat write it.`);
  }
  if (document.messages.length > MAX_MESSAGES) throw new WrongFile(`${file.name} has more than ${plural(MAX_MESSAGES, "message")}.`);
  const conversation = new Conversation();
  conversation.name = file.name.replace(/\.json$/i, "").slice(0, 200);
  const { settings, unused } = settingsOf(document);
  document.messages.forEach((message, index) => {
    if (message?.role === "system" && !index && typeof message.content === "string") settings.system = message.content;
    else conversation.turns.push(turnOf(message, index, settings));
  });
  for (const turn of conversation.turns) if (turn.role === "assistant") turn.settings = settings;
  return { conversation, settings, unused: unused.length ? `The page has no setting ${unused.join(", ")}: it is not used.` : "" };
}

function settingsOf({ settings: found, model }) {
  const settings = typeof model === "string" ? { model: model.slice(0, 500) } : {};
  const entries = Object.entries(typeof found === "object" && found ? found : {});
  const known = entries.filter(([name, value]) => FIELDS.includes(name) && name !== "system" && Number.isFinite(value));
  const unused = entries.filter((entry) => !known.includes(entry)).map(([name]) => name.slice(0, 40));
  return { settings: { ...settings, ...Object.fromEntries(known) }, unused };
}

function turnOf(message, index, settings) {
  const refuse = (why) => { throw new WrongFile(`Message ${index + 1} ${why}.`); };
  const { role, content, reasoning_content: thought = "" } = Object(message);
  if (role !== "user" && role !== "assistant") refuse(`has the role ${JSON.stringify(role ?? null).slice(0, 40)}; the page knows user and assistant, and system for the first one`);
  if (typeof thought !== "string") refuse("has reasoning_content that is not text");
  const parts = typeof content === "string" ? [{ type: "text", text: content }] : content;
  if (!Array.isArray(parts)) refuse("has no content");
  const turn = { role, text: "", ...(role === "user" ? { pictures: [] } : { thought, facts: null, error: null }) };
  parts.forEach((part, at) => {
    const { type } = Object(part), { url, detail } = Object(part?.[type]);
    if (type === "text" && typeof part.text === "string" && at === parts.length - 1) turn.text = part.text;
    else if (role === "user" && (type === "image_url" || type === "video_url") && typeof url === "string") {
      const kind = type === "video_url" ? "video" : "image";
      if (!url.startsWith(`data:${kind}/`) && !WEB.test(url)) refuse(`has ${kind === "video" ? "a video" : "a picture"} that is neither data nor a web address`);
      if (url.startsWith("data:") && !DATA.test(url)) refuse(`has ${kind === "video" ? "a video" : "a picture"} whose data is no base64 of a format that the page shows`);
      if (detail) settings.detail = String(detail).slice(0, 10);
      const name = WEB.test(url) ? url.slice(0, 200) : `${kind === "video" ? "video" : "picture"} ${turn.pictures.length + 1}`;
      turn.pictures.push({ kind, name, size: WEB.test(url) ? 0 : Math.floor((url.length - url.indexOf(",")) * 0.75), url });
    } else refuse("has parts that the page does not know; it knows pictures and videos, then one text");
  });
  return turn;
}
