// Asks for the run every two seconds and puts in the sections that have changed. What the reader opened stays
// open, what has the focus keeps it. The host's key comes behind the # of the address, which no server is sent.
"use strict";

const EVERY = 2000; // milliseconds between two questions
const SAY = 30000; // between two sentences to a screen reader
const main = document.querySelector("main");
const notice = document.getElementById("notice");
const was = new Map([...main.children].map((section) => [section.id, section.innerHTML])); // as it was sent
let tag = main.dataset.tag;
let said = 0;
let asking = false; // one question at a time: a run elsewhere may take long to answer

function takeKey() {
  const given = new URLSearchParams(location.hash.slice(1)).get("key");
  if (given) {
    sessionStorage.setItem("key", given);
    history.replaceState(null, "", location.pathname); // a copied address is one to look at only
  }
  return sessionStorage.getItem("key");
}

async function showJoin() {
  const key = takeKey();
  if (!key) return;
  const answer = await fetch("join", { headers: { Authorization: `Bearer ${key}` } });
  const line = await answer.text();
  if (!answer.ok || !line) return; // nobody can join now
  document.getElementById("join-line").textContent = line;
  document.getElementById("copy").addEventListener("click", () => copy(line));
  document.getElementById("join").hidden = false;
}

async function copy(line) {
  const done = document.getElementById("copied");
  try {
    await navigator.clipboard.writeText(line);
    done.textContent = "Copied.";
  } catch {
    getSelection().selectAllChildren(document.getElementById("join-line"));
    done.textContent = "Selected: press Ctrl+C.";
  }
}

async function renew() {
  if (document.hidden || asking) return;
  asking = true;
  try {
    const answer = await fetch("live", { headers: { "If-None-Match": tag } });
    if (answer.status === 304) return tell("");
    if (!answer.ok) return tell(`${await answer.text()} What stands below may be old.`);
    tag = answer.headers.get("ETag");
    put(new DOMParser().parseFromString(await answer.text(), "text/html"));
    tell("");
  } catch {
    tell("This page's program has ended or cannot be reached: what stands below is the last that was known.");
  } finally {
    asking = false;
  }
}

function tell(words) {
  if (notice.textContent !== words) notice.textContent = words;
  notice.hidden = words === "";
}

function put(fresh) {
  const line = fresh.querySelector("main").dataset.headline;
  document.title = line;
  if (Date.now() - said > SAY || line.split(",")[0] !== main.dataset.headline.split(",")[0]) {
    document.getElementById("said").textContent = line;
    said = Date.now();
  }
  main.dataset.headline = line;
  let after = null;
  for (const section of fresh.querySelectorAll("main > section")) {
    const old = document.getElementById(section.id);
    const html = section.innerHTML;
    if (!old) after ? after.after(section) : main.prepend(section);
    else if (was.get(section.id) !== html) replace(old, section);
    was.set(section.id, html);
    after = document.getElementById(section.id);
  }
}

function replace(old, section) {
  const focus = old.contains(document.activeElement) ? place(document.activeElement) : null;
  for (const open of old.querySelectorAll("details[open]")) {
    const again = section.querySelector(`#${open.id}`);
    if (again) again.open = true;
  }
  const boxes = [...old.querySelectorAll(".scroll, pre")].map((box) => [box.scrollLeft, box.scrollTop]);
  old.replaceWith(section);
  section.querySelectorAll(".scroll, pre").forEach((box, i) => box.scrollTo(...(boxes[i] ?? [0, 0])));
  if (focus) section.querySelectorAll(focus.kind)[focus.number]?.focus({ preventScroll: true });
}

function place(element) {
  const kind = element.localName;
  const number = [...element.closest("section").querySelectorAll(kind)].indexOf(element);
  return { kind, number };
}

showJoin();
setInterval(renew, EVERY);
document.addEventListener("visibilitychange", renew);
