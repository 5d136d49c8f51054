// Draws the document of a run: the one that a report holds, or the newest of run.json, every two seconds.
// All text becomes text nodes, never markup. What the reader opened stays open, what has the focus keeps it.
// The host's key comes behind the # of the address, which no server is sent.
"use strict";

const EVERY = 2000; // milliseconds between two questions
const SAY = 30000; // between two sentences to a screen reader
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]]; // curves differ by these as well as by colours,
const BORDERS = ["solid", "dashed", "dotted", "double"]; // and their marks in the legend by these
const main = document.querySelector("main");
const saved = document.getElementById("run");
const find = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en", { maximumSignificantDigits: 4, notation: "compact" });
const extreme = (value) => value !== 0 && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e15);
const exponent = (value) => Number(value.toPrecision(4)).toExponential();
const text = (value) => (value == null ? "" : extreme(value) ? exponent(value) : number.format(value));
const whole = (value) => (value == null ? "" : value.toLocaleString("en"));
let tag = "";
let said = 0; // when, and of which state
let state = "";
let asking = false; // one question at a time: a run elsewhere may take long to answer

function el(name, properties, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children.filter((child) => child != null));
  return made;
}

// ---- what a document has, by its kinds of blocks

const DRAW = {
  p: (said) => el("p", {}, ...said.split("`").map((part, i) => (i % 2 ? el("code", {}, part) : part))),
  ending: (said) => el("p", { className: "ending" }, said),
  code: (said) => el("pre", { tabIndex: 0, ariaLabel: "the recipe" }, el("code", {}, said)),
  figures: (given) => {
    const pairs = Object.entries(given).map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]);
    return el("dl", { className: "figures" }, ...pairs.map((pair) => el("div", {}, ...pair)));
  },
  table: ({ title, head, rows }) => {
    const cell = (text, i) => (i ? el("td", {}, text) : el("th", { scope: "row" }, text));
    const top = el("tr", {}, ...head.map((name) => el("th", { scope: "col" }, name)));
    const body = rows.map((row) => el("tr", {}, ...row.map(cell)));
    return el("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: title },
      el("table", {}, el("caption", {}, title), el("thead", {}, top), el("tbody", {}, ...body)));
  },
  sample: ([newest, ...earlier]) =>
    el("figure", { className: "sample" },
      el("figcaption", {}, `step ${whole(newest.step)}`),
      el("p", { className: "said" }, el("span", { className: "sub" }, newest.prompt), newest.text),
      newest.reference && el("p", { className: "sub" }, `The held-out text goes on: ${newest.reference}`),
      earlier.length ? more("Earlier", "The same at earlier steps", ["step", "text"],
        earlier.map((one) => [whole(one.step), one.text])) : null),
  bars: ({ title, said, rows, left, stop, ticks, stays }) =>
    el("figure", {},
      el("figcaption", {}, title),
      el("div", { className: "bars", role: "img", ariaLabel: `${title}. ${said}` },
        ...Object.entries(rows).map(([name, bars]) => el("div", {}, el("span", { title: name }, name),
          el("div", {}, ...bars.map((bar) => barOf(bar, stop))))),
        el("div", {}, el("span", {}, left ? `and ${left} more` : ""),
          el("div", { className: "ticks" }, ...ticks.map((tick) => el("span", {}, tick))))),
      more("The numbers", "Who came and went, newest first", ["peer", "joined", "left", "why"], stays)),
  chart: (given) => {
    const [xs, ...columns] = given.columns;
    const rows = xs.map((x, i) => [whole(x), ...columns.map((column) => text(column[i]))]);
    const box = { className: "chart", role: "img", ariaLabel: `${given.title}: ${given.said}`, given };
    return el("figure", {}, el("div", box), more("The numbers", given.title, given.names, rows));
  },
};

function more(summary, title, head, rows) {
  return el("details", {}, el("summary", {}, summary), DRAW.table({ title, head, rows }));
}

function barOf({ start, wide, title, look }, stop) {
  const made = el("i", { className: look, title });
  made.style.left = `${(100 * start) / stop}%`;
  made.style.width = `${(100 * wide) / stop}%`;
  return made;
}

// Charts are drawn once their boxes have a width, and again where that or the colours have changed.
function plotAll(again) {
  for (const box of document.querySelectorAll(".chart")) {
    if (!again && box.plot?.width === box.clientWidth) continue;
    box.plot?.destroy();
    box.plot = plot(box);
  }
}

function plot(box) {
  const { names, columns, zero, log, logX } = box.given;
  const colour = (name) => getComputedStyle(box).getPropertyValue(`--${name}`);
  const powers = { filter: (_, ticks) => ticks.map((at) => (Math.log10(at) % 1 ? null : at)) };
  const font = "13px system-ui, sans-serif";
  const grid = { stroke: colour("rule"), width: 1 };
  const axis = { font, labelFont: font, labelSize: 20, stroke: colour("ink"), grid, ticks: { show: false } };
  const range = (_, low, high) => uPlot.rangeNum(zero ? Math.min(low, 0) : low, high, 0.1, true);
  return new uPlot({
    width: box.clientWidth,
    height: 220,
    legend: { markers: { dash: (_, i) => BORDERS[i - 1] } },
    scales: { x: { time: false, distr: logX ? 3 : 1 }, y: log ? { distr: 3 } : { range } },
    axes: [
      { ...axis, label: names[0], size: 26, ...(logX && powers), values: (_, ticks) => ticks.map((x) => (x % 1 ? "" : text(x))) },
      { ...axis, grid: { ...grid, ...(log && powers) }, size: 60, values: (_, ticks) => ticks.map(text) },
    ],
    series: names.map((label, i) => (i ? {
      label, stroke: colour("abcd"[i - 1]), width: 2, dash: DASHES[i - 1], spanGaps: true,
      points: columns[i].filter((y) => y != null).length < 25 ? { show: true } : {}, value: (_, y) => text(y),
    } : { label, value: (_, x) => whole(x) })),
  }, columns, box);
}

// ---- the page

function draw(run) {
  document.title = run.headline;
  document.querySelector("h1").textContent = run.title;
  find("sub").textContent = run.sub;
  if (Date.now() - said > SAY || run.headline.split(",")[0] !== state) {
    find("said").textContent = run.headline;
    said = Date.now();
    state = run.headline.split(",")[0];
  }
  let after = null;
  for (const { title, blocks } of run.sections) {
    const id = title.toLowerCase().replaceAll(" ", "-");
    const drawn = blocks.map(([kind, given]) => DRAW[kind](given));
    const fresh = el("section", { id, ariaLabel: title }, el("h2", {}, title), ...drawn);
    const old = find(id);
    if (old) renew(old, fresh);
    else after ? after.after(fresh) : main.prepend(fresh);
    after = find(id);
  }
  plotAll(false);
}

// Makes an element like a fresh one, and leaves alone what is alike in it: what is open, scrolled, focused.
function renew(old, fresh) {
  const [parts, news] = [[...old.childNodes], [...fresh.childNodes]];
  const [was, is] = [old, fresh].map((one) => JSON.stringify(one.given));
  if (old.nodeName !== fresh.nodeName || !news.length) {
    if (was !== is || !(was || old.isEqualNode(fresh))) {
      old.plot?.destroy();
      old.replaceWith(fresh);
    }
    return;
  }
  if (fresh.ariaLabel) old.ariaLabel = fresh.ariaLabel;
  news.forEach((one, i) => (parts[i] ? renew(parts[i], one) : old.append(one)));
  parts.slice(news.length).forEach((one) => one.remove());
}

function tell(words) {
  if (find("notice").textContent !== words) find("notice").textContent = words;
  find("notice").hidden = words === "";
}

async function ask() {
  if (document.hidden || asking) return;
  asking = true;
  const answer = await fetch("run.json", { headers: { "If-None-Match": tag } }).catch(() => null);
  asking = false;
  if (!answer) tell("This page's program has ended or cannot be reached. What stands below may be old.");
  else if (answer.ok) {
    draw(await answer.json());
    tag = answer.headers.get("ETag");
    tell("");
  } else tell(answer.status === 304 ? "" : `${await answer.text()} What stands below may be old.`);
}

async function showJoin() {
  const given = new URLSearchParams(location.hash.slice(1)).get("key");
  if (given) {
    sessionStorage.setItem("key", given);
    history.replaceState(null, "", location.pathname); // a copied address is one to look at only
  }
  const key = sessionStorage.getItem("key");
  if (!key) return;
  const answer = await fetch("join", { headers: { Authorization: `Bearer ${key}` } });
  const line = await answer.text();
  if (!answer.ok || !line) return; // nobody can join now
  find("join-line").textContent = line;
  find("copy").addEventListener("click", () => copy(line));
  find("join").hidden = false;
}

async function copy(line) {
  try {
    await navigator.clipboard.writeText(line);
    find("copied").textContent = "Copied.";
  } catch {
    getSelection().selectAllChildren(find("join-line"));
    find("copied").textContent = "Selected: press Ctrl+C.";
  }
}

addEventListener("resize", () => plotAll(false));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plotAll(true));
if (saved) draw(JSON.parse(saved.textContent));
else {
  showJoin();
  ask();
  setInterval(ask, EVERY);
  document.addEventListener("visibilitychange", ask);
}
