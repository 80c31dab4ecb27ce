// The instances as a picture, stages one behind the other, and requests as dots that go from one to the next. A dot moves
// when its request does: pictures to who encodes them, features to who prefills, KV to who decodes.

import { byId, el, plural, setAttributes, setText, svg } from "./dom.js";
import { groupOf } from "./stages.js";

const NODE = { w: 132, h: 66 }, CLIENT = { w: 78, h: 36 };
const GAP = 16, MARGIN = 12, AROUND = 24; // AROUND: room for lines that go past a column
const FRESH_S = 1; // of requests that ended longer ago no dots are sent
const NARROW = 480; // pixels; below, stages go from top to bottom
const MAX_DOTS = 60, PER_ROW = 10, ROWS = 3, DOT = 11;
const STEP_MS = 420;

export class Topology {
  #shape = "";
  #nodes = new Map(); // name -> {x, y, w, h, ..}; "" are the clients
  #dots = new Map(); // request id -> circle
  #more = el("span", {});
  #drawing = null;
  #upright = false;

  constructor() {
    byId("topology-legend").append(this.#more);
  }

  update(history) {
    const { latest } = history;
    byId("topology-card").hidden = latest.instances.length < 2; // of one there is nothing to see
    if (latest.instances.length < 2) return;
    this.#upright = byId("topology").clientWidth < NARROW;
    const shape = `${this.#upright} ${latest.instances.map(({ name, role }) => `${name}:${role}`).join()}`;
    if (shape !== this.#shape) {
      this.#shape = shape;
      this.#draw(latest.instances);
    }
    for (const instance of latest.instances) this.#updateNode(instance, history);
    this.#moveDots(history);
    const words = latest.running.length ? `${plural(latest.running.length, "request")} running` : "no requests now";
    setText(this.#more, latest.running.length > MAX_DOTS ? `${words}, ${MAX_DOTS} shown` : words);
  }

  // ---- the picture

  #draw(instances) {
    this.#nodes.clear();
    this.#dots.clear();
    this.#drawing = null;
    const [width, height] = this.#place(columnsOf(instances));
    const client = this.#nodes.get("");
    const roles = instances.map(({ name, role, node }) => `${name} (${role}${node ? ` on ${node}` : ""})`).join(", ");
    this.#drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Clients and instances: ${roles}` },
      svg("defs", {}, svg("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" },
        svg("path", { d: "M0 0.5 7.5 4 0 7.5z", class: "head" }))),
      ...edgesOf(instances).map(([from, to, kind]) => this.#edge(from, to, kind)),
      svg("g", { class: "node client" }, svg("rect", { x: client.x, y: client.y, width: CLIENT.w, height: CLIENT.h, rx: 18 }),
        svg("text", { x: client.x + CLIENT.w / 2, y: client.y + 22, "text-anchor": "middle" }, "Clients")),
      ...instances.map((instance) => this.#node(this.#nodes.get(instance.name))));
    byId("topology").replaceChildren(this.#drawing);
  }

  /** Gives every box its place; the size of the picture. */
  #place(columns) {
    const most = Math.max(...columns.map((column) => column.length));
    if (this.#upright) {
      const width = Math.max(most * (NODE.w + GAP) - GAP + 2 * MARGIN, 320);
      this.#nodes.set("", { name: "", role: "", x: (width - CLIENT.w) / 2, y: MARGIN, ...CLIENT });
      columns.forEach((column, c) => column.forEach((instance, r) => {
        const left = (width - column.length * (NODE.w + GAP) + GAP) / 2;
        const y = MARGIN + CLIENT.h + 34 + c * (NODE.h + 40);
        this.#nodes.set(instance.name, { ...instance, x: left + r * (NODE.w + GAP), y, column: c, ...NODE });
      }));
      return [width, MARGIN + CLIENT.h + 34 + columns.length * (NODE.h + 40) - 40 + MARGIN];
    }
    const width = 720, height = most * (NODE.h + GAP) - GAP + 2 * MARGIN;
    const first = MARGIN + CLIENT.w + 62;
    const spread = (width - first - NODE.w - MARGIN) / Math.max(columns.length - 1, 1);
    this.#nodes.set("", { name: "", role: "", x: MARGIN, y: (height - CLIENT.h) / 2, ...CLIENT });
    columns.forEach((column, c) => column.forEach((instance, r) => {
      const x = columns.length === 1 ? (width - NODE.w) / 2 + 20 : first + c * spread;
      const top = (height - column.length * (NODE.h + GAP) + GAP) / 2;
      this.#nodes.set(instance.name, { ...instance, x, y: top + r * (NODE.h + GAP), column: c, ...NODE });
    }));
    const past = columns.slice(1).flat().some((instance) => isEntry(instance));
    return [width, height + (past ? AROUND : 0)];
  }

  #edge(from, to, kind) {
    const one = this.#nodes.get(from), other = this.#nodes.get(to);
    if (!from && other.column) return this.#wayAround(one, other);
    const [x1, y1] = this.#port(one, other), [x2, y2] = this.#port(other, one);
    const far = this.#upright ? y2 - y1 : x2 - x1;
    const bend = Math.max(Math.abs(far) / 2, 16) * Math.sign(far || 1);
    const middle = this.#upright ? `${x1} ${y1 + bend} ${x2} ${y2 - bend}` : `${x1 + bend} ${y1} ${x2 - bend} ${y2}`;
    const path = svg("path", { class: `edge ${kind}`, d: `M${x1} ${y1}C${middle} ${x2} ${y2}`, "marker-end": "url(#arrow)" });
    if (kind === "requests") return path;
    const aside = this.#upright ? { x: (x1 + x2) / 2 + 6, y: (y1 + y2) / 2 + 4 } : { x: (x1 + x2) / 2, y: (y1 + y2) / 2 - 6, "text-anchor": "middle" };
    return svg("g", {}, path, svg("text", { class: "kind", ...aside }, kind));
  }

  /** From the clients past the first column, below it or beside it. */
  #wayAround(client, box) {
    let d;
    if (this.#upright) {
      const x1 = client.x + client.w + 2, y1 = client.y + client.h / 2, x2 = box.x + box.w + 2, y2 = box.y + box.h / 2;
      d = `M${x1} ${y1}C${x2 + 2 * AROUND} ${y1} ${x2 + 2 * AROUND} ${y2} ${x2} ${y2}`;
    } else {
      const x1 = client.x + client.w / 2, y1 = client.y + client.h + 2, x2 = box.x + box.w / 2, y2 = box.y + box.h + 2;
      d = `M${x1} ${y1}C${x1} ${y2 + 1.2 * AROUND} ${x2} ${y2 + 1.4 * AROUND} ${x2} ${y2}`;
    }
    return svg("path", { class: "edge requests", d, "marker-end": "url(#arrow)" });
  }

  /** Where a line to `other` leaves a box. Two directions between the same boxes lie apart. */
  #port(box, other) {
    const forward = this.#upright ? other.y > box.y : other.x > box.x;
    const returns = box.role.includes("D") && box.role !== "D" || other.role.includes("D") && other.role !== "D";
    const shift = box.name && other.name && returns ? (forward ? -8 : 8) : 0;
    if (this.#upright) return [box.x + box.w / 2 + shift, forward ? box.y + box.h + 2 : box.y - 2];
    return [forward ? box.x + box.w + 2 : box.x - 2, box.y + box.h / 2 + shift];
  }

  #node(node) {
    const groups = { E: "encode", P: "prefill", D: "decode" };
    const badges = [...node.role].flatMap((letter, index) => {
      const x = node.x + NODE.w - 8 - 19 * (node.role.length - index);
      return [svg("rect", { class: `badge ${groups[letter]}`, x, y: node.y + 6, width: 16, height: 16, rx: 4 }),
        svg("text", { class: "letter", x: x + 8, y: node.y + 18, "text-anchor": "middle" }, letter)];
    });
    node.bars = {};
    const lanes = ["vision", "language"].filter((lane) => (lane === "vision" ? node.role.includes("E") : /[PD]/.test(node.role)));
    const width = (NODE.w - 20 - 6 * (lanes.length - 1)) / lanes.length;
    const bars = lanes.flatMap((lane, index) => {
      const place = { x: node.x + 10 + index * (width + 6), y: node.y + NODE.h - 9, height: 4, rx: 2 };
      node.bars[lane] = svg("rect", { class: `busy ${lane}`, ...place, width: 0, "data-full": width });
      return [svg("rect", { class: "rail", ...place, width }), node.bars[lane]];
    });
    node.box = svg("rect", { x: node.x, y: node.y, width: NODE.w, height: NODE.h, rx: 10 });
    return svg("g", { class: "node", "data-testid": "topology-node", "data-name": node.name }, node.box,
      svg("text", { class: "name", x: node.x + 10, y: node.y + 18 }, node.name),
      ...(node.node ? [svg("text", { class: "machine", x: node.x + 10, y: node.y + NODE.h + 11 }, `on ${node.node}`)] : []),
      ...badges, ...bars);
  }

  #updateNode({ name, condition }, history) {
    const node = this.#nodes.get(name);
    setAttributes(node.box, { "data-condition": condition });
    for (const [lane, bar] of Object.entries(node.bars)) {
      setAttributes(bar, { width: (history.busy(name, lane) * bar.dataset.full).toFixed(1) });
    }
  }

  // ---- dots

  #moveDots({ latest }) {
    const taken = new Map(); // instance -> dots in it
    const seen = new Set();
    for (const { id, stage, instance } of latest.running.slice(0, MAX_DOTS)) {
      const place = this.#nodes.has(instance) ? instance : "";
      const slot = taken.get(place) ?? 0;
      taken.set(place, slot + 1);
      seen.add(id);
      const dot = this.#dots.get(id) ?? this.#newDot(id);
      setAttributes(dot, { class: `dot ${groupOf(stage)}`, "data-instance": place });
      this.#put(dot, place, slot);
    }
    for (const { id, arrival_s, spans } of latest.ended) {
      const end_s = arrival_s + Math.max(0, ...spans.map((span) => span[2]));
      if (latest.time_s - end_s > FRESH_S) continue;
      if (!this.#dots.has(id) && this.#dots.size < MAX_DOTS) this.#replay(id, spans);
    }
    for (const [id, dot] of this.#dots) if (!seen.has(id) && !dot.dataset.replayed) this.#remove(id, dot);
  }

  #newDot(id) {
    const dot = svg("circle", { class: "dot", r: 4, "data-testid": "topology-dot" });
    this.#dots.set(id, dot);
    this.#put(dot, "", 0);
    this.#drawing.append(dot);
    dot.getBoundingClientRect(); // it starts from here, not from nowhere
    return dot;
  }

  #put(dot, place, slot) {
    const box = this.#nodes.get(place);
    const inside = [box.x + 14 + (slot % PER_ROW) * DOT, box.y + 29 + Math.floor(slot / PER_ROW) * DOT];
    const [x, y] = place ? inside : this.#upright ? [box.x + box.w / 2, box.y + box.h + 8] : [box.x + box.w + 8, box.y + box.h / 2];
    const size = place && slot >= ROWS * PER_ROW ? 0 : 1;
    const transform = `translate(${x.toFixed(1)}px, ${y.toFixed(1)}px) scale(${size})`;
    if (dot.style.transform !== transform) dot.style.transform = transform;
  }

  /** A request that came and went between two snapshots, along the instances of its spans. */
  #replay(id, arrays) {
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
    const stops = [];
    for (const [stage, , , instance] of arrays) {
      if (this.#nodes.has(instance) && stops.at(-1)?.[1] !== instance) stops.push([stage, instance]);
    }
    if (!stops.length) return;
    stops.splice(6);
    const dot = this.#newDot(id);
    dot.dataset.replayed = "1";
    stops.forEach(([stage, instance], index) => setTimeout(() => {
      if (!this.#nodes.has(instance)) return; // the topology has changed meanwhile
      setAttributes(dot, { class: `dot ${groupOf(stage)}` });
      this.#put(dot, instance, 0);
    }, index * STEP_MS));
    setTimeout(() => this.#remove(id, dot), stops.length * STEP_MS);
  }

  #remove(id, dot) {
    if (this.#dots.get(id) === dot) this.#dots.delete(id);
    dot.classList.add("gone");
    setTimeout(() => dot.remove(), STEP_MS);
  }
}

/** By the first stage that they serve, without empty columns. Those that do everything share one. */
function columnsOf(instances) {
  const columns = [[], [], []];
  for (const instance of instances) {
    const { role } = instance;
    columns[role === "E" || role === "ED" ? 0 : role.includes("P") ? 1 : 2].push(instance);
  }
  return columns.filter((column) => column.length);
}

/** Whether the clients' requests or pictures go there first. */
const isEntry = ({ role }) => /[EP]/.test(role);

/** [from, to, what goes that way]; requests come from the clients, "". */
function edgesOf(instances) {
  const edges = [];
  for (const one of instances) {
    if (isEntry(one)) edges.push(["", one.name, "requests"]);
    for (const other of instances) {
      if (one === other) continue;
      if (one.role.includes("E") && other.role.includes("P") && !other.role.includes("E")) edges.push([one.name, other.name, "features"]);
      if (one.role.includes("P") && !one.role.includes("D") && other.role.includes("D")) edges.push([one.name, other.name, "KV"]);
    }
  }
  return edges;
}
