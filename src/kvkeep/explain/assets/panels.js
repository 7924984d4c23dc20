/* What stands below the texts and follows the time: a token, and a head. */
"use strict";
(function (kvkeep) {
  const { el, put, set, range, number, percent, headName, layersOf, Fold, Chart, tableOf } = kvkeep;

  /* A token under one policy: where it lives, its mass over time, when each head dropped it. */
  class TokenPart {
    constructor(data, run, pickHead) {
      this.data = data;
      this.run = run;
      this.token = -1;
      this.said = el("p", {});
      this.map = new Map_(data, run, pickHead);
      this.chart = new Chart(`Attention to this token under ${run.policy}`);
      this.attention = new Fold("Attention as a table", () => tableOf("Attention by moment", ["moment", "mass"], () => this.#mass().map((value, i) => [i + 1, number(value)])));
      const heads = ["head", "moment", "its score", "lowest that stayed", "its score", "mass received"];
      this.drops = new Fold("When each head dropped it, and for whom", () => tableOf("Drops", heads, () => this.#drops()));
      const words = el("p", { class: "quiet" }, "Attention it received in each moment, mean over heads:");
      this.rest = [this.map.element, words, this.chart.element, this.attention.element, this.drops.element];
      this.element = el("div", { "data-policy": run.policy }, el("h3", {}, run.policy), this.said, ...this.rest);
    }

    draw(state) {
      const { run } = this;
      const token = (this.token = state.token);
      const exists = token < run.tokens.length;
      for (const part of this.rest) part.toggleAttribute("hidden", !exists); // one is SVG, which has no such property
      if (!exists) return put(this.said, "This answer has no such token.");
      const held = range(run.dropped.rows).filter((head) => run.holds(head, token, state.moment)).length;
      const there = token < run.read(state.moment);
      put(this.said, there ? `Held by ${held} of ${run.dropped.rows} heads at this moment.` : "Not read yet at this moment.");
      this.map.draw(state);
      this.chart.draw(token, () => this.#mass(), run.moment(state.moment));
      this.attention.show(token);
      this.drops.show(token);
    }

    #mass() {
      return range(this.run.moments).map((moment) => this.run.mass.at(moment, this.token));
    }

    #drops() {
      const { data, run, token } = this;
      return range(run.dropped.rows).map((head) => {
        const moment = run.droppedAt(head, token);
        const mass = number(run.total.at(head, token));
        if (moment < 0) return [headName(data, head), "never", "", "", "", mass];
        const rival = run.rivals.at(moment, head);
        const stayed = rival < 0 ? "only protected tokens stayed" : `${kvkeep.quoted(run.tokens[rival])} (token ${rival + 1})`;
        const other = rival < 0 ? "" : number(run.rival_scores.at(moment, head));
        return [headName(data, head), moment + 1, number(run.scores.at(head, token)), stayed, other, mass];
      });
    }
  }

  /* Layers and KV heads as a grid of buttons. */
  class Map_ {
    constructor(data, run, pickHead) {
      this.data = data;
      this.run = run;
      this.buttons = data.heads.map((_, head) => el("button", { type: "button", click: () => pickHead(head) }));
      const rows = layersOf(data).map((layer) => {
        const own = this.buttons.filter((_, head) => data.heads[head][0] === layer);
        return el("tr", {}, el("th", { scope: "row" }, `layer ${layer}`), ...own.map((button) => el("td", {}, button)));
      });
      const words = "\u25cf held, \u2715 and the moment of its drop. A column is a KV head.";
      const grid = el("table", { class: "map", "aria-label": `Heads that hold it under ${run.policy}` }, el("tbody", {}, ...rows));
      this.element = el("div", {}, el("p", { class: "quiet" }, words), el("div", { class: "scroll" }, grid));
    }

    draw(state) {
      const { data, run } = this;
      const read = state.token < run.read(state.moment);
      this.buttons.forEach((button, head) => {
        const moment = run.droppedAt(head, state.token) + 1;
        const here = run.holds(head, state.token, state.moment);
        const when = !read ? "not read yet" : here ? "held" : `dropped in moment ${moment}`;
        const label = `${headName(data, head)}: ${when}; mass ${number(run.total.at(head, state.token))}`;
        put(button, !read ? "\u2013" : here ? "\u25cf held" : `\u2715 ${moment}`);
        set(button, "class", !read ? "none" : here ? "in" : "out");
        set(button, "title", label);
        set(button, "aria-label", label);
        set(button, "aria-pressed", String(state.head === head));
      });
    }
  }

  kvkeep.TokenPanel = class {
    constructor(data, box, pickHead) {
      this.data = data;
      this.parts = data.runs.map((run) => new TokenPart(data, run, pickHead));
      this.title = el("p", {});
      this.side = el("div", { class: "side" }, ...this.parts.map((part) => part.element));
      box.append(this.title, this.side);
    }

    draw(state) {
      const { token } = state;
      this.side.hidden = token < 0;
      this.title.classList.toggle("quiet", token < 0);
      if (token < 0) return put(this.title, "Pick a token in a text above.");
      const name = this.data.runs.find((run) => token < run.tokens.length);
      put(this.title, `${kvkeep.quoted(name.tokens[token])}, token ${token + 1}` + (token >= name.prompt ? " (of the answer)" : ""));
      for (const part of this.parts) part.draw(state);
    }

    /* The panel in a few words, for screen readers. */
    words() {
      return [this.title.textContent, ...this.parts.flatMap((part) => [part.run.policy, part.said.textContent])];
    }
  };

  function spans(values, read) {
    const found = [];
    for (let i = 0; i < read; i++) {
      if (!values[i]) continue;
      const last = found[found.length - 1];
      if (last && last[1] === i - 1) last[1] = i;
      else found.push([i, i]);
    }
    return found.map(([from, to]) => (from === to ? from + 1 : `${from + 1}\u2013${to + 1}`)).join(", ") || "none";
  }

  /* A head under one policy: what it holds, its budget, what it lost. */
  class HeadPart {
    constructor(run) {
      this.run = run;
      this.head = 0;
      this.said = el("p", {});
      const canvas = el("canvas", {});
      this.strip = new kvkeep.Strip(canvas, { label: `Positions held under ${run.policy}` });
      this.positions = new Fold("Positions as a list", () => {
        const element = el("p", {});
        return { element, draw: () => put(element, spans(this.values, this.read)) };
      });
      this.chart = new Chart(`Lost mass under ${run.policy}`, "lost");
      const rows = () => this.#lost().map((value, i) => [i + 1, percent(value)]);
      this.table = new Fold("Lost mass as a table", () => tableOf("Lost mass by moment", ["moment", "lost mass"], rows));
      const words = el("p", { class: "quiet" }, "Lost mass by moment:");
      this.element = el(
        "div", {}, el("h3", {}, run.policy), this.said, canvas, this.positions.element, words, this.chart.element, this.table.element,
      );
    }

    draw({ head, moment }) {
      const { run } = this;
      this.head = head;
      this.values = run.heldBy(head, moment);
      this.read = run.read(moment);
      const now = run.moment(moment);
      let held = 0;
      for (let i = 0; i < this.read; i++) held += this.values[i];
      const lost = percent(run.lost.at(now, head));
      put(this.said, `Holds ${held} of ${this.read} tokens; its budget is ${run.budgets[head]}. Lost mass in this moment: ${lost}.`);
      this.strip.draw(this.values, this.read, held);
      this.positions.show(`${head}/${now}`);
      this.chart.draw(head, () => this.#lost(), now);
      this.table.show(head);
    }

    #lost() {
      return range(this.run.moments).map((moment) => this.run.lost.at(moment, this.head));
    }
  }

  kvkeep.HeadPanel = class {
    constructor(data, box, pickHead) {
      const options = data.heads.map((_, head) => el("option", { value: head }, headName(data, head)));
      this.select = el("select", { id: "head", change: (event) => pickHead(Number(event.target.value)) }, ...options);
      this.parts = data.runs.map((run) => new HeadPart(run));
      const words = "Lost mass is the share of the head's attention under the full cache that falls on tokens it had dropped.";
      box.append(
        el("p", {}, el("label", { for: "head" }, "Head: "), this.select), el("p", { class: "quiet" }, words),
        el("div", { class: "side" }, ...this.parts.map((part) => part.element)),
      );
    }

    draw(state) {
      if (Number(this.select.value) !== state.head) this.select.value = state.head;
      for (const part of this.parts) part.draw(state);
    }
  };
})((window.kvkeep = window.kvkeep || {}));
