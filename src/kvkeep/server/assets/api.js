/* Requests to the server, and its failures in plain words. */

import { remember, storage } from "./conversations.js";

const KEY = "kvkeep:key";
const LOST = "The connection to the server was lost. See whether it still runs, and try again.";
const ADVICE = {
  401: "Enter a key that it knows.",
  429: "It is busy: try again in a moment.",
  503: "It takes no requests now: try again once it has started again.",
};
const session = storage("sessionStorage"); // the key goes with the tab
let key = session.getItem(KEY) ?? "";

export class Failure extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export const hasKey = () => key !== "";

export function useKey(given) {
  key = given.trim();
  remember(session, KEY, key);
}

/* Ask the server, with a body by POST, and return its answer. */
export async function call(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  const method = body ? "POST" : "GET";
  const answer = await reached(fetch(path, { method, headers, signal, body: body && JSON.stringify(body) }));
  if (answer.ok) return answer;
  throw new Failure(await reason(answer), answer.status);
}

/* Yield the objects of a chat's answer while it is written. */
export async function* chat(body, signal) {
  const answer = await call("/v1/chat/completions", body, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reached(reader.read());
    if (done) throw new Failure(LOST);
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (event === "data: [DONE]") return;
      if (event.startsWith("data: {")) yield whole(JSON.parse(event.slice(6)));
    }
  }
}

/* Fail if an event of a stream says that the answer has failed: its status was sent long before. */
function whole(event) {
  if (event.error) throw new Failure(event.error.message);
  return event;
}

/* Await the network. It fails with a TypeError whose text differs from browser to browser. */
async function reached(waiting) {
  try {
    return await waiting;
  } catch (error) {
    throw error.name === "AbortError" ? error : new Failure(LOST);
  }
}

async function reason(answer) {
  let message = `The server answered ${answer.status}.`;
  try {
    message = (await answer.json()).error.message || message;
  } catch {} // a proxy's page, for example
  return [message, ADVICE[answer.status]].filter(Boolean).join(" ");
}
