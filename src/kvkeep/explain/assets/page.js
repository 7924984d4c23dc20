/* The page: texts side by side at one moment, and panels about what is picked. The state stands in the address. */
"use strict";
(async function (kvkeep) {
  const PAGE_TOKENS = 4000;
  const STEP_MS = 350;
  const { el } = kvkeep;
  const find = (id) => document.getElementById(id);
  const about = find("about");
  if (typeof DecompressionStream === "undefined") {
    about.textContent = "This page needs a browser of 2023 or later.";
    return;
  }
  const data = await kvkeep.readData(find("data").textContent);
  const state = { moment: data.moments - 1, token: -1, answer: 0, run: 0, head: 0, from: 0 };
  const KEYS = { m: "moment", t: "token", a: "answer", p: "run", h: "head", f: "from" };
  const parts = Math.ceil(data.tokens.length / PAGE_TOKENS); // long texts are shown a part at a time
  const MOST = { from: parts - 1, moment: data.moments - 1, token: data.tokens.length + 999, answer: 999, run: data.runs.length - 1, head: data.heads.length - 1 };

  function readState() {
    for (const [key, value] of new URLSearchParams(location.hash.slice(1))) {
      const name = KEYS[key];
      if (name && /^-?\d{1,9}$/.test(value)) state[name] = Math.min(MOST[name], Math.max(name === "token" || name === "answer" ? -1 : 0, Number(value)));
    }
    const longest = Math.max(...data.runs.map((run) => run.tokens.length));
    if (state.token >= longest) state.token = -1;
    if (state.answer >= data.runs[state.run].answer.length) state.answer = -1;
  }

  function writeState() {
    const hash = "#" + Object.entries(KEYS).map(([key, name]) => `${key}=${state[name]}`).join("&");
    const link = find("link");
    if (link) link.setAttribute("href", hash);
    try {
      history.replaceState(null, "", hash);
    } catch {
      /* a frame without an address of its own */
    }
  }

  function momentName(moment) {
    const run = data.runs.reduce((one, other) => (other.moments > one.moments ? other : one));
    const what = moment < run.chunks ? `the prompt, token ${run.read(moment)} of ${run.prompt}` : `the answer, token ${moment - run.chunks + 1}`;
    return `${moment + 1} of ${data.moments}: ${what}`;
  }

  const first = () => state.from * PAGE_TOKENS;
  const last = (run) => (state.from === parts - 1 ? run.tokens.length : first() + PAGE_TOKENS);

  const texts = data.runs.map((run, number) => {
    const box = el("div", {});
    const text = new kvkeep.TokenText(box, { label: `Text under ${run.policy}`, onPick: (i) => pickToken(first() + i, number) });
    const words = el("p", { class: "quiet" });
    const answer = el("ul", { class: "answer", "aria-label": `Answer under ${run.policy}` });
    const buttons = run.answer.map((token, i) => {
      const shown = kvkeep.visible(token).replace(/\n/g, "\u21b5") || "\u25ab";
      return el("button", { type: "button", "aria-pressed": "false", click: () => pickAnswer(number, i) }, shown);
    });
    answer.append(...buttons.map((button) => el("li", {}, button)));
    const fold = el("div", {});
    find("columns").append(el("article", { "data-policy": run.policy }, el("h2", {}, run.policy), answer, words, box, fold));
    box.addEventListener("scroll", () => {
      for (const other of texts) if (other.box !== box && Math.abs(other.box.scrollTop - box.scrollTop) > 1) other.box.scrollTop = box.scrollTop;
    });
    return { run, box, text, words, buttons, fold };
  });

  const count = el("span", { role: "status" });

  function fillTexts() {
    count.textContent = `part ${state.from + 1} of ${parts}, from token ${first() + 1}`;
    for (const { run, text } of texts) {
      text.set(run.tokens.slice(first(), last(run)));
      if (state.from === parts - 1) text.mark("answer", run.answer.map((_, i) => run.prompt - first() + i));
    }
  }

  function drawTime() {
    find("time").value = state.moment;
    find("time").setAttribute("aria-valuetext", momentName(state.moment));
    find("moment").textContent = momentName(state.moment);
    for (const { run, text, words, buttons } of texts) {
      const shares = run.shares(state.moment);
      text.shade(shares.subarray(first(), last(run)));
      const read = run.read(state.moment);
      let held = 0;
      let gone = 0;
      for (let i = 0; i < read; i++) (held += shares[i]), (gone += shares[i] === 0 ? 1 : 0);
      words.textContent = `Holds ${kvkeep.percent(held / read)} of ${read} tokens per head; ${gone} are gone from every head.`;
      buttons.forEach((button, i) => button.classList.toggle("early", run.prompt + i >= read));
    }
  }

  function drawTables() {
    for (const { run, fold } of texts) {
      fold.replaceChildren(kvkeep.folded("Shades as a table", run.policy, () => kvkeep.shadesTable(run, state.moment, first(), last(run))));
    }
  }

  function drawAnswer() {
    const { parts: shown, kept, missed } = kvkeep.answerPanel(data, state);
    find("answer-panel").querySelector(".body").replaceChildren(...shown);
    texts.forEach(({ text, buttons }, number) => {
      const here = (list) => (number === state.run ? list.map((i) => i - first()).filter((i) => i >= 0) : []);
      text.mark("kept", here(kept));
      text.mark("missed", here(missed));
      buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(number === state.run && i === state.answer)));
    });
  }

  function drawToken() {
    find("token-panel").querySelector(".body").replaceChildren(...kvkeep.tokenPanel(data, state, pickHead));
    for (const { text } of texts) text.pick(state.token < 0 ? -1 : state.token - first());
  }

  function drawHead() {
    const { parts: shown, later } = kvkeep.headPanel(data, state, pickHead);
    find("head-panel").querySelector(".body").replaceChildren(...shown);
    later.forEach((draw) => draw());
  }

  function pickToken(token, number) {
    state.token = token;
    const run = data.runs[number];
    if (token >= run.prompt) pickAnswer(number, token - run.prompt);
    drawToken();
    say([...find("token-panel").querySelectorAll(".body > p, [data-policy] > h3, [data-policy] > h3 + p")].map((one) => one.textContent));
    writeState();
  }

  /* One sentence for screen readers; the panels around it are too long to be read out at every step. */
  function say(words) {
    find("said").textContent = words.join(". ");
  }

  function pickAnswer(number, i) {
    state.run = number;
    state.answer = i;
    drawAnswer();
    say([find("answer-panel").querySelector("p").textContent]);
    writeState();
  }

  function pickHead(head) {
    const had = document.activeElement;
    const inMap = had && had.closest(".map");
    const column = inMap && had.closest("[data-policy]").dataset.policy;
    const inSelect = had && had.id === "head";
    state.head = head;
    drawToken();
    drawHead();
    if (inSelect) find("head").focus();
    if (inMap) [...document.querySelectorAll("#token-panel [data-policy]")].find((one) => one.dataset.policy === column)?.querySelector('[aria-pressed="true"]')?.focus({ preventScroll: true });
    writeState();
  }

  /* The texts follow at once, the panels when the slider rests for a frame. */
  let waiting = false;
  function setMoment(moment) {
    const wanted = Math.min(data.moments - 1, Math.max(0, moment));
    if (wanted === state.moment) return;
    state.moment = wanted;
    drawTime();
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      drawTables();
      drawToken();
      drawHead();
      writeState();
    });
  }

  let timer = 0;
  function play(on) {
    clearInterval(timer);
    timer = 0;
    if (on) {
      if (state.moment === data.moments - 1) setMoment(0);
      timer = setInterval(() => (state.moment === data.moments - 1 ? play(false) : setMoment(state.moment + 1)), STEP_MS);
    }
    find("play").setAttribute("aria-pressed", String(on));
    find("play").textContent = on ? "\u23f8 Pause" : "\u25b6 Play";
  }

  function pressed(event) {
    const busy = event.target.closest("input, select, textarea, .scroll, [role=listbox]");
    if (busy || event.altKey || event.ctrlKey || event.metaKey) return;
    const steps = { ArrowRight: 1, ArrowLeft: -1 };
    if (event.key in steps) setMoment(state.moment + steps[event.key]);
    else return;
    event.preventDefault();
  }

  function drawAll() {
    drawTime();
    drawTables();
    drawAnswer();
    drawToken();
    drawHead();
    writeState();
  }

  about.textContent = `${data.tokens.length} tokens read by ${data.model} in chunks of ${data.chunk}, with ${data.budget} slots per layer and head` +
    (data.question ? `. The question: ${kvkeep.quoted(data.question)}` : ".");
  find("notes").append(...data.notes.map((note) => el("p", { class: "note" }, note)));
  if (parts > 1) {
    const turn = (by) => () => {
      state.from = Math.min(parts - 1, Math.max(0, state.from + by));
      fillTexts();
      drawAll();
    };
    const buttons = [["\u2190 earlier text", -1], ["later text \u2192", 1]].map(([name, by]) => el("button", { type: "button", click: turn(by) }, name));
    find("legend").after(el("p", { class: "parts" }, buttons[0], " ", count, " ", buttons[1]));
  }
  find("time").max = data.moments - 1;
  find("time").addEventListener("input", (event) => setMoment(Number(event.target.value)));
  find("play").addEventListener("click", () => play(!timer));
  document.addEventListener("keydown", pressed);
  window.addEventListener("hashchange", () => {
    const part = state.from;
    readState();
    if (part !== state.from) fillTexts();
    drawAll();
  });
  find("sum-panel").querySelector(".body").replaceChildren(...kvkeep.sumPanel(data));
  readState();
  fillTexts();
  drawAll();
  document.documentElement.dataset.ready = "true";
  kvkeep.page = { data, state, setMoment };
})((window.kvkeep = window.kvkeep || {}));
