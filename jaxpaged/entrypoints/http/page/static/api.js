// Asking the server: with the key if there is one, and with errors that are sentences.

const PLACE = "jaxpaged-key";
let key = "";
try {
  key = sessionStorage.getItem(PLACE) ?? "";
} catch {
  // The browser keeps nothing for this page: the key lives as long as the page does.
}

/** A new name for a request, and what the server calls its answer, which is how the engine's state finds it again. */
export function newId(path) {
  const random = crypto.getRandomValues(new Uint8Array(12));
  const id = `page-${Array.from(random, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
  return { id, answerId: `${path.endsWith("chat/completions") ? "chatcmpl" : "cmpl"}-${id}` };
}

/** Answers under way that this page asked for: by their ids, the pictures that were sent. */
export const mine = new Map();

const listeners = { key: () => {} };

/** `listener` is called when the server wants another key; `wrong`: one was sent. */
export function onKeyNeeded(listener) {
  listeners.key = listener;
}

export function useKey(value) {
  key = value.trim();
  try {
    sessionStorage.setItem(PLACE, key);
  } catch {
    // see above
  }
}

export const hasKey = () => key !== "";

export class ApiError extends Error {
  constructor(status, message, parameter) {
    super(message);
    this.status = status;
    this.parameter = parameter;
  }
}

/** The address of a path of the API, below whatever path this page lies. */
export const addressOf = (path) => new URL(path, document.baseURI).href;

async function send(path, { method = "GET", body, signal, headers: more } = {}) {
  const headers = { ...more };
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(addressOf(path), {
      method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body), credentials: "omit", cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer. It may have been stopped, or the network is gone.");
  }
  if (response.ok) return response;
  let said;
  try {
    said = (await response.json()).error;
  } catch {
    said = null;
  }
  if (response.status === 401) listeners.key(hasKey());
  throw new ApiError(response.status, said?.message ?? `The server answered with status ${response.status}.`, said?.param);
}

/** The JSON of an answer. Throws ApiError. */
export async function ask(path, options) {
  return (await send(path, options)).json();
}

/** The events of a streamed answer, decoded, in lists of those that arrived together. `id`: what the request is called.
 * Throws ApiError, also for an error within the stream. */
export async function* stream(path, body, signal, id) {
  const response = await send(path, { method: "POST", body, signal, headers: { "X-Request-Id": id } });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const frames = (rest + value).split("\n\n");
      rest = frames.pop();
      const sent = frames.filter((frame) => frame.startsWith("data: ")).map((frame) => frame.slice(6));
      const events = sent.filter((data) => data !== "[DONE]").map((data) => JSON.parse(data));
      const failed = events.findIndex((event) => event.error);
      yield failed < 0 ? events : events.slice(0, failed);
      if (failed >= 0) throw new ApiError(events[failed].error.code, events[failed].error.message, events[failed].error.param);
      if (sent.includes("[DONE]")) return;
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
    throw new ApiError(0, "The connection broke before the answer was complete.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
