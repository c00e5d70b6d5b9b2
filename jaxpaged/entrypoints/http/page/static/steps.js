// The newest steps, a bar each: upwards its tokens and the padding up to its bucket, downwards the time it took.

import { colors, canvasOf, onNewColors } from "./colors.js";
import { $, counted, make, milliseconds, whole } from "./dom.js";
import { hideTip, showTip } from "./tip.js";

const HEIGHT = 168, TOP = 8, LEFT = 46;
const SHARE_UP = 0.62;
const BAR = 6;
const FIELDS = ["number", "tokens", "bucket", "padding", "requests", "sampled", "steps", "device", "host", "compile", "encoded", "encode"];

export class Steps {
  constructor() {
    this.canvas = $("steps");
    this.steps = [];
    this.cursor = null; // the number of a step
    new ResizeObserver(() => requestAnimationFrame(() => this.#draw())).observe(this.canvas.parentElement);
    onNewColors(() => this.#draw());
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerleave", () => this.#leave());
    this.canvas.addEventListener("blur", () => this.#leave());
    this.canvas.addEventListener("focus", () => this.canvas.matches(":focus-visible") && this.#move(this.steps.length - 1));
    this.canvas.addEventListener("keydown", (event) => this.#onKey(event));
  }

  show(state) {
    this.all = state.steps.map((row) => Object.fromEntries(FIELDS.map((name, place) => [name, row[place]])));
    this.buckets = state.executor.token_buckets ?? [];
    this.#draw();
    if (document.activeElement !== this.canvas) this.canvas.setAttribute("aria-valuetext", $("steps-caption").textContent);
  }

  #draw() {
    if (!this.all) return;
    const { context, width, height } = canvasOf(this.canvas, HEIGHT);
    const places = Math.max(Math.floor((width - LEFT) / BAR), 1);
    this.steps = this.all.slice(-places);
    this.places = places;
    this.#caption();
    const zero = Math.round(TOP + (height - TOP) * SHARE_UP) + 0.5, up = zero - TOP - 6, down = height - zero - 6;
    const most = Math.max(8, ...this.steps.map((step) => step.bucket));
    const scaleUp = (tokens) => (Math.log2(1 + tokens) / Math.log2(1 + most)) * up;
    const longest = longTime(this.steps.map(timeOf));
    this.#grid(context, width, zero, scaleUp, most, longest, down);
    const first = width - this.steps.length * BAR;
    this.first = first;
    this.steps.forEach((step, place) => {
      const x = first + place * BAR + 1, w = BAR - 2;
      const each = step.tokens / Math.max(step.steps, 1);
      const tokens = Math.max(scaleUp(each), 1), bucket = scaleUp(step.bucket);
      context.strokeStyle = colors().decode;
      context.lineWidth = 1;
      if (bucket - tokens > 1) context.strokeRect(x + 0.5, zero - bucket + 0.5, w - 1, bucket - tokens);
      context.fillStyle = step.tokens > step.sampled ? colors().accent : colors().decode;
      context.fillRect(x, zero - tokens, w, tokens);
      const time = Math.min(timeOf(step) / longest, 1) * down;
      const wait = Math.min(step.compile / longest, 1) * down;
      context.fillStyle = colors().dim;
      context.globalAlpha = 0.55;
      context.fillRect(x, zero + 2, w, Math.max(time - wait, 1));
      context.globalAlpha = 1;
      if (step.encoded) {
        context.fillStyle = colors().ink;
        context.fillRect(x, zero + 2, w, Math.max(Math.min((step.encode / longest) * down, time - wait), 1.5));
      }
      if (wait > 0) {
        context.fillStyle = colors().warn;
        context.fillRect(x, zero + 2 + Math.max(time - wait, 0), w, Math.max(wait, 1.5));
      }
      if (step.number === this.cursor) {
        context.strokeStyle = colors().ink;
        context.lineWidth = 1.5;
        context.strokeRect(x - 1.5, TOP, w + 3, height - TOP - 2);
      }
    });
  }

  #grid(context, width, zero, scaleUp, most, longest, down) {
    context.font = '10.5px "JetBrains Mono", ui-monospace, monospace';
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.lineWidth = 1;
    context.strokeStyle = colors().line;
    const known = this.buckets.filter((bucket) => bucket <= most);
    let lowest = Infinity;
    for (const size of (known.length ? known : [8, 32, 128, 512, 2048].filter((each) => each <= most)).toReversed()) {
      const y = Math.round(zero - scaleUp(size)) + 0.5;
      if (lowest - y < 16 && lowest !== Infinity && y - lowest < 16) continue;
      if (zero - y < 12) continue;
      lowest = y;
      line(context, LEFT, width, y);
      context.fillStyle = colors().dim;
      context.fillText(whole(size), LEFT - 7, y);
    }
    context.strokeStyle = colors().dim;
    line(context, LEFT, width, zero);
    context.fillStyle = colors().dim;
    if (this.steps.length) context.fillText(shortTime(longest), LEFT - 7, zero + down - 2);
  }

  #caption() {
    const { steps } = this;
    if (!steps.length) {
      $("steps-caption").textContent = "none yet";
      return;
    }
    const tokens = steps.reduce((sum, step) => sum + step.tokens, 0), padding = steps.reduce((sum, step) => sum + step.padding, 0);
    const waits = steps.filter((step) => step.compile > 0).length;
    $("steps-caption").textContent = `the newest ${steps.length} · ${Math.round((100 * padding) / Math.max(tokens + padding, 1))}% padding`
      + (waits ? ` · ${waits} waited for a program` : "");
  }

  #point(event) {
    const place = Math.floor((event.offsetX - (this.first ?? 0)) / BAR);
    if (place >= 0 && place < this.steps.length) this.#move(place);
    else this.#leave();
  }

  #move(place) {
    const step = this.steps[Math.min(Math.max(place, 0), this.steps.length - 1)];
    if (!step) return;
    this.cursor = step.number;
    this.#draw();
    const where = () => {
      const box = this.canvas.getBoundingClientRect();
      return new DOMRect(box.left + this.first + this.steps.indexOf(step) * BAR, box.top + TOP, BAR, HEIGHT - TOP);
    };
    const rows = rowsOf(step);
    this.canvas.setAttribute("aria-valuenow", this.steps.indexOf(step));
    this.canvas.setAttribute("aria-valuemax", this.steps.length - 1);
    this.canvas.setAttribute("aria-valuetext", rows.map(([name, value]) => `${name} ${value}`).join(", "));
    const list = make("dl", {}, ...rows.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
    showTip(this.canvas, where, list);
  }

  #leave() {
    this.cursor = null;
    hideTip(this.canvas);
    this.#draw();
  }

  #onKey(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowUp: 10, ArrowDown: -10, Home: -Infinity, End: Infinity };
    if (!(event.key in steps)) return;
    event.preventDefault();
    const place = this.steps.findIndex((step) => step.number === this.cursor);
    this.#move((place < 0 ? this.steps.length - 1 : place) + steps[event.key]);
  }
}

function rowsOf(step) {
  const rows = [["step", whole(step.number + 1)], ["tokens", whole(step.tokens)], ["bucket", whole(step.bucket)], ["padding", whole(step.padding)], ["requests", whole(step.requests)]];
  if (step.steps > 1) rows.push(["decode steps in one", whole(step.steps)]);
  if (step.encoded) rows.push(["embeddings of pictures", whole(step.encoded)], ["their encoding", `≤ ${milliseconds(step.encode)}`]);
  rows.push(["device", `≤ ${milliseconds(step.device)}`], ["host", milliseconds(step.host)]);
  if (step.compile > 0) rows.push(["waited for a program", milliseconds(step.compile)]);
  return rows;
}

const timeOf = (step) => step.device + step.compile;

/** The end of the scale: nearly the longest, so that one outlier does not flatten the others. */
function longTime(times) {
  const sorted = times.toSorted((a, b) => a - b);
  return Math.max(sorted[Math.floor(0.97 * (sorted.length - 1))] ?? 1, 0.01) * 1.15;
}

const shortTime = (value) => (value >= 1000 ? `${(value / 1000).toFixed(1)}s` : value >= 10 ? `${Math.round(value)}ms` : `${value.toFixed(1)}ms`);

function line(context, from, to, y) {
  context.beginPath();
  context.moveTo(from, y);
  context.lineTo(to, y);
  context.stroke();
}
