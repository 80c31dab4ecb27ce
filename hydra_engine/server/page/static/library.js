// The conversations of this browser, or of this tab where a server needs a key: the list, the one that is open, and saving. A
// change in another tab is never written over: what both have changed becomes two conversations.

import { apiKey, newRequestId } from "./api.js";
import { Conversation } from "./conversation.js";
import { BrowserStore, Kept, TabStore, fill, lighter } from "./store.js";

const OPEN = "hydra.open"; // of this tab: {id}, and what was not saved yet when the page was left
const KEYED = "hydra.keyed"; // the server at this address needs a key

export class Library {
  list = []; // conversations without their pictures, the youngest first
  open = new Conversation();
  #store;
  #saving = Promise.resolve();
  #unsaved = false;
  #writing = ""; // the revision that was written last, or is being written
  #keyed;
  #channel = globalThis.BroadcastChannel ? new BroadcastChannel("hydra.conversations") : null;
  #hooks;

  /** Hooks: `listed()`, the list has changed; `opened()`, another one is open, or it has changed in another tab;
   *  `busy()`, an answer to the open one grows; `problem(words)`. */
  constructor(hooks) {
    this.#hooks = hooks;
    this.#keyed = Boolean(apiKey() || read("localStorage", KEYED));
    this.#store = this.#storeFor(this.#keyed);
    this.#channel?.addEventListener("message", ({ data }) => this.#hear(data));
    addEventListener("pagehide", () => this.#leave());
  }

  /** True where conversations end with this tab. */
  get inTab() {
    return this.#store instanceof TabStore;
  }

  /** Opens what was open before a reload, unless something was asked while it was read. */
  async start() {
    const left = read("sessionStorage", OPEN);
    if (!left?.id) this.#hooks.opened();
    else await this.#reopen(left);
    await this.#list();
  }

  async #reopen({ id, revisions, turns }) {
    const record = await this.#guard(this.#store.get(id));
    if (record && turns && revisions.includes(record.revision)) {
      fill(turns, new Map(record.turns.flatMap(({ pictures }) => pictures ?? []).map(({ key, url }) => [key, url])));
      record.turns = turns;
    }
    const kept = Object.assign(new Conversation(), record ?? (turns ? { id, turns } : {}));
    if (!this.open.turns.length) {
      this.open = kept;
      this.#hooks.opened();
    }
    if (turns) this.save(kept);
  }

  /** Keeps conversations where this server's belong. */
  async setKeyed(keyed) {
    if (keyed === this.#keyed) return;
    this.#keyed = keyed;
    write("localStorage", KEYED, keyed || null);
    const store = this.#storeFor(keyed);
    if (store.constructor === this.#store.constructor) return;
    this.#store = store;
    const begun = this.open;
    this.open = new Conversation();
    await this.#list();
    // What this tab has just begun goes along; what was kept stays where it is.
    if (begun.turns.length && !begun.revision) this.open = begun;
    else this.#hooks.opened();
  }

  /** Opens another conversation; without an id a new one, at once. */
  async choose(id = "") {
    const record = id ? await this.#saving.then(() => this.#guard(this.#store.get(id))) : null;
    this.show(record ? Object.assign(new Conversation(), record) : new Conversation());
  }

  show(conversation) {
    this.open = conversation;
    this.#unsaved = false;
    write("sessionStorage", OPEN, { id: conversation.id });
    this.#hooks.opened();
    this.#hooks.listed();
  }

  /** Saves a conversation, the open one or the one that an answer belongs to, behind what is being saved. */
  save(conversation = this.open) {
    if (conversation === this.open) this.#unsaved = true;
    const saving = this.#saving.then(() => this.#save(conversation)).then(() => {
      if (saving === this.#saving) this.#unsaved = false; // else it has changed since
    });
    this.#saving = saving;
    return saving;
  }

  async rename(id, name) {
    if (id === this.open.id) this.open.name = name;
    await this.#change(id, (record) => { record.name = name; });
  }

  /** Deletes it; gives it back, for `restore`. */
  async delete(id) {
    await this.#saving;
    const record = await this.#guard(this.#store.get(id));
    await this.#guard(this.#store.delete(id));
    this.#tell({ id, deleted: true });
    await this.#list();
    if (id === this.open.id) this.show(new Conversation());
    return record;
  }

  async restore(record) {
    await this.#guard(this.#store.put(record, { anyway: true }));
    this.#tell({ id: record.id });
    await this.#list();
  }

  async deleteAll() {
    await this.#saving;
    await this.#guard(this.#store.clear());
    this.#tell({ deleted: true });
    await this.#list();
    this.show(new Conversation());
  }

  // ---- saving

  async #save(conversation) {
    if (!conversation.turns.length && !conversation.revision) return;
    conversation.updated = Date.now();
    this.#writing = newRequestId();
    const kept = await this.#guard(this.#store.put(conversation, { revision: this.#writing }), Kept.NOTHING);
    if (kept === Kept.CHANGED) {
      // Another tab has gone on with it meanwhile: this one goes on with a copy.
      Object.assign(conversation, { id: new Conversation().id, name: `${conversation.title} (copy)`, revision: "" });
      if (conversation === this.open) write("sessionStorage", OPEN, { id: conversation.id });
      await this.#save(conversation);
      return;
    }
    if (kept === Kept.DELETED) return;
    if (conversation === this.open) write("sessionStorage", OPEN, { id: conversation.id });
    this.#warn(kept, conversation);
    this.#tell({ id: conversation.id });
    await this.#list();
  }

  #warn(kept, conversation) {
    if (conversation.kept === kept) return;
    const where = this.inTab ? "This tab's storage" : "The storage that the browser gives this page";
    if (kept === Kept.WORDS) this.#hooks.problem(`${where} is full: not all pictures and videos of this conversation are kept. Export it, or delete others.`);
    else if (kept === Kept.NOTHING) this.#hooks.problem(`${where} is full or off: this conversation is lost with the next reload. Export it, or delete others.`);
    Object.defineProperty(conversation, "kept", { value: kept, enumerable: false, configurable: true });
  }

  async #change(id, change) {
    await this.#saving;
    const record = id === this.open.id ? this.open : await this.#guard(this.#store.get(id));
    if (!record) return;
    change(record);
    await this.#guard(this.#store.put(record));
    this.#tell({ id });
    await this.#list();
  }

  async #list() {
    const records = (await this.#guard(this.#store.list())) ?? [];
    this.list = records.map((record) => Object.assign(new Conversation(), record)).toSorted((one, other) => other.updated - one.updated);
    this.#hooks.listed();
  }

  /** A browser can refuse its database, even while it is used: then the tab's storage it is. */
  async #guard(promise, otherwise = undefined) {
    try {
      return await promise;
    } catch (error) {
      reportError(error);
      if (!this.inTab) {
        this.#store = new TabStore();
        this.open.revision = ""; // it is not there yet
      }
      return otherwise;
    }
  }

  #storeFor(keyed) {
    return keyed || !BrowserStore.available() ? new TabStore() : new BrowserStore();
  }

  /** What a database could not write before the page goes is written here, which takes no time. The database may have
   *  written what it has not told yet. */
  #leave() {
    const { id, revision, turns } = this.open;
    if (this.#unsaved || this.#hooks.busy()) write("sessionStorage", OPEN, { id, revisions: [revision, this.#writing], turns: lighter(turns) });
  }

  // ---- other tabs

  #tell(news) {
    if (!this.inTab) this.#channel?.postMessage(news);
  }

  async #hear({ id, deleted }) {
    if (this.inTab) return;
    await this.#list();
    const mine = this.open;
    if (id ? id !== mine.id : !mine.revision) return;
    if (deleted) this.show(new Conversation());
    else if (!this.#unsaved && !this.#hooks.busy() && !isGrowing(this.list.find((talk) => talk.id === id))) await this.choose(id);
  }
}

/** Another tab is about to say more. */
function isGrowing(talk) {
  const last = talk?.turns.at(-1);
  return last?.role === "assistant" && !last.facts?.reason && !last.error;
}

function read(storage, key) {
  try {
    return JSON.parse(globalThis[storage].getItem(key));
  } catch {
    return null; // nothing that can be read
  }
}

function write(storage, key, value) {
  try {
    if (value === null) globalThis[storage].removeItem(key);
    else globalThis[storage].setItem(key, JSON.stringify(value));
  } catch { /* full or off: the page goes on without */ }
}
