/* The data of the page: unpacked tables, and what follows from them at a moment. docs/explain.md describes them. */
"use strict";
(function (kvkeep) {
  async function bytes(table) {
    const letters = atob(table.data);
    const packed = new Uint8Array(letters.length);
    for (let i = 0; i < letters.length; i++) packed[i] = letters.charCodeAt(i);
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).arrayBuffer();
  }

  /* A table as {rows, columns, at(row, column)} of true numbers. */
  async function unpacked(table) {
    const raw = await bytes(table);
    const [rows, columns] = table.shape;
    let values;
    if (table.type === "uint8") values = new Uint8Array(raw);
    else if (table.type === "int32") values = new Int32Array(raw);
    else {
      const short = new Uint16Array(raw);
      values = new Float32Array(Uint32Array.from(short, (half) => half << 16).buffer);
    }
    const scaled = "largest" in table;
    const at = (row, column) => {
      const value = values[row * columns + column];
      return scaled ? (value / 255) ** 2 * table.largest : value;
    };
    return { rows, columns, values, at };
  }

  const TABLES = ["dropped", "scores", "rivals", "rival_scores", "mass", "total", "attended", "full", "missed", "lost"];
  const HELD = 255;

  class Run {
    constructor(record, data) {
      Object.assign(this, record);
      this.prompt = data.tokens.length;
      this.promptEnds = data.prompt_ends;
      this.chunks = data.prompt_ends.length;
      this.tokens = data.tokens.concat(this.answer);
      this.moments = this.chunks + this.answer.length;
    }

    static async of(record, data) {
      const run = new Run(record, data);
      for (const name of TABLES) run[name] = await unpacked(record[name]);
      return run;
    }

    /* The run's own moment; a run with a short answer stays at its end. */
    moment(moment) {
      return Math.min(moment, this.moments - 1);
    }

    read(moment) {
      const own = this.moment(moment);
      if (own < this.chunks) return this.promptEnds[own];
      return this.prompt + own - this.chunks + 1;
    }

    holds(head, token, moment) {
      const dropped = this.dropped.values[head * this.dropped.columns + token];
      return token < this.read(moment) && (dropped === HELD || dropped > this.moment(moment));
    }

    droppedAt(head, token) {
      const found = this.dropped.at(head, token);
      return found === HELD ? -1 : found;
    }

    /* The share of heads that hold each token of a part; -1 for tokens that are not read yet. */
    shares(moment, first, last) {
      const { rows, columns, values } = this.dropped;
      const own = this.moment(moment);
      const read = Math.min(last, this.read(moment));
      const found = new Float32Array(last - first).fill(-1);
      found.fill(0, 0, Math.max(0, read - first));
      for (let head = 0; head < rows; head++) {
        const start = head * columns;
        for (let i = first; i < read; i++) if (values[start + i] > own) found[i - first] += 1;
      }
      for (let i = first; i < read; i++) found[i - first] /= rows;
      return found;
    }

    /* The share of tokens that a head holds, mean over heads, and the number of tokens that no head holds. */
    sums(moment) {
      this.ends ??= this.#counted();
      const own = this.moment(moment);
      const read = this.read(moment);
      return { held: 1 - this.ends.drops[own] / (read * this.dropped.rows), gone: this.ends.gone[own] };
    }

    /* How many drops there were up to each moment, and how many tokens had then left every head. */
    #counted() {
      const { rows, columns, values } = this.dropped;
      const drops = new Float64Array(HELD + 1);
      const gone = new Float64Array(HELD + 1);
      const last = new Uint8Array(columns);
      for (let head = 0; head < rows; head++) {
        for (let i = 0, at = head * columns; i < columns; i++, at++) {
          drops[values[at]] += 1;
          if (values[at] > last[i]) last[i] = values[at];
        }
      }
      for (const moment of last) gone[moment] += 1;
      for (let moment = 1; moment < HELD; moment++) {
        drops[moment] += drops[moment - 1];
        gone[moment] += gone[moment - 1];
      }
      return { drops, gone };
    }

    /* 1 for each token that a head holds. */
    heldBy(head, moment) {
      const { columns, values } = this.dropped;
      const found = new Float32Array(columns);
      const own = this.moment(moment);
      const read = this.read(moment);
      for (let i = 0, at = head * columns; i < read; i++, at++) found[i] = values[at] > own ? 1 : 0;
      return found;
    }
  }

  kvkeep.readData = async function (text) {
    const data = JSON.parse(text);
    data.runs = await Promise.all(data.runs.map((record) => Run.of(record, data)));
    data.moments = Math.max(...data.runs.map((run) => run.moments));
    return data;
  };
})((window.kvkeep = window.kvkeep || {}));
