// The icons of buttons, as strokes in a box of 20.

import { svg } from "./dom.js";

const PATHS = {
  check: ["m4 10.5 4 4 8-9"],
  code: ["m7 6-4 4 4 4", "m13 6 4 4-4 4"],
  copy: ["M7 7h9v9H7z", "M13 7V4H4v9h3"],
  down: ["M10 4v12", "m5 11 5 5 5-5"],
  edit: ["M4 16l.8-3.4L13 4.4l2.6 2.6-8.2 8.2z"],
  film: ["M3 4.5h14v11H3z", "M6.5 4.5v11", "M13.5 4.5v11", "M3 8h3.5m7 0H17", "M3 12h3.5m7 0H17"],
  picture: ["M3 4.5h14v11H3z", "m3 14 4.5-4 3 2.5 2.5-2.5 4 4"],
  play: ["M7 5v10l8-5z"],
  redo: ["M15.5 6.5A7 7 0 1 0 17 10", "M16 3v4h-4"],
  remove: ["M4 6h12", "M8 6V3.5h4V6", "M5.5 6l.8 10.5h7.4L14.5 6"],
};

export function icon(name) {
  return svg("svg", { viewBox: "0 0 20 20", "aria-hidden": "true" }, ...PATHS[name].map((d) => svg("path", { d })));
}
