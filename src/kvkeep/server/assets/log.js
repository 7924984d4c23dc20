/* The messages of a conversation as elements of the page. */

import { button, edit, element } from "./elements.js";
import { copy, plain, rendered } from "./markdown.js";

/* Return a message.

state: the `versions` that stand beside it, itself among them; whether an answer is being written (`busy`), so that no
  other may begin; and whether this is the one (`writing`).
act: what its buttons do: `ask` an edited message, `again`, `pin` and `show` another version. */
export function article(message, state, act) {
  const mine = message.role === "user";
  const content = mine ? plain(message.text) : rendered(message.text);
  const text = element("div", { className: "text", dir: "auto" }, content);
  const made = element("article", { className: message.role, id: `message-${message.id}` });
  made.append(element("h2", {}, mine ? "You" : "Model"), text);
  if (state.writing) return made;
  if (message.failure) made.append(element("p", { className: "wrong" }, message.failure));
  if (message.tokens) made.append(element("p", { className: "hint" }, figures(message)));
  made.append(tools(message, state, act, text));
  return made;
}

function tools(message, { versions, busy }, act, text) {
  const { id, role, failure, pinned = false } = message;
  const copying = (event) => copy(message.text, event.target);
  const editing = () => edit(text, message.text, "Message", (changed) => act.ask(changed, message.parent));
  const pin = { ariaPressed: String(pinned), title: "A pinned message is never evicted" };
  const made = element("div", { className: "tools" });
  if (message.text) made.append(button("Copy", `${id}:copy`, copying));
  if (role === "user") made.append(button("Edit", `${id}:edit`, editing, { disabled: busy }));
  else made.append(button(failure ? "Try again" : "Regenerate", `${id}:again`, () => act.again(message), { disabled: busy }));
  if (message.text) made.append(button(pinned ? "Unpin" : "Pin", `${id}:pin`, () => act.pin(message), pin));
  if (versions.length > 1) made.append(...turning(message, versions, busy, act));
  return made;
}

/* Return the buttons that lead to the versions beside a message. */
function turning(message, versions, busy, act) {
  const i = versions.indexOf(message);
  const turn = (sign, ariaLabel, target) =>
    button(sign, `${ariaLabel} ${message.parent}`, () => act.show(target), { ariaLabel, disabled: busy || !target });
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
