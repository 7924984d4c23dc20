/* The text of a model as elements of the page.

It may hold anything, so it passes three gates: raw HTML is shown as text, DOMPurify lets no more than the tags below
through, and the Content-Security-Policy runs no script and loads nothing from elsewhere. */

import { element } from "./elements.js";

const TAGS = "p br hr h3 h4 h5 h6 em strong del a code pre blockquote ul ol li table thead tbody tr th td";
const SAFE = {
  ALLOWED_TAGS: TAGS.split(" "),
  ALLOWED_ATTR: ["href", "start", "align"],
  ADD_URI_SAFE_ATTR: ["start", "align"], // their values are no addresses
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i, // no javascript:, and no routes of this server
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const LONGEST = 200_000; // characters that are parsed; more would hold the page up
// characters of control, and those that turn the direction of what follows
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

const escaped = (text) => text.replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);

const parser = new window.marked.Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escaped(text),
    image: ({ text, href }) => escaped(`[${text || "image"}: ${href}]`), // a request for it could tell others the chat
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    heading({ tokens, depth }) {
      const level = Math.min(6, depth + 2); // below those of the page
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>`;
    },
  },
});

/* Return a text with a sign in place of each character that could disguise it. */
export const visible = (text) => text.replace(UNSEEN, "\ufffd");

/* Return a text in markdown as a fragment of the page. */
export function rendered(text) {
  let fragment;
  try {
    if (text.length > LONGEST) throw new RangeError("too long");
    fragment = window.DOMPurify.sanitize(parser.parse(visible(text)), SAFE);
  } catch {
    return plain(text); // also what is nested too deeply for the parser
  }
  for (const link of fragment.querySelectorAll("a")) {
    Object.assign(link, { target: "_blank", rel: "noopener noreferrer nofollow", title: link.href });
  }
  fragment.querySelectorAll("table").forEach(scrolling);
  fragment.querySelectorAll("pre").forEach(withCopy);
  return fragment;
}

/* Return a text as it is. */
export const plain = (text) => element("p", { className: "plain" }, visible(text));

/* Put a table or a block of code into a box that scrolls sideways, also by the keyboard. */
function scrolling(content) {
  const box = element("div", { className: "wide", tabIndex: 0 });
  content.replaceWith(box);
  box.append(content);
  return box;
}

function withCopy(block) {
  const button = element("button", { type: "button", ariaLabel: "Copy the code" }, "Copy");
  button.addEventListener("click", () => copy(block.textContent, button));
  const box = scrolling(block);
  const frame = element("div", { className: "code" });
  box.replaceWith(frame);
  frame.append(box, button);
}

/* Copy a text, and say so on the button for a moment. */
export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copyByHand(text); // without HTTPS, beyond localhost, there is no clipboard
  }
  const name = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = name), 1500);
}

function copyByHand(text) {
  const field = element("textarea", { value: text });
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}
