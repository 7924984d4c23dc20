/* The chat page: what is open, what its buttons do, and one answer at a time. */

import { call, chat, hasKey, useKey } from "./api.js";
import * as store from "./conversations.js";
import { at, button, edit, element, fill, keepingFocus, submitOnEnter } from "./elements.js";
import { article } from "./log.js";
import { rendered, visible } from "./markdown.js";
import { keepMemory, showMemory } from "./memory.js";

const DEFAULTS = "kvkeep:settings";
const THEME = "kvkeep:theme";
const NUMBERS = ["temperature", "max_tokens", "budget"];
const LEFT = "The page was left while this was written.";
const local = store.storage("localStorage");

let current = null; // the conversation that is open; null: a new one
let running = null; // {conversation, said, stopping} of the answer that is being written
let served = null; // the model, as /v1/models describes it
let defaults = storedSettings(); // settings of new conversations
let leaving = false;
let frame = 0; // the animation frame that draws what has come of the answer

// What is said below the messages.

function tell(text, wrong = false, ...more) {
  at("said").classList.toggle("wrong", wrong);
  at("said").replaceChildren(visible(text), ...more);
}

function keep(conversation) {
  try {
    store.save(conversation);
  } catch {
    tell("The browser has no room to store this conversation. Delete others that are not needed.", true);
  }
}

// Drawing.

/* Draw all that may have changed. */
function draw(toEnd = false) {
  const end = toEnd || atEnd();
  const { scrollTop } = at("log");
  keepingFocus(() => {
    if (!at("list").querySelector(".edit")) drawList(); // a name that is being edited stays
    drawLog();
  });
  at("log").scrollTop = end ? at("log").scrollHeight : scrollTop;
  at("send").hidden = running !== null;
  at("stop").hidden = running === null;
  document.title = current ? `${visible(current.name)} – kvkeep` : "kvkeep";
}

/* Return whether the end of the messages is seen. Else somebody reads further up, and should not be moved. */
function atEnd() {
  const { scrollHeight, scrollTop, clientHeight } = at("log");
  return scrollHeight - scrollTop - clientHeight < 60;
}

function drawList() {
  const all = store.stored();
  if (current && !all.some(({ id }) => id === current.id)) all.unshift(current); // there was no room to store it
  at("list").replaceChildren(...all.map(listed));
}

function listed(conversation) {
  const { id, name } = conversation;
  const shown = element("div", { className: "conversation" });
  const rename = () => edit(shown, name, "Name of the conversation", (text) => change(conversation, text ? { name: text } : {}));
  const opens = button(visible(name), `${id}:open`, () => show(conversation), { dir: "auto" });
  if (id === current?.id) opens.ariaCurrent = "true";
  const also = { title: `Rename ${name}`, ariaLabel: `Rename ${name}` };
  const off = { title: `Delete ${name}`, ariaLabel: `Delete ${name}` };
  shown.append(opens, button("✎", `${id}:rename`, rename, also), button("✕", `${id}:delete`, () => forget(conversation), off));
  return element("li", {}, shown);
}

function drawLog() {
  const messages = current ? store.branch(current) : [];
  const act = { ask: (text, parent) => (text ? ask(text, parent) : draw()), again, pin, show: showVersion };
  const drawn = messages.map((message) =>
    article(message, store.versions(current, message), running?.said === message, act),
  );
  if (!drawn.length) drawn.push(element("p", { className: "hint" }, "Write the first message below."));
  fill(at("log"), drawn);
  for (const waits of at("log").querySelectorAll(".waits")) waits.disabled = running !== null;
  at("log").ariaBusy = String(running !== null);
  showMemory(messages);
}

/* Draw what has come of an answer, once for each frame of the screen at most. */
function drawSoon(said) {
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    const text = at(`message-${said.id}`)?.querySelector(".text");
    if (!text || running?.said !== said) return;
    const end = atEnd();
    text.replaceChildren(rendered(said.text));
    if (end) at("log").scrollTop = at("log").scrollHeight;
  });
}

// Conversations.

/* Return the conversation that the page works on, if that is the one that a stored one is a copy of. */
function live(conversation) {
  return [running?.conversation, current].find((other) => other && other.id === conversation?.id) ?? conversation;
}

function show(conversation) {
  current = live(conversation);
  openSide(false);
  tell("");
  draw(true);
  at("text").focus();
}

function change(conversation, fields) {
  const target = live(conversation);
  Object.assign(target, fields);
  keep(target);
  draw();
}

function forget(conversation) {
  if (running?.conversation.id === conversation.id) running.stopping.abort();
  store.remove(conversation);
  if (current?.id === conversation.id) current = null;
  const undo = () => {
    keep(conversation);
    show(conversation);
  };
  draw();
  tell(`“${conversation.name}” is deleted. `, false, button("Undo", "undo", undo));
}

function pin(message) {
  message.pinned = !message.pinned;
  change(current, {});
}

function showVersion(message) {
  store.open(current, message);
  change(current, {});
}

// Answers.

/* Ask a message under another one. Beside a message that was asked there before, it is a fork. */
async function ask(text, parent) {
  if (running) return;
  current ??= store.begin(text, defaults);
  const message = store.add(current, parent, "user", text);
  await answer(current, store.add(current, message.id, "assistant", ""));
}

/* Write an answer again: beside the other one, or in its place if that has no text. */
async function again(message) {
  if (!message.text) return answer(current, message);
  await answer(current, store.add(current, message.parent, "assistant", ""));
}

async function answer(conversation, said) {
  running = { conversation, said, stopping: new AbortController() };
  Object.assign(said, { failure: LEFT, text: "" });
  keep(conversation);
  tell("The model reads…");
  draw(true);
  try {
    await write(conversation, said, running.stopping.signal);
    delete said.failure;
    tell("");
  } catch (error) {
    fail(said, error);
  }
  running = null;
  if (current?.id === conversation.id || store.stored().some(({ id }) => id === conversation.id)) keep(conversation);
  draw();
  at("spoken").replaceChildren(rendered(said.text).textContent);
}

function fail(said, error) {
  tell("");
  if (error.name === "AbortError") {
    delete said.failure;
    said.ended = "stopped";
    if (!said.text) said.failure = "Stopped before the first token.";
  } else {
    said.failure = leaving ? LEFT : visible(error.message); // a browser ends connections while it leaves
    if (error.status === 401) showEntry(error);
  }
}

/* Send a conversation, and take its answer as it comes. */
async function write(conversation, said, signal) {
  const began = performance.now();
  const body = bodyOf(conversation);
  for (const name of ["tokens", "seconds", "ttft", "prompt", "cached", "ended"]) delete said[name];
  let memory = null;
  for await (const { choices, usage, memory: held } of chat(body, signal)) {
    const seconds = (performance.now() - began) / 1000;
    const [choice] = choices;
    if (choice?.delta.content) {
      if (!said.text) tell("");
      said.ttft ??= seconds;
      said.text += choice.delta.content;
      drawSoon(said);
    }
    if (choice?.finish_reason) said.ended = choice.finish_reason;
    if (usage && choice) Object.assign(said, { tokens: usage.completion_tokens, prompt: usage.prompt_tokens, seconds });
    if (held?.[0]) memory = held[0];
    if (usage?.kvkeep) {
      said.cached = usage.prompt_tokens_details.cached_tokens;
      const policy = body.policy ?? served.kvkeep.policy;
      if (memory) keepMemory(said.id, { ...memory, bytes: usage.kvkeep.kv_bytes, policy });
    }
  }
}

function bodyOf(conversation) {
  const { system, ...settings } = conversation.settings;
  const { messages, pinned } = store.asked(conversation, system);
  const given = Object.entries(settings).filter(([, value]) => value);
  const options = Object.fromEntries(given.map(([name, value]) => [name, NUMBERS.includes(name) ? Number(value) : value]));
  const stream = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  return { ...options, messages, ...(pinned.length && { pin_messages: pinned }), ...stream, return_memory: true };
}

// Settings: those of the open conversation, and of new ones.

function storedSettings() {
  try {
    return { ...JSON.parse(local.getItem(DEFAULTS)) };
  } catch {
    return {};
  }
}

function openSettings() {
  const settings = current?.settings ?? defaults;
  for (const field of at("choices").elements) if (field.name) field.value = settings[field.name] ?? "";
  at("settings").showModal();
}

function takeSettings(event) {
  event.preventDefault(); // the Content-Security-Policy lets no form go anywhere
  defaults = Object.fromEntries([...new FormData(at("choices"))].filter(([, value]) => value.trim()));
  store.remember(local, DEFAULTS, JSON.stringify(defaults));
  if (current) change(current, { settings: defaults });
  at("settings").close();
}

function useTheme(name) {
  const dark = name ? name === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.style.colorScheme = name ?? "";
  at("theme").textContent = dark ? "Light" : "Dark";
  at("theme").dataset.next = dark ? "light" : "dark";
}

// The beginning: what the server runs, and the key if it asks for one.

async function connect() {
  const { data } = await (await call("/v1/models")).json();
  served = data[0];
  const { id, kvkeep } = served;
  at("model").textContent = visible(id.split(/[\\/]/).filter(Boolean).pop() ?? id);
  at("model").title = id;
  const { model, policy, budget } = at("choices");
  model.replaceChildren(...data.map((card, i) => new Option(card.id, i ? card.id : "")));
  at("models").hidden = data.length < 2;
  Object.assign(policy, { placeholder: kvkeep.policy });
  Object.assign(budget, { placeholder: kvkeep.budget, max: kvkeep.budget });
  at("policies").replaceChildren(...kvkeep.policies.map((name) => new Option(name, name)));
  at("entry").hidden = true;
  at("frame").hidden = false;
  draw();
  at("text").focus();
}

async function enter() {
  try {
    await connect();
  } catch (error) {
    showEntry(error);
  }
}

/* Show what keeps the page from the server, with a field for the key if that is the reason. */
function showEntry({ message, status }) {
  const asks = status === 401;
  const first = "This server asks for an API key. It is kept in this tab alone.";
  at("entry").hidden = false;
  at("entry-said").textContent = asks && !hasKey() ? first : message;
  at("key").parentElement.hidden = !asks;
  at("connect").textContent = asks ? "Connect" : "Try again";
  at(asks ? "key" : "connect").focus();
}

function openSide(on) {
  at("side").classList.toggle("open", on);
  at("menu").ariaExpanded = String(on);
}

function escape(event) {
  if (event.key !== "Escape" || event.isComposing || event.target.closest("dialog, .edit")) return;
  running?.stopping.abort();
  openSide(false);
}

at("entry").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!at("key").parentElement.hidden) useKey(at("key").value);
  enter();
});
at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("text").value.trim();
  if (!text || running) return;
  at("text").value = "";
  ask(text, current?.leaf ?? null);
});
at("text").addEventListener("keydown", (event) => submitOnEnter(event, at("ask")));
at("stop").addEventListener("click", () => {
  running?.stopping.abort();
  at("text").focus();
});
at("new").addEventListener("click", () => show(null));
at("menu").addEventListener("click", () => openSide(at("menu").ariaExpanded !== "true"));
at("theme").addEventListener("click", () => {
  store.remember(local, THEME, at("theme").dataset.next);
  useTheme(at("theme").dataset.next);
});
at("open-settings").addEventListener("click", openSettings);
at("choices").addEventListener("submit", takeSettings);
addEventListener("keydown", escape);
addEventListener("pagehide", () => {
  leaving = true;
  if (running) keep(running.conversation);
});
addEventListener("pageshow", () => (leaving = false));
addEventListener("storage", ({ key: changed }) => !running && store.isConversation(changed) && reread(changed));

/* Show what another tab has stored, under a key, or in all of them. */
function reread(changed) {
  const mine = changed === null || (current && changed.endsWith(current.id));
  if (current && mine) current = store.stored().find(({ id }) => id === current.id) ?? null;
  draw();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => useTheme(local.getItem(THEME)));
useTheme(local.getItem(THEME));
enter();
