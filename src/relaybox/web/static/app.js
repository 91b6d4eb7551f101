// Live updates, the time zone and the theme. Every page works without it.
"use strict";

const root = document.documentElement;
const prefix = document.querySelector('meta[name="relaybox-prefix"]').content;
const QUIET_MS = 15000; // Without news, charts and ages are fetched so often.
const ALONE_MS = 60000; // So long after a refused stream the next one is tried.

root.dataset.script = "on";

function remember(name, value) {
  const secure = location.protocol === "https:" ? "; secure" : "";
  document.cookie = `${name}=${value}; path=${prefix || "/"}; max-age=31536000; samesite=strict${secure}`;
}

// Moments are written in UTC; in the local zone where that is chosen.

function pad(number) {
  return String(number).padStart(2, "0");
}

function written(date, form, local) {
  const part = (name) => (local ? date[`get${name}`]() : date[`getUTC${name}`]());
  const clock = `${pad(part("Hours"))}:${pad(part("Minutes"))}`;
  if (form === "minute") return clock;
  if (form === "day") {
    const zone = local ? undefined : "UTC";
    return date.toLocaleDateString("en-GB", { day: "2-digit", month: "short", timeZone: zone });
  }
  const day = `${part("FullYear")}-${pad(part("Month") + 1)}-${pad(part("Date"))}`;
  return `${day} ${clock}:${pad(part("Seconds"))}`;
}

function localise(place) {
  const local = root.dataset.zone === "local";
  for (const element of place.querySelectorAll("[data-moment]")) {
    const date = new Date(element.dataset.moment);
    if (!Number.isNaN(date.getTime())) element.textContent = written(date, element.dataset.form, local);
  }
  for (const element of place.querySelectorAll("[data-zone-name]")) {
    element.textContent = local ? Intl.DateTimeFormat().resolvedOptions().timeZone : "UTC";
  }
}

// What is on the screen becomes what was fetched, element by element: focus, scroll and what was typed stay.

function same(one, other) {
  if (one.nodeType !== other.nodeType || one.nodeName !== other.nodeName) return false;
  return one.nodeType !== Node.ELEMENT_NODE || (one.dataset?.key ?? one.id) === (other.dataset?.key ?? other.id);
}

function morph(old, fresh) {
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
    return;
  }
  if (old.isEqualNode(fresh)) return;
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name) && name !== "open") old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) !== value && name !== "open") old.setAttribute(name, value);
  }
  morphChildren(old, fresh);
}

function morphChildren(old, fresh) {
  let next = old.firstChild;
  for (const wanted of [...fresh.childNodes]) {
    let found = next;
    while (found && !same(found, wanted)) found = found.nextSibling;
    if (!found) {
      old.insertBefore(document.importNode(wanted, true), next);
      continue;
    }
    if (found === next) next = next.nextSibling;
    else old.insertBefore(found, next);
    morph(found, wanted);
  }
  while (next) {
    const gone = next;
    next = next.nextSibling;
    gone.remove();
  }
}

const sign = document.getElementById("live");
const spoken = document.getElementById("spoken");

function show(state, words) {
  if (!sign) return;
  if (sign.dataset.state !== state) sign.dataset.state = state;
  if (sign.textContent !== words) sign.textContent = words;
}

function regions(place) {
  return [...place.querySelectorAll("[data-live]")];
}

function say() {
  const words = document.querySelector("[data-spoken]")?.dataset.spoken ?? "";
  if (spoken && words && spoken.textContent !== words) spoken.textContent = words;
}

function adopt(text) {
  const fresh = new DOMParser().parseFromString(text, "text/html");
  localise(fresh);
  const focused = document.activeElement;
  for (const region of regions(document)) {
    const replacement = fresh.getElementById(region.id);
    if (replacement) morph(region, replacement);
  }
  // What was moved to another place has lost it.
  if (document.activeElement !== focused && focused.isConnected) focused.focus({ preventScroll: true });
  say();
}

let fetching = false;
let again = false;
let rest = 0;
let timer = 0;

function later(milliseconds) {
  clearTimeout(timer);
  timer = setTimeout(refresh, milliseconds);
}

async function refresh() {
  if (document.hidden) return;
  const wait = rest - performance.now();
  if (fetching || wait > 0) {
    again = true;
    if (!fetching) later(wait);
    return;
  }
  fetching = true;
  again = false;
  const began = performance.now();
  try {
    const headers = { "x-relaybox-fragment": "1", accept: "text/html" };
    const answer = await fetch(location.href, { headers, redirect: "manual", cache: "no-store" });
    if (answer.ok) {
      adopt(await answer.text());
      show("on", "Live");
    } else {
      show("off", "Not updated: reload the page");
    }
  } catch {
    show("off", "Not updated: no connection");
  }
  // A server that is slow is asked less often.
  rest = performance.now() + Math.max(1000, 5 * (performance.now() - began));
  fetching = false;
  later(again ? 1000 : QUIET_MS);
}

let source = null;
let mark = null;

// Only while the page is seen: a browser has few connections to one host.
function listen() {
  if (source || document.hidden) return;
  source = new EventSource(`${prefix}/live?topic=stats`);
  source.addEventListener("open", () => show("on", "Live"));
  source.addEventListener("stats", (event) => {
    const news = JSON.parse(event.data);
    if (news.mark !== mark) refresh();
    mark = news.mark;
  });
  source.addEventListener("trouble", (event) => show("off", JSON.parse(event.data).reason));
  source.addEventListener("error", () => {
    if (source?.readyState !== EventSource.CLOSED) return;
    source = null;
    setTimeout(listen, ALONE_MS);
  });
}

function hush() {
  source?.close();
  source = null;
}

function look() {
  if (document.hidden) return hush();
  listen();
  refresh();
}

function toggle(id, names, current, act) {
  const button = document.getElementById(id);
  if (!button) return;
  const label = () => {
    button.textContent = names[current()];
  };
  button.hidden = false;
  button.addEventListener("click", () => {
    act();
    label();
  });
  label();
}

function dark() {
  const chosen = root.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

toggle("theme", { true: "Light theme", false: "Dark theme" }, dark, () => {
  root.dataset.theme = dark() ? "light" : "dark";
  remember("relaybox_theme", root.dataset.theme);
});

toggle("zone", { local: "Times in UTC", utc: "Local times" }, () => root.dataset.zone, () => {
  root.dataset.zone = root.dataset.zone === "local" ? "utc" : "local";
  remember("relaybox_zone", root.dataset.zone);
  localise(document);
});

// An action is sent once, however often its button is pressed.
document.addEventListener("submit", (event) => {
  const form = event.target;
  if (form.method !== "post") return;
  if (form.dataset.sent) event.preventDefault();
  form.dataset.sent = "yes";
});
addEventListener("pageshow", (event) => {
  if (event.persisted) location.reload();
});

localise(document);
if (regions(document).length) {
  document.addEventListener("visibilitychange", look);
  addEventListener("pagehide", hush);
  listen();
  later(QUIET_MS);
}
