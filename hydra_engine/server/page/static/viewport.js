// Which seconds a timeline shows: the last ones, which slide, or some that a wheel, a drag or keys have chosen.

const MIN_S = 0.005, MAX_S = 300;
const PER_PIXEL = 0.0022; // of the logarithm of the length, for the wheel
const DRAG_PX = 4; // less is a click

export class Viewport {
  seconds = 30;
  #end = null; // null: now
  #now = 0;
  #onChange;

  /** `onChange()` after every change that is not time going on. */
  constructor(onChange) {
    this.#onChange = onChange;
  }

  set now(time_s) {
    this.#now = time_s;
  }

  get live() {
    return this.#end === null;
  }

  get end() {
    return this.#end ?? this.#now;
  }

  get from() {
    return this.end - this.seconds;
  }

  /** Goes on with the latest `seconds`. */
  follow(seconds = this.seconds) {
    this.seconds = seconds;
    this.#end = null;
    this.#onChange();
  }

  hold() {
    this.#end = this.end;
    this.#onChange();
  }

  /** Shows `factor` times as many seconds; what is at `share` of the width stays there. */
  zoom(factor, share) {
    const seconds = Math.min(Math.max(this.seconds * factor, MIN_S), MAX_S);
    const at = this.from + share * this.seconds;
    const end = at + (1 - share) * seconds;
    this.#end = this.live && share > 0.98 ? null : end;
    this.seconds = seconds;
    this.#onChange();
  }

  pan(seconds) {
    this.#end = Math.min(this.end + seconds, this.#now + 0.5 * this.seconds);
    this.#onChange();
  }

  /** Listens on `area`; `track()` gives the box in which the seconds are drawn. */
  attach(area, track) {
    const shareAt = (x) => {
      const { left, width } = track();
      return Math.min(Math.max((x - left) / Math.max(width, 1), 0), 1);
    };
    area.addEventListener("wheel", (event) => {
      if (event.clientX < track().left || event.shiftKey) return; // over names it scrolls
      event.preventDefault();
      const unit = event.deltaMode === 1 ? 20 : 1;
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan((event.deltaX * unit * this.seconds) / track().width);
      else this.zoom(Math.exp(event.deltaY * unit * PER_PIXEL), shareAt(event.clientX));
    }, { passive: false });
    let grip = null; // {x, end, moved}
    area.addEventListener("pointerdown", (event) => {
      if (event.button || event.pointerType === "touch" || event.clientX < track().left) return;
      grip = { x: event.clientX, end: this.end, moved: false };
    });
    area.addEventListener("pointermove", (event) => {
      if (!grip) return;
      const distance = event.clientX - grip.x;
      if (!grip.moved && Math.abs(distance) < DRAG_PX) return;
      if (!grip.moved) area.setPointerCapture(event.pointerId);
      grip.moved = true;
      this.#end = grip.end;
      this.pan((-distance * this.seconds) / track().width);
    });
    const drop = () => { setTimeout(() => { grip = null; }); };
    area.addEventListener("pointerup", drop);
    area.addEventListener("pointercancel", drop);
    area.addEventListener("click", (event) => { if (grip?.moved) event.stopPropagation(); }, true);
    area.addEventListener("dblclick", () => this.follow());
    area.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: -0.2, ArrowRight: 0.2 };
      const zooms = { "+": 0.6, "=": 0.6, "-": 1 / 0.6 };
      if (event.key in moves) this.pan(moves[event.key] * this.seconds);
      else if (event.key in zooms && !event.ctrlKey && !event.metaKey) this.zoom(zooms[event.key], this.live ? 1 : 0.5);
      else return;
      event.preventDefault();
    });
  }
}
