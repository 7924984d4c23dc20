/* The data of the page: unpacked tables, and what follows from them at a moment. docs/explain.md describes them. */
"use strict";
(function (kvkeep) {
  async function bytes(table) {
    const packed = Uint8Array.from(atob(table.data), (letter) => letter.charCodeAt(0));
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
      this.chunk = data.chunk;
      this.chunks = Math.ceil(this.prompt / this.chunk);
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
      if (own < this.chunks) return Math.min(this.prompt, (own + 1) * this.chunk);
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

    /* The share of heads that hold each token; -1 for tokens that are not read yet. */
    shares(moment) {
      const { rows, columns, values } = this.dropped;
      const own = this.moment(moment);
      const read = this.read(moment);
      const found = new Float32Array(columns).fill(-1);
      for (let i = 0; i < read; i++) found[i] = 0;
      for (let head = 0; head < rows; head++) {
        for (let i = 0, at = head * columns; i < read; i++, at++) if (values[at] > own) found[i] += 1;
      }
      for (let i = 0; i < read; i++) found[i] /= rows;
      return found;
    }

    heldBy(head, moment) {
      const found = new Float32Array(this.dropped.columns);
      for (let i = 0; i < found.length; i++) found[i] = this.holds(head, i, moment) ? 1 : 0;
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
