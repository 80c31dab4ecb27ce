// Puts the page together: header, key, theme, and what each snapshot goes to.

import { apiKey, setApiKey } from "./api.js";
import { Chat } from "./chat.js";
import { byId, count, duration, setText } from "./dom.js";
import { Drawer } from "./drawer.js";
import { Feed } from "./feed.js";
import { History, loadOf } from "./history.js";
import { Lanes } from "./lanes.js";
import { Modes } from "./modes.js";
import { showSamples } from "./samples.js";
import { Tiles } from "./tiles.js";
import { Topology } from "./topology.js";
import { watchTooltips } from "./tooltip.js";
import { Window } from "./window.js";

const THEMES = ["system", "light", "dark"];

const modes = new Modes(() => {
  drawer.layOut();
  draw();
});
const history = new History();
const panels = [new Tiles(), new Topology(), new Lanes(), new Window(history)];
const chat = new Chat({ onDenied: askForKey, listed: () => drawer?.draw() });
const drawer = new Drawer(chat);
const feed = new Feed({ onSnapshot, onState });
let seen = 0; // when the last snapshot came

function onSnapshot(snapshot) {
  seen = performance.now();
  history.add(snapshot);
  chat.update(snapshot);
  setText(document.querySelector(".model"), snapshot.title);
  document.querySelector(".model").title = `${snapshot.model}, hydra-engine ${snapshot.version}`;
  byId("one-topic").hidden = snapshot.model !== "demo";
  const [running, waiting] = loadOf(snapshot);
  setText(byId("load"), `${count(running)} running, ${count(waiting)} waiting`);
  draw();
}

function draw() {
  if (history.latest && modes.shown !== "chat") for (const panel of panels) panel.update(history);
}

/** `health`: good, fair or bad, of a connection that is open. */
function onState(state, words, health = "") {
  const connection = document.querySelector(".connection");
  connection.dataset.state = state;
  if (state === "open" || state === "denied") chat.library.setKeyed(state === "denied" || Boolean(apiKey()));
  connection.dataset.health = health;
  setText(connection.querySelector("b"), words);
  showAge(state !== "open" && state !== "connecting");
  if (state === "denied") {
    setText(byId("key-note"), apiKey() ? "That key was refused." : "Kept in this tab only, until it is closed.");
    askForKey();
  }
}

/** What is shown of the engine is as old as the last snapshot. */
function showAge(stale) {
  document.querySelector(".live").toggleAttribute("data-stale", stale);
  const age = byId("age");
  age.hidden = !stale;
  clearInterval(showAge.clock);
  if (!stale) return;
  const tell = () => setText(age, seen ? `No news for ${duration(Math.round((performance.now() - seen) / 1e3))}. What is below is what was seen last.` : "No news from the engine yet.");
  tell();
  showAge.clock = setInterval(tell, 1000);
}

// ---- key

function showKeyForm(shown) {
  byId("key-form").hidden = !shown;
  byId("key-button").setAttribute("aria-expanded", String(shown));
}

function askForKey() {
  byId("key-button").hidden = false;
  if (!byId("key-form").hidden) return;
  showKeyForm(true);
  byId("key").focus();
}

byId("key").value = apiKey();
byId("key-button").hidden = !apiKey();
byId("key-button").addEventListener("click", () => {
  showKeyForm(byId("key-form").hidden);
  if (!byId("key-form").hidden) byId("key").focus();
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setApiKey(byId("key").value.trim());
  showKeyForm(false);
  feed.start();
  byId("prompt").focus();
});

// ---- theme

function showTheme() {
  setText(byId("theme-name"), `Theme: ${document.documentElement.dataset.theme ?? "system"}`);
  byId("theme-button").title = byId("theme-name").textContent;
}

byId("theme-button").addEventListener("click", () => {
  const root = document.documentElement;
  const next = THEMES[(THEMES.indexOf(root.dataset.theme ?? "system") + 1) % THEMES.length];
  if (next === "system") delete root.dataset.theme;
  else root.dataset.theme = next;
  try {
    localStorage.setItem("hydra.theme", next);
  } catch { /* it holds until the reload */ }
  showTheme();
});

showTheme();
watchTooltips();
feed.start();
showSamples(chat);
