// Tells screen readers an answer sentence by sentence: a live region that got every token would stutter.

const END = /[.!?:]["')\]]*\s|\n/g;

export class Speaker {
  #region;
  #text = "";
  #said = 0;

  constructor(region) {
    this.#region = region;
  }

  begin() {
    this.#text = "";
    this.#said = 0;
  }

  add(text) {
    this.#text += text;
    let end = this.#said;
    END.lastIndex = this.#said;
    for (let found = END.exec(this.#text); found; found = END.exec(this.#text)) end = END.lastIndex;
    this.#say(end);
  }

  finish(last = "") {
    this.#say(this.#text.length);
    if (last) this.#region.append(line(last));
  }

  #say(end) {
    const sentence = this.#text.slice(this.#said, end).trim();
    this.#said = end;
    if (!sentence) return;
    while (this.#region.childNodes.length > 20) this.#region.firstChild.remove();
    this.#region.append(line(sentence));
  }
}

function line(text) {
  const element = document.createElement("p");
  element.textContent = text;
  return element;
}
