// One tooltip for everything that has `data-tip`: shown under the pointer, or at what has the focus. Escape hides it.

import { byId, setText } from "./dom.js";

export function watchTooltips() {
  const tip = byId("tooltip");
  const hide = () => { tip.hidden = true; };
  const show = (target, x, y) => {
    setText(tip, target.dataset.tip);
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(x + 12, innerWidth - width - 8))}px`;
    tip.style.top = `${y + 16 + height < innerHeight ? y + 16 : y - height - 10}px`;
  };
  document.addEventListener("pointermove", (event) => {
    const target = event.target.closest?.("[data-tip]");
    if (target) show(target, event.clientX, event.clientY);
    else if (!tip.hidden) hide();
  });
  document.addEventListener("focusin", (event) => {
    if (!event.target.matches("[data-tip]:focus-visible")) return;
    const { left, bottom } = event.target.getBoundingClientRect();
    show(event.target, left, bottom);
  });
  document.addEventListener("focusout", hide);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  document.addEventListener("scroll", hide, true);
}
