// Where conversations are kept: the browser's database, or the tab's storage. Both have the same methods. Pictures and videos
// are kept apart from the turns, once each, because a growing answer is saved every second.

import { newRequestId } from "./api.js";

const DATABASE = "hydra", TALKS = "conversations", MEDIA = "media";
const TAB = "hydra.conversations";
const MAX_TAB = 4_000_000; // characters of pictures and videos

/** What `put` says: everything is kept, or all but (some) pictures and videos, or nothing; or another tab has changed or deleted it. */
export const Kept = { ALL: "all", WORDS: "words", NOTHING: "nothing", CHANGED: "changed", DELETED: "deleted" };

/** In the browser, for every tab of this address, until it is deleted. */
export class BrowserStore {
  #opening = null;
  #full = false; // no more pictures, until something is deleted

  static available() {
    return Boolean(globalThis.indexedDB);
  }

  /** All conversations without their pictures. */
  async list() {
    return this.#run("readonly", (talks) => talks.getAll());
  }

  /** The conversation with its pictures; undefined where there is none. */
  async get(id) {
    const [record, keys, urls] = await this.#run("readonly", (talks, media) => [
      talks.get(id), media.getAllKeys(filesOf(id)), media.getAll(filesOf(id))]);
    if (record) fill(record.turns, new Map(keys.map(([, key], index) => [key, urls[index]])));
    return record;
  }

  /** Writes the conversation as `revision`, if nobody else has since `record.revision`; `anyway` also if it was deleted. */
  async put(record, { revision = newRequestId(), anyway = false } = {}) {
    const stored = { ...record, revision, turns: lighter(record.turns) };
    const files = record.turns.flatMap(({ pictures }) => pictures ?? []).filter(({ url }) => url);
    let answer = Kept.ALL;
    const write = (withFiles) => this.#run("readwrite", async (talks, media) => {
      const [present, keys] = await Promise.all([talks.get(record.id), media.getAllKeys(filesOf(record.id))].map(result));
      if (!anyway && present && present.revision !== record.revision) return Kept.CHANGED;
      if (!anyway && !present && record.revision) return Kept.DELETED;
      talks.put(stored);
      const there = new Set(keys.map(([, key]) => key)), used = new Set(files.map(({ key }) => key));
      for (const key of there) if (!used.has(key)) media.delete([record.id, key]);
      const missing = files.filter(({ key }) => !there.has(key));
      if (withFiles) for (const { key, url } of missing) media.put(url, [record.id, key]);
      return withFiles || !missing.length ? Kept.ALL : Kept.WORDS;
    });
    try {
      answer = await write(!this.#full);
    } catch (error) {
      if (error.name !== "QuotaExceededError") throw error;
      this.#full = true;
      answer = await write(false).catch(() => Kept.NOTHING);
    }
    if (answer === Kept.ALL || answer === Kept.WORDS) record.revision = revision;
    return answer;
  }

  async delete(id) {
    this.#full = false;
    await this.#run("readwrite", (talks, media) => [talks.delete(id), media.delete(filesOf(id))]);
  }

  async clear() {
    this.#full = false;
    await this.#run("readwrite", (talks, media) => [talks.clear(), media.clear()]);
  }

  /** Runs `work(talks, media)` in one transaction; returns, once it is committed, what its requests or its promise gave.
   *  Runs it once more if the database was closed under it, for example because it is cleared: nothing was written then. */
  async #run(mode, work) {
    try {
      return await this.#transact(mode, work);
    } catch (error) {
      if (error?.name === "QuotaExceededError") throw error;
      this.#opening = null;
      return this.#transact(mode, work);
    }
  }

  async #transact(mode, work) {
    this.#opening ??= open(() => { this.#opening = null; });
    const transaction = (await this.#opening).transaction([TALKS, MEDIA], mode);
    const done = new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onabort = () => reject(transaction.error);
    });
    const given = work(transaction.objectStore(TALKS), transaction.objectStore(MEDIA));
    const answer = Promise.resolve(Array.isArray(given) ? Promise.all(given.map(result)) : given instanceof IDBRequest ? result(given) : given);
    answer.catch(() => {}); // the transaction tells of it
    await done;
    return answer;
  }
}

/** `closed()`: the browser has closed the database, for it was cleared; it is opened again. */
function open(closed) {
  return new Promise((resolve, reject) => {
    const opening = indexedDB.open(DATABASE, 1);
    opening.onupgradeneeded = () => {
      opening.result.createObjectStore(TALKS, { keyPath: "id" });
      opening.result.createObjectStore(MEDIA);
    };
    opening.onsuccess = () => {
      opening.result.onclose = closed;
      resolve(opening.result);
    };
    opening.onerror = () => reject(opening.error);
  });
}

const result = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

const filesOf = (id) => IDBKeyRange.bound([id], [id, []]);

/** In the storage of this tab, which is small and ends with the tab: the newest pictures are kept as far as there is room. */
export class TabStore {
  async list() {
    return this.#read();
  }

  async get(id) {
    return this.#read().find((record) => record.id === id);
  }

  async put(record, { revision = newRequestId(), anyway = false } = {}) {
    const all = this.#read(), others = all.filter(({ id }) => id !== record.id);
    if (!anyway && record.revision && others.length === all.length) return Kept.DELETED;
    record.revision = revision;
    return this.#write([record, ...others]);
  }

  async delete(id) {
    this.#write(this.#read().filter((record) => record.id !== id));
  }

  async clear() {
    this.#write([]);
  }

  #read() {
    try {
      return JSON.parse(sessionStorage.getItem(TAB)) ?? [];
    } catch {
      return []; // nothing that can be read
    }
  }

  #write(records) {
    let room = MAX_TAB, answer = Kept.ALL;
    const kept = records.map((record) => ({
      ...record, turns: record.turns.toReversed().map((turn) => ({
        ...turn, pictures: turn.pictures?.map((picture) => {
          room -= picture.url.length;
          if (room >= 0) return picture;
          if (picture.url) answer = Kept.WORDS;
          return { ...picture, url: "" };
        }),
      })).toReversed(),
    }));
    try {
      sessionStorage.setItem(TAB, JSON.stringify(kept));
      return answer;
    } catch {
      return Kept.NOTHING;
    }
  }
}

/** The turns without the data of pictures and videos, which have keys instead. */
export const lighter = (turns) => turns.map((turn) => ({ ...turn, pictures: turn.pictures?.map((picture) => {
  picture.key ??= newRequestId();
  return { ...picture, url: "" };
}) }));

/** Gives pictures and videos their data back, by their keys; those that are not kept have none. */
export function fill(turns, urls) {
  for (const picture of turns.flatMap(({ pictures }) => pictures ?? [])) picture.url = urls.get(picture.key) ?? "";
}
