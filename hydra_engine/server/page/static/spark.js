// Small line charts without axes: a trend beside a number that is written out.

import { svg } from "./dom.js";

const LEAST = 20; // samples

export class Spark {
  #line = svg("path", { class: "line" });
  #area = svg("path", { class: "area" });
  #length;

  /** At most `length` samples, the latest on the right; until there are so many, as wide as those that there are. */
  constructor(length, group = "") {
    this.#length = length;
    this.element = svg("svg", { class: `spark ${group}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      this.#area, this.#line);
  }

  /** Null values are gaps. `top` is the least value of the upper edge. */
  draw(values, top = 0) {
    const shown = values.slice(-this.#length);
    const width = Math.min(Math.max(shown.length, LEAST), this.#length);
    const from = width - shown.length;
    this.element.setAttribute("viewBox", `0 0 ${width - 1} 20`);
    const high = Math.max(top, ...shown.filter((value) => value !== null), 1e-9);
    let line = "", area = "", last = null;
    shown.forEach((value, index) => {
      const x = from + index;
      if (value === null) {
        if (last !== null) area += `L${last} 20Z`;
        last = null;
        return;
      }
      const point = `${x} ${(19 - (18 * value) / high).toFixed(2)}`;
      line += `${last === null ? "M" : "L"}${point}`;
      area += last === null ? `M${x} 20L${point}` : `L${point}`;
      last = x;
    });
    if (last !== null) area += `L${last} 20Z`;
    this.#line.setAttribute("d", line);
    this.#area.setAttribute("d", area);
  }
}
