// The controls of sampling, of the answer's shape, and of tools: from one table, and what they say as fields of a request.

import { make } from "./dom.js";
import { more, sections } from "./sections.js";

/** Sampling parameters. `base` is what counts when neither the request nor the model says anything. */
const SAMPLING = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05, base: 1, help: "0 takes the likeliest token every time" },
  { name: "top_p", label: "Top p", min: 0.01, max: 1, step: 0.01, base: 1, help: "only the likeliest tokens that make up this share" },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01, base: 0, help: "none less likely than this share of the likeliest" },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.5, max: 2, step: 0.05, base: 1, help: "above 1 avoids what was there" },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1, base: 0, help: "once for what the answer has" },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1, base: 0, help: "for every time the answer has it" },
  { name: "top_k", label: "Top k", min: 0, step: 1, base: "all", help: "only so many of the likeliest tokens" },
  { name: "max_tokens", label: "Longest answer", min: 1, step: 1, base: "fits", help: "tokens" },
  { name: "seed", label: "Seed", step: 1, base: "any", help: "the same seed, the same answer" },
];
const DEFAULT_LENGTH = 256;
const SCHEMA = { type: "object", properties: { name: { type: "string" }, age: { type: "integer" } }, required: ["name", "age"] };
const TOOLS = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather of a city",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
}];

export class Settings {
  /** `onChange` hears how many settings are not as they were. */
  constructor(form, onChange) {
    this.form = form;
    this.onChange = onChange;
    this.inputs = {};
    this.rows = {};
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("input", () => this.#changed());
    const groups = [
      group("Sampling", ...SAMPLING.map((field) => this.#row(field)), this.#stop()),
      group("Shape of the answer", ...this.#shape()),
      this.#onlyChat(group("System message", this.#area("system", 2, "You answer in one sentence."))),
      this.#onlyChat(group("Tools", ...this.#tools())),
    ];
    form.append(sections(form, groups), ...groups,
      make("p", { class: "foot" }, make("button", { type: "button", class: "plain", onclick: () => this.reset() }, "Back to the defaults")),
      more(form));
  }

  /** What the model brings along. */
  setDefaults(defaults) {
    for (const field of SAMPLING) {
      if (field.name in defaults) this.inputs[field.name].dataset.base = defaults[field.name];
    }
    this.#changed();
  }

  setMode(mode) {
    this.form.dataset.mode = mode;
    this.#changed();
  }

  reset() {
    this.form.reset();
    for (const area of this.form.querySelectorAll("textarea")) area.removeAttribute("aria-invalid");
    this.#changed();
  }

  /** Fields of a request. Throws an Error that says what is wrong. */
  fields() {
    const fields = {};
    for (const { name, label } of SAMPLING) {
      const input = this.inputs[name];
      if (!input.validity.valid) throw new Error(`${label}: ${input.validationMessage}`);
      if (input.value !== "") fields[name] = Number(input.value);
    }
    if (!("max_tokens" in fields) && this.form.dataset.mode === "text") fields.max_tokens = DEFAULT_LENGTH;
    const stop = this.inputs.stop.value.split("\n").filter((line) => line !== "").map(unescaped);
    if (stop.length) fields.stop = stop;
    const shape = this.inputs.shape.value;
    if (shape === "object") fields.response_format = { type: "json_object" };
    if (shape === "schema") {
      const schema = this.#json("schema", "JSON schema");
      fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
    }
    if (this.form.dataset.mode === "chat" && this.inputs.tools.value.trim()) {
      fields.tools = this.#json("tools", "Tools");
      if (!Array.isArray(fields.tools)) throw new Error("Tools: give a list, as in the example.");
      if (this.inputs.choice.value) fields.tool_choice = this.inputs.choice.value;
    }
    return fields;
  }

  get system() {
    return this.form.dataset.mode === "chat" ? this.inputs.system.value.trim() : "";
  }

  #row({ name, label, min, max, step, base, help }) {
    const id = `set-${name}`;
    const input = make("input", { id, type: "number", min, max, step: max === undefined ? step : "any", "aria-describedby": `${id}-help` });
    input.dataset.base = base;
    this.inputs[name] = input;
    const row = make("div", { class: "row" }, make("label", { for: id }, label), make("small", { id: `${id}-help` }, help));
    if (max !== undefined) {
      const range = make("input", { type: "range", min, max, step, "aria-label": label });
      range.addEventListener("input", () => {
        input.value = range.value;
      });
      this.rows[name] = range;
      row.append(range);
    }
    row.append(input);
    return row;
  }

  #stop() {
    const area = this.#area("stop", 1, "");
    return make("div", { class: "row" }, make("label", { for: "set-stop" }, "Stop at"), make("small", {}, "texts, a line each; \\n is a line break"), area);
  }

  #area(name, rows, placeholder, label) {
    const area = make("textarea", { id: `set-${name}`, rows, placeholder, spellcheck: "false", "aria-label": label });
    this.inputs[name] = area;
    return area;
  }

  #shape() {
    const select = make("select", { id: "set-shape", "aria-label": "Shape of the answer" },
      make("option", { value: "" }, "Free text"), make("option", { value: "object" }, "Any JSON object"), make("option", { value: "schema" }, "JSON schema"));
    this.inputs.shape = select;
    const area = this.#area("schema", 7, "", "JSON schema");
    area.hidden = true;
    select.addEventListener("change", () => {
      area.hidden = select.value !== "schema";
      if (!area.hidden && !area.value) area.value = pretty(SCHEMA);
    });
    return [select, area];
  }

  #tools() {
    const area = this.#area("tools", 2, "A list of functions, as OpenAI's API takes them", "Tools");
    const choice = make("select", { id: "set-choice", "aria-label": "Whether tools are called" },
      make("option", { value: "" }, "The model decides"), make("option", { value: "required" }, "It must call one"), make("option", { value: "none" }, "It must not"));
    this.inputs.choice = choice;
    const example = () => {
      area.value = pretty(TOOLS);
      area.rows = 8;
      if (!this.findsToolCalls) choice.value = "required";
      this.#changed();
    };
    return [area, make("div", { class: "line" }, choice, make("button", { type: "button", class: "plain", onclick: example }, "Insert an example"))];
  }

  #onlyChat(element) {
    element.classList.add("only-chat");
    return element;
  }

  #json(name, label) {
    const area = this.inputs[name];
    try {
      const value = JSON.parse(area.value);
      area.removeAttribute("aria-invalid");
      return value;
    } catch (error) {
      area.setAttribute("aria-invalid", "true");
      throw new Error(`${label}: this is not JSON yet. ${error.message}`);
    }
  }

  #changed() {
    let count = 0;
    for (const [name, input] of Object.entries(this.inputs)) {
      const isSet = input.tagName === "SELECT" ? input.value !== "" : input.value.trim() !== "" && name !== "schema";
      input.closest(".row")?.classList.toggle("set", isSet);
      if (isSet && !(name === "choice") && !(this.form.dataset.mode === "text" && ["system", "tools"].includes(name))) count += 1;
      if (input.dataset.base !== undefined) input.placeholder = input.dataset.base;
      const range = this.rows[name];
      if (range) range.value = input.value === "" ? input.dataset.base : input.value;
    }
    this.onChange(count);
  }
}

function group(title, ...children) {
  return make("fieldset", { class: "group" }, make("legend", {}, title), ...children);
}

const unescaped = (line) => line.replaceAll("\\n", "\n").replaceAll("\\t", "\t");

export const pretty = (value) => JSON.stringify(value, null, 2);
