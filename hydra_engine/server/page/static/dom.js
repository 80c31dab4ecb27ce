// Makes elements. Text becomes text nodes; there is no way here to give markup as a string.

const SVG = "http://www.w3.org/2000/svg";

const FINE = matchMedia("(pointer: fine)");

/** Focuses where one writes; where that would bring a keyboard over half a phone, where one reads. */
export const focusChat = () => byId(FINE.matches ? "prompt" : "talk").focus();

export const byId = (id) => document.getElementById(id);

export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Sets text only where it changes, so that an unchanged page costs no layout. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttributes(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    const text = String(value);
    if (element.getAttribute(name) !== text) element.setAttribute(name, text);
  }
}

export function setPressed(buttons, chosen) {
  for (const button of buttons) setAttributes(button, { "aria-pressed": button === chosen });
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenths = new Intl.NumberFormat("en", { maximumFractionDigits: 1, minimumFractionDigits: 1 });

export const count = (value) => whole.format(value);
export const rate = (value) => (value >= 100 ? whole : tenths).format(value);
export const percent = (share) => `${whole.format(100 * share)} %`;
export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

export function duration(seconds) {
  if (seconds >= 10) return `${tenths.format(seconds)} s`;
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  if (seconds >= 0.01) return `${whole.format(seconds * 1e3)} ms`;
  return `${tenths.format(seconds * 1e3)} ms`;
}

export function bytes(size) {
  const [unit, name] = size >= 2 ** 30 ? [2 ** 30, "GiB"] : size >= 2 ** 20 ? [2 ** 20, "MiB"] : [2 ** 10, "KiB"];
  return size < unit ? `${size} B` : `${(Number.isInteger(size / unit) || unit === 2 ** 10 ? whole : tenths).format(size / unit)} ${name}`;
}

export const shortId = (id) => id.replace(/^(chatcmpl|cmpl)-/, "").slice(0, 8);
