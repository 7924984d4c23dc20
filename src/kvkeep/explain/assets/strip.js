/* A strip: positions from left to right, as a bar of constant length.

   new kvkeep.Strip(canvas, {label})
     .draw(values, read, held)    values[i] in 0 … 1 is the height of position i; positions from read on are not there
                                  yet; held of them are told to screen readers
   Several positions that share a pixel show their largest value. The colours are the page's own.
*/
"use strict";
(function (kvkeep) {
  const NAMES = ["--panel", "--held", "--line"];
  let colours = null; // until the page changes them
  const colour = () => {
    const style = getComputedStyle(document.documentElement);
    return (colours ??= Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(name).trim()])));
  };
  for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", () => (colours = null));

  class Strip {
    constructor(canvas, { label }) {
      this.canvas = canvas;
      this.label = label;
      canvas.classList.add("strip");
      canvas.setAttribute("role", "img");
      this.last = null;
      this.size = null;
      new ResizeObserver(() => this.#again()).observe(canvas);
      for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", () => this.#again());
    }

    draw(values, read, held) {
      this.last = [values, read];
      kvkeep.set(this.canvas, "aria-label", `${this.label}: ${held} of ${read} positions`);
      this.#fill();
    }

    #fill() {
      const [values, read] = this.last;
      const { canvas } = this;
      this.size ??= this.#measured();
      const [wide, high] = this.size;
      if (canvas.width !== wide) canvas.width = wide;
      if (canvas.height !== high) canvas.height = high;
      const context = canvas.getContext("2d");
      context.fillStyle = colour()["--panel"];
      context.fillRect(0, 0, wide, high);
      context.fillStyle = colour()["--held"];
      const most = new Float32Array(wide);
      for (let i = 0; i < read; i++) {
        const from = Math.floor((i * wide) / values.length);
        const to = Math.max(from + 1, Math.floor(((i + 1) * wide) / values.length));
        for (let x = from; x < to && x < wide; x++) if (values[i] > most[x]) most[x] = values[i];
      }
      for (let x = 0; x < wide; x++) if (most[x] > 0) context.fillRect(x, high * (1 - most[x]), 1, high * most[x]);
      const end = (read * wide) / values.length;
      context.fillStyle = colour()["--line"];
      if (end < wide) context.fillRect(end, 0, 1, high);
    }

    /* Reading a size makes the browser lay out the page, so it is read once for each size. */
    #measured() {
      const ratio = window.devicePixelRatio || 1;
      return [this.canvas.clientWidth, this.canvas.clientHeight].map((length) => Math.max(1, Math.round(length * ratio)));
    }

    #again() {
      this.size = null;
      if (this.last) this.#fill();
    }
  }
  kvkeep.Strip = Strip;
})((window.kvkeep = window.kvkeep || {}));
