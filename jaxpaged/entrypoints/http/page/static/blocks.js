// The KV cache as a field of blocks. What a block is can be told without colours, too: a free one is a dot, a cached one a
// frame, one that is held is filled, in the colour of its request or, where several share it, in that of ink. Hatched are
// those with tokens of a picture.

import { colors, colorOf, canvasOf, isCalm, onNewColors } from "./colors.js";
import { $, counted, make, percent, whole } from "./dom.js";
import { ownPicture } from "./own_pictures.js";
import { drawing } from "./pictures.js";
import { hideTip, showTip } from "./tip.js";

const FREE = -1, CACHED = -2, SHARED = -3;
const NAMES = { [FREE]: "free", [CACHED]: "cached, can be reused", [SHARED]: "shared by several requests" };
const FADE = 350;
const MOST_HEIGHT = 216;
const LARGEST = 18, SMALLEST = 4;

export class BlockMap {
  constructor() {
    this.canvas = $("blocks");
    this.kinds = [];
    this.before = [];
    this.owners = [];
    this.pictures = [];
    this.mine = new Set();
    this.cursor = null;
    new ResizeObserver(() => requestAnimationFrame(() => this.#draw(1))).observe(this.canvas.parentElement);
    onNewColors(() => {
      this.#draw(1);
      this.#legend();
    });
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerleave", () => this.#leave());
    this.canvas.addEventListener("blur", () => this.#leave());
    this.canvas.addEventListener("focus", () => this.canvas.matches(":focus-visible") && this.#move(this.cursor ?? 0));
    this.canvas.addEventListener("keydown", (event) => this.#onKey(event));
  }

  show(state) {
    const { blocks } = state;
    if (!blocks) return;
    this.blocks = blocks;
    this.owners = blocks.owners;
    this.mine = new Set(state.mine);
    const ofEach = (runs) => runs.flatMap(([value, length]) => Array(length).fill(value));
    const kinds = ofEach(blocks.runs);
    this.pictures = ofEach(blocks.picture_runs).map((place) => blocks.pictures[place]); // their labels
    // What is drawn is a name of the owner and not its place, which changes from one state to the next.
    this.before = this.names;
    this.kinds = kinds;
    this.names = kinds.map((kind) => (kind >= 0 ? this.owners[kind] : kind));
    const unseen = Math.max(blocks.count - kinds.length * blocks.stride, 0);
    $("blocks-caption").textContent = [
      `${percent(state.kv_usage)} of ${counted(blocks.count, "block")} of ${blocks.size} tokens in use`,
      blocks.stride > 1 && `one of ${blocks.stride} drawn`,
      unseen && `${whole(unseen)} never used`,
    ].filter(Boolean).join(" · ");
    this.canvas.setAttribute("aria-valuemax", Math.max(kinds.length - 1, 0));
    if (document.activeElement !== this.canvas) this.canvas.setAttribute("aria-valuetext", this.summary());
    this.#legend();
    this.#fade();
  }

  /** The whole map in words. */
  summary() {
    return this.#counts().map(({ name, count }) => `${name}: ${counted(count, "block")}`).join("; ");
  }

  #counts() {
    const counts = new Map();
    for (const name of this.names ?? []) counts.set(name, (counts.get(name) ?? 0) + 1);
    const each = this.blocks?.stride ?? 1;
    const held = [...counts].filter(([name]) => typeof name === "string");
    const sum = (entries) => entries.reduce((total, [, count]) => total + count, 0) * each;
    const own = held.filter(([label]) => this.mine.has(label)), others = held.filter(([label]) => !this.mine.has(label));
    const entries = [];
    if (own.length) entries.push({ name: "yours", count: sum(own), keys: [filled("var(--accent)")] });
    if (others.length) {
      const keys = others.slice(0, 5).map(([label]) => filled(colorOf(label)));
      entries.push({ name: counted(others.length, own.length ? "other request" : "request"), count: sum(others), keys });
    }
    for (const [kind, name] of [[SHARED, "shared"], [CACHED, "cached"], [FREE, "free"]]) {
      entries.push({ name, count: (counts.get(kind) ?? 0) * each, keys: [make("i", { class: `key ${name}` })] });
    }
    const free = entries.at(-1), drawn = (this.names?.length ?? 0) * each;
    free.count += (this.blocks?.count ?? 0) - drawn; // also those behind the end of the map
    const seen = this.pictures.filter(Boolean).length;
    if (seen) entries.push({ name: "with a picture", count: seen * each, keys: [make("i", { class: "key hatched" })] });
    return entries;
  }

  #legend() {
    const items = this.#counts().map(({ name, count, keys }) => make("li", {}, make("span", { class: "keys" }, ...keys), `${name} `, make("b", {}, whole(count))));
    $("legend").replaceChildren(...items);
  }

  #layout() {
    const count = Math.max(this.kinds.length, 1);
    const width = this.canvas.clientWidth;
    let size = LARGEST;
    while (size > SMALLEST && Math.ceil(count / Math.floor((width + 1) / size)) * size > MOST_HEIGHT) size -= 1;
    const columns = Math.max(Math.floor((width + 1) / size), 1), gap = size >= 9 ? 2 : 1;
    // Small cells stand better side by side than spread over the whole width.
    return { size: size >= 9 ? (width + gap) / columns : size, columns, rows: Math.ceil(count / columns), gap };
  }

  #fade() {
    cancelAnimationFrame(this.frame);
    const changed = this.before?.length === this.names.length && this.before.some((name, place) => name !== this.names[place]);
    if (!changed || isCalm()) {
      this.#draw(1);
      return;
    }
    const begin = performance.now();
    const next = (now) => {
      const share = Math.min((now - begin) / FADE, 1);
      this.#draw(share * (2 - share));
      if (share < 1) this.frame = requestAnimationFrame(next);
    };
    this.frame = requestAnimationFrame(next);
  }

  #color(name) {
    if (typeof name === "string") return this.mine.has(name) ? colors().accent : (this.hues[name] ??= colorOf(name));
    return { [FREE]: colors().slot, [CACHED]: colors().kept, [SHARED]: colors().shared }[name];
  }

  /** `share`: how far the colours are from those before to those now. */
  #draw(share) {
    if (!this.names) return;
    this.hues = {};
    const { size, columns, rows, gap } = this.#layout();
    const { context } = canvasOf(this.canvas, rows * size);
    const side = Math.floor(size) - gap, radius = size >= 9 ? Math.min(3, side / 4) : 0;
    const dot = Math.max(Math.round(side / 3), 1), frame = Math.max(Math.round(side / 5), 1);
    const square = (x, y, width) => (radius ? context.roundRect(x, y, width, width, radius * (width / side)) : context.rect(x, y, width, width));
    const paint = (places, name) => {
      context.fillStyle = this.#color(name);
      context.beginPath();
      for (const place of places) {
        const x = Math.round((place % columns) * size), y = Math.round(Math.floor(place / columns) * size);
        if (name === FREE) square(x + Math.floor((side - dot) / 2), y + Math.floor((side - dot) / 2), dot);
        else square(x, y, side);
        if (name === CACHED) square(x + frame, y + frame, side - 2 * frame);
      }
      context.fill("evenodd");
    };
    const layer = (names, alpha, filter) => {
      const byName = new Map();
      names.forEach((name, place) => filter(place) && (byName.get(name) ?? byName.set(name, []).get(name)).push(place));
      context.globalAlpha = alpha;
      for (const [name, places] of byName) paint(places, name);
      context.globalAlpha = 1;
    };
    const isChanged = (place) => share < 1 && this.names[place] !== this.before[place];
    layer(this.names, 1, (place) => !isChanged(place));
    if (share < 1) {
      layer(this.before, 1 - share, isChanged);
      layer(this.names, share, isChanged);
    }
    this.#hatch(context, side, (place) => [Math.round((place % columns) * size), Math.round(Math.floor(place / columns) * size)]);
    if (this.cursor !== null && this.cursor < this.names.length) {
      context.strokeStyle = colors().ink;
      context.lineWidth = 1.5;
      context.strokeRect((this.cursor % columns) * size - 0.75, Math.floor(this.cursor / columns) * size - 0.75, side + 1.5, side + 1.5);
    }
  }

  /** Stripes on cells with a picture. `cornerOf` gives the upper left one of a cell. */
  #hatch(context, side, cornerOf) {
    const cells = [...this.pictures.keys()].filter((place) => this.pictures[place]).map(cornerOf);
    if (!cells.length) return;
    context.save();
    context.beginPath();
    for (const [x, y] of cells) context.rect(x, y, side, side);
    context.clip();
    context.beginPath();
    const gap = Math.max(side / 3, 2);
    for (const [x, y] of cells) {
      for (let shift = gap / 2 - side; shift < side; shift += gap) {
        context.moveTo(x + shift, y + side);
        context.lineTo(x + shift + side, y);
      }
    }
    context.strokeStyle = colors().paper;
    context.lineWidth = Math.max(side / 10, 1);
    context.stroke();
    context.restore();
  }

  #words(place) {
    const stride = this.blocks.stride, first = 1 + place * stride;
    const which = stride > 1 ? `Blocks ${whole(first)} to ${whole(Math.min(first + stride - 1, this.blocks.count))}` : `Block ${whole(first)}`;
    const kind = this.kinds[place];
    const label = this.owners[kind], picture = this.pictures[place];
    const holder = kind < 0 ? NAMES[kind] : this.mine.has(label) ? "held by your request" : `held by request ${label}`;
    return [which, picture ? `${holder}, with tokens of ${ownPicture(picture)?.name ?? `picture ${picture}`}` : holder];
  }

  #point(event) {
    const { size, columns } = this.#layout();
    const column = Math.floor(event.offsetX / size);
    const place = Math.floor(event.offsetY / size) * columns + column;
    if (column < columns && place >= 0 && place < this.kinds.length) this.#move(place);
    else this.#leave();
  }

  #move(place) {
    if (!this.kinds.length) return;
    this.cursor = Math.min(Math.max(place, 0), this.kinds.length - 1);
    const { cursor } = this;
    const where = () => {
      const { size, columns } = this.#layout(), box = this.canvas.getBoundingClientRect();
      return new DOMRect(box.left + (cursor % columns) * size, box.top + Math.floor(cursor / columns) * size, size, size);
    };
    const words = this.#words(this.cursor);
    this.canvas.setAttribute("aria-valuenow", this.cursor);
    this.canvas.setAttribute("aria-valuetext", words.join(": "));
    const picture = ownPicture(this.pictures[cursor]);
    showTip(this.canvas, where, make("p", { class: "what" }, words[0]), make("p", { class: "quiet" }, words[1]), picture && drawing(picture));
    this.#draw(1);
  }

  #leave() {
    this.cursor = null;
    hideTip(this.canvas);
    this.#draw(1);
  }

  #onKey(event) {
    const { columns } = this.#layout();
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, Home: -Infinity, End: Infinity };
    if (!(event.key in steps)) return;
    event.preventDefault();
    this.#move(Math.min(Math.max((this.cursor ?? 0) + steps[event.key], 0), this.kinds.length - 1));
  }
}

function filled(color) {
  const key = make("i", { class: "key" });
  key.style.background = color;
  return key;
}
