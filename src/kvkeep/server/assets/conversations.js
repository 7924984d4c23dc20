/* Conversations in the browser's storage.

The server needs none of this: it is sent a whole conversation each time, and knows its memory again by the tokens.
A conversation is a tree of messages. What was edited or written again stands beside what was there before, under the
same parent, and `leaf` says which branch is open. */

const PREFIX = "kvkeep:conversation:";
const LONGEST_NAME = 40;

/* Return a storage of the browser. One that is switched off forgets all. */
export function storage(name) {
  try {
    if (window[name]) return window[name];
  } catch {} // browsers that block it throw here
  return { length: 0, key: () => null, getItem: () => null, setItem() {}, removeItem() {} };
}

/* Store a text that can be done without. */
export function remember(where, key, text) {
  try {
    where.setItem(key, text);
  } catch {} // the storage is full
}

const local = storage("localStorage");

// crypto.randomUUID exists on pages with HTTPS and on localhost alone
const newId = () => Date.now().toString(36) + Math.random().toString(36).slice(2, 10);

export const isConversation = (key) => key === null || key.startsWith(PREFIX);

/* Return all conversations, the one that was used last first. */
export function stored() {
  const keys = Array.from({ length: local.length }, (_, i) => local.key(i));
  const found = keys.filter((key) => key?.startsWith(PREFIX)).map(read);
  return found.filter(Boolean).sort((one, other) => other.used - one.used);
}

/* Return a stored conversation; null if something else is stored there. */
function read(key) {
  try {
    const found = JSON.parse(local.getItem(key));
    const texts = Object.values(found.messages).every((message) => typeof message.text === "string");
    found.settings ??= {};
    return PREFIX + found.id === key && typeof found.name === "string" && texts ? found : null;
  } catch {
    return null;
  }
}

/* Store a conversation, with the messages that another tab has added to it. Throw if the browser has no room. */
export function save(conversation) {
  const there = read(PREFIX + conversation.id);
  conversation.messages = { ...there?.messages, ...conversation.messages };
  conversation.used = Date.now();
  local.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
}

export const remove = (conversation) => local.removeItem(PREFIX + conversation.id);

export const begin = (text, settings) => ({ id: newId(), name: nameOf(text), settings, leaf: null, messages: {} });

/* Return the first words of a message. */
function nameOf(text) {
  const line = text.trim().replace(/\s+/g, " ");
  if (line.length <= LONGEST_NAME) return line;
  const cut = line.slice(0, LONGEST_NAME + 1);
  const words = cut.slice(0, cut.lastIndexOf(" "));
  return `${words || cut.slice(0, LONGEST_NAME)}…`;
}

/* Add a message under another one, and open its branch. */
export function add(conversation, parent, role, text) {
  const message = { id: newId(), parent, role, text };
  conversation.messages[message.id] = message;
  conversation.leaf = message.id;
  return message;
}

/* Return the messages of the open branch, the first one first. */
export function branch({ messages, leaf }) {
  const found = [];
  for (let message = messages[leaf]; message && !found.includes(message); message = messages[message.parent]) {
    found.push(message);
  }
  return found.reverse();
}

export const versions = ({ messages }, { parent }) => Object.values(messages).filter((other) => other.parent === parent);

/* Open the branch of a message, at its newest end. */
export function open(conversation, message) {
  const [next] = versions(conversation, { parent: message.id }).slice(-1);
  if (next) open(conversation, next);
  else conversation.leaf = message.id;
}

/* Return the open branch as the API takes it, and the indexes of pinned messages.

Two messages of the user follow each other after an answer that failed: they become one, since many chat templates
want the roles to alternate. */
export function asked(conversation, system) {
  const messages = system ? [{ role: "system", content: system }] : [];
  const pinned = new Set();
  for (const { role, text, pinned: keep } of branch(conversation)) {
    if (!text) continue;
    const last = messages.at(-1);
    if (last?.role === role) last.content += `\n\n${text}`;
    else messages.push({ role, content: text });
    if (keep) pinned.add(messages.length - 1);
  }
  return { messages, pinned: [...pinned] };
}
