/* Elements of the page, made and found. Texts become text nodes, never markup. */

export const at = (id) => document.getElementById(id);

/* Return a new element with properties and children. */
export function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

/* Return a button. Its key tells it again after it was made anew, see `keepingFocus`. */
export function button(name, key, work, properties = {}) {
  const made = element("button", { type: "button", ...properties }, name);
  made.dataset.key = key;
  made.addEventListener("click", work);
  return made;
}

/* Give an element these children, and leave those that are in place untouched: taken out, they would lose the focus. */
export function fill(parent, children) {
  children.forEach((child, i) => {
    const there = parent.children[i];
    if (there === child) return;
    if (there) there.replaceWith(child);
    else parent.append(child);
  });
  while (parent.children.length > children.length) parent.lastChild.remove();
}

/* Make parts of the page anew. A button that has the focus gets it back, or else the message's box does. */
export function keepingFocus(draw) {
  const before = document.activeElement;
  const key = before?.dataset.key;
  draw();
  if (!key || before.isConnected) return;
  const again = [...document.querySelectorAll("[data-key]")].find((made) => made.dataset.key === key && !made.disabled);
  (again ?? at("text")).focus({ preventScroll: true });
}

/* Put a field in place of an element, until Enter or Escape ends it. Then `save` gets the text, empty after Escape. */
export function edit(shown, text, label, save) {
  const field = element("textarea", { value: text, rows: Math.min(10, text.split("\n").length), ariaLabel: label });
  const form = element("form", { className: "edit" }, field, element("button", {}, "Save"));
  const end = (changed) => {
    form.replaceWith(shown);
    at("text").focus();
    save(changed);
  };
  form.append(button("Cancel", "cancel", () => end("")));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    end(field.value.trim());
  });
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !event.isComposing) end("");
    submitOnEnter(event, form);
  });
  shown.replaceWith(form);
  field.focus();
}

/* Send a form by Enter, unless Shift is held, or the key ends a word of an input method. */
export function submitOnEnter(event, form) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
}
