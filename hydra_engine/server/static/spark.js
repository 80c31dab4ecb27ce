// Small line charts without axes: a trend beside a number that is written out.

import { svg } from "./dom.js";

export class Spark {
  #line = svg("path", { class: "line" });
  #area = svg("path", { class: "area" });
  #length;

  /** `length` samples wide, the latest on the right. */
  constructor(length, group = "") {
    this.#length = length;
    this.element = svg("svg", { class: `spark ${group}`, viewBox: `0 0 ${length - 1} 20`, preserveAspectRatio: "none", "aria-hidden": "true" },
      this.#area, this.#line);
  }

  /** Null values are gaps. `top` is the least value of the upper edge. */
  draw(values, top = 0) {
    const shown = values.slice(-this.#length);
    const from = this.#length - shown.length;
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
