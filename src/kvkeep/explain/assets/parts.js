/* What the panels are made of: elements, numbers in words, tables behind pictures, charts. All of them are made once and
   then changed where they differ, so that a focus and a place in a table outlive a move. */
"use strict";
(function (kvkeep) {
  const el = (kvkeep.el = function (tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (typeof value === "function") made.addEventListener(name, value);
      else if (value !== false && value !== null) made.setAttribute(name, value === true ? "" : value);
    }
    made.append(...children);
    return made;
  });

  const put = (kvkeep.put = (element, text) => {
    if (element.textContent !== text) element.textContent = text;
  });
  const set = (kvkeep.set = (element, name, value) => {
    if (element.getAttribute(name) !== value) element.setAttribute(name, value);
  });
  const range = (kvkeep.range = (n) => Array.from({ length: n }, (_, i) => i));

  const number = (kvkeep.number = (value) => {
    if (!Number.isFinite(value)) return "\u2013";
    if (value === 0) return "0";
    return Math.abs(value) >= 0.001 && Math.abs(value) < 1e5 ? String(Number(value.toPrecision(3))) : value.toExponential(1);
  });
  kvkeep.percent = (share) => {
    if (!Number.isFinite(share)) return "\u2013";
    const value = share * 100;
    return (value >= 10 ? value.toFixed(0) : value >= 0.1 || value === 0 ? value.toFixed(1) : "<0.1") + "\u00a0%";
  };
  kvkeep.bytes = (n) => {
    const units = ["B", "kB", "MB", "GB", "TB"];
    let unit = 0;
    while (n >= 1000 && unit < units.length - 1) (n /= 1000), unit++;
    return (unit ? n.toPrecision(3) : n) + "\u00a0" + units[unit];
  };
  kvkeep.headName = (data, head) => `layer ${data.heads[head][0]}, head ${data.heads[head][1]}`;
  kvkeep.layersOf = (data) => [...new Set(data.heads.map(([layer]) => layer))];

  const row = (cells) => el("tr", {}, ...cells.map((cell, i) => el(i ? "td" : "th", i ? {} : { scope: "row" }, cell)));

  /* A table in a region that scrolls. .fill(rows) sets its rows; .resize(n, cells) keeps those that stay. */
  class Table {
    constructor(caption, heads) {
      const top = el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)));
      this.body = el("tbody", {});
      const made = el("table", {}, el("caption", {}, caption), el("thead", {}, top), this.body);
      this.element = el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption }, made);
    }

    fill(rows) {
      this.body.replaceChildren(...rows.map(row));
      return this;
    }

    resize(n, cells) {
      const had = this.body.rows.length;
      if (n === 0) this.body.replaceChildren();
      else for (let i = had; i > n; i--) this.body.lastChild.remove();
      const more = document.createDocumentFragment();
      for (let i = had; i < n; i++) more.append(row(cells(i)));
      this.body.append(more);
    }
  }
  kvkeep.Table = Table;
  kvkeep.table = (caption, heads, rows) => new Table(caption, heads).fill(rows).element;

  /* Details behind a picture. They are made when they are opened, and follow .show(key) as long as they are open.

     make() returns {element, draw()}; draw is called when the key has changed. */
  class Fold {
    constructor(summary, make) {
      this.make = make;
      this.key = this.shown = this.content = null;
      this.element = el("details", { toggle: () => this.#follow() }, el("summary", {}, summary));
    }

    show(key) {
      this.key = key;
      this.#follow();
    }

    #follow() {
      if (this.key === this.shown && this.content) return;
      if (!this.element.open) {
        this.content?.element.remove(); // an old moment is found by no search and read by nobody
        this.content = null;
        return;
      }
      this.content ??= this.make();
      this.content.draw();
      this.shown = this.key;
      if (!this.content.element.isConnected) this.element.append(this.content.element);
    }
  }
  kvkeep.Fold = Fold;

  /* The content of a fold: a table whose rows are made anew. */
  kvkeep.tableOf = (caption, heads, rows) => {
    const made = new Table(caption, heads);
    return { element: made.element, draw: () => made.fill(rows()) };
  };

  /* A curve over moments, and a line at the present one. */
  class Chart {
    constructor(label, kind) {
      this.label = label;
      this.key = null;
      this.element = this.#made("svg", { viewBox: "0 0 100 40", preserveAspectRatio: "none", class: "chart " + (kind || ""), role: "img" });
      this.path = this.#made("path", {});
      this.line = this.#made("line", { y1: 0, y2: 40 });
      this.element.append(this.path, this.line);
    }

    #made(tag, attributes) {
      const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
      for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
      return made;
    }

    /* The curve is that of a key; values() is called for a new one. */
    draw(key, values, now) {
      if (this.key !== key) {
        this.key = key;
        this.#curve(values());
      }
      const x = String((now * 100) / this.wide);
      set(this.line, "x1", x);
      set(this.line, "x2", x);
    }

    #curve(values) {
      const most = Math.max(...values, 1e-12);
      this.wide = Math.max(1, values.length - 1);
      const points = values.map((value, i) => `${(i * 100) / this.wide} ${(38 - (36 * value) / most).toFixed(2)}`);
      this.path.setAttribute("d", "M" + points.join("L"));
      this.element.setAttribute("aria-label", `${this.label}, largest ${number(most)}`);
    }
  }
  kvkeep.Chart = Chart;
})((window.kvkeep = window.kvkeep || {}));
