// One answer on the screen, while it comes and afterwards.

import { ask } from "./api.js";
import { counted, make, milliseconds, seconds, whole } from "./dom.js";
import { TokenStrip, pieceText } from "./tokens.js";

const ENDINGS = { stop: "", length: "cut off at the longest length", tool_calls: "calls a tool", abort: "stopped", error: "failed" };
const MOST_TOKENS = 4000;

export class Answer {
  /** `view`: "text", "tokens" or "chances". `before`: text that it continues. */
  constructor(view, before = "") {
    this.text = "";
    this.thinking = "";
    this.calls = [];
    this.view = view;
    this.began = performance.now();
    this.numTokens = 0;
    this.pending = [];
    this.body = make("div", { class: `body ${view}` });
    this.facts = make("p", { class: "facts" });
    this.extra = make("div", { class: "extra" });
    this.element = make("article", { class: "answer busy", "aria-label": "Answer" }, this.body, this.extra, this.facts);
    if (before) this.body.append(make("span", { class: "given" }, before));
    this.place = make("span", { class: "said" });
    this.body.append(this.place);
    if (view !== "text") {
      this.strip = new TokenStrip("Tokens of the answer");
      this.place.append(this.strip.element);
    }
  }

  /** What an event of either API brings. */
  take(event) {
    if (event.usage) this.usage = event.usage;
    for (const choice of event.choices ?? []) {
      const text = choice.delta ? choice.delta.content : choice.text;
      if ((text || choice.logprobs) && !this.first) {
        this.first = performance.now();
        this.facts.textContent = "";
      }
      if (choice.delta?.reasoning) this.#think(choice.delta.reasoning);
      for (const call of choice.delta?.tool_calls ?? []) this.#call(call);
      if (choice.logprobs && this.strip) this.pending.push(...tokensOf(choice.logprobs));
      if (text) {
        this.text += text;
        if (!this.strip) this.pending.push(text);
      }
      if (choice.finish_reason) this.ending = choice.finish_reason;
    }
    this.frame ??= requestAnimationFrame(() => this.#flush());
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

  #flush() {
    cancelAnimationFrame(this.frame);
    this.frame = undefined;
    if (this.strip) {
      for (const token of this.pending) {
        this.numTokens += 1;
        if (this.numTokens <= MOST_TOKENS) this.strip.add(token);
      }
    } else if (this.pending.length) {
      this.place.append(this.pending.join(""));
    }
    this.pending = [];
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
    if (this.first) words.push(`first after ${milliseconds(this.first - this.began)}`);
    const after = this.first ? this.seconds - (this.first - this.began) / 1000 : 0;
    if (count > 1 && after > 0.001) words.push(`${whole((count - 1) / after)} tokens/s`);
    if (ENDINGS[this.ending] ?? this.ending) words.push(ENDINGS[this.ending] ?? this.ending);
    return words.join(" · ");
  }
}

/** Tokens of a piece, in the shape of either API. */
function tokensOf(logprobs) {
  if (logprobs.content) {
    return logprobs.content.map((each) => ({
      text: each.token, logprob: each.logprob, top: each.top_logprobs.map(({ token, logprob }) => ({ text: token, logprob })),
    }));
  }
  return logprobs.tokens.map((text, place) => ({
    text,
    logprob: logprobs.token_logprobs[place] ?? undefined,
    top: Object.entries(logprobs.top_logprobs[place] ?? {}).map(([other, logprob]) => ({ text: other, logprob })),
  }));
}
