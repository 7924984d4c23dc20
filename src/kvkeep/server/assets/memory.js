/* What the memory of an answer holds: a bar as long as the budget, and the tokens. */

import { remember, storage } from "./conversations.js";
import { at, element } from "./elements.js";
import { visible } from "./markdown.js";

const LAST = "kvkeep:memory";
const MOST_TOKENS = 4000; // that the page lists
const MOST_KEPT = 16;
const session = storage("sessionStorage");
const memories = restored(); // by the id of the answer

function restored() {
  try {
    return new Map(JSON.parse(session.getItem(LAST)));
  } catch {
    return new Map();
  }
}

/* Keep the memory of an answer. That of the last one is there after the page was loaded again. */
export function keepMemory(id, memory) {
  memories.set(id, memory);
  if (memories.size > MOST_KEPT) memories.delete(memories.keys().next().value);
  remember(session, LAST, JSON.stringify([[id, memory]]));
}

/* Show the memory after the last answer of a branch, beside that of the answer before. */
export function showMemory(branch) {
  const known = branch.filter(({ id }) => memories.has(id)).slice(-2);
  const [before, now] = known.length === 2 ? known : [null, known[0]];
  at("legend").hidden = !now;
  if (!now) return clear();
  const memory = memories.get(now.id);
  const positions = new Map(memory.positions.map((position, i) => [position, [memory.texts[i], memory.shares[i]]]));
  for (const [position, text] of dropped(memories.get(before?.id), positions)) positions.set(position, [text, 0]);
  const listed = [...positions.keys()].sort((one, other) => one - other);
  const tokens = listed.slice(-MOST_TOKENS).map((position) => token(position, ...positions.get(position), memory.pins));
  if (listed.length > tokens.length) tokens.unshift(`… ${listed.length - tokens.length} earlier tokens … `);
  at("held").replaceChildren(...tokens);
  sizes(memory);
}

function clear() {
  at("held").replaceChildren();
  at("full").style.width = at("pins").style.width = 0;
  at("sizes").textContent = "The next answer shows what its memory holds.";
  at("bar").setAttribute("aria-label", "Nothing is held yet");
}

/* Return the tokens, by position, that the memory before has held and that are gone. */
function dropped(before, positions) {
  if (!before) return [];
  const all = before.positions.map((position, i) => [position, before.texts[i]]);
  return all.filter(([position]) => !positions.has(position));
}

function token(position, text, share, pins) {
  const pinned = pins.some(([start, stop]) => start <= position && position < stop);
  const percent = Math.round(100 * share);
  const title = `position ${position}, ${share ? `held by ${percent} % of the heads` : "dropped"}`;
  const span = element("span", { title, className: share ? (pinned ? "pinned" : "") : "gone" }, visible(text));
  span.style.setProperty("--share", `${percent}%`);
  return span;
}

function sizes({ budget, seen_tokens: seen, pins, bytes, policy }) {
  const slots = Math.min(budget, seen);
  const pinned = pins.reduce((sum, [start, stop]) => sum + stop - start, 0);
  at("full").style.width = `${(100 * slots) / budget}%`;
  at("pins").style.width = `${Math.min(100, (100 * pinned) / budget)}%`;
  const text = `${slots} of ${budget} slots per head hold a conversation of ${seen} tokens. ${size(bytes)}, ${policy}.`;
  at("sizes").textContent = text;
  at("bar").setAttribute("aria-label", text);
}

/* Return a number of bytes as a person reads it, such as 3.5 MiB. */
export function size(bytes) {
  const power = Math.min(4, Math.floor(Math.log2(Math.max(1, bytes)) / 10));
  const number = bytes / 1024 ** power;
  return `${number.toFixed(power && number < 100 ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}
