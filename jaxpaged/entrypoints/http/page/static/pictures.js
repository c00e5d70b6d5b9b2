// Pictures of the next question: chosen, dropped or pasted, shown small, and sent as data URLs.

import { $, bytes, counted, make } from "./dom.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MOST_SHOWN = 480; // pixels of a side
const TEXT_BYTES = 2 ** 18; // of a request, for all but its pictures
const known = new WeakMap(); // the picture of a part of a message

/** The picture that a part of a message has; undefined where it has none. */
export const pictureOf = (part) => known.get(part);

/** All pictures of messages. */
export const picturesOf = (messages) => messages.flatMap(({ content }) => (Array.isArray(content) ? content.map(pictureOf).filter(Boolean) : []));

/** What a message says, and its pictures. */
export function contentOf(text, pictures) {
  return pictures.length ? [...pictures.map((picture) => picture.part), ...(text ? [{ type: "text", text }] : [])] : text;
}

/** The text in the content of a message. */
export const textOf = (content) => (Array.isArray(content) ? content.filter((part) => part.type === "text").map((part) => part.text).join("\n") : content);

/** Drawings of pictures. */
export function drawings(pictures) {
  return pictures.length ? make("div", { class: "pictures" }, ...pictures.map(drawing)) : null;
}

/** A picture, small. */
export function drawing({ name, small }) {
  const canvas = make("canvas", { width: small.width, height: small.height, role: "img", "aria-label": name, title: name });
  canvas.getContext("2d").drawImage(small, 0, 0);
  return canvas;
}

export class Pictures {
  /** `sent` gives the pictures of the conversation so far. `onProblem` hears in a sentence why one is not taken. */
  constructor(sent, onProblem) {
    this.sent = sent;
    this.onProblem = onProblem;
    this.list = [];
    this.names = new Set();
    this.reading = 0;
    this.most = 0; // pictures of a conversation
    const play = $("play"), files = $("picture-files");
    $("add-picture").addEventListener("click", () => files.click());
    files.accept = TYPES.join(",");
    files.addEventListener("change", () => {
      this.add([...files.files]);
      files.value = "";
    });
    play.addEventListener("dragover", (event) => this.#onDrag(event));
    play.addEventListener("dragleave", (event) => play.contains(event.relatedTarget) || play.classList.remove("dropping"));
    play.addEventListener("drop", (event) => this.#onDrag(event));
    document.addEventListener("paste", (event) => this.#onPaste(event));
  }

  /** What the server takes: nothing is offered before, and nothing where the model sees nothing. */
  setInfo({ max_images: most, max_image_bytes: mostBytes, max_body_bytes: bodyBytes }) {
    [this.most, this.mostBytes, this.bodyBytes] = [most, mostBytes, bodyBytes];
    $("add-picture").hidden = most === 0;
    $("composer").classList.toggle("sees", most > 0);
  }

  get isReading() {
    return this.reading > 0;
  }

  /** The pictures, which are no longer here then. */
  take() {
    const taken = this.list;
    this.put([]);
    return taken;
  }

  put(pictures) {
    this.list = pictures;
    this.#show();
  }

  /** Forget them, and that there were others. */
  clear() {
    this.names.clear();
    this.put([]);
  }

  /** Take files as far as they are pictures that the server takes. */
  async add(files) {
    if ($("composer").dataset.mode !== "chat") {
      this.onProblem("Pictures belong to chats. Choose Chat above, and add them again.");
      return;
    }
    const problems = [];
    this.reading += 1;
    for (const file of files) {
      try {
        const picture = await this.#read(file);
        this.#check(picture);
        this.put([...this.list, picture]);
      } catch (error) {
        problems.push(error.message);
      }
    }
    this.reading -= 1;
    if (problems.length) this.onProblem(problems.join(" "));
    $("prompt").focus();
  }

  async #read(file) {
    const said = file.name || "The picture";
    if (!TYPES.includes(file.type)) throw new Error(`${said} is not taken: pictures are PNG, JPEG, WebP or GIF.`);
    if (file.size > this.mostBytes) throw new Error(`${said} has ${bytes(file.size)}, and a picture may have ${bytes(this.mostBytes)}.`);
    const small = await smaller(file).catch(() => {
      throw new Error(`${said} is no picture that this browser can read.`);
    });
    const url = await dataUrl(file);
    const part = { type: "image_url", image_url: { url } };
    const picture = { name: this.#nameOf(file), type: file.type, size: file.size, small, part };
    known.set(part, picture);
    return picture;
  }

  /** A name that no other picture of the conversation has. */
  #nameOf(file) {
    const given = file.name || `picture.${file.type.slice("image/".length)}`;
    let name = given;
    for (let count = 2; this.names.has(name); count += 1) name = `${count}-${given}`;
    this.names.add(name);
    return name;
  }

  #check({ name, part }) {
    const all = [...this.sent(), ...this.list];
    if (all.length >= this.most) throw new Error(`${name} is one too many: a conversation has at most ${counted(this.most, "picture")} here.`);
    const size = all.reduce((sum, picture) => sum + picture.part.image_url.url.length, part.image_url.url.length + TEXT_BYTES);
    if (size > this.bodyBytes) throw new Error(`With ${name} the conversation has ${bytes(size)}, and this server takes ${bytes(this.bodyBytes)}.`);
  }

  #show() {
    const items = this.list.map((picture) => {
      const remove = () => {
        this.put(this.list.filter((each) => each !== picture));
        $("prompt").focus();
      };
      return make("li", {}, drawing(picture), make("button", { type: "button", class: "plain", "aria-label": `Remove ${picture.name}`, title: "Remove", onclick: remove }, "×"));
    });
    $("pictures").replaceChildren(...items);
    $("pictures").hidden = !items.length;
  }

  #onDrag(event) {
    if (!this.most || !event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    const isDrop = event.type === "drop";
    $("play").classList.toggle("dropping", !isDrop);
    if (isDrop) this.add([...event.dataTransfer.files]);
  }

  /** Files of the clipboard; text that lies there, too, is what was meant. */
  #onPaste(event) {
    const { files, types } = event.clipboardData;
    if (!this.most || !files.length || types.includes("text/plain") || event.target.closest?.("#settings, dialog, .results")) return;
    event.preventDefault();
    this.add([...files]);
  }
}

/** The picture on a canvas that is no larger than what is shown. */
async function smaller(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(MOST_SHOWN / Math.max(bitmap.width, bitmap.height), 1);
  const canvas = make("canvas", { width: Math.max(Math.round(bitmap.width * scale), 1), height: Math.max(Math.round(bitmap.height * scale), 1) });
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return canvas;
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(new Error(`${file.name} cannot be read. It may be gone.`)));
    reader.readAsDataURL(file);
  });
}
