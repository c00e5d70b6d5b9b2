// The engine in numbers: each with its last two minutes as a line.

import { colors, canvasOf, onNewColors } from "./colors.js";
import { $, make, milliseconds, percent, short, whole } from "./dom.js";

const SPAN = 120; // seconds that a line shows
const WINDOW = 5; // seconds over which rates are taken
const HEIGHT = 26;

const FIGURES = [
  { name: "generated", label: "Generated", unit: "tokens/s", value: (now, then, span) => (now.counts.generation_tokens - then.counts.generation_tokens) / span, text: short },
  { name: "prompts", label: "Prompts", unit: "tokens/s", value: (now, then, span) => (now.counts.prompt_tokens - then.counts.prompt_tokens) / span, text: short },
  { name: "first", label: "First token", unit: "ms", value: (now, then) => mean(now, then, "first_token"), text: bare },
  { name: "next", label: "Between tokens", unit: "ms", value: (now, then) => mean(now, then, "next_token"), text: bare },
  { name: "running", label: "Running", unit: "requests", value: (now) => now.running, text: whole, now: true },
  { name: "waiting", label: "Waiting", unit: "requests", value: (now) => now.waiting, text: whole, now: true },
  { name: "cache", label: "KV cache", unit: "in use", value: (now) => now.kv_usage, text: percent, now: true, top: 1 },
  { name: "hits", label: "Prefix hits", unit: "of tokens", value: hits, text: percent, top: 1 },
];

export class Figures {
  constructor() {
    this.states = [];
    this.lines = {};
    for (const figure of FIGURES) {
      const canvas = make("canvas", { class: "spark", "aria-hidden": "true" });
      const value = make("b", {}, "–"), unit = make("small", {}, figure.unit);
      this.lines[figure.name] = { canvas, value, unit, points: [] };
      $("figures").append(make("div", {}, make("dt", {}, figure.label), make("dd", {}, value, " ", unit), canvas));
    }
    new ResizeObserver(() => requestAnimationFrame(() => this.#draw())).observe($("figures"));
    onNewColors(() => this.#draw());
  }

  show(state) {
    const last = this.states.at(-1);
    if (last && (state.time < last.time || state.counts.generation_tokens < last.counts.generation_tokens || state.restarts !== last.restarts)) this.states = []; // another engine
    if (last && state.time === last.time) return;
    this.states.push(state);
    this.states = this.states.filter((each) => each.time > state.time - SPAN - WINDOW);
    const then = this.states.findLast((each) => each.time <= state.time - WINDOW) ?? this.states[0];
    const span = state.time - then.time;
    for (const figure of FIGURES) {
      const line = this.lines[figure.name];
      const value = span > 0 || figure.now ? figure.value(state, then, span) : null;
      if (value !== null) line.points.push({ time: state.time, value });
      line.points = line.points.filter((point) => point.time > state.time - SPAN);
      line.value.textContent = value === null ? "–" : figure.text(value);
    }
    this.#draw();
  }

  #draw() {
    const now = this.states.at(-1)?.time;
    if (now === undefined) return;
    for (const figure of FIGURES) {
      const { canvas, points } = this.lines[figure.name];
      const { context, width, height } = canvasOf(canvas, HEIGHT);
      const top = figure.top ?? Math.max(...points.map((point) => point.value), 1e-9);
      const x = (point) => width - 3 - ((now - point.time) / SPAN) * (width - 3);
      const y = (point) => height - 3 - (point.value / top) * (height - 7);
      context.strokeStyle = colors().line;
      context.beginPath();
      context.moveTo(0, height - 2.5);
      context.lineTo(width, height - 2.5);
      context.stroke();
      if (!points.length) continue;
      context.strokeStyle = context.fillStyle = figure.name === "generated" ? colors().accent : colors().data;
      context.lineWidth = 1.5;
      context.lineJoin = "round";
      context.beginPath();
      points.forEach((point, place) => (place ? context.lineTo(x(point), y(point)) : context.moveTo(x(point), y(point))));
      context.stroke();
      context.lineTo(x(points.at(-1)), height - 3);
      context.lineTo(x(points[0]), height - 3);
      context.globalAlpha = 0.1;
      context.fill();
      context.globalAlpha = 1;
      context.beginPath();
      context.arc(x(points.at(-1)), y(points.at(-1)), 2, 0, 7);
      context.fill();
    }
  }
}

/** Milliseconds on average since `then`; null when there was none. */
function mean(now, then, name) {
  const count = now.times[name][0] - then.times[name][0];
  return count > 0 ? ((now.times[name][1] - then.times[name][1]) / count) * 1000 : null;
}

function hits(now, then) {
  const queries = now.counts.prefix_cache_queries - then.counts.prefix_cache_queries;
  return queries > 0 ? (now.counts.prefix_cache_hits - then.counts.prefix_cache_hits) / queries : null;
}

function bare(value) {
  return milliseconds(value).replace(/ (ms|s)$/, (unit) => (unit === " s" ? " s" : ""));
}
