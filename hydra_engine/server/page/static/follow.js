// Keeps the end of what grows in view, until one scrolls up, and again from when the end is reached.

const NEAR = 24; // pixels from the end that are the end

export class Follower {
  #area;
  #button;
  #following = true;
  #top = 0;
  #height = 0;

  constructor(area, button) {
    this.#area = area;
    this.#button = button;
    area.addEventListener("scroll", () => this.#look(), { passive: true });
    // The wheel says it before the area has moved.
    area.addEventListener("wheel", (event) => { if (event.deltaY < 0 && area.scrollTop > 0) this.#set(false); }, { passive: true });
    button.addEventListener("click", () => this.toEnd());
    new ResizeObserver(() => this.follow()).observe(area);
  }

  /** The content has grown. */
  follow() {
    if (this.#following) this.#area.scrollTop = this.#area.scrollHeight;
    this.#look();
  }

  toEnd() {
    this.#set(true);
    this.follow();
  }

  #look() {
    const { scrollTop, scrollHeight, clientHeight } = this.#area;
    const shrunk = scrollHeight < this.#height;
    if (scrollTop < this.#top - 1 && !shrunk) this.#set(false);
    else if (scrollTop > this.#top && scrollHeight - scrollTop - clientHeight < NEAR) this.#set(true);
    this.#top = scrollTop;
    this.#height = scrollHeight;
    this.#button.hidden = this.#following || scrollHeight - scrollTop - clientHeight < 4 * NEAR;
  }

  #set(following) {
    this.#following = following;
  }
}
