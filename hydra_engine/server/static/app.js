// Puts the page together: header, key, theme, and what each snapshot goes to.

import { apiKey, setApiKey } from "./api.js";
import { Chat } from "./chat.js";
import { byId, count, setText } from "./dom.js";
import { Feed } from "./feed.js";
import { History, total } from "./history.js";
import { Lanes } from "./lanes.js";
import { Tiles } from "./tiles.js";
import { Topology } from "./topology.js";
import { watchTooltips } from "./tooltip.js";
import { Window } from "./window.js";

const THEMES = ["system", "light", "dark"];

const history = new History();
const panels = [new Tiles(), new Topology(), new Lanes(), new Window()];
const chat = new Chat({ onDenied: askForKey });
const feed = new Feed({ onSnapshot, onState });

function onSnapshot(snapshot) {
  history.add(snapshot);
  chat.model = snapshot.model;
  setText(document.querySelector(".model"), snapshot.model);
  setText(byId("version"), snapshot.version);
  const waiting = total(snapshot, "num_waiting") + total(snapshot, "num_encoding");
  setText(byId("load"), `${count(total(snapshot, "num_running"))} running, ${count(waiting)} waiting`);
  for (const panel of panels) panel.update(history);
}

function onState(state, words) {
  const connection = document.querySelector(".connection");
  connection.dataset.state = state;
  setText(connection.querySelector("b"), words);
  if (state === "denied") askForKey();
}

// ---- key

function showKeyForm(shown) {
  byId("key-form").hidden = !shown;
  byId("key-button").setAttribute("aria-expanded", String(shown));
}

function askForKey() {
  if (!byId("key-form").hidden) return;
  showKeyForm(true);
  byId("key").focus();
}

byId("key").value = apiKey();
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
