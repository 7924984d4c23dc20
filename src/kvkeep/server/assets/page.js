/* A chat whose memory can be looked at. Texts reach the page as text nodes alone. */
"use strict";
(function () {
  const MOST_MESSAGES = 60;
  const MOST_GONE = 200;
  const at = (id) => document.getElementById(id);
  const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
  const visible = (text) => text.replace(CONTROL, "\ufffd");
  const talks = new Map();
  let key = "", now = null, running = null, back = false, shown = new Map();
  let pins = [], current = null, anchor = null;

  function say(text, wrong) {
    at("said").textContent = text;
    at("said").classList.toggle("wrong", Boolean(wrong));
  }

  async function call(method, path, body, signal) {
    const headers = { "Content-Type": "application/json" };
    if (key) headers.Authorization = "Bearer " + key;
    const answer = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body) });
    if (answer.ok) return answer;
    let message = "The server answered " + answer.status + ".";
    try { message = (await answer.json()).error.message || message; } catch {}
    throw Object.assign(new Error(message), { status: answer.status });
  }
  const json = async (...asked) => (await call(...asked)).json();

  /* Do something for a button, and show what went wrong. One thing is done at a time. */
  function doing(work) {
    return async (event) => {
      event.preventDefault();
      if (running) return;
      const focused = document.activeElement;
      running = new AbortController();
      busy(true);
      try {
        say("");
        await work(running.signal);
      } catch (error) {
        say(error.name === "AbortError" ? "Stopped: this turn is not part of the conversation." : error.message, true);
      }
      running = null;
      busy(false);
      refocus(focused);
    };
  }

  /* Keys go on where they were: a button that was disabled meanwhile, or made anew, has lost the focus. */
  function refocus(before) {
    const has = document.activeElement;
    if (has && has !== document.body && !has.disabled) return;
    const usable = before.isConnected && !before.disabled && before !== document.body;
    const next = usable ? before : before.isConnected ? at("text") : at("tree").querySelector("[aria-current]");
    if (next && before !== document.body) next.focus({ preventScroll: true });
  }

  function busy(on) {
    at("fork").disabled = on || !now;
    at("rewind").disabled = on || !now || !back;
    for (const one of at("tree").querySelectorAll("button")) one.disabled = on;  // a click would be lost
    at("send").disabled = at("new").disabled = on;
    at("stop").disabled = !on;
  }

  function add(role, text) {
    const line = document.createElement("p"), who = document.createElement("b"), said = document.createTextNode(visible(text));
    who.textContent = role === "user" ? "You" : role === "assistant" ? "Model" : role;
    line.append(who, said);
    line.dir = "auto";
    at("log").append(line);
    while (at("log").children.length > MOST_MESSAGES) at("log").firstChild.remove();
    at("log").scrollTop = at("log").scrollHeight;
    return said;
  }

  const fetched = (one) => Promise.all(["", "/positions"].map((part) => json("GET", "/v1/sessions/" + one.id + part)));

  const load = async () => show(await fetched(now));

  function show([card, found]) {
    at("log").replaceChildren();
    for (const one of card.messages.slice(-MOST_MESSAGES)) add(one.role, one.content);
    back = card.turns_to_rewind > 0;
    memory(found, card);
  }

  function memory(found, card) {
    const before = shown;
    pins = found.pins;
    shown = new Map(found.positions.map((place, i) => [place, { text: found.texts[i], share: found.shares[i] }]));
    const gone = [...before.keys()].filter((place) => !shown.has(place) && place < found.seen_tokens).slice(-MOST_GONE);
    const all = [...shown.keys(), ...gone].sort((one, other) => one - other);
    at("held").replaceChildren(...all.map((place) => {
      const span = document.createElement("span"), one = shown.get(place);
      span.textContent = visible((one || before.get(place)).text);
      span.style.setProperty("--share", one ? one.share : 0);
      span.className = one ? (pinned(place) ? "pinned" : "") : "gone";
      if (one) {
        span.id = "at" + place;
        span.dataset.place = place;
        span.setAttribute("role", "option");
        span.setAttribute("aria-selected", pinned(place));
      }
      span.title = "position " + place + (one ? ", held by " + Math.round(100 * one.share) + " % of the heads" : ", dropped");
      return span;
    }));
    mark(current);
    const slots = Math.min(found.budget, found.seen_tokens), fixed = pins.reduce((n, [a, b]) => n + b - a, 0);
    at("full").style.width = 100 * slots / found.budget + "%";
    at("pins").style.width = 100 * Math.min(1, fixed / found.budget) + "%";
    const sizes = `${slots} of ${found.budget} slots per head hold a conversation of ${found.seen_tokens} tokens; ` +
      `${card.kv_bytes.toLocaleString("en")} bytes, ${card.policy}`;
    at("sizes").textContent = sizes;
    at("bar").setAttribute("aria-label", sizes);
  }

  const pinned = (place) => pins.some(([start, stop]) => start <= place && place < stop);

  /* The token that the arrow keys have reached. */
  function mark(place) {
    const held = at("held"), found = place === null ? null : at("at" + place);
    held.querySelector(".current")?.classList.remove("current");
    current = found ? place : null;
    if (!found) return held.removeAttribute("aria-activedescendant");
    found.classList.add("current");
    held.setAttribute("aria-activedescendant", found.id);
    found.scrollIntoView({ block: "nearest" });
  }

  /* Pin the tokens from one to another that the memory holds, or let them go if the last one is pinned. */
  const pin = (from, to) => doing(async () => {
    const low = Math.min(from, to), high = Math.max(from, to) + 1, off = pinned(to);
    const rest = pins.flatMap(([start, stop]) => [[start, Math.min(stop, low)], [Math.max(start, high), stop]])
      .filter(([start, stop]) => start < stop);
    const places = [...shown.keys()].filter((place) => low <= place && place < high);
    const wanted = off ? rest : [...rest, ...places.map((place) => [place, place + 1])];
    await json("POST", `/v1/sessions/${now.id}/pin`, { pins: wanted });
    await load();
    anchor = to;
    mark(to);
  });

  function tree() {
    const list = (parent) => [...talks.values()].filter((one) => one.parent === parent).map((one) => {
      const item = document.createElement("li"), button = document.createElement("button");
      button.type = "button";
      button.textContent = one.name;
      button.disabled = running !== null;
      if (one === now) button.setAttribute("aria-current", "true");
      button.addEventListener("click", doing(() => go(one)));
      item.append(button);
      const inner = list(one.id);
      if (inner.length) {
        const below = document.createElement("ul");
        below.append(...inner);
        item.append(below);
      }
      return item;
    });
    at("tree").replaceChildren(...list(null));
  }

  /* Open a conversation. If that fails, the page stays with the one that it shows. */
  async function go(one) {
    const found = await fetched(one);
    now = one;
    current = anchor = null;
    shown = new Map();
    tree();
    show(found);
  }

  const made = (card, parent) => {
    const one = { id: card.id, parent, name: `${talks.size + 1}: ${card.policy}, ${card.budget}` };
    talks.set(card.id, one);
    tree();
    return one;
  };

  async function begin() {
    const body = { policy: at("policy").value || undefined, budget: Number(at("budget").value) || undefined };
    const pins = Number(at("pinned").value);
    if (pins > 0) body.pins = [[0, pins]];
    await go(made(await json("POST", "/v1/sessions", body), null));
    at("text").focus();
  }

  async function* events(answer) {
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let held = ""; ;) {
      const { value, done } = await reader.read();
      if (done) throw new Error("The server went away in the middle of the answer.");
      const parts = (held + value).split("\n\n");
      held = parts.pop();
      for (const one of parts) {
        if (one === "data: [DONE]") return;
        if (one.startsWith("data: {")) yield JSON.parse(one.slice(6));
      }
    }
  }

  async function ask(signal) {
    const text = at("text").value;
    if (!text.trim()) return;
    if (!now) await begin();
    const body = { session_id: now.id, messages: [{ role: "user", content: text }], stream: true };
    const asked = add("user", text), said = add("assistant", "");
    try {
      for await (const event of events(await call("POST", "/v1/chat/completions", body, signal))) {
        if (event.error) throw new Error(event.error.message);
        said.data += visible(event.choices[0]?.delta?.content || "");
        at("log").scrollTop = at("log").scrollHeight;
      }
      at("text").value = "";
    } catch (error) {
      for (const one of [asked, said]) one.parentNode?.remove();  // it is not part of the conversation
      throw error;
    } finally {
      await load();
    }
  }

  async function enter() {
    key = at("key").value;
    let card;
    try {
      card = (await json("GET", "/v1/models")).data[0];
    } catch (error) {
      if (error.status !== 401) throw error;
      at("entry").hidden = false;
      at("about").textContent = key ? error.message : "This server asks for a key.";
      at("key").focus();
      return;
    }
    at("entry").hidden = true;
    document.querySelector("main").hidden = false;
    at("about").textContent = `${card.id}: ${card.kvkeep.rows} conversations at once, each in the same memory`;
    at("policy").placeholder = card.kvkeep.policy;
    at("budget").placeholder = at("budget").max = card.kvkeep.budget;
    at("policies").replaceChildren(...card.kvkeep.policies.map((name) => new Option(name, name)));
    at("text").focus();
  }

  at("entry").addEventListener("submit", doing(enter));
  at("begin").addEventListener("submit", doing(begin));
  at("ask").addEventListener("submit", doing(ask));
  at("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) at("ask").requestSubmit(), event.preventDefault();
  });
  at("stop").addEventListener("click", () => running && running.abort());
  at("fork").addEventListener("click", doing(async () => go(made(await json("POST", `/v1/sessions/${now.id}/fork`, {}), now.id))));
  at("rewind").addEventListener("click", doing(async () => {
    await json("POST", `/v1/sessions/${now.id}/rewind`, {});
    await load();
  }));
  at("held").addEventListener("click", (event) => {
    const place = Number(event.target.dataset.place ?? NaN);
    if (!Number.isNaN(place)) pin(event.shiftKey && anchor !== null ? anchor : place, place)(event);
  });
  at("held").addEventListener("keydown", (event) => {
    const places = [...shown.keys()], i = places.indexOf(current), last = places.length - 1;
    const to = { ArrowRight: i + 1, ArrowDown: i + 1, ArrowLeft: i - 1, ArrowUp: i - 1, Home: 0, End: last }[event.key];
    if (to !== undefined && last >= 0) mark(places[Math.max(0, Math.min(last, to))]), event.preventDefault();
    if ((event.key === "Enter" || event.key === " ") && current !== null) pin(current, current)(event);
  });
  busy(false);
  enter().catch((error) => { at("about").textContent = error.message; });
})();
