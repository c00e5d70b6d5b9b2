// Where the page begins: its parts, the theme, the key, and the dialog with code.

import { ApiError, addressOf, ask, hasKey, onKeyNeeded, useKey } from "./api.js";
import { forgetColors } from "./colors.js";
import { $, chosen, make } from "./dom.js";
import { Engine } from "./engine.js";
import { Playground, copyText } from "./playground.js";
import * as snippets from "./snippets.js";

const THEME = "jaxpaged-theme";
const GRPC_PORT = 50051;
const RETRY = 2000;

const playground = new Playground();
const engine = new Engine((words) => playground.setProgress(words));
let info = null;

// ---- the server

async function connect() {
  let models;
  try {
    info = await ask("engine/info");
    models = (await ask("v1/models")).data;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status !== 401) setTimeout(connect, RETRY);
    return;
  }
  $("model").textContent = info.models[0];
  offer(models.map((each) => each.id));
  document.title = `${info.models[0]} – jaxpaged`;
  playground.setInfo(info);
  $("key-open").hidden = !hasKey();
}

/** The names that requests may have, those of adapters too: to choose from where there are several. */
function offer(names) {
  const before = $("models").value;
  $("models").replaceChildren(...names.map((name) => make("option", { value: name }, name)));
  if (names.includes(before)) $("models").value = before;
  $("models").hidden = names.length < 2;
  $("model").hidden = !$("models").hidden;
}

onKeyNeeded((wasWrong) => {
  $("key-open").hidden = false;
  if ($("key").open) return;
  $("key-note").textContent = wasWrong ? "The server does not know this key. Try another one." : "This server answers only to those who show a key. Ask whoever runs it.";
  $("key-note").classList.toggle("problem", wasWrong);
  $("key").showModal();
});

$("key-open").addEventListener("click", () => $("key").showModal());
$("key").querySelector("form").addEventListener("submit", () => {
  useKey($("key-value").value);
  $("key-value").value = "";
  connect();
  engine.watch();
});
for (const button of document.querySelectorAll("[data-close]")) button.addEventListener("click", () => button.closest("dialog").close());

// ---- what is looked at, on narrow screens

for (const button of document.querySelectorAll("#show button")) {
  button.addEventListener("click", () => {
    document.body.dataset.show = button.dataset.show;
    for (const each of document.querySelectorAll("#show button")) each.setAttribute("aria-pressed", each === button);
    engine.watch();
  });
}

// ---- light and dark

const dark = matchMedia("(prefers-color-scheme: dark)");

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  const isDark = theme ? theme === "dark" : dark.matches;
  $("theme").textContent = isDark ? "Light" : "Dark";
  $("theme").setAttribute("aria-label", isDark ? "Light colours" : "Dark colours");
  forgetColors();
}

function stored() {
  try {
    return localStorage.getItem(THEME);
  } catch {
    return null;
  }
}

$("theme").addEventListener("click", () => {
  const isDark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : dark.matches;
  const theme = isDark ? "light" : "dark";
  try {
    localStorage.setItem(THEME, theme);
  } catch {
    // It holds for this page only.
  }
  setTheme(theme);
});
dark.addEventListener("change", () => setTheme(stored()));
setTheme(stored());

// ---- the request as code

function showCode() {
  let request;
  try {
    request = playground.draft();
  } catch (error) {
    $("snippet").textContent = "";
    $("code-note").textContent = error.message;
    return;
  }
  const language = chosen("language");
  const base = addressOf("."), isSecure = location.protocol === "https:";
  const place = `${location.hostname}:${info?.grpc_port ?? GRPC_PORT}`;
  const overHttp = language === "curl" || language === "python";
  $("snippet").textContent = overHttp ? snippets[language](request, base, hasKey()) : snippets[language](request, place, hasKey(), isSecure);
  const needs = { curl: "", python: "Needs pip install openai.", grpcurl: "", client: "Needs pip install -e '.[grpc]' in jaxpaged's source." }[language];
  const off = overHttp || info?.grpc_port ? "" : `This server has no gRPC: start it with --grpc-port ${GRPC_PORT}.`;
  const files = snippets.filesOf(request);
  const reads = files.length ? `Run it where ${files.join(", ")} ${files.length > 1 ? "are" : "is"}.` : "";
  $("code-note").textContent = [off, needs, reads].filter(Boolean).join(" ");
}

$("code-open").addEventListener("click", () => {
  showCode();
  $("code").showModal();
});
$("language").addEventListener("change", showCode);
$("copy").addEventListener("click", async () => {
  const done = await copyText($("snippet").textContent);
  if (!done) getSelection().selectAllChildren($("snippet"));
  $("copy").textContent = done ? "Copied" : "Selected: press Ctrl+C";
  setTimeout(() => ($("copy").textContent = "Copy"), 2000);
});

// ---- the description of the API, which needs the key that a link cannot show

document.addEventListener("click", async (event) => {
  const link = event.target.closest('a[href="openapi.json"]');
  if (!link || !hasKey()) return;
  event.preventDefault();
  const text = JSON.stringify(await ask("openapi.json"), null, 2);
  open(URL.createObjectURL(new Blob([text], { type: "application/json" })));
});

connect();
engine.watch();
