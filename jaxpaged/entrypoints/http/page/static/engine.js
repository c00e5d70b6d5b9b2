// The engine while it works: asked again and again while somebody looks, and shown.

import { ApiError, ask, mine } from "./api.js";
import { BlockMap } from "./blocks.js";
import { colorOf } from "./colors.js";
import { $, bytes, counted, make, seconds, whole } from "./dom.js";
import { showEncoder } from "./encoder.js";
import { Figures } from "./figures.js";
import { learnPictures } from "./own_pictures.js";
import { Steps } from "./steps.js";

const MOST_REQUESTS = 6;
const SLOWLY = 5; // seconds between two questions while the engine is not in sight
const RETRY = 2;
const LONG_SILENCE = 4;
const MINE_AT_ONCE = 16;
/** What the kinds of programs do, the most important ones first. */
const PROGRAMS = {
  forward: "runs the model", encode: "makes embeddings of pictures", sample: "draws tokens", decode: "several steps at once", draft: "guesses tokens", verify: "checks guesses",
  pool: "vectors and scores", accumulate: "vectors and scores", sample_full: "with all settings", decode_full: "with all settings",
  verify_full: "with all settings", sample_masked: "for a given shape", verify_masked: "for a given shape", prompt_logprobs: "scores prompts",
  load_row: "a request's settings", load_tokens: "a request's tokens", tables: "where blocks lie", zeros: "clears memory",
};
const KINDS = Object.keys(PROGRAMS);
const rankOf = ([kind, size]) => (KINDS.indexOf(kind) + 1 || KINDS.length + 1) * 1e7 + size;

export class Engine {
  /** `onOwn` hears in words what becomes of this page's own request. */
  constructor(onOwn) {
    this.onOwn = onOwn;
    this.blocks = new BlockMap();
    this.steps = new Steps();
    this.figures = new Figures();
    this.timer = null;
    document.addEventListener("visibilitychange", () => this.watch());
  }

  /** Look now, and go on looking as long as the page is seen. */
  watch() {
    clearTimeout(this.timer);
    if (!document.hidden) this.#look();
  }

  async #look() {
    if (this.looking) return;
    this.looking = true;
    let wait = RETRY;
    try {
      const query = [...mine.keys()].slice(-MINE_AT_ONCE).map((id) => `mine=${encodeURIComponent(id)}`).join("&");
      const state = await ask(`engine/state${query && "?"}${query}`);
      this.#show(state);
      wait = this.isSeen ? Math.max(state.wait, 0.25) : Math.max(state.wait, SLOWLY);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.#lost(error);
      if (error.status === 401) return; // until there is another key
    } finally {
      this.looking = false;
    }
    if (!document.hidden) this.timer = setTimeout(() => this.#look(), wait * 1000);
  }

  get isSeen() {
    return $("engine").offsetParent !== null;
  }

  #lost(error) {
    setHealth("bad", error.status === 401 ? "Needs a key" : error.status === 0 ? "No answer" : "In trouble");
    this.#note(error.status === 401 ? "Give an API key to see the engine." : `${error.message} Trying again.`);
    $("engine").classList.add("stale");
  }

  #show(state) {
    const isSilent = state.silent > LONG_SILENCE;
    $("engine").classList.toggle("stale", isSilent);
    const executor = state.executor;
    const compiling = (executor.ordinary_programs_ready ?? 0) < (executor.ordinary_programs ?? 0);
    if (state.sleep_level !== null) setHealth("warn", "Asleep");
    else if (compiling) setHealth("warn", "Compiling");
    else if (state.obstacle) setHealth("bad", "Not ready");
    else if (isSilent) setHealth("warn", "Silent");
    else setHealth("good", state.running || state.waiting ? "Working" : "Ready");
    const silence = isSilent ? `The engine has not answered for ${seconds(state.silent)}: a step takes long, or waits for a program.` : "";
    this.#note([state.obstacle, silence].filter(Boolean).join(" "));
    if (state.blocks && !state.silent) {
      learnPictures(state);
      this.blocks.show(state);
      showEncoder(state);
      this.steps.show(state);
      this.figures.show(state);
      this.#requests(state);
      this.#programs(executor);
      this.#memory(executor, state.sleep_level);
    }
  }

  #note(text) {
    $("note").hidden = !text;
    if (text !== $("note").textContent) $("note").textContent = text;
  }

  #requests(state) {
    const own = new Set(state.mine);
    const first = state.requests.find((row) => own.has(row[0]));
    if (first) this.onOwn(progress(first, state));
    const all = state.running + state.waiting;
    $("requests-caption").textContent = all ? `${whole(state.running)} running, ${whole(state.waiting)} waiting` : "";
    const rows = state.requests.toSorted((a, b) => own.has(b[0]) - own.has(a[0])).slice(0, MOST_REQUESTS).map((row) => requestRow(row, own.has(row[0])));
    if (all > rows.length) rows.push(make("li", { class: "quiet" }, `and ${whole(all - rows.length)} more`));
    if (!all) rows.push(make("li", { class: "quiet" }, "Nobody asks anything now."));
    $("requests").replaceChildren(...rows);
  }

  #programs(executor) {
    const states = executor.program_states ?? [];
    $("programs-caption").textContent = states.length ? `${executor.programs_ready} of ${executor.programs} compiled` : "";
    const shown = JSON.stringify(states) + executor.recompiles;
    if (shown === this.shownPrograms) return;
    this.shownPrograms = shown;
    const kinds = new Map();
    for (const [kind, size, state] of states.toSorted((a, b) => rankOf(a) - rankOf(b))) (kinds.get(kind) ?? kinds.set(kind, []).get(kind)).push([size, state]);
    const rows = [...kinds].map(([kind, sizes]) => make("div", { class: "programs" }, make("span", {}, kind.replaceAll("_", " "), make("small", {}, PROGRAMS[kind] ?? "")),
      make("span", {}, ...sizes.map(([size, state]) => make("i", { class: `program ${state}`, title: `${kind}${size ? `, size ${size}` : ""}: ${state}` }, size ? String(size) : "·")))));
    const words = states.length ? `${seconds(executor.compile_seconds ?? 0)} of compiling, ${counted(executor.recompiles ?? 0, "recompilation")}.` : "This engine has no programs.";
    $("programs").replaceChildren(...rows, make("p", { class: "quiet" }, words));
  }

  #memory(executor, sleepLevel) {
    const parts = [["KV cache", executor.kv_cache_bytes], ["weights", executor.weight_bytes], ["state", executor.state_bytes], ["encoder cache", executor.encoder_cache_bytes]].filter(([, size]) => size);
    const shown = JSON.stringify([parts, sleepLevel]);
    if (shown === this.shownMemory) return;
    this.shownMemory = shown;
    if (!parts.length) {
      $("memory").replaceChildren(make("p", { class: "quiet" }, "This engine does not say."));
      return;
    }
    const total = parts.reduce((sum, [, size]) => sum + size, 0);
    $("memory-caption").textContent = `${bytes(total)} of a device` + (executor.num_devices > 1 ? `, ${executor.num_devices} devices` : "");
    const bar = make("div", { class: "memory", "aria-hidden": "true" });
    const list = make("dl", { class: "parts" });
    parts.forEach(([name, size], place) => {
      const piece = make("i", { class: `part-${place}` });
      piece.style.flexGrow = size / total;
      bar.append(piece);
      list.append(make("dt", {}, make("i", { class: `key part-${place}` }), name), make("dd", {}, bytes(size)));
    });
    const asleep = sleepLevel > 0 ? [make("p", { class: "quiet" }, "It sleeps: this memory is free until it wakes.")] : [];
    $("memory").replaceChildren(bar, list, ...asleep);
  }
}

/** What becomes of a request before its first token. */
function progress([, isRunning, age, prompt, , computed], { executor, running }) {
  if (isRunning) return computed < prompt ? `reads the prompt, ${whole(computed)} of ${counted(prompt, "token")}` : "";
  const isCompiling = (executor.program_states ?? []).some(([, , state]) => state === "compiling");
  return `waits for ${seconds(age)}${isCompiling ? "; programs are being compiled, it may need one of them" : running ? `; ${counted(running, "request")} run` : ""}`;
}

/** Of the cached tokens, those that were loaded from outside of the device. */
function fromTiers(loaded) {
  const parts = Object.entries(loaded ?? {}).map(([tier, tokens]) => `${whole(tokens)} from ${tier}`);
  return parts.length ? ` (${parts.join(", ")})` : "";
}

function requestRow([label, isRunning, age, prompt, cached, computed, generated, preemptions, loaded, isLoading], isMine) {
  const key = make("i", { class: "key" });
  key.style.background = isMine ? "var(--accent)" : isRunning ? colorOf(label) : "transparent";
  if (!isRunning) key.classList.add("waits");
  const words = [];
  if (!isRunning) words.push(isLoading ? "its keys and values are being loaded" : preemptions ? "preempted, waits" : "waits");
  else if (computed < prompt && !generated) words.push(`reads its prompt, ${whole(computed)} of ${whole(prompt)}`);
  words.push(`${counted(prompt, "prompt token")}${cached > 0 ? `, ${whole(cached)} cached` : ""}${fromTiers(loaded)}`);
  if (generated) words.push(`${whole(generated)} generated`);
  return make("li", {}, key, make("b", {}, isMine ? "yours" : label), make("span", {}, words.join(" · ")), make("time", {}, seconds(age)));
}

function setHealth(kind, words) {
  $("health").className = kind;
  const text = $("health").lastElementChild;
  if (text.textContent !== words) text.textContent = words;
}
