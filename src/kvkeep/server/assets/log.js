/* The messages of a conversation as elements of the page. */

import { button, edit, element } from "./elements.js";
import { copy, plain, rendered } from "./markdown.js";

const WAITS = { className: "waits" }; // buttons that are off while an answer is written

const drawn = new WeakMap(); // message → its element, and all that this shows

/* Return the element of a message. One that has not changed is not made anew: long conversations stay quick.

versions: those that stand beside it, itself among them.
writing: whether it is the answer that is being written.
act: what its buttons do: `ask` an edited message, `again`, `pin` and `show` another version. */
export function article(message, versions, writing, act) {
  const shows = JSON.stringify([message, versions.map(({ id }) => id), writing]);
  if (drawn.get(message)?.shows !== shows) drawn.set(message, { shows, made: draw(message, versions, writing, act) });
  return drawn.get(message).made;
}

function draw(message, versions, writing, act) {
  const mine = message.role === "user";
  const content = mine ? plain(message.text) : rendered(message.text);
  const text = element("div", { className: "text", dir: "auto" }, content);
  const made = element("article", { className: message.role, id: `message-${message.id}` });
  made.append(element("h2", {}, mine ? "You" : "Model"), text);
  if (writing) return made;
  if (message.failure) made.append(element("p", { className: "wrong" }, message.failure));
  if (message.tokens) made.append(element("p", { className: "hint" }, figures(message)));
  made.append(tools(message, versions, act, text));
  return made;
}

function tools(message, versions, act, text) {
  const { id, role, failure, pinned = false } = message;
  const copying = (event) => copy(message.text, event.target);
  const editing = () => edit(text, message.text, "Message", (changed) => act.ask(changed, message.parent));
  const pin = { ariaPressed: String(pinned), title: "A pinned message is never evicted" };
  const made = element("div", { className: "tools" });
  if (message.text) made.append(button("Copy", `${id}:copy`, copying));
  if (role === "user") made.append(button("Edit", `${id}:edit`, editing, WAITS));
  else made.append(button(failure ? "Try again" : "Regenerate", `${id}:again`, () => act.again(message), WAITS));
  if (message.text) made.append(button(pinned ? "Unpin" : "Pin", `${id}:pin`, () => act.pin(message), pin));
  if (versions.length > 1) made.append(...turning(message, versions, act));
  return made;
}

/* Return the buttons that lead to the versions beside a message. */
function turning(message, versions, act) {
  const i = versions.indexOf(message);
  const turn = (sign, ariaLabel, target) =>
    button(sign, `${ariaLabel} ${message.parent}`, () => act.show(target), {
      ariaLabel,
      ...(target ? WAITS : { disabled: true }),
    });
  const place = element("span", {}, `${i + 1}/${versions.length}`);
  return [turn("‹", "Earlier version", versions[i - 1]), place, turn("›", "Later version", versions[i + 1])];
}

/* Return how fast an answer was, and how much of its prompt was not read again. */
function figures({ tokens, seconds, ttft, prompt, cached, ended }) {
  const parts = [`${tokens} token${tokens === 1 ? "" : "s"}`];
  if (tokens > 1 && seconds > ttft) parts.push(`${((tokens - 1) / (seconds - ttft)).toFixed(1)} tokens/s`);
  if (ttft !== undefined) parts.push(`first token after ${ttft.toFixed(2)} s`);
  if (cached !== undefined) parts.push(`${cached} of ${prompt} prompt tokens cached`);
  if (ended === "length") parts.push("ended at the limit of tokens");
  if (ended === "stopped") parts.push("stopped");
  return parts.join(" · ");
}
