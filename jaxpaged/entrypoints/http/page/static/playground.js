// Chats and raw text: what is sent, what comes back, and how to stop it.

import { Answer } from "./answer.js";
import { mine, newId, stream } from "./api.js";
import { $, chosen, make } from "./dom.js";
import { Pictures, contentOf, drawings, picturesOf, textOf } from "./pictures.js";
import { Settings } from "./settings.js";

const ALTERNATIVES = 5;
const ASK = { chat: "Ask something", text: "Text that the model continues" };
const HINTS = { chat: "Enter sends, Shift+Enter begins a line", text: "Ctrl+Enter continues the text" };
const IDEAS = {
  chat: ["What is the capital of Portugal?", "Spell the word lantern.", "Tell me a story about a fox.", "What is 27 + 45?"],
  text: ["Once upon a time", "The little fox"],
};

export class Playground {
  constructor() {
    this.messages = [];
    this.info = null;
    this.request = null; // the last one, for the dialog with code
    this.controller = null;
    this.answers = []; // on the screen
    this.settings = new Settings($("settings"), (count) => {
      $("changed").hidden = count === 0;
      $("changed").textContent = count;
      $("changed").setAttribute("aria-label", `, ${count} changed`);
    });
    this.pictures = new Pictures(() => picturesOf(this.messages), (words) => this.#complain(words));
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    $("prompt").addEventListener("keydown", (event) => this.#onKey(event));
    $("prompt").addEventListener("input", () => this.#fit());
    addEventListener("resize", () => this.#fit());
    $("stop").addEventListener("click", () => this.stop());
    $("clear").addEventListener("click", () => this.clear());
    $("settings-open").addEventListener("click", () => this.#toggleSettings());
    $("mode").addEventListener("change", () => this.#setMode());
    $("view").addEventListener("change", () => this.#setView());
    addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.controller && !document.querySelector("dialog[open]")) this.stop();
    });
    this.#setMode();
    this.#setView();
  }

  get mode() {
    return chosen("mode");
  }

  /** What the server offers: nothing can be sent before. */
  setInfo(info) {
    this.info = info;
    this.settings.findsToolCalls = info.finds_tool_calls;
    this.settings.setDefaults(info.defaults);
    this.pictures.setInfo(info);
    const generates = info.task === "generate";
    $("prompt").disabled = $("send").disabled = !generates;
    if (!info.chats && this.mode === "chat") {
      document.querySelector('input[name="mode"][value="text"]').checked = true;
      document.querySelector('input[name="mode"][value="chat"]').disabled = true;
    }
    this.#setMode();
    if (!generates) {
      $("log").replaceChildren(make("div", { class: "empty" }, make("p", {}, `${info.models[0]} gives vectors or scores, and no text.`), make("p", { class: "quiet" }, "Ask it at /v1/embeddings, /classify, /score or /rerank. The engine can be watched here."), about()));
    }
  }

  /** The body that would be sent now: with what is typed, or else the last one. */
  draft() {
    const pictures = this.mode === "chat" ? this.pictures.list : [];
    const typed = $("prompt").value.trim() !== "" || pictures.length > 0;
    if (!typed && this.request) return this.request;
    const given = typed ? $("prompt").value : IDEAS[this.mode][0];
    return this.mode === "chat" ? this.#chatRequest([...this.messages, { role: "user", content: contentOf(given, pictures) }]) : this.#textRequest(given);
  }

  send() {
    if (this.controller || $("prompt").disabled) return;
    const text = $("prompt").value, mode = this.mode;
    const pictures = mode === "chat" ? this.pictures.list : [];
    if (!text.trim() && !pictures.length) {
      $("prompt").focus();
      return;
    }
    if (mode === "chat" && this.pictures.isReading) {
      this.#complain("The pictures are still being read. Send again in a moment.");
      return;
    }
    const question = { role: "user", content: contentOf(text.trim(), pictures) };
    let request;
    try {
      request = mode === "chat" ? this.#chatRequest([...this.messages, question]) : this.#textRequest(text);
    } catch (error) {
      this.#complain(error.message);
      return;
    }
    if (mode === "chat") {
      this.messages.push(question);
      this.#append(make("article", { class: "question", "aria-label": "You" }, drawings(this.pictures.take()), text.trim()));
      $("prompt").value = "";
      this.#fit();
    }
    this.#run(request, mode === "text" ? text : "");
  }

  /** What the engine does with the request under way, as long as nothing has come of it. */
  setProgress(words) {
    if (this.controller && this.answer.speed.first === null) this.answer.facts.textContent = words;
  }

  stop() {
    this.controller?.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    this.pictures.clear();
    this.#showIdeas();
    $("prompt").focus();
  }

  /** How many other tokens are told with each one. */
  get alternatives() {
    return Math.min(ALTERNATIVES, this.info?.max_logprobs ?? ALTERNATIVES);
  }

  #chatRequest(messages) {
    const system = this.settings.system;
    const all = system ? [{ role: "system", content: system }, ...messages] : messages;
    return { path: "v1/chat/completions", body: this.#body({ messages: all }, { logprobs: true, top_logprobs: this.alternatives }) };
  }

  #textRequest(prompt) {
    return { path: "v1/completions", body: this.#body({ prompt }, { logprobs: this.alternatives }) };
  }

  #body(given, chances) {
    const wanted = chosen("view") === "text" ? {} : chances;
    const model = this.info ? { model: $("models").value || this.info.models[0] } : {};
    return { ...model, ...given, ...this.settings.fields(), ...wanted, stream: true, stream_options: { include_usage: true } };
  }

  async #run(request, before) {
    const controller = (this.controller = new AbortController());
    this.request = request;
    const pictures = picturesOf(request.body.messages ?? []);
    const source = { model: request.body.model, alternatives: this.alternatives, maxLength: this.info?.max_model_len, hasPictures: pictures.length > 0 };
    const answer = new Answer(chosen("view"), before, source);
    this.answers = [...this.answers.filter((each) => each.element.isConnected), answer];
    answer.onGrow = () => this.#follow();
    this.#append(answer.element);
    this.#setBusy(true);
    $("said").textContent = "The answer comes.";
    const { id, answerId } = newId(request.path);
    mine.set(answerId, pictures);
    this.answer = answer;
    try {
      const body = { ...request.body, return_token_ids: true }; // to know when each token came, and to show them later
      for await (const events of stream(request.path, body, controller.signal, id)) answer.take(events);
      answer.end("stop");
    } catch (error) {
      if (error.name === "AbortError") answer.end("abort");
      else answer.fail(error);
    }
    setTimeout(() => mine.delete(answerId), 3000);
    const isCurrent = this.controller === controller;
    if (isCurrent) this.controller = null;
    if (isCurrent) this.#setBusy(false);
    if (answer.element.isConnected) this.#finish(answer, request, before);
  }

  #finish(answer, request, before) {
    const { messages, tools, prompt } = request.body;
    answer.addPrompt(messages ? { messages, tools } : { prompt });
    answer.element.append(this.#actions(answer, request, before));
    const failed = answer.ending === "error";
    $("said").textContent = failed ? "" : `Answer: ${answer.text || answer.calls.map((call) => `calls ${call.name}`).join(", ") || "empty"}`;
    if (messages && !failed) {
      const calls = answer.calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
      const message = { role: "assistant", content: answer.text };
      this.messages.push(calls.length ? { ...message, tool_calls: calls } : message);
      if (calls.length && answer.ending !== "length") answer.extra.append(this.#results(answer));
    }
    if (failed && this.messages.at(-1)?.role === "user") this.#takeBack();
    answer.complete();
    this.#follow();
  }

  /** The last question was not answered: it can be sent again, or changed. */
  #takeBack() {
    const { content } = this.messages.pop();
    if (!$("prompt").value && !this.pictures.list.length) {
      $("prompt").value = textOf(content);
      this.pictures.put(picturesOf([{ content }]));
    }
    this.#fit();
  }

  /** What can be done with an answer. */
  #actions(answer, request, before) {
    const again = () => {
      if (this.controller) return;
      if (request.body.messages) this.messages = request.body.messages.filter((each) => each.role !== "system");
      while (answer.element.nextSibling) answer.element.nextSibling.remove();
      answer.element.remove();
      this.#run(request, before);
    };
    const copy = async (event) => {
      const button = event.target;
      button.textContent = (await copyText(answer.text)) ? "Copied" : "The browser did not let me copy";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    };
    const goOn = () => {
      $("prompt").value = before + answer.text;
      this.#fit();
      $("prompt").focus();
    };
    return make("p", { class: "actions" },
      make("button", { type: "button", class: "plain", onclick: again }, "Again"),
      make("button", { type: "button", class: "plain", onclick: copy }, "Copy"),
      before ? make("button", { type: "button", class: "plain", onclick: goOn }, "Continue from here") : null);
  }

  /** Where results of called tools are given back. */
  #results(answer) {
    const fields = answer.calls.map((call) => make("textarea", { rows: 2, "aria-label": `Result of ${call.name}`, placeholder: `What ${call.name} gave back` }));
    const give = make("button", { type: "submit" }, "Give it to the model");
    const form = make("form", { class: "results" }, ...fields, give);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.controller) return;
      answer.calls.forEach((call, place) => this.messages.push({ role: "tool", tool_call_id: call.id, content: fields[place].value }));
      for (const each of [...fields, give]) each.disabled = true;
      try {
        const request = this.#chatRequest(this.messages);
        delete request.body.tool_choice; // it was for the question
        this.#run(request, "");
      } catch (error) {
        this.#complain(error.message);
      }
    });
    return form;
  }

  #onKey(event) {
    if (event.key !== "Enter" || event.isComposing) return;
    const sends = this.mode === "chat" ? !event.shiftKey : event.ctrlKey || event.metaKey;
    if (!sends) return;
    event.preventDefault();
    this.send();
  }

  #setMode() {
    const mode = this.mode;
    this.settings.setMode(mode);
    $("prompt").placeholder = ASK[mode];
    $("hint").textContent = HINTS[mode];
    $("composer").dataset.mode = mode;
    if (!this.messages.length && !$("log").querySelector("article")) this.#showIdeas();
    this.#fit();
  }

  #showIdeas() {
    const lead = this.mode === "chat" ? "Ask the model something." : "Begin a text, and the model goes on with it.";
    const pick = (idea) => () => {
      $("prompt").value = idea;
      this.#fit();
      this.send();
    };
    const buttons = IDEAS[this.mode].map((idea) => make("button", { type: "button", class: "idea", onclick: pick(idea) }, idea));
    $("log").replaceChildren(make("div", { class: "empty" }, make("p", {}, lead), make("p", { class: "quiet" }, "Watch its blocks light up in the engine's KV cache."), make("div", { class: "ideas" }, ...buttons), about()));
  }

  /** Show all answers in the chosen way, those at the end first. */
  async #setView() {
    const view = chosen("view");
    for (const note of document.querySelectorAll("#view-note > *")) note.hidden = note.dataset.view !== view;
    for (const answer of this.answers) answer.show(view);
    for (const answer of this.answers.toReversed()) {
      if (chosen("view") === view && answer.element.isConnected) await answer.complete();
    }
  }

  #toggleSettings() {
    const opens = $("settings").hidden;
    $("settings").hidden = !opens;
    $("settings-open").setAttribute("aria-expanded", opens);
  }

  #setBusy(busy) {
    $("send").hidden = busy;
    $("stop").hidden = !busy;
    if (!busy && document.activeElement === document.body) $("prompt").focus();
  }

  #append(element) {
    $("log").querySelector(".empty")?.remove();
    $("log").append(element);
    $("log").scrollTop = $("log").scrollHeight;
  }

  /** Stay at the end, unless somebody reads further up. */
  #follow() {
    const log = $("log");
    if (log.scrollHeight - log.scrollTop - log.clientHeight < 120) log.scrollTop = log.scrollHeight;
  }

  #fit() {
    const area = $("prompt");
    area.style.height = "auto";
    area.style.height = `${Math.min(area.scrollHeight + 2, innerHeight * 0.35)}px`; // with its border
  }

  #complain(message) {
    $("hint").textContent = message;
    $("hint").classList.add("problem");
    $("said").textContent = message;
    setTimeout(() => {
      $("hint").classList.remove("problem");
      $("hint").textContent = HINTS[this.mode];
    }, 6000);
  }
}

function about() {
  const copy = $("about").cloneNode(true);
  copy.removeAttribute("id");
  return copy;
}

/** Whether the browser let us. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false; // pages that did not come over HTTPS or from this machine may not
  }
}
