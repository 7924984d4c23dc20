/* What stands below the texts and does not follow the time: a token of an answer, and the sum. */
"use strict";
(function (kvkeep) {
  const { el, put, range, percent, bytes, layersOf, table, Table } = kvkeep;
  const MOST = 8;

  /* The largest entries of a table's row, as [position, value]. */
  function largest(found, row) {
    const all = range(found.columns).map((i) => [i, found.at(row, i)]).filter(([, value]) => value > 0);
    return all.sort((one, other) => other[1] - one[1]).slice(0, MOST);
  }

  /* A token of an answer: what it attended to, and what it would have attended to. */
  kvkeep.AnswerPanel = class {
    constructor(data, box) {
      this.data = data;
      this.said = el("p", {});
      this.kept = new Table("Kept tokens that it attended to", ["token", "attention", ""]);
      this.missed = new Table("Dropped tokens that it would have attended to", ["token", "attention", ""]);
      this.none = el("p", {}, "No head had dropped a token that it would have attended to.");
      this.side = el("div", { class: "side" }, el("div", {}, this.kept.element), el("div", {}, this.missed.element, this.none));
      box.append(this.said, this.side);
    }

    /* Returns the positions of the tokens in both tables. */
    draw(state) {
      const run = this.data.runs[state.run];
      const picked = run && state.answer >= 0 && state.answer < run.answer.length;
      this.side.hidden = !picked;
      this.said.classList.toggle("quiet", !picked);
      if (!picked) {
        put(this.said, "Pick a word of an answer above.");
        return { kept: [], missed: [] };
      }
      const kept = largest(run.attended, state.answer);
      const missed = largest(run.missed, state.answer);
      put(this.said, this.#words(run, state.answer));
      this.kept.fill(this.#rows(run, kept, ""));
      this.missed.fill(this.#rows(run, missed, "lost"));
      this.missed.element.hidden = !missed.length;
      this.none.hidden = missed.length > 0;
      return { kept: kept.map(([i]) => i), missed: missed.map(([i]) => i) };
    }

    #words(run, place) {
      const { answer } = this.data;
      const sum = range(run.missed.columns).reduce((all, i) => all + run.missed.at(place, i), 0);
      return `Under ${run.policy} the answer says ${kvkeep.quoted(run.answer[place])} in place ${place + 1}; ` +
        (place < answer.length ? `the full cache says ${kvkeep.quoted(answer[place])}. ` : "the full cache's answer has ended. ") +
        `With the full cache, ${percent(sum)} of the attention that chooses it falls on tokens that heads had dropped.`;
    }

    #rows(run, list, kind) {
      const bar = (value) => el("span", { class: "bar " + kind, style: `width:${(6 * value) / list[0][1]}em` });
      return list.map(([i, value]) => [`${kvkeep.quoted(run.tokens[i])} (token ${i + 1})`, percent(value), bar(value)]);
    }
  };

  function lostOfLayer(data, run, layer) {
    const heads = range(data.heads.length).filter((head) => data.heads[head][0] === layer);
    const moments = range(run.answer.length).map((i) => run.chunks + i);
    const all = moments.flatMap((moment) => heads.map((head) => run.lost.at(moment, head)));
    return all.reduce((sum, value) => sum + value, 0) / all.length;
  }

  /* The sum: bytes, agreement, lost mass by layer, the command. */
  kvkeep.sumPanel = function (data) {
    const rows = data.runs.map((run) => [
      run.policy, kvkeep.visible(run.answer.join("")).trim(), percent(run.agreement), bytes(run.allocated_bytes), bytes(run.full_bytes),
      (run.full_bytes / run.allocated_bytes).toFixed(1) + "\u00d7",
    ]);
    rows.push(["full cache", kvkeep.visible(data.answer.join("")).trim(), "", "", bytes(Math.max(...data.runs.map((run) => run.full_bytes))), "1.0\u00d7"]);
    const lost = layersOf(data).map((layer) => [`layer ${layer}`, ...data.runs.map((run) => percent(lostOfLayer(data, run, layer)))]);
    const answers = table("Answers and bytes", ["policy", "answer", "agrees with the full cache", "memory", "a full cache", "compression"], rows);
    answers.classList.add("wide");
    return [
      answers,
      table("Lost mass by layer, mean over the answer's tokens", ["", ...data.runs.map((run) => run.policy)], lost),
      el("p", {}, "Made by:"), el("pre", { tabindex: 0 }, kvkeep.visible(data.command)),
      el("p", {}, el("a", { id: "link", href: "#" }, "A link to this page in its present state")),
    ];
  };
})((window.kvkeep = window.kvkeep || {}));
