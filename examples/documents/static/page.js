// The page: it asks the service once a second, and draws what has changed.

const one = (selector, within = document) => within.querySelector(selector);
const cards = new Map();

/** What the service answers; throws what is wrong, in words for people. */
async function ask(path, method = "GET", body) {
  const headers = body && { "content-type": "application/json" };
  let answer;
  try {
    answer = await fetch(path, { method, headers, body: body && JSON.stringify(body) });
  } catch {
    throw new Error("The service does not answer.");
  }
  const said = answer.headers.get("content-type")?.includes("json") ? await answer.json() : null;
  if (!answer.ok) throw new Error(said?.detail ?? `The service answers ${answer.status}.`);
  return said;
}

/** Write a text where it is not there yet, so that screen readers hear only of changes. */
function say(place, text) {
  if (place.textContent !== text) place.textContent = text;
}

function complain(place, text) {
  place.hidden = !text;
  say(place, text ?? "");
}

/** Do it with the button greyed; what goes wrong is shown in ``place``. */
async function attempt(button, place, work) {
  button.disabled = true;
  complain(place);
  try {
    await work();
  } catch (error) {
    complain(place, error.message);
  } finally {
    button.disabled = false;
    // A button that was greyed has lost the focus.
    if (document.activeElement === document.body) button.focus({ preventScroll: true });
  }
  await refresh();
}

// --- documents

const BADGES = { synced: "in search", syncing: "syncing…", failed: "failed" };

function age(time) {
  const seconds = Math.max(0, Math.round((Date.now() - new Date(time)) / 1000));
  if (seconds < 60) return "just now";
  return seconds < 3600 ? `${Math.floor(seconds / 60)} min ago` : new Date(time).toLocaleString();
}

class Card {
  constructor() {
    this.element = one("#document").content.cloneNode(true).firstElementChild;
    this.article = one("article", this.element);
    this.error = one(".error", this.element);
    this.why = "";
    one(".edit", this.element).onclick = () => this.edit();
    one(".delete", this.element).onclick = event => this.delete(event.target);
    one(".why", this.element).onclick = event => this.explain(event.target);
    one(".retry", this.element).onclick = event =>
      attempt(event.target, this.error, () => ask(`documents/${this.shown.id}/retry`, "POST"));
  }

  show(document) {
    this.shown = document;
    const { state, reason } = document.sync;
    if (state === "synced") this.why = "";
    say(one("h3", this.article), document.title);
    say(one(".body", this.article), document.body);
    say(one(".when", this.article), `version ${document.version}, ${age(document.updated_at)}`);
    const badge = one(".badge", this.article);
    badge.className = `badge ${state}`;
    say(badge, BADGES[state]);
    complain(one(".reason", this.article), this.why || reason);
    one(".why", this.article).hidden = state === "synced";
    one(".retry", this.article).hidden = state !== "failed";
    for (const name of ["edit", "delete"])
      one(`.${name}`, this.article).setAttribute("aria-label", `${name} ${document.title}`);
  }

  explain(button) {
    return attempt(button, this.error, async () => {
      this.why = (await ask(`documents/${this.shown.id}/why`)).why;
    });
  }

  edit() {
    const { id, title, body, version } = this.shown;
    this.form = one("#editing").content.cloneNode(true).firstElementChild;
    this.form.elements.title.value = title;
    this.form.elements.body.value = body;
    complain(this.error);
    this.article.hidden = true;
    this.element.prepend(this.form);
    this.form.elements.title.focus();
    one(".cancel", this.form).onclick = () => this.close();
    this.form.onkeydown = event => {
      if (event.key === "Escape") this.close();
    };
    this.form.onsubmit = event => {
      event.preventDefault();
      attempt(one(".main", this.form), this.error, async () => {
        const text = { title: this.form.elements.title.value, body: this.form.elements.body.value };
        const saved = await ask(`documents/${id}`, "PUT", { ...text, version });
        say(one("#told"), "Saved.");
        this.show({ ...saved, sync: { state: "syncing", reason: "" } });
        this.close();
      });
    };
  }

  close() {
    this.form.remove();
    this.form = null;
    complain(this.error);
    this.article.hidden = false;
    one(".edit", this.article).focus();
  }

  delete(button) {
    if (!confirm(`Delete “${this.shown.title}”?`)) return;
    setTimeout(() => this.form || complain(this.error), 8000);
    attempt(button, this.error, async () => {
      await ask(`documents/${this.shown.id}?version=${this.shown.version}`, "DELETE");
      say(one("#told"), "Deleted.");
      one("#new").elements.title.focus();
    });
  }
}

function draw(documents) {
  const list = one("#documents");
  const focused = document.activeElement;
  const there = new Set(documents.map(document => document.id));
  for (const [id, card] of cards) {
    // What somebody writes just now, or has to read, stays until they are done.
    if (there.has(id) || card.form || !card.error.hidden) continue;
    card.element.remove();
    cards.delete(id);
  }
  documents.forEach((document, place) => {
    const card = cards.get(document.id) ?? new Card();
    cards.set(document.id, card);
    // An answer from before an edit may come after it.
    if (!(card.shown?.version > document.version)) card.show(document);
    if (list.children[place] !== card.element && !card.form) list.insertBefore(card.element, list.children[place]);
  });
  // What was moved has lost the focus.
  if (focused !== document.activeElement) focused.focus({ preventScroll: true });
  one("#empty").hidden = list.children.length > 0;
}

one("#new").onsubmit = event => {
  event.preventDefault();
  const form = event.target;
  attempt(one(".main", form), one(".error", form), async () => {
    await ask("documents", "POST", { title: form.elements.title.value, body: form.elements.body.value });
    say(one("#told"), "Saved.");
    form.reset();
    form.elements.title.focus();
  });
};

// --- search

/** The text with the words in it marked. */
function marked(text, words) {
  const escaped = words.map(word => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  const parts = text.split(new RegExp(`((?<![\\p{L}\\p{N}])(?:${escaped.join("|")}))`, "giu"));
  return parts.map((part, at) => at % 2 ? Object.assign(document.createElement("mark"), { textContent: part }) : part);
}

/** The part of a text around the first of the words. */
function excerpt(text, words) {
  const at = Math.min(...words.map(word => text.toLowerCase().indexOf(word.toLowerCase())).filter(at => at >= 0));
  const from = Number.isFinite(at) && at > 60 ? text.lastIndexOf(" ", at - 40) + 1 : 0;
  return (from ? "… " : "") + text.slice(from, from + 180) + (text.length > from + 180 ? " …" : "");
}

let asked = 0;
let drawn = "";

async function find() {
  const number = ++asked;
  const q = one("#q").value.trim();
  const words = q.split(/\s+/).filter(Boolean);
  let hits = [];
  let text = "Type a word of a document.";
  let trouble = false;
  try {
    if (q) {
      hits = await ask(`search?q=${encodeURIComponent(q)}`);
      text = hits.length ? `${hits.length} found` : "Nothing found.";
    }
  } catch (error) {
    [text, trouble] = [error.message, true];
  }
  // Somebody has typed on meanwhile.
  if (number !== asked) return;
  one("#found").classList.toggle("trouble", trouble);
  say(one("#found"), text);
  if (drawn === JSON.stringify([q, hits])) return;
  drawn = JSON.stringify([q, hits]);
  one("#hits").replaceChildren(...hits.map(hit => {
    const item = one("#hit").content.cloneNode(true);
    one("h3", item).append(...marked(hit.title, words));
    one("p", item).append(...marked(excerpt(hit.body, words), words));
    return item;
  }));
}

let typed;
one("#q").oninput = () => {
  clearTimeout(typed);
  typed = setTimeout(find, 150);
};
one("#find").onsubmit = event => {
  event.preventDefault();
  find();
};

// --- the engine

const changes = number => number === 1 ? "1 change waits" : `${number} changes wait`;

function drawEngine({ name, up, waiting, failed, reason }) {
  const box = one("#engine");
  const held = waiting > 0 && reason !== "";
  box.dataset.state = !up ? "down" : waiting ? "busy" : "up";
  box.title = reason;
  const rest = waiting ? changes(waiting) : up ? "nothing waits" : "nothing waits yet";
  const lost = failed ? `, ${failed} failed` : "";
  say(one(".says", box), `${name} is ${up ? "up" : "down"}: ${rest}${lost}`);
  one(".resume", box).hidden = !(up && held);
}

one(".resume").onclick = event => attempt(event.target, one("#told"), () => ask("engine/resume", "POST"));

let seen = "";
let compared = "";

one(".compare button").onclick = event => {
  const result = one(".compare p");
  attempt(event.target, result, async () => {
    complain(result, "Comparing…");
    const { text } = await ask("compare", "POST");
    complain(result, text);
    compared = seen;
  });
};

/** What was compared is no longer what there is. */
function forgetComparison(documents, { up }) {
  seen = JSON.stringify([documents, up]);
  if (compared && compared !== seen) {
    complain(one(".compare p"));
    compared = "";
  }
}

// --- once a second

let going = false;

async function refresh() {
  if (going) return;
  going = true;
  try {
    const [documents, engine] = await Promise.all([ask("documents"), ask("engine")]);
    draw(documents);
    drawEngine(engine);
    forgetComparison(documents, engine);
    await find();
  } catch (error) {
    one("#engine").dataset.state = "down";
    say(one("#engine .says"), error.message);
  } finally {
    going = false;
  }
}

refresh();
setInterval(() => document.hidden || refresh(), 1000);
