// One answer on the screen, while it comes and afterwards.

import { ask } from "./api.js";
import { counted, make, milliseconds, seconds, whole } from "./dom.js";
import { piecesOf, readAgain, tokensOf } from "./shown_tokens.js";
import { Speed } from "./speed.js";
import { TokenStrip, pieceText } from "./tokens.js";

const ENDINGS = { stop: "", length: "cut off at the longest length", tool_calls: "calls a tool", abort: "stopped", error: "failed" };
const MOST_TOKENS = 4000;

export class Answer {
  /** `view`: "text", "tokens" or "chances". `before`: text that it continues. `source`: the model, how long its
   * context is, and how many alternatives to a token the server tells. */
  constructor(view, before, source) {
    this.text = "";
    this.thinking = "";
    this.calls = [];
    this.view = view;
    this.source = source;
    this.began = performance.now();
    this.speed = new Speed();
    this.promptIds = [];
    this.ids = [];
    this.read = view === "text" ? null : []; // tokens with their probabilities
    this.pieces = null; // tokens without
    this.body = make("div", { class: "body" });
    this.notice = make("p", { class: "notice" });
    this.facts = make("p", { class: "facts" });
    this.extra = make("div", { class: "extra" });
    this.element = make("article", { class: "answer busy", "aria-label": "Answer" }, this.body, this.notice, this.extra, this.facts);
    if (before) this.body.append(make("span", { class: "given" }, before));
    this.place = make("span", { class: "said" });
    this.body.append(this.place);
    this.show(view);
  }

  /** What events of either API bring that arrived together. */
  take(events) {
    let count = 0;
    for (const event of events) {
      if (event.usage) this.usage = event.usage;
      for (const choice of event.choices ?? []) {
        this.promptIds = event.prompt_token_ids ?? choice.prompt_token_ids ?? this.promptIds;
        count += choice.token_ids?.length ?? 0;
        this.#takeChoice(choice);
      }
    }
    if (count && this.speed.first === null) this.facts.textContent = "";
    this.speed.took(count, performance.now());
    this.frame ??= requestAnimationFrame(() => this.#flush());
  }

  #takeChoice(choice) {
    const ids = choice.token_ids ?? [];
    const text = choice.delta ? choice.delta.content : choice.text;
    this.ids.push(...ids);
    if (choice.delta?.reasoning) this.#think(choice.delta.reasoning);
    for (const call of choice.delta?.tool_calls ?? []) this.#call(call);
    if (choice.logprobs) this.read?.push(...tokensOf(choice.logprobs).map((token, place) => ({ ...token, id: ids[place] })));
    this.text += text ?? "";
    if (choice.finish_reason) this.ending = choice.finish_reason;
  }

  end(how) {
    this.#flush();
    this.ending ??= how;
    this.element.classList.remove("busy");
    this.seconds = (performance.now() - this.began) / 1000;
    if (!this.text && !this.calls.length && !this.thinking && this.ending !== "abort") this.body.append(make("span", { class: "quiet" }, "The answer is empty."));
    this.facts.textContent = this.#words();
  }

  fail(error) {
    this.end("error");
    this.facts.textContent = "";
    this.body.querySelector(":scope > .quiet")?.remove();
    this.extra.append(make("p", { class: "problem", role: "alert" }, error.message));
  }

  /** Add what shows the prompt's tokens. `request`: what /tokenize is asked. */
  addPrompt(request) {
    const { prompt_tokens: count, prompt_tokens_details: details } = this.usage ?? {};
    if (count === undefined) return;
    const cached = details?.cached_tokens;
    const label = `Prompt: ${counted(count, "token")}${cached ? `, ${whole(cached)} from the prefix cache` : ""}`;
    const content = make("div", { class: "prompt-tokens" });
    const element = make("details", {}, make("summary", {}, label), content);
    if (cached) {
      const bar = make("i", { class: "cached-bar", "aria-hidden": "true" });
      bar.style.setProperty("--share", cached / count);
      element.firstChild.append(bar);
    }
    element.addEventListener("toggle", async () => {
      if (!element.open || content.childNodes.length) return;
      content.append("…");
      try {
        const { tokens, token_strs } = await ask("tokenize", { method: "POST", body: { ...request, return_token_strs: true } });
        const strip = new TokenStrip("Tokens of the prompt");
        pieceText(token_strs).slice(0, MOST_TOKENS).forEach((text, place) => strip.add({ text, id: tokens[place], cached: place < (cached ?? 0) }));
        content.replaceChildren(strip.element);
        if (tokens.length > MOST_TOKENS) content.append(make("p", { class: "quiet" }, `The first ${whole(MOST_TOKENS)} are shown.`));
        if (details === undefined) content.append(make("p", { class: "quiet" }, "To see which of them came from the prefix cache, start the server with --enable-prompt-tokens-details."));
      } catch (error) {
        content.replaceChildren(make("p", { class: "problem" }, error.message));
      }
    });
    this.extra.prepend(element);
  }

  /** Show it in another way, with what of it is here. */
  show(view) {
    this.view = view;
    this.body.className = `body ${view}`;
    this.notice.textContent = "";
    this.shown = 0; // characters or tokens
    this.strip = view !== "text" && this.#tokens() ? new TokenStrip("Tokens of the answer") : null;
    this.place.replaceChildren(...(this.strip ? [this.strip.element] : []));
    this.#flush();
  }

  /** Ask for the tokens that are to be shown and did not come along. */
  async complete() {
    const { view } = this;
    if (view === "text" || this.#tokens() || !this.ids.length || this.element.classList.contains("busy")) return;
    this.notice.textContent = view === "chances" ? "The model reads this answer again for its probabilities." : "Asking for the tokens of this answer.";
    let said = "";
    try {
      if (view === "tokens" && this.text) this.pieces ??= await piecesOf(this.source, this.text, this.ids);
      if (!this.#tokens()) this.read ??= await readAgain(this.source, this.promptIds, this.ids);
    } catch (error) {
      said = error.message;
    }
    if (this.view !== view) return;
    this.show(view);
    this.notice.textContent = said;
  }

  /** The tokens for the view, as far as they are here; null: they did not come along. */
  #tokens() {
    return this.read ?? (this.view === "tokens" ? this.pieces : null);
  }

  #flush() {
    cancelAnimationFrame(this.frame);
    this.frame = undefined;
    if (this.strip) {
      const tokens = this.#tokens();
      for (const token of tokens.slice(this.shown, MOST_TOKENS)) this.strip.add(token);
      if (tokens.length > MOST_TOKENS) this.notice.textContent = `The first ${whole(MOST_TOKENS)} tokens are shown.`;
      this.shown = tokens.length;
    } else if (this.text.length > this.shown) {
      this.place.append(this.text.slice(this.shown));
      this.shown = this.text.length;
    }
    this.onGrow?.();
  }

  #think(text) {
    if (!this.thought) {
      this.thought = make("div", { class: "thought" });
      this.body.before(make("details", { class: "thinking" }, make("summary", {}, "Thinking"), this.thought));
    }
    this.thinking += text;
    this.thought.append(text);
  }

  #call({ index, id, function: piece }) {
    const call = (this.calls[index] ??= { id: "", name: "", arguments: "", shown: null });
    if (id) call.id = id;
    call.name += piece?.name ?? "";
    call.arguments += piece?.arguments ?? "";
    if (!call.shown) {
      call.shown = make("code");
      this.extra.append(make("div", { class: "call" }, make("b", {}, call.name), call.shown));
    }
    call.shown.textContent = call.arguments;
  }

  #words() {
    const words = [];
    const count = this.usage?.completion_tokens;
    if (count !== undefined) words.push(`${counted(count, "token")} in ${seconds(this.seconds)}`);
    if (this.speed.first !== null) words.push(`first after ${milliseconds(this.speed.first - this.began)}`);
    if (this.speed.rate !== null) words.push(`${whole(this.speed.rate)} tokens/s`);
    if (ENDINGS[this.ending] ?? this.ending) words.push(ENDINGS[this.ending] ?? this.ending);
    return words.join(" · ");
  }
}
