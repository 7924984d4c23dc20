/* What stands below the texts: an answer's token, a token, a head, the sum. */
"use strict";
(function (kvkeep) {
  const MOST = 8;

  const el = (kvkeep.el = function (tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (typeof value === "function") made.addEventListener(name, value);
      else if (value !== false && value !== null) made.setAttribute(name, value === true ? "" : value);
    }
    made.append(...children);
    return made;
  });

  const number = (kvkeep.number = (value) => {
    if (!Number.isFinite(value)) return "\u2013";
    if (value === 0) return "0";
    return Math.abs(value) >= 0.001 && Math.abs(value) < 1e5 ? String(Number(value.toPrecision(3))) : value.toExponential(1);
  });
  const percent = (kvkeep.percent = (share) => {
    if (!Number.isFinite(share)) return "\u2013";
    const value = share * 100;
    return (value >= 10 ? value.toFixed(0) : value >= 0.1 || value === 0 ? value.toFixed(1) : "<0.1") + "\u00a0%";
  });
  const bytes = (n) => {
    const units = ["B", "kB", "MB", "GB", "TB"];
    let unit = 0;
    while (n >= 1000 && unit < units.length - 1) (n /= 1000), unit++;
    return (unit ? n.toPrecision(3) : n) + "\u00a0" + units[unit];
  };

  function table(caption, heads, rows) {
    const body = rows.map((row) => el("tr", {}, ...row.map((cell, i) => el(i ? "td" : "th", i ? {} : { scope: "row" }, cell))));
    const top = el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)));
    const made = el("table", {}, el("caption", {}, caption), el("thead", {}, top), el("tbody", {}, ...body));
    return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption }, made);
  }

  /* A table that is made when it is opened, and that stays open while time moves. */
  const unfolded = new Set();
  function folded(summary, owner, make) {
    const name = owner + "/" + summary;
    const made = el("details", { open: unfolded.has(name) }, el("summary", {}, summary));
    if (made.open) made.append(make());
    made.addEventListener("toggle", () => {
      if (made.open) unfolded.add(name);
      else unfolded.delete(name);
      if (made.open && made.children.length === 1) made.append(make());
    });
    return made;
  }

  function chart(label, values, now, kind) {
    const most = Math.max(...values, 1e-12);
    const wide = Math.max(1, values.length - 1);
    const points = values.map((value, i) => `${(i * 100) / wide} ${(38 - (36 * value) / most).toFixed(2)}`);
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const add = (tag, attributes) => {
      const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
      for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
      svg.append(made);
    };
    svg.setAttribute("viewBox", "0 0 100 40");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("class", "chart " + (kind || ""));
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", `${label}, largest ${number(most)}`);
    add("path", { d: "M" + points.join("L") });
    add("line", { x1: (now * 100) / wide, x2: (now * 100) / wide, y1: 0, y2: 40 });
    return svg;
  }

  const headName = (data, head) => `layer ${data.heads[head][0]}, head ${data.heads[head][1]}`;
  const columns = (data, make) => el("div", { class: "side" }, ...data.runs.map(make));
  const range = (n) => Array.from({ length: n }, (_, i) => i);

  /* A token: where it lives, its mass over time, when each head dropped it. */
  kvkeep.tokenPanel = function (data, state, pickHead) {
    const token = state.token;
    if (token < 0) return [el("p", { class: "quiet" }, "Pick a token in a text above.")];
    const parts = data.runs.map((run) => {
      if (token >= run.tokens.length) return el("div", {}, el("h3", {}, run.policy), "This answer has no such token.");
      const held = range(run.dropped.rows).filter((head) => run.holds(head, token, state.moment)).length;
      const there = token < run.read(state.moment);
      const said = there ? `Held by ${held} of ${run.dropped.rows} heads at this moment.` : "Not read yet at this moment.";
      const mass = range(run.moments).map((moment) => run.mass.at(moment, token));
      return el(
        "div", { "data-policy": run.policy },
        el("h3", {}, run.policy), el("p", {}, said),
        map(data, run, state, pickHead),
        el("p", { class: "quiet" }, "Attention it received in each moment, mean over heads:"),
        chart(`Attention to this token under ${run.policy}`, mass, run.moment(state.moment)),
        folded("Attention as a table", run.policy, () => table("Attention by moment", ["moment", "mass"], mass.map((value, i) => [i + 1, number(value)]))),
        folded("When each head dropped it, and for whom", run.policy, () => drops(data, run, token)),
      );
    });
    const name = data.runs.find((run) => token < run.tokens.length);
    const title = `${kvkeep.quoted(name.tokens[token])}, token ${token + 1}` + (token >= name.prompt ? " (of the answer)" : "");
    return [el("p", {}, title), el("div", { class: "side" }, ...parts)];
  };

  function map(data, run, state, pickHead) {
    const layers = [...new Set(data.heads.map(([layer]) => layer))];
    const rows = layers.map((layer) => {
      const cells = range(data.heads.length).filter((head) => data.heads[head][0] === layer).map((head) => {
        const dropped = run.droppedAt(head, state.token);
        const here = run.holds(head, state.token, state.moment);
        const kind = state.token >= run.read(state.moment) ? "none" : here ? "in" : "out";
        const shown = kind === "none" ? "\u2013" : here ? "\u25cf held" : `\u2715 ${dropped + 1}`;
        const total = number(run.total.at(head, state.token));
        const when = kind === "none" ? "not read yet" : here ? "held" : `dropped in moment ${dropped + 1}`;
        const label = `${headName(data, head)}: ${when}; mass ${total}`;
        const pressed = state.head === head ? "true" : "false";
        const look = { type: "button", class: kind, title: label, "aria-label": label, "aria-pressed": pressed, click: () => pickHead(head) };
        return el("td", {}, el("button", look, shown));
      });
      return el("tr", {}, el("th", { scope: "row" }, `layer ${layer}`), ...cells);
    });
    const words = "\u25cf held, \u2715 and the moment of its drop. A column is a KV head.";
    const grid = el("table", { class: "map", "aria-label": `Heads that hold it under ${run.policy}` }, el("tbody", {}, ...rows));
    return el("div", {}, el("p", { class: "quiet" }, words), el("div", { class: "scroll" }, grid));
  }

  function drops(data, run, token) {
    const rows = range(run.dropped.rows).map((head) => {
      const moment = run.droppedAt(head, token);
      const mass = number(run.total.at(head, token));
      if (moment < 0) return [headName(data, head), "never", "", "", "", mass];
      const rival = run.rivals.at(moment, head);
      const stayed = rival < 0 ? "only protected tokens stayed" : `${kvkeep.quoted(run.tokens[rival])} (token ${rival + 1})`;
      const other = rival < 0 ? "" : number(run.rival_scores.at(moment, head));
      return [headName(data, head), moment + 1, number(run.scores.at(head, token)), stayed, other, mass];
    });
    return table("Drops", ["head", "moment", "its score", "lowest that stayed", "its score", "mass received"], rows);
  }

  /* The largest entries of a table's row, as [position, value]. */
  function largest(found, row) {
    const all = range(found.columns).map((i) => [i, found.at(row, i)]).filter(([, value]) => value > 0);
    return all.sort((one, other) => other[1] - one[1]).slice(0, MOST);
  }

  /* A token of an answer: what it attended to, and what it would have attended to. */
  kvkeep.answerPanel = function (data, state) {
    const run = data.runs[state.run];
    if (!run || state.answer < 0 || state.answer >= run.answer.length) {
      return { parts: [el("p", { class: "quiet" }, "Pick a word of an answer above.")], kept: [], missed: [] };
    }
    const kept = largest(run.attended, state.answer);
    const missed = largest(run.missed, state.answer);
    const sum = range(run.missed.columns).reduce((all, i) => all + run.missed.at(state.answer, i), 0);
    const bar = (value, most, kind) => el("span", { class: "bar " + kind, style: `width:${(6 * value) / most}em` });
    const rows = (list, kind) => list.map(([i, value]) => [
      `${kvkeep.quoted(run.tokens[i])} (token ${i + 1})`, percent(value), bar(value, list[0][1], kind),
    ]);
    const said = `Under ${run.policy} the answer says ${kvkeep.quoted(run.answer[state.answer])} in place ${state.answer + 1}; ` +
      (state.answer < data.answer.length ? `the full cache says ${kvkeep.quoted(data.answer[state.answer])}. ` : "the full cache's answer has ended. ") +
      `With the full cache, ${percent(sum)} of the attention that chooses it falls on tokens that heads had dropped.`;
    const parts = [
      el("p", {}, said),
      el("div", { class: "side" },
        el("div", {}, table("Kept tokens that it attended to", ["token", "attention", ""], rows(kept, ""))),
        el("div", {}, missed.length
          ? table("Dropped tokens that it would have attended to", ["token", "attention", ""], rows(missed, "lost"))
          : el("p", {}, "No head had dropped a token that it would have attended to."))),
    ];
    return { parts, kept: kept.map(([i]) => i), missed: missed.map(([i]) => i) };
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

  /* A head: what it holds, its budget, what it lost. */
  kvkeep.headPanel = function (data, state, pickHead) {
    const options = data.heads.map((_, head) => el("option", { value: head, selected: head === state.head }, headName(data, head)));
    const select = el("select", { id: "head", change: (event) => pickHead(Number(event.target.value)) }, ...options);
    const later = [];
    const side = columns(data, (run) => {
      const values = run.heldBy(state.head, state.moment);
      const read = run.read(state.moment);
      const held = values.reduce((all, one) => all + one, 0);
      const lost = range(run.moments).map((moment) => run.lost.at(moment, state.head));
      const now = run.moment(state.moment);
      const canvas = el("canvas", {});
      later.push(() => new kvkeep.Strip(canvas, { label: `Positions held under ${run.policy}` }).draw(values, read));
      return el(
        "div", {},
        el("h3", {}, run.policy),
        el("p", {}, `Holds ${held} of ${read} tokens; its budget is ${run.budgets[state.head]}. Lost mass in this moment: ${percent(lost[now])}.`),
        canvas,
        folded("Positions as a list", run.policy, () => el("p", {}, spans(values, read))),
        el("p", { class: "quiet" }, "Lost mass by moment:"),
        chart(`Lost mass under ${run.policy}`, lost, now, "lost"),
        folded("Lost mass as a table", run.policy, () => table("Lost mass by moment", ["moment", "lost mass"], lost.map((value, i) => [i + 1, percent(value)]))),
      );
    });
    const words = "Lost mass is the share of the head's attention under the full cache that falls on tokens it had dropped.";
    return { parts: [el("p", {}, el("label", { for: "head" }, "Head: "), select), el("p", { class: "quiet" }, words), side], later };
  };

  kvkeep.lostOfLayer = function (data, run, layer) {
    const heads = range(data.heads.length).filter((head) => data.heads[head][0] === layer);
    const moments = range(run.answer.length).map((i) => run.chunks + i);
    const all = moments.flatMap((moment) => heads.map((head) => run.lost.at(moment, head)));
    return all.reduce((sum, value) => sum + value, 0) / all.length;
  };

  /* The sum: bytes, agreement, lost mass by layer, the command. */
  kvkeep.sumPanel = function (data) {
    const layers = [...new Set(data.heads.map(([layer]) => layer))];
    const rows = data.runs.map((run) => [
      run.policy, kvkeep.visible(run.answer.join("")).trim(), percent(run.agreement), bytes(run.allocated_bytes), bytes(run.full_bytes),
      (run.full_bytes / run.allocated_bytes).toFixed(1) + "\u00d7",
    ]);
    rows.push(["full cache", kvkeep.visible(data.answer.join("")).trim(), "", "", bytes(Math.max(...data.runs.map((run) => run.full_bytes))), "1.0\u00d7"]);
    const lost = layers.map((layer) => [`layer ${layer}`, ...data.runs.map((run) => percent(kvkeep.lostOfLayer(data, run, layer)))]);
    const answers = table("Answers and bytes", ["policy", "answer", "agrees with the full cache", "memory", "a full cache", "compression"], rows);
    answers.classList.add("wide");
    return [
      answers,
      table("Lost mass by layer, mean over the answer's tokens", ["", ...data.runs.map((run) => run.policy)], lost),
      el("p", {}, "Made by:"), el("pre", { tabindex: 0 }, kvkeep.visible(data.command)),
      el("p", {}, el("a", { id: "link", href: "#" }, "A link to this page in its present state")),
    ];
  };

  kvkeep.shadesTable = function (run, moment, first, last) {
    const shares = run.shares(moment);
    const shown = range(Math.max(0, Math.min(run.read(moment), last) - first));
    return table(
      `Share of heads that hold each token under ${run.policy}`, ["token", "text", "heads"],
      shown.map((i) => i + first).map((i) => [i + 1, kvkeep.quoted(run.tokens[i]), percent(shares[i])]),
    );
  };
  kvkeep.folded = folded;
})((window.kvkeep = window.kvkeep || {}));
