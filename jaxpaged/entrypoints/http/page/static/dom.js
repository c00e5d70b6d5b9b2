// Elements and numbers. Text from outside becomes text nodes only.

export const $ = (id) => document.getElementById(id);

/** An element: attributes by name, `on...` functions as listeners, children as nodes or text. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** The chosen value of a group of radio buttons. */
export const chosen = (name) => document.querySelector(`input[name="${name}"]:checked`).value;

const plain = new Intl.NumberFormat("en");

export const whole = (value) => plain.format(Math.round(value));

/** A count in a few characters: 950, 9.5k, 12M. */
export function short(value) {
  for (const [size, letter] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (value >= size) return digits(value / (letter === "k" ? 1e3 : size)) + letter;
  }
  return whole(value);
}

/** Two or three digits that mean something. */
export const digits = (value) => (value >= 100 || Number.isInteger(value) ? whole(value) : value.toFixed(value >= 10 ? 1 : 2));

export function milliseconds(value) {
  if (value >= 10_000) return `${digits(value / 1000)} s`;
  return `${value >= 100 ? whole(value) : value.toFixed(value >= 10 ? 1 : 2)} ms`;
}

export const seconds = (value) => (value < 1 ? milliseconds(value * 1000) : `${value.toFixed(value < 10 ? 1 : 0)} s`);

export function bytes(value) {
  for (const [size, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (value >= size) return `${digits(value / size)} ${unit}`;
  }
  return `${value} bytes`;
}

export const counted = (number, noun) => `${whole(number)} ${noun}${number === 1 ? "" : "s"}`;

export const percent = (share) => `${share > 0 && share < 0.01 ? "<1" : Math.round(share * 100)}%`;
