/* A strip: positions from left to right, as a bar of constant length.

   new kvkeep.Strip(canvas, {label})
     .draw(values, read)    values[i] in 0 … 1 is the height of position i; positions from read on are not there yet
   Several positions that share a pixel show their largest value. The colours are the page's own.
*/
"use strict";
(function (kvkeep) {
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  class Strip {
    constructor(canvas, { label }) {
      this.canvas = canvas;
      this.label = label;
      canvas.classList.add("strip");
      canvas.setAttribute("role", "img");
      this.last = null;
      new ResizeObserver(() => this.#again()).observe(canvas);
      for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", () => this.#again());
    }

    draw(values, read) {
      this.last = [values, read];
      const { canvas } = this;
      const wide = Math.max(1, Math.round(canvas.clientWidth * (window.devicePixelRatio || 1)));
      const high = Math.max(1, Math.round(canvas.clientHeight * (window.devicePixelRatio || 1)));
      if (canvas.width !== wide) canvas.width = wide;
      if (canvas.height !== high) canvas.height = high;
      const context = canvas.getContext("2d");
      context.fillStyle = colour("--panel");
      context.fillRect(0, 0, wide, high);
      context.fillStyle = colour("--held");
      const most = new Float32Array(wide);
      for (let i = 0; i < read; i++) {
        const from = Math.floor((i * wide) / values.length);
        const to = Math.max(from + 1, Math.floor(((i + 1) * wide) / values.length));
        for (let x = from; x < to && x < wide; x++) if (values[i] > most[x]) most[x] = values[i];
      }
      for (let x = 0; x < wide; x++) if (most[x] > 0) context.fillRect(x, high * (1 - most[x]), 1, high * most[x]);
      const end = (read * wide) / values.length;
      context.fillStyle = colour("--line");
      if (end < wide) context.fillRect(end, 0, 1, high);
      const held = values.reduce((sum, value, i) => sum + (i < read && value > 0 ? 1 : 0), 0);
      canvas.setAttribute("aria-label", `${this.label}: ${held} of ${read} positions`);
    }

    #again() {
      if (this.last) this.draw(...this.last);
    }
  }
  kvkeep.Strip = Strip;
})((window.kvkeep = window.kvkeep || {}));
