/* The text under one policy: its answer, the shaded tokens of the part that is shown, their table. */
"use strict";
(function (kvkeep) {
  const { el, put, set, percent, Fold, Table } = kvkeep;

  kvkeep.Column = class {
    constructor(run, { onPick, onAnswer }) {
      this.run = run;
      this.first = 0;
      this.shares = [];
      this.box = el("div", {});
      this.text = new kvkeep.TokenText(this.box, { label: `Text under ${run.policy}`, onPick: (i) => onPick(this.first + i) });
      this.words = el("p", { class: "quiet" });
      this.buttons = run.answer.map((token, i) => {
        const shown = kvkeep.visible(token).replace(/\n/g, "\u21b5") || "\u25ab";
        return el("button", { type: "button", "aria-pressed": "false", click: () => onAnswer(i) }, shown);
      });
      const answer = el("ul", { class: "answer", "aria-label": `Answer under ${run.policy}` });
      answer.append(...this.buttons.map((button) => el("li", {}, button)));
      this.fold = new Fold("Shades as a table", () => this.#table());
      this.element = el("article", { "data-policy": run.policy }, el("h2", {}, run.policy), answer, this.words, this.box, this.fold.element);
    }

    /* Show the tokens from first to last. */
    fill(first, last) {
      const { run, text } = this;
      this.first = first;
      text.set(run.tokens.slice(first, last));
      text.mark("answer", run.answer.map((_, i) => run.prompt - first + i).filter((i) => i < last - first));
    }

    drawTime(moment) {
      const { run, text } = this;
      const read = run.read(moment);
      this.shares = run.shares(moment, this.first, this.first + text.spans.length);
      text.shade(this.shares);
      const { held, gone } = run.sums(moment);
      put(this.words, `Holds ${percent(held)} of ${read} tokens per head; ${gone} are gone from every head.`);
      this.buttons.forEach((button, i) => button.classList.toggle("early", run.prompt + i >= read));
      this.fold.show(`${this.first}/${run.moment(moment)}`);
    }

    /* The place of the picked token of the answer, -1 if there is none, and the positions to underline. */
    drawAnswer(picked, kept, missed) {
      const here = (list) => list.map((i) => i - this.first).filter((i) => i >= 0);
      this.text.mark("kept", here(kept));
      this.text.mark("missed", here(missed));
      this.buttons.forEach((button, i) => set(button, "aria-pressed", String(i === picked)));
    }

    #table() {
      const { run } = this;
      const made = new Table(`Share of heads that hold each token under ${run.policy}`, ["token", "text", "heads"]);
      let from = this.first;
      const cells = (i) => [from + i + 1, kvkeep.quoted(run.tokens[from + i]), percent(this.shares[i])];
      const draw = () => {
        if (from !== this.first) made.resize(0, cells);
        from = this.first;
        const later = this.shares.indexOf(-1);
        made.resize(later < 0 ? this.shares.length : later, cells);
        let row = made.body.firstChild;
        for (let i = 0; row; i++, row = row.nextSibling) put(row.lastChild, percent(this.shares[i]));
      };
      return { element: made.element, draw };
    }
  };
})((window.kvkeep = window.kvkeep || {}));
