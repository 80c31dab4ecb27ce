// The pictures that come with the engine, as questions that one click asks.

import { byId, el, focusChat } from "./dom.js";
import { attachmentOf } from "./files.js";

const FOLDER = "ui/samples/";

export async function showSamples(chat) {
  const response = await fetch(`${FOLDER}questions.json`);
  if (!response.ok) return;
  const samples = await response.json();
  byId("samples").replaceChildren(...samples.map(({ picture, question }) => el("button", {
    type: "button", "data-testid": "sample", class: picture ? "with-picture" : null, onclick: async () => {
      const pictures = picture ? [await load(picture)] : [];
      focusChat(); // this button goes with the first message
      await chat.ask({ text: question, pictures });
    },
  }, picture ? el("img", { src: FOLDER + picture, alt: "", width: "56", height: "56" }) : null, el("span", {}, question))));
}

async function load(picture) {
  const blob = await (await fetch(FOLDER + picture)).blob();
  return attachmentOf(new File([blob], picture.split("/").at(-1), { type: blob.type }));
}
