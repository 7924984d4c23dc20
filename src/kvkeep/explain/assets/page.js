/* The page: texts side by side at one moment, and panels about what is picked. The state stands in the address. */
"use strict";
(async function (kvkeep) {
  const PAGE_TOKENS = 4000;
  const STEP_MS = 350;
  const REST_MS = 250;
  const { el } = kvkeep;
  const find = (id) => document.getElementById(id);
  const about = find("about");
  if (typeof DecompressionStream === "undefined") {
    about.textContent = "This page needs a browser of 2023 or later.";
    return;
  }
  const data = await kvkeep.readData(find("data").textContent);
  const parting = Math.max(0, data.runs.findIndex((run) => run.parting !== null)); // the run whose answer is looked at first
  const state = { moment: data.moments - 1, token: -1, answer: data.runs[parting].parting ?? 0, run: parting, head: 0, from: 0 };
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

  const hash = () => "#" + Object.entries(KEYS).map(([key, name]) => `${key}=${state[name]}`).join("&");

  function writeState() {
    try {
      history.replaceState(null, "", hash());
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

  /* Texts scroll together. A text that was led reports its scroll one frame later. By then the leading text may be
     elsewhere, or it is longer and went further: nobody follows a text that was led. */
  const led = new Map(); // a text's box, and the place that it was led to
  function lead(leading) {
    for (const { box } of texts) {
      const before = box.scrollTop;
      if (box === leading || Math.abs(before - leading.scrollTop) <= 1) continue;
      box.scrollTop = leading.scrollTop;
      if (box.scrollTop !== before) led.set(box, box.scrollTop);
    }
  }

  const texts = data.runs.map((run, number) => {
    const found = new kvkeep.Column(run, { onPick: (token) => pickToken(token, number), onAnswer: (i) => pickAnswer(number, i) });
    find("columns").append(found.element);
    found.box.addEventListener("scroll", () => {
      const place = led.get(found.box);
      led.delete(found.box);
      if (place !== found.box.scrollTop) lead(found.box);
    });
    return found;
  });
  const body = (id) => find(id).querySelector(".body");
  const answerPanel = new kvkeep.AnswerPanel(data, body("answer-panel"));
  const tokenPanel = new kvkeep.TokenPanel(data, body("token-panel"), pickHead);
  const headPanel = new kvkeep.HeadPanel(data, body("head-panel"), pickHead);
  const count = el("span", { role: "status" });

  /* Everything is drawn in one go, so that no table shows another moment than its picture. What is drawn already is
     left alone. */
  const drawn = {};
  const differs = (...names) => names.some((name) => drawn[name] !== state[name]);
  let frame = 0;

  function draw() {
    cancelAnimationFrame(frame);
    frame = 0;
    const part = differs("from");
    const time = differs("moment");
    if (part) fillTexts();
    if (time) find("moment").textContent = momentName(state.moment);
    if (part || time) for (const text of texts) text.drawTime(state.moment);
    if (part || differs("run", "answer")) drawAnswer();
    if (time || differs("token", "head")) tokenPanel.draw(state);
    if (part || differs("token")) for (const { text } of texts) text.pick(state.token < 0 ? -1 : state.token - first());
    if (time || differs("head")) headPanel.draw(state);
    Object.assign(drawn, state);
    find("link").setAttribute("href", hash());
  }

  function fillTexts() {
    count.textContent = `part ${state.from + 1} of ${parts}, from token ${first() + 1}`;
    for (const text of texts) text.fill(first(), last(text.run));
  }

  function drawAnswer() {
    const { kept, missed } = answerPanel.draw(state);
    texts.forEach((text, number) => (number === state.run ? text.drawAnswer(state.answer, kept, missed) : text.drawAnswer(-1, [], [])));
  }

  function pickToken(token, number) {
    state.token = token;
    const run = data.runs[number];
    if (token >= run.prompt) Object.assign(state, { run: number, answer: token - run.prompt });
    show();
    say(tokenPanel.words());
  }

  /* One sentence for screen readers; the panels around it are too long to be read out at every step. */
  function say(words) {
    find("said").textContent = words.join(". ");
  }

  function pickAnswer(number, i) {
    Object.assign(state, { run: number, answer: i });
    show();
    say([answerPanel.said.textContent]);
  }

  function pickHead(head) {
    state.head = head;
    show();
  }

  function show() {
    clearTimeout(rest);
    draw();
    writeState();
  }

  /* A move is drawn in the next frame; several moves before it are drawn once. The address and the words for screen
     readers wait until time rests: a browser takes few addresses, and nobody can listen to every moment. */
  let rest = 0;
  function setMoment(moment) {
    const wanted = Math.min(data.moments - 1, Math.max(0, moment));
    if (wanted === state.moment) return;
    state.moment = wanted;
    setSlider();
    frame ||= requestAnimationFrame(draw);
    restLater();
  }

  function restLater() {
    clearTimeout(rest);
    rest = setTimeout(rested, REST_MS);
  }

  function setSlider() {
    find("time").value = state.moment;
    find("time").setAttribute("aria-valuetext", momentName(state.moment)); // a slider says it itself while it has the focus
  }

  function rested() {
    writeState();
    if (!timer && document.activeElement !== find("time")) say([momentName(state.moment)]);
  }

  let timer = 0;
  function play(on) {
    clearInterval(timer);
    if (timer && !on) restLater();
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

  const cut = data.case === "later" ? ", and cut before the question was read," : "";
  const how = data.chunk ? `in chunks of ${data.chunk}` : "at once";
  about.textContent = `${data.tokens.length} tokens read by ${data.model} ${how}${cut} with ${data.budget} slots per layer and head` +
    (data.question ? `. The question: ${kvkeep.quoted(data.question)}` : ".");
  find("notes").append(...data.notes.map((note) => el("p", { class: "note" }, note)));
  if (parts > 1) {
    const turn = (by) => () => {
      state.from = Math.min(parts - 1, Math.max(0, state.from + by));
      show();
    };
    const buttons = [["\u2190 earlier text", -1], ["later text \u2192", 1]].map(([name, by]) => el("button", { type: "button", click: turn(by) }, name));
    find("legend").after(el("p", { class: "parts" }, buttons[0], " ", count, " ", buttons[1]));
  }
  find("time").max = data.moments - 1;
  find("time").addEventListener("input", (event) => setMoment(Number(event.target.value)));
  find("play").addEventListener("click", () => play(!timer));
  document.addEventListener("keydown", pressed);
  window.addEventListener("hashchange", () => {
    readState();
    setSlider();
    show();
  });
  window.addEventListener("beforeprint", draw);
  body("sum-panel").replaceChildren(...kvkeep.sumPanel(data));
  readState();
  setSlider();
  show();
  document.documentElement.dataset.ready = "true";
  kvkeep.page = { data, state, setMoment };
})((window.kvkeep = window.kvkeep || {}));
