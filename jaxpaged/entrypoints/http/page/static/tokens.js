// Tokens of a text, one by one: their bounds, how likely each was, and what else was likely there.
//
// One stop for the Tab key; arrows go from token to token.

import { make } from "./dom.js";
import { hideTip, showTip } from "./tip.js";

const STEPS = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 8, ArrowUp: -8 };

const SPECIAL = /^<[^<>\s]{2,}>$/; // such as what ends a turn
/** What is seen of characters that cannot be. */
export const visible = (text) => text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t");
const named = (text) => (text === "" ? "(nothing)" : text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣"));

export class TokenStrip {
  /** `label` is what a screen reader calls it. */
  constructor(label) {
    this.element = make("div", { class: "strip", role: "group", "aria-label": `${label}. Arrow keys go from token to token.` });
    this.tokens = new Map();
    this.element.addEventListener("keydown", (event) => this.#onKey(event));
    this.element.addEventListener("focusin", (event) => this.#show(event.target));
    this.element.addEventListener("focusout", () => hideTip(this.element));
    this.element.addEventListener("pointerover", (event) => this.#show(event.target));
    this.element.addEventListener("pointerleave", () => hideTip(this.element));
  }

  /** `token`: text, and what is known of it: logprob, top (of text and logprob), cached, id. */
  add(token) {
    const last = this.element.lastElementChild;
    const element = make("span", { class: "token", tabindex: last ? -1 : 0, role: "img" }, visible(token.text));
    element.classList.toggle("odd", this.tokens.size % 2 === 1);
    element.classList.toggle("cached", token.cached === true);
    element.classList.toggle("special", SPECIAL.test(token.text));
    const words = [named(token.text)];
    if (token.logprob !== undefined) {
      element.style.setProperty("--doubt", (1 - Math.exp(token.logprob)).toFixed(3));
      words.push(chance(token.logprob));
      const others = (token.top ?? []).filter((each) => each.text !== token.text).slice(0, 3);
      if (others.length) words.push("others: " + others.map((each) => `${named(each.text)} ${chance(each.logprob)}`).join(", "));
    }
    if (token.cached) words.push("from the prefix cache");
    if (token.id !== undefined) words.push(`id ${token.id}`);
    element.setAttribute("aria-label", words.join(", "));
    this.tokens.set(element, token);
    this.element.append(element);
  }

  #onKey(event) {
    const places = [...this.tokens.keys()];
    let place = places.indexOf(event.target);
    if (place < 0) return;
    if (event.key in STEPS) place += STEPS[event.key];
    else if (event.key === "Home") place = 0;
    else if (event.key === "End") place = places.length - 1;
    else return;
    event.preventDefault();
    const next = places[Math.min(Math.max(place, 0), places.length - 1)];
    for (const each of this.element.querySelectorAll('[tabindex="0"]')) each.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  #show(element) {
    const token = this.tokens.get(element);
    if (!token) return;
    const rows = [make("p", { class: "what" }, named(token.text))];
    if (token.logprob !== undefined) rows.push(alternatives(token));
    const facts = [token.cached && "from the prefix cache", token.id !== undefined && `token ${token.id}`].filter(Boolean);
    if (facts.length) rows.push(make("p", { class: "quiet" }, facts.join(" · ")));
    showTip(this.element, () => element.getClientRects()[0] ?? element.getBoundingClientRect(), ...rows);
  }
}

/** A table of what was likely in a token's place, with the token itself in it. */
function alternatives(token) {
  const top = [...(token.top ?? [])];
  if (!top.some((each) => each.text === token.text)) top.push(token);
  top.sort((a, b) => b.logprob - a.logprob);
  const table = make("div", { class: "chances" });
  for (const each of top) {
    const share = Math.exp(each.logprob);
    const bar = make("i", { class: "share" });
    bar.style.setProperty("--share", share.toFixed(3));
    const taken = each.text === token.text;
    table.append(make("div", { class: taken ? "taken" : "" }, make("span", {}, named(each.text)), bar, make("b", {}, chance(each.logprob))));
  }
  return table;
}

function chance(logprob) {
  const share = Math.exp(logprob) * 100;
  if (share >= 99.95) return "100%";
  return share >= 0.1 ? `${share.toFixed(1)}%` : "<0.1%";
}

/** Tokens as the vocabulary has them, as text: byte-level vocabularies write bytes as other characters. `whole`: the text
 * that they make, where it is known. */
export function pieceText(pieces, whole) {
  const plain = pieces.map(plainText);
  const isPlain = whole === undefined ? !pieces.some((piece) => /[ĠĊ]/.test(piece)) : plain.join("") === whole;
  if (isPlain) return plain;
  const bytes = byteAlphabet(), decoder = new TextDecoder();
  const isBytes = (piece) => [...piece].every((each) => bytes.has(each));
  return pieces.map((piece, place) => (isBytes(piece) ? decoder.decode(new Uint8Array([...piece].map((each) => bytes.get(each)))) : plain[place]));
}

function plainText(piece) {
  const byte = /^<0x([0-9A-F]{2})>$/.exec(piece);
  return byte ? new TextDecoder().decode(new Uint8Array([parseInt(byte[1], 16)])) : piece.replaceAll("▁", " ");
}

/** GPT-2's characters for bytes: printable ones for themselves, the others from 256 on. */
function byteAlphabet() {
  const bytes = new Map();
  let next = 256;
  for (let byte = 0; byte < 256; byte++) {
    const own = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
    bytes.set(String.fromCharCode(own ? byte : next++), byte);
  }
  return bytes;
}
