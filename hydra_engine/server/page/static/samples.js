// The pictures that come with the engine, as questions that one click asks.

import { byId, el } from "./dom.js";
import { readFile } from "./pictures.js";

const FOLDER = "ui/samples/";

export async function showSamples(chat) {
  const response = await fetch(`${FOLDER}questions.json`);
  if (!response.ok) return;
  const samples = await response.json();
  byId("samples").replaceChildren(...samples.map(({ picture, question }) => el("button", {
    type: "button", "data-testid": "sample", onclick: async () => {
      const pictures = picture ? [await load(picture)] : [];
      byId("prompt").focus(); // this button goes with the first message
      await chat.ask({ text: question, pictures });
    },
  }, picture ? el("img", { src: FOLDER + picture, alt: "", width: "56", height: "56" }) : null, el("span", {}, question))));
}

async function load(picture) {
  const blob = await (await fetch(FOLDER + picture)).blob();
  return { name: picture.split("/").at(-1), size: blob.size, url: await readFile(blob) };
}
