/* A text as tokens: shaded, walked through with the arrow keys, picked with Enter or a click.

   new kvkeep.TokenText(element, {label, onPick})    element becomes a listbox; onPick(position) is called for a token
     .set(tokens)              list of strings; .append(token) adds one
     .shade(share)             share[i] in 0 … 1 is the share of heads that hold token i; below 0: not read yet
     .mark(kind, positions)    underline tokens; kind is "kept", "missed" or "answer"
     .pick(position)           select a token without a call of onPick; -1 selects none
   kvkeep.visible(text)        the text with control characters made visible
*/
"use strict";
(function (kvkeep) {
  const BIDI = /[\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069]/g;
  const CONTROL = /[\u0000-\u0008\u000b-\u001f]/g;
  const OTHER = /[\u007f-\u009f\u200b\u2028\u2029\ufeff]/g;
  const SURROGATE = /[\ud800-\udfff]/gu;
  const code = (letter) => "\u27e8" + letter.codePointAt(0).toString(16).toUpperCase().padStart(4, "0") + "\u27e9";

  kvkeep.visible = function (text) {
    return text
      .replace(/\r\n/g, "\n")
      .replace(/\r/g, "\u2190") // an arrow, since few fonts have more than a box for a carriage return
      .replace(CONTROL, (letter) => String.fromCharCode(0x2400 + letter.charCodeAt(0)))
      .replace(OTHER, code)
      .replace(BIDI, code)
      .replace(SURROGATE, "\ufffd");
  };

  /* A token in a sentence: without line breaks, quoted. */
  kvkeep.quoted = function (text) {
    const shown = kvkeep.visible(text).replace(/\n/g, "\u21b5").replace(/\t/g, "\u21e5");
    return text === "" ? "(part of a character)" : "\u201c" + shown + "\u201d";
  };

  const classOf = (share) => {
    if (share < 0) return "later";
    if (share === 0) return "gone";
    return "level-" + Math.max(1, Math.round(share * 10));
  };

  const described = (shade) => {
    const words = { "": "", later: "not read yet", gone: "no head holds it", "level-10": "held by all heads, or nearly all" };
    return words[shade] ?? `held by about ${shade.slice("level-".length)}0\u00a0% of heads`;
  };

  class TokenText {
    constructor(element, { label, onPick }) {
      this.element = element;
      this.onPick = onPick;
      this.spans = [];
      this.shades = [];
      this.marked = new Map();
      this.active = -1;
      this.picked = -1;
      this.prefix = "t" + ++TokenText.count + "-";
      element.classList.add("tokens");
      element.setAttribute("role", "listbox");
      element.setAttribute("aria-label", label);
      element.setAttribute("dir", "auto");
      element.tabIndex = 0;
      element.addEventListener("click", (event) => this.#clicked(event));
      element.addEventListener("keydown", (event) => this.#pressed(event));
      element.addEventListener("focus", () => this.activate(this.active < 0 ? Math.max(0, this.picked) : this.active));
    }

    set(tokens) {
      this.element.replaceChildren();
      this.spans = [];
      this.shades = [];
      this.marked.clear();
      this.active = this.picked = -1;
      const all = document.createDocumentFragment();
      for (const token of tokens) all.append(this.#made(token));
      this.element.append(all);
    }

    append(token) {
      this.element.append(this.#made(token));
    }

    shade(share) {
      for (let i = 0; i < this.spans.length; i++) {
        const wanted = classOf(share[i]);
        if (this.shades[i] === wanted) continue;
        const list = this.spans[i].classList;
        if (this.shades[i]) list.remove(this.shades[i]);
        list.add(wanted);
        this.shades[i] = wanted;
      }
      this.#describe();
    }

    mark(kind, positions) {
      for (const old of this.marked.get(kind) || []) this.spans[old]?.classList.remove("is-" + kind);
      this.marked.set(kind, positions);
      for (const position of positions) this.spans[position]?.classList.add("is-" + kind);
    }

    pick(position) {
      this.spans[this.picked]?.setAttribute("aria-selected", "false");
      this.picked = position;
      this.spans[position]?.setAttribute("aria-selected", "true");
    }

    activate(position) {
      if (!this.spans.length) return;
      this.spans[this.active]?.classList.remove("is-active");
      this.active = Math.min(Math.max(position, 0), this.spans.length - 1);
      const span = this.spans[this.active];
      span.classList.add("is-active");
      this.#describe();
      this.element.setAttribute("aria-activedescendant", span.id);
      this.show(this.active);
    }

    /* The active token's shade in words, which follow the time. */
    #describe() {
      const words = described(this.shades[this.active] || "");
      const span = this.spans[this.active];
      if (span && span.getAttribute("aria-description") !== words) span.setAttribute("aria-description", words);
    }

    /* Scroll the text, and nothing around it, so that a token is seen. */
    show(position) {
      const span = this.spans[position];
      if (!span) return;
      const top = span.offsetTop; // from the top of the text, which is positioned
      const from = this.element.scrollTop;
      if (top < from) this.element.scrollTop = top;
      else if (top + span.offsetHeight > from + this.element.clientHeight) {
        this.element.scrollTop = top + span.offsetHeight - this.element.clientHeight;
      }
    }

    #made(token) {
      const span = document.createElement("span");
      const shown = kvkeep.visible(token);
      span.textContent = shown.replace(/\n/g, "\u21b5\n");
      if (shown === "") span.setAttribute("aria-label", "part of the next character");
      span.id = this.prefix + this.spans.length;
      span.setAttribute("role", "option");
      span.setAttribute("aria-selected", "false");
      this.spans.push(span);
      return span;
    }

    #clicked(event) {
      const span = event.target.closest('[role="option"]');
      if (!span) return;
      const position = Number(span.id.slice(this.prefix.length));
      this.activate(position);
      this.onPick?.(position);
    }

    #pressed(event) {
      const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, PageDown: 100, PageUp: -100 };
      const ends = { Home: 0, End: this.spans.length - 1 };
      if (event.altKey || event.ctrlKey || event.metaKey) return;
      if (event.key in steps) this.activate(this.active + steps[event.key]);
      else if (event.key in ends) this.activate(ends[event.key]);
      else if (event.key === "Enter" || event.key === " ") this.onPick?.(this.active);
      else return;
      event.preventDefault();
      event.stopPropagation();
    }
  }
  TokenText.count = 0;
  kvkeep.TokenText = TokenText;
})((window.kvkeep = window.kvkeep || {}));
