// How fast an answer came: by when its tokens arrived. Tokens that arrive together tell no speed.

const FEWEST_ARRIVALS = 4; // after the first one
const SHORTEST = 50; // milliseconds between the first arrival and the last

export class Speed {
  constructor() {
    this.first = null; // when the first tokens arrived, in milliseconds
    this.last = null;
    this.arrivals = 0; // later ones, and their tokens:
    this.tokens = 0;
  }

  /** `count` tokens arrived together at `time`, in milliseconds. */
  took(count, time) {
    if (count === 0) return;
    if (this.first === null) {
      this.first = time;
    } else {
      this.arrivals += 1;
      this.tokens += count;
    }
    this.last = time;
  }

  /** Tokens a second after the first arrival; null where too few arrived one after the other. */
  get rate() {
    const time = this.last - this.first;
    return this.arrivals >= FEWEST_ARRIVALS && time >= SHORTEST ? (this.tokens / time) * 1000 : null;
  }
}
