// The request of the playground in other languages. `request` is {path, body}: an endpoint and its JSON.

import { pictureOf, picturesOf } from "./pictures.js";
import { pretty } from "./settings.js";

const KEY = "JAXPAGED_API_KEY";
/** Fields that OpenAI's client has arguments for; others go through `extra_body`. */
const OPENAI = [
  "model", "messages", "prompt", "stream", "stream_options", "temperature", "top_p", "max_tokens", "seed", "stop",
  "presence_penalty", "frequency_penalty", "response_format", "tools", "tool_choice", "logprobs", "top_logprobs",
];

const MARK = /\uE000(\d+)\uE001/g; // where a picture's bytes belong, by its place

/** Names of the files that the code reads: a picture's bytes are too many to be in it. */
export const filesOf = ({ body }) => picturesOf(body.messages ?? []).map((picture) => picture.name);

/** The body with its pictures as parts that `partOf` makes of each and the mark for its bytes, and the pictures. */
function marked(body, partOf) {
  const pictures = picturesOf(body.messages ?? []);
  if (!pictures.length) return { body, pictures };
  let place = 0;
  const partFor = (part) => (pictureOf(part) ? partOf(pictureOf(part), `\uE000${place++}\uE001`) : part);
  const messages = body.messages.map((each) => (Array.isArray(each.content) ? { ...each, content: each.content.map(partFor) } : each));
  return { body: { ...body, messages }, pictures };
}

/** JSON for a shell: an argument, or with pictures what the command reads, since an argument may not be that long. */
function forShell(json, pictures, command, option, end) {
  if (!pictures.length) return `${command}-d ${shellQuoted(json)}${end}`;
  const read = (_, place) => `$(base64 < ${shellQuoted(pictures[place].name)} | tr -d '\\n')`;
  return `${command}${option}${end} <<JSON\n${json.replace(/[\\$`]/g, "\\$&").replace(MARK, read)}\nJSON`;
}

/** `base`: the server's address with a slash at the end. */
export function curl({ path, body: whole }, base, withKey) {
  const key = withKey ? `  -H "Authorization: Bearer $${KEY}" \\\n` : "";
  const { body, pictures } = marked(whole, ({ type }, mark) => ({ type: "image_url", image_url: { url: `data:${type};base64,${mark}` } }));
  return forShell(pretty(body), pictures, `curl -N ${base}${path} \\\n  -H 'Content-Type: application/json' \\\n${key}  `, "--data-binary @-", "");
}

export function python({ path, body: whole }, base, withKey) {
  const { body, pictures } = marked(whole, ({ name, type }) => ({ type: "image_url", image_url: { url: new Code(`picture(${pythonLiteral(name, 0)}, ${pythonLiteral(type, 0)})`) } }));
  const isChat = path.endsWith("chat/completions");
  const known = Object.entries(body).filter(([name]) => OPENAI.includes(name));
  const others = Object.fromEntries(Object.entries(body).filter(([name]) => !OPENAI.includes(name)));
  const lines = known.map(([name, value]) => `    ${name}=${pythonLiteral(value, 1)},`);
  if (Object.keys(others).length) lines.push(`    extra_body=${pythonLiteral(others, 1)},`);
  return [
    ...imports(pictures.length && "import base64", withKey && "import os", pictures.length && "from pathlib import Path"),
    "from openai import OpenAI",
    "",
    ...(pictures.length ? PICTURE : []),
    `client = OpenAI(base_url=${pythonLiteral(base + "v1", 0)}, api_key=${withKey ? `os.environ["${KEY}"]` : '"none"'})`,
    `stream = client.${isChat ? "chat.completions" : "completions"}.create(`,
    ...lines,
    ")",
    "for chunk in stream:",
    "    for choice in chunk.choices:",
    isChat ? '        print(choice.delta.content or "", end="", flush=True)' : '        print(choice.text, end="", flush=True)',
  ].join("\n");
}

/** `place`: host and port of the gRPC server. */
export function grpcurl(request, place, withKey, isSecure) {
  const key = withKey ? ` -H "authorization: Bearer $${KEY}"` : "";
  const plain = isSecure ? "" : " -plaintext";
  const { body, pictures } = marked(request.body, (_, mark) => ({ image: { data: mark } }));
  return forShell(pretty(generateRequest({ body })), pictures, `grpcurl${plain}${key} `, "-d @", ` \\\n  ${place} jaxpaged.v1.Inference/Generate`);
}

export function client(request, place, withKey, isSecure) {
  const { body, pictures } = marked(request.body, ({ name }) => ({ type: "image", image: new Code(`Path(${pythonLiteral(name, 0)})`) }));
  const { messages, text, values } = clientValues({ body });
  const options = [pythonLiteral(place, 0), ...(withKey ? [`api_key=os.environ["${KEY}"]`] : []), ...(isSecure ? [`ca_certificate="ca.pem"`] : [])];
  return [
    ...imports(withKey && "import os", pictures.length && "from pathlib import Path"),
    "from jaxpaged.client import Client",
    "",
    `with Client(${options.join(", ")}) as client:`,
    "    for response in client.generate(",
    `        ${pythonLiteral(messages ?? text, 2)},`,
    ...Object.entries(values).map(([name, value]) => `        ${name}=${pythonLiteral(value, 2)},`),
    "    ):",
    '        print("".join(each.text for each in response.sequences), end="", flush=True)',
  ].join("\n");
}

/** The body as arguments of `jaxpaged.client`. */
function clientValues({ body }) {
  const { messages, prompt, tools, tool_choice, response_format, logprobs, top_logprobs, stop, ...others } = body;
  for (const name of ["stream", "stream_options", "model"]) delete others[name];
  const values = { ...others };
  if (stop) values.stop = stop;
  if (response_format?.type === "json_object") values.structured_outputs = { json_object: true };
  if (response_format?.type === "json_schema") values.structured_outputs = { json: response_format.json_schema.schema };
  if (typeof logprobs === "number") values.logprobs = logprobs;
  if (logprobs === true) values.logprobs = top_logprobs ?? 0;
  if (tools) values.tools = tools;
  if (tool_choice) values.tool_choice = tool_choice;
  return { messages, text: prompt, values };
}

/** The body as the JSON of `GenerateRequest`. */
function generateRequest(request) {
  const { messages, text, values } = clientValues(request);
  const { tools, tool_choice, structured_outputs, ...sampling } = values;
  if (structured_outputs?.json) sampling.structured_outputs = { json: JSON.stringify(structured_outputs.json) };
  else if (structured_outputs) sampling.structured_outputs = structured_outputs;
  if (messages === undefined) return { text, sampling_params: sampling };
  const chat = { messages: messages.map(chatMessage) };
  if (tools) chat.tools = tools.map(({ function: { name, description, parameters } }) => ({ name, description, parameters }));
  if (tool_choice) chat.tool_choice = tool_choice;
  return { chat, sampling_params: sampling };
}

function chatMessage({ role, content, tool_calls, tool_call_id }) {
  const calls = tool_calls?.map((call) => ({ id: call.id, name: call.function.name, arguments: call.function.arguments }));
  if (Array.isArray(content)) return { role, parts: content.map((part) => (part.type === "text" ? { text: part.text } : part)) };
  return { role, content: content ?? undefined, tool_calls: calls, tool_call_id };
}

/** Python that stands where a value does. */
class Code {
  constructor(text) {
    this.text = text;
  }
}

const PICTURE = [
  "",
  "def picture(path, media_type):",
  '    return f"data:{media_type};base64,{base64.b64encode(Path(path).read_bytes()).decode()}"',
  "",
  "",
];

/** Those lines that there are, and a gap after them. */
function imports(...lines) {
  const wanted = lines.filter(Boolean);
  return wanted.length ? [...wanted, ""] : [];
}

const shellQuoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** A value of JSON as Python writes it; long ones on several lines. */
function pythonLiteral(value, depth) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value === "string") return JSON.stringify(value);
  if (typeof value !== "object") return String(value);
  if (value instanceof Code) return value.text;
  const isList = Array.isArray(value);
  const items = isList ? value.map((each) => pythonLiteral(each, depth + 1))
    : Object.entries(value).filter(([, each]) => each !== undefined).map(([name, each]) => `${JSON.stringify(name)}: ${pythonLiteral(each, depth + 1)}`);
  const [open, close] = isList ? ["[", "]"] : ["{", "}"];
  const flat = `${open}${items.join(", ")}${close}`;
  if (flat.length < 90 && !flat.includes("\n")) return flat;
  const indent = "    ".repeat(depth + 1);
  return `${open}\n${items.map((each) => `${indent}${each},\n`).join("")}${"    ".repeat(depth)}${close}`;
}
