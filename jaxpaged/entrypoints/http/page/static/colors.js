// Colours of drawings: those of the page's styles, and one for every request.

const names = ["paper", "ink", "dim", "line", "accent", "slot", "kept", "shared", "data", "decode", "warn", "request-light", "request-chroma"];
let palette = null;

/** The styles' colours by name. */
export function colors() {
  if (!palette) {
    const style = getComputedStyle(document.documentElement);
    palette = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  }
  return palette;
}

const GOLDEN = 0.618034;
const MOST_LABELS = 2000;
const places = new Map();

/** A label's own colour. Those that come one after the other differ most; none is the accent's, which is for one's own
 * requests. */
export function colorOf(label) {
  if (!places.has(label)) {
    if (places.size > MOST_LABELS) places.clear();
    places.set(label, places.size);
  }
  const hue = 85 + ((places.get(label) * GOLDEN) % 1) * 290;
  return `oklch(${colors()["request-light"]} ${colors()["request-chroma"]} ${hue})`;
}

const listeners = [];

export const onNewColors = (listener) => listeners.push(listener);

export function forgetColors() {
  palette = null;
  for (const listener of listeners) listener();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", forgetColors);

/** A canvas as large as its place, in the screen's own pixels. Returns its context, and width and height in CSS pixels. */
export function canvasOf(element, height) {
  const width = element.clientWidth || element.parentElement.clientWidth;
  const scale = devicePixelRatio || 1;
  if (element.width !== Math.round(width * scale) || element.height !== Math.round(height * scale)) {
    element.width = Math.round(width * scale);
    element.height = Math.round(height * scale);
    element.style.height = `${height}px`;
  }
  const context = element.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

export const isCalm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
